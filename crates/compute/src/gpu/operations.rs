//! Lowering of operations that nothing is fused with: rows and their positions, parallel streams, windows and n-grams.

use super::arguments::{
    ActivateConstants, CarryConstants, ElementConstants, HyperConstants, LayerNormConstants, PoolConstants,
    PositionScaleConstants, RepeatConstants, RmsNormConstants, RopeConstants, RouteConstants, SsmConstants,
    StreamConstants, TokenRouteConstants, WindowConstants,
};
use super::attention::HeadPart;
use super::compressed::{Kept, Sparse};
use super::device::{Dispatch, Grid, Slice};
use super::inputs::Turn;
use super::lower::{Launch, Lowering, THREADS};
use crate::graph::{
    ActivateOp, Activation, BlockAttentionOp, BlockInputs, ChooseBlocksOp, CompressedAttentionOp,
    CompressedInputs, GatedMeanOp, GroupedLinearOp, HyperCollapseOp, HyperExpandOp, HyperKind,
    HyperWeightsOp, LayerNormOp, NGramEmbedOp, Op, Output, PositionScaleOp, RepeatOp, RmsNormOp, RopeOp,
    RopeStyle, RouteBy, RouteOp, ScaledSiluOp, SsmInputs, SsmScan, SsmScanOp, SsmWeights, StateId,
    StreamAddOp, StreamGateOp, Value, WeightId, WindowMeanOp, WindowPool, WindowPoolOp,
};

/// Elements of rows that a group of threads takes one each of.
fn blocks(elements: usize) -> usize {
    elements.div_ceil(THREADS as usize)
}

/// Threads of a group that sums up so many elements.
fn summing(elements: usize) -> u32 {
    if elements >= 512 { THREADS } else { 32 }
}

/// Channels of heads that are rotated: from `first` on; by negative angles if `inverse`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Channels {
    pub(super) first: usize,
    pub(super) inverse: bool,
}

/// Parallel streams: their number, their width, and elements of a row of weights.
struct Streams {
    count: usize,
    width: usize,
    weights: usize,
}

