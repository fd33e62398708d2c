//! Lowering of what is carried from token to token to the kernels of `kernels/recurrent.h`.

use super::context::{Launch, Lowering, THREADS, blocks};
use crate::gpu::arguments::{CarryConstants, DeltaConstants, PoolConstants, SsmConstants, WindowConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::graph::{
    Decay, DeltaInputs, DeltaRule, HeadPairing, SsmInputs, SsmScan, SsmWeights, StateId, Value, WeightId,
    WindowPool,
};

impl Lowering<'_> {
    /// See `kernels/recurrent.h`.
    pub(super) fn gated_delta_rule(
        &self,
        inputs: DeltaInputs,
        [decay, dt_bias]: [WeightId; 2],
        shape: DeltaRule,
        state: StateId,
        out: Value,
    ) -> Dispatch {
        let DeltaInputs { q, k, v, a, b } = inputs;
        let kernel = if a.width() == shape.value_heads { "gated_delta_rule" } else { "channel_delta_rule" };
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

    pub(super) fn ssm_scan(
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
        let decays = self.graph.weights()[weights.a.0].matrix;
        let (kernel, grid) = if decays.rows * decays.cols == heads {
            ("ssm_scan", [head_dim.div_ceil(32), heads])
        } else {
            ("selective_scan", [heads.div_ceil(32), 1])
        };
        Launch { unit: "recurrent", kernel, buffers: &buffers, constants }
            .over([grid[0], grid[1], self.shape.sequences], THREADS)
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

    pub(super) fn window_pool(
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

    /// Queues means of rows and those before them.
    pub(super) fn window_mean(&mut self, x: Value, window: usize, state: StateId, out: Value) {
        let channels = x.width();
        let taps = WindowConstants { channels, taps: window, dilation: 1, has_bias: false, plain: true };
        let dispatch = self.window("window_mean", x, &[], taps, state, out);
        self.run.push(dispatch);
        let kept = CarryConstants { first: channels, second: 0, held: window - 1 };
        self.carry([x, x], kept, state);
    }
}
