//! Operations on a row of activations: products, norms, rotations, attention of one head, routers and experts.

use std::ops::Range;

use crate::backend::ExpertView;
use crate::graph::{
    Activation, Attention, GroupRank, LatentAttention, LatentWeights, Rope, RopeStyle, Route, Score, WeightId,
};
use crate::quant::dequantize_row;
use crate::{Result, TensorView};

/// out = Σ a·b.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
}

/// weight · x for one row of activations; `out` has one element a weight row.
///
/// # Errors
/// If the weight's dtype has no dequantiser.
pub fn linear(weight: TensorView<'_>, x: &[f32], out: &mut [f32]) -> Result<()> {
    let mut row = vec![0.0; weight.cols()];
    for (r, o) in out.iter_mut().enumerate() {
        dequantize_row(weight, r, &mut row)?;
        *o = dot(&row, x);
    }
    Ok(())
}

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

/// Rotates one head in place.
pub fn rope(head: &mut [f32], rotation: &Rope, position: usize) {
    let pairs = rotation.inv_freq.len();
    for (i, freq) in rotation.inv_freq.iter().enumerate() {
        let (a, b) = match rotation.style {
            RopeStyle::HalfSplit => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = (position as f32 * freq).sin_cos();
        let (sin, cos) = (sin * rotation.magnitude, cos * rotation.magnitude);
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

/// Keys visible to the query at `position`.
pub fn visible(shape: &Attention, position: usize) -> Range<usize> {
    let first = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let start = shape.chunk.map_or(0, |chunk| position - position % chunk);
    first.max(start)..position + 1
}

/// Attention of one query head over keys and values (n_keys, head_dim); a sink takes its share of the softmax. Nothing to
/// see gives zeros.
pub fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f32, sink: Option<f32>, out: &mut [f32]) {
    let scores: Vec<f32> = keys.iter().map(|k| dot(q, k) * scale).chain(sink).collect();
    let probabilities = softmax(&scores);
    for (i, o) in out.iter_mut().enumerate() {
        *o = probabilities.iter().zip(values).map(|(p, v)| p * f64::from(v[i])).sum::<f64>() as f32;
    }
}

pub(super) fn softmax(scores: &[f32]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f64> = scores.iter().map(|s| f64::from(s - max).exp()).collect();
    let sum: f64 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    p
}

/// W_k (nope, rank) and W_v (value, rank) of head `head`.
///
/// # Errors
/// If a weight's dtype has no dequantiser.
pub fn latent_weights(
    shape: &LatentAttention,
    weights: LatentWeights,
    view: impl Fn(WeightId) -> Result<Vec<Vec<f32>>>,
    head: usize,
) -> Result<[Vec<Vec<f32>>; 2]> {
    let LatentAttention { nope, rank, value, .. } = *shape;
    Ok(match weights {
        LatentWeights::Joint(id) => {
            let rows = view(id)?;
            let both = &rows[head * (nope + value)..(head + 1) * (nope + value)];
            [both[..nope].to_vec(), both[nope..].to_vec()]
        }
        LatentWeights::Split { k, v } => {
            let transposed = &view(k)?[head * rank..(head + 1) * rank];
            let k = (0..nope).map(|n| transposed.iter().map(|row| row[n]).collect()).collect();
            [k, view(v)?[head * value..(head + 1) * value].to_vec()]
        }
    })
}

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
        Activation::SquaredRelu => squared_relu(up),
    }
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

/// What logits are turned into.
fn scores(logits: &[f32], score: Score) -> Vec<f64> {
    match score {
        Score::Softmax => softmax(logits),
        Score::Sigmoid => logits.iter().map(|l| f64::from(sigmoid(*l))).collect(),
        Score::SqrtSoftplus => logits.iter().map(|l| softplus(f64::from(*l)).sqrt()).collect(),
        Score::SoftmaxOfChosen => logits.iter().map(|l| f64::from(*l)).collect(),
    }
}

/// The experts `ids` with their weights.
pub fn route_by_token(logits: &[f32], ids: &[f32], route: &Route) -> Vec<(u32, f32)> {
    weigh(logits, &scores(logits, route.score), ids.iter().map(|id| *id as usize).collect(), route)
}

/// The chosen experts with their weights, best first; ties go to the lower id. Experts outside the kept groups cannot
/// be chosen. A logit that is not finite makes every weight NaN: it comes from a broken weight or an overflow, and must
/// not vanish by not being chosen. Source: transformers' routers; DeepSeek-V3 adds 1e-20 to the sum that it divides by.
pub fn route(logits: &[f32], bias: Option<&[f32]>, route: &Route) -> Vec<(u32, f32)> {
    let scores = scores(logits, route.score);
    let biased = |e: usize| scores[e] + bias.map_or(0.0, |b| f64::from(b[e]));
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if let Some(groups) = route.groups {
        let size = scores.len() / groups.count;
        let rank = |group: usize| {
            let mut best: Vec<f64> = (group * size..(group + 1) * size).map(biased).collect();
            best.sort_by(|a, b| b.total_cmp(a));
            match groups.rank {
                GroupRank::Best => best[0],
                GroupRank::BestTwo => best.iter().take(2).sum(),
            }
        };
        let mut ranked: Vec<usize> = (0..groups.count).collect();
        ranked.sort_by(|a, b| rank(*b).total_cmp(&rank(*a)).then(a.cmp(b)));
        order.retain(|e| ranked[..groups.keep].contains(&(e / size)));
    }
    order.sort_by(|a, b| biased(*b).total_cmp(&biased(*a)).then(a.cmp(b)));
    order.truncate(route.top_k);
    weigh(logits, &scores, order, route)
}

/// Experts `order` with their weights.
fn weigh(logits: &[f32], scores: &[f64], order: Vec<usize>, route: &Route) -> Vec<(u32, f32)> {
    let chosen: Vec<f64> = match route.score {
        Score::SoftmaxOfChosen => softmax(&order.iter().map(|e| logits[*e]).collect::<Vec<_>>()),
        _ => order.iter().map(|e| scores[*e]).collect(),
    };
    let sum = if route.renormalize { chosen.iter().sum::<f64>() + 1e-20 } else { 1.0 };
    let poison = if logits.iter().all(|l| l.is_finite()) { 0.0 } else { f64::NAN };
    let weight = |w: f64| (w / sum * f64::from(route.scale) + poison) as f32;
    order.iter().zip(chosen).map(|(e, w)| (*e as u32, weight(w))).collect()
}

/// One expert on one row of activations; `biases` are its own of gate, up and down.
///
/// # Errors
/// If a weight's dtype has no dequantiser.
pub fn expert(
    weights: &ExpertView<'_>,
    activation: Activation,
    biases: Option<[&[f32]; 3]>,
    x: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let project = |weight: TensorView<'_>, which: usize, x: &[f32], out: &mut [f32]| {
        linear(weight, x, out)?;
        let bias = biases.iter().flat_map(|b| b[which]);
        out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
        Ok(())
    };
    let mut gate = vec![0.0; weights.up.rows()];
    let mut up = vec![0.0; weights.up.rows()];
    if let Some(weight) = weights.gate {
        project(weight, 0, x, &mut gate)?;
    }
    project(weights.up, 1, x, &mut up)?;
    for (g, u) in gate.iter_mut().zip(&up) {
        *g = activate(activation, *g, *u);
    }
    project(weights.down, 2, &gate, out)
}
