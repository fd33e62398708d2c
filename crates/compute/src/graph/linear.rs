//! Products with weights.

use super::builder::check;
use super::{GraphBuilder, MatrixSpec, Op, Precision, Value, WeightId};
use crate::Result;

/// x · weightᵀ + bias.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearOp {
    /// (rows, in).
    pub x: Value,
    /// (out, in).
    pub weight: WeightId,
    /// (out), f32.
    pub bias: Option<WeightId>,
    /// How x enters.
    pub precision: Precision,
}

/// Part g of a row through rows g of the weight, for each of `groups` equal parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedLinearOp {
    /// (rows, groups · in).
    pub x: Value,
    /// (groups · out, in).
    pub weight: WeightId,
    /// Parts.
    pub groups: usize,
}

impl GraphBuilder {
    /// x · weightᵀ (+ bias).
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit x; [`Error::Unsupported`] if the bias is not f32.
    pub fn linear(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
    ) -> Result<Value> {
        let MatrixSpec { rows, cols, .. } = self.matrix(weight);
        check("linear", "columns of the weight", x.width, cols)?;
        if let Some(bias) = bias {
            self.vector("linear", "length of the bias", bias, rows)?;
        }
        Ok(self.push(Op::Linear(LinearOp { x, weight, bias, precision }), rows))
    }

    /// Each of `groups` equal parts of a row through a linear layer of its own, which are the equal parts of the weight's
    /// rows, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit the parts.
    pub fn grouped_linear(&mut self, x: Value, weight: WeightId, groups: usize) -> Result<Value> {
        let (op, MatrixSpec { rows, cols, .. }) = ("grouped_linear", self.matrix(weight));
        check(op, "columns of the weight, of all groups", x.width, cols.saturating_mul(groups))?;
        check(op, "rows left over by groups", 0, rows % groups.max(1))?;
        Ok(self.push(Op::GroupedLinear(GroupedLinearOp { x, weight, groups }), rows))
    }
}
