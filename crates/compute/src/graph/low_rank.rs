//! What adapters add to products with weights: low-rank updates (LoRA, Hu et al. 2021).
//!
//! An adapter leaves a weight as it is and adds scale · B(A x) to its product with x. Operations have the updates of all
//! adapters; which one a row gets, if any, its sequence says in the batch ([`crate::backend::Span::adapter`]). So sequences
//! with different adapters are rows of one batch, and what has no adapter is computed as if there were none.

use super::builder::check;
use super::{ExpertSetId, Graph, LinearOp, MatrixSpec, MoeExpertsOp, Op, WeightId, WeightSpec};
use crate::{Error, Result};

/// What an adapter adds to a linear layer: scale · b · (a · x).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LowRank {
    /// Which adapter.
    pub adapter: u32,
    /// (r, in).
    pub a: WeightId,
    /// (out, r).
    pub b: WeightId,
    /// `lora_alpha` / r, or with rank-stabilised scaling `lora_alpha` / √r.
    pub scale: f32,
}

/// What an adapter adds to a projection of every expert of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct StackedLowRank {
    /// (experts · r, in).
    pub a: WeightId,
    /// (experts · out, r).
    pub b: WeightId,
    /// Of each expert.
    pub scales: Vec<f32>,
}

/// What an adapter adds to routed experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLowRank {
    /// Which adapter.
    pub adapter: u32,
    /// To gate, up and down.
    pub projections: [Option<StackedLowRank>; 3],
}

impl Graph {
    /// Declares a resident weight of an adapter.
    pub fn adapter_weight(&mut self, name: impl Into<String>, matrix: MatrixSpec) -> WeightId {
        self.weights.push(WeightSpec { name: name.into(), matrix });
        WeightId(self.weights.len() - 1)
    }

    /// The graph without adapters, which has the first `weights` weights.
    pub fn without_adapters(&self, weights: usize) -> Self {
        let mut graph = self.clone();
        graph.weights.truncate(weights);
        for node in &mut graph.nodes {
            match &mut node.op {
                Op::Linear(op) => op.low_rank.clear(),
                Op::MoeExperts(op) => op.low_rank.clear(),
                _ => {}
            }
        }
        graph
    }

    /// Adds an adapter to the linear layer of node `node`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the node is no linear layer or the update does not fit it.
    pub fn adapt_linear(&mut self, node: usize, low_rank: LowRank) -> Result<()> {
        let op = "adapter of linear";
        let (a, b) = (self.weights[low_rank.a.0].matrix, self.weights[low_rank.b.0].matrix);
        let Some(Op::Linear(LinearOp { weight, low_rank: all, .. })) =
            self.nodes.get_mut(node).map(|node| &mut node.op)
        else {
            return Err(Error::Shape { op, what: "linear layers", expected: 1, got: 0 });
        };
        let matrix = self.weights[weight.0].matrix;
        check(op, "columns of A", matrix.cols, a.cols)?;
        check(op, "rows of B", matrix.rows, b.rows)?;
        check(op, "columns of B, the rank of A", a.rows, b.cols)?;
        all.push(low_rank);
        Ok(())
    }

    /// Adds an adapter to what computes the experts `set`.
    ///
    /// # Errors
    /// [`Error::Shape`] if nothing does, or the update does not fit them.
    pub fn adapt_experts(&mut self, set: ExpertSetId, low_rank: ExpertLowRank) -> Result<()> {
        let (op, shape) = ("adapter of experts", self.expert_sets[set.0]);
        let matrices = [shape.gate, Some(shape.up), Some(shape.down)];
        for (projection, matrix) in low_rank.projections.iter().zip(matrices) {
            let Some(StackedLowRank { a, b, scales }) = projection else { continue };
            let (a, b) = (self.weights[a.0].matrix, self.weights[b.0].matrix);
            let Some(matrix) = matrix else {
                return Err(Error::Shape { op, what: "projections", expected: 2, got: 3 });
            };
            check(op, "columns of A", matrix.cols, a.cols)?;
            check(op, "rows of B", shape.experts * matrix.rows, b.rows)?;
            check(op, "rows of A", shape.experts * b.cols, a.rows)?;
            check(op, "scales", shape.experts, scales.len())?;
        }
        let node = self.nodes.iter_mut().find_map(|node| match &mut node.op {
            Op::MoeExperts(op) if op.experts == set => Some(op),
            _ => None,
        });
        let Some(MoeExpertsOp { low_rank: all, .. }) = node else {
            return Err(Error::Shape { op, what: "operations with these experts", expected: 1, got: 0 });
        };
        all.push(low_rank);
        Ok(())
    }
}
