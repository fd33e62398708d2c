//! Choice of the blocks of tokens that attention sees: see [`crate::graph::GraphBuilder::choose_blocks`].
//!
//! Scores of keys are computed in parallel by row and part of the keys, then each row and head chooses. A key's score is one
//! sequence of operations whatever else is in the batch, so choices do not depend on the batch.

use super::compressed_attention::{CompressedCache, IndexRows, Query};
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::linear::CpuContext;
use super::shared::SharedMut;
use super::vector;
use crate::Result;
use crate::backend::Span;
use crate::graph::{BlockChoice, BlockScore, ChooseBlocksOp};

impl CpuOp for ChooseBlocksOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let inputs = IndexRows::of(&cpu.values, self.inputs);
            let cache = &mut cpu.compressed_caches[self.cache.0];
            cache.choose_blocks(&cpu.context, inputs, &self.choice, call.batch.spans, out);
            Ok(())
        })
    }
}

/// Keys of a task.
const KEYS: usize = 256;

impl CompressedCache {
    /// Appends the batch's keys, then chooses: `out` is (rows, groups · top_k).
    pub(crate) fn choose_blocks(
        &mut self,
        context: &CpuContext,
        rows: IndexRows<'_>,
        choice: &BlockChoice,
        spans: &[Span<'_>],
        out: &mut [f32],
    ) {
        let key_width = choice.index.head_dim;
        let mut queries = vec![];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                if (position + 1).is_multiple_of(self.shape.stride) {
                    let (page, at) = self.entry(span.pages, self.shape.entries(position) - 1);
                    self.pages.store(page, at, &rows.k[row * key_width..(row + 1) * key_width]);
                }
                queries.push(Query { row, position, pages: span.pages });
            }
        }
        let top_k = choice.index.top_k;
        match choice.score {
            BlockScore::Sum => {
                let chosen = self.choose(context, Some(rows), &queries);
                for (query, chosen) in queries.iter().zip(chosen) {
                    let out = &mut out[query.row * top_k..(query.row + 1) * top_k];
                    match chosen {
                        Some(chosen) => write(chosen.into_iter(), true, out),
                        None => write(0..choice.choosable(query.position) as u32, false, out),
                    }
                }
            }
            BlockScore::BestToken { local } => {
                let scores = self.best_tokens(context, rows, choice, &queries);
                let out = SharedMut::new(out);
                let heads = choice.index.heads;
                context.pool.run(queries.len() * heads, &|task| {
                    let (query, head) = (queries[task / heads], task % heads);
                    let at = (query.row * heads + head) * top_k;
                    // SAFETY: a row's choice of one head is one task's.
                    let out = unsafe { out.part(at..at + top_k) };
                    let blocks = choice.choosable(query.position);
                    match &scores[task / heads] {
                        None => write(0..blocks as u32, false, out),
                        Some(scores) => {
                            let mut own = scores[head * blocks..(head + 1) * blocks].to_vec();
                            own[blocks.saturating_sub(local)..].fill(f32::INFINITY);
                            write(best(&own, top_k).into_iter(), true, out);
                        }
                    }
                });
            }
        }
    }

    /// The best score of each block by each head, (heads, blocks), of the queries that have a choice.
    fn best_tokens(
        &self,
        context: &CpuContext,
        rows: IndexRows<'_>,
        choice: &BlockChoice,
        queries: &[Query<'_>],
    ) -> Vec<Option<Vec<f32>>> {
        let (heads, dim) = (choice.index.heads, choice.index.head_dim);
        let blocks_of_task = KEYS.div_ceil(choice.block);
        let mut scores: Vec<Option<Vec<f32>>> = vec![];
        let mut tasks = vec![];
        for (i, query) in queries.iter().enumerate() {
            let blocks = choice.choosable(query.position);
            if blocks <= choice.index.top_k {
                scores.push(None);
                continue;
            }
            scores.push(Some(vec![f32::NEG_INFINITY; heads * blocks]));
            tasks.extend((0..blocks).step_by(blocks_of_task).map(|first| (i, first)));
        }
        let shared: Vec<Option<SharedMut<'_, f32>>> =
            scores.iter_mut().map(|scores| scores.as_mut().map(|scores| SharedMut::new(scores))).collect();
        context.pool.run(tasks.len(), &|task| {
            let (i, first) = tasks[task];
            let (query, Some(scores)) = (queries[i], &shared[i]) else { return };
            let blocks = choice.choosable(query.position);
            let q = &rows.q[query.row * heads * dim..(query.row + 1) * heads * dim];
            let mut key = vec![0.0; dim];
            for block in first..(first + blocks_of_task).min(blocks) {
                let end = ((block + 1) * choice.block).min(query.position + 1);
                for token in block * choice.block..end {
                    let (page, at) = self.entry(query.pages, token);
                    self.pages.load(page, at, &mut key);
                    for (head, q) in q.chunks_exact(dim).enumerate() {
                        let at = head * blocks + block;
                        // SAFETY: a query's blocks are one task's.
                        let best = unsafe { scores.part(at..at + 1) };
                        let product = vector::dot_f32(context.simd, q, &key);
                        // A NaN stays.
                        if product > best[0] || product.is_nan() {
                            best[0] = product;
                        }
                    }
                }
            }
        });
        drop(shared);
        scores
    }
}

/// The numbers of the `count` largest scores, ascending; ties: the lower number. None if a score is no number.
pub(super) fn best(scores: &[f32], count: usize) -> Vec<u32> {
    if scores.iter().any(|score| score.is_nan()) {
        return vec![];
    }
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if scores.len() > count {
        let better = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        order.select_nth_unstable_by(count - 1, better);
        order.truncate(count);
    }
    order.sort_unstable();
    order
}

/// Block numbers, then −1; NaN where a score is no number, so that it does not vanish in a choice.
fn write(blocks: impl Iterator<Item = u32>, none_is_a_fault: bool, out: &mut [f32]) {
    let mut blocks = blocks.map(|block| block as f32).peekable();
    let rest = if none_is_a_fault && blocks.peek().is_none() { f32::NAN } else { -1.0 };
    out.iter_mut().zip(blocks.chain(std::iter::repeat(rest))).for_each(|(out, block)| *out = block);
}
