//! [`Needs`]: what a graph takes of a device's memory besides slots for experts, and [`Budget`]: how the memory is divided.
//!
//! Experts get what is left, so whatever is not counted here finds no memory later. Nothing is left out: every buffer that
//! [`Memory`](super::Memory) takes, when it is made or when a sequence grows, has its line.

use super::expert_layout::{all_bytes, held_bytes, least_bytes, most_chosen};
use super::experts::{Room, table_bytes};
use super::held::{Exchange, Held};
use super::inputs::{InputLayout, STEPWISE_ROWS, Turn};
use super::state::unpacked_elements;
use super::weights::{ALIGNMENT, placed};
use super::{low_rank, ngrams, scratch};
use crate::backend::{CompileOptions, KvType, PAGE_TOKENS, page_bytes, slot_bytes};
use crate::gpu::device::DeviceInfo;
use crate::gpu::options::GpuOptions;
use crate::gpu::run::DRAW_ROW_BYTES;
use crate::gpu::steps::Buffers;
use crate::graph::{EmbedOp, Graph, LinearOp, Op, WeightId, WeightSpec};
use crate::{Error, Result};

/// Device memory that is left alone when all that is free may be used: for modules, recordings and the driver.
const MARGIN: u64 = 512 << 20;
/// Entries that rows have room for, at least, where they choose some.
const MIN_ROOM: usize = 32;
/// Bytes of page numbers, to begin with.
pub(super) const PAGE_NUMBER_BYTES: usize = 256;

/// Bytes of device memory that a graph takes.
#[derive(Debug, Clone)]
pub(super) struct Needs {
    /// Of each weight.
    weights: Vec<u64>,
    /// Of everything else but slots for experts.
    rest: u64,
    /// Of slots for all experts that the device is to have, and the least that do.
    experts: u64,
    least: u64,
    /// Scores that a row has room for.
    pub(super) room: usize,
}

impl Needs {
    pub(super) fn new(
        graph: &Graph,
        options: &CompileOptions,
        (buffers, turns): (&Buffers, &[Turn]),
        tensor_cores: bool,
        held: Held,
    ) -> Result<Self> {
        let rows = options.max_rows.max(1);
        let positions =
            if options.positions > 0 { options.positions } else { scratch::positions(options.pages) };
        let room = scratch::score_room(graph, positions).max(MIN_ROOM);
        let mut all = scratch::buffer_bytes(graph, rows, tensor_cores, room);
        all.extend(buffers.widths.iter().map(|width| width.saturating_mul(rows) * 4));
        for node in graph.nodes() {
            match &node.op {
                Op::Route(op) => all.extend([rows * op.route.top_k * 4; 2]),
                Op::NGramEmbed(op) => all.push(ngrams::bytes(&op.ngrams, op.tables.len())),
                _ => {}
            }
        }
        if low_rank::adapters(graph) > 0 {
            all.extend(low_rank::bytes(graph, rows));
        }
        all.push(InputLayout::most_bytes(rows, graph, turns));
        all.push(logits_bytes(graph, options));
        all.push(outputs(options).saturating_mul(DRAW_ROW_BYTES));
        all.push(table_bytes(graph));
        let (experts, mut least) = (held_bytes(graph, held)?, least_bytes(graph)?);
        if held.is_part() {
            all.extend(Exchange::bytes(scratch::output_bytes(graph, rows)));
            least = experts;
        }
        all.extend(page_number_bytes(options, positions));
        all.extend(state_bytes(graph, options));
        all.extend(unpacked_bytes(graph, options, tensor_cores));
        let rest = all.iter().fold(0u64, |sum, bytes| sum.saturating_add((*bytes).max(4) as u64));
        let bytes = |weight: &WeightSpec| Ok(placed(weight.matrix)?.0 as u64);
        let weights = graph.weights().iter().map(bytes).collect::<Result<_>>()?;
        Ok(Self { weights, rest: rest.saturating_add(ALIGNMENT as u64), experts, least, room })
    }

