//! Lowering: steps to dispatches, for batches of one shape.

use std::collections::HashMap;

use super::arguments::{
    CarryConstants, DeltaConstants, ElementConstants, EmbedConstants, GatherConstants, LinearConstants,
    RouteConstants, SliceConstants, WindowConstants,
};
use super::compressed::IndexScratch;
use super::device::{BufferId, Dispatch, Grid, Order, Slice, Words};
use super::encodings::{FastPath, kernel_name};
use super::experts::DeviceExperts;
use super::few_experts::{Choice, Quantized};
use super::few_rows::{FewLinear, Norm};
use super::inputs::{FEW_ROWS, InputLayout, Shape, Turn};
use super::ngrams::NGramTable;
use super::operations::Channels;
use super::state::State;
use super::steps::{Buffers, Step};
use super::tensor_cores::{TensorLinear, TensorScratch};
use super::weights::DeviceWeight;
use crate::DType;
use crate::backend::{ActivationMode, KvType};
use crate::graph::{
    Decay, DeltaInputs, DeltaRule, ExpertSetId, Graph, HeadPairing, MoeExpertsOp, Op, Route, Routing,
    StateId, Value, WeightId,
};

/// Threads of a group, unless a kernel says otherwise.
pub(super) const THREADS: u32 = 256;
/// Warps of such a group.
pub(super) const WARPS: usize = 8;
/// Outputs and tokens of a tile.
pub(super) const TILE: usize = 64;

/// Work between the host's steps.
#[derive(Debug)]
pub(crate) enum Piece<D> {
    /// Runs without the host.
    Run(D),
    /// Experts that may have to be loaded: `ids` (`pairs`, u32) are those chosen, `body` computes all pairs whose
    /// experts are present.
    Experts { set: ExpertSetId, ids: Slice, pairs: usize, body: D },
}

/// Device memory that dispatches refer to.
pub(crate) struct Memory<'a> {
    pub(crate) weights: &'a [DeviceWeight],
    pub(crate) buffers: &'a [BufferId],
    /// Ids and weights of each routing.
    pub(crate) routings: &'a [[BufferId; 2]],
    pub(crate) state: &'a State,
    pub(crate) experts: &'a DeviceExperts,
    pub(crate) inputs: BufferId,
    pub(crate) page_numbers: BufferId,
    pub(crate) scratch: &'a Scratch,
    /// Of the inputs' angles.
    pub(crate) turns: &'a [Turn],
    pub(crate) ngrams: &'a HashMap<StateId, NGramTable>,
    pub(crate) index: IndexScratch,
    /// Given if tensor cores may be used.
    pub(crate) tensor: Option<TensorScratch>,
    /// Whether products of many rows may use simdgroup matrices.
    pub(crate) simdgroup_matrices: bool,
    pub(crate) multiprocessors: usize,
    pub(crate) copies_ahead: bool,
    /// The experts' products in eight bits.
    pub(crate) quantized: Quantized,
    pub(crate) activations: ActivationMode,
    pub(crate) logits: BufferId,
}

/// Memory within a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    /// Of attention: parts and statistics; of latent attention, queries and results too.
    pub(crate) attention: [BufferId; 4],
    /// Of experts: gate, up, product, and outputs of all pairs.
    pub(crate) experts: [BufferId; 4],
    /// Lists of pairs, blocks, grids.
    pub(crate) buckets: [BufferId; 3],
}

/// Bytes of [`Scratch`]'s buffers for batches of up to `rows` rows.
pub(crate) fn scratch_bytes(graph: &Graph, rows: usize) -> ([usize; 4], [usize; 4], [usize; 3]) {
    let (few, most) = (rows.min(FEW_ROWS), super::inputs::MOST_SPLITS);
    let mut attention = [4; 4];
    let mut grow = |which: usize, elements: usize| attention[which] = attention[which].max(elements * 4);
    for cache in graph.caches() {
        grow(2, rows * cache.heads * cache.head_dim);
        grow(0, few * cache.heads * most * cache.value_dim);
        grow(1, few * cache.heads * most * 2);
    }
    for cache in graph.compressed_caches() {
        grow(0, few * cache.heads * most * cache.head_dim);
        grow(1, few * cache.heads * most * 2);
    }
    for c in graph.latent_caches() {
        grow(0, few * c.heads * most * c.rank);
        grow(1, few * c.heads * most * 2);
        grow(2, rows * c.heads * (c.rank + c.rope));
        grow(3, rows * c.heads * c.rank);
    }
    let mut experts = [4; 4];
    let mut buckets = [4; 3];
    for node in graph.nodes() {
        if let Op::MoeExperts(MoeExpertsOp { routing, experts: set, .. }) = node.op {
            let set = &graph.expert_sets()[set.0];
            let pairs = rows * routing.top_k();
            let inner = pairs * set.width() * 4;
            let sizes = [inner, inner, inner, pairs * set.down.rows * 4];
            experts.iter_mut().zip(sizes).for_each(|(most, size)| *most = size.max(*most));
            let sizes = [pairs * 4, most_blocks(pairs, set.experts) * 12, 24];
            buckets.iter_mut().zip(sizes).for_each(|(most, size)| *most = size.max(*most));
        }
    }
    (attention, experts, buckets)
}

