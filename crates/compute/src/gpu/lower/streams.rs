//! Lowering of parallel streams to the kernels of `kernels/streams.h`.

use super::context::{Launch, Lowering, THREADS, blocks, summing};
use crate::gpu::arguments::{HyperConstants, MixConstants, StreamConstants};
use crate::gpu::device::{Dispatch, Grid, Slice};
use crate::graph::{HyperConnection, HyperKind, Value, WeightId};

/// `MIX_INPUTS` of `kernels/streams.h`.
const MIX_INPUTS: usize = 15;

/// Parallel streams: their number, their width, and elements of a row of weights.
struct Streams {
    count: usize,
    width: usize,
    weights: usize,
}

impl Lowering<'_> {
    /// A kernel of `kernels/streams.h`.
    fn streams(&self, kernel: &'static str, inputs: &[Value], shape: Streams, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let Streams { count: streams, width, weights } = shape;
        let buffers: Vec<Slice> = inputs.iter().chain([&out]).map(|value| self.value(*value)).collect();
        let constants = &StreamConstants { count, streams, width, weights };
        Launch { unit: "streams", kernel, buffers: &buffers, constants }.each(count)
    }

    /// One row of the streams x, as weights say.
    pub(super) fn hyper_collapse(&self, [x, weights]: [Value; 2], streams: usize, out: Value) -> Dispatch {
        let shape = Streams { count: streams, width: out.width(), weights: weights.width() };
        self.streams("hyper_collapse", &[x, weights], shape, out)
    }

    /// The streams x with what a block made, as weights say.
    pub(super) fn hyper_expand(
        &self,
        [x, block, weights]: [Value; 3],
        streams: usize,
        out: Value,
    ) -> Dispatch {
        let shape = Streams { count: streams, width: block.width(), weights: weights.width() };
        self.streams("hyper_expand", &[x, block, weights], shape, out)
    }

    /// The mean of gated streams.
    pub(super) fn gated_mean(&self, [x, gate]: [Value; 2], streams: usize, out: Value) -> Dispatch {
        let shape = Streams { count: streams, width: out.width(), weights: 0 };
        self.streams("gated_mean", &[x, gate], shape, out)
    }

    /// The streams x with what a block made, each as much of it as its logit says.
    pub(super) fn stream_add(&self, [x, block, logits]: [Value; 3], out: Value) -> Dispatch {
        let shape = Streams { count: logits.width(), width: block.width(), weights: logits.width() };
        self.streams("stream_add", &[x, block, logits], shape, out)
    }

    /// Weights of streams from their mix.
    pub(super) fn hyper_weights(
        &self,
        [x, mix]: [Value; 2],
        [base, factors]: [WeightId; 2],
        shape: &HyperConnection,
        out: Value,
    ) -> Dispatch {
        let buffers =
            [self.value(x), self.value(mix), self.vector(base), self.vector(factors), self.value(out)];
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

    /// Queues the sum of values, weighted by the softmax over their logits: in as many dispatches as it takes for all values to
    /// find room beside the logits.
    pub(super) fn softmax_mix(&mut self, values: &[Value], logits: &[Value], out: Value) {
        let (terms, width) = (values.len(), out.width());
        let room = MIX_INPUTS - terms;
        for (i, part) in values.chunks(room).enumerate() {
            let mut buffers: Vec<Slice> = logits.iter().chain(part).map(|value| self.value(*value)).collect();
            buffers.resize(MIX_INPUTS, self.input(0));
            buffers.push(self.value(out));
            let constants = &MixConstants { terms, first: i * room, values: part.len(), width };
            let mix = Launch { unit: "streams", kernel: "softmax_mix", buffers: &buffers, constants };
            self.run.push(mix.over([self.rows, blocks(width), 1], THREADS));
        }
    }

    /// A gate for each stream: a group of threads makes one.
    pub(super) fn stream_gate(&self, keys: Value, queries: Value, value: Value, out: Value) -> Dispatch {
        let streams = keys.width() / value.width();
        let shape = Streams { count: streams, width: value.width(), weights: 0 };
        let dispatch = self.streams("stream_gate", &[keys, queries, value], shape, out);
        let grid = [streams, self.rows, 1].map(|n| n as u32);
        Dispatch { grid: Grid::Fixed(grid), threads: summing(value.width()), ..dispatch }
    }
}
