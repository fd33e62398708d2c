//! Lowering to the kernels of `kernels/few_experts.h`: routed experts of few rows, with activations of eight bits.

use super::place::{FETCH_GROUPS, Fetches};
use super::ring::further_planes;
use crate::gpu::arguments::{
    CopiedGateUpConstants, DownConstants, EarlyDownConstants, FurtherPlanes, GateUpConstants,
    JointDownConstants, RouteConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::{EARLY_UNIT, JOINT_EXPERTS_UNIT};
use crate::gpu::lower::context::{DeferredRoute, Launch, Lowering, WARPS, named};
use crate::gpu::lower::linear::{COPY_UNIT, MOST_JOINT_ROWS, columns_at_once};
use crate::gpu::memory::{ExpertMatrix, QuantizedScratch, SCALED_COLUMNS};
use crate::gpu::steps::Step;
use crate::graph::{ExpertMlp, ExpertSetId, Routing, Score, Value, Weighted};

const THREADS: u32 = 256;

/// As `WARP_EXPERTS` and `WARP_CHOSEN` of `kernels/routing.h`.
const WARP_EXPERTS: usize = 128;
const WARP_CHOSEN: usize = 32;

/// Columns of eight quads, as `quad_at` of `kernels/pieces.h` orders them.
const QUADS_COLUMNS: usize = 128;
/// As `padded_bytes` of `kernels/cuda/copies.h` has it: bytes of so many columns.
const PADDED_BYTES: usize = 160;
/// Threadgroup memory for copies of down weights and for activations, at most: two groups find room in the half of a
/// multiprocessor's memory that groups get.
const MOST_COPIED_DOWN: usize = 56 << 10;

/// As `MOST_BLOCKS` of `kernels/few_experts.h`.
const MOST_BLOCKS: usize = 8;
/// Groups for gate and up that a multiprocessor has at once, as in `kernels/few_experts.h`, and of encodings that take few registers;
/// what these take before their first block and for each.
const GATE_UP_GROUPS: usize = 2;
const LATE_GATE_UP_GROUPS: usize = 3;
const ENTERING_COST: usize = 4;
const BLOCK_COST: usize = 3;

/// Experts among which all groups of a single row choose by themselves where no warp can: with GLM-4.7-Flash's 64 that made 4 % more
/// tokens on an H200 than a dispatch; with 256 and 512, of MiniMax-M2 and Qwen3-Next, 3 and 5 % fewer.
const SOON_CHOSEN: usize = 64;

/// Rows of gate or up that a warp copies at once, at most, and their columns, as in `kernels/cuda/joint_experts.cu`.
const COPIED_ROWS: usize = 4;
const MOST_COPIED_COLUMNS: usize = 4096;
const WARP: usize = 32;
/// Columns of down of which lanes have no more pieces than that kernel adds up.
const MOST_JOINT_COLUMNS: usize = 2048;
/// Groups of the kernel that reads an expert's down weights once for all rows, at least, on an H100.
const JOINT_GROUPS: usize = 192;
/// Threadgroup memory for what their warps have of experts, at most, where two groups are to find room, and where one is.
const MOST_JOINT_DOWN: usize = 52 << 10;
const MOST_JOINT_DOWN_ALONE: usize = 108 << 10;

/// Threadgroup memory that those kernels declare, and what the system takes for a group.
const DECLARED_MEMORY: usize = 6 << 10;

/// Blocks of an expert's gate and up that a group makes, those that end soonest where there is room for `at_once` groups: a group
/// rounds its row and chooses its expert once.
fn gate_up_blocks(all: usize, pairs: usize, at_once: usize) -> usize {
    let cost = |blocks: &usize| {
        let turns = (all.div_ceil(*blocks) * pairs).div_ceil(at_once);
        turns * (ENTERING_COST + BLOCK_COST * blocks)
    };
    (1..=MOST_BLOCKS.min(all).max(1)).min_by_key(cost).expect("there is one block")
}

/// What so many rows of a matrix, a multiple of them on, have in further planes.
fn further_of(matrix: &ExpertMatrix, rows: usize) -> FurtherPlanes {
    let [needs, rooms] = further_planes(matrix, rows);
    FurtherPlanes { needs, rooms }
}

/// Whether `warp_choose` of `kernels/routing.h` makes a choice.
pub(super) fn by_warp(choice: &DeferredRoute) -> bool {
    let DeferredRoute { bias, route, .. } = *choice;
    matches!(route.score, Score::Softmax | Score::SoftmaxOfChosen)
        && bias.is_none()
        && route.groups.is_none()
        && route.experts <= WARP_EXPERTS
        && route.top_k <= WARP_CHOSEN
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
    /// Whether the outputs of pairs are wanted, to be summed later.
    pub(super) apart: bool,
}

/// Dispatches of routed experts.
pub(super) struct FewBody {
    pub(super) body: Vec<Dispatch>,
    /// What they need of experts that the device brings, in bytes; they bring the rest.
    pub(super) ready: usize,
    /// Whether they make the weighted sum; else the outputs of pairs.
    pub(super) summed: bool,
    /// Whether the processor may compute some experts.
    pub(super) hands: bool,
}

impl Lowering<'_> {
    /// Leaves a choice to the experts or to what brings them, if they are the only ones to ask for it and can make it.
    pub(in crate::gpu::lower) fn defer_route(&mut self, choice: DeferredRoute, routing: Routing) -> bool {
        let mut readers = self.steps.iter().filter_map(|step| match step {
            Step::MoeExperts { routing: own, experts, mlp, adapted, .. } if *own == routing => {
                Some((*experts, mlp, *adapted))
            }
            _ => None,
        });
        let reader = readers.next().filter(|_| readers.next().is_none());
        let experts = &self.memory.experts;
        let counts = [self.rows, self.rows * routing.top_k()];
        let deferred = reader.is_some_and(|(set, mlp, adapted)| {
            if self.updates_of(adapted).is_some() {
                false
            } else if experts.resident() {
                let soon = || self.chooses_soon(&choice) || !self.memory.info.copies_ahead;
                let bytes = self.few_encodings(set).is_some() && soon();
                // Weights that enter with x are known before.
                self.is_few()
                    && mlp.weighted == Weighted::Output
                    && (bytes || self.floats_choose(set, &choice, mlp))
            } else {
                experts.places(set, counts)
            }
        });
        if deferred {
            self.choices.insert(routing, choice);
        }
        deferred
    }

    /// Whether groups that each make a choice, all of whose threads take part where a warp cannot, end sooner than with a dispatch that
    /// makes it for them. That lets down's weights be read once for all rows.
    fn chooses_soon(&self, choice: &DeferredRoute) -> bool {
        let is_small = choice.route.groups.is_none() && choice.route.experts <= SOON_CHOSEN;
        by_warp(choice) || self.rows == 1 && is_small
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

    /// Bytes of eight rows of down weights, and of a pair's activations, if the kernels suit them whose groups copy their down
    /// weights.
    fn copied(&self, down: &ExpertMatrix, path: FastPath) -> Option<[usize; 2]> {
        let encoded = kernel_name(down.matrix.dtype, path).is_some();
        let each = WARPS * down.matrix.dtype.row_bytes(0, down.matrix.cols).ok()?;
        // Bytes of a pair's activations, whose quads stay within eight of them, and their scales.
        let entered = down.matrix.cols.next_multiple_of(QUADS_COLUMNS) + down.matrix.cols / 4;
        let suits = self.memory.info.copies_ahead
            && encoded
            && down.matrix.rows.is_multiple_of(WARPS)
            && each.is_multiple_of(16);
        suits.then_some([each, entered])
    }

    /// Routed experts with activations of eight bits; nothing if the kernels do not suit them.
    pub(super) fn few_experts(&self, e: &FewExperts<'_>) -> Option<FewBody> {
        let [gate_name, down_name] = self.few_encodings(e.set).filter(|_| self.is_few())?;
        let ready = e.parts[2].start();
        // Where not all experts of a token may be there at once, or are anywhere, their outputs are summed when all have been.
        let counts = [self.rows, self.rows * e.routing.top_k()];
        let at_once = !e.apart && e.mlp.identities == 0 && self.memory.experts.all_at_once(e.set, counts);
        let summed = at_once && e.mlp.norm.is_none();
        let [ids, _] = self.routing(e.routing);
        let outputs = (e.outputs, e.parts[2].matrix.rows);
        let collect = self.collect(e.set, counts, ids, outputs).filter(|_| at_once);
        let hands = collect.is_some();
        let first = named(self.gate_up8(e), gate_name);
        let [two, one] = [(2, MOST_JOINT_DOWN), (1, MOST_JOINT_DOWN_ALONE)]
            .map(|(groups, most)| most.min(self.group_memory(groups)));
        let joint = |lanes, most| self.joint_down8(e, summed, lanes, most);
        // Where a multiprocessor would have one group, eight lanes a row are worth it if groups would make several turns.
        let has_few = e.parts[2].matrix.rows / WARPS <= self.joint_groups();
        let down = joint(4, two)
            .or_else(|| self.early_down8(e, summed))
            .or_else(|| joint(8, two).filter(|_| !has_few))
            .or_else(|| joint(4, one))
            .or_else(|| joint(8, two))
            .unwrap_or_else(|| self.down8(e, summed, hands && summed));
        let down = Some(named(down, down_name));
        // Of what is summed later the processor's part need not be there before.
        let rest = if summed { [collect, down] } else { [down, collect] };
        let body = std::iter::once(first).chain(rest.into_iter().flatten()).collect();
        Some(FewBody { body, ready, summed, hands })
    }

    /// The choice of experts that is left to them.
    pub(super) fn own_choice(&self, e: &FewExperts<'_>) -> Option<&DeferredRoute> {
        self.choices.get(&e.routing).filter(|_| self.memory.experts.resident())
    }

    /// Where the slots of a set and its table are.
    fn slots(&self, e: &FewExperts<'_>) -> [Slice; 2] {
        let counts = [self.rows, self.rows * e.routing.top_k()];
        let experts = &self.memory.experts;
        [experts.slots(), experts.table(e.set, counts)]
    }

    /// The products of gate and up, in eight bits.
    fn gate_up8(&self, e: &FewExperts<'_>) -> Dispatch {
        let [gate, up, down] = e.parts;
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        let [ids, weights] = self.routing(e.routing);
        let [slots, table] = self.slots(e);
        let (x, norm) = self.entering(e.x);
        let QuantizedScratch { bytes, scales } = self.memory.scratch.quantized;
        let none = self.input(0);
        let [gate_bias, up_bias, _] = e.biases.unwrap_or([none; 3]);
        let choice = self.own_choice(e);
        let logits = choice.map_or(none, |c| self.value(c.logits));
        let correction = self.optional(choice.and_then(|c| c.bias));
        let norm_weight = norm.map_or(none, |norm| self.vector(norm.weight));
        let rest = self.rest(e.set, [self.rows, pairs], down.start());
        let [fetches, host] = rest.map_or([none; 2], |Fetches { list, host, .. }| [list, host]);
        let bringing = if rest.is_some() { FETCH_GROUPS } else { 0 };
        let buffers = [
            slots,
            table,
            logits,
            correction,
            ids,
            weights,
            x,
            norm_weight,
            gate_bias,
            up_bias,
            bytes.into(),
            scales.into(),
            fetches,
            host,
        ];
        let (routes, beside) = (choice.is_some(), self.rows > 1);
        let route = choice.map(|c| RouteConstants::new(&c.route, c.bias.is_some()));
        let all = gate.matrix.rows / SCALED_COLUMNS;
        let is_copied = kernel_name(gate.matrix.dtype, FastPath::Copied).is_some();
        let groups = if is_copied { GATE_UP_GROUPS } else { LATE_GATE_UP_GROUPS };
        let blocks = gate_up_blocks(all, pairs, groups * self.memory.info.multiprocessors);
        let constants = GateUpConstants {
            gate: gate.part,
            up: up.part,
            norm: norm.into(),
            routes,
            route: route.unwrap_or_default(),
            top_k,
            activation: e.mlp.activation.into(),
            has_bias: e.biases.is_some(),
            early: self.known_early(e.x),
            weighs: e.mlp.weighted == Weighted::Input,
            beside,
            blocks,
            bringing,
            brought: rest.map(|rest| rest.rest).unwrap_or_default(),
        };
        let groups = bringing + all.div_ceil(blocks) + usize::from(routes);
        let over = if beside { [pairs, groups, 1] } else { [groups, pairs, 1] };
        let buffers = &buffers;
        match self.copied_gate_up(e) {
            Some((shared, rows, further)) => {
                let kernel = if rows == COPIED_ROWS { "copied_gate_up8" } else { "copied_gate_up8_wide" };
                let constants = &CopiedGateUpConstants { base: constants, further };
                let launch = Launch { unit: JOINT_EXPERTS_UNIT, kernel, buffers, constants };
                Dispatch { shared, ..launch.over(over, THREADS) }
            }
            None => Launch { unit: "few_experts", kernel: "gate_up8", buffers, constants: &constants }
                .over(over, THREADS),
        }
    }

    /// Threadgroup memory of the kernel that has rows of gate and up copied while it multiplies those before, how many rows, and what
    /// they have in further planes; nothing if that does not suit them.
    fn copied_gate_up(&self, e: &FewExperts<'_>) -> Option<(u32, usize, FurtherPlanes)> {
        let gate = &e.parts[0].matrix;
        let at_once = columns_at_once(gate.dtype);
        let rows = if gate.cols <= at_once { COPIED_ROWS } else { COPIED_ROWS / 2 };
        let further = further_of(&e.parts[0], rows);
        let row = gate.dtype.row_bytes(0, gate.cols).ok()?;
        let suits = self.memory.info.copies_ahead
            && self.own_choice(e).is_none_or(by_warp)
            && kernel_name(gate.dtype, FastPath::Copied).is_some()
            && e.mlp.activation.is_gated()
            && gate.cols <= (2 * at_once).min(MOST_COPIED_COLUMNS)
            && (self.rows > 1 || self.memory.experts.resident())
            && (rows * row).is_multiple_of(16);
        let each = rows * row + further.rooms.iter().sum::<usize>();
        let shared = WARPS * each + COPY_UNIT;
        (suits && shared <= self.group_memory(1)).then_some((shared as u32, rows, further))
    }

    /// Where outputs go, summed or not, and how many rows there are.
    fn destination(&self, e: &FewExperts<'_>, summed: bool) -> (Slice, usize) {
        if summed { (e.out, self.rows) } else { (e.outputs, self.rows * e.routing.top_k()) }
    }

    /// The sums of down's products, by the kernel that copies its weights ahead; nothing if that does not suit them.
    fn early_down8(&self, e: &FewExperts<'_>, summed: bool) -> Option<Dispatch> {
        let down = &e.parts[2];
        let choice = self.own_choice(e).filter(|choice| by_warp(choice) && summed && e.biases.is_none())?;
        let taken = self.copied(down, FastPath::Early)?.iter().sum::<usize>() * choice.route.top_k;
        if taken > MOST_COPIED_DOWN.min(self.group_memory(2)) {
            return None;
        }
        let [slots, table] = self.slots(e);
        let [_, weights] = self.routing(e.routing);
        let QuantizedScratch { bytes, scales } = self.memory.scratch.quantized;
        let (to, count) = self.destination(e, summed);
        let (residual, logits) = (e.residual.unwrap_or(self.input(0)), self.value(choice.logits));
        let buffers = [slots, table, bytes.into(), scales.into(), weights, residual, to, logits];
        let constants = &EarlyDownConstants {
            part: down.part,
            top_k: e.routing.top_k(),
            has_residual: e.residual.is_some(),
            weighs: e.mlp.weighted != Weighted::Input,
            route: RouteConstants::new(&choice.route, false),
        };
        let launch = Launch { unit: EARLY_UNIT, kernel: "early_down8", buffers: &buffers, constants };
        Some(Dispatch { shared: taken as u32, ..launch.over([down.matrix.rows / WARPS, count, 1], THREADS) })
    }

    /// What kernels may ask for of a multiprocessor's memory, of which so many groups are to find room, beside what they declare.
    fn group_memory(&self, groups: usize) -> usize {
        (self.memory.info.group_memory / groups).saturating_sub(DECLARED_MEMORY)
    }

    /// Groups of the kernel that reads an expert once for all rows, at most.
    fn joint_groups(&self) -> usize {
        (2 * self.memory.info.multiprocessors).max(1)
    }

    /// Down's products, summed or not, by the kernel that reads an expert once for all rows, of which so many lanes share one; nothing if
    /// that does not suit them, or takes more than `most` bytes of threadgroup memory.
    fn joint_down8(&self, e: &FewExperts<'_>, summed: bool, lanes: usize, most: usize) -> Option<Dispatch> {
        let down = &e.parts[2];
        let choice = self.own_choice(e);
        let known = self.memory.experts.resident() && choice.is_none_or(by_warp);
        let [each, _] = self.copied(down, FastPath::Copied).filter(|_| known && e.biases.is_none())?;
        let (top_k, cols) = (e.routing.top_k(), down.matrix.cols);
        let pairs = self.rows * top_k;
        let rows = WARP / lanes;
        let further = further_of(down, rows);
        let copied = each / WARPS * rows + further.rooms.iter().sum::<usize>() + COPY_UNIT;
        let least = WARPS * copied + 2 * pairs * rows * size_of::<f32>();
        let entered = cols.div_ceil(QUADS_COLUMNS) * PADDED_BYTES + cols / 4;
        let brings = least + WARPS * entered <= most;
        let taken = if brings { least + WARPS * entered } else { least };
        let blocks = down.matrix.rows / rows;
        let suits = taken <= most
            && self.rows <= MOST_JOINT_ROWS
            && top_k <= WARP_CHOSEN
            && blocks >= self.share_of_h100(JOINT_GROUPS)
            && cols <= MOST_JOINT_COLUMNS
            && cols.is_multiple_of(2 * SCALED_COLUMNS)
            && (each / WARPS * rows).is_multiple_of(COPY_UNIT);
        if !suits {
            return None;
        }
        // As few groups as end as soon.
        let groups = blocks.div_ceil(blocks.div_ceil(self.joint_groups()));
        let [slots, table] = self.slots(e);
        let [ids, weights] = self.routing(e.routing);
        let QuantizedScratch { bytes, scales } = self.memory.scratch.quantized;
        let (to, _) = self.destination(e, summed);
        let none = self.input(0);
        let (residual, logits) = (e.residual.unwrap_or(none), choice.map_or(none, |c| self.value(c.logits)));
        let buffers = [slots, table, ids, bytes.into(), scales.into(), weights, residual, to, logits];
        let route = choice.map(|choice| RouteConstants::new(&choice.route, false)).unwrap_or_default();
        let constants = &JointDownConstants {
            part: down.part,
            tokens: self.rows,
            top_k,
            routes: choice.is_some(),
            summed,
            has_residual: e.residual.is_some(),
            weighs: e.mlp.weighted != Weighted::Input,
            brings,
            route,
            lanes,
            further,
        };
        let kernel = match lanes {
            4 if groups == blocks => "joint_down8",
            4 => "joint_down8_turns",
            _ => "joint_down8_eight",
        };
        let launch = Launch { unit: JOINT_EXPERTS_UNIT, kernel, buffers: &buffers, constants };
        Some(Dispatch { shared: taken as u32, ..launch.over([groups, 1, 1], THREADS) })
    }

    /// Down's products, summed or not.
    fn down8(&self, e: &FewExperts<'_>, summed: bool, hands: bool) -> Dispatch {
        let down = &e.parts[2];
        let [slots, table] = self.slots(e);
        let [ids, weights] = self.routing(e.routing);
        let QuantizedScratch { bytes, scales } = self.memory.scratch.quantized;
        let none = self.input(0);
        let (bias, residual) = (e.biases.map_or(none, |b| b[2]), e.residual.unwrap_or(none));
        let (to, count) = self.destination(e, summed);
        let handed = if hands { e.outputs } else { none };
        let (groups, beside) = (down.matrix.rows.div_ceil(WARPS), self.rows > 1);
        let buffers = [slots, table, ids, bytes.into(), scales.into(), weights, bias, residual, handed, to];
        let constants = &DownConstants {
            part: down.part,
            top_k: e.routing.top_k(),
            fused: summed,
            has_bias: e.biases.is_some(),
            has_residual: e.residual.is_some(),
            weighs: e.mlp.weighted != Weighted::Input,
            hands,
            beside,
        };
        Launch { unit: "few_experts", kernel: "down8", buffers: &buffers, constants }
            .over(if beside { [count, groups, 1] } else { [groups, count, 1] }, THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_one_turn_where_there_are_several_rows() {
        // 768 outputs of an expert, eight experts a token.
        let blocks = |rows: usize| gate_up_blocks(24, 8 * rows, 264);
        assert_eq!([1, 2, 4, 8].map(blocks), [1, 2, 3, 6]);
        assert_eq!(gate_up_blocks(1, 8, 264), 1);
        // 2880 outputs of four experts.
        assert_eq!([264, 396].map(|at_once| gate_up_blocks(90, 4, at_once)), [2, 1]);
    }
}