    /// With those weights that are not `far`.
    fn total(&self, far: &[bool]) -> u64 {
        let near = self.weights.iter().zip(far).filter(|(_, far)| !**far).map(|(bytes, _)| *bytes);
        near.fold(self.rest, u64::saturating_add)
    }
}

/// How device memory is divided.
pub(super) struct Budget {
    /// Which weights stay in host memory.
    pub(super) far: Vec<bool>,
    pub(super) experts: Room,
}

impl Budget {
    /// # Errors
    /// [`Error::DeviceMemory`] if there is too little for the graph.
    pub(super) fn new(
        info: &DeviceInfo,
        graph: &Graph,
        needs: &Needs,
        options: &CompileOptions,
        gpu: &GpuOptions,
    ) -> Result<Self> {
        let total = usable(info, gpu.memory);
        let far = far(graph, needs, total, options, gpu);
        let taken = needs.total(&far);
        let wanted = taken.saturating_add(needs.least);
        if gpu.expert_slots.is_none() && total < wanted {
            return Err(Error::DeviceMemory { device: info.name.clone(), wanted, free: total });
        }
        let experts = match gpu.expert_slots {
            Some(slots) => Room::Slots(slots),
            None => {
                let budget = total.saturating_sub(taken).min(info.largest_buffer);
                Room::Bytes { budget, minimum: most_chosen(graph) }
            }
        };
        Ok(Self { far, experts })
    }
}

/// Bytes that may be taken of a device's memory, of which `limit` is given.
pub(crate) fn usable(info: &DeviceInfo, limit: Option<u64>) -> u64 {
    limit.unwrap_or(info.free.saturating_sub(MARGIN))
}

/// Bytes of device memory that hold all of a graph, with all experts that the device is to have.
pub(super) fn whole_memory(needs: &Needs) -> u64 {
    needs.total(&vec![false; needs.weights.len()]).saturating_add(needs.experts)
}

/// Bytes of what a graph has alone: its weights, all experts, all pages and states; nothing of what batches need.
pub(crate) fn own_bytes(graph: &Graph, options: &CompileOptions) -> Result<u64> {
    let bytes = |weight: &WeightSpec| Ok(placed(weight.matrix)?.0 as u64);
    let weights: u64 = graph.weights().iter().map(bytes).sum::<Result<_>>()?;
    let pages = options.pages.saturating_mul(page_bytes(graph, options.kv_type));
    let slots = options.state_slots.saturating_mul(slot_bytes(graph));
    Ok(weights.saturating_add(all_bytes(graph)?).saturating_add(pages.saturating_add(slots) as u64))
}

/// The least device memory that a graph needs, in bytes.
pub(super) fn least_memory(graph: &Graph, needs: &Needs, options: &CompileOptions, gpu: &GpuOptions) -> u64 {
    needs.total(&far(graph, needs, 0, options, gpu)).saturating_add(needs.least)
}

/// Which weights stay in host memory. Of a table of embeddings a token needs a row: where `total` bytes of device memory do
/// not hold all experts, some more of them are worth more. What reads a model's rows has a copy of the model's table, for which
/// there is nothing in the budget of host memory.
fn far(graph: &Graph, needs: &Needs, total: u64, options: &CompileOptions, gpu: &GpuOptions) -> Vec<bool> {
    let weights = needs.weights.len();
    let taken = needs.total(&vec![false; weights]);
    let crowded = options.keep_experts
        && gpu.host_memory
        && graph.input_rows().next().is_none()
        && (gpu.expert_slots.is_some() || total < taken.saturating_add(needs.experts));
    (0..weights).map(|w| crowded && only_embeds(graph, WeightId(w))).collect()
}

/// Whether a weight is a table of embeddings, and no product's too.
fn only_embeds(graph: &Graph, weight: WeightId) -> bool {
    let embeds = |op: &Op| matches!(*op, Op::Embed(EmbedOp { table }) if table == weight);
    let multiplies = |op: &Op| matches!(*op, Op::Linear(LinearOp { weight: own, .. }) if own == weight);
    let mut ops = graph.nodes().iter().map(|node| &node.op);
    ops.clone().any(embeds) && !ops.any(multiplies)
}

