//! The scalar meaning of products with weights.

use std::collections::BTreeMap;

use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp};
use crate::graph::{GroupedLinearOp, LinearOp};
use crate::quant::dequantize_row;
use crate::{Result, Tensor, TensorView};

/// out = Σ a·b.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b) {
        sum += f64::from(*a) * f64::from(*b);
    }
    sum as f32
}

/// [`dot`] of `a` and each of `b`. Of a sum every addition waits for the one before: four sums go on beside each other.
pub(super) fn dots(a: &[f32], b: &[&[f32]], mut give: impl FnMut(usize, f32)) {
    let (fours, rest) = b.as_chunks::<4>();
    for (four, b) in fours.iter().enumerate() {
        let [b, c, d, e] = b.map(|b| &b[..a.len()]);
        let mut sums = [0.0; 4];
        for (i, a) in a.iter().enumerate() {
            let a = f64::from(*a);
            sums[0] += a * f64::from(b[i]);
            sums[1] += a * f64::from(c[i]);
            sums[2] += a * f64::from(d[i]);
            sums[3] += a * f64::from(e[i]);
        }
        sums.into_iter().enumerate().for_each(|(i, sum)| give(4 * four + i, sum as f32));
    }
    rest.iter().enumerate().for_each(|(i, b)| give(4 * fours.len() + i, dot(a, b)));
}

/// weight · x for each of `x`, rows of activations.
///
/// # Errors
/// If the weight's dtype has no dequantiser.
pub fn linear(weight: TensorView<'_>, x: &[&[f32]]) -> Result<Vec<Vec<f32>>> {
    let mut values = vec![0.0; weight.cols()];
    let mut out = vec![vec![]; x.len()];
    for row in 0..weight.rows() {
        dequantize_row(weight, row, &mut values)?;
        dots(&values, x, |of, value| out[of].push(value));
    }
    Ok(out)
}

/// Rows of activations by the adapter that their products have.
pub(super) fn by_adapter(
    rows: impl Iterator<Item = usize>,
    adapters: Option<&[Option<u32>]>,
) -> BTreeMap<Option<u32>, Vec<usize>> {
    let mut all = BTreeMap::new();
    for row in rows {
        let own: &mut Vec<usize> = all.entry(adapters.and_then(|of_rows| of_rows[row])).or_default();
        own.push(row);
    }
    all
}

impl ReferenceOp for LinearOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let weight = own.weights[self.weight.0].view();
        let bias = self.bias.map(|b| own.vector(b)).transpose()?;
        let x = call.of(self.x);
        let adapters = call.batch.adapters(x.len());
        let mut all = vec![vec![]; x.len()];
        for (adapter, rows) in by_adapter(0..x.len(), adapters.as_deref()) {
            let adapted = own.adapted(weight, &self.low_rank, adapter)?;
            let weight = adapted.as_ref().map_or(weight, Tensor::view);
            let x: Vec<&[f32]> = rows.iter().map(|row| &x[*row][..]).collect();
            for (row, mut out) in rows.into_iter().zip(linear(weight, &x)?) {
                out.iter_mut().zip(bias.iter().flatten()).for_each(|(o, b)| *o += b);
                if let Some(cap) = self.cap.map(f64::from) {
                    out.iter_mut().for_each(|o| *o = (cap * (f64::from(*o) / cap).tanh()) as f32);
                }
                all[row] = out;
            }
        }
        Ok(Outcome::Rows(all))
    }
}

impl ReferenceOp for GroupedLinearOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let view = own.weights[self.weight.0].view();
        let (each, cols) = (view.rows() / self.groups, view.cols());
        let mut all = vec![vec![]; call.of(self.x).len()];
        for group in 0..self.groups {
            let x: Vec<&[f32]> =
                call.of(self.x).iter().map(|x| &x[group * cols..(group + 1) * cols]).collect();
            let out = linear(view.rows_range(group * each..(group + 1) * each), &x)?;
            all.iter_mut().zip(out).for_each(|(all, out)| all.extend(out));
        }
        Ok(Outcome::Rows(all))
    }
}
