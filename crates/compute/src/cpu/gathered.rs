//! Attention of a query's heads over keys and values that are not side by side: they are converted to f32 a block at a
//! time, once for all heads. Softmax is computed online, block by block (Milakov & Gimelshein 2018). The order of
//! operations depends on the query alone.

use super::head_group::{Ahead, HeadSums, KeyBlock, Queries};
use super::simd::Simd;
use crate::graph::Chosen;

/// Keys that are converted at once.
pub(super) const KEY_BLOCK: usize = 64;

/// Heads that see the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads<'a> {
    /// (heads, dim), f32.
    pub(super) q: &'a [f32],
    pub(super) dim: usize,
    /// Channels of a value.
    pub(super) value_dim: usize,
    pub(super) scale: f32,
    /// (heads): logits that take their share of the softmax.
    pub(super) sinks: Option<&'a [f32]>,
}

impl Heads<'_> {
    /// Attends to `count` keys; `load` gives key and value number i. Where `values` is false, values are the first channels
    /// of keys. `out` is (heads, value_dim); nothing to see gives zeros.
    pub(super) fn attend(
        &self,
        simd: Simd,
        count: usize,
        values: bool,
        load: impl Fn(usize, &mut [f32], &mut [f32]),
        out: &mut [f32],
    ) {
        let Self { q, dim, value_dim, scale, sinks } = *self;
        let held = KEY_BLOCK.min(count);
        let mut keys = vec![0.0; held * dim];
        let mut own = vec![0.0; if values { held * value_dim } else { 0 }];
        let mut states = vec![(f32::NEG_INFINITY, 0.0f32); q.len() / dim];
        if let Some(sinks) = sinks {
            // As if a first key had this score and a value of zero.
            states.iter_mut().zip(sinks).for_each(|(state, sink)| *state = (*sink, 1.0));
        }
        let mut scores = vec![0.0f32; states.len() * KEY_BLOCK];
        out.fill(0.0);
        for from in (0..count).step_by(KEY_BLOCK) {
            let to = (from + KEY_BLOCK).min(count);
            for (at, i) in (from..to).enumerate() {
                let value = if values { at * value_dim..(at + 1) * value_dim } else { 0..0 };
                load(i, &mut keys[at * dim..(at + 1) * dim], &mut own[value]);
            }
            let keys = &keys[..(to - from) * dim];
            let (values, stride) = if values { (&own[..], value_dim) } else { (keys, dim) };
            HeadSums { states: &mut states, sums: out }.add(
                simd,
                Queries { q, stride: dim, dim, scale },
                KeyBlock { keys, values, stride },
                &mut scores,
                [Ahead::NONE; 2],
            );
        }
        if count > 0 {
            for (out, (_, total)) in out.chunks_exact_mut(value_dim).zip(states) {
                out.iter_mut().for_each(|o| *o /= total);
            }
        }
    }
}

/// What attention sees besides keys.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen<'a> {
    /// (heads): logits that take their share of the softmax.
    pub(super) sinks: Option<&'a [f32]>,
    /// The tokens that are seen; all when absent.
    pub(super) choices: Option<Choices<'a>>,
    /// (rows, heads · extent): what is added to scores by distance.
    pub(super) by_distance: Option<&'a [f32]>,
}

/// The choices of a batch's queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choices<'a> {
    pub(super) how: Chosen,
    /// (rows, groups · top_k), as [`crate::graph::GraphBuilder::choose_blocks`] gives them.
    pub(super) blocks: &'a [f32],
}

impl Choices<'_> {
    /// Positions that the query of `row` at `position` sees by its choice `group`, ascending; nothing if it could not choose.
    pub(super) fn positions(&self, row: usize, position: usize, group: usize) -> Option<Vec<usize>> {
        let Chosen { blocks, groups, block, tail } = self.how;
        let part = blocks.width() / groups;
        let own = &self.blocks[row * blocks.width() + group * part..][..part];
        if own[0].is_nan() {
            return None;
        }
        let mut positions = Vec::with_capacity((part * block).min(position + 1));
        for number in own.iter().take_while(|number| **number >= 0.0) {
            let start = *number as usize * block;
            positions.extend(start..(start + block).min(position + 1));
        }
        if tail {
            positions.extend((position + 1) / block * block..position + 1);
        }
        Some(positions)
    }
}
