//! Causal grouped-query attention over paged keys and values.
//!
//! A task is a block of rows and one key-value head, so that a page is read from memory once for all query heads
//! and rows that share it. Softmax is computed online, page by page (Milakov & Gimelshein 2018; FlashAttention,
//! Dao et al. 2022). A row visits its pages in order whatever else is in the batch, so its result does not depend
//! on the batch.

use std::ops::Range;

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::gathered::{Choices, Heads, Seen};
use super::head_group::{Ahead, Element, HeadSums, KeyBlock, Queries, units};
use super::pages::{Pages, Values};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::Simd;
use crate::Result;
use crate::backend::{Batch, KvType, PAGE_TOKENS, Span};
use crate::graph::{Attention, AttentionOp};
use crate::profile::Work;

impl CpuOp for AttentionOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { q, k, v, cache, sinks, chosen, by_distance } = *self;
        call.batch.check_sees()?;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let (pool, simd) = (&cpu.context.pool, cpu.context.simd);
            let qkv = [q, k, v].map(|value| cpu.values.of(value));
            let choices = chosen.map(|how| Choices { how, blocks: cpu.values.of(how.blocks) });
            let by_distance = by_distance.map(|added| cpu.values.of(added));
            let seen = Seen { sinks: sinks.map(|s| &cpu.vectors[s.0][..]), choices, by_distance };
            cpu.caches[cache.0].attend(pool, simd, qkv, seen, call.batch, out);
            Ok(())
        })
    }
}

/// Rows that read a page one after the other.
const ROW_BLOCK: usize = 16;

/// Pages of one layer: keys (kv_heads, PAGE_TOKENS, head_dim), then values (kv_heads, PAGE_TOKENS, value_dim).
#[derive(Debug)]
pub(crate) struct KvCache {
    shape: Attention,
    pub(super) pages: Pages,
}

impl KvCache {
    pub(crate) fn new(shape: Attention, kv_type: KvType) -> Self {
        let elements = shape.kv_heads * PAGE_TOKENS * (shape.head_dim + shape.value_dim);
        Self { shape, pages: Pages::new(elements, kv_type) }
    }

    /// What attention of `rows` rows from position `start` on does. Rows of a block share what they read.
    pub(crate) fn work(&self, start: usize, rows: usize) -> Work {
        let Attention { heads, head_dim, value_dim, .. } = self.shape;
        let seen = |i: usize| crate::reference::visible(&self.shape, start + i, start + i);
        let flops: usize = (0..rows).map(|i| 2 * heads * (head_dim + value_dim) * seen(i).len()).sum();
        let read = |first: usize| seen((first + ROW_BLOCK).min(rows) - 1).end - seen(first).start;
        let positions: usize = (0..rows).step_by(ROW_BLOCK).map(read).sum();
        Work { bytes: (positions * self.pages.page_bytes() / PAGE_TOKENS) as u64, flops: flops as u64 }
    }

    /// Stores keys and values of all heads of a token.
    fn append(&mut self, page: usize, offset: usize, k: &[f32], v: &[f32]) {
        let Attention { kv_heads, head_dim, value_dim, .. } = self.shape;
        let keys = kv_heads * PAGE_TOKENS * head_dim;
        let heads = k.chunks_exact(head_dim).zip(v.chunks_exact(value_dim)).enumerate();
        for (head, (k, v)) in heads {
            let token = head * PAGE_TOKENS + offset;
            self.pages.store(page, token * head_dim, k);
            self.pages.store(page, keys + token * value_dim, v);
        }
    }

