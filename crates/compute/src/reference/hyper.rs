//! The scalar meaning of hyper-connections: see [`HyperConnection`].

use super::attention::softmax;
use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp, dot, sigmoid};
use crate::Result;
use crate::graph::{
    GatedMeanOp, HyperCollapseOp, HyperConnection, HyperExpandOp, HyperKind, HyperWeightsOp, SoftmaxMixOp,
    StreamAddOp, StreamGateOp,
};

/// Weights of a row from its streams x and their logits.
pub fn hyper_weights(
    shape: &HyperConnection,
    x: &[f32],
    mix: &[f32],
    base: &[f32],
    factors: &[f32],
) -> Vec<f32> {
    let n = shape.streams;
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let norm = 1.0 / (mean + f64::from(shape.norm_eps)).sqrt();
    let logit = |i: usize| (f64::from(mix[i]) * norm * f64::from(factors[(i / n).min(2)])) as f32 + base[i];
    let mut out: Vec<f32> = (0..n).map(|i| sigmoid(logit(i)) + shape.floor).collect();
    let iterations = match shape.kind {
        HyperKind::Collapsed => return out,
        HyperKind::Independent { magnitude } => {
            out.extend((n..2 * n).map(|i| magnitude * sigmoid(logit(i)) + shape.floor));
            return out;
        }
        HyperKind::Mixed { iterations } => iterations,
    };
    out.extend((n..2 * n).map(|i| 2.0 * sigmoid(logit(i))));
    let floor = f64::from(shape.floor);
    let row = |from: usize| {
        let logits: Vec<f32> = (0..n).map(|into| logit((2 + from) * n + into)).collect();
        softmax(&logits).iter().map(|w| w + floor).collect::<Vec<f64>>()
    };
    let mut mixing: Vec<Vec<f64>> = (0..n).map(row).collect();
    for iteration in 0..iterations.max(1) {
        if iteration > 0 {
            for row in &mut mixing {
                let sum: f64 = row.iter().sum();
                row.iter_mut().for_each(|w| *w /= sum + floor);
            }
        }
        for into in 0..n {
            let sum: f64 = mixing.iter().map(|row| row[into]).sum();
            mixing.iter_mut().for_each(|row| row[into] /= sum + floor);
        }
    }
    out.extend(mixing.iter().flatten().map(|w| *w as f32));
    out
}

/// Σ over streams of weight · stream.
pub fn hyper_collapse(x: &[f32], weights: &[f32], streams: usize) -> Vec<f32> {
    let width = x.len() / streams;
    let sum =
        |c: usize| (0..streams).map(|s| f64::from(weights[s]) * f64::from(x[s * width + c])).sum::<f64>();
    (0..width).map(|c| sum(c) as f32).collect()
}

/// The streams after a block.
pub fn hyper_expand(x: &[f32], block: &[f32], weights: &[f32], streams: usize) -> Vec<f32> {
    let width = block.len();
    let weight = |i: usize| f64::from(weights[i]);
    let element = |into: usize, c: usize| {
        let mixed = |from: usize| {
            if weights.len() == 2 * streams {
                f64::from(x[from * width + c]) * f64::from(u8::from(from == into))
            } else {
                weight((2 + from) * streams + into) * f64::from(x[from * width + c])
            }
        };
        let added = weight(streams + into) * f64::from(block[c]);
        ((0..streams).map(mixed).sum::<f64>() + added) as f32
    };
    (0..streams)
        .flat_map(|into| (0..width).map(move |c| (into, c)))
        .map(|(into, c)| element(into, c))
        .collect()
}

/// Mean over streams of sigmoid(gate) ⊙ stream.
pub fn gated_mean(x: &[f32], gate: &[f32], streams: usize) -> Vec<f32> {
    let width = x.len() / streams;
    let part = |i: usize| f64::from(x[i]) * f64::from(sigmoid(gate[i]));
    let mean = |c: usize| (0..streams).map(|s| part(s * width + c)).sum::<f64>() / streams as f64;
    (0..width).map(|c| mean(c) as f32).collect()
}

/// The streams with 2 · sigmoid(logit / streams) · block added to each.
pub fn stream_add(x: &[f32], block: &[f32], logits: &[f32]) -> Vec<f32> {
    let weights = logits.iter().map(|logit| 2.0 * sigmoid(logit / logits.len() as f32));
    let added = weights.flat_map(|weight| block.iter().map(move |b| weight * b));
    x.iter().zip(added).map(|(x, added)| x + added).collect()
}

/// For each stream the value, gated by how well its key and its query fit.
pub fn stream_gate(keys: &[f32], queries: &[f32], value: &[f32]) -> Vec<f32> {
    let width = value.len();
    let gate = |(key, query): (&[f32], &[f32])| {
        let score = dot(key, query) / (width as f32).sqrt();
        let sign = if score == 0.0 { 0.0 } else { score.signum() };
        sigmoid(sign * score.abs().max(1e-6).sqrt())
    };
    let gates = keys.chunks(width).zip(queries.chunks(width)).map(gate);
    gates.flat_map(|gate| value.iter().map(move |v| gate * v)).collect()
}

impl ReferenceOp for HyperWeightsOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (base, factors) = (own.vector(self.base)?, own.vector(self.factors)?);
        let rows = call.of(self.x).iter().zip(call.of(self.mix));
        Ok(Outcome::Rows(rows.map(|(x, mix)| hyper_weights(&self.shape, x, mix, &base, &factors)).collect()))
    }
}

impl ReferenceOp for HyperCollapseOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.x).iter().zip(call.of(self.weights));
        Ok(Outcome::Rows(rows.map(|(x, weights)| hyper_collapse(x, weights, self.streams)).collect()))
    }
}

impl ReferenceOp for HyperExpandOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.x).iter().zip(call.of(self.block)).zip(call.of(self.weights));
        Ok(Outcome::Rows(
            rows.map(|((x, block), weights)| hyper_expand(x, block, weights, self.streams)).collect(),
        ))
    }
}

impl ReferenceOp for GatedMeanOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.x).iter().zip(call.of(self.gate));
        Ok(Outcome::Rows(rows.map(|(x, gate)| gated_mean(x, gate, self.streams)).collect()))
    }
}

impl ReferenceOp for StreamAddOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.x).iter().zip(call.of(self.block)).zip(call.of(self.logits));
        Ok(Outcome::Rows(rows.map(|((x, block), logits)| stream_add(x, block, logits)).collect()))
    }
}

impl ReferenceOp for StreamGateOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.keys).iter().zip(call.of(self.queries)).zip(call.of(self.value));
        Ok(Outcome::Rows(rows.map(|((keys, queries), value)| stream_gate(keys, queries, value)).collect()))
    }
}

impl ReferenceOp for SoftmaxMixOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let row = |row: usize| {
            let logits: Vec<f32> = self.logits.iter().map(|logit| call.of(*logit)[row][0]).collect();
            let weights = softmax(&logits);
            let part = |c: usize| {
                let terms = self.values.iter().zip(&weights);
                terms.map(|(value, weight)| weight * f64::from(call.of(*value)[row][c])).sum::<f64>() as f32
            };
            (0..self.values[0].width()).map(part).collect()
        };
        Ok(Outcome::Rows((0..call.of(self.values[0]).len()).map(row).collect()))
    }
}
