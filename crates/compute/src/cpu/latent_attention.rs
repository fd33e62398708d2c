//! Causal multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form, for one token and for many.
//!
//! Cached are the latent c and the rotated key of each token, nothing a head. W_k is multiplied into the query once,
//! q̃ = W_kᵀ·q, so that q·(W_k·c) = q̃·c; W_v is applied to the weighted sum of latents. All heads then attend to the
//! same keys, whose first `rank` channels are the values, and a page is converted to f32 once for a block of rows and
//! heads. The price is more arithmetic per key than expanded heads would take, which long prompts feel; in return the
//! cache is small and a row's result does not depend on the batch: it visits pages in order, with one sequence of
//! operations whatever else runs.

use std::ops::Range;

use super::activations::Activations;
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::gathered::{Choices, Heads, KEY_BLOCK, Seen};
use super::head_group::{Ahead, HeadSums, KeyBlock, Queries};
use super::linear::CpuContext;
use super::matmul::{OutRows, Tokens, matmul_rows};
use super::pages::Pages;
use super::shared::SharedMut;
use super::vector;
use crate::backend::{KvType, PAGE_TOKENS, Span};
use crate::graph::{self, LatentAttention, LatentAttentionOp, LatentWeights};
use crate::quant::dequantize_row;
use crate::{Result, Tensor};

impl CpuOp for LatentAttentionOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (weights, graph::LatentInputs { q_nope, c, rotated, sinks, chosen }) =
            (self.weights, self.inputs);
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let [q_nope, c] = [q_nope, c].map(|value| cpu.values.of(value));
            let [q_rope, k_rope] =
                rotated.map(|both| both.map(|value| cpu.values.of(value))).unwrap_or_default();
            let choices = chosen.map(|how| Choices { how, blocks: cpu.values.of(how.blocks) });
            let sinks = sinks.map(|s| &cpu.vectors[s.0][..]);
            let seen = Seen { sinks, choices, by_distance: None };
            let inputs = LatentInputs { q_nope, q_rope, c, k_rope, seen, weights, tensors: &cpu.weights };
            let cache = &mut cpu.latent_caches[self.cache.0];
            cache.attend(&cpu.context, &mut cpu.latent, &inputs, call.batch.spans, out)
        })
    }
}

/// Rows whose queries are in latent form at once: bounds the scratch.
const ROWS: usize = 64;
/// Rows and heads that share a converted page.
const ROW_BLOCK: usize = 4;
const HEAD_BLOCK: usize = 8;

/// Pages of one layer: (PAGE_TOKENS, rank + rope), c and rotated key side by side.
#[derive(Debug)]
pub(crate) struct LatentCache {
    shape: LatentAttention,
    pub(super) pages: Pages,
}

/// Memory that layers share.
#[derive(Debug, Default)]
pub(crate) struct LatentScratch {
    /// (heads, rows, rank + rope): queries in the form of cached keys.
    queries: Vec<f32>,
    /// (heads, rows, rank): weighted sums of latents.
    mixed: Vec<f32>,
}

/// Bytes of scratch of a batch of `rows` rows on `threads` threads.
pub(crate) fn scratch_bytes(shape: &LatentAttention, rows: usize, threads: usize) -> usize {
    let LatentAttention { heads, nope, rope, rank, .. } = *shape;
    let queries_and_mixed = heads * rows.min(ROWS) * (2 * rank + rope);
    let absorbing = (nope + 1) * rank + ROWS * nope;
    let attending =
        PAGE_TOKENS.max(KEY_BLOCK + HEAD_BLOCK) * (rank + rope) + ROW_BLOCK * HEAD_BLOCK * (rank + 2);
    (queries_and_mixed + threads * absorbing.max(attending)) * size_of::<f32>()
}

