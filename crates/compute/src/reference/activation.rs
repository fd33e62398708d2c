//! The scalar meaning of activations and gates.

use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp};
use crate::Result;
use crate::graph::{ActivateOp, Activation, Gate, GateOp, Gelu, GeluOp, ScaledSiluOp};

/// silu(gate) · up.
pub fn swiglu(gate: f32, up: f32) -> f32 {
    let g = f64::from(gate);
    (g / (1.0 + (-g).exp())) as f32 * up
}

/// The product of an expert's gate and up, or what is made of up alone.
pub fn activate(activation: Activation, gate: f32, up: f32) -> f32 {
    match activation {
        Activation::SwiGlu => swiglu(gate, up),
        Activation::LimitedSwiGlu { limit } => swiglu(gate.min(limit), up.clamp(-limit, limit)),
        Activation::ClampedSwiGlu { alpha, limit } => {
            let (g, u) = (f64::from(gate.min(limit)), f64::from(up.clamp(-limit, limit)));
            ((u + 1.0) * g / (1.0 + (-f64::from(alpha) * g).exp())) as f32
        }
        Activation::CappedSwiGlu { limit } => swiglu(gate, 1.0).min(limit) * up.clamp(-limit, limit),
        Activation::GeGlu => gelu(gate) * up,
        Activation::SituGlu { beta, linear_beta } => {
            let capped = |x: f32, limit: f32| f64::from(limit) * (f64::from(x) / f64::from(limit)).tanh();
            let up = linear_beta.map_or(f64::from(up), |limit| capped(up, limit));
            (capped(gate, beta) / (1.0 + (-f64::from(gate)).exp()) * up) as f32
        }
        Activation::Bilinear => gate * up,
        Activation::SquaredRelu => squared_relu(up),
    }
}

/// x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
pub fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    (0.5 * x * (1.0 + inner.tanh())) as f32
}

/// x / 2 · (1 + erf(x / √2)).
pub fn gelu_erf(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2))) as f32
}

/// relu(x)².
pub fn squared_relu(x: f32) -> f32 {
    // `max` would drop a NaN.
    if x < 0.0 { 0.0 } else { x * x }
}

/// 1 / (1 + e⁻ˣ).
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

/// ln(1 + eˣ).
pub(super) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

impl ReferenceOp for ActivateOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let element = |(gate, up): (&f32, &f32)| activate(self.activation, *gate, *up);
        let row = |(gate, up): (&Vec<f32>, &Vec<f32>)| gate.iter().zip(up).map(element).collect();
        let up = call.of(self.up);
        let gate = self.gate.map_or(up, |gate| call.of(gate));
        Ok(Outcome::Rows(gate.iter().zip(up).map(row).collect()))
    }
}

impl ReferenceOp for GeluOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let element = |x: &f32| match self.form {
            Gelu::Tanh => gelu(*x),
            Gelu::Erf => gelu_erf(*x),
        };
        let row = |row: &Vec<f32>| row.iter().map(element).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for ScaledSiluOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let row = |row: &Vec<f32>| row.iter().map(|v| swiglu(v * self.factor, 1.0)).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for GateOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let factor = |gate: f32| match self.function {
            Gate::Sigmoid => sigmoid(gate),
            Gate::Softplus => softplus(f64::from(gate)) as f32,
        };
        let row = |(x, gate): (&Vec<f32>, &Vec<f32>)| {
            let part = x.len() / gate.len();
            x.iter().enumerate().map(|(i, x)| x * factor(gate[i / part])).collect()
        };
        Ok(Outcome::Rows(call.of(self.x).iter().zip(call.of(self.gate)).map(row).collect()))
    }
}