    /// Stores keys and values of all tokens of a batch.
    fn append_all(&mut self, [k, v]: [&[f32]; 2], spans: &[Span<'_>]) {
        let [k_width, v_width] =
            [self.shape.head_dim, self.shape.value_dim].map(|width| self.shape.kv_heads * width);
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let at = |width: usize| row * width..(row + 1) * width;
                let page = span.pages[position / PAGE_TOKENS] as usize;
                self.append(page, position % PAGE_TOKENS, &k[at(k_width)], &v[at(v_width)]);
            }
        }
    }

    /// A key and a value of one head as f32.
    fn load(&self, page: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        let keys = self.shape.kv_heads * PAGE_TOKENS * self.shape.head_dim;
        self.pages.load(page, token * key.len(), key);
        self.pages.load(page, keys + token * value.len(), value);
    }

    /// Attends to the tokens that are chosen for each query; else as [`KvCache::attend`].
    fn attend_chosen(
        &self,
        (pool, simd): (&ThreadPool, Simd),
        q: &[f32],
        (choices, sinks): (Choices<'_>, Option<&[f32]>),
        spans: &[Span<'_>],
        out: &mut [f32],
    ) {
        let Attention { heads, kv_heads, head_dim: dim, value_dim, scale, .. } = self.shape;
        let rows: Vec<(usize, usize, &Span<'_>)> = spans
            .iter()
            .flat_map(|span| span.rows.clone().enumerate().map(move |(i, row)| (row, span.start + i, span)))
            .collect();
        // Heads that read the same keys and see the same tokens.
        let (shared, seeing) = (heads / kv_heads, heads / choices.how.groups);
        let mut parts: Vec<Range<usize>> = vec![];
        for head in 0..heads {
            match parts.last_mut() {
                Some(last) if head % shared != 0 && head % seeing != 0 => last.end = head + 1,
                _ => parts.push(head..head + 1),
            }
        }
        let out = SharedMut::new(out);
        pool.run(rows.len() * parts.len(), &|task| {
            let (row, position, span) = rows[task / parts.len()];
            let part = parts[task % parts.len()].clone();
            let kv_head = part.start / shared;
            let first = row * heads;
            let at = (first + part.start) * value_dim..(first + part.end) * value_dim;
            // SAFETY: a task writes only its row's heads.
            let out = unsafe { out.part(at) };
            let Some(positions) = choices.positions(row, position, part.start / seeing) else {
                return out.fill(f32::NAN);
            };
            let load = |i: usize, key: &mut [f32], value: &mut [f32]| {
                let page = span.pages[positions[i] / PAGE_TOKENS] as usize;
                self.load(page, kv_head * PAGE_TOKENS + positions[i] % PAGE_TOKENS, key, value);
            };
            let q = &q[(first + part.start) * dim..(first + part.end) * dim];
            let heads = Heads { q, dim, value_dim, scale, sinks: sinks.map(|sinks| &sinks[part]) };
            heads.attend(simd, positions.len(), true, load, out);
        });
    }

    /// Appends k and v of the batch, then attends: q (rows, heads · head_dim) → out (rows, heads · value_dim).
    pub(super) fn attend(
        &mut self,
        pool: &ThreadPool,
        simd: Simd,
        [q, k, v]: [&[f32]; 3],
        Seen { sinks, choices, by_distance }: Seen<'_>,
        batch: &Batch<'_>,
        out: &mut [f32],
    ) {
        let spans = batch.spans;
        self.append_all([k, v], spans);
        if let Some(choices) = choices {
            return self.attend_chosen((pool, simd), q, (choices, sinks), spans, out);
        }
        let blocks: Vec<(&Span<'_>, Range<usize>)> = spans
            .iter()
            .flat_map(|span| {
                let starts = span.rows.clone().step_by(ROW_BLOCK);
                starts.map(move |row| (span, row..(row + ROW_BLOCK).min(span.rows.end)))
            })
            .collect();
        let (kv_heads, out) = (self.shape.kv_heads, SharedMut::new(out));
        let shape = &self.shape;
        pool.run(blocks.len() * kv_heads, &|task| {
            let (span, rows) = &blocks[task / kv_heads];
            let kv_head = task % kv_heads;
            let block = Block { shape, q, sinks, by_distance, batch, span, rows: rows.clone(), kv_head };
            match self.pages.values() {
                Values::F16(pages) => block.attend(simd, pages, &out),
                Values::F32(pages) => block.attend(simd, pages, &out),
                Values::Q8(pages) => block.attend(simd, pages, &out),
            }
        });
    }
}

/// All query heads of one key-value head, for a block of rows of one sequence.
struct Block<'a> {
    shape: &'a Attention,
    /// (rows of the batch, heads · head_dim), f32.
    q: &'a [f32],
    sinks: Option<&'a [f32]>,
    /// (rows of the batch, heads · extent), f32.
    by_distance: Option<&'a [f32]>,
    batch: &'a Batch<'a>,
    span: &'a Span<'a>,
    rows: Range<usize>,
    kv_head: usize,
}

impl Block<'_> {
    /// Adds to the `scores` (heads that share keys, keys) of a row what is said for the distances of the keys `seen`.
    fn add_by_distance(&self, row: usize, seen: Range<usize>, scores: &mut [f32]) {
        let Some(all) = self.by_distance else { return };
        let (heads, group) = (self.shape.heads, self.shape.heads / self.shape.kv_heads);
        let width = all.len() / self.batch.tokens.len();
        let extent = width / heads;
        let position = self.span.start + (row - self.span.rows.start);
        for (h, scores) in scores.chunks_exact_mut(seen.len()).enumerate() {
            let own = &all[row * width + (self.kv_head * group + h) * extent..][..extent];
            for (score, key) in scores.iter_mut().zip(seen.clone()) {
                *score += own.get(position - key).copied().unwrap_or(0.0);
            }
        }
    }

    fn attend<E: Element>(&self, simd: Simd, pages: &[Box<[E]>], out: &SharedMut<'_, f32>) {
        let Self { batch, span, q, kv_head, .. } = *self;
        let Attention { heads, kv_heads, head_dim: dim, value_dim, scale, .. } = *self.shape;
        let (rows, group) = (self.rows.clone(), heads / kv_heads);
        let visible = |row: usize| {
            let position = span.start + (row - span.rows.start);
            crate::reference::visible(self.shape, position, batch.sees(span, row))
        };
        let mut states = vec![(f32::NEG_INFINITY, 0.0f32); rows.len() * group];
        if let Some(sinks) = self.sinks {
            // As if a first key had this score and a value of zero.
            let sinks = sinks[kv_head * group..(kv_head + 1) * group].iter().cycle();
            states.iter_mut().zip(sinks).for_each(|(state, sink)| *state = (*sink, 1.0));
        }
        let mut sums = vec![0.0f32; rows.len() * group * value_dim];
        let mut scores = vec![0.0f32; group * PAGE_TOKENS];
        let first = visible(rows.start).start;
        let last = rows.clone().map(|row| visible(row).end).max().unwrap_or(0);
        let keys_of = |page: usize| {
            let n = PAGE_TOKENS.min(last - page * PAGE_TOKENS);
            let first = kv_head * PAGE_TOKENS;
            units(&pages[span.pages[page] as usize], first * dim..(first + n) * dim)
        };
        Ahead::fetch(keys_of(first / PAGE_TOKENS));
        for page in first / PAGE_TOKENS..last.div_ceil(PAGE_TOKENS) {
            let start = page * PAGE_TOKENS;
            let (keys, values) =
                pages[span.pages[page] as usize].split_at(kv_heads * PAGE_TOKENS * dim / E::LEN);
            let next_keys = if start + PAGE_TOKENS < last { keys_of(page + 1) } else { &[] };
            for (r, row) in rows.clone().enumerate() {
                let seen = visible(row);
                let seen = seen.start.max(start)..seen.end.min(start + PAGE_TOKENS);
                if seen.is_empty() {
                    continue;
                }
                let n = seen.len();
                let at = kv_head * PAGE_TOKENS + seen.start - start;
                let keys = units(keys, at * dim..(at + n) * dim);
                let values = units(values, at * value_dim..(at + n) * value_dim);
                let at = row * heads * dim + kv_head * group * dim;
                let q = &q[at..at + group * dim];
                // Later rows find what the first has fetched.
                let ahead = |next| if r == 0 { Ahead::of(next, n) } else { Ahead::NONE };
                let own = r * group..(r + 1) * group;
                let sums = &mut sums[own.start * value_dim..own.end * value_dim];
                HeadSums { states: &mut states[own], sums }.add_with(
                    simd,
                    Queries { q, stride: dim, dim, scale },
                    KeyBlock { keys, values, stride: value_dim },
                    &mut scores,
                    [ahead(values), ahead(next_keys)],
                    |scores| self.add_by_distance(row, seen.clone(), scores),
                );
            }
        }
        for (r, row) in rows.enumerate() {
            for h in 0..group {
                let at = (row * heads + kv_head * group + h) * value_dim;
                // SAFETY: a task writes only the heads of its rows and key-value head.
                let out = unsafe { out.part(at..at + value_dim) };
                let total = states[r * group + h].1;
                for (o, s) in out.iter_mut().zip(&sums[(r * group + h) * value_dim..][..value_dim]) {
                    *o = s / total;
                }
            }
        }
    }
}