/// What a layer reads, by row of the batch, and its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentInputs<'a> {
    /// (rows, heads · nope).
    pub(crate) q_nope: &'a [f32],
    /// (rows, heads · rope).
    pub(crate) q_rope: &'a [f32],
    /// (rows, rank).
    pub(crate) c: &'a [f32],
    /// (rows, rope).
    pub(crate) k_rope: &'a [f32],
    pub(super) seen: Seen<'a>,
    /// Which of `tensors` hold W_k and W_v.
    pub(crate) weights: LatentWeights,
    /// The graph's weights.
    pub(crate) tensors: &'a [Tensor],
}

/// What a task computes.
struct Part<'a> {
    /// (heads, rows of `all`, rank + rope).
    queries: &'a [f32],
    /// The rows that queries and results are of.
    all: &'a Range<usize>,
    block: &'a Block<'a>,
    heads: Range<usize>,
    /// (all heads).
    sinks: Option<&'a [f32]>,
}

/// Consecutive rows of one sequence.
struct Block<'a> {
    span: &'a Span<'a>,
    rows: Range<usize>,
}

impl LatentCache {
    pub(crate) fn new(shape: LatentAttention, kv_type: KvType) -> Self {
        let elements = PAGE_TOKENS * (shape.rank + shape.rope);
        Self { shape, pages: Pages::new(elements, kv_type) }
    }

    fn width(&self) -> usize {
        self.shape.rank + self.shape.rope
    }

    /// Stores a token's latent and rotated key.
    fn append(&mut self, page: usize, offset: usize, c: &[f32], k_rope: &[f32]) {
        let at = offset * self.width();
        self.pages.store(page, at, c);
        self.pages.store(page, at + self.shape.rank, k_rope);
    }

