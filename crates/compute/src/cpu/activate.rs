//! What is computed element by element between products: activations and gates.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::simd::Simd;
use super::vector;
use crate::Result;
use crate::graph::{ActivateOp, Activation, Gate, GateOp, Gelu, GeluOp, ScaledSiluOp};

impl CpuOp for ActivateOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { activation, gate, up } = *self;
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(up);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            if let Some(gate) = gate {
                out.copy_from_slice(cpu.values.row(gate, row));
            }
            activate(simd, activation, out, cpu.values.row(up, row));
        });
        Ok(())
    }
}

impl CpuOp for GeluOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, form } = *self;
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            match form {
                Gelu::Tanh => gelu(simd, out),
                Gelu::Erf => out.iter_mut().for_each(|v| {
                    *v *= 0.5 * (1.0 + libm::erff(*v * std::f32::consts::FRAC_1_SQRT_2));
                }),
            }
        });
        Ok(())
    }
}

impl CpuOp for ScaledSiluOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, factor } = *self;
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            vector::scale(simd, factor, out);
            vector::silu(simd, out);
        });
        Ok(())
    }
}

impl CpuOp for GateOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, gate, function } = *self;
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            let gate = cpu.values.row(gate, row);
            let part = out.len() / gate.len();
            match function {
                Gate::Sigmoid if part == 1 && out.len() > 1 => vector::sigmoid_mul(simd, gate, out),
                Gate::Sigmoid => scale_parts(simd, gate, out, |gate| 1.0 / (1.0 + (-gate).exp())),
                Gate::Softplus => scale_parts(simd, gate, out, softplus),
            }
        });
        Ok(())
    }
}

/// Multiplies each of as many equal parts of `out` as there are gates with what `factor` makes of its gate.
fn scale_parts(simd: Simd, gates: &[f32], out: &mut [f32], factor: impl Fn(f32) -> f32) {
    let parts = out.chunks_exact_mut(out.len() / gates.len());
    gates.iter().zip(parts).for_each(|(gate, part)| vector::scale(simd, factor(*gate), part));
}

/// ln(1 + eˣ), without overflow.
pub(crate) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// What `activation` makes of gate and up, or of up alone, in place of gate.
pub(crate) fn activate(simd: Simd, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::SwiGlu => vector::silu_mul(simd, gate, up),
        Activation::LimitedSwiGlu { limit } => limited_silu_mul(simd, gate, up, limit),
        Activation::ClampedSwiGlu { alpha, limit } => clamped_silu_mul(simd, gate, up, alpha, limit),
        Activation::CappedSwiGlu { limit } => capped_silu_mul(simd, gate, up, limit),
        Activation::GeGlu => gelu_mul(simd, gate, up),
        Activation::SituGlu { beta, linear_beta } => situ_mul(simd, gate, up, beta, linear_beta),
        Activation::Bilinear => gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u),
        Activation::SquaredRelu => squared_relu(up, gate),
    }
}

/// min(silu(gate), limit) ⊙ up, with up limited to ±limit, in place of gate.
fn capped_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], limit: f32) {
    vector::silu(simd, gate);
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit));
}

/// beta · tanh(gate / beta) · sigmoid(gate) ⊙ up, with up as linear_beta · tanh(up / linear_beta) if there is such a number, in
/// place of gate.
fn situ_mul(simd: Simd, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: Option<f32>) {
    let logits = gate.to_vec();
    vector::soft_limit(simd, beta, gate);
    vector::sigmoid_mul(simd, &logits, gate);
    let mut up = up.to_vec();
    if let Some(limit) = linear_beta {
        vector::soft_limit(simd, limit, &mut up);
    }
    vector::mul(simd, &up, gate);
}

/// limit · tanh(x / limit), in place.
pub(super) fn soft_cap(simd: Simd, x: &mut [f32], limit: f32) {
    let doubled: Vec<f32> = x.iter().map(|v| 2.0 * (v / limit)).collect();
    // tanh(x) = 2 sigmoid(2x) − 1.
    x.fill(2.0);
    vector::sigmoid_mul(simd, &doubled, x);
    x.iter_mut().for_each(|v| *v = limit * (*v - 1.0));
}

/// gelu(x) by the hyperbolic tangent, in place: `gelu` of the GPUs' `activate.h`, with the same roundings.
fn gelu(simd: Simd, x: &mut [f32]) {
    // √(8/π), and its product with 0.044715.
    let logits: Vec<f32> = x.iter().map(|v| v * (1.595_769 + 0.071_354_82 * (v * v))).collect();
    vector::sigmoid_mul(simd, &logits, x);
}

/// gelu(gate) ⊙ up, in place of gate.
fn gelu_mul(simd: Simd, gate: &mut [f32], up: &[f32]) {
    gelu(simd, gate);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u);
}

/// relu(x)².
fn squared_relu(x: &[f32], out: &mut [f32]) {
    // `max` would drop a NaN.
    out.iter_mut().zip(x).for_each(|(o, x)| *o = if *x < 0.0 { 0.0 } else { x * x });
}

/// silu(min(gate, limit)) ⊙ up, with up limited to ±limit, in place of gate.
fn limited_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], limit: f32) {
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    vector::silu(simd, gate);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit));
}

/// (up + 1) · gate · sigmoid(alpha · gate), with gate up to limit and up within ±limit, in place of gate.
fn clamped_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    let logits: Vec<f32> = gate.iter().map(|g| alpha * g).collect();
    vector::sigmoid_mul(simd, &logits, gate);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit) + 1.0);
}

#[cfg(test)]
mod tests {
    use super::squared_relu;

    #[test]
    fn what_is_not_a_number_stays_none() {
        let mut out = [7.0; 3];
        squared_relu(&[-2.0, 3.0, f32::NAN], &mut out);
        assert_eq!(out[..2], [0.0, 9.0]);
        assert!(out[2].is_nan());
    }
}
