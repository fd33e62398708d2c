//! Lowering of operations on single elements to the kernels of `kernels/elementwise.h`.

use super::context::{Launch, Lowering};
use crate::gpu::arguments::{ActivateConstants, ElementConstants, RoundConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::graph::{Activation, BlockFloat, Gate, Value};

impl Lowering<'_> {
    /// A kernel of elements of `inputs`, with a number.
    pub(super) fn elements(
        &self,
        kernel: &'static str,
        inputs: &[Value],
        number: f32,
        out: Value,
    ) -> Dispatch {
        let buffers: Vec<Slice> = inputs.iter().chain([&out]).map(|value| self.value(*value)).collect();
        let count = self.rows * out.width();
        let constants = &ElementConstants { count, number, shared: 1 };
        Launch { unit: "elementwise", kernel, buffers: &buffers, constants }.each(count)
    }

    /// Elements of `gate` each gate as many of `x`.
    pub(super) fn gate(&self, [x, gate]: [Value; 2], function: Gate, out: Value) -> Dispatch {
        let kernel = match function {
            Gate::Sigmoid => "sigmoid_gate",
            Gate::Softplus => "softplus_gate",
        };
        let count = self.rows * out.width();
        let shared = x.width() / gate.width();
        let buffers = [self.value(x), self.value(gate), self.value(out)];
        let constants = &ElementConstants { count, number: 0.0, shared };
        Launch { unit: "elementwise", kernel, buffers: &buffers, constants }.each(count)
    }

    /// A product of gate and up.
    pub(super) fn activate(&self, inputs: [Value; 2], how: Activation, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let [gate, up] = inputs.map(|value| self.value(value));
        let constants = &ActivateConstants { count, activation: how.into() };
        let buffers = [gate, up, self.value(out)];
        Launch { unit: "elementwise", kernel: "activate", buffers: &buffers, constants }.each(count)
    }

    /// Elements rounded to floats of few bits, with a scale for each `block` of them.
    pub(super) fn round_blocks(&self, x: Value, block: usize, form: BlockFloat, out: Value) -> Dispatch {
        let form = match form {
            BlockFloat::E4m3 => 0,
            BlockFloat::E2m1 => 1,
            BlockFloat::E2m1ByE4m3 => 2,
        };
        let count = self.rows * out.width();
        let buffers = [self.value(x), self.value(out)];
        let constants = &RoundConstants { count, block, form };
        Launch { unit: "elementwise", kernel: "round_blocks", buffers: &buffers, constants }.each(count)
    }
}
