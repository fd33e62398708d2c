//! Norms of rows and of parts of rows.

use super::builder::check;
use super::{GraphBuilder, Op, Value, WeightId};
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

impl GraphBuilder {
    /// Root-mean-square norm of each of `groups` equal parts of a row.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit a part.
    pub fn rms_norm(&mut self, x: Value, weight: WeightId, groups: usize, eps: f32) -> Result<Value> {
        check("rms_norm", "width left over by groups", 0, x.width % groups.max(1))?;
        if self.matrix(weight).cols != x.width {
            self.vector("rms_norm", "length of the weight", weight, x.width / groups.max(1))?;
        }
        self.vector("rms_norm", "length of the weight", weight, self.matrix(weight).cols)?;
        Ok(self.push(Op::RmsNorm(RmsNormOp { x, weight: Some(weight), groups, eps }), x.width))
    }

    /// Root-mean-square norm of each of `groups` equal parts of a row, without a weight.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn unit_norm(&mut self, x: Value, groups: usize, eps: f32) -> Result<Value> {
        check("rms_norm", "width left over by groups", 0, x.width % groups.max(1))?;
        Ok(self.push(Op::RmsNorm(RmsNormOp { x, weight: None, groups, eps }), x.width))
    }

    /// (x − mean(x)) / √(variance(x) + eps) ⊙ weight + bias of each row.
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit; [`Error::Unsupported`] if they are not f32.
    pub fn layer_norm(&mut self, x: Value, weight: WeightId, bias: WeightId, eps: f32) -> Result<Value> {
        self.vector("layer_norm", "length of the weight", weight, x.width)?;
        self.vector("layer_norm", "length of the bias", bias, x.width)?;
        Ok(self.push(Op::LayerNorm(LayerNormOp { x, weight, bias, eps }), x.width))
    }
}