impl Lowering<'_> {
    /// Queues an operation.
    pub(super) fn alone(&mut self, op: &Op, out: Output) {
        let to = match (op, out) {
            (
                Op::Route(RouteOp { logits, by: RouteBy::Tokens { table }, route }),
                Output::Routing(routing),
            ) => {
                let [ids, weights] = self.memory.routings[routing.index].map(Slice::from);
                let table = self.weight(*table);
                let [a, b, c] = table.planes;
                let buffers = [self.value(*logits), self.input(self.layout.tokens), a, b, c, ids, weights];
                let route = RouteConstants::new(route, false);
                let constants = &TokenRouteConstants { route, table: table.format };
                let launch = Launch { unit: "route", kernel: "route_by_token", buffers: &buffers, constants };
                let dispatch = launch.over([self.rows, 1, 1], THREADS);
                return self.run.push(dispatch);
            }
            (_, Output::Value(out)) => out,
            (_, Output::Routing(_)) => unreachable!("only routes yield routings"),
        };
        let dispatch = match *op {
            Op::RmsNorm(RmsNormOp { x, weight, groups, eps }) => self.norm(x, weight, groups, eps, to),
            Op::Rope(RopeOp { x, heads, rope, place }) => {
                let turn = Turn { rope, stride: place.stride.max(1) };
                self.rotation(x, heads, turn, Channels { first: place.first, inverse: place.inverse }, to)
            }
            Op::Activate(ActivateOp { activation, gate, up }) => {
                self.activate([gate.unwrap_or(up), up], activation, to)
            }
            Op::PositionScale(PositionScaleOp { x, scale }) => {
                let (count, width) = (self.rows * to.width(), to.width());
                let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                let (offset, period) = (word(scale.offset), word(scale.period.max(1)));
                let buffers = [self.value(x), self.input(self.layout.places), self.value(to)];
                let (base, slope) = (scale.base, scale.slope);
                let constants = &PositionScaleConstants { count, width, base, slope, offset, period };
                Launch { unit: "rows", kernel: "position_scale", buffers: &buffers, constants }.each(count)
            }
            Op::GroupedLinear(GroupedLinearOp { x, weight, groups }) => {
                let matrix = self.weight(weight).matrix;
                let (each, cols) = (matrix.rows / groups, matrix.cols);
                let slices = [self.value(x), self.value(to)];
                let part = HeadPart { rows: each, first: 0, r#in: cols, out: each, stride: each };
                return self.heads("latent_matvec", weight, part, slices);
            }
            Op::LayerNorm(LayerNormOp { x, weight, bias, eps }) => {
                let buffers = [self.value(x), self.vector(weight), self.vector(bias), self.value(to)];
                let constants = &LayerNormConstants { width: x.width(), eps };
                Launch { unit: "rms_norm", kernel: "layer_norm", buffers: &buffers, constants }
                    .over([self.rows, 1, 1], summing(x.width()))
            }
            Op::SsmScan(SsmScanOp { inputs, weights, shape, state }) => {
                self.ssm_scan(inputs, weights, &shape, state, to)
            }
            Op::ChooseBlocks(ChooseBlocksOp { inputs, choice, cache }) => {
                return self.choose_blocks(inputs, &choice, cache.0, to);
            }
            Op::ScaledSilu(ScaledSiluOp { x, factor }) => {
                self.elements("scaled_silu", &[self.value(x), self.value(to)], factor, to)
            }
            Op::Repeat(RepeatOp { x, times }) => {
                let count = self.rows * to.width();
                let constants = &RepeatConstants { count, width: x.width(), times };
                let buffers = [self.value(x), self.value(to)];
                Launch { unit: "rows", kernel: "repeat", buffers: &buffers, constants }.each(count)
            }
            Op::HyperWeights(HyperWeightsOp { x, mix, base, factors, shape }) => {
                let buffers =
                    [self.value(x), self.value(mix), self.vector(base), self.vector(factors), self.value(to)];
                let (iterations, kind, magnitude) = match shape.kind {
                    HyperKind::Collapsed => (0, 0u32, 0.0),
                    HyperKind::Independent { magnitude } => (0, 1, magnitude),
                    HyperKind::Mixed { iterations } => (iterations, 2, 0.0),
                };
                let constants = &HyperConstants {
                    streams: shape.streams,
                    width: x.width(),
                    norm_eps: shape.norm_eps,
                    floor: shape.floor,
                    iterations,
                    kind,
                    magnitude,
                };
                Launch { unit: "streams", kernel: "hyper_weights", buffers: &buffers, constants }
                    .over([self.rows, 1, 1], THREADS)
            }
            Op::HyperCollapse(HyperCollapseOp { x, weights, streams }) => {
                let shape = Streams { count: streams, width: to.width(), weights: weights.width() };
                self.streams("hyper_collapse", &[x, weights], shape, to)
            }
            Op::HyperExpand(HyperExpandOp { x, block, weights, streams }) => {
                let shape = Streams { count: streams, width: block.width(), weights: weights.width() };
                self.streams("hyper_expand", &[x, block, weights], shape, to)
            }
            Op::GatedMean(GatedMeanOp { x, gate, streams }) => {
                let shape = Streams { count: streams, width: to.width(), weights: 0 };
                self.streams("gated_mean", &[x, gate], shape, to)
            }
            Op::StreamAdd(StreamAddOp { x, block, logits }) => {
                let shape = Streams { count: logits.width(), width: block.width(), weights: logits.width() };
                self.streams("stream_add", &[x, block, logits], shape, to)
            }
            Op::StreamGate(StreamGateOp { keys, queries, value }) => {
                let streams = keys.width() / value.width();
                let shape = Streams { count: streams, width: value.width(), weights: 0 };
                let dispatch = self.streams("stream_gate", &[keys, queries, value], shape, to);
                let grid = [streams, self.rows, 1].map(|n| n as u32);
                Dispatch { grid: Grid::Fixed(grid), threads: summing(value.width()), ..dispatch }
            }
            Op::WindowPool(WindowPoolOp { kv, gate, bias, shape, state }) => {
                return self.window_pool([kv, gate], self.vector(bias), shape, state, to);
            }
            Op::WindowMean(WindowMeanOp { x, window, state }) => {
                let channels = x.width();
                let taps = WindowConstants { channels, taps: window, dilation: 1, has_bias: false };
                let dispatch = self.window("window_mean", x, &[], taps, state, to);
                self.run.push(dispatch);
                let kept = CarryConstants { first: channels, second: 0, held: window - 1 };
                return self.carry([x, x], kept, state);
            }
            Op::CompressedAttention(CompressedAttentionOp { inputs, cache }) => {
                let CompressedInputs { q, kv, entries, index, sinks } = inputs;
                let kept =
                    Kept { tokens: Some([kv, kv]), entries: Some(entries), index_key: index.map(|i| i.k) };
                let sinks = Some(self.vector(sinks));
                return self.compressed_attention(&Sparse { q, kept, index, sinks, cache: cache.0, out: to });
            }
            Op::BlockAttention(BlockAttentionOp { inputs, cache }) => {
                let BlockInputs { q, k, v, index } = inputs;
                let kept = Kept { tokens: Some([k, v]), entries: None, index_key: Some(index.k) };
                let (index, sinks) = (Some(index), None);
                return self.compressed_attention(&Sparse { q, kept, index, sinks, cache: cache.0, out: to });
            }
            Op::NGramEmbed(NGramEmbedOp { ref ngrams, state, .. }) => {
                return self.ngram_embed(ngrams, state, to);
            }
            // Steps of their own, which others are fused with.
            Op::Embed(_)
            | Op::Add(_)
            | Op::Clamp(_)
            | Op::Slice(_)
            | Op::GatherRows(_)
            | Op::Linear(_)
            | Op::SigmoidGate(_)
            | Op::Attention(_)
            | Op::LatentAttention(_)
            | Op::Route(_)
            | Op::MoeExperts(_)
            | Op::CausalConv1d(_)
            | Op::GatedDeltaRule(_) => unreachable!("not a step alone"),
            #[cfg(test)]
            Op::CpuOnly(_) => unreachable!("refused"),
        };
        self.run.push(dispatch);
    }

    /// A norm of equal parts of rows, with weights of one part or of all.
    pub(super) fn norm(
        &self,
        x: Value,
        weight: Option<WeightId>,
        groups: usize,
        eps: f32,
        out: Value,
    ) -> Dispatch {
        let width = x.width() / groups;
        let weights = weight.map_or(0, |weight| self.weight(weight).matrix.cols / width);
        let buffers = [self.value(x), self.optional(weight), self.value(out)];
        let constants = &RmsNormConstants { width, eps, weights };
        Launch { unit: "rms_norm", kernel: "rms_norm", buffers: &buffers, constants }
            .over([self.rows * groups, 1, 1], summing(width))
    }

    /// Rotates heads.
    pub(super) fn rotation(
        &self,
        x: Value,
        heads: usize,
        turn: Turn,
        Channels { first, inverse }: Channels,
        out: Value,
    ) -> Dispatch {
        let rotation = &self.graph.ropes[turn.rope];
        let interleaved = rotation.style == RopeStyle::Interleaved;
        let place = self.memory.turns.iter().position(|known| *known == turn);
        let angles = self.input(self.layout.angles[place.expect("a turn of the graph")]);
        let buffers = [self.value(x), angles, self.value(out)];
        let (head_dim, pairs) = (x.width() / heads, rotation.inv_freq.len());
        let constants = &RopeConstants { heads, head_dim, pairs, interleaved, first, inverse };
        Launch { unit: "rows", kernel: "rope", buffers: &buffers, constants }.over([self.rows, 1, 1], THREADS)
    }

    /// A kernel of `kernels/elementwise.h` with a number.
    fn elements(&self, kernel: &'static str, buffers: &[Slice], number: f32, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let constants = &ElementConstants { count, number, shared: 1 };
        Launch { unit: "elementwise", kernel, buffers, constants }.each(count)
    }

    /// A kernel of `kernels/streams.h`.
    fn streams(&self, kernel: &'static str, inputs: &[Value], shape: Streams, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let Streams { count: streams, width, weights } = shape;
        let buffers: Vec<Slice> = inputs.iter().chain([&out]).map(|value| self.value(*value)).collect();
        let constants = &StreamConstants { count, streams, width, weights };
        Launch { unit: "streams", kernel, buffers: &buffers, constants }.each(count)
    }

    /// A product of gate and up.
    fn activate(&self, inputs: [Value; 2], how: Activation, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let [gate, up] = inputs.map(|value| self.value(value));
        let constants = &ActivateConstants { count, activation: how.into() };
        let buffers = [gate, up, self.value(out)];
        Launch { unit: "elementwise", kernel: "activate", buffers: &buffers, constants }.each(count)
    }

    fn ssm_scan(
        &self,
        inputs: SsmInputs,
        weights: SsmWeights,
        shape: &SsmScan,
        state: StateId,
        out: Value,
    ) -> Dispatch {
        let [x, b, c, dt] = [inputs.x, inputs.b, inputs.c, inputs.dt].map(|value| self.value(value));
        let [a, d, dt_bias] = [weights.a, weights.d, weights.dt_bias].map(|weight| self.vector(weight));
        let sequences = self.input(self.layout.sequences);
        let held = self.memory.state.states[state.0].slice();
        let buffers = [x, b, c, dt, a, d, dt_bias, sequences, held, self.value(out)];
        let SsmScan { heads, head_dim, groups, state_size, time_steps: (least, most) } = *shape;
        let constants = &SsmConstants { heads, head_dim, groups, state_size, least, most };
        Launch { unit: "recurrent", kernel: "ssm_scan", buffers: &buffers, constants }
            .over([head_dim.div_ceil(32), heads, self.shape.sequences], THREADS)
    }

    /// A kernel that makes each row from tokens of its sequence.
    pub(super) fn window(
        &self,
        kernel: &'static str,
        x: Value,
        weights: &[Slice],
        taps: WindowConstants,
        state: StateId,
        out: Value,
    ) -> Dispatch {
        let held = self.memory.state.states[state.0].slice();
        let (sequences, owners) = (self.input(self.layout.sequences), self.input(self.layout.owners));
        let own = [self.value(x)].into_iter().chain(weights.iter().copied());
        let buffers: Vec<Slice> = own.chain([held, sequences, owners, self.value(out)]).collect();
        Launch { unit: "recurrent", kernel, buffers: &buffers, constants: &taps }
            .over([blocks(x.width()), self.rows, 1], THREADS)
    }

    fn window_pool(
        &mut self,
        [kv, gate]: [Value; 2],
        bias: Slice,
        shape: WindowPool,
        state: StateId,
        out: Value,
    ) {
        let held = self.memory.state.states[state.0].slice();
        let (sequences, owners) = (self.input(self.layout.sequences), self.input(self.layout.owners));
        let buffers = [self.value(kv), self.value(gate), bias, held, sequences, owners, self.value(out)];
        let WindowPool { width, window, overlap, .. } = shape;
        let constants = &PoolConstants { width, window, overlap };
        let launch = Launch { unit: "recurrent", kernel: "window_pool", buffers: &buffers, constants };
        let dispatch = launch.over([blocks(shape.width), self.rows, 1], THREADS);
        self.run.push(dispatch);
        let channels = shape.channels();
        let kept = CarryConstants { first: channels, second: channels, held: shape.held() };
        self.carry([kv, gate], kept, state);
    }

    /// Queues the state after rows of two inputs.
    pub(super) fn carry(&mut self, inputs: [Value; 2], kept: CarryConstants, state: StateId) {
        let [a, b] = inputs.map(|value| self.value(value));
        let held = self.memory.state.states[state.0].slice();
        let buffers = [a, b, self.input(self.layout.sequences), held];
        let launch = Launch { unit: "recurrent", kernel: "carry", buffers: &buffers, constants: &kept };
        let dispatch = launch.over([blocks(kept.first + kept.second), self.shape.sequences, 1], THREADS);
        self.run.push(dispatch);
    }
}
