//! The scalar meaning of operations with recurrent state. States are f32 between tokens.

use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp, dot, sigmoid, softplus, swiglu};
use crate::Result;
use crate::backend::Span;
use crate::graph::{
    CausalConv1dOp, Decay, DeltaInputs, DeltaRule, GatedDeltaRuleOp, SsmInputs, SsmScan, SsmScanOp,
    SsmWeights, StateId,
};

/// One token of a causal convolution: `state` ((kernel − 1) · dilation, channels) and x (channels) → out (channels).
/// `weight` is (channels, kernel), `bias` (channels) or empty; there is no silu if it is `plain`.
pub fn causal_conv1d(
    [weight, bias]: [&[f32]; 2],
    [kernel, dilation]: [usize; 2],
    plain: bool,
    x: &[f32],
    state: &mut Vec<f32>,
    out: &mut [f32],
) {
    let channels = x.len();
    state.extend(x);
    for (c, o) in out.iter_mut().enumerate() {
        let seen: Vec<f32> = (0..kernel).map(|j| state[j * dilation * channels + c]).collect();
        let bias = bias.get(c).copied().unwrap_or(0.0);
        let sum = dot(&seen, &weight[c * kernel..(c + 1) * kernel]) + bias;
        *o = if plain { sum } else { swiglu(sum, 1.0) };
    }
    state.drain(..channels);
}

/// x / √(Σx² + eps).
fn l2_normalized(x: &[f32]) -> Vec<f32> {
    let sum: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
    let factor = 1.0 / (sum + f64::from(DeltaRule::L2_EPS)).sqrt();
    x.iter().map(|v| (f64::from(*v) * factor) as f32).collect()
}

/// What one token gives a value head.
#[derive(Debug, Clone, Copy)]
pub struct DeltaToken<'a> {
    /// (key_dim), not normalised.
    pub q: &'a [f32],
    /// (key_dim), not normalised.
    pub k: &'a [f32],
    /// (value_dim).
    pub v: &'a [f32],
    /// Logit of the writing strength.
    pub b: f32,
    /// g: what part of the state is kept.
    pub kept: f64,
}

/// What part of a state is kept, for A and x = a + dt_bias.
pub fn kept(decay: Decay, a: f32, x: f32) -> f64 {
    let (a, x) = (f64::from(a), f64::from(x));
    match decay {
        Decay::Softplus => (a * softplus(x)).exp(),
        Decay::Bounded(bound) => (f64::from(bound) / (1.0 + (a * x).exp())).exp(),
    }
}

/// One token of one value head by the gated delta rule: `state` (key_dim, value_dim) → `out` (value_dim).
pub fn gated_delta_rule(token: &DeltaToken<'_>, state: &mut [f32], out: &mut [f32]) {
    let DeltaToken { v, b, kept: g, .. } = *token;
    let (q, k) = (l2_normalized(token.q), l2_normalized(token.k));
    let scale = 1.0 / (q.len() as f64).sqrt();
    let beta = f64::from(sigmoid(b));
    for j in 0..v.len() {
        let column = |i: usize| i * v.len() + j;
        let recalled: f64 = k.iter().enumerate().map(|(i, k)| g * f64::from(state[column(i)] * k)).sum();
        let delta = beta * (f64::from(v[j]) - recalled);
        let mut sum = 0.0;
        for (i, (q, k)) in q.iter().zip(&k).enumerate() {
            let new = g * f64::from(state[column(i)]) + f64::from(*k) * delta;
            state[column(i)] = new as f32;
            sum += new * f64::from(*q) * scale;
        }
        out[j] = sum as f32;
    }
}

/// What one token gives a head of a state space model.
#[derive(Debug, Clone, Copy)]
pub struct SsmToken<'a> {
    /// (head_dim).
    pub x: &'a [f32],
    /// (state_size): what is written.
    pub b: &'a [f32],
    /// (state_size): what is read.
    pub c: &'a [f32],
    /// What the time step is made from.
    pub dt: f32,
    /// Added to dt.
    pub dt_bias: f32,
    /// Smallest and largest time step.
    pub time_steps: (f32, f32),
    /// A of the decay: one, or (state_size).
    pub a: &'a [f32],
    /// Weight of x itself.
    pub d: f32,
}

/// One token of one head of a state space model: `state` (state_size, head_dim) → `out` (head_dim).
pub fn ssm_scan(token: &SsmToken<'_>, state: &mut [f32], out: &mut [f32]) {
    let (least, most) = (f64::from(token.time_steps.0), f64::from(token.time_steps.1));
    let time_step = match softplus(f64::from(token.dt) + f64::from(token.dt_bias)) {
        // Not `clamp`, which panics if limits are no numbers.
        step if step < least => least,
        step if step > most => most,
        step => step,
    };
    let decay = |n: usize| (time_step * f64::from(token.a[n % token.a.len()])).exp();
    for (p, (x, out)) in token.x.iter().zip(out.iter_mut()).enumerate() {
        let x = f64::from(*x);
        let mut sum = f64::from(token.d) * x;
        for (n, (b, c)) in token.b.iter().zip(token.c).enumerate() {
            let held = &mut state[n * token.x.len() + p];
            let new = decay(n) * f64::from(*held) + time_step * x * f64::from(*b);
            *held = new as f32;
            sum += new * f64::from(*c);
        }
        *out = sum as f32;
    }
}

