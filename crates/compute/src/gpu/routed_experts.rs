//! Lowering of routed experts: which kernels compute them, and those of `kernels/moe.h`, which suit every encoding.

use super::arguments::{
    BucketConstants, ExpertConstants, MoeActivateConstants, MoeCombineConstants, RouteConstants,
};
use super::device::{Dispatch, Grid, Order, Slice};
use super::experts::ExpertMatrix;
use super::few_experts::FewExperts;
use super::inputs::FEW_ROWS;
use super::lower::{Launch, Lowering, Piece, THREADS, TILE, WARPS, most_blocks};
use super::tensor_cores::TensorExperts;
use super::tiers::Chosen;
use crate::graph::{Activation, ExpertMlp, ExpertSetId, Routing, Value, WeightId, Weighted};

/// One of an expert's matrices with what it multiplies.
struct Projection<'a> {
    part: &'a ExpertMatrix,
    x: Slice,
    /// Pairs that share a row of x.
    share: usize,
    /// What rows of x count, a pair; all the same when absent.
    weights: Option<Slice>,
    bias: Option<WeightId>,
    to: Slice,
    /// Which of the two grids.
    grid: usize,
}

impl Lowering<'_> {
    pub(super) fn moe_experts(
        &mut self,
        (x, residual, out): (Value, Option<Value>, Value),
        routing: Routing,
        set: ExpertSetId,
        mlp: ExpertMlp,
    ) {
        let [ids, weights] = self.memory.routings[routing.index].map(Slice::from);
        let experts = self.memory.experts;
        let (top_k, pairs) = (routing.top_k(), self.rows * routing.top_k());
        let [_, _, products, outputs] = self.memory.scratch.experts.map(Slice::from);
        let parts = *experts.parts(set);
        let input_weights = (mlp.weighted == Weighted::Input).then_some(weights);
        let on_tensor_cores = TensorExperts {
            x,
            ids,
            weights: input_weights,
            top_k,
            set,
            parts: &parts,
            mlp: &mlp,
            biases: mlp.biases.map(|b| [b.gate, b.up, b.down].map(|id| self.vector(id))),
            products,
            outputs,
        };
        let few = FewExperts {
            x,
            set,
            routing,
            parts: &parts,
            mlp: &mlp,
            biases: on_tensor_cores.biases,
            residual: residual.map(|r| self.value(r)),
            outputs,
            out: self.value(out),
        };
        let (mut summed, mut ready) = (false, usize::MAX);
        let mut body = if let Some(few) = self.few_experts(&few) {
            (summed, ready) = (few.summed, few.ready);
            few.body
        } else if let Some(body) = self.tensor_experts(&on_tensor_cores) {
            body
        } else {
            self.common_experts((x, input_weights), (ids, pairs, top_k), set, mlp)
        };

        if experts.all_at_hand(set, [self.rows, pairs]) {
            let route = self.choices.get(&routing).map(|c| {
                let words = RouteConstants::new(&c.route, c.bias.is_some());
                ([self.value(c.logits), self.optional(c.bias)], words)
            });
            let chosen = Chosen { rows: self.rows, pairs, ids, weights, route };
            self.run.extend(experts.place(set, &chosen, ready));
            self.run.append(&mut body);
        } else {
            let run = std::mem::take(&mut self.run);
            self.pieces.push(Piece::Run(run));
            self.pieces.push(Piece::Experts { set, ids, pairs, body });
        }
        if summed {
            return;
        }
        let has_residual = residual.is_some();
        let residual = residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [outputs, weights, residual, self.value(out)];
        let constants =
            &MoeCombineConstants { top_k, width: out.width(), has_residual, weighs: input_weights.is_none() };
        let combine = Launch { unit: "moe", kernel: "moe_combine", buffers: &buffers, constants };
        self.run.push(combine.over([self.rows, 1, 1], THREADS));
    }

    /// Outputs of all pairs whose experts are present.
    fn common_experts(
        &self,
        (x, weights): (Value, Option<Slice>),
        (ids, pairs, top_k): (Slice, usize, usize),
        set: ExpertSetId,
        mlp: ExpertMlp,
    ) -> Vec<Dispatch> {
        let experts = self.memory.experts;
        let [gate, up, down] = *experts.parts(set);
        let table = experts.table(set, [self.rows, pairs]);
        let [gates, ups, products, outputs] = self.memory.scratch.experts.map(Slice::from);
        let biases = mlp.biases.map(|b| [b.gate, b.up, b.down]);
        let bias = |which: usize| biases.map(|b| b[which]);
        let x = self.value(x);
        let mut body = vec![];
        let inner = gate.matrix.rows;
        if self.rows > FEW_ROWS {
            body.push(self.bucket(set, ids, pairs, [inner, down.matrix.rows]));
        }
        let projection = |p: Projection<'_>| self.projection(set, ids, pairs, p);
        let first = |part, bias, to| Projection { part, x, share: top_k, weights, bias, to, grid: 0 };
        let gated = mlp.activation != Activation::SquaredRelu;
        let order = if gated { Order::Beside } else { Order::After };
        if gated {
            body.push(projection(first(&gate, bias(0), gates)));
        }
        body.push(Dispatch { order, ..projection(first(&up, bias(1), ups)) });
        let count = pairs * inner;
        let activation = mlp.activation.into();
        let constants = &MoeActivateConstants { count, width: inner, activation };
        let buffers = [table, ids, if gated { gates } else { ups }, ups, products];
        body.push(Launch { unit: "moe", kernel: "moe_activate", buffers: &buffers, constants }.each(count));
        let (bias, to) = (bias(2), outputs);
        body.push(projection(Projection {
            part: &down,
            x: products,
            share: 1,
            weights: None,
            bias,
            to,
            grid: 1,
        }));
        body
    }

    /// Sorts pairs by expert, for grids over `rows` outputs each.
    fn bucket(&self, set: ExpertSetId, ids: Slice, pairs: usize, rows: [usize; 2]) -> Dispatch {
        let [list, blocks, grids] = self.memory.scratch.buckets.map(Slice::from);
        let count = self.graph.expert_sets()[set.0].experts;
        let tiles = rows.map(|rows| rows.div_ceil(TILE));
        let table = self.memory.experts.table(set, [self.rows, pairs]);
        let buffers = [table, ids, list, blocks, grids];
        let constants = &BucketConstants { pairs, experts: count, tiles };
        Launch { unit: "moe", kernel: "moe_bucket", buffers: &buffers, constants }.over([1, 1, 1], THREADS)
    }

    fn projection(&self, set: ExpertSetId, ids: Slice, pairs: usize, p: Projection<'_>) -> Dispatch {
        let experts = self.memory.experts;
        let (slots, table) = (experts.slots(), experts.table(set, [self.rows, pairs]));
        let constants = &ExpertConstants {
            part: p.part.part,
            share: p.share,
            has_bias: p.bias.is_some(),
            weighs: p.weights.is_some(),
        };
        let (weights, bias) = (p.weights.unwrap_or(self.input(0)), self.optional(p.bias));
        let rows = p.part.matrix.rows;
        if self.rows <= FEW_ROWS {
            let buffers = [slots, table, ids, p.x, weights, bias, p.to];
            return Launch { unit: "moe", kernel: "moe_matvec_any", buffers: &buffers, constants }
                .over([rows.div_ceil(WARPS), pairs, 1], THREADS);
        }
        let [list, blocks, grids] = self.memory.scratch.buckets.map(Slice::from);
        let at = grids.at(12 * p.grid);
        let buffers = [slots, table, list, blocks, at, p.x, weights, bias, p.to];
        let most = most_blocks(pairs, self.graph.expert_sets()[set.0].experts);
        let limit = [rows.div_ceil(TILE), most, 1].map(|n| u32::try_from(n).expect("a grid of 32 bits"));
        let dispatch = Launch { unit: "moe", kernel: "moe_matmul_any", buffers: &buffers, constants }
            .on(Grid::Indirect { at, limit }, THREADS);
        self.on_matrices(dispatch, "moe_matmul", p.part.matrix.dtype)
    }
}
