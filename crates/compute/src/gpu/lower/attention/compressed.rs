//! Lowering of attention over tokens and entries, and of choices of blocks, to the kernels of `kernels/compressed.h`.

use super::attend::{ATTENTION_THREADS, QUERIES, floats};
use crate::gpu::arguments::{AttendEntriesConstants, IndexConstants, KeepConstants, PageConstants};
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS, WARPS};
use crate::gpu::memory::{Band, scored_rows};
use crate::graph::{BlockChoice, BlockScore, CompressedAttention, IndexInputs, TokenForm, Value};

/// `TILE_ENTRIES` of `kernels/compressed.h`: entries that a group scores.
const SCORED_ENTRIES: usize = 128;
/// Threads of a group that chooses entries, at least.
const FEWEST_CHOOSERS: usize = 32;

/// What is kept of tokens and entries.
#[derive(Debug, Clone, Copy)]
pub(in crate::gpu::lower) struct Kept {
    /// Keys and values; twice the same if a key is its value. Nothing if other attention keeps them.
    pub(in crate::gpu::lower) tokens: Option<[Value; 2]>,
    pub(in crate::gpu::lower) entries: Option<Value>,
    pub(in crate::gpu::lower) index_key: Option<Value>,
}

/// An attention with what it reads.
#[derive(Debug, Clone, Copy)]
pub(in crate::gpu::lower) struct Sparse {
    pub(in crate::gpu::lower) q: Value,
    pub(in crate::gpu::lower) kept: Kept,
    pub(in crate::gpu::lower) index: Option<IndexInputs>,
    pub(in crate::gpu::lower) sinks: Option<Slice>,
    pub(in crate::gpu::lower) cache: usize,
    pub(in crate::gpu::lower) out: Value,
}

/// A choice of entries, or of blocks of tokens.
struct BlocksToChoose<'a> {
    shape: &'a CompressedAttention,
    how: BlockChoice,
    inputs: IndexInputs,
    pool: Slice,
    /// Where blocks go; entries of an attention go to memory of their own.
    blocks: Option<Slice>,
}

