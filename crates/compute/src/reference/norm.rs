//! The scalar meaning of norms.

use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp};
use crate::Result;
use crate::graph::{LayerNormOp, RmsNormOp};

/// x / sqrt(mean(x²) + eps) ⊙ weight, in place.
pub fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    for (v, w) in x.iter_mut().zip(weight) {
        *v = (f64::from(*v) * factor) as f32 * w;
    }
}

/// (x − mean) / √(variance + eps) ⊙ weight + bias, in place.
pub fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let n = x.len() as f64;
    let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    for ((v, w), b) in x.iter_mut().zip(weight).zip(bias) {
        *v = ((f64::from(*v) - mean) * factor) as f32 * w + b;
    }
}

impl ReferenceOp for RmsNormOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let part = self.x.width() / self.groups;
        let weight = self.weight.map_or_else(|| Ok(vec![1.0; part]), |weight| own.vector(weight))?;
        let mut rows = call.of(self.x).clone();
        for row in &mut rows {
            let weights = weight.chunks(part).cycle();
            row.chunks_mut(part).zip(weights).for_each(|(part, w)| rms_norm(part, w, self.eps));
        }
        Ok(Outcome::Rows(rows))
    }
}

impl ReferenceOp for LayerNormOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (weight, bias) = (own.vector(self.weight)?, own.vector(self.bias)?);
        let mut rows = call.of(self.x).clone();
        rows.iter_mut().for_each(|row| layer_norm(row, &weight, &bias, self.eps));
        Ok(Outcome::Rows(rows))
    }
}
