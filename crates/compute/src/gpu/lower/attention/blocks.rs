//! Lowering of attention over chosen blocks of tokens to `kernels/cuda/block_attention.cu`, for devices with tensor cores.

use super::attend::{Attend, heads_that_share};
use crate::gpu::arguments::BlockAttentionConstants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::gpu::memory::Band;
use crate::graph::Chosen;

/// Query heads of a group of warps, and as few as are worth a tile of them.
const QUERIES: usize = 16;
const FEWEST: usize = 4;
const THREADS: u32 = 128;
/// Keys and values that all warps have in shared memory.
const TILES: usize = 4 * 3 * 2 * 16;

impl Lowering<'_> {
    /// What attends to a band's chosen blocks, where these kernels suit it.
    pub(super) fn block_attention(
        &self,
        a: &Attend,
        chosen: Chosen,
        band: &Band,
        [q, keys, values, blocks, to]: [Slice; 5],
    ) -> Option<Dispatch> {
        let [key_dim, value_dim, key_stride, value_stride] = a.dims;
        let kernel = match key_dim {
            64 => "block_attention_64",
            128 => "block_attention_128",
            _ => return None,
        };
        let share = heads_that_share(a, chosen);
        let plain = value_dim == key_dim && [key_stride, value_stride] == [key_dim; 2] && a.added.is_none();
        if !plain || share < FEWEST || self.memory.scratch.tensor.is_none() || !self.f16_cache() {
            return None;
        }
        let (chunks, splits) = (share.div_ceil(QUERIES), band.splits);
        let [_, stats] = self.splits_scratch();
        let places = self.places_from(band.rows.start);
        let buffers = [q, keys, values, blocks, places, self.pages(), self.optional(a.sinks), stats, to];
        let constants = &BlockAttentionConstants {
            heads: a.heads,
            kv_heads: a.kv_heads,
            share,
            chunks,
            scale: a.scale * std::f32::consts::LOG2_E,
            splits,
            has_sinks: a.sinks.is_some(),
            groups: chosen.groups,
            top_k: chosen.blocks.width() / chosen.groups,
            block: chosen.block,
            tail: chosen.tail,
        };
        let launch = Launch { unit: "cuda/block_attention", kernel, buffers: &buffers, constants };
        let dispatch = launch.over([a.heads / share * chunks, splits, band.rows.len()], THREADS);
        Some(Dispatch { shared: (TILES * key_dim * size_of::<u16>()) as u32, ..dispatch })
    }
}
