//! Lowering of attention of many rows to `kernels/cuda/flash_attention.cu`.

use crate::gpu::arguments::TensorAttentionConstants;
use crate::gpu::device::{Dispatch, Grid, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::graph::Attention;

/// Tokens of a tile, and its threads.
const QUERIES: usize = 64;
const ATTENTION_THREADS: u32 = 128;

impl Lowering<'_> {
    /// Attention of many rows over f16 pages; nothing if the kernels do not suit it.
    pub(super) fn tensor_attention(
        &self,
        shape: &Attention,
        [q, keys, values, out]: [Slice; 4],
        sinks: Option<Slice>,
    ) -> Option<Dispatch> {
        self.tensor_scratch()?;
        let kernel = match shape.head_dim {
            64 => "tensor_attention_64",
            128 => "tensor_attention_128",
            256 => "tensor_attention_256",
            _ => return None,
        };
        if !self.f16_cache() || shape.chunk.is_some() || shape.value_dim != shape.head_dim {
            return None;
        }
        let (sequences, places) = (self.input(self.layout.sequences), self.input(self.layout.places));
        let none = self.input(0);
        let buffers = [q, keys, values, sequences, places, self.pages(), sinks.unwrap_or(none), out];
        let window = shape.window.and_then(|w| u32::try_from(w).ok()).unwrap_or(0);
        let scale = shape.scale * std::f32::consts::LOG2_E;
        let constants = &TensorAttentionConstants {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            sequences: self.shape.sequences,
            window,
            scale,
            has_sinks: sinks.is_some(),
        };
        // Keys and values of a page; queries too, where registers do not hold them.
        let tiles = if shape.head_dim > 128 { 3 } else { 2 };
        let shared = (tiles * QUERIES * shape.head_dim * 2) as u32;
        let most = self.rows / QUERIES + self.shape.sequences;
        let launch = Launch { unit: "cuda/flash_attention", kernel, buffers: &buffers, constants };
        let grid = Grid::Fixed([most as u32, shape.heads as u32, 1]);
        Some(Dispatch { shared, ..launch.on(grid, ATTENTION_THREADS) })
    }
}
