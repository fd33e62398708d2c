//! Lowering of routed experts: which kernels compute them, and those of `kernels/moe.h`, which suit every encoding.

use super::device::{Dispatch, Grid, Order, Slice, Words};
use super::experts::Part;
use super::few_experts::FewExperts;
use super::inputs::FEW_ROWS;
use super::lower::{Launch, Lowering, Piece, THREADS, TILE, WARPS, most_blocks};
use super::tensor_cores::TensorExperts;
use crate::graph::{Activation, ExpertMlp, ExpertSetId, Routing, Value, WeightId};

/// One of an expert's matrices with what it multiplies.
struct Projection<'a> {
    part: &'a Part,
    x: Slice,
    /// Pairs that share a row of x.
    share: usize,
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
        let on_tensor_cores = TensorExperts {
            x,
            ids,
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
        let mut summed = false;
        let mut body = if let Some(few) = self.few_experts(&few) {
            summed = few.summed;
            few.body
        } else if let Some(body) = self.tensor_experts(&on_tensor_cores) {
            body
        } else {
            self.common_experts(x, (ids, pairs, top_k), set, mlp)
        };

        if experts.all_at_hand(set, [self.rows, pairs]) {
            self.run.extend(experts.place(set, ids, [self.rows, pairs]));
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
        let constants: &[&dyn Words] = &[&top_k, &out.width(), &has_residual];
        let combine = Launch { unit: "moe", kernel: "moe_combine", buffers: &buffers, constants };
        self.run.push(combine.over([self.rows, 1, 1], THREADS));
    }

    /// Outputs of all pairs whose experts are present.
    fn common_experts(
        &self,
        x: Value,
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
        let projection = |part: &Part, x, share, bias, to, grid| {
            self.projection(set, ids, pairs, Projection { part, x, share, bias, to, grid })
        };
        body.push(projection(&gate, x, top_k, bias(0), gates, 0));
        body.push(Dispatch { order: Order::Beside, ..projection(&up, x, top_k, bias(1), ups, 0) });
        let (activation, alpha, limit) = match mlp.activation {
            Activation::SwiGlu => (0u32, 0.0, 0.0),
            Activation::ClampedSwiGlu { alpha, limit } => (1, alpha, limit),
            Activation::LimitedSwiGlu { .. } | Activation::CappedSwiGlu { .. } | Activation::SquaredRelu => {
                unreachable!("refused before lowering")
            }
        };
        let count = pairs * inner;
        let constants: &[&dyn Words] = &[&count, &inner, &activation, &alpha, &limit];
        let buffers = [table, ids, gates, ups, products];
        body.push(Launch { unit: "moe", kernel: "moe_activate", buffers: &buffers, constants }.each(count));
        body.push(projection(&down, products, 1, bias(2), outputs, 1));
        body
    }

    /// Sorts pairs by expert, for grids over `rows` outputs each.
    fn bucket(&self, set: ExpertSetId, ids: Slice, pairs: usize, rows: [usize; 2]) -> Dispatch {
        let [list, blocks, grids] = self.memory.scratch.buckets.map(Slice::from);
        let count = self.graph.expert_sets()[set.0].experts;
        let tiles = rows.map(|rows| rows.div_ceil(TILE));
        let table = self.memory.experts.table(set, [self.rows, pairs]);
        let buffers = [table, ids, list, blocks, grids];
        Launch { unit: "moe", kernel: "moe_bucket", buffers: &buffers, constants: &[&pairs, &count, &tiles] }
            .over([1, 1, 1], THREADS)
    }

    fn projection(&self, set: ExpertSetId, ids: Slice, pairs: usize, p: Projection<'_>) -> Dispatch {
        let experts = self.memory.experts;
        let (slots, table) = (experts.slots(), experts.table(set, [self.rows, pairs]));
        let constants: &[&dyn Words] = &[p.part, &p.share, &p.bias.is_some()];
        let bias = self.optional(p.bias);
        let rows = p.part.matrix.rows;
        if self.rows <= FEW_ROWS {
            let buffers = [slots, table, ids, p.x, bias, p.to];
            return Launch { unit: "moe", kernel: "moe_matvec_any", buffers: &buffers, constants }
                .over([rows.div_ceil(WARPS), pairs, 1], THREADS);
        }
        let [list, blocks, grids] = self.memory.scratch.buckets.map(Slice::from);
        let at = grids.at(12 * p.grid);
        let buffers = [slots, table, list, blocks, at, p.x, bias, p.to];
        let most = most_blocks(pairs, self.graph.expert_sets()[set.0].experts);
        let limit = [rows.div_ceil(TILE), most, 1].map(|n| u32::try_from(n).expect("a grid of 32 bits"));
        let dispatch = Launch { unit: "moe", kernel: "moe_matmul_any", buffers: &buffers, constants }
            .on(Grid::Indirect { at, limit }, THREADS);
        self.on_matrices(dispatch, "moe_matmul", p.part.matrix.dtype)
    }
}
