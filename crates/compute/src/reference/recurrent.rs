//! The scalar meaning of operations with recurrent state. States are f32 between tokens.

use super::{dot, sigmoid, softplus, swiglu};
use crate::graph::{Decay, DeltaRule};

/// One token of a causal convolution: `state` ((kernel − 1) · dilation, channels) and x (channels) → out (channels).
/// `weight` is (channels, kernel), `bias` (channels) or empty.
pub fn causal_conv1d(
    [weight, bias]: [&[f32]; 2],
    kernel: usize,
    dilation: usize,
    x: &[f32],
    state: &mut Vec<f32>,
    out: &mut [f32],
) {
    let channels = x.len();
    state.extend(x);
    for (c, o) in out.iter_mut().enumerate() {
        let seen: Vec<f32> = (0..kernel).map(|j| state[j * dilation * channels + c]).collect();
        let bias = bias.get(c).copied().unwrap_or(0.0);
        *o = swiglu(dot(&seen, &weight[c * kernel..(c + 1) * kernel]) + bias, 1.0);
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
    /// A of the decay.
    pub a: f32,
    /// Weight of x itself.
    pub d: f32,
}

/// One token of one head of a Mamba-2 state space model: `state` (state_size, head_dim) → `out` (head_dim).
pub fn ssm_scan(token: &SsmToken<'_>, state: &mut [f32], out: &mut [f32]) {
    let (least, most) = (f64::from(token.time_steps.0), f64::from(token.time_steps.1));
    let time_step = match softplus(f64::from(token.dt) + f64::from(token.dt_bias)) {
        // Not `clamp`, which panics if limits are no numbers.
        step if step < least => least,
        step if step > most => most,
        step => step,
    };
    let decay = (time_step * f64::from(token.a)).exp();
    for (p, (x, out)) in token.x.iter().zip(out.iter_mut()).enumerate() {
        let x = f64::from(*x);
        let mut sum = f64::from(token.d) * x;
        for (n, (b, c)) in token.b.iter().zip(token.c).enumerate() {
            let held = &mut state[n * token.x.len() + p];
            let new = decay * f64::from(*held) + time_step * x * f64::from(*b);
            *held = new as f32;
            sum += new * f64::from(*c);
        }
        *out = sum as f32;
    }
}
