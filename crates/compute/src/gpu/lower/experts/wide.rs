//! Lowering of routed experts of many rows to `kernels/cuda/wide.cu`.

use super::tensor::TensorExperts;
use crate::gpu::arguments::{
    ActivationConstants, TensorGateUpConstants, TensorSortConstants, WideDownConstants, WideGateUpConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering};
use crate::gpu::lower::tensor::kernels_for;
use crate::gpu::lower::wide::{MOST_TOKENS, TILE_ROWS, WideRows, splits};
use crate::gpu::memory::{MOST_TILED_EXPERTS, PANEL_TOKENS, most_places, most_tiles};
use crate::graph::Activation;

/// Blocks that sort pairs, a cluster, and the pairs that they are worth it from.
const SORTING_BLOCKS: u32 = 8;
const CLUSTERED_PAIRS: usize = 4096;

impl Lowering<'_> {
    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn wide_experts(&mut self, e: &TensorExperts<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.wide_scratch()?;
        let [gate, up, down] = e.parts;
        let inner_encoding = kernels_for(gate.matrix.dtype, gate.matrix.cols);
        let inner_encoding = inner_encoding.filter(|_| gate.matrix.dtype == up.matrix.dtype)?;
        let outer_encoding = kernels_for(down.matrix.dtype, down.matrix.cols)?;
        let experts = self.graph.expert_sets()[e.set.0].experts;
        if experts > MOST_TILED_EXPERTS {
            return None;
        }
        let (inner, hidden, pairs) = (gate.matrix.rows, down.matrix.rows, self.rows * e.top_k);
        let (most, places) = (most_tiles(pairs, experts), most_places(pairs, experts));
        let (slots, table) =
            (self.memory.experts.slots(), self.memory.experts.table(e.set, [self.rows, pairs]));
        let [x, scale, list, tiles] =
            [scratch.x, scratch.scale, scratch.list, scratch.tiles].map(Slice::from);

        let constants = &TensorSortConstants {
            pairs,
            experts,
            tiles: most,
            tokens: MOST_TOKENS,
            align: PANEL_TOKENS,
            places,
        };
        let buffers = [table, e.ids, list, scratch.places.into(), tiles];
        let sort = Launch { unit: "cuda/wide_tokens", kernel: "wide_sort", buffers: &buffers, constants };
        let blocks = if pairs < CLUSTERED_PAIRS { 1 } else { SORTING_BLOCKS };
        let mut body = vec![Dispatch { cluster: blocks, ..sort.over([blocks as usize, 1, 1], 1024) }];
        // The rows are those of pairs from here on.
        (self.converted, self.spread) = (None, None);
        let shape = [self.rows, gate.matrix.cols];
        body.push(self.enter_wide(
            scratch,
            (self.value(e.x), None),
            shape,
            WideRows::Shared(e.top_k),
            splits(inner_encoding),
        ));

        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([self.input(0); 3]);
        let has_bias = e.biases.is_some();
        let weights = e.weights.unwrap_or(self.input(0));
        let ActivationConstants { kind, alpha, limit } = e.mlp.activation.into();
        let products = TensorGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: e.top_k,
            has_bias,
            activation: kind,
            alpha,
            limit,
            weighs: e.weights.is_some(),
        };
        let constants = &WideGateUpConstants { products, tiles: most };
        let buffers = [x, scale, list, tiles, slots, table, weights, gate_bias, up_bias, e.products];
        let launch = Launch { unit: "cuda/wide", kernel: "wide_gate_up", buffers: &buffers, constants };
        let columns = if e.mlp.activation == Activation::SquaredRelu { TILE_ROWS } else { TILE_ROWS / 2 };
        body.push(self.wide(inner_encoding, launch, inner.div_ceil(columns) * most));

        body.push(self.enter_wide(
            scratch,
            (e.products, None),
            [pairs, inner],
            WideRows::Shared(1),
            splits(outer_encoding),
        ));
        let constants = &WideDownConstants { part: down.part, has_bias, tiles: most };
        let buffers = [x, scale, list, tiles, slots, table, down_bias, e.outputs];
        let launch = Launch { unit: "cuda/wide", kernel: "wide_down", buffers: &buffers, constants };
        body.push(self.wide(outer_encoding, launch, hidden.div_ceil(TILE_ROWS) * most));
        Some(body)
    }
}
