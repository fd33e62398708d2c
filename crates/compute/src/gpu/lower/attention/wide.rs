//! Lowering of attention of many rows to `kernels/cuda/warpgroup_attention.cu`, for devices with warp groups.

use super::reach;
use crate::gpu::arguments::WideAttentionConstants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::graph::Attention;

const UNIT: &str = "cuda/warpgroup_attention";
/// Tokens of a tile.
const QUERIES: usize = 128;
/// Tiles of keys or values in threadgroup memory.
const STAGES: usize = 5;
const THREADS: u32 = 384;

impl Lowering<'_> {
    /// Whether these kernels suit an attention of the batch.
    pub(super) fn takes_wide_attention(&self, shape: &Attention) -> bool {
        self.tensor_scratch().is_some()
            && self.memory.info.warp_groups
            && matches!(shape.head_dim, 64 | 128 | 256)
            && self.reads_f16()
            && shape.value_dim == shape.head_dim
            && shape.scale > 0.0
    }

    /// Attention of queries in f16 over f16 pages.
    pub(super) fn wide_attention(
        &self,
        shape: &Attention,
        [q, keys, values, out]: [Slice; 4],
        sinks: Option<Slice>,
    ) -> Dispatch {
        let kernel = match shape.head_dim {
            64 => "wide_attention_64",
            128 => "wide_attention_128",
            _ => "wide_attention_256",
        };
        let (sequences, places) = (self.input(self.layout.sequences), self.input(self.layout.places));
        let none = self.input(0);
        let buffers = [q, keys, values, sequences, places, self.pages(), sinks.unwrap_or(none), out];
        let [window, chunk] = reach(shape);
        let constants = &WideAttentionConstants {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            sequences: self.shape.sequences,
            window,
            chunk,
            scale: shape.scale * std::f32::consts::LOG2_E,
            has_sinks: sinks.is_some(),
        };
        // Tiles of keys, and tiles of queries: two, or one of heads that are wide, whose tiles have fewer keys.
        let (keys, queries) = if shape.head_dim > 128 { (64, QUERIES) } else { (128, 2 * QUERIES) };
        let shared = 1024 + (queries + STAGES * keys) * shape.head_dim * 2;
        let most = (self.rows / QUERIES + self.shape.sequences) * shape.heads;
        let launch = Launch { unit: UNIT, kernel, buffers: &buffers, constants };
        let dispatch = launch.over([most.min(self.memory.info.multiprocessors), 1, 1], THREADS);
        Dispatch { shared: shared as u32, ..dispatch }
    }
}
