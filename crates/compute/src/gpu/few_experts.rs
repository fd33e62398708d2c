//! Lowering to the kernels of `kernels/few_experts.h`: routed experts of few rows, with activations of eight bits.

use super::arguments::{DownConstants, EarlyDownConstants, GateUpConstants, RouteConstants};
use super::device::{BufferId, Dispatch, Slice};
use super::early::{EARLY_UNIT, MOST_COPIED};
use super::encodings::{FastPath, kernel_name};
use super::experts::ExpertMatrix;
use super::few_rows::BLOCK;
use super::inputs::FEW_ROWS;
use super::lower::{Launch, Lowering, named};
use super::steps::Step;
use super::tiers::FETCH_GROUPS;
use crate::graph::{
    ExpertMlp, ExpertSetId, Graph, MoeExpertsOp, Op, Route, Routing, Score, Value, WeightId, Weighted,
};

const THREADS: u32 = 256;
const WARPS: usize = 8;

/// As `WARP_EXPERTS` and `WARP_CHOSEN` of `kernels/routing.h`.
const WARP_EXPERTS: usize = 128;
const WARP_CHOSEN: usize = 32;

/// Memory for the experts' products in eight bits: their bytes, then scale and sum of each block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized {
    pub(crate) bytes: BufferId,
    pub(crate) scales: BufferId,
}

/// Bytes of that memory.
pub(crate) fn scratch_bytes(graph: &Graph, rows: usize) -> [usize; 2] {
    let mut products = BLOCK;
    for node in graph.nodes() {
        if let Op::MoeExperts(MoeExpertsOp { routing, experts, .. }) = node.op {
            products = products.max(routing.top_k() * graph.expert_sets()[experts.0].width());
        }
    }
    let rows = rows.min(FEW_ROWS);
    [rows * products, rows * products.div_ceil(BLOCK) * 8]
}

/// A choice that the experts' first kernel makes, or what brings the experts to the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) logits: Value,
    pub(super) bias: Option<WeightId>,
    pub(super) route: Route,
}

/// Routed experts with their sum.
pub(super) struct FewExperts<'a> {
    pub(super) x: Value,
    pub(super) set: ExpertSetId,
    pub(super) routing: Routing,
    pub(super) parts: &'a [ExpertMatrix; 3],
    pub(super) mlp: &'a ExpertMlp,
    /// Biases of gate, up and down.
    pub(super) biases: Option<[Slice; 3]>,
    pub(super) residual: Option<Slice>,
    /// (pairs, hidden), f32.
    pub(super) outputs: Slice,
    pub(super) out: Slice,
}

/// Dispatches of routed experts.
pub(super) struct FewBody {
    pub(super) body: Vec<Dispatch>,
    /// What they need of experts that the device brings, in bytes; they bring the rest.
    pub(super) ready: usize,
    /// Whether they make the weighted sum; else the outputs of pairs.
    pub(super) summed: bool,
}

