//! Memory of a graph on a device: weights, values, states, experts, and what batches bring.
//!
//! What is needed is known before anything big is allocated; what is left is for experts.

mod budget;
mod division;
mod exchange;
mod expert_layout;
mod experts;
mod hand_over;
mod held;
mod inputs;
mod logits;
mod low_rank;
mod ngrams;
mod scratch;
mod state;
mod tiers;
mod weights;

use std::collections::HashMap;

use budget::{Budget, Needs, PAGE_NUMBER_BYTES, logits_bytes};
pub(super) use budget::{own_bytes, usable};
pub(super) use division::{Size, divide};
use expert_layout::largest_bytes;
pub(super) use expert_layout::{ExpertMatrix, all_bytes, device_keeps_experts};
pub(super) use experts::DeviceExperts;
pub(super) use hand_over::HandOver;
pub(super) use held::{Exchange, Held, MOST_HOLDERS};
pub(super) use inputs::{
    Adapted, BATCH_ROWS, Band, Ending, FEW_ROWS, FEW_ROWS_BESIDE_PANELS, Given, InputLayout, PANEL_ROWS,
    PANEL_ROWS_BESIDE_WIDE, STEPWISE_ROWS, Shape, Turn, WIDE_ROWS, sees_ahead,
};
use inputs::{page_numbers, turns};
use logits::Logits;
use low_rank::LowRankUpdates;
pub(super) use low_rank::{Updates, adapts_experts, is_plain};
pub(super) use ngrams::{NGramTable, PART_BYTES};
pub(super) use scratch::{
    AttentionScratch, BATCH_PAIRS, BatchScratch, BucketScratch, ExpertScratch, MOST_TILED_EXPERTS,
    PANEL_COLUMNS, PANEL_TILE, PANEL_TOKENS, PanelScratch, QuantizedScratch, SCALED_COLUMNS, TENSOR_TILE,
    TILE, TensorScratch, device_scratch_bytes, f16_bytes, most_batch_tiles, most_blocks, most_panel_tiles,
    most_places, most_tiles, output_bytes, scored_rows, suits_warp_groups, unpacked_bytes,
};
use scratch::{IndexScratch, Scratch};
use state::State;
pub(super) use tiers::{MOST_FORESEEN, Shelf, Tiers};
pub(super) use weights::{ALIGNMENT, DeviceWeight};

use super::device::{BufferId, Device, DeviceInfo};
use super::options::GpuOptions;
use super::steps::Buffers;
use crate::backend::{ActivationMode, Batch, CompileOptions};
use crate::graph::{Graph, Op, RouteOp, StateId};
use crate::{Result, Tensor};

/// A buffer that is replaced by a larger one when it is too small.
#[derive(Debug, Clone, Copy)]
pub(super) struct Growing {
    pub(super) buffer: BufferId,
    bytes: usize,
}

/// Ids and weights of a routing.
#[derive(Debug, Clone, Copy)]
pub(super) struct RoutingBuffers {
    /// (rows, top_k), u32.
    pub(super) ids: BufferId,
    /// (rows, top_k), f32.
    pub(super) weights: BufferId,
}

/// What a graph has of a device, and what of the device decides how kernels are chosen.
pub(super) struct Memory {
    pub(super) info: DeviceInfo,
    pub(super) activations: ActivationMode,
    /// Whether a row's result may not depend on how many others there are, as far as products make it so.
    pub(super) batch_invariant: bool,
    pub(super) weights: Vec<DeviceWeight>,
    /// Of the values that steps write, as [`Buffers`] says.
    pub(super) values: Vec<BufferId>,
    pub(super) routings: Vec<RoutingBuffers>,
    pub(super) state: State,
    pub(super) experts: DeviceExperts,
    /// Where other devices hold a part of the experts.
    pub(super) exchange: Option<Exchange>,
    pub(super) scratch: Scratch,
    pub(super) ngrams: HashMap<StateId, NGramTable>,
    /// What adapters add, if the graph has some.
    pub(super) low_rank: Option<LowRankUpdates>,
    /// Of the inputs' angles.
    pub(super) turns: Vec<Turn>,
    pub(super) inputs: BufferId,
    pub(super) page_numbers: Growing,
    pub(super) logits: Logits,
    /// What the device's page numbers are.
    held_pages: Vec<u8>,
    pub(super) max_rows: usize,
}

/// Whether products take a device's matrix units.
fn multiplies_tiles(info: &DeviceInfo, options: &CompileOptions) -> bool {
    info.tensor_cores && options.activations == ActivationMode::Int8
}

/// The least memory of a device that a graph can be compiled with, in bytes.
///
/// # Errors
/// [`crate::Error::RowLength`] if an encoding cannot store a weight's rows.
pub(super) fn least_memory(
    info: &DeviceInfo,
    graph: &Graph,
    buffers: &Buffers,
    options: &CompileOptions,
    gpu: &GpuOptions,
) -> Result<u64> {
    let tensor_cores = multiplies_tiles(info, options);
    let needs = Needs::new(graph, options, (buffers, &turns(graph)), tensor_cores, Held::ALL)?;
    Ok(budget::least_memory(graph, &needs, options, gpu))
}

/// Bytes of a device's memory that hold all of a graph, with the `held` experts.
///
/// # Errors
/// As [`least_memory`].
pub(super) fn whole_memory(
    info: &DeviceInfo,
    graph: &Graph,
    buffers: &Buffers,
    options: &CompileOptions,
    held: Held,
) -> Result<u64> {
    let tensor_cores = multiplies_tiles(info, options);
    let needs = Needs::new(graph, options, (buffers, &turns(graph)), tensor_cores, held)?;
    Ok(budget::whole_memory(&needs))
}

