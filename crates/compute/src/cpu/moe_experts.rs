//! Routed experts of a batch: for each token Σ weight · down(silu(gate·x) ⊙ up·x), with other activations and
//! biases, or without a gate, where the model has them.
//!
//! Work is expert-major: each expert runs once, over all tokens that chose it, as soon as it is handed over. Every
//! (token, expert) pair has its own output row, and rows are summed in the router's order at the end, so neither
//! the order in which experts arrive nor what else is in the batch can change a bit.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::activations::{Activations, BLOCK, Q8Rows};
use super::linear::{CpuContext, TASKS, row_tasks};
use super::matmul::{NextJob, OutRows, ROW_TILE, Tokens, accepts_q8, matmul_rows_before};
use super::route::Choice;
use super::shared::SharedMut;
use super::simd::Simd;
use super::vector;
use crate::backend::{ActivationMode, ExpertSource, ExpertView};
use crate::graph::{Activation, ExpertSet, ExpertSetId, Weighted};
use crate::{Result, TensorView};

/// Memory that layers share.
#[derive(Debug, Default)]
pub(crate) struct MoeScratch {
    /// Pairs of (row of the batch) in order of expert id, then row.
    rows: Vec<u32>,
    /// (rows, top_k): which pair a row's j-th choice is.
    pair_of: Vec<u32>,
    /// Pairs of each distinct expert.
    pairs_of: Vec<Range<usize>>,
    /// Factors on what experts take, of each pair; empty without.
    input_weights: Vec<f32>,
    /// (pairs, moe_intermediate_size).
    gate: Vec<f32>,
    /// (pairs, moe_intermediate_size).
    up: Vec<f32>,
    /// The product, quantised, for a down projection that takes it so.
    product: Q8Rows,
    /// (pairs, hidden_size).
    down: Vec<f32>,
    /// Time spent on gate and up projections, and on down projections.
    spent: [Duration; 2],
}

/// What experts compute besides their products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertBody<'a> {
    /// Between gate, up and down.
    pub(crate) activation: Activation,
    /// Of gate, up and down: (experts, rows).
    pub(crate) biases: Option<[&'a [f32]; 3]>,
    /// Where the router's weights enter.
    pub(crate) weighted: Weighted,
}

impl ExpertBody<'_> {
    /// Adds the bias of `expert` of projection `which`, from row `row` of `of` rows on, to `values`.
    fn add_bias(&self, which: usize, (expert, of, row): (u32, usize, usize), values: &mut [f32]) {
        if let Some(biases) = self.biases {
            let start = expert as usize * of + row;
            values.iter_mut().zip(&biases[which][start..]).for_each(|(v, b)| *v += b);
        }
    }

    /// The product of gate and up, in place of gate.
    fn activate(&self, simd: Simd, gate: &mut [f32], up: &[f32]) {
        match self.activation {
            Activation::SwiGlu => vector::silu_mul(simd, gate, up),
            Activation::LimitedSwiGlu { limit } => limited_silu_mul(simd, gate, up, limit),
            Activation::ClampedSwiGlu { alpha, limit } => {
                clamped_silu_mul(simd, gate, up, alpha, limit);
            }
            Activation::CappedSwiGlu { limit } => capped_silu_mul(simd, gate, up, limit),
            Activation::SquaredRelu => squared_relu(up, gate),
        }
    }
}

/// min(silu(gate), limit) ⊙ up, with up limited to ±limit, in place of gate.
pub(crate) fn capped_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], limit: f32) {
    vector::silu(simd, gate);
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit));
}

/// relu(x)².
pub(crate) fn squared_relu(x: &[f32], out: &mut [f32]) {
    // `max` would drop a NaN.
    out.iter_mut().zip(x).for_each(|(o, x)| *o = if *x < 0.0 { 0.0 } else { x * x });
}

/// silu(min(gate, limit)) ⊙ up, with up limited to ±limit, in place of gate.
pub(crate) fn limited_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], limit: f32) {
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    vector::silu(simd, gate);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit));
}

/// (up + 1) · gate · sigmoid(alpha · gate), with gate up to limit and up within ±limit, in place of gate.
pub(crate) fn clamped_silu_mul(simd: Simd, gate: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
    // Comparisons keep a NaN, `min` would drop it.
    gate.iter_mut().filter(|g| **g > limit).for_each(|g| *g = limit);
    let logits: Vec<f32> = gate.iter().map(|g| alpha * g).collect();
    vector::sigmoid_mul(simd, &logits, gate);
    gate.iter_mut().zip(up).for_each(|(g, u)| *g *= u.clamp(-limit, limit) + 1.0);
}

