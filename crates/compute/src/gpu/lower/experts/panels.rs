//! Lowering of routed experts to `kernels/cuda/panels.cu`.

use super::few::FewExperts;
use crate::gpu::arguments::{
    ActivationConstants, TensorDownConstants, TensorGateUpConstants, TensorSortConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::PANELS_UNIT;
use crate::gpu::lower::context::{Launch, Lowering, named};
use crate::gpu::lower::panels::{BlockRows, GROUP_WARPS, PANEL, PANEL_SHARED, THREADS};
use crate::gpu::memory::{
    MOST_TILED_EXPERTS, PANEL_TILE, PANEL_TOKENS, PanelScratch, SCALED_COLUMNS, most_panel_tiles, most_places,
};
use crate::graph::{MatrixSpec, Weighted};

impl Lowering<'_> {
    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn panel_experts(&mut self, e: &FewExperts<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.panel_scratch()?;
        let [gate, up, down] = e.parts;
        let name = |matrix: MatrixSpec| kernel_name(matrix.dtype, FastPath::Tensor);
        let gate_name = name(gate.matrix).filter(|_| gate.matrix.dtype == up.matrix.dtype)?;
        let down_name = name(down.matrix)?;
        if [gate, down].iter().any(|part| !part.matrix.cols.is_multiple_of(SCALED_COLUMNS)) {
            return None;
        }
        let experts = self.graph.expert_sets()[e.set.0].experts;
        if experts > MOST_TILED_EXPERTS {
            return None;
        }
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        let (places, most) = (most_places(pairs, experts), most_panel_tiles(pairs, experts, PANEL_TILE));
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let [ids, weights] = self.routing(e.routing);
        let PanelScratch { x, scale, list, tiles, products } = scratch;
        let [x, scale, list, tiles, products] = [x, scale, list, tiles, products].map(Slice::from);

        let tokens = PANEL_TILE;
        let constants =
            &TensorSortConstants { pairs, experts, tiles: most, tokens, align: PANEL_TOKENS, places };
        let buffers = [table, ids, list, tiles];
        let sort = Launch { unit: "cuda/prefill", kernel: "tensor_sort", buffers: &buffers, constants };
        let mut body = vec![sort.over([1, 1, 1], 1024)];
        // The blocks are those of pairs from here on.
        self.entered = None;
        body.push(self.value_blocks(scratch, e.x, BlockRows::Shared(top_k), places));

        let none = self.input(0);
        let [gate_bias, up_bias, _] = e.biases.unwrap_or([none; 3]);
        let has_bias = e.biases.is_some();
        let ActivationConstants { kind, alpha, limit } = e.mlp.activation.into();
        let constants = &TensorGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: top_k,
            has_bias,
            activation: kind,
            alpha,
            limit,
            weighs: e.mlp.weighted == Weighted::Input,
        };
        let buffers = [x, scale, list, tiles, slots, table, weights, gate_bias, up_bias, products];
        let outputs = GROUP_WARPS * if e.mlp.activation.is_gated() { PANEL } else { 2 * PANEL };
        let launch = Launch { unit: PANELS_UNIT, kernel: "panel_gate_up", buffers: &buffers, constants };
        let grid = [up.matrix.rows.div_ceil(outputs), most, 1];
        body.push(Dispatch { shared: PANEL_SHARED, ..named(launch.over(grid, THREADS), gate_name) });

        body.extend(self.panel_down(scratch, e, down_name));
        Some(body)
    }

    /// Down's products of pairs in tiles, from those of gate and up.
    pub(super) fn panel_down(&self, scratch: PanelScratch, e: &FewExperts<'_>, name: &str) -> [Dispatch; 2] {
        let down = &e.parts[2];
        let experts = self.graph.expert_sets()[e.set.0].experts;
        let pairs = self.rows * e.routing.top_k();
        let (slots, table) =
            (self.memory.experts.slots(), self.memory.experts.table(e.set, [self.rows, pairs]));
        let PanelScratch { x, scale, list, tiles, products } = scratch;
        let [x, scale, list, tiles, products] = [x, scale, list, tiles, products].map(Slice::from);
        let blocks = self.place_blocks(scratch, products, [most_places(pairs, experts), down.matrix.cols]);
        let bias = e.biases.map_or(self.input(0), |biases| biases[2]);
        let constants = &TensorDownConstants { part: down.part, has_bias: e.biases.is_some() };
        let buffers = [x, scale, list, tiles, slots, table, bias, e.outputs];
        let launch = Launch { unit: PANELS_UNIT, kernel: "panel_down", buffers: &buffers, constants };
        let groups = down.matrix.rows.div_ceil(GROUP_WARPS * 2 * PANEL);
        let product = launch.over([groups, most_panel_tiles(pairs, experts, PANEL_TILE), 1], THREADS);
        [blocks, Dispatch { shared: PANEL_SHARED, ..named(product, name) }]
    }
}