/// What a graph takes of a device's memory, with the least and with all of its experts.
///
/// # Errors
/// As [`least_memory`].
pub(super) fn size(
    info: &DeviceInfo,
    graph: &Graph,
    buffers: &Buffers,
    options: &CompileOptions,
    gpu: &GpuOptions,
) -> Result<Size> {
    Ok(Size {
        least: least_memory(info, graph, buffers, options, gpu)?,
        whole: whole_memory(info, graph, buffers, options, Held::ALL)?,
        experts: all_bytes(graph)?,
        expert: largest_bytes(graph)?,
    })
}

impl Memory {
    /// Takes memory for a graph with the `held` experts, and gives the device its weights.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(super) fn new(
        device: &mut dyn Device,
        (graph, held): (&Graph, Held),
        buffers: &Buffers,
        tensors: &[Tensor],
        options: &CompileOptions,
        gpu: &GpuOptions,
    ) -> Result<Self> {
        let rows = options.max_rows.max(1);
        let info = device.info();
        let turns = turns(graph);
        let tensor_cores = multiplies_tiles(&info, options);
        let needs = Needs::new(graph, options, (buffers, &turns), tensor_cores, held)?;
        let budget = Budget::new(&info, graph, &needs, options, gpu)?;
        let weights = weights::upload(device, tensors, &budget.far, &low_rank::weights(graph))?;
        let values = buffers.widths.iter().map(|width| device.alloc((width * rows * 4).max(4)));
        let values = values.collect::<Result<_>>()?;
        let scratch = Scratch::new(device, graph, rows, tensor_cores, needs.room)?;
        let mut alloc = |bytes: usize| device.alloc(bytes.max(4));
        let mut routings = vec![];
        for node in &graph.nodes {
            if let Op::Route(RouteOp { route, .. }) = node.op {
                let bytes = rows * route.top_k * 4;
                routings.push(RoutingBuffers { ids: alloc(bytes)?, weights: alloc(bytes)? });
            }
        }
        let inputs = alloc(InputLayout::most_bytes(rows, graph, &turns))?;
        let page_numbers = Growing { buffer: alloc(PAGE_NUMBER_BYTES)?, bytes: PAGE_NUMBER_BYTES };
        let logits = Logits::new(device, logits_bytes(graph, options))?;
        let ngrams = ngrams::upload(device, graph, &weights)?;
        let low_rank = LowRankUpdates::new(device, graph, &weights, rows)?;
        let state = State::new(device, graph, options.kv_type, tensor_cores)?;
        let keep = options.keep_experts && gpu.host_memory && device_keeps_experts(graph);
        let experts = DeviceExperts::new(device, graph, (budget.experts, held), keep)?;
        let outputs = scratch.experts.outputs;
        let exchange = held.is_part().then(|| {
            let bytes = scratch::output_bytes(graph, rows);
            Exchange::new(device, held, outputs, bytes)
        });
        let exchange = exchange.transpose()?;
        Ok(Self {
            batch_invariant: gpu.batch_invariant,
            info,
            activations: options.activations,
            weights,
            values,
            routings,
            state,
            experts,
            exchange,
            scratch,
            ngrams,
            low_rank,
            turns,
            inputs,
            page_numbers,
            logits,
            held_pages: vec![],
            max_rows: rows,
        })
    }

    /// Uploads what the batch is; true if buffers have moved, as they grow when they are too small.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(super) fn set_inputs(
        &mut self,
        device: &mut dyn Device,
        graph: &Graph,
        batch: &Batch<'_>,
        shape: &Shape,
    ) -> Result<bool> {
        let pages = page_numbers(batch);
        let logits = if shape.ending == Ending::Logits { shape.outputs * graph.vocab_size() * 4 } else { 0 };
        let moved = [
            self.grow_page_numbers(device, pages.len())?,
            self.logits.reserve(device, logits)?,
            self.grow_scores(device, graph, batch)?,
        ];
        let layout = InputLayout::new(shape, &graph.ropes, &self.turns, self.makes_angles(shape.rows));
        let inputs = layout.pack(batch, shape, &graph.ropes, &self.turns);
        device.upload(self.inputs.into(), &inputs)?;
        if !self.held_pages.starts_with(&pages) {
            device.upload(self.page_numbers.buffer.into(), &pages)?;
            self.held_pages = pages;
        }
        Ok(moved.contains(&true))
    }

    /// Whether the device makes the angles of batches of so many rows, which takes a dispatch. Rows that are to have the bits that
    /// they have alone get the host's.
    pub(super) fn makes_angles(&self, rows: usize) -> bool {
        rows > if self.batch_invariant { BATCH_ROWS } else { FEW_ROWS }
    }

    fn grow_page_numbers(&mut self, device: &mut dyn Device, wanted: usize) -> Result<bool> {
        if wanted <= self.page_numbers.bytes {
            return Ok(false);
        }
        let bytes = wanted.next_power_of_two();
        let grown = Growing { buffer: device.alloc(bytes)?, bytes };
        device.free(self.page_numbers.buffer);
        self.page_numbers = grown;
        self.held_pages.clear();
        Ok(true)
    }

    /// Makes scores of entries have room for all that the batch's rows may choose among.
    fn grow_scores(&mut self, device: &mut dyn Device, graph: &Graph, batch: &Batch<'_>) -> Result<bool> {
        let longest = batch.spans.iter().map(|s| s.start + s.rows.len()).max().unwrap_or(0);
        let room = scratch::score_room(graph, longest);
        let index = self.scratch.index;
        if room <= index.room {
            return Ok(false);
        }
        let room = room.next_power_of_two();
        let scores = device.alloc(scratch::score_bytes(room, self.max_rows))?;
        device.free(index.scores);
        self.scratch.index = IndexScratch { scores, room, ..index };
        Ok(true)
    }
}
