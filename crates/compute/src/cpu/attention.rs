//! Causal grouped-query attention over paged keys and values.
//!
//! A task is a block of rows and one key-value head, so that a page is read from memory once for all query heads
//! and rows that share it. Softmax is computed online, page by page (Milakov & Gimelshein 2018; FlashAttention,
//! Dao et al. 2022). A row visits its pages in order whatever else is in the batch, so its result does not depend
//! on the batch.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::gathered::{Choices, Heads, Seen};
use super::head_group::{Element, Scores, WeightedSums};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::Simd;
use super::vector;
use crate::backend::{KvType, PAGE_TOKENS, Span};
use crate::graph::Attention;
use crate::profile::Work;

/// Rows that read a page one after the other.
const ROW_BLOCK: usize = 16;

/// Pages of one layer: keys (kv_heads, PAGE_TOKENS, head_dim) and values (kv_heads, PAGE_TOKENS, value_dim).
#[derive(Debug)]
pub(crate) struct KvCache {
    shape: Attention,
    pages: Pages,
}

#[derive(Debug)]
enum Pages {
    F16(Vec<[Box<[f16]>; 2]>),
    F32(Vec<[Box<[f32]>; 2]>),
}

impl KvCache {
    pub(crate) fn new(shape: Attention, kv_type: KvType) -> Self {
        let pages = match kv_type {
            KvType::F16 => Pages::F16(vec![]),
            KvType::F32 => Pages::F32(vec![]),
        };
        Self { shape, pages }
    }

    pub(crate) fn reserve(&mut self, count: usize) {
        let Attention { kv_heads, head_dim, value_dim, .. } = self.shape;
        let elements = [head_dim, value_dim].map(|width| kv_heads * PAGE_TOKENS * width);
        match &mut self.pages {
            Pages::F16(pages) => {
                let page = || elements.map(|n| vec![f16::ZERO; n].into_boxed_slice());
                pages.resize_with(count.max(pages.len()), page);
            }
            Pages::F32(pages) => {
                let page = || elements.map(|n| vec![0.0; n].into_boxed_slice());
                pages.resize_with(count.max(pages.len()), page);
            }
        }
    }

    /// Bytes of one page.
    pub(crate) fn page_bytes(&self) -> usize {
        let kv_type = match self.pages {
            Pages::F16(_) => KvType::F16,
            Pages::F32(_) => KvType::F32,
        };
        let Attention { kv_heads, head_dim, value_dim, .. } = self.shape;
        kv_heads * PAGE_TOKENS * (head_dim + value_dim) * kv_type.bytes()
    }

    /// What attention of `rows` rows from position `start` on does. Rows of a block share what they read.
    pub(crate) fn work(&self, start: usize, rows: usize) -> Work {
        let Attention { heads, head_dim, value_dim, .. } = self.shape;
        let seen = |i: usize| crate::reference::visible(&self.shape, start + i);
        let flops: usize = (0..rows).map(|i| 2 * heads * (head_dim + value_dim) * seen(i).len()).sum();
        let read = |first: usize| seen((first + ROW_BLOCK).min(rows) - 1).end - seen(first).start;
        let positions: usize = (0..rows).step_by(ROW_BLOCK).map(read).sum();
        Work { bytes: (positions * self.page_bytes() / PAGE_TOKENS) as u64, flops: flops as u64 }
    }

    /// Appends a page to `out`: keys, then values, little-endian.
    pub(crate) fn read_page(&self, page: usize, out: &mut Vec<u8>) {
        match &self.pages {
            Pages::F16(pages) => {
                out.extend(pages[page].iter().flat_map(|p| p.iter()).flat_map(|v| v.to_le_bytes()));
            }
            Pages::F32(pages) => {
                out.extend(pages[page].iter().flat_map(|p| p.iter()).flat_map(|v| v.to_le_bytes()));
            }
        }
    }

    /// Replaces a page by what [`KvCache::read_page`] gave: [`KvCache::page_bytes`] bytes.
    pub(crate) fn write_page(&mut self, page: usize, bytes: &[u8]) {
        match &mut self.pages {
            Pages::F16(pages) => {
                let values = pages[page].iter_mut().flat_map(|p| p.iter_mut());
                values.zip(bytes.chunks_exact(2)).for_each(|(v, b)| *v = f16::from_le_bytes([b[0], b[1]]));
            }
            Pages::F32(pages) => {
                let values = pages[page].iter_mut().flat_map(|p| p.iter_mut());
                let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                values.zip(bytes.chunks_exact(4)).for_each(|(v, b)| *v = value(b));
            }
        }
    }

