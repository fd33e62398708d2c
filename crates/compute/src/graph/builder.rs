//! Recording: weights, and the operations on rows that every model has.

use super::operation::Operation;
use super::{
    Attention, CompressedAttention, ExpertSet, Graph, LatentAttention, MatrixSpec, Node, Op, Output, Rope,
    Value, WeightId, WeightSpec,
};
use crate::{DType, Error, Result};

/// Records a [`Graph`]; every method checks widths and returns the value it adds. After an error the recording is of no use.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    pub(super) nodes: Vec<Node>,
    pub(super) weights: Vec<WeightSpec>,
    pub(super) ropes: Vec<Rope>,
    pub(super) caches: Vec<Attention>,
    pub(super) states: Vec<usize>,
    pub(super) latent_caches: Vec<LatentAttention>,
    pub(super) compressed_caches: Vec<CompressedAttention>,
    pub(super) expert_sets: Vec<ExpertSet>,
    pub(super) values: usize,
    pub(super) routings: usize,
    pub(super) scope: String,
}

pub(super) fn check(op: &'static str, what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Shape { op, what, expected, got }) }
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names the part of the model that the following nodes belong to.
    pub fn scope(&mut self, name: impl Into<String>) {
        self.scope = name.into();
    }

    /// The part of the model that was named last.
    pub fn scoped(&self) -> &str {
        &self.scope
    }

    /// Declares a resident weight.
    pub fn weight(&mut self, name: impl Into<String>, matrix: MatrixSpec) -> WeightId {
        self.weights.push(WeightSpec { name: name.into(), matrix });
        WeightId(self.weights.len() - 1)
    }

    /// Encoding and shape of a declared weight.
    pub fn matrix(&self, id: WeightId) -> MatrixSpec {
        self.weights[id.0].matrix
    }

    /// Adds an operation whose inputs fit by its shape rule.
    pub(super) fn record(&mut self, op: impl Operation + Into<Op>) -> Result<Value> {
        let width = op.width(self)?;
        Ok(self.push(op, width))
    }

    /// Adds an operation with a result of `width` columns.
    pub(super) fn push(&mut self, op: impl Into<Op>, width: usize) -> Value {
        let out = Value { index: self.values, width };
        self.values += 1;
        self.nodes.push(Node { name: self.scope.clone(), op: op.into(), out: Output::Value(out) });
        out
    }

    /// Checks that a weight is f32 of `len` elements.
    pub(super) fn vector(
        &self,
        op: &'static str,
        what: &'static str,
        id: WeightId,
        len: usize,
    ) -> Result<()> {
        let weight = self.matrix(id);
        if weight.dtype != DType::F32 {
            return Err(Error::Unsupported { what: op, dtype: weight.dtype });
        }
        check(op, what, len, weight.rows.saturating_mul(weight.cols))
    }

    /// Ends the recording with `logits` (outputs, vocab_size) as the result.
    pub fn finish(self, logits: Value) -> Graph {
        Graph {
            nodes: self.nodes,
            weights: self.weights,
            ropes: self.ropes,
            caches: self.caches,
            states: self.states,
            latent_caches: self.latent_caches,
            compressed_caches: self.compressed_caches,
            expert_sets: self.expert_sets,
            values: self.values,
            routings: self.routings,
            logits,
        }
    }
}
