//! Products with weights.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, LowRank, MatrixSpec, Precision, Value, WeightId};
use crate::{Error, Result};

/// x · weightᵀ + bias, with what the row's adapter adds, softly capped if it says so.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearOp {
    /// (rows, in).
    pub x: Value,
    /// (out, in).
    pub weight: WeightId,
    /// (out), f32.
    pub bias: Option<WeightId>,
    /// How x enters.
    pub precision: Precision,
    /// Outputs y become cap · tanh(y / cap); positive.
    pub cap: Option<f32>,
    /// What adapters add, at most one entry each.
    pub low_rank: Vec<LowRank>,
}

refers!(LinearOp { x, weight, bias, precision, cap, low_rank });

impl Operation for LinearOp {
    const NAME: &'static str = "linear";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let MatrixSpec { rows, cols, .. } = graph.matrix(self.weight);
        check(Self::NAME, "columns of the weight", self.x.width, cols)?;
        if let Some(bias) = self.bias {
            graph.vector(Self::NAME, "length of the bias", bias, rows)?;
        }
        // Also if it is not a number.
        if self.cap.is_some_and(|cap| cap.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater)) {
            return Err(Error::Shape { op: Self::NAME, what: "cap above", expected: 0, got: 0 });
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
    /// How x enters.
    pub precision: Precision,
}

refers!(GroupedLinearOp { x, weight, groups, precision });

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
    /// [`Error::Shape`] if weight or bias do not fit x; [`Error::Unsupported`] if the bias is not f32.
    pub fn linear(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
    ) -> Result<Value> {
        self.record(LinearOp { x, weight, bias, precision, cap: None, low_rank: vec![] })
    }

    /// As [`GraphBuilder::linear`], whose outputs y become cap · tanh(y / cap) (Gemma).
    ///
    /// # Errors
    /// As [`GraphBuilder::linear`], and if the cap is not positive.
    pub fn capped_linear(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
        cap: f32,
    ) -> Result<Value> {
        self.record(LinearOp { x, weight, bias, precision, cap: Some(cap), low_rank: vec![] })
    }

    /// Each of `groups` equal parts of a row through a linear layer of its own, which are the equal parts of the weight's
    /// rows, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit the parts.
    pub fn grouped_linear(
        &mut self,
        x: Value,
        weight: WeightId,
        groups: usize,
        precision: Precision,
    ) -> Result<Value> {
        self.record(GroupedLinearOp { x, weight, groups, precision })
    }
}
