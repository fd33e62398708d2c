//! Attention over the tokens of chosen windows: see [`crate::graph::GraphBuilder::block_attention`].
//!
//! A task is a row and a key-value head: it converts the keys and values that the row sees to f32 once for all query heads
//! of that head. A row visits tokens in order of their positions whatever else is in the batch, so its result does not
//! depend on the batch.

use super::compressed_attention::{CompressedCache, IndexRows, Query};
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::gathered::Heads;
use super::linear::CpuContext;
use super::shared::SharedMut;
use crate::Result;
use crate::backend::Span;
use crate::graph::{BlockAttentionOp, BlockInputs, TokenForm};

impl CpuOp for BlockAttentionOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let BlockInputs { q, k, v, index } = self.inputs;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let [q, k, v] = [q, k, v].map(|value| cpu.values.of(value));
            let inputs = BlockRows { q, k, v, index: IndexRows::of(&cpu.values, index) };
            cpu.compressed_caches[self.cache.0].attend_blocks(&cpu.context, inputs, call.batch.spans, out);
            Ok(())
        })
    }
}

/// What a layer reads, by row of the batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRows<'a> {
    /// (rows, heads · head_dim).
    pub(crate) q: &'a [f32],
    /// (rows, kv_heads · head_dim).
    pub(crate) k: &'a [f32],
    /// (rows, kv_heads · head_dim).
    pub(crate) v: &'a [f32],
    /// For the choice of windows.
    pub(crate) index: IndexRows<'a>,
}

impl CompressedCache {
    /// Appends the batch's tokens and keys of windows, then attends: `out` is (rows, heads · head_dim).
    pub(crate) fn attend_blocks(
        &mut self,
        context: &CpuContext,
        rows: BlockRows<'_>,
        spans: &[Span<'_>],
        out: &mut [f32],
    ) {
        let (shape, dim) = (self.shape, self.shape.head_dim);
        let TokenForm::Grouped { kv_heads } = shape.form else { unreachable!("checked when recorded") };
        let (kv_width, key_width) = (kv_heads * dim, shape.entry_width());
        let mut queries = vec![];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                let (page, at) = self.token(span.pages, position);
                let own = row * kv_width..(row + 1) * kv_width;
                self.pages.store(page, at, &rows.k[own.clone()]);
                self.pages.store(page, at + kv_width, &rows.v[own]);
                if (position + 1).is_multiple_of(shape.stride) {
                    let (page, at) = self.entry(span.pages, shape.entries(position) - 1);
                    self.pages.store(page, at, &rows.index.k[row * key_width..(row + 1) * key_width]);
                }
                queries.push(Query { row, position, pages: span.pages });
            }
        }
        let chosen = self.choose(context, Some(rows.index), &queries);
        let group = shape.heads / kv_heads * dim;
        let out = SharedMut::new(out);
        context.pool.run(queries.len() * kv_heads, &|task| {
            let (query, kv_head) = (queries[task / kv_heads], task % kv_heads);
            let at = query.row * shape.heads * dim + kv_head * group;
            // SAFETY: a task writes only its row's heads.
            let out = unsafe { out.part(at..at + group) };
            let q = &rows.q[at..at + group];
            self.mix_tokens(context, query, chosen[task / kv_heads].as_deref(), kv_head, q, out);
        });
    }

    /// The query heads `q` of one key-value head over the tokens of `blocks`, or of all windows, and the unfinished one.
    fn mix_tokens(
        &self,
        context: &CpuContext,
        query: Query<'_>,
        blocks: Option<&[u32]>,
        kv_head: usize,
        q: &[f32],
        out: &mut [f32],
    ) {
        let (shape, dim, simd) = (&self.shape, self.shape.head_dim, context.simd);
        let (half, stride) = (shape.token_width() / 2, shape.stride);
        let finished = shape.entries(query.position);
        let chosen = blocks.map_or(finished, <[u32]>::len) * stride;
        let count = chosen + query.position + 1 - finished * stride;
        let position = |i: usize| match (blocks, i < chosen) {
            (Some(blocks), true) => blocks[i / stride] as usize * stride + i % stride,
            _ => finished * stride + i - chosen,
        };
        let load = |i: usize, key: &mut [f32], value: &mut [f32]| {
            let (page, at) = self.token(query.pages, position(i));
            self.pages.load(page, at + kv_head * dim, key);
            self.pages.load(page, at + half + kv_head * dim, value);
        };
        let heads = Heads { q, dim, value_dim: dim, scale: shape.scale, sinks: None };
        heads.attend(simd, count, true, load, out);
    }
}