/// Bytes of scratch that a batch of `rows` rows with `top_k` choices each needs.
///
/// `terms` are those of int8 activations.
pub(crate) fn scratch_bytes(set: &ExpertSet, top_k: usize, rows: usize, terms: usize) -> usize {
    let pair = (2 * set.width() + set.down.rows) * size_of::<f32>() + set.width() * 2 * terms;
    rows.saturating_mul(top_k * pair)
}

/// Grows `buffer` to `len` without clearing what will be overwritten.
fn grow(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl MoeScratch {
    /// For int8 activations that have a second term, if so.
    pub(crate) fn new(second_term: bool) -> Self {
        Self { product: Q8Rows::with_second_term(second_term), ..Self::default() }
    }

    /// Time spent on gate and up projections and on down projections since the last call.
    pub(crate) fn take_spent(&mut self) -> [Duration; 2] {
        std::mem::take(&mut self.spent)
    }

    /// Sorts the batch's choices by expert.
    fn sort(&mut self, choice: &Choice, top_k: usize, ids: &[u32]) {
        let mut count = vec![0usize; ids.len()];
        let index = |id: &u32| ids.binary_search(id).expect("ids are the distinct choices");
        choice.ids.iter().for_each(|id| count[index(id)] += 1);
        self.pairs_of.clear();
        let mut start = 0;
        for n in &mut count {
            self.pairs_of.push(start..start + *n);
            start += *n;
            *n = start - *n;
        }
        self.rows.resize(choice.ids.len(), 0);
        self.pair_of.resize(choice.ids.len(), 0);
        for (at, id) in choice.ids.iter().enumerate() {
            let pair = &mut count[index(id)];
            self.rows[*pair] = (at / top_k) as u32;
            self.pair_of[at] = *pair as u32;
            *pair += 1;
        }
    }
}

impl MoeScratch {
    /// Keeps the factors on what experts take.
    fn weigh_inputs(&mut self, choice: &Choice, weighted: Weighted) {
        self.input_weights.clear();
        if weighted == Weighted::Input {
            self.input_weights.resize(choice.ids.len(), 0.0);
            for (pair, weight) in self.pair_of.iter().zip(&choice.weights) {
                self.input_weights[*pair as usize] = *weight;
            }
        }
    }
}

/// Runs the layer's experts on x (rows, hidden_size) into `out`, the same shape.
pub(crate) fn moe_experts(
    context: &CpuContext,
    scratch: &mut MoeScratch,
    (set_id, set, body): (ExpertSetId, &ExpertSet, ExpertBody<'_>),
    (x, x_q8): (&[f32], &Q8Rows),
    choice: &Choice,
    source: &mut dyn ExpertSource,
    out: &mut [f32],
) -> Result<()> {
    let (hidden, inner) = (set.down.rows, set.width());
    let rows = out.len() / hidden;
    let top_k = choice.ids.len() / rows;
    let ids = choice.distinct();
    scratch.sort(choice, top_k, &ids);
    scratch.weigh_inputs(choice, body.weighted);
    let pairs = rows * top_k;
    let int8 = context.activations == ActivationMode::Int8;
    let int8_down = int8 && accepts_q8(set.down.dtype, inner);
    if int8_down {
        scratch.product.resize(pairs, inner);
    }
    let MoeScratch { rows: pair_rows, pair_of, pairs_of, input_weights, gate, up, product, down, spent } =
        scratch;
    let gate = SharedMut::new(grow(gate, pairs * inner));
    let up = SharedMut::new(grow(up, pairs * inner));
    let down = SharedMut::new(grow(down, pairs * hidden));

    source.visit(set_id, &ids, &mut |group: &[ExpertView<'_>]| {
        let pairs_of = |view: &ExpertView<'_>| {
            pairs_of[ids.binary_search(&view.id).expect("only experts asked for are handed over")].clone()
        };
        let project = |weight: TensorView<'_>,
                       task: Range<usize>,
                       pairs: Range<usize>,
                       to: &SharedMut<'_, f32>,
                       next: Option<NextJob<'_>>| {
            let input = if int8 && accepts_q8(weight.dtype(), hidden) {
                Activations::Q8(x_q8)
            } else {
                Activations::F32 { rows: x, cols: hidden }
            };
            // SAFETY: a task writes only its rows of its expert's pairs.
            let start = unsafe { to.as_ptr().add(pairs.start * inner) };
            // SAFETY: as above.
            let out = unsafe { OutRows::new(start, inner, pairs.len(), inner) };
            let tokens = Tokens::List(&pair_rows[pairs]);
            matmul_rows_before(context.simd, weight, task, input, tokens, out, next)
                .expect("the graph's widths agree");
        };
        // Rows of gate and up in blocks of whole activation blocks, so that a task can quantise what it computed.
        let start = Instant::now();
        let tasks = row_tasks(group.iter().map(|_| inner), TASKS * context.threads(), BLOCK.max(ROW_TILE));
        let quantized = product.writer();
        context.pool.run_in_order(tasks.len(), &|task, next| {
            let (index, rows) = &tasks[task];
            let (view, pairs) = (&group[*index], pairs_of(&group[*index]));
            if let Some(weight) = view.gate {
                project(weight, rows.clone(), pairs.clone(), &gate, Some((view.up, rows.start)));
            }
            let next = next.map(|next| {
                let (index, rows) = &tasks[next];
                (group[*index].gate.unwrap_or(group[*index].up), rows.start)
            });
            project(view.up, rows.clone(), pairs.clone(), &up, next);
            for pair in pairs {
                let at = pair * inner + rows.start..pair * inner + rows.end;
                // SAFETY: as above.
                let (gate, up) = unsafe { (gate.part(at.clone()), up.part(at)) };
                // Products are linear, so their input's factor may follow them.
                if let Some(weight) = input_weights.get(pair) {
                    vector::scale(context.simd, *weight, gate);
                    vector::scale(context.simd, *weight, up);
                }
                body.add_bias(0, (view.id, inner, rows.start), gate);
                body.add_bias(1, (view.id, inner, rows.start), up);
                body.activate(context.simd, gate, up);
                if int8_down {
                    // SAFETY: as above; tasks are cut at multiples of the quantisation block.
                    unsafe { quantized.write(context.simd, pair, rows.start, gate) };
                }
            }
        });
        spent[0] += start.elapsed();
        let start = Instant::now();
        let tasks = row_tasks(group.iter().map(|_| hidden), TASKS * context.threads(), ROW_TILE);
        context.pool.run_in_order(tasks.len(), &|task, next| {
            let (index, rows) = &tasks[task];
            let (view, pairs) = (&group[*index], pairs_of(&group[*index]));
            let next = next.map(|next| (group[tasks[next].0].down, tasks[next].1.start));
            let input = if int8_down {
                Activations::Q8(&*product)
            } else {
                // SAFETY: nothing writes the products while this region runs.
                Activations::F32 { rows: unsafe { gate.part(0..pair_rows.len() * inner) }, cols: inner }
            };
            // SAFETY: a task writes only its rows of its expert's pairs.
            let out =
                unsafe { OutRows::new(down.as_ptr().add(pairs.start * hidden), hidden, pairs.len(), hidden) };
            let tokens = Tokens::Range(pairs.clone());
            let product = matmul_rows_before(context.simd, view.down, rows.clone(), input, tokens, out, next);
            product.expect("the graph's widths agree");
            for pair in pairs {
                let at = pair * hidden + rows.start..pair * hidden + rows.end;
                // SAFETY: as above.
                body.add_bias(2, (view.id, hidden, rows.start), unsafe { down.part(at) });
            }
        });
        spent[1] += start.elapsed();
    })?;

    let shared = SharedMut::new(out);
    context.for_rows(rows, hidden, &|row| {
        // SAFETY: each row is one task's, and no expert writes outputs any more.
        let (sum, down) =
            unsafe { (shared.part(row * hidden..(row + 1) * hidden), down.part(0..pairs * hidden)) };
        sum.fill(0.0);
        let chosen = row * top_k..(row + 1) * top_k;
        for (pair, weight) in pair_of[chosen.clone()].iter().zip(&choice.weights[chosen]) {
            let pair = *pair as usize;
            let weight = if body.weighted == Weighted::Input { &1.0 } else { weight };
            vector::axpy_f32(context.simd, *weight, &down[pair * hidden..(pair + 1) * hidden], sum);
        }
    });
    Ok(())
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
