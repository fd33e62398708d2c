//! Lowering of operations on rows: tables, norms, rotations, choices of rows and columns.

use super::context::{Launch, Lowering, THREADS, summing};
use crate::gpu::arguments::{
    AnglesConstants, EmbedConstants, GatherConstants, GivenConstants, HeadScaleConstants, JoinConstants,
    LayerNormConstants, PositionScaleConstants, RepeatConstants, RmsNormConstants, RopeConstants,
    SliceConstants,
};
use crate::gpu::device::Dispatch;
use crate::gpu::memory::{Given, Turn};
use crate::graph::{Growth, PositionScale, RopeStyle, Value, WeightId};

/// Channels of heads that are rotated: from `first` on; by negative angles if `inverse`.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RotatedChannels {
    pub(super) first: usize,
    pub(super) inverse: bool,
}

impl Lowering<'_> {
    /// Rows of a table by token.
    pub(super) fn embed(&self, table: WeightId, out: Value) -> Dispatch {
        let weight = self.weight(table);
        let [a, b, c] = weight.planes;
        let buffers = [a, b, c, self.input(self.layout.tokens), self.value(out)];
        let constants = &EmbedConstants { table: weight.format };
        Launch { unit: "linear", kernel: "embed", buffers: &buffers, constants }.over([self.rows, 1, 1], 64)
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

    /// Queues what makes the angles of all turns, if the device does.
    pub(super) fn make_angles(&mut self) {
        let Some(turned) = &self.layout.turned else { return };
        for (index, turn) in self.memory.turns.iter().enumerate() {
            let rope = &self.graph.ropes[turn.rope];
            let (rows, pairs) = (self.shape.rows, rope.inv_freq.len());
            let buffers = [turned.positions, turned.pairs[index], self.layout.angles[index]];
            let constants = &AnglesConstants { rows, pairs, stride: turn.stride, magnitude: rope.magnitude };
            let launch = Launch {
                unit: "angles",
                kernel: "angles",
                buffers: &buffers.map(|at| self.input(at)),
                constants,
            };
            self.run.push(launch.each(rows * pairs));
        }
    }

    /// Rotates heads.
    pub(super) fn rotation(
        &self,
        x: Value,
        heads: usize,
        turn: Turn,
        RotatedChannels { first, inverse }: RotatedChannels,
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

    /// Columns `start..start + len` of each of `groups` parts of rows.
    pub(super) fn slice(&self, x: Value, groups: usize, [start, len]: [usize; 2], out: Value) -> Dispatch {
        let (count, part) = (self.rows * out.width(), x.width() / groups);
        let buffers = [self.value(x), self.value(out)];
        let constants = &SliceConstants { count, part, start, len };
        Launch { unit: "rows", kernel: "slice", buffers: &buffers, constants }.each(count)
    }

    /// The rows that are wanted.
    pub(super) fn gather_rows(&self, x: Value, out: Value) -> Dispatch {
        let buffers = [self.value(x), self.input(self.layout.outputs), self.value(out)];
        let constants = &GatherConstants { width: x.width() };
        Launch { unit: "rows", kernel: "gather_rows", buffers: &buffers, constants }
            .over([self.shape.outputs, 1, 1], THREADS)
    }

    /// Scales rows by where their tokens are.
    pub(super) fn position_scale(&self, x: Value, scale: PositionScale, out: Value) -> Dispatch {
        let (count, width) = (self.rows * out.width(), out.width());
        let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (offset, period) = (word(scale.offset), word(scale.period.max(1)));
        let (places, kept) = (self.input(self.layout.places), self.input(self.layout.outputs));
        let buffers = [self.value(x), places, kept, self.value(out)];
        let (base, slope) = (scale.base, scale.slope);
        let (power, gathered) = (scale.growth == Growth::Power, self.gathered);
        let constants =
            &PositionScaleConstants { count, width, base, slope, offset, period, power, gathered };
        Launch { unit: "rows", kernel: "position_scale", buffers: &buffers, constants }.each(count)
    }

    /// Scales the heads of rows by where their tokens are: `factors` are those of the first position, and slopes.
    pub(super) fn head_scale(&self, x: Value, heads: usize, factors: [WeightId; 2], out: Value) -> Dispatch {
        let [base, slope] = factors.map(|id| self.vector(id));
        let (count, width) = (self.rows * out.width(), out.width());
        let buffers = [self.value(x), self.input(self.layout.places), base, slope, self.value(out)];
        let constants = &HeadScaleConstants { count, width, head_dim: width / heads };
        Launch { unit: "rows", kernel: "head_scale", buffers: &buffers, constants }.each(count)
    }

    /// Takes the mean of rows away, scales and shifts them.
    pub(super) fn layer_norm(
        &self,
        x: Value,
        [weight, bias]: [WeightId; 2],
        eps: f32,
        out: Value,
    ) -> Dispatch {
        let buffers = [self.value(x), self.vector(weight), self.vector(bias), self.value(out)];
        let constants = &LayerNormConstants { width: x.width(), eps };
        Launch { unit: "rms_norm", kernel: "layer_norm", buffers: &buffers, constants }
            .over([self.rows, 1, 1], summing(x.width()))
    }

    /// x with what comes with the batch at some rows: in place of x at level 0, else added to it.
    pub(super) fn given_embeddings(&mut self, x: Value, level: usize, out: Value) {
        let copy = self.repeat(x, 1, out);
        self.run.push(copy);
        let Given { rows, width: each } = self.shape.given;
        if rows == 0 {
            return;
        }
        let (width, first) = (x.width(), level * x.width());
        let buffers = [self.input(self.layout.given), self.input(self.layout.given_rows), self.value(out)];
        let constants = &GivenConstants { width, each, first, adds: level > 0 };
        let put = Launch { unit: "rows", kernel: "put_rows", buffers: &buffers, constants }
            .over([rows, 1, 1], THREADS);
        self.run.push(put);
    }

    /// Rows of a and b side by side.
    pub(super) fn join(&self, [a, b]: [Value; 2], out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let constants = &JoinConstants { count, left: a.width(), right: b.width() };
        let buffers = [self.value(a), self.value(b), self.value(out)];
        Launch { unit: "rows", kernel: "join", buffers: &buffers, constants }.each(count)
    }

    /// Rows that are `times` times the same.
    pub(super) fn repeat(&self, x: Value, times: usize, out: Value) -> Dispatch {
        let count = self.rows * out.width();
        let constants = &RepeatConstants { count, width: x.width(), times };
        let buffers = [self.value(x), self.value(out)];
        Launch { unit: "rows", kernel: "repeat", buffers: &buffers, constants }.each(count)
    }
}
