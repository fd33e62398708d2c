//! The scalar meaning of products with weights.

use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp};
use crate::graph::{GroupedLinearOp, LinearOp};
use crate::quant::dequantize_row;
use crate::{Result, Tensor, TensorView};

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

impl ReferenceOp for LinearOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let weight = own.weights[self.weight.0].view();
        let bias = self.bias.map(|b| own.vector(b)).transpose()?;
        let adapters = call.batch.adapters(call.of(self.x).len());
        let row = |(row, x): (usize, &Vec<f32>)| {
            let adapter = adapters.as_ref().and_then(|of_rows| of_rows[row]);
            let adapted = own.adapted(weight, &self.low_rank, adapter)?;
            let weight = adapted.as_ref().map_or(weight, Tensor::view);
            let mut out = vec![0.0; weight.rows()];
            linear(weight, x, &mut out)?;
            out.iter_mut().zip(bias.iter().flatten()).for_each(|(o, b)| *o += b);
            if let Some(cap) = self.cap.map(f64::from) {
                out.iter_mut().for_each(|o| *o = (cap * (f64::from(*o) / cap).tanh()) as f32);
            }
            Ok(out)
        };
        call.of(self.x).iter().enumerate().map(row).collect::<Result<_>>().map(Outcome::Rows)
    }
}

impl ReferenceOp for GroupedLinearOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let view = own.weights[self.weight.0].view();
        let each = view.rows() / self.groups;
        let row = |x: &Vec<f32>| {
            let mut out = vec![0.0; view.rows()];
            let parts = x.chunks(view.cols()).zip(out.chunks_mut(each));
            for (group, (x, out)) in parts.enumerate() {
                linear(view.rows_range(group * each..(group + 1) * each), x, out)?;
            }
            Ok(out)
        };
        call.of(self.x).iter().map(row).collect::<Result<_>>().map(Outcome::Rows)
    }
}
