//! Norms of rows and of parts of rows.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, Value, WeightId};
use crate::Result;

/// Root-mean-square norm (Zhang & Sennrich 2019) of each of `groups` equal parts of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormOp {
    /// (rows, width).
    pub x: Value,
    /// (width / groups) for all parts, or (width), f32; all ones when absent.
    pub weight: Option<WeightId>,
    /// Parts that are normalised on their own: 1 for a whole row, the head count for per-head norms.
    pub groups: usize,
    /// Added to the mean square.
    pub eps: f32,
}

refers!(RmsNormOp { x, weight, groups, eps });

impl Operation for RmsNormOp {
    const NAME: &'static str = "rms_norm";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, x, groups) = (Self::NAME, self.x, self.groups.max(1));
        check(op, "width left over by groups", 0, x.width % groups)?;
        if let Some(weight) = self.weight {
            let own = graph.matrix(weight).cols;
            let len = if own == x.width { own } else { x.width / groups };
            graph.vector(op, "length of the weight", weight, len)?;
        }
        Ok(x.width)
    }

    fn label(&self) -> &'static str {
        if self.groups == 1 { Self::NAME } else { "rms_norm of heads" }
    }
}

/// (x − mean(x)) / √(variance(x) + eps) ⊙ weight + bias (Ba et al. 2016).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerNormOp {
    /// (rows, width).
    pub x: Value,
    /// (width), f32.
    pub weight: WeightId,
    /// (width), f32.
    pub bias: WeightId,
    /// Added to the variance.
    pub eps: f32,
}

refers!(LayerNormOp { x, weight, bias, eps });

impl Operation for LayerNormOp {
    const NAME: &'static str = "layer_norm";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        graph.vector(Self::NAME, "length of the weight", self.weight, self.x.width)?;
        graph.vector(Self::NAME, "length of the bias", self.bias, self.x.width)?;
        Ok(self.x.width)
    }
}

impl GraphBuilder {
    /// Root-mean-square norm of each of `groups` equal parts of a row.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the weight does not fit a part.
    pub fn rms_norm(&mut self, x: Value, weight: WeightId, groups: usize, eps: f32) -> Result<Value> {
        self.record(RmsNormOp { x, weight: Some(weight), groups, eps })
    }

    /// Root-mean-square norm of each of `groups` equal parts of a row, without a weight.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if parts are not equal.
    pub fn unit_norm(&mut self, x: Value, groups: usize, eps: f32) -> Result<Value> {
        self.record(RmsNormOp { x, weight: None, groups, eps })
    }

    /// (x − mean(x)) / √(variance(x) + eps) ⊙ weight + bias of each row.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if weight or bias do not fit; [`Error::Unsupported`](crate::Error::Unsupported) if they are not f32.
    pub fn layer_norm(&mut self, x: Value, weight: WeightId, bias: WeightId, eps: f32) -> Result<Value> {
        self.record(LayerNormOp { x, weight, bias, eps })
    }
}