/// Rows of logits that tokens are chosen from again and again: those after all sequences, or after a few rows of one.
fn outputs(options: &CompileOptions) -> usize {
    options.outputs.min(STEPWISE_ROWS).max(options.sequences).max(1)
}

/// Of the logits that next tokens are chosen from.
pub(super) fn logits_bytes(graph: &Graph, options: &CompileOptions) -> usize {
    outputs(options).saturating_mul(graph.vocab_size() * 4)
}

/// Of a batch's page numbers, before and after they grow for the last time, to twice as many at least: every sequence has those of all
/// its positions.
fn page_number_bytes(options: &CompileOptions, positions: usize) -> [usize; 2] {
    let sequences = options.sequences.clamp(1, options.max_rows.max(1));
    let pages = sequences.saturating_mul(positions.div_ceil(PAGE_TOKENS));
    let grown = pages.saturating_mul(4).checked_next_power_of_two().unwrap_or(usize::MAX);
    if grown > PAGE_NUMBER_BYTES { [PAGE_NUMBER_BYTES.max(grown / 2), grown] } else { [PAGE_NUMBER_BYTES, 0] }
}

/// Of pages and states: all that there will be, the one of each that is there before, and the largest of their buffers once
/// more, which is copied when it grows.
fn state_bytes(graph: &Graph, options: &CompileOptions) -> Vec<usize> {
    let (page, slot) = (page_bytes(graph, options.kv_type), slot_bytes(graph));
    let caches = graph.caches().iter().map(|c| c.kv_heads * PAGE_TOKENS * c.head_dim.max(c.value_dim));
    let latents = graph.latent_caches().iter().map(|c| (c.rank + c.rope) * PAGE_TOKENS);
    let compressed = graph.compressed_caches().iter().map(|c| c.page_elements());
    let largest_page = caches.chain(latents).chain(compressed).max().unwrap_or(0);
    let largest_page = options.kv_type.bytes(largest_page);
    let largest_slot = graph.states().iter().max().copied().unwrap_or(0) * size_of::<f32>();
    // Buffers of no bytes have four.
    let buffers = 2 * graph.caches().len()
        + graph.latent_caches().len()
        + graph.compressed_caches().len()
        + graph.states().len();
    let growing =
        options.pages.saturating_mul(largest_page).max(options.state_slots.saturating_mul(largest_slot));
    vec![
        options.pages.saturating_mul(page),
        options.state_slots.saturating_mul(slot),
        page + slot + 4 * buffers,
        growing,
    ]
}

/// Of pages of a layer as f16: all, and the one of each pool that is there before.
fn unpacked_bytes(graph: &Graph, options: &CompileOptions, tensor_cores: bool) -> Vec<usize> {
    let pages = unpacked_elements(graph, options.kv_type, tensor_cores);
    let pages = pages.into_iter().map(|elements| KvType::F16.bytes(elements));
    pages.map(|page| options.pages.max(1).saturating_mul(page)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page numbers grow as sequences do, to the next power of two, beside those before.
    #[test]
    fn page_numbers_have_room_to_grow_at_any_length() {
        for pages in 1..2000 {
            let options = CompileOptions { sequences: 1, ..CompileOptions::default() };
            let budget: usize = page_number_bytes(&options, pages * PAGE_TOKENS).iter().sum();
            let mut held = PAGE_NUMBER_BYTES;
            for wanted in (1..=pages).map(|pages| 4 * pages) {
                if wanted > held {
                    let grown = wanted.next_power_of_two();
                    assert!(
                        held + grown <= budget,
                        "{wanted} of {pages} pages: {held} and {grown} of {budget}"
                    );
                    held = grown;
                }
            }
            assert!(held <= budget, "{pages} pages");
        }
    }
}