/// Blocks of pairs, at most.
pub(super) fn most_blocks(pairs: usize, experts: usize) -> usize {
    pairs / TILE + experts.min(pairs)
}

/// Lowers all steps.
pub(crate) fn lower(
    graph: &Graph,
    steps: &[Step],
    buffers: &Buffers,
    memory: &Memory<'_>,
    shape: Shape,
) -> Vec<Piece<Vec<Dispatch>>> {
    let layout = InputLayout::new(&shape, &graph.ropes, memory.turns);
    let mut lowering = Lowering {
        graph,
        steps,
        buffers,
        memory,
        shape,
        layout,
        pieces: vec![],
        run: vec![],
        rows: shape.rows,
        converted: None,
        norms: HashMap::new(),
        choices: HashMap::new(),
        waiting: vec![],
        products: Products::default(),
    };
    for step in steps {
        lowering.step(step);
    }
    lowering.flush_products();
    let run = std::mem::take(&mut lowering.run);
    lowering.pieces.push(Piece::Run(run));
    lowering.pieces
}

pub(super) struct Lowering<'a> {
    pub(super) graph: &'a Graph,
    pub(super) steps: &'a [Step],
    buffers: &'a Buffers,
    pub(super) memory: &'a Memory<'a>,
    pub(super) shape: Shape,
    pub(super) layout: InputLayout,
    pub(super) pieces: Vec<Piece<Vec<Dispatch>>>,
    pub(super) run: Vec<Dispatch>,
    /// Rows of values: tokens, then outputs.
    pub(super) rows: usize,
    /// What the f16 copy for tensor cores holds.
    pub(super) converted: Option<Value>,
    /// Norms that the readers of their results make.
    pub(super) norms: HashMap<Value, Norm>,
    /// Choices that the experts make.
    pub(super) choices: HashMap<Routing, Choice>,
    /// Products that others of their input may join.
    pub(super) waiting: Vec<FewLinear>,
    /// The products right before.
    products: Products,
}

/// Products of one input that follow each other.
#[derive(Debug, Default)]
struct Products {
    x: Option<Value>,
    outs: Vec<Value>,
    residuals: Vec<Slice>,
}

/// A kernel with what it is given; grids follow.
pub(super) struct Launch<'a> {
    pub(super) unit: &'static str,
    pub(super) kernel: &'static str,
    pub(super) buffers: &'a [Slice],
    pub(super) constants: &'a dyn Words,
}

impl Launch<'_> {
    pub(super) fn over(self, grid: [usize; 3], threads: u32) -> Dispatch {
        let grid = grid.map(|n| u32::try_from(n).expect("a grid of 32 bits"));
        self.on(Grid::Fixed(grid), threads)
    }

    pub(super) fn on(self, grid: Grid, threads: u32) -> Dispatch {
        let mut constants = vec![];
        self.constants.append(&mut constants);
        Dispatch {
            unit: self.unit,
            kernel: self.kernel.into(),
            buffers: self.buffers.to_vec(),
            constants,
            grid,
            threads,
            shared: 0,
            order: Order::After,
        }
    }

    /// One thread for each of `count` elements.
    pub(super) fn each(self, count: usize) -> Dispatch {
        self.over([count.div_ceil(THREADS as usize), 1, 1], THREADS)
    }
}

/// The dispatch of the kernel for an encoding, whose name ends in the encoding's.
pub(super) fn named(dispatch: Dispatch, encoding: &str) -> Dispatch {
    Dispatch { kernel: format!("{}_{encoding}", dispatch.kernel).into(), ..dispatch }
}