impl ReferenceOp for CausalConv1dOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let weight = own.vector(self.weight)?;
        let bias = self.bias.map(|bias| own.vector(bias)).transpose()?.unwrap_or_default();
        let shape = [self.kernel, self.dilation];
        let (x, spans) = (call.of(self.x), call.batch.spans);
        Ok(Outcome::Rows(own.conv(x, [&weight, &bias], (shape, self.plain), self.state, spans)))
    }
}

impl ReferenceOp for GatedDeltaRuleOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let DeltaInputs { q, k, v, a, b } = self.inputs;
        let weights = [&own.vector(self.decay)?[..], &own.vector(self.dt_bias)?];
        let inputs = [q, k, v, a, b].map(|value| call.of(value));
        Ok(Outcome::Rows(own.delta_rule(inputs, weights, &self.shape, self.state, call.batch.spans)))
    }
}

impl ReferenceOp for SsmScanOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (SsmInputs { x, b, c, dt }, SsmWeights { a, d, dt_bias }) = (self.inputs, self.weights);
        let weights = [own.vector(a)?, own.vector(d)?, own.vector(dt_bias)?];
        let inputs = [x, b, c, dt].map(|value| call.of(value));
        Ok(Outcome::Rows(own.ssm_scan(inputs, &weights, &self.shape, self.state, call.batch.spans)))
    }
}

impl Interpreter {
    /// Takes the state that `span` starts from.
    pub(super) fn state(&self, state: StateId, span: &Span<'_>) -> Vec<f32> {
        let zeros = || vec![0.0; self.graph.states[state.0]];
        match span.start {
            0 => zeros(),
            _ => self.states.get(&(state.0, span.slots.read)).cloned().unwrap_or_else(zeros),
        }
    }

    fn conv(
        &mut self,
        x: &Matrix,
        [weight, bias]: [&[f32]; 2],
        (shape, plain): ([usize; 2], bool),
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let mut out = x.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                causal_conv1d([weight, bias], shape, plain, &x[row], &mut held, &mut out[row]);
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }

    fn delta_rule(
        &mut self,
        [q, k, v, a, b]: [&Matrix; 5],
        [decay, dt_bias]: [&[f32]; 2],
        shape: &DeltaRule,
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
        let mut out = v.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                for (head, state) in held.chunks_mut(key_dim * value_dim).enumerate() {
                    let key = shape.key_head(head) * key_dim..(shape.key_head(head) + 1) * key_dim;
                    let value = head * value_dim..(head + 1) * value_dim;
                    let decays = dt_bias.len() / shape.value_heads;
                    if decays > 1 {
                        for (i, channel) in state.chunks_mut(value_dim).enumerate() {
                            let at = head * decays + i;
                            let g = kept(shape.decay, decay[head], a[row][at] + dt_bias[at]);
                            channel.iter_mut().for_each(|s| *s = (f64::from(*s) * g) as f32);
                        }
                    }
                    let own = a[row][head * decays] + dt_bias[head * decays];
                    let token = DeltaToken {
                        q: &q[row][key.clone()],
                        k: &k[row][key],
                        v: &v[row][value.clone()],
                        b: b[row][head],
                        kept: if decays > 1 { 1.0 } else { kept(shape.decay, decay[head], own) },
                    };
                    gated_delta_rule(&token, state, &mut out[row][value]);
                }
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }

    fn ssm_scan(
        &mut self,
        [x, b, c, dt]: [&Matrix; 4],
        [a, d, dt_bias]: &[Vec<f32>; 3],
        shape: &SsmScan,
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let mut out = x.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                for (head, state) in held.chunks_mut(shape.head_dim * shape.state_size).enumerate() {
                    let group =
                        shape.group(head) * shape.state_size..(shape.group(head) + 1) * shape.state_size;
                    let own = head * shape.head_dim..(head + 1) * shape.head_dim;
                    let token = SsmToken {
                        x: &x[row][own.clone()],
                        b: &b[row][group.clone()],
                        c: &c[row][group],
                        dt: dt[row][head],
                        dt_bias: dt_bias[head],
                        time_steps: shape.time_steps,
                        a: &a[head * a.len() / shape.heads..(head + 1) * a.len() / shape.heads],
                        d: d[head],
                    };
                    ssm_scan(&token, state, &mut out[row][own]);
                }
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }
}
