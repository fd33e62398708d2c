//! The scalar meaning of attention over keys and values and over latents.

use std::ops::Range;

use super::linear::dots;
use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp, dot, seen};
use crate::Result;
use crate::backend::{Batch, PAGE_TOKENS, Span};
use crate::graph::{
    Attention, AttentionOp, BidirectionalAttentionOp, Chosen, LatentAttention, LatentAttentionOp,
    LatentInputs, LatentWeights, WeightId,
};
use crate::quant::dequantize_row;

/// Keys visible to the query at `position`, where attention that looks ahead sees up to `last`.
pub fn visible(shape: &Attention, position: usize, last: usize) -> Range<usize> {
    let first = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let start = shape.chunk.map_or(0, |chunk| position - position % chunk);
    let end = if shape.ahead { last.max(position) } else { position };
    first.max(start)..end + 1
}

/// Attention of one query head over keys and values (n_keys, head_dim); a sink takes its share of the softmax. Nothing to
/// see gives zeros.
pub fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], scale: f32, sink: Option<f32>, out: &mut [f32]) {
    attend_with(keys.iter().map(|k| dot(q, k) * scale).collect(), values, sink, out);
}

/// As [`attend`], by the scores of the keys.
fn attend_with(mut scores: Vec<f32>, values: &[&[f32]], sink: Option<f32>, out: &mut [f32]) {
    scores.extend(sink);
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
fn latent_weights(
    shape: &LatentAttention,
    weights: LatentWeights,
    row: impl Fn(WeightId, usize) -> Result<Vec<f32>>,
    head: usize,
) -> Result<[Matrix; 2]> {
    let LatentAttention { nope, rank, value, .. } = *shape;
    // Those rows of the head, of a weight that has `each` a head.
    let rows = |id: WeightId, each: usize, own: Range<usize>| -> Result<Matrix> {
        own.map(|r| row(id, head * each + r)).collect()
    };
    Ok(match weights {
        LatentWeights::Joint(id) => {
            [rows(id, nope + value, 0..nope)?, rows(id, nope + value, nope..nope + value)?]
        }
        LatentWeights::Split { k, v } => {
            let transposed = rows(k, rank, 0..rank)?;
            let k = (0..nope).map(|n| transposed.iter().map(|row| row[n]).collect()).collect();
            [k, rows(v, value, 0..value)?]
        }
    })
}

impl ReferenceOp for AttentionOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let sinks = self.sinks.map(|s| own.vector(s)).transpose()?;
        let chosen = self.chosen.map(|chosen| (chosen, call.of(chosen.blocks)));
        let inputs = [self.q, self.k, self.v].map(|value| call.of(value));
        let by_distance = self.by_distance.map(|added| call.of(added));
        call.batch.check_sees()?;
        let seen = (sinks.as_deref(), chosen);
        Ok(Outcome::Rows(own.attention(self.cache.0, inputs, seen, by_distance, call.batch)))
    }
}

impl ReferenceOp for BidirectionalAttentionOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let [q, k, v] = [self.q, self.k, self.v].map(|value| call.of(value));
        let dim = self.q.width() / self.heads;
        let mut out = vec![vec![0.0; self.q.width()]; q.len()];
        for span in call.batch.spans {
            for head in 0..self.heads {
                let part = head * dim..(head + 1) * dim;
                let of = |rows: &Matrix| -> Vec<Vec<f32>> {
                    span.rows.clone().map(|row| rows[row][part.clone()].to_vec()).collect()
                };
                let (keys, values) = (of(k), of(v));
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                for row in span.rows.clone() {
                    let (q, out) = (&q[row][part.clone()], &mut out[row][part.clone()]);
                    attend(q, &keys, &values, self.scale, None, out);
                }
            }
        }
        Ok(Outcome::Rows(out))
    }
}

impl ReferenceOp for LatentAttentionOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let LatentInputs { q_nope, c, rotated, sinks, chosen } = self.inputs;
        let sinks = sinks.map(|s| own.vector(s)).transpose()?;
        let rotated = rotated.map(|rotated| rotated.map(|value| call.of(value)));
        let chosen = chosen.map(|chosen| (chosen, call.of(chosen.blocks)));
        let (inputs, place) = ([q_nope, c].map(|value| call.of(value)), (self.cache.0, self.weights));
        let spans = call.batch.spans;
        own.latent_attention(place, inputs, rotated, sinks.as_deref(), chosen, spans).map(Outcome::Rows)
    }
}

