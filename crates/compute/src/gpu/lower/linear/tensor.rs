//! Lowering of products to `kernels/cuda/gemm.cu`.

use crate::gpu::arguments::LinearConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::lower::context::{Launch, Lowering, Product};
use crate::gpu::lower::tensor::{gemm, kernels_for};
use crate::gpu::memory::TENSOR_TILE;
use crate::graph::Precision;

impl Lowering<'_> {
    /// A linear layer; nothing if the kernels do not suit it.
    pub(super) fn tensor_linear(&mut self, p: &Product) -> Option<Vec<Dispatch>> {
        let scratch = self.tensor_scratch()?;
        let weight = *self.weight(p.weight);
        let matrix = weight.matrix;
        let encoding = kernels_for(matrix.dtype, matrix.cols).filter(|_| p.precision == Precision::Fast)?;
        let mut list: Vec<Dispatch> = self.convert(scratch, p.x).into_iter().collect();
        let [a, b, c] = weight.planes;
        let (bias, residual) = (self.optional(p.bias), p.residual.map_or(self.input(0), |r| self.value(r)));
        let buffers = [scratch.x.into(), scratch.scale.into(), a, b, c, bias, residual, self.value(p.out)];
        let constants = &LinearConstants {
            weight: weight.format,
            rows: matrix.rows,
            tokens: self.rows,
            has_bias: p.bias.is_some(),
            has_residual: p.residual.is_some(),
        };
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_linear", buffers: &buffers, constants };
        let grid = [matrix.rows.div_ceil(TENSOR_TILE), self.rows.div_ceil(TENSOR_TILE), 1];
        list.push(gemm(encoding, launch, grid));
        Some(list)
    }
}
