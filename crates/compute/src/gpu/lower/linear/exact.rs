//! Lowering of products with weights of f32 to `kernels/cuda/exact.cu`.

use crate::DType;
use crate::gpu::arguments::LinearConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::lower::context::{Launch, Lowering, Product, THREADS};

/// Outputs and tokens of a group.
const SIDE: usize = 32;
/// Threadgroup memory: three stages of rows and weights, 128 columns each and four floats between rows.
const SHARED: u32 = 3 * 2 * 32 * (128 + 4) * 4;

impl Lowering<'_> {
    /// A linear layer of many rows; nothing if the kernel does not suit it.
    pub(super) fn exact_linear(&self, p: &Product) -> Option<Dispatch> {
        self.tensor_scratch()?;
        let weight = *self.weight(p.weight);
        let matrix = weight.matrix;
        if matrix.dtype != DType::F32 || !matrix.cols.is_multiple_of(4) {
            return None;
        }
        let residual = p.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.value(p.x), weight.planes[0], self.optional(p.bias), residual, self.value(p.out)];
        let constants = &LinearConstants {
            weight: weight.format,
            rows: matrix.rows,
            tokens: self.rows,
            has_bias: p.bias.is_some(),
            has_residual: p.residual.is_some(),
        };
        let launch = Launch { unit: "cuda/exact", kernel: "exact_linear", buffers: &buffers, constants };
        let grid = [matrix.rows.div_ceil(SIDE), self.rows.div_ceil(SIDE), 1];
        Some(Dispatch { shared: SHARED, ..launch.over(grid, THREADS) })
    }
}
