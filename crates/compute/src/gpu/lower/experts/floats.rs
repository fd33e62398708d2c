//! Lowering of routed experts of few rows to `kernels/floats.h`, which unpacks weights to floats and rounds no activations.

use super::few::{FewBody, FewExperts, by_warp};
use crate::gpu::arguments::{ExpertConstants, FloatGateUpConstants, FloatSumConstants, RouteConstants};
use crate::gpu::device::Slice;
use crate::gpu::encodings::common_name;
use crate::gpu::lower::context::{DeferredRoute, Launch, Lowering, THREADS, WARPS, named};
use crate::gpu::lower::linear::FLOAT_ROWS;
use crate::gpu::memory::{ExpertMatrix, FEW_ROWS, Memory};
use crate::gpu::processor::RowForm;
use crate::graph::{ExpertMlp, ExpertSetId, Weighted};

/// Rows whose pairs' outputs are summed by what makes them: of more, the sum takes less time by itself.
const MOST_SUMMED: usize = 2;
/// Rows whose experts are chosen by every group that multiplies them.
const MOST_CHOOSING: usize = 2;
/// Of whose experts that saves time.
const FP8: &str = "fp8";
/// Columns that a lane reads at once.
const COLUMNS: usize = 8;

fn encoding(matrix: &ExpertMatrix) -> Option<&'static str> {
    common_name(matrix.matrix.dtype).filter(|_| matrix.matrix.cols.is_multiple_of(COLUMNS))
}

impl Memory {
    /// The ends of the kernels' names for a set's experts, if these kernels suit them.
    fn float_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        let [gate, up, down] = self.experts.parts(set);
        let fits = gate.matrix.dtype == up.matrix.dtype;
        Some([encoding(up).filter(|_| fits)?, encoding(down)?])
    }

    /// What rows of x routed experts of few rows take, if kernels find their weights.
    pub(in crate::gpu) fn expert_rows(&self, set: ExpertSetId) -> Option<RowForm> {
        let floats = || self.finds_weights() && self.float_encodings(set).is_some();
        if self.experts_take_bytes(set) { Some(RowForm::Bytes) } else { floats().then_some(RowForm::Floats) }
    }
}

impl Lowering<'_> {
    /// Whether groups make a choice for themselves.
    pub(super) fn floats_choose(&self, set: ExpertSetId, choice: &DeferredRoute, mlp: &ExpertMlp) -> bool {
        self.rows <= MOST_CHOOSING
            && by_warp(choice)
            && mlp.identities == 0
            && self.few_encodings(set).is_none()
            && self.float_encodings(set).is_some_and(|[up, _]| up == FP8)
    }

    /// The ends of the kernels' names for a set's experts of few rows, if these kernels compute them.
    pub(in crate::gpu::lower) fn float_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        self.memory.float_encodings(set).filter(|_| self.rows <= FEW_ROWS)
    }

    /// The sum of all pairs' outputs or, where experts may be absent, outputs of those that are present or that the processor
    /// computes; nothing if the kernels do not suit them.
    pub(super) fn float_experts(&self, e: &FewExperts<'_>) -> Option<FewBody> {
        let [gate, up, down] = e.parts;
        let [first, second] = self.float_encodings(e.set)?;
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        let experts = &self.memory.experts;
        let (slots, table) = (experts.slots(), experts.table(e.set, [self.rows, pairs]));
        let [ids, weights] = self.routing(e.routing);
        let none = self.input(0);
        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([none; 3]);
        let (has_bias, products) = (e.biases.is_some(), Slice::from(self.memory.scratch.experts.products));

        let (x, norm) = self.entering(e.x);
        let norm_weight = norm.map_or(none, |norm| self.vector(norm.weight));
        let choice = self.own_choice(e);
        let logits = choice.map_or(none, |choice| self.value(choice.logits));
        let constants = &FloatGateUpConstants {
            gate: gate.part,
            up: up.part,
            norm: norm.into(),
            share: top_k,
            activation: e.mlp.activation.into(),
            has_bias,
            weighs: e.mlp.weighted == Weighted::Input,
            routes: choice.is_some(),
            route: choice.map(|choice| RouteConstants::new(&choice.route, false)).unwrap_or_default(),
        };
        let buffers = [slots, table, logits, ids, x, norm_weight, weights, gate_bias, up_bias, products];
        let launch = Launch { unit: "floats", kernel: "float_gate_up", buffers: &buffers, constants };
        let groups = up.matrix.rows.div_ceil(FLOAT_ROWS * WARPS) + usize::from(choice.is_some());
        let grid = [pairs, groups, 1];
        let gate_up = named(launch.over(grid, THREADS), first);

        let of_down = ExpertConstants { part: down.part, share: 1, has_bias, weighs: false };
        if experts.resident()
            && experts.all_at_once(e.set, [self.rows, pairs])
            && !e.apart
            && e.mlp.identities == 0
            && e.mlp.norm.is_none()
            && self.rows <= MOST_SUMMED
        {
            let (has_residual, weighs) = (e.residual.is_some(), e.mlp.weighted != Weighted::Input);
            let constants = &FloatSumConstants { down: of_down, top_k, has_residual, weighs };
            let residual = e.residual.unwrap_or(none);
            let buffers = [slots, table, ids, products, down_bias, weights, residual, e.out];
            let launch = Launch { unit: "floats", kernel: "float_sum", buffers: &buffers, constants };
            let grid = [self.rows, down.matrix.rows.div_ceil(WARPS), 1];
            let body = vec![gate_up, named(launch.over(grid, THREADS), second)];
            return Some(FewBody { body, ready: usize::MAX, summed: true, hands: false });
        }
        let constants = &of_down;
        let buffers = [slots, table, ids, products, down_bias, e.outputs];
        let launch = Launch { unit: "floats", kernel: "float_down", buffers: &buffers, constants };
        let grid = [pairs, down.matrix.rows.div_ceil(2 * FLOAT_ROWS * WARPS), 1];
        let down = named(launch.over(grid, THREADS), second);
        let outputs = (e.outputs, e.parts[2].matrix.rows);
        let collect = self.collect(e.set, [self.rows, pairs], ids, outputs).filter(|_| !e.apart);
        let hands = collect.is_some();
        let body = [gate_up, down].into_iter().chain(collect).collect();
        Some(FewBody { body, ready: usize::MAX, summed: false, hands })
    }
}