impl Interpreter {
    fn attention(
        &mut self,
        cache: usize,
        [q, k, v]: [&Matrix; 3],
        (sinks, chosen): (Option<&[f32]>, Option<(Chosen, &Matrix)>),
        by_distance: Option<&Matrix>,
        batch: &Batch<'_>,
    ) -> Matrix {
        let shape = self.graph.caches[cache];
        let (dim, value_dim) = (shape.head_dim, shape.value_dim);
        let group = shape.heads / shape.kv_heads;
        let mut out = vec![vec![0.0; shape.heads * value_dim]; q.len()];
        for span in batch.spans {
            let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
            for (i, row) in span.rows.clone().enumerate() {
                self.pages.insert(key(span.start + i), (k[row].clone(), v[row].clone()));
            }
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                if chosen.is_some_and(|(_, blocks)| blocks[row][0].is_nan()) {
                    out[row].fill(f32::NAN);
                    continue;
                }
                for head in 0..shape.heads {
                    let positions: Vec<usize> = match chosen {
                        Some((chosen, blocks)) => seen(&chosen, &blocks[row], position, head, shape.heads),
                        None => visible(&shape, position, batch.sees(span, row)).collect(),
                    };
                    let cached: Vec<_> = positions.iter().map(|p| &self.pages[&key(*p)]).collect();
                    let part = |head: usize, width: usize| head * width..(head + 1) * width;
                    let (key_at, value_at) = (part(head / group, dim), part(head / group, value_dim));
                    let keys: Vec<&[f32]> = cached.iter().map(|c| &c.0[key_at.clone()]).collect();
                    let values: Vec<&[f32]> = cached.iter().map(|c| &c.1[value_at.clone()]).collect();
                    let sink = sinks.map(|s| s[head]);
                    let out = &mut out[row][part(head, value_dim)];
                    let added = |p: &usize| {
                        let all = by_distance.map(|added| &added[row]);
                        let extent = all.map_or(0, |all| all.len() / shape.heads);
                        let own = all.map(|all| &all[part(head, extent)]);
                        own.and_then(|own| own.get(position.checked_sub(*p)?)).copied().unwrap_or(0.0)
                    };
                    let query = &q[row][part(head, dim)];
                    let score = |(key, p): (&&[f32], &usize)| dot(query, key) * shape.scale + added(p);
                    attend_with(keys.iter().zip(&positions).map(score).collect(), &values, sink, out);
                }
            }
        }
        out
    }

    /// Every head's keys and values are made from the latents, as the paper defines them.
    fn latent_attention(
        &mut self,
        (cache, weights): (usize, LatentWeights),
        [q_nope, c]: [&Matrix; 2],
        rotated: Option<[&Matrix; 2]>,
        sinks: Option<&[f32]>,
        chosen: Option<(Chosen, &Matrix)>,
        spans: &[Span<'_>],
    ) -> Result<Matrix> {
        let none = vec![vec![]; c.len()];
        let [q_rope, k_rope] = rotated.unwrap_or([&none; 2]);
        let shape = self.graph.latent_caches[cache];
        let LatentAttention { heads, nope, rope, value, scale, .. } = shape;
        let mut out = vec![vec![0.0; heads * value]; c.len()];
        for span in spans {
            let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
            for (i, row) in span.rows.clone().enumerate() {
                self.latents.insert(key(span.start + i), (c[row].clone(), k_rope[row].clone()));
            }
        }
        for head in 0..heads {
            let row = |id: WeightId, row: usize| {
                let view = self.weights[id.0].view();
                let mut values = vec![0.0; view.cols()];
                dequantize_row(view, row, &mut values).map(|()| values)
            };
            let [w_k, w_v] = latent_weights(&shape, weights, row, head)?;
            for span in spans {
                let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
                let cached = (0..span.start + span.rows.len()).map(|p| &self.latents[&key(p)]);
                let (c, k_rope): (Vec<&[f32]>, Vec<&[f32]>) =
                    cached.map(|(c, k_rope)| (c.as_slice(), k_rope.as_slice())).unzip();
                let times = |w: &Matrix| {
                    let mut all = vec![vec![]; c.len()];
                    for row in w {
                        dots(row, &c, |of, value| all[of].push(value));
                    }
                    all
                };
                let (mut keys, values) = (times(&w_k), times(&w_v));
                keys.iter_mut().zip(k_rope).for_each(|(key, k_rope)| key.extend(k_rope));
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                for (i, row) in span.rows.clone().enumerate() {
                    let position = span.start + i;
                    if chosen.is_some_and(|(_, blocks)| blocks[row][0].is_nan()) {
                        out[row].fill(f32::NAN);
                        continue;
                    }
                    let positions = match chosen {
                        Some((chosen, blocks)) => seen(&chosen, &blocks[row], position, head, heads),
                        None => (0..position + 1).collect(),
                    };
                    let [keys, values] =
                        [&keys, &values].map(|all| positions.iter().map(|p| all[*p]).collect::<Vec<_>>());
                    let q_nope = &q_nope[row][head * nope..(head + 1) * nope];
                    let query = [q_nope, &q_rope[row][head * rope..(head + 1) * rope]].concat();
                    let out = &mut out[row][head * value..(head + 1) * value];
                    attend(&query, &keys, &values, scale, sinks.map(|sinks| sinks[head]), out);
                }
            }
        }
        Ok(out)
    }
}
