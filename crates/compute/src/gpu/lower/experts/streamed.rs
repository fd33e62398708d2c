//! Lowering of routed experts to `kernels/cuda/expert_panels.cu`, on devices that copy to threadgroup memory by themselves.

use super::few::{FewExperts, by_warp};
use super::ring::{EIGHT, MOST_WARPS, PANELS, Ring, WIDE_WARPS, is_loose, step_of};
use crate::DType;
use crate::gpu::arguments::{
    ActivationConstants, EnterExpertsConstants, RouteConstants, StreamDownConstants, StreamGateUpConstants,
    TensorGateUpConstants, TensorSortConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::{ENTER_EXPERTS_UNIT, EXPERT_PANELS_UNIT};
use crate::gpu::lower::context::{DeferredRoute, Launch, Lowering};
use crate::gpu::lower::panels::PANEL;
use crate::gpu::memory::{
    ExpertMatrix, MOST_TILED_EXPERTS, PANEL_TILE, PANEL_TOKENS, PanelScratch, SCALED_COLUMNS, f16_bytes,
    most_panel_tiles, most_places,
};
use crate::graph::{Activation, MatrixSpec, Routing, Weighted};

/// Rows up to which these kernels are faster than others.
const MOST_ROWS: usize = 256;
/// Warps of a group up to which a thread has more registers.
const FEW_WARPS: usize = 6;
/// Rows up to which a group that sorts chooses for all of them sooner than another dispatch, measured on an H100: a warp has one.
const MOST_CHOOSING: usize = 32;
/// `MOST_PAIRS` of `kernels/cuda/enter_experts.cu`.
const MOST_CHOSEN: usize = 8192;
/// Columns of a warp.
const COLUMNS: usize = 256;
/// Bytes of a warp's sums, two of each row of `rows`, for every token.
const fn kept(rows: usize) -> usize {
    2 * rows * size_of::<f32>()
}

/// Bytes of sums of a warp's activations, for every token.
fn activation_sums(dtype: DType) -> usize {
    let count = match dtype {
        DType::IQ1_M => 32,
        DType::Q3_K | DType::Q6_K => 16,
        DType::Q4_0 | DType::IQ4_NL | DType::IQ4_XS | DType::IQ1_S => 8,
        DType::Q8_0 | DType::Affine { .. } | DType::Int { .. } => 8,
        _ => 0,
    };
    count * size_of::<f32>()
}

/// Pairs of a tile: eight where experts have few pairs, so that most have no more, as measured on an H200.
fn tile(pairs: usize, experts: usize) -> usize {
    if pairs <= 6 * experts { PANEL_TOKENS } else { PANEL_TILE }
}

/// How groups multiply a matrix of which a unit has `panels` panels a team, of so many rows, by tiles of `tile` tokens; nothing if it does
/// not suit the kernels.
fn ring(matrix: &ExpertMatrix, [panels, panel]: [usize; 2], [tiles, tile]: [usize; 2]) -> Option<Ring> {
    let MatrixSpec { dtype, cols, .. } = matrix.matrix;
    let warps = cols.div_ceil(COLUMNS);
    let suits =
        warps <= WIDE_WARPS && cols.is_multiple_of(if is_loose(dtype) { step_of(dtype) } else { COLUMNS });
    let beside = tile * (kept(PANELS * panel) + activation_sums(dtype));
    Ring::new(matrix, [panels, panel, warps], tiles, beside).filter(|_| suits)
}

impl Lowering<'_> {
    /// The choice that was queued right before, which is then left to the experts, if their kernel can make it.
    fn take_choice(&mut self, routing: Routing) -> Option<DeferredRoute> {
        let (_, choice) = self.routed.take().filter(|(of, choice)| *of == routing && by_warp(choice))?;
        let ids = self.routing(routing)[0];
        let queued = self.run.last().is_some_and(|last| {
            matches!(&*last.kernel, "route" | "route_rows") && last.buffers.contains(&ids)
        });
        let suits = queued
            && self.memory.experts.resident()
            && self.rows <= MOST_CHOOSING
            && self.rows * routing.top_k() <= MOST_CHOSEN;
        suits.then(|| {
            self.run.pop();
            choice
        })
    }

    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn streamed_experts(&mut self, e: &FewExperts<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.panel_scratch().filter(|_| self.memory.info.bulk_copies)?;
        let [gate, up, down] = e.parts;
        let experts = self.graph.expert_sets()[e.set.0].experts;
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        // Panels, which may come after gate and up, take tiles of 16.
        let wanted = tile(pairs, experts);
        let tiles_of = |tile| [most_panel_tiles(pairs, experts, tile), tile];
        let second = ring(down, [PANELS, PANEL], tiles_of(wanted));
        let tokens = if second.is_some() { wanted } else { PANEL_TILE };
        let [most, _] = tiles_of(tokens);
        let places = most_places(pairs, experts);
        let block_rows = self.rows.next_multiple_of(PANEL_TOKENS);
        // Of wide rows, a unit of gate and up has half as many.
        let whole = ring(up, [1, PANEL], [most, tokens]);
        let eights = whole.is_none();
        let first = whole.or_else(|| ring(up, [1, EIGHT], [most, tokens]));
        let first = first.filter(|_| gate.matrix.dtype == up.matrix.dtype)?;
        let down_name = kernel_name(down.matrix.dtype, FastPath::Tensor);
        let down_name = down_name.filter(|_| down.matrix.cols.is_multiple_of(SCALED_COLUMNS))?;
        let suits = experts <= MOST_TILED_EXPERTS
            && self.rows <= MOST_ROWS
            && (e.biases.is_none() || [up, down].iter().all(|part| is_loose(part.matrix.dtype)))
            && 2 * block_rows <= places
            && e.mlp.activation != Activation::SquaredRelu;
        if !suits {
            return None;
        }
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let [ids, weights] = self.routing(e.routing);
        let PanelScratch { x, scale, list, tiles, products } = scratch;
        let [x, scale, list, tiles, products] = [x, scale, list, tiles, products].map(Slice::from);

        let sort = TensorSortConstants { pairs, experts, tiles: most, tokens, align: PANEL_TOKENS, places };
        let (from, norm) = self.entering(e.x);
        let choice = self.take_choice(e.routing);
        let logits = choice.map_or(self.input(0), |choice| self.value(choice.logits));
        let route = choice.map(|choice| RouteConstants::new(&choice.route, false)).unwrap_or_default();
        // The router's product reads x itself, and nothing that is made of it here.
        let early = match self.last_group() {
            [router] => router.kernel.starts_with("batch_plain") && router.buffers.last() != Some(&from),
            _ => false,
        };
        let norm_weight = norm.map_or(self.input(0), |norm| self.vector(norm.weight));
        // Tokens row by row come after their blocks, in memory for rows of all places.
        let plain = x.at(f16_bytes(self.rows, e.x.width()));
        let buffers = [from, norm_weight, table, ids, x, plain, scale, list, tiles, logits, weights];
        let routes = choice.is_some();
        let constants =
            &EnterExpertsConstants { cols: e.x.width(), norm: norm.into(), sort, routes, early, route };
        let enter =
            Launch { unit: ENTER_EXPERTS_UNIT, kernel: "enter_experts", buffers: &buffers, constants };
        let mut body = vec![enter.over([self.rows + 1, 1, 1], 1024)];
        self.entered = Some(e.x);

        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([self.input(0); 3]);
        let has_bias = e.biases.is_some();
        let ActivationConstants { kind, alpha, limit } = e.mlp.activation.into();
        let product = TensorGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: top_k,
            has_bias,
            activation: kind,
            alpha,
            limit,
            weighs: e.mlp.weighted == Weighted::Input,
        };
        let buffers = [plain, scale, list, tiles, slots, table, weights, gate_bias, up_bias, products];
        let constants = &StreamGateUpConstants { product, ring: first.constants };
        let kernel = match (tokens, first.warps()) {
            (PANEL_TILE, _) if eights => "stream_gate_up_16_eights",
            _ if eights => "stream_gate_up_8_eights",
            (PANEL_TILE, ..=MOST_WARPS) => "stream_gate_up_16",
            (PANEL_TILE, _) => "stream_gate_up_16_wide",
            (_, ..=MOST_WARPS) => "stream_gate_up_8",
            _ => "stream_gate_up_8_wide",
        };
        let launch = Launch { unit: EXPERT_PANELS_UNIT, kernel, buffers: &buffers, constants };
        body.push(self.over_ring(launch, &first));
        let Some(second) = second else {
            // The blocks are those of pairs from here on.
            self.entered = None;
            body.extend(self.panel_down(scratch, e, down_name));
            return Some(body);
        };
        let buffers = [products, list, tiles, slots, table, down_bias, e.outputs];
        let constants = &StreamDownConstants { part: down.part, has_bias, ring: second.constants };
        let kernel = match (tokens, second.warps()) {
            (PANEL_TILE, ..=FEW_WARPS) => "stream_down_16_few",
            (PANEL_TILE, ..=MOST_WARPS) => "stream_down_16",
            (PANEL_TILE, _) => "stream_down_16_wide",
            (_, ..=MOST_WARPS) => "stream_down_8",
            _ => "stream_down_8_wide",
        };
        let launch = Launch { unit: EXPERT_PANELS_UNIT, kernel, buffers: &buffers, constants };
        body.push(self.over_ring(launch, &second));
        Some(body)
    }
}
