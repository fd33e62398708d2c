//! Attention over recent tokens and over entries: see [`crate::graph::CompressedAttention`].
//!
//! A row's entries are chosen first, in parallel by row and block of entries; then tasks of a row and a block of heads
//! convert what the row sees to f32 once for all their heads. A row visits tokens, then entries, in order whatever else
//! is in the batch, so its result does not depend on the batch.

use super::choose_blocks::best;
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::gathered::KEY_BLOCK;
use super::head_group::{Ahead, HeadSums, KeyBlock, Queries};
use super::linear::CpuContext;
use super::pages::Pages;
use super::shared::SharedMut;
use super::values::Values;
use super::vector;
use crate::Result;
use crate::backend::{KvType, PAGE_TOKENS, Span};
use crate::graph::{CompressedAttention, CompressedAttentionOp, CompressedInputs, IndexInputs, TokenForm};

impl CpuOp for CompressedAttentionOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let CompressedInputs { q, kv, entries, index, sinks } = self.inputs;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let inputs = CompressedRows {
                q: cpu.values.of(q),
                kv: cpu.values.of(kv),
                entries: cpu.values.of(entries),
                index: index.map(|index| IndexRows::of(&cpu.values, index)),
                sinks: &cpu.vectors[sinks.0],
            };
            cpu.compressed_caches[self.cache.0].attend(&cpu.context, inputs, call.batch.spans, out);
            Ok(())
        })
    }
}

impl<'a> IndexRows<'a> {
    /// What an index compares.
    pub(crate) fn of(values: &'a Values, inputs: IndexInputs) -> Self {
        let IndexInputs { q, k, weights } = inputs;
        Self { q: values.of(q), k: values.of(k), weights: weights.map(|weights| values.of(weights)) }
    }
}

/// Heads of a task.
const HEAD_BLOCK: usize = 16;
/// Entries of a task of the index.
const ENTRY_BLOCK: usize = 256;
/// Scores that are kept at once, where queries have fewer each.
const SCORES: usize = 1 << 20;

/// Pages of one layer: tokens (PAGE_TOKENS, head_dim), then entries with their keys for the index.
#[derive(Debug)]
pub(crate) struct CompressedCache {
    pub(super) shape: CompressedAttention,
    pub(super) pages: Pages,
}

/// What a layer reads, by row of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompressedRows<'a> {
    /// (rows, heads · head_dim).
    pub(crate) q: &'a [f32],
    /// (rows, head_dim).
    pub(crate) kv: &'a [f32],
    /// (rows, head_dim).
    pub(crate) entries: &'a [f32],
    /// For the choice of entries.
    pub(crate) index: Option<IndexRows<'a>>,
    /// (heads).
    pub(crate) sinks: &'a [f32],
}

/// What an index reads, by row of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexRows<'a> {
    /// (rows, heads · head_dim).
    pub(crate) q: &'a [f32],
    /// (rows, head_dim).
    pub(crate) k: &'a [f32],
    /// (rows, heads); ones when absent.
    pub(crate) weights: Option<&'a [f32]>,
}

/// A row of the batch in its sequence.
#[derive(Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) row: usize,
    pub(super) position: usize,
    pub(super) pages: &'a [u32],
}

/// Bytes of scratch of `threads` threads on batches of `rows` rows.
pub(crate) fn scratch_bytes(shape: &CompressedAttention, rows: usize, threads: usize) -> usize {
    let chosen = shape.index.map_or(0, |index| index.top_k);
    let scores = if shape.index.is_some() { SCORES } else { 0 };
    let attending = match shape.form {
        TokenForm::Shared => KEY_BLOCK * shape.head_dim + HEAD_BLOCK * (shape.window + chosen),
        TokenForm::Grouped { .. } => 2 * KEY_BLOCK * shape.head_dim,
        TokenForm::Elsewhere => 0,
    };
    (rows.saturating_mul(chosen) + scores + threads * attending).saturating_mul(size_of::<f32>())
}

