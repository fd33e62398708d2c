//! The scalar meaning of adapters: weights with what they add, W + scale · B A.

use super::Interpreter;
use crate::graph::{ExpertLowRank, LowRank};
use crate::quant::dequantize;
use crate::{Result, Tensor, TensorView};

/// `weight` + scale · b · a, as f32.
fn merged(weight: TensorView<'_>, a: TensorView<'_>, b: TensorView<'_>, scale: f32) -> Result<Tensor> {
    let (rows, cols, rank) = (weight.rows(), weight.cols(), b.cols());
    let mut values = dequantize(weight)?;
    let (a, b) = (dequantize(a)?, dequantize(b)?);
    for (at, value) in values.iter_mut().enumerate() {
        let (row, col) = (at / cols, at % cols);
        let sum: f64 = (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * cols + col])).sum();
        *value += (f64::from(scale) * sum) as f32;
    }
    Tensor::from_f32(rows, cols, &values)
}

impl Interpreter {
    /// `weight` with what `adapter` adds, if it does.
    pub(super) fn adapted(
        &self,
        weight: TensorView<'_>,
        low_rank: &[LowRank],
        adapter: Option<u32>,
    ) -> Result<Option<Tensor>> {
        let own = low_rank.iter().find(|own| Some(own.adapter) == adapter);
        let merge = |own: &LowRank| {
            merged(weight, self.weights[own.a.0].view(), self.weights[own.b.0].view(), own.scale)
        };
        own.map(merge).transpose()
    }

    /// Projection `which` of `expert` with what `adapter` adds, if it does.
    pub(super) fn adapted_expert(
        &self,
        (weight, which, expert): (TensorView<'_>, usize, u32),
        low_rank: &[ExpertLowRank],
        adapter: Option<u32>,
    ) -> Result<Option<Tensor>> {
        let own = low_rank.iter().find(|own| Some(own.adapter) == adapter);
        let Some(own) = own.and_then(|own| own.projections[which].as_ref()) else { return Ok(None) };
        let (a, b, expert) = (self.weights[own.a.0].view(), self.weights[own.b.0].view(), expert as usize);
        let (rank, rows) = (b.cols(), weight.rows());
        let a = a.rows_range(expert * rank..(expert + 1) * rank);
        let b = b.rows_range(expert * rows..(expert + 1) * rows);
        merged(weight, a, b, own.scales[expert]).map(Some)
    }
}
