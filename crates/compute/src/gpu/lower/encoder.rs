//! Lowering of what encoders of pictures have beside other graphs to the kernels of `kernels/encoder.h`.

use super::context::{Launch, Lowering, THREADS};
use crate::gpu::arguments::{
    BidirectionalConstants, BlockRowsConstants, GeluConstants, LimitsConstants, StandardizeConstants,
};
use crate::gpu::device::Dispatch;
use crate::graph::{BidirectionalAttentionOp, BlockRowsOp, ClampOp, Gelu, GeluOp, StandardizeOp, Value};

const UNIT: &str = "encoder";
/// `ROWS` of `kernels/encoder.h`.
const TILE: usize = 64;

impl Lowering<'_> {
    /// Takes a mean away from each column, and scales it.
    pub(super) fn standardize(&self, op: &StandardizeOp, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let buffers = [self.value(op.x), self.vector(op.mean), self.vector(op.scale), self.value(out)];
        let constants = &StandardizeConstants { count, width: out.width() };
        Launch { unit: UNIT, kernel: "standardize", buffers: &buffers, constants }.each(count)
    }

    /// Limits elements.
    pub(super) fn clamp_between(
        &self,
        &ClampOp { x, limits: [least, most] }: &ClampOp,
        out: Value,
    ) -> Dispatch {
        let count = self.rows * out.width();
        let buffers = [self.value(x), self.value(out)];
        let constants = &LimitsConstants { count, least, most };
        Launch { unit: UNIT, kernel: "clamp_between", buffers: &buffers, constants }.each(count)
    }

    /// A Gaussian error linear unit.
    pub(super) fn gelu(&self, &GeluOp { x, form }: &GeluOp, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let buffers = [self.value(x), self.value(out)];
        let constants = &GeluConstants { count, erf: form == Gelu::Erf };
        Launch { unit: UNIT, kernel: "gelu_form", buffers: &buffers, constants }.each(count)
    }

    /// The rows of each row's block.
    pub(super) fn block_rows(&self, &BlockRowsOp { x, rows }: &BlockRowsOp, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let (owners, sequences) = (self.input(self.layout.owners), self.input(self.layout.sequences));
        let buffers = [self.value(x), owners, sequences, self.value(out)];
        let constants = &BlockRowsConstants { count, width: x.width(), rows };
        Launch { unit: UNIT, kernel: "block_rows", buffers: &buffers, constants }.each(count)
    }

    /// Attention of all rows to all of their sequence.
    pub(super) fn bidirectional_attention(&self, op: &BidirectionalAttentionOp, out: Value) -> Dispatch {
        let &BidirectionalAttentionOp { q, k, v, heads, scale } = op;
        let [q, k, v] = [q, k, v].map(|value| self.value(value));
        let buffers = [q, k, v, self.input(self.layout.sequences), self.value(out)];
        let constants = &BidirectionalConstants { width: out.width(), dim: out.width() / heads, scale };
        Launch { unit: UNIT, kernel: "bidirectional_attention", buffers: &buffers, constants }
            .over([self.rows.div_ceil(TILE), heads, self.shape.sequences], THREADS)
    }
}
