//! Lowering of what is carried from token to token to the kernels of `kernels/recurrent.h`, `kernels/delta_rule.h`,
//! `kernels/ssm_scan.h` and `kernels/selective_scan.h`.

use super::context::{Launch, Lowering, THREADS, blocks};
use crate::gpu::arguments::{
    CarryConstants, DeltaConstants, PoolConstants, SelectiveConstants, SsmConstants, WindowConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::graph::{
    Decay, DeltaInputs, DeltaRule, HeadPairing, SsmInputs, SsmScan, SsmWeights, StateId, Value, WeightId,
    WindowPool,
};

/// Threads of a group whose threads have columns of states: `STATE_WARPS` of `kernels/state_columns.h`.
const STATE_THREADS: u32 = 128;

/// Of the kernels for states of up to 32, 128 and more rows the one for so many, and the columns of a group there: a thread has 16
/// rows of two.
fn of_rows(kernels: [&'static str; 3], rows: usize) -> (&'static str, usize) {
    let (kernel, threads) = match rows {
        ..=32 => (kernels[0], 2),
        33..=128 => (kernels[1], 8),
        _ => (kernels[2], 32),
    };
    (kernel, 2 * STATE_THREADS as usize / threads)
}

impl Lowering<'_> {
    /// See `kernels/delta_rule.h`.
    pub(super) fn gated_delta_rule(
        &self,
        inputs: DeltaInputs,
        [decay, dt_bias]: [WeightId; 2],
        shape: DeltaRule,
        state: StateId,
        out: Value,
    ) -> Dispatch {
        let DeltaInputs { q, k, v, a, b } = inputs;
        let of_head = a.width() == shape.value_heads;
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
        let kernels = if of_head {
            ["gated_delta_rule_2", "gated_delta_rule_8", "gated_delta_rule_32"]
        } else {
            ["channel_delta_rule_2", "channel_delta_rule_8", "channel_delta_rule_32"]
        };
        let (kernel, columns) = of_rows(kernels, key_dim);
        Launch { unit: "delta_rule", kernel, buffers: &buffers, constants }
            .over([value_dim.div_ceil(columns), value_heads, self.shape.sequences], STATE_THREADS)
    }

    /// See `kernels/ssm_scan.h` and `kernels/selective_scan.h`.
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
        let decays = self.graph.weights()[weights.a.0].matrix;
        if decays.rows * decays.cols != heads {
            let constants = &SelectiveConstants { channels: heads, groups, state_size, least, most };
            let kernel = if state_size <= 16 { "selective_scan_2" } else { "selective_scan_32" };
            return Launch { unit: "selective_scan", kernel, buffers: &buffers, constants }
                .over([heads.div_ceil(32), 1, self.shape.sequences], THREADS);
        }
        let constants = &SsmConstants { heads, head_dim, groups, state_size, least, most };
        let (kernel, columns) = of_rows(["ssm_scan_2", "ssm_scan_8", "ssm_scan_32"], state_size);
        Launch { unit: "ssm_scan", kernel, buffers: &buffers, constants }
            .over([head_dim.div_ceil(columns), heads, self.shape.sequences], STATE_THREADS)
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