    /// Appends the batch's latents, then attends: `out` is (rows, heads · value).
    pub(crate) fn attend(
        &mut self,
        context: &CpuContext,
        scratch: &mut LatentScratch,
        inputs: &LatentInputs<'_>,
        spans: &[Span<'_>],
        out: &mut [f32],
    ) -> Result<()> {
        let LatentAttention { heads, rope, rank, value, .. } = self.shape;
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let page = span.pages[position / PAGE_TOKENS] as usize;
                let c = &inputs.c[row * rank..(row + 1) * rank];
                let k_rope = &inputs.k_rope[row * rope..(row + 1) * rope];
                self.append(page, position % PAGE_TOKENS, c, k_rope);
            }
        }
        let total = out.len() / (heads * value);
        let failure = std::sync::Mutex::new(None);
        let keep = |result: Result<()>| {
            if let (Err(error), Ok(mut failure)) = (result, failure.lock()) {
                *failure = Some(error);
            }
        };
        for start in (0..total).step_by(ROWS) {
            let rows = start..(start + ROWS).min(total);
            let count = rows.len();
            scratch.queries.resize(heads * count * (rank + rope), 0.0);
            scratch.mixed.resize(heads * count * rank, 0.0);
            let queries = SharedMut::new(&mut scratch.queries);
            context.pool.run(heads, &|head| {
                let len = count * (rank + rope);
                // SAFETY: a head's queries are one task's.
                let queries = unsafe { queries.part(head * len..(head + 1) * len) };
                keep(self.absorb(context, inputs, rows.clone(), head, queries));
            });
            // Rows with a choice of tokens share no keys.
            let block = if inputs.seen.choices.is_some() { 1 } else { ROW_BLOCK };
            let blocks = blocks(spans, &rows, block);
            let head_blocks = heads.div_ceil(HEAD_BLOCK);
            let mixed = SharedMut::new(&mut scratch.mixed);
            context.pool.run(blocks.len() * head_blocks, &|task| {
                let first = task % head_blocks * HEAD_BLOCK;
                let part = Part {
                    queries: &scratch.queries,
                    all: &rows,
                    block: &blocks[task / head_blocks],
                    heads: first..(first + HEAD_BLOCK).min(heads),
                    sinks: inputs.seen.sinks,
                };
                match inputs.seen.choices {
                    Some(choices) => self.mix_chosen(context, &part, choices, &mixed),
                    None => self.mix(context, &part, &mixed),
                }
            });
            let out = SharedMut::new(&mut out[start * heads * value..][..count * heads * value]);
            context.pool.run(heads, &|head| {
                let mixed = &scratch.mixed[head * count * rank..(head + 1) * count * rank];
                let (tensor, first) = match inputs.weights {
                    LatentWeights::Joint(id) => (id, head * (self.shape.nope + value) + self.shape.nope),
                    LatentWeights::Split { v, .. } => (v, head * value),
                };
                let weight = inputs.tensors[tensor.0].view().rows_range(first..first + value);
                // SAFETY: `out` is (count, heads · value), and a task writes only its head's columns.
                let out =
                    unsafe { OutRows::new(out.as_ptr().add(head * value), heads * value, count, value) };
                let x = Activations::F32 { rows: mixed, cols: rank };
                keep(matmul_rows(context.simd, weight, 0..value, x, Tokens::Range(0..count), out));
            });
        }
        failure.into_inner().ok().flatten().map_or(Ok(()), Err)
    }

    /// The queries of one head in the form of cached keys: `out` is (rows, rank + rope).
    fn absorb(
        &self,
        context: &CpuContext,
        inputs: &LatentInputs<'_>,
        rows: Range<usize>,
        head: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let LatentAttention { heads, nope, rope, rank, value, .. } = self.shape;
        let q_nope = |row: usize| &inputs.q_nope[(row * heads + head) * nope..][..nope];
        match inputs.weights {
            LatentWeights::Joint(id) => {
                let weight = inputs.tensors[id.0].view();
                let mut w_k = vec![0.0; nope * rank];
                for (i, row) in w_k.chunks_exact_mut(rank).enumerate() {
                    dequantize_row(weight, head * (nope + value) + i, row)?;
                }
                for (query, row) in out.chunks_exact_mut(rank + rope).zip(rows.clone()) {
                    query[..rank].fill(0.0);
                    for (q, w) in q_nope(row).iter().zip(w_k.chunks_exact(rank)) {
                        vector::axpy_f32(context.simd, *q, w, &mut query[..rank]);
                    }
                }
            }
            LatentWeights::Split { k, .. } => {
                let weight = inputs.tensors[k.0].view().rows_range(head * rank..(head + 1) * rank);
                let x: Vec<f32> = rows.clone().flat_map(q_nope).copied().collect();
                let x = Activations::F32 { rows: &x, cols: nope };
                // SAFETY: `out` is (rows, rank + rope), exclusively borrowed.
                let out = unsafe { OutRows::new(out.as_mut_ptr(), rank + rope, rows.len(), rank) };
                matmul_rows(context.simd, weight, 0..rank, x, Tokens::Range(0..rows.len()), out)?;
            }
        }
        for (query, row) in out.chunks_exact_mut(rank + rope).zip(rows) {
            query[rank..].copy_from_slice(&inputs.q_rope[(row * heads + head) * rope..][..rope]);
        }
        Ok(())
    }

    /// Weighted sums of the latents that a row's heads see.
    fn mix_chosen(
        &self,
        context: &CpuContext,
        part: &Part<'_>,
        choices: Choices<'_>,
        out: &SharedMut<'_, f32>,
    ) {
        let LatentAttention { rank, scale, .. } = self.shape;
        let Part { queries, all, block: Block { span, rows }, heads, sinks } = part;
        let (width, row) = (self.width(), rows.start);
        let position = span.start + (row - span.rows.start);
        let at = |head: usize| head * all.len() + row - all.start;
        let Some(positions) = choices.positions(row, position, 0) else {
            // SAFETY: a task writes only its row and heads.
            let own = |head: usize| unsafe { out.part(at(head) * rank..(at(head) + 1) * rank) };
            return heads.clone().for_each(|head| own(head).fill(f32::NAN));
        };
        let q: Vec<f32> = heads
            .clone()
            .flat_map(|head| &queries[at(head) * width..(at(head) + 1) * width])
            .copied()
            .collect();
        let load = |i: usize, key: &mut [f32], _: &mut [f32]| {
            let (page, offset) = (span.pages[positions[i] / PAGE_TOKENS], positions[i] % PAGE_TOKENS);
            self.pages.load(page as usize, offset * width, key);
        };
        let mut mixed = vec![0.0; heads.len() * rank];
        let sinks = sinks.map(|sinks| &sinks[heads.clone()]);
        let own = Heads { q: &q, dim: width, value_dim: rank, scale, sinks };
        own.attend(context.simd, positions.len(), false, load, &mut mixed);
        for (head, mixed) in heads.clone().zip(mixed.chunks_exact(rank)) {
            // SAFETY: a task writes only its row and heads.
            unsafe { out.part(at(head) * rank..(at(head) + 1) * rank) }.copy_from_slice(mixed);
        }
    }

    /// Weighted sums of latents for a block of rows and heads.
    fn mix(&self, context: &CpuContext, part: &Part<'_>, out: &SharedMut<'_, f32>) {
        let LatentAttention { rank, scale, .. } = self.shape;
        let Part { queries, all, block, heads, sinks } = part;
        let (simd, width, span) = (context.simd, self.width(), block.span);
        let position = |row: usize| span.start + (row - span.rows.start);
        let pairs = block.rows.len() * heads.len();
        let mut states = vec![(f32::NEG_INFINITY, 0.0f32); pairs];
        if let Some(sinks) = sinks {
            // As if a first key had this score and a value of zero.
            let sinks = sinks[heads.clone()].iter().cycle();
            states.iter_mut().zip(sinks).for_each(|(state, sink)| *state = (*sink, 1.0));
        }
        let mut sums = vec![0.0f32; pairs * rank];
        let mut scratch = vec![0.0; PAGE_TOKENS * width];
        let mut scores = vec![0.0f32; heads.len() * PAGE_TOKENS];
        let last = position(block.rows.end - 1) + 1;
        for page in 0..last.div_ceil(PAGE_TOKENS) {
            let start = page * PAGE_TOKENS;
            let count = (last - start).min(PAGE_TOKENS);
            let keys = self.pages.get(span.pages[page] as usize, 0..count * self.width(), &mut scratch);
            for (r, row) in block.rows.clone().enumerate() {
                let seen = (position(row) + 1).saturating_sub(start).min(count);
                if seen == 0 {
                    continue;
                }
                let own = r * heads.len()..(r + 1) * heads.len();
                let sums = &mut sums[own.start * rank..own.end * rank];
                let q = &queries[(heads.start * all.len() + row - all.start) * width..];
                let keys = &keys[..seen * width];
                HeadSums { states: &mut states[own], sums }.add(
                    simd,
                    Queries { q, stride: all.len() * width, dim: width, scale },
                    KeyBlock { keys, values: keys, stride: width },
                    &mut scores,
                    [Ahead::NONE; 2],
                );
            }
        }
        for (r, row) in block.rows.clone().enumerate() {
            for (h, head) in heads.clone().enumerate() {
                let pair = r * heads.len() + h;
                let at = (head * all.len() + row - all.start) * rank;
                // SAFETY: a task writes only its rows and heads.
                let out = unsafe { out.part(at..at + rank) };
                for (o, s) in out.iter_mut().zip(&sums[pair * rank..(pair + 1) * rank]) {
                    *o = s / states[pair].1;
                }
            }
        }
    }
}

/// The rows `rows` of the batch in blocks of one sequence each, of `size` rows at most.
fn blocks<'a>(spans: &'a [Span<'a>], rows: &Range<usize>, size: usize) -> Vec<Block<'a>> {
    let mut blocks = vec![];
    for span in spans {
        let (start, end) = (span.rows.start.max(rows.start), span.rows.end.min(rows.end));
        for first in (start..end).step_by(size) {
            blocks.push(Block { span, rows: first..(first + size).min(end) });
        }
    }
    blocks
}