impl Lowering<'_> {
    pub(super) fn value(&self, value: Value) -> Slice {
        match self.buffers.of[value.index] {
            Some(buffer) => self.memory.buffers[buffer].into(),
            None => self.memory.logits.into(),
        }
    }

    pub(super) fn weight(&self, id: WeightId) -> &DeviceWeight {
        &self.memory.weights[id.0]
    }

    /// A weight that is a vector of f32.
    pub(super) fn vector(&self, id: WeightId) -> Slice {
        self.weight(id).planes[0]
    }

    /// An optional vector, and what stands in for it.
    pub(super) fn optional(&self, id: Option<WeightId>) -> Slice {
        id.map_or(self.input(0), |id| self.vector(id))
    }

    pub(super) fn input(&self, offset: usize) -> Slice {
        Slice { buffer: self.memory.inputs, offset }
    }

    pub(super) fn pages(&self) -> Slice {
        self.memory.page_numbers.into()
    }

    pub(super) fn f32_cache(&self) -> bool {
        self.memory.state.kv_type == KvType::F32
    }

    fn step(&mut self, step: &Step) {
        if !matches!(step, Step::Linear { .. }) {
            self.flush_products();
        }
        let before = std::mem::take(&mut self.products);
        let dispatch = match *step {
            Step::Alone { ref op, out } => return self.alone(op, out),
            Step::Embed { table, out } => {
                let weight = self.weight(table);
                let [a, b, c] = weight.planes;
                let buffers = [a, b, c, self.input(self.layout.tokens), self.value(out)];
                let constants = &EmbedConstants { table: weight.format };
                Launch { unit: "linear", kernel: "embed", buffers: &buffers, constants }
                    .over([self.rows, 1, 1], 64)
            }
            Step::Linear { x, weight, bias, precision, residual, out } => {
                let w = *self.weight(weight);
                let product = TensorLinear {
                    x,
                    weight: &w,
                    bias: bias.map(|b| self.vector(b)),
                    residual: residual.map(|r| self.value(r)),
                    precision,
                    out: self.value(out),
                };
                if let Some(mut list) = self.tensor_linear(&product) {
                    return self.run.append(&mut list);
                }
                if self.few_linear(FewLinear { x, weight, bias, residual, precision, out }) {
                    return;
                }
                self.flush_products();
                let dispatch = self.linear(x, weight, bias, residual, out);
                // Products of one input do not wait for each other.
                let apart = residual.is_none_or(|r| !before.outs.contains(&r))
                    && !before.residuals.contains(&self.value(out));
                let order = if before.x == Some(x) && apart { Order::Beside } else { Order::After };
                let mut products = if order == Order::Beside { before } else { Products::default() };
                products.x = Some(x);
                products.outs.push(out);
                products.residuals.extend(residual.map(|r| self.value(r)));
                self.products = products;
                Dispatch { order, ..dispatch }
            }
            Step::RmsNorm { x, weight, groups, eps, out } => {
                if groups == 1 && self.defer_norm(Norm { x, weight, eps }, out) {
                    return;
                }
                self.norm(x, Some(weight), groups, eps, out)
            }
            Step::Rope { x, heads, rope, out } => {
                self.rotation(x, heads, Turn { rope, stride: 1 }, Channels::default(), out)
            }
            Step::Attention { q, k, v, cache, sinks, chosen, prepare, out } => {
                return self.attention([q, k, v], cache.0, (sinks, chosen, prepare), out);
            }
            Step::LatentAttention { inputs, weights, cache, out } => {
                return self.latent_attention(inputs, weights, cache.0, out);
            }
            Step::SwiGlu { gate, up, out } => {
                let count = self.rows * out.width();
                let buffers = [self.value(gate), self.value(up), self.value(out)];
                let constants = &ElementConstants { count, number: 0.0, shared: 1 };
                Launch { unit: "elementwise", kernel: "swiglu", buffers: &buffers, constants }.each(count)
            }
            Step::Add { a, b, out } => {
                let count = self.rows * out.width();
                let buffers = [self.value(a), self.value(b), self.value(out)];
                let constants = &ElementConstants { count, number: 0.0, shared: 1 };
                Launch { unit: "elementwise", kernel: "add", buffers: &buffers, constants }.each(count)
            }
            Step::Clamp { x, limit, out } => {
                let count = self.rows * out.width();
                let buffers = [self.value(x), self.value(out)];
                let constants = &ElementConstants { count, number: limit, shared: 1 };
                Launch { unit: "elementwise", kernel: "clamp_to", buffers: &buffers, constants }.each(count)
            }
            Step::SigmoidGate { x, gate, out } => {
                let count = self.rows * out.width();
                let shared = x.width() / gate.width();
                let buffers = [self.value(x), self.value(gate), self.value(out)];
                let constants = &ElementConstants { count, number: 0.0, shared };
                Launch { unit: "elementwise", kernel: "sigmoid_gate", buffers: &buffers, constants }
                    .each(count)
            }
            Step::Slice { x, groups, start, len, out } => {
                let (count, part) = (self.rows * out.width(), x.width() / groups);
                let buffers = [self.value(x), self.value(out)];
                let constants = &SliceConstants { count, part, start, len };
                Launch { unit: "rows", kernel: "slice", buffers: &buffers, constants }.each(count)
            }
            Step::GatherRows { x, out } => {
                self.rows = self.shape.outputs;
                let buffers = [self.value(x), self.input(self.layout.outputs), self.value(out)];
                let constants = &GatherConstants { width: x.width() };
                Launch { unit: "rows", kernel: "gather_rows", buffers: &buffers, constants }
                    .over([self.rows, 1, 1], THREADS)
            }
            Step::Route { logits, bias, route, routing } => {
                if self.defer_route(Choice { logits, bias, route }, routing) {
                    return;
                }
                self.route(logits, bias, route, routing)
            }
            Step::MoeExperts { x, routing, experts, mlp, residual, out } => {
                return self.moe_experts((x, residual, out), routing, experts, mlp);
            }
            Step::CausalConv1d { x, weight, bias, kernel, dilation, state, out } => {
                let weights = [self.vector(weight), self.optional(bias)];
                let taps =
                    WindowConstants { channels: x.width(), taps: kernel, dilation, has_bias: bias.is_some() };
                let mixed = self.window("causal_conv1d", x, &weights, taps, state, out);
                self.run.push(mixed);
                let held = (kernel - 1) * dilation;
                return self.carry([x, x], CarryConstants { first: x.width(), second: 0, held }, state);
            }
            Step::GatedDeltaRule { inputs, decay, dt_bias, shape, state, out } => {
                let DeltaInputs { q, k, v, a, b } = inputs;
                let kernel =
                    if a.width() == shape.value_heads { "gated_delta_rule" } else { "channel_delta_rule" };
                let [q, k, v, a, b, out] = [q, k, v, a, b, out].map(|value| self.value(value));
                let DeltaRule { key_heads, value_heads, key_dim, value_dim, pairing, .. } = shape;
                let sequences = self.input(self.layout.sequences);
                let held = self.memory.state.states[state.0].slice();
                let buffers = [q, k, v, a, b, self.vector(decay), self.vector(dt_bias), sequences, held, out];
                let tiled = pairing == HeadPairing::Tiled;
                let (bounded, bound) = match shape.decay {
                    Decay::Softplus => (false, 0.0),
                    Decay::Bounded(bound) => (true, bound),
                };
                let constants = &DeltaConstants {
                    key_heads,
                    value_heads,
                    key_dim,
                    value_dim,
                    tiled,
                    l2_eps: DeltaRule::L2_EPS,
                    bounded,
                    bound,
                };
                let threads = value_dim.next_multiple_of(32).min(128);
                Launch { unit: "recurrent", kernel, buffers: &buffers, constants }
                    .over([value_dim.div_ceil(threads), value_heads, self.shape.sequences], threads as u32)
            }
        };
        self.run.push(dispatch);
    }

    fn linear(
        &self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        residual: Option<Value>,
        out: Value,
    ) -> Dispatch {
        let w = self.weight(weight);
        let rows = w.matrix.rows;
        let constants = &LinearConstants {
            weight: w.format,
            rows,
            tokens: self.rows,
            has_bias: bias.is_some(),
            has_residual: residual.is_some(),
        };
        let [a, b, c] = w.planes;
        let residual = residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [a, b, c, self.value(x), self.optional(bias), residual, self.value(out)];
        if self.rows <= FEW_ROWS {
            Launch { unit: "linear", kernel: "matvec_any", buffers: &buffers, constants }
                .over([rows.div_ceil(WARPS), self.rows, 1], THREADS)
        } else {
            let launch = Launch { unit: "linear", kernel: "matmul_any", buffers: &buffers, constants };
            let dispatch = launch.over([rows.div_ceil(TILE), self.rows.div_ceil(TILE), 1], THREADS);
            self.on_matrices(dispatch, "matmul", w.matrix.dtype)
        }
    }

    fn route(&self, logits: Value, bias: Option<WeightId>, route: Route, routing: Routing) -> Dispatch {
        let [ids, weights] = self.memory.routings[routing.index].map(Slice::from);
        let buffers = [self.value(logits), self.optional(bias), ids, weights];
        let constants = &RouteConstants::new(&route, bias.is_some());
        Launch { unit: "route", kernel: "route", buffers: &buffers, constants }
            .over([self.rows, 1, 1], THREADS)
    }

    /// The same product by the kernel of `metal/gemm.h` for the encoding, where the device has that.
    pub(super) fn on_matrices(&self, dispatch: Dispatch, name: &str, dtype: DType) -> Dispatch {
        if !self.memory.simdgroup_matrices {
            return dispatch;
        }
        let encoding = kernel_name(dtype, FastPath::Simdgroup).unwrap_or("any");
        Dispatch { unit: "metal/gemm", kernel: format!("simdgroup_{name}_{encoding}").into(), ..dispatch }
    }
}
