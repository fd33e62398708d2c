//! Lowering of routed experts: which kernels compute them, and those of `kernels/moe.h`, which suit every encoding.

mod batch;
mod divided;
mod few;
mod floats;
mod foresight;
mod low_rank;
mod panels;
mod place;
mod ring;
mod streamed;
mod tensor;
mod wide;

pub(in crate::gpu) use self::divided::meeting;
use self::few::{FewExperts, by_warp};
pub(super) use self::foresight::Foresight;
use self::low_rank::ExpertUpdate;
use self::place::ChosenExperts;
use self::tensor::TensorExperts;
use super::context::{DeferredRoute, Launch, Lowering, Piece, THREADS, WARPS, blocks};
use crate::gpu::arguments::{
    BucketConstants, ExpertConstants, IdentityConstants, MoeActivateConstants, MoeCombineConstants,
    OutputNormConstants, RouteConstants, RouteRowsConstants, ScaleChosenConstants, TokenRouteConstants,
};
use crate::gpu::device::{Dispatch, Grid, Order, Slice};
use crate::gpu::memory::{
    BucketScratch, ExpertMatrix, ExpertScratch, FEW_ROWS, Held, TILE, Updates, most_blocks,
};
use crate::graph::{ExpertMlp, ExpertSetId, Route, Routing, TopSoftmaxOp, Value, WeightId, Weighted};

/// Groups of a multiprocessor that sum experts' outputs, from which a thread has four columns.
const COMBINING_GROUPS: usize = 4;

/// Routed experts with their sum, + residual.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoeStep {
    pub(super) x: Value,
    pub(super) routing: Routing,
    pub(super) set: ExpertSetId,
    pub(super) mlp: ExpertMlp,
    pub(super) residual: Option<Value>,
    /// What adapters add, if a row has one.
    pub(super) updates: Option<Updates>,
    pub(super) out: Value,
}

