//! Lowering of routed experts of many rows to `kernels/cuda/gemm.cu`.

use crate::gpu::arguments::{
    ActivationConstants, TensorDownConstants, TensorGateUpConstants, TensorSortConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::gpu::lower::tensor::{gemm, kernels_for};
use crate::gpu::memory::{ExpertMatrix, TENSOR_TILE, most_tiles};
use crate::graph::{ExpertMlp, ExpertSetId, Value};

/// Routed experts of many tokens.
pub(super) struct TensorExperts<'a> {
    pub(super) x: Value,
    pub(super) ids: Slice,
    /// What rows of x count, a pair; all the same when absent.
    pub(super) weights: Option<Slice>,
    pub(super) top_k: usize,
    pub(super) set: ExpertSetId,
    pub(super) parts: &'a [ExpertMatrix; 3],
    pub(super) mlp: &'a ExpertMlp,
    /// Biases of gate, up and down.
    pub(super) biases: Option<[Slice; 3]>,
    /// (pairs, inner) and (pairs, hidden), f32.
    pub(super) products: Slice,
    pub(super) outputs: Slice,
}

impl Lowering<'_> {
    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn tensor_experts(&mut self, e: &TensorExperts<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.tensor_scratch()?;
        let [gate, up, down] = e.parts;
        let inner_encoding = kernels_for(gate.matrix.dtype, gate.matrix.cols);
        let inner_encoding = inner_encoding.filter(|_| gate.matrix.dtype == up.matrix.dtype)?;
        let outer_encoding = kernels_for(down.matrix.dtype, down.matrix.cols)?;
        let (inner, hidden, pairs) = (gate.matrix.rows, down.matrix.rows, self.rows * e.top_k);
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let list = self.memory.scratch.buckets.list.into();
        let (x16, scale, tiles) = (scratch.x.into(), scratch.scale.into(), Slice::from(scratch.tiles));
        let experts = self.graph.expert_sets()[e.set.0].experts;
        let most = most_tiles(pairs, experts);
        // A body runs once for each of several groups of experts, so that nothing is left over from before it.
        (self.converted, self.spread) = (None, None);
        let mut body: Vec<Dispatch> = self.convert(scratch, e.x).into_iter().collect();

        let constants = &TensorSortConstants {
            pairs,
            experts,
            tiles: most,
            tokens: TENSOR_TILE,
            align: 1,
            places: pairs,
        };
        let buffers = [table, e.ids, list, tiles];
        let sort = Launch { unit: "cuda/prefill", kernel: "tensor_sort", buffers: &buffers, constants };
        body.push(sort.over([1, 1, 1], 1024));

        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([self.input(0); 3]);
        let has_bias = e.biases.is_some();
        let weights = e.weights.unwrap_or(self.input(0));
        let ActivationConstants { kind, alpha, limit } = e.mlp.activation.into();
        let constants = &TensorGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: e.top_k,
            has_bias,
            activation: kind,
            alpha,
            limit,
            weighs: e.weights.is_some(),
        };
        let buffers = [x16, scale, list, tiles, slots, table, weights, gate_bias, up_bias, e.products];
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_gate_up", buffers: &buffers, constants };
        let outputs = if e.mlp.activation.is_gated() { TENSOR_TILE / 2 } else { TENSOR_TILE };
        body.push(gemm(inner_encoding, launch, [inner.div_ceil(outputs), most, 1]));

        self.converted = None;
        body.push(self.to_f16(scratch, e.products, [pairs, inner]));
        let constants = &TensorDownConstants { part: down.part, has_bias };
        let buffers = [x16, scale, list, tiles, slots, table, down_bias, e.outputs];
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_down", buffers: &buffers, constants };
        body.push(gemm(outer_encoding, launch, [hidden.div_ceil(TENSOR_TILE), most, 1]));
        Some(body)
    }
}
