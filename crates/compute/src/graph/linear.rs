//! Products with weights.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, MatrixSpec, Precision, Value, WeightId};
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

refers!(LinearOp { x, weight, bias, precision });

impl Operation for LinearOp {
    const NAME: &'static str = "linear";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let MatrixSpec { rows, cols, .. } = graph.matrix(self.weight);
        check(Self::NAME, "columns of the weight", self.x.width, cols)?;
        if let Some(bias) = self.bias {
            graph.vector(Self::NAME, "length of the bias", bias, rows)?;
        }
        Ok(rows)
    }
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

refers!(GroupedLinearOp { x, weight, groups });

impl Operation for GroupedLinearOp {
    const NAME: &'static str = "grouped_linear";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, groups) = (Self::NAME, self.groups);
        let MatrixSpec { rows, cols, .. } = graph.matrix(self.weight);
        check(op, "columns of the weight, of all groups", self.x.width, cols.saturating_mul(groups))?;
        check(op, "rows left over by groups", 0, rows % groups.max(1))?;
        Ok(rows)
    }
}

impl GraphBuilder {
    /// x · weightᵀ (+ bias).
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if weight or bias do not fit x; [`Error::Unsupported`](crate::Error::Unsupported) if the bias is not f32.
    pub fn linear(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
    ) -> Result<Value> {
        self.record(LinearOp { x, weight, bias, precision })
    }

    /// Each of `groups` equal parts of a row through a linear layer of its own, which are the equal parts of the weight's
    /// rows, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the weight does not fit the parts.
    pub fn grouped_linear(&mut self, x: Value, weight: WeightId, groups: usize) -> Result<Value> {
        self.record(GroupedLinearOp { x, weight, groups })
    }
}