/// The pairs of a batch: rows with an expert each.
#[derive(Debug, Clone, Copy)]
struct Pairs {
    set: ExpertSetId,
    /// (count), u32: the expert of each.
    ids: Slice,
    count: usize,
    /// Of a row.
    top_k: usize,
}

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
    /// Ids and weights of a routing.
    fn routing(&self, routing: Routing) -> [Slice; 2] {
        let buffers = self.memory.routings[routing.index];
        [buffers.ids.into(), buffers.weights.into()]
    }

    /// Chooses experts by logits.
    pub(super) fn route(&self, choice: &DeferredRoute, routing: Routing) -> Dispatch {
        let DeferredRoute { logits, bias, route } = *choice;
        let [ids, weights] = self.routing(routing);
        let buffers = [self.value(logits), self.optional(bias), ids, weights];
        let constants = RouteConstants::new(&route, bias.is_some());
        if by_warp(choice) && self.rows > 1 {
            let constants = &RouteRowsConstants { route: constants, rows: self.rows };
            let buffers = [self.value(logits), ids, weights];
            return Launch { unit: "route", kernel: "route_rows", buffers: &buffers, constants }
                .over([self.rows.div_ceil(WARPS), 1, 1], THREADS);
        }
        Launch { unit: "route", kernel: "route", buffers: &buffers, constants: &constants }
            .over([self.rows, 1, 1], THREADS)
    }

    /// The softmax over the largest logits of rows.
    pub(in crate::gpu::lower) fn top_softmax(&self, op: &TopSoftmaxOp, out: Value) -> Dispatch {
        let buffers = [self.value(op.logits), self.value(out)];
        let constants = &RouteConstants::new(&op.route(), false);
        Launch { unit: "route", kernel: "top_softmax", buffers: &buffers, constants }
            .over([self.rows, 1, 1], THREADS)
    }

    /// Multiplies the weights of a choice by the factors of its experts.
    pub(super) fn scale_chosen(&self, scales: WeightId, routing: Routing) -> Dispatch {
        let [ids, weights] = self.routing(routing);
        let count = self.rows * routing.top_k();
        let buffers = [ids, self.vector(scales), weights];
        Launch {
            unit: "route",
            kernel: "scale_chosen",
            buffers: &buffers,
            constants: &ScaleChosenConstants { count },
        }
        .each(count)
    }

    /// Chooses experts by logits, among those that a table has for each token.
    pub(super) fn route_by_token(
        &self,
        logits: Value,
        table: WeightId,
        route: &Route,
        routing: Routing,
    ) -> Dispatch {
        let [ids, weights] = self.routing(routing);
        let table = self.weight(table);
        let [a, b, c] = table.planes;
        let buffers = [self.value(logits), self.input(self.layout.tokens), a, b, c, ids, weights];
        let constants =
            &TokenRouteConstants { route: RouteConstants::new(route, false), table: table.format };
        Launch { unit: "route", kernel: "route_by_token", buffers: &buffers, constants }
            .over([self.rows, 1, 1], THREADS)
    }

    /// Queues routed experts.
    pub(super) fn moe_experts(&mut self, step: &MoeStep) {
        let MoeStep { x, routing, set, mlp, residual, updates, out } = *step;
        let [ids, weights] = self.routing(routing);
        let memory = self.memory;
        let experts = &memory.experts;
        let (top_k, pairs) = (routing.top_k(), self.rows * routing.top_k());
        let ExpertScratch { products, outputs, .. } = memory.scratch.experts;
        let exchange = memory.exchange.as_ref();
        let outputs = exchange.map_or(outputs, |exchange| exchange.outputs(self.exchanged));
        let (products, outputs) = (Slice::from(products), Slice::from(outputs));
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
            apart: updates.is_some(),
        };
        let (mut summed, mut ready, mut hands) = (false, usize::MAX, false);
        if updates.is_some() {
            // The choice is asked for again.
            self.routed = None;
        }
        let mut body = if updates.is_some_and(|updates| self.all_adapted(&updates)) {
            vec![]
        } else if let Some(body) = self.streamed_experts(&few) {
            body
        } else if let Some(body) = self.panel_experts(&few) {
            body
        } else if let Some(body) = self.batch_experts(&few) {
            body
        } else if let Some(few) = self.few_experts(&few) {
            (summed, ready, hands) = (few.summed, few.ready, few.hands);
            few.body
        } else if let Some(body) = self.wide_experts(&on_tensor_cores) {
            body
        } else if let Some(body) = self.tensor_experts(&on_tensor_cores) {
            body
        } else if let Some(floats) = self.float_experts(&few) {
            (summed, hands) = (floats.summed, floats.hands);
            floats.body
        } else {
            self.common_experts(
                [self.value(x), outputs],
                input_weights,
                Pairs { set, ids, count: pairs, top_k },
                mlp,
                None,
            )
        };
        if let Some(updates) = updates {
            body.extend(self.adapted_experts(
                x,
                input_weights,
                Pairs { set, ids, count: pairs, top_k },
                mlp,
                updates,
            ));
        }

        if experts.all_at_hand(set, [self.rows, pairs]) {
            let route = self.choices.get(&routing).map(|c| {
                let words = RouteConstants::new(&c.route, c.bias.is_some());
                ([self.value(c.logits), self.optional(c.bias)], words)
            });
            let handed = hands.then_some(x);
            let chosen = ChosenExperts { rows: self.rows, pairs, ids, weights, route, handed };
            let mut placing = self.place(set, &chosen, ready);
            if let Some([foresee, ask]) = self.ask_ahead() {
                placing.insert(1, foresee);
                // The first product of few rows brings what is left of this layer's.
                body.insert(usize::from(ready != usize::MAX), ask);
            }
            self.run.append(&mut placing);
            self.run.append(&mut body);
        } else {
            let offer = hands.then(|| self.offer(set, x, ids, top_k)).flatten();
            self.run.extend(offer);
            self.end_run();
            let once = self.memory.experts.all_at_once(set, [self.rows, pairs]);
            self.pieces.push(Piece::Experts { set, ids, pairs, hands, once, body });
        }
        if summed {
            return;
        }
        if mlp.identities > 0 {
            let experts = self.graph.expert_sets()[set.0].experts;
            let constants = &IdentityConstants { experts, top_k, width: x.width() };
            let buffers = [ids, self.value(x), outputs];
            let identities = Launch { unit: "moe", kernel: "moe_identity", buffers: &buffers, constants };
            self.run.push(identities.over([pairs, blocks(x.width()), 1], THREADS));
        }
        if let Some(norm) = mlp.norm {
            let held = exchange.map_or(Held::ALL, |exchange| exchange.held);
            let constants = &OutputNormConstants {
                width: out.width(),
                eps: norm.eps,
                devices: held.devices,
                own: held.index,
            };
            let buffers = [ids, self.vector(norm.weight), outputs];
            let norm = Launch { unit: "moe", kernel: "moe_norm", buffers: &buffers, constants };
            self.run.push(norm.over([pairs, 1, 1], THREADS));
        }
        if let Some(exchange) = exchange {
            let sum = self.sum_divided(step, exchange);
            return self.run.push(sum);
        }
        let has_residual = residual.is_some();
        let residual = residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [outputs, weights, residual, self.value(out)];
        let (width, weighs) = (out.width(), input_weights.is_none());
        // Few rows are too few groups for a large device if a thread has four columns.
        let many = self.rows * blocks(width / 4) >= COMBINING_GROUPS * self.memory.info.multiprocessors;
        let columns = if width.is_multiple_of(4) && many { 4 } else { 1 };
        let constants = &MoeCombineConstants { top_k, width, columns, has_residual, weighs };
        let combine = Launch { unit: "moe", kernel: "moe_combine", buffers: &buffers, constants };
        self.run.push(combine.over([self.rows, blocks(width / columns), 1], THREADS));
    }

    /// Outputs of all pairs whose experts are present, for rows of x.
    fn common_experts(
        &self,
        [x, outputs]: [Slice; 2],
        weights: Option<Slice>,
        pairs: Pairs,
        mlp: ExpertMlp,
        updates: Option<Updates>,
    ) -> Vec<Dispatch> {
        let Pairs { set, ids, top_k, .. } = pairs;
        let experts = &self.memory.experts;
        let parts = *experts.parts(set);
        let [gate, up, down] = parts;
        let table = experts.table(set, [self.rows, pairs.count]);
        let ExpertScratch { gates, ups, products, .. } = self.memory.scratch.experts;
        let [gates, ups, products] = [gates, ups, products].map(Slice::from);
        let biases = mlp.biases.map(|b| [b.gate, b.up, b.down]);
        let bias = |which: usize| biases.map(|b| b[which]);
        let mut body = vec![];
        let inner = gate.matrix.rows;
        if self.rows > FEW_ROWS || updates.is_some() {
            body.push(self.bucket(pairs, [inner, down.matrix.rows]));
        }
        let projection = |p: Projection<'_>| self.projection(pairs, p);
        let first = |part, bias, to| Projection { part, x, share: top_k, weights, bias, to, grid: 0 };
        let gated = mlp.activation.is_gated();
        let order = if gated { Order::Beside } else { Order::After };
        if gated {
            body.push(projection(first(&gate, bias(0), gates)));
        }
        body.push(Dispatch { order, ..projection(first(&up, bias(1), ups)) });
        let update = |which: usize, x: Slice, share: usize, to: Slice| {
            updates.map(|updates| ExpertUpdate { updates, which, x, share, weights: None, to })
        };
        let first = [(0, gates), (1, ups)].into_iter().filter_map(|(which, to)| update(which, x, top_k, to));
        let first: Vec<ExpertUpdate> = first.map(|update| ExpertUpdate { weights, ..update }).collect();
        body.extend(self.expert_updates(pairs, &parts, &first));
        let count = pairs.count * inner;
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
        let last: Vec<ExpertUpdate> = update(2, products, 1, outputs).into_iter().collect();
        body.extend(self.expert_updates(pairs, &parts, &last));
        body
    }

    /// Sorts pairs by expert, for grids over `rows` outputs each.
    fn bucket(&self, pairs: Pairs, rows: [usize; 2]) -> Dispatch {
        let BucketScratch { list, blocks, grids } = self.memory.scratch.buckets;
        let experts = self.graph.expert_sets()[pairs.set.0].experts;
        let tiles = rows.map(|rows| rows.div_ceil(TILE));
        let table = self.memory.experts.table(pairs.set, [self.rows, pairs.count]);
        let buffers = [table, pairs.ids, list.into(), blocks.into(), grids.into()];
        let constants = &BucketConstants { pairs: pairs.count, experts, tiles };
        Launch { unit: "moe", kernel: "moe_bucket", buffers: &buffers, constants }.over([1, 1, 1], THREADS)
    }

    fn projection(&self, pairs: Pairs, p: Projection<'_>) -> Dispatch {
        let Pairs { set, ids, count: pairs, .. } = pairs;
        let experts = &self.memory.experts;
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
        let BucketScratch { list, blocks, grids } = self.memory.scratch.buckets;
        let (list, blocks) = (list.into(), blocks.into());
        let at = Slice::from(grids).at(12 * p.grid);
        let buffers = [slots, table, list, blocks, at, p.x, weights, bias, p.to];
        let most = most_blocks(pairs, self.graph.expert_sets()[set.0].experts);
        let limit = [rows.div_ceil(TILE), most, 1].map(|n| u32::try_from(n).expect("a grid of 32 bits"));
        let dispatch = Launch { unit: "moe", kernel: "moe_matmul_any", buffers: &buffers, constants }
            .on(Grid::Indirect { at, limit }, THREADS);
        self.on_matrices(dispatch, "moe_matmul", p.part.matrix.dtype)
    }
}