impl Lowering<'_> {
    /// The ends of the kernels' names for a set's gate and down, if they suit it.
    pub(super) fn few_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        let [gate, up, down] = self.memory.experts.parts(set);
        let fits = up.matrix.dtype == gate.matrix.dtype && gate.matrix.rows.is_multiple_of(BLOCK);
        let first = self.takes_bytes(gate.matrix.dtype, gate.matrix.cols).filter(|_| fits)?;
        // Its activations stay in device memory: any width will do.
        let second = self.takes_bytes(down.matrix.dtype, BLOCK)?;
        Some([first, second])
    }

    /// Leaves a choice to the experts or to what brings them, if they are the only ones to ask for it and can make it.
    pub(super) fn defer_route(&mut self, choice: Choice, routing: Routing) -> bool {
        let mut readers = self.steps.iter().filter_map(|step| match step {
            Step::MoeExperts { routing: own, experts, mlp, .. } if *own == routing => Some((*experts, mlp)),
            _ => None,
        });
        let reader = readers.next().filter(|_| readers.next().is_none());
        let experts = self.memory.experts;
        let counts = [self.rows, self.rows * routing.top_k()];
        let deferred = reader.is_some_and(|(set, mlp)| match experts.resident() {
            // Weights that enter with x are known before.
            true => mlp.weighted == Weighted::Output && self.few_encodings(set).is_some(),
            false => experts.places(set, counts),
        });
        if deferred {
            self.choices.insert(routing, choice);
        }
        deferred
    }

    /// Whether what experts read for `x` is not what the dispatch before them writes.
    fn known_early(&self, x: Value) -> bool {
        let read = self.norms.get(&x).map_or(x, |norm| norm.x);
        let written = |value: Option<Value>| value == Some(read);
        let left_out = |step: &&Step| match step {
            Step::RmsNorm { out, .. } => self.norms.contains_key(out),
            Step::Route { routing, .. } => self.choices.contains_key(routing),
            _ => false,
        };
        let reader =
            self.steps.iter().position(|step| matches!(step, Step::MoeExperts { x: own, .. } if *own == x));
        let mut before = self.steps[..reader.unwrap_or(0)].iter().rev().filter(|step| !left_out(step));
        let Some(last) = before.next() else { return false };
        // Products of one input are one dispatch.
        let beside = before.take_while(|step| match (step, last) {
            (Step::Linear { x, .. }, Step::Linear { x: of_last, .. }) => x == of_last,
            _ => false,
        });
        !written(last.output()) && !beside.map(Step::output).any(written)
    }

    /// Bytes of threadgroup memory that the kernel takes whose groups copy their down weights ahead; nothing if it does not
    /// suit the choice or the weights.
    fn copied_ahead(&self, choice: &Choice, down: &ExpertMatrix) -> Option<u32> {
        let Choice { bias, route, .. } = *choice;
        let by_logits = matches!(route.score, Score::Softmax | Score::SoftmaxOfChosen)
            && bias.is_none()
            && route.groups.is_none()
            && route.experts <= WARP_EXPERTS
            && route.top_k <= WARP_CHOSEN;
        let encoded = kernel_name(down.matrix.dtype, FastPath::Early).is_some();
        let each = WARPS * down.matrix.dtype.row_bytes(0, down.matrix.cols).ok()?;
        let suits = self.memory.copies_ahead
            && by_logits
            && encoded
            && down.matrix.rows.is_multiple_of(WARPS)
            && each.is_multiple_of(16)
            && each * route.top_k <= MOST_COPIED;
        suits.then_some((each * route.top_k) as u32)
    }

    pub(super) fn few_experts(&mut self, e: &FewExperts<'_>) -> Option<FewBody> {
        let [gate, up, down] = e.parts;
        let [name, down_name] = self.few_encodings(e.set)?;
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        let [ids, weights] = self.memory.routings[e.routing.index].map(Slice::from);
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let (x, norm) = self.entering(e.x);
        let Quantized { bytes, scales } = self.memory.quantized;
        let (bytes, scales) = (Slice::from(bytes), Slice::from(scales));
        let none = self.input(0);
        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([none; 3]);
        let has_bias = e.biases.is_some();
        let choice = self.choices.get(&e.routing).filter(|_| self.memory.experts.resident());
        let logits = choice.map_or(none, |c| self.value(c.logits));
        let correction = self.optional(choice.and_then(|c| c.bias));
        let weight = norm.map_or(none, |norm| self.vector(norm.weight));
        let rest = self.memory.experts.rest(e.set, counts, down.start());
        let [fetches, host] = rest.map_or([none; 2], |rest| [rest.list, rest.host]);
        let bringing = if rest.is_some() { FETCH_GROUPS } else { 0 };
        let buffers = [
            slots, table, logits, correction, ids, weights, x, weight, gate_bias, up_bias, bytes, scales,
            fetches, host,
        ];
        let routes = choice.is_some();
        let route = choice.map(|c| RouteConstants::new(&c.route, c.bias.is_some()));
        let early = self.known_early(e.x);
        let weighs_input = e.mlp.weighted == Weighted::Input;
        let constants = &GateUpConstants {
            gate: gate.part,
            up: up.part,
            norm: norm.into(),
            routes,
            route: route.unwrap_or_default(),
            top_k,
            activation: e.mlp.activation.into(),
            has_bias,
            early,
            weighs: weighs_input,
            bringing,
            brought: rest.map(|rest| rest.rest).unwrap_or_default(),
        };
        let launch = Launch { unit: "few_experts", kernel: "gate_up8", buffers: &buffers, constants };
        let groups = bringing + gate.matrix.rows / BLOCK + usize::from(routes);
        let first = named(launch.over([groups, pairs, 1], THREADS), name);
        let ready = down.start();

        // Where not all experts of a token may be there at once, their outputs are summed when all have been.
        let summed = self.memory.experts.all_at_once(e.set, counts);
        let (to, count) = if summed { (e.out, self.rows) } else { (e.outputs, pairs) };
        let residual = e.residual.unwrap_or(none);
        if let Some((choice, copied)) = choice.filter(|_| summed && !has_bias).and_then(|choice| {
            let copied = self.copied_ahead(choice, down)?;
            Some((choice, copied))
        }) {
            let buffers = [slots, table, bytes, scales, weights, residual, to, logits];
            let constants = &EarlyDownConstants {
                part: down.part,
                top_k,
                has_residual: e.residual.is_some(),
                weighs: !weighs_input,
                route: RouteConstants::new(&choice.route, false),
            };
            let launch = Launch { unit: EARLY_UNIT, kernel: "early_down8", buffers: &buffers, constants };
            let second = named(launch.over([down.matrix.rows / WARPS, count, 1], THREADS), down_name);
            let second = Dispatch { shared: copied, ..second };
            return Some(FewBody { body: vec![first, second], ready, summed });
        }
        let buffers = [slots, table, ids, bytes, scales, weights, down_bias, residual, to];
        let constants = &DownConstants {
            part: down.part,
            top_k,
            fused: summed,
            has_bias,
            has_residual: e.residual.is_some(),
            weighs: !weighs_input,
        };
        let launch = Launch { unit: "few_experts", kernel: "down8", buffers: &buffers, constants };
        let second = named(launch.over([down.matrix.rows.div_ceil(WARPS), count, 1], THREADS), down_name);
        Some(FewBody { body: vec![first, second], ready, summed })
    }
}
