//! What lowering to the kernels of `kernels/cuda` has in common, for devices with tensor cores: products and attention of many
//! rows.
//!
//! Activations enter as f16, each row scaled by a power of two, and weights are unpacked to f16; sums are f32. That is
//! closer to the weights' own values than activations of 8 bits, and is used where those would be: for products that
//! may be fast, of encodings and shapes that the kernels have. Everything else goes the common way.

use super::context::{Launch, Lowering, named};
use crate::DType;
use crate::gpu::arguments::ToF16Constants;
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::memory::{FEW_ROWS, TensorScratch};
use crate::graph::Value;

const THREADS: u32 = 256;
/// Threadgroup memory of a product: three tiles of activations and two of weights, 64 columns of f16 each.
const GEMM_SHARED: u32 = 5 * 128 * 64 * 2;

/// The kernels take columns in halves of a step of 64.
pub(super) fn kernels_for(dtype: DType, cols: usize) -> Option<&'static str> {
    kernel_name(dtype, FastPath::Tensor).filter(|_| cols.is_multiple_of(32))
}

pub(super) fn gemm(encoding: &str, launch: Launch<'_>, grid: [usize; 3]) -> Dispatch {
    Dispatch { shared: GEMM_SHARED, ..named(launch.over(grid, THREADS), encoding) }
}

impl Lowering<'_> {
    /// Writes x (rows, cols) as scaled f16.
    pub(super) fn to_f16(&self, scratch: TensorScratch, x: Slice, [rows, cols]: [usize; 2]) -> Dispatch {
        let buffers = [x, scratch.x.into(), scratch.scale.into()];
        let constants = &ToF16Constants { rows, cols };
        Launch { unit: "cuda/prefill", kernel: "to_f16", buffers: &buffers, constants }
            .over([rows.div_ceil(8), 1, 1], THREADS)
    }

    /// Makes the scratch hold `x`, unless it does.
    pub(super) fn convert(&mut self, scratch: TensorScratch, x: Value) -> Option<Dispatch> {
        if self.converted == Some(x) {
            return None;
        }
        (self.converted, self.spread) = (Some(x), None);
        Some(self.to_f16(scratch, self.value(x), [self.rows, x.width()]))
    }

    /// Memory for these kernels, if they are to be used for the batch.
    pub(super) fn tensor_scratch(&self) -> Option<TensorScratch> {
        self.memory.scratch.tensor.filter(|_| self.rows > FEW_ROWS)
    }
}
