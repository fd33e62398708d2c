//! Recording: weights, and the operations on rows that every model has.

use super::{
    Attention, CompressedAttention, ExpertSet, Graph, LatentAttention, MatrixSpec, Node, Op, Output,
    Precision, Rope, Value, WeightId, WeightSpec,
};
use crate::{DType, Error, Result};

/// Records a [`Graph`]; every method checks widths and returns the value it adds.
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

    pub(super) fn push(&mut self, op: Op, width: usize) -> Value {
        let out = Value { index: self.values, width };
        self.values += 1;
        self.nodes.push(Node { name: self.scope.clone(), op, out: Output::Value(out) });
        out
    }

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

    /// Token embeddings: (tokens, hidden_size).
    pub fn embed(&mut self, table: WeightId) -> Value {
        let width = self.matrix(table).cols;
        self.push(Op::Embed { table }, width)
    }

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
        Ok(self.push(Op::Linear { x, weight, bias, precision }, rows))
    }

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
        Ok(self.push(Op::RmsNorm { x, weight, groups, eps }, x.width))
    }

    /// Root-mean-square norm of each of `groups` equal parts of a row, without a weight.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn unit_norm(&mut self, x: Value, groups: usize, eps: f32) -> Result<Value> {
        check("unit_norm", "width left over by groups", 0, x.width % groups.max(1))?;
        Ok(self.push(Op::UnitNorm { x, groups, eps }, x.width))
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
        Ok(self.push(Op::GroupedLinear { x, weight, groups }, rows))
    }

    /// silu(min(gate, limit)) ⊙ up, with up limited to ±limit.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn limited_swiglu(&mut self, gate: Value, up: Value, limit: f32) -> Result<Value> {
        check("limited_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::LimitedSwiGlu { gate, up, limit: limit.abs() }, gate.width))
    }

    /// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit (gpt-oss).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn clamped_swiglu(&mut self, gate: Value, up: Value, alpha: f32, limit: f32) -> Result<Value> {
        check("clamped_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::ClampedSwiGlu { gate, up, alpha, limit: limit.abs() }, gate.width))
    }

    /// (x − mean(x)) / √(variance(x) + eps) ⊙ weight + bias of each row.
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit; [`Error::Unsupported`] if they are not f32.
    pub fn layer_norm(&mut self, x: Value, weight: WeightId, bias: WeightId, eps: f32) -> Result<Value> {
        self.vector("layer_norm", "length of the weight", weight, x.width)?;
        self.vector("layer_norm", "length of the bias", bias, x.width)?;
        Ok(self.push(Op::LayerNorm { x, weight, bias, eps }, x.width))
    }

    /// min(silu(gate), limit) ⊙ up, with up limited to ±limit.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn capped_swiglu(&mut self, gate: Value, up: Value, limit: f32) -> Result<Value> {
        check("capped_swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::CappedSwiGlu { gate, up, limit: limit.abs() }, gate.width))
    }

    /// silu(gate) ⊙ up.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        check("swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::SwiGlu { gate, up }, gate.width))
    }

    /// relu(x)².
    pub fn squared_relu(&mut self, x: Value) -> Value {
        self.push(Op::SquaredRelu { x }, x.width)
    }

    /// a + b.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        check("add", "width of b", a.width, b.width)?;
        Ok(self.push(Op::Add { a, b }, a.width))
    }

    /// x limited to ±|limit|.
    pub fn clamp(&mut self, x: Value, limit: f32) -> Value {
        let limit = limit.abs();
        self.push(Op::Clamp { x, limit }, x.width)
    }

    /// x ⊙ sigmoid(gate), with a gate for each of as many equal parts of a row as the gate has columns.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal.
    pub fn sigmoid_gate(&mut self, x: Value, gate: Value) -> Result<Value> {
        check("sigmoid_gate", "width left over by gates", 0, x.width % gate.width.max(1))?;
        Ok(self.push(Op::SigmoidGate { x, gate }, x.width))
    }

    /// Columns `start..start + len` of each of `groups` equal parts of a row, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal or shorter than that.
    pub fn slice(&mut self, x: Value, groups: usize, start: usize, len: usize) -> Result<Value> {
        check("slice", "width left over by groups", 0, x.width % groups.max(1))?;
        let (part, end) = (x.width / groups.max(1), start.saturating_add(len));
        if len == 0 || end > part {
            return Err(Error::Shape { op: "slice", what: "end of the columns", expected: part, got: end });
        }
        Ok(self.push(Op::Slice { x, groups, start, len }, groups * len))
    }

    /// Keeps the rows whose logits were asked for.
    pub fn gather_rows(&mut self, x: Value) -> Value {
        self.push(Op::GatherRows { x }, x.width)
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
