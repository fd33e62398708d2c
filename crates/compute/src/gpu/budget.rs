//! [`Budget`]: what a graph takes of a device's memory besides slots for experts, summed up before any of it is taken.
//!
//! Experts get what is left, so whatever is not counted here finds no memory later. Nothing is left out: every buffer that
//! [`GpuExecutable`](super::executable::GpuExecutable) takes, when it is made or when a sequence grows, has its line.

use super::compressed;
use super::experts;
use super::few_experts;
use super::inputs::{InputLayout, Turn};
use super::lower::scratch_bytes;
use super::ngrams;
use super::steps::Buffers;
use super::tensor_cores;
use super::weights::{ALIGNMENT, matrix_of, placed};
use crate::backend::{CompileOptions, PAGE_TOKENS, page_bytes, slot_bytes};
use crate::graph::{Graph, Op};
use crate::{Result, Tensor};

/// Entries that rows have room for, at least, where they choose some.
const MIN_ROOM: usize = 32;

/// Bytes that page numbers have at first.
pub(super) const PAGE_NUMBERS: usize = 256;

/// Bytes of device memory.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    /// Of each weight.
    pub(super) weights: Vec<u64>,
    /// Of everything else but slots for experts.
    pub(super) rest: u64,
    /// Entries that rows choose among have room for so many scores.
    pub(super) room: usize,
}

impl Budget {
    pub(super) fn new(
        graph: &Graph,
        tensors: &[Tensor],
        options: &CompileOptions,
        (buffers, turns): (&Buffers, &[Turn]),
        tensor_cores: bool,
    ) -> Result<Self> {
        let rows = options.max_rows.max(1);
        let positions =
            if options.positions > 0 { options.positions } else { compressed::positions(options.pages) };
        let room = compressed::room(graph, positions).max(MIN_ROOM);
        let mut all = vec![];
        all.extend(buffers.widths.iter().map(|width| width.saturating_mul(rows) * 4));
        let (attention, experts, buckets) = scratch_bytes(graph, rows);
        all.extend(attention.iter().chain(&experts).chain(&buckets));
        if tensor_cores {
            all.extend(tensor_cores::scratch_bytes(graph, rows));
        }
        all.extend(few_experts::scratch_bytes(graph, rows));
        for node in graph.nodes() {
            match &node.op {
                Op::Route(op) => all.extend([rows * op.route.top_k * 4; 2]),
                Op::NGramEmbed(op) => all.push(ngrams::bytes(&op.ngrams, op.tables.len())),
                _ => {}
            }
        }
        all.push(InputLayout::most_bytes(rows, &graph.ropes, turns));
        all.extend([compressed::chosen_bytes(graph, rows), compressed::score_bytes(room, rows)]);
        all.push(options.sequences.max(1).saturating_mul(graph.vocab_size() * 4));
        all.push(experts::table_bytes(graph));
        all.extend(page_number_bytes(options, positions));
        all.extend(state_bytes(graph, options));
        let rest = all.iter().fold(0u64, |sum, bytes| sum.saturating_add((*bytes).max(4) as u64));
        let bytes = |tensor: &Tensor| Ok(placed(matrix_of(tensor))?.0 as u64);
        let weights = tensors.iter().map(bytes).collect::<Result<_>>()?;
        Ok(Self { weights, rest: rest.saturating_add(ALIGNMENT as u64), room })
    }

    /// With those weights that are not `far`.
    pub(super) fn total(&self, far: &[bool]) -> u64 {
        let near = self.weights.iter().zip(far).filter(|(_, far)| !**far).map(|(bytes, _)| *bytes);
        near.fold(self.rest, u64::saturating_add)
    }
}

/// Of a batch's page numbers, before and after they grow: every sequence has those of all its positions.
fn page_number_bytes(options: &CompileOptions, positions: usize) -> [usize; 2] {
    let sequences = options.sequences.clamp(1, options.max_rows.max(1));
    let pages = sequences.saturating_mul(positions.div_ceil(PAGE_TOKENS));
    let grown = pages.saturating_mul(4).checked_next_power_of_two().unwrap_or(usize::MAX);
    [PAGE_NUMBERS, if grown > PAGE_NUMBERS { grown } else { 0 }]
}

/// Of pages and states: all that there will be, the one of each that is there before, and the largest of their buffers once
/// more, which is copied when it grows.
fn state_bytes(graph: &Graph, options: &CompileOptions) -> Vec<usize> {
    let (page, slot) = (page_bytes(graph, options.kv_type), slot_bytes(graph));
    let item = options.kv_type.bytes();
    let caches = graph.caches().iter().map(|c| c.kv_heads * PAGE_TOKENS * c.head_dim.max(c.value_dim));
    let latents = graph.latent_caches().iter().map(|c| (c.rank + c.rope) * PAGE_TOKENS);
    let compressed = graph.compressed_caches().iter().map(|c| c.page_elements());
    let largest_page = caches.chain(latents).chain(compressed).max().unwrap_or(0) * item;
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