impl Lowering<'_> {
    pub(in crate::gpu::lower) fn compressed_attention(&mut self, a: &Sparse) {
        let shape = self.graph.compressed_caches()[a.cache];
        let pool = self.memory.state.compressed[a.cache].slice();
        self.keep(&shape, &a.kept, pool);
        if let (Some(index), Some(inputs)) = (shape.index, a.index) {
            let (block, score) = (shape.stride, BlockScore::Sum);
            let choice = BlocksToChoose {
                shape: &shape,
                how: BlockChoice { index, block, score },
                inputs,
                pool,
                blocks: None,
            };
            self.choose(&choice);
        }
        match self.gathered_entries(&shape, a.sinks, pool) {
            Some(gathered) => self.gathered(&gathered, [a.q, a.out].map(|value| self.value(value)), None),
            None => self.shape.bands().for_each(|band| self.attend_entries(&shape, a, &band, pool)),
        }
    }

    pub(super) fn page_layout(&self, shape: &CompressedAttention) -> PageConstants {
        PageConstants {
            page: shape.page_elements(),
            token: shape.token_width(),
            entry: shape.entry_width(),
            stride: shape.stride,
            kv_type: self.kv_code(),
        }
    }

    fn keep(&mut self, shape: &CompressedAttention, kept: &Kept, pool: Slice) {
        let own = |value: Option<Value>| value.map_or(self.input(0), |value| self.value(value));
        let [k, v] = [0, 1].map(|which| kept.tokens.map(|tokens| tokens[which]));
        let buffers = [
            own(k),
            own(v),
            own(kept.entries),
            own(kept.index_key),
            self.input(self.layout.places),
            self.pages(),
            pool,
        ];
        let width = |value: Option<Value>| value.map_or(0, Value::width);
        let values = if shape.form == TokenForm::Shared { 0 } else { width(v) };
        let constants = KeepConstants {
            layout: self.page_layout(shape),
            first: width(k),
            second: values,
            third: width(kept.entries),
            fourth: width(kept.index_key),
        };
        let launch = Launch { unit: "compressed", kernel: "keep", buffers: &buffers, constants: &constants };
        let dispatch = launch.over([self.rows, 1, 1], THREADS);
        self.run.push(dispatch);
    }

    /// Appends keys, then chooses blocks: see [`crate::graph::GraphBuilder::choose_blocks`].
    pub(in crate::gpu::lower) fn choose_blocks(
        &mut self,
        inputs: IndexInputs,
        how: &BlockChoice,
        cache: usize,
        out: Value,
    ) {
        let shape = self.graph.compressed_caches()[cache];
        let pool = self.memory.state.compressed[cache].slice();
        self.keep(&shape, &Kept { tokens: None, entries: None, index_key: Some(inputs.k) }, pool);
        self.choose(&BlocksToChoose {
            shape: &shape,
            how: *how,
            inputs,
            pool,
            blocks: Some(self.value(out)),
        });
    }

    /// Chooses entries of all rows.
    fn choose(&mut self, choice: &BlocksToChoose<'_>) {
        let BlocksToChoose { shape, how: BlockChoice { index, block, score }, inputs, pool, blocks } =
            *choice;
        let scratch = self.memory.scratch.index;
        let (groups, by_token) = (choice.how.groups(), score != BlockScore::Sum);
        let local = match score {
            BlockScore::Sum => 0,
            BlockScore::BestToken { local } => local,
        };
        let room = scratch.room / groups;
        let factor = ((index.head_dim * index.heads) as f32).sqrt().recip();
        let weights = inputs.weights.map_or(self.input(0), |weights| self.value(weights));
        let (places, scores) = (self.input(self.layout.places), scratch.scores.into());
        let at_once = scored_rows(scratch.room);
        for row in (0..self.rows).step_by(at_once) {
            let rows = (self.rows - row).min(at_once);
            let constants = &IndexConstants {
                layout: self.page_layout(shape),
                heads: index.heads,
                dim: index.head_dim,
                key: shape.entry_key(),
                top_k: index.top_k,
                factor,
                weighs: inputs.weights.is_some(),
                row,
                groups,
                room,
                block,
                by_token,
                local,
            };
            let q = self.value(inputs.q);
            let scored = if by_token {
                let buffers = [q, pool, places, self.pages(), scores];
                Launch { unit: "compressed", kernel: "block_scores", buffers: &buffers, constants }
                    .over([room.div_ceil(WARPS), groups, rows], THREADS)
            } else {
                let buffers = [q, weights, pool, places, self.pages(), scores];
                Launch { unit: "compressed", kernel: "index_scores", buffers: &buffers, constants }
                    .over([room.div_ceil(SCORED_ENTRIES), rows, 1], THREADS)
            };
            let kernel = if blocks.is_some() { "choose_blocks" } else { "choose_entries" };
            let buffers = [scores, places, blocks.unwrap_or(scratch.chosen.into())];
            let launch = Launch { unit: "compressed", kernel, buffers: &buffers, constants };
            let choosers = room.next_power_of_two().clamp(FEWEST_CHOOSERS, THREADS as usize);
            let chosen = launch.over([rows, groups, 1], choosers as u32);
            self.run.extend([scored, chosen]);
        }
    }

    fn attend_entries(&mut self, shape: &CompressedAttention, a: &Sparse, band: &Band, pool: Slice) {
        let CompressedAttention { heads, head_dim, scale, window, .. } = *shape;
        let kv_heads = match shape.form {
            TokenForm::Shared => 1,
            TokenForm::Grouped { kv_heads } => kv_heads,
            TokenForm::Elsewhere => unreachable!("other attention has heads"),
        };
        let (chunks, rows, splits) = ((heads / kv_heads).div_ceil(QUERIES), band.rows.len(), band.splits);
        let [parts, stats] = self.splits_scratch();
        let top_k = shape.index.map_or(0, |index| index.top_k);
        let first = band.rows.start;
        let [q, out] = [a.q, a.out].map(|value| self.value(value).at(floats(first * heads * head_dim)));
        let to = if splits == 1 { out } else { parts };
        let chosen = Slice::from(self.memory.scratch.index.chosen).at(first * top_k * size_of::<u32>());
        let (places, sinks) = (self.places_from(first), a.sinks.unwrap_or(self.input(0)));
        let buffers = [q, pool, chosen, places, self.pages(), sinks, stats, to];
        let window = u32::try_from(window).unwrap_or(u32::MAX);
        let grouped = shape.form != TokenForm::Shared;
        let constants = &AttendEntriesConstants {
            layout: self.page_layout(shape),
            heads,
            kv_heads,
            chunks,
            dim: head_dim,
            scale,
            window,
            grouped,
            top_k,
            splits,
            has_sinks: a.sinks.is_some(),
        };
        let launch = Launch { unit: "compressed", kernel: "attend_entries", buffers: &buffers, constants };
        let dispatch = launch.over([kv_heads * chunks, splits, rows], ATTENTION_THREADS);
        self.run.push(dispatch);
        if splits > 1 {
            self.combine([parts, stats, out], rows * heads, splits, head_dim);
        }
    }
}
