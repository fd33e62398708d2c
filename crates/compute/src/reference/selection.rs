//! The scalar meaning of choosing blocks of tokens: see [`BlockChoice`].

use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp, dot, index_score};
use crate::Result;
use crate::backend::{PAGE_TOKENS, Span};
use crate::graph::{BlockChoice, BlockScore, ChooseBlocksOp, Chosen, IndexInputs};

/// Positions that the query at `position` sees, by its row of chosen blocks, for the head `head` of `heads`.
pub fn seen(chosen: &Chosen, row: &[f32], position: usize, head: usize, heads: usize) -> Vec<usize> {
    let part = row.len() / chosen.groups;
    let group = head / (heads / chosen.groups);
    let blocks = row[group * part..(group + 1) * part].iter().filter(|block| **block >= 0.0);
    let tokens = blocks.flat_map(|block| {
        let start = *block as usize * chosen.block;
        start..start + chosen.block
    });
    let tail = if chosen.tail { (position + 1) / chosen.block * chosen.block..position + 1 } else { 0..0 };
    tokens.chain(tail).filter(|token| *token <= position).collect()
}

impl ReferenceOp for ChooseBlocksOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let IndexInputs { q, k, weights } = self.inputs;
        let (inputs, weights) = ([q, k].map(|value| call.of(value)), weights.map(|weights| call.of(weights)));
        let spans = call.batch.spans;
        Ok(Outcome::Rows(own.choose_blocks(self.cache.0, inputs, weights, &self.choice, spans)))
    }
}

impl Interpreter {
    fn choose_blocks(
        &mut self,
        cache: usize,
        [q, k]: [&Matrix; 2],
        weights: Option<&Matrix>,
        choice: &BlockChoice,
        spans: &[Span<'_>],
    ) -> Matrix {
        let shape = self.graph.compressed_caches[cache];
        let (index, top_k) = (choice.index, choice.index.top_k);
        let mut out = vec![vec![-1.0; choice.groups() * top_k]; q.len()];
        for span in spans {
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                if (position + 1).is_multiple_of(shape.stride) {
                    let (page, place) = shape.place(shape.entries(position) - 1);
                    let page = self.compressed.entry((cache, span.pages[page]));
                    let page = page.or_insert_with(|| vec![0.0; shape.page_elements()]);
                    page[place * index.head_dim..][..index.head_dim].copy_from_slice(&k[row]);
                }
            }
            let key = |entry: usize| {
                let (page, place) = shape.place(entry);
                let page = &self.compressed[&(cache, span.pages[page])];
                &page[PAGE_TOKENS * shape.token_width() + place * index.head_dim..][..index.head_dim]
            };
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                for (group, out) in out[row].chunks_mut(top_k).enumerate() {
                    let score = |block: &usize| match choice.score {
                        BlockScore::Sum => {
                            let ones = vec![1.0; index.heads];
                            index_score(&q[row], weights.map_or(&ones, |weights| &weights[row]), key(*block))
                        }
                        BlockScore::BestToken { local } if block + local > position / choice.block => {
                            f32::INFINITY
                        }
                        BlockScore::BestToken { .. } => {
                            let q = &q[row][group * index.head_dim..(group + 1) * index.head_dim];
                            let tokens = block * choice.block..((block + 1) * choice.block).min(position + 1);
                            // `max` would drop a NaN.
                            let better = |best: f32, v: f32| if v > best || v.is_nan() { v } else { best };
                            tokens.map(|token| dot(q, key(token))).fold(f32::NEG_INFINITY, better)
                        }
                    };
                    let mut blocks: Vec<usize> = (0..choice.choosable(position)).collect();
                    if blocks.len() > top_k && blocks.iter().any(|block| score(block).is_nan()) {
                        out.fill(f32::NAN);
                        continue;
                    }
                    blocks.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
                    blocks.truncate(top_k);
                    blocks.sort_unstable();
                    out.iter_mut().zip(blocks).for_each(|(out, block)| *out = block as f32);
                }
            }
        }
        out
    }
}
