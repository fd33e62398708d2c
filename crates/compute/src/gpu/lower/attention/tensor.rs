//! Lowering of attention of many rows to `kernels/cuda/flash_attention.cu`.

use super::reach;
use crate::gpu::arguments::TensorAttentionConstants;
use crate::gpu::device::{Dispatch, Grid, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::graph::Attention;

/// Tokens of a tile and keys of a page, and a tile's threads.
const QUERIES: usize = 64;
const ATTENTION_THREADS: u32 = 128;
/// Rows of a sequence, on average, from which on heads of more channels are better read once for all rows than divided among groups.
const LEAST_ROWS: usize = 4;
/// Channels of results that a group makes.
const MOST_CHANNELS: usize = 256;
/// Bytes of a group's memory that the kernels declare themselves.
const OWN_MEMORY: usize = 256;

/// Threadgroup memory for keys of a page and values of a part of the channels; queries too, where registers do not hold them.
fn shared_bytes(head_dim: usize) -> usize {
    let queries = if head_dim > 128 { head_dim } else { 0 };
    (head_dim + head_dim.min(MOST_CHANNELS) + queries) * QUERIES * size_of::<u16>()
}

impl Lowering<'_> {
    /// Whether these kernels suit an attention of the batch.
    pub(super) fn takes_tensor_attention(&self, shape: &Attention) -> bool {
        let Attention { head_dim, value_dim, .. } = *shape;
        let fits = shared_bytes(head_dim) + OWN_MEMORY <= self.memory.info.group_memory;
        // Single rows of narrower heads have kernels for decoding.
        let suits = head_dim <= MOST_CHANNELS || self.rows >= LEAST_ROWS * self.shape.sequences;
        self.tensor_scratch().is_some()
            && matches!(head_dim, 64 | 128 | 256 | 512)
            && fits
            && suits
            && self.reads_f16()
            && value_dim == head_dim
    }

    /// Attention of many rows over f16 pages.
    pub(super) fn tensor_attention(
        &self,
        shape: &Attention,
        [q, keys, values, out]: [Slice; 4],
        sinks: Option<Slice>,
    ) -> Dispatch {
        let kernel = match shape.head_dim {
            64 => "tensor_attention_64",
            128 => "tensor_attention_128",
            256 => "tensor_attention_256",
            _ => "tensor_attention_512",
        };
        let (sequences, places) = (self.input(self.layout.sequences), self.input(self.layout.places));
        let none = self.input(0);
        let buffers = [q, keys, values, sequences, places, self.pages(), sinks.unwrap_or(none), out];
        let [window, chunk] = reach(shape);
        let scale = shape.scale * std::f32::consts::LOG2_E;
        let constants = &TensorAttentionConstants {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            sequences: self.shape.sequences,
            window,
            chunk,
            scale,
            has_sinks: sinks.is_some(),
        };
        let most = self.rows / QUERIES + self.shape.sequences;
        let launch = Launch { unit: "cuda/flash_attention", kernel, buffers: &buffers, constants };
        let grid =
            Grid::Fixed([most as u32, shape.heads as u32, shape.head_dim.div_ceil(MOST_CHANNELS) as u32]);
        Dispatch { shared: shared_bytes(shape.head_dim) as u32, ..launch.on(grid, ATTENTION_THREADS) }
    }
}