impl CompressedCache {
    pub(crate) fn new(shape: CompressedAttention, kv_type: KvType) -> Self {
        Self { shape, pages: Pages::new(shape.page_elements(), kv_type) }
    }

    /// Page and first element of a token.
    pub(super) fn token(&self, pages: &[u32], position: usize) -> (usize, usize) {
        (pages[position / PAGE_TOKENS] as usize, position % PAGE_TOKENS * self.shape.token_width())
    }

    /// Page and first element of an entry, which its key for the index follows.
    pub(super) fn entry(&self, pages: &[u32], entry: usize) -> (usize, usize) {
        let (page, place) = self.shape.place(entry);
        (pages[page] as usize, PAGE_TOKENS * self.shape.token_width() + place * self.shape.entry_width())
    }

    /// Appends the batch's tokens and entries, then attends: `out` is (rows, heads · head_dim).
    pub(crate) fn attend(
        &mut self,
        context: &CpuContext,
        rows: CompressedRows<'_>,
        spans: &[Span<'_>],
        out: &mut [f32],
    ) {
        let (shape, dim) = (self.shape, self.shape.head_dim);
        let mut queries = vec![];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let (page, at) = self.token(span.pages, position);
                self.pages.store(page, at, &rows.kv[row * dim..(row + 1) * dim]);
                if (position + 1).is_multiple_of(shape.stride) {
                    let (page, at) = self.entry(span.pages, shape.entries(position) - 1);
                    self.pages.store(page, at, &rows.entries[row * dim..(row + 1) * dim]);
                    if let (Some(index), Some(IndexRows { k, .. })) = (shape.index, rows.index) {
                        let k = &k[row * index.head_dim..(row + 1) * index.head_dim];
                        self.pages.store(page, at + dim, k);
                    }
                }
                queries.push(Query { row, position, pages: span.pages });
            }
        }
        let chosen = self.choose(context, rows.index, &queries);
        let head_blocks = shape.heads.div_ceil(HEAD_BLOCK);
        let out = SharedMut::new(out);
        context.pool.run(queries.len() * head_blocks, &|task| {
            let (query, block) = (queries[task / head_blocks], task % head_blocks);
            let heads = block * HEAD_BLOCK..((block + 1) * HEAD_BLOCK).min(shape.heads);
            let at = query.row * shape.heads * dim;
            // SAFETY: a task writes only its row's heads.
            let out = unsafe { out.part(at + heads.start * dim..at + heads.end * dim) };
            let entries = chosen[task / head_blocks].as_deref();
            self.mix(context, &rows, query, entries, heads.start, out);
        });
    }

    /// The entries of each query, ascending; `None` where all that end before it are.
    pub(super) fn choose(
        &self,
        context: &CpuContext,
        rows: Option<IndexRows<'_>>,
        queries: &[Query<'_>],
    ) -> Vec<Option<Vec<u32>>> {
        let (Some(index), Some(IndexRows { q, weights, .. })) = (self.shape.index, rows) else {
            return vec![None; queries.len()];
        };
        let mut chosen = vec![None; queries.len()];
        let entries = |query: &Query<'_>| self.shape.entries(query.position);
        let choosing: Vec<usize> =
            (0..queries.len()).filter(|i| entries(&queries[*i]) > index.top_k).collect();
        let most = choosing.iter().map(|i| entries(&queries[*i])).max().unwrap_or(1);
        for some in choosing.chunks((SCORES / most).max(1)) {
            let counts: Vec<usize> = some.iter().map(|i| entries(&queries[*i])).collect();
            let scores = self.scores(context, (q, weights.unwrap_or(&[])), some, queries);
            let mut rest = &scores[..];
            for (i, count) in some.iter().zip(counts) {
                let (own, after) = rest.split_at(count);
                chosen[*i] = Some(best(own, index.top_k));
                rest = after;
            }
        }
        chosen
    }

    /// Scores of the entries that `some` queries may see, one query after the other; the weights of heads are ones if
    /// there are none.
    fn scores(
        &self,
        context: &CpuContext,
        (q, weights): (&[f32], &[f32]),
        some: &[usize],
        queries: &[Query<'_>],
    ) -> Vec<f32> {
        let index = self.shape.index.expect("checked by the caller");
        let ones = vec![1.0; index.heads];
        let mut start = 0;
        let mut parts = vec![];
        for i in some {
            let count = self.shape.entries(queries[*i].position);
            parts.extend((0..count).step_by(ENTRY_BLOCK).map(|first| (*i, first, start, count)));
            start += count;
        }
        let mut scores = vec![0.0f32; start];
        let shared = SharedMut::new(&mut scores);
        let factor = ((index.head_dim * index.heads) as f32).sqrt().recip();
        context.pool.run(parts.len(), &|task| {
            let (i, first, start, count) = parts[task];
            let query = queries[i];
            let last = (first + ENTRY_BLOCK).min(count);
            // SAFETY: a task's entries of its query are its own.
            let scores = unsafe { shared.part(start + first..start + last) };
            let width = index.heads * index.head_dim;
            let q = &q[query.row * width..(query.row + 1) * width];
            let own = query.row * index.heads..(query.row + 1) * index.heads;
            let weights = weights.get(own).unwrap_or(&ones[..]);
            let mut key = vec![0.0; index.head_dim];
            for (score, entry) in scores.iter_mut().zip(first..last) {
                let (page, at) = self.entry(query.pages, entry);
                self.pages.load(page, at + self.shape.entry_key(), &mut key);
                for (q, weight) in q.chunks_exact(index.head_dim).zip(weights) {
                    let product = vector::dot_f32(context.simd, q, &key);
                    // `max` would drop a NaN.
                    let product = if product < 0.0 { 0.0 } else { product };
                    *score += weight * product;
                }
                *score *= factor;
            }
        });
        scores
    }

    /// Heads from `first_head` on of one row, as many as `out` has.
    fn mix(
        &self,
        context: &CpuContext,
        rows: &CompressedRows<'_>,
        query: Query<'_>,
        entries: Option<&[u32]>,
        first_head: usize,
        out: &mut [f32],
    ) {
        let (shape, dim, simd) = (&self.shape, self.shape.head_dim, context.simd);
        let first = (query.position + 1).saturating_sub(shape.window);
        let tokens = query.position + 1 - first;
        let count = tokens + entries.map_or_else(|| shape.entries(query.position), <[u32]>::len);
        let heads = out.len() / dim;
        let q = &rows.q[(query.row * shape.heads + first_head) * dim..][..heads * dim];
        let mut keys = vec![0.0; KEY_BLOCK.min(count) * dim];
        // Keys `from` to `to` of those that the row sees.
        let load = |from: usize, to: usize, keys: &mut [f32]| {
            for (key, i) in keys.chunks_exact_mut(dim).zip(from..to) {
                let (page, at) = match i.checked_sub(tokens) {
                    None => self.token(query.pages, first + i),
                    Some(i) => self.entry(query.pages, entries.map_or(i, |chosen| chosen[i] as usize)),
                };
                self.pages.load(page, at, key);
            }
        };
        let mut states: Vec<(f32, f32)> =
            rows.sinks[first_head..first_head + heads].iter().map(|sink| (*sink, 1.0)).collect();
        let mut scores = vec![0.0f32; heads * KEY_BLOCK];
        out.fill(0.0);
        for from in (0..count).step_by(KEY_BLOCK) {
            let to = (from + KEY_BLOCK).min(count);
            load(from, to, &mut keys);
            let keys = &keys[..(to - from) * dim];
            HeadSums { states: &mut states, sums: out }.add(
                simd,
                Queries { q, stride: dim, dim, scale: shape.scale },
                KeyBlock { keys, values: keys, stride: dim },
                &mut scores,
                [Ahead::NONE; 2],
            );
        }
        for (out, (_, total)) in out.chunks_exact_mut(dim).zip(states) {
            out.iter_mut().for_each(|o| *o /= total);
        }
    }
}