    /// Stores keys and values of all heads of a token.
    fn append(&mut self, page: usize, offset: usize, k: &[f32], v: &[f32]) {
        for head in 0..self.shape.kv_heads {
            let part = |width: usize| {
                let at = (head * PAGE_TOKENS + offset) * width;
                (head * width..(head + 1) * width, at..at + width)
            };
            let [(k_from, k_to), (v_from, v_to)] = [self.shape.head_dim, self.shape.value_dim].map(part);
            match &mut self.pages {
                Pages::F16(pages) => {
                    let [keys, values] = &mut pages[page];
                    keys[k_to].convert_from_f32_slice(&k[k_from]);
                    values[v_to].convert_from_f32_slice(&v[v_from]);
                }
                Pages::F32(pages) => {
                    let [keys, values] = &mut pages[page];
                    keys[k_to].copy_from_slice(&k[k_from]);
                    values[v_to].copy_from_slice(&v[v_from]);
                }
            }
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
    fn load(&self, page: usize, row: usize, key: &mut [f32], value: &mut [f32]) {
        let (from, to) = (row * key.len()..(row + 1) * key.len(), row * value.len()..(row + 1) * value.len());
        match &self.pages {
            Pages::F16(pages) => {
                let [keys, values] = &pages[page];
                keys[from].convert_to_f32_slice(key);
                values[to].convert_to_f32_slice(value);
            }
            Pages::F32(pages) => {
                let [keys, values] = &pages[page];
                key.copy_from_slice(&keys[from]);
                value.copy_from_slice(&values[to]);
            }
        }
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
        Seen { sinks, choices }: Seen<'_>,
        spans: &[Span<'_>],
        out: &mut [f32],
    ) {
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
            let block = Block { shape, q, sinks, span, rows: rows.clone(), kv_head: task % kv_heads };
            match &self.pages {
                Pages::F16(pages) => block.attend(simd, pages, &out),
                Pages::F32(pages) => block.attend(simd, pages, &out),
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
    span: &'a Span<'a>,
    rows: Range<usize>,
    kv_head: usize,
}

impl Block<'_> {
    fn attend<E: Element>(&self, simd: Simd, pages: &[[Box<[E]>; 2]], out: &SharedMut<'_, f32>) {
        let Self { span, q, kv_head, .. } = *self;
        let Attention { heads, kv_heads, head_dim: dim, value_dim, scale, .. } = *self.shape;
        let (rows, group) = (self.rows.clone(), heads / kv_heads);
        let visible =
            |row: usize| crate::reference::visible(self.shape, span.start + (row - span.rows.start));
        let mut states = vec![(f32::NEG_INFINITY, 0.0f32); rows.len() * group];
        if let Some(sinks) = self.sinks {
            // As if a first key had this score and a value of zero.
            let sinks = sinks[kv_head * group..(kv_head + 1) * group].iter().cycle();
            states.iter_mut().zip(sinks).for_each(|(state, sink)| *state = (*sink, 1.0));
        }
        let mut sums = vec![0.0f32; rows.len() * group * value_dim];
        let mut scores = vec![0.0f32; group * PAGE_TOKENS];
        let (first, last) = (visible(rows.start).start, visible(rows.end - 1).end);
        for page in first / PAGE_TOKENS..last.div_ceil(PAGE_TOKENS) {
            let start = page * PAGE_TOKENS;
            let [keys, values] = &pages[span.pages[page] as usize];
            for (r, row) in rows.clone().enumerate() {
                let seen = visible(row);
                let seen = seen.start.max(start)..seen.end.min(start + PAGE_TOKENS);
                if seen.is_empty() {
                    continue;
                }
                let n = seen.len();
                let at = kv_head * PAGE_TOKENS + seen.start - start;
                let (keys, values) =
                    (&keys[at * dim..(at + n) * dim], &values[at * value_dim..(at + n) * value_dim]);
                let at = row * heads * dim + kv_head * group * dim;
                let (q, weights) = (&q[at..at + group * dim], &mut scores[..group * n]);
                simd.run(Scores { q, keys, dim, scale, out: weights });
                let sums = &mut sums[r * group * value_dim..(r + 1) * group * value_dim];
                for (h, weights) in weights.chunks_exact_mut(n).enumerate() {
                    let (max, total) = &mut states[r * group + h];
                    let new_max = max.max(vector::max(simd, weights));
                    if new_max > *max {
                        let shrink = (*max - new_max).exp();
                        vector::scale(simd, shrink, &mut sums[h * value_dim..(h + 1) * value_dim]);
                        (*max, *total) = (new_max, *total * shrink);
                    }
                    *total += vector::exp_sum(simd, new_max, weights);
                }
                simd.run(WeightedSums { weights, values, dim: value_dim, sums });
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
