//! Hyper-connections: a residual stream of several parallel ones. Before a block they are collapsed into one row, after
//! it they are mixed among themselves and the block's result is added to each.
//!
//! Source: Zhu et al., *Hyper-Connections*, 2024; with doubly stochastic mixing, Xie et al., *mHC*, 2026, as transformers'
//! `modeling_deepseek_v4.py` computes it.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, Value, WeightId};
use crate::{Error, Result};

/// How many streams there are, and how their weights are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperConnection {
    /// Parallel residual streams, N.
    pub streams: usize,
    /// Added to the mean square of all streams of a row, by whose root logits are divided.
    pub norm_eps: f32,
    /// Added to weights of collapsing and mixing, and to the sums that mixing weights are divided by.
    pub floor: f32,
    /// What weights are made.
    pub kind: HyperKind,
}

/// What a hyper-connection does to its streams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HyperKind {
    /// They are collapsed, at the end of the model.
    Collapsed,
    /// The block's result is added to each; they stay apart (Hunyuan 4).
    Independent {
        /// Largest weight of adding.
        magnitude: f32,
    },
    /// They are mixed too, by doubly stochastic weights.
    Mixed {
        /// Normalisations of columns (Sinkhorn & Knopp 1967), the first one included.
        iterations: usize,
    },
}

impl HyperConnection {
    /// Weights of a row: N of collapsing, then N of adding and N · N of mixing, from stream to stream.
    pub fn weights(&self) -> usize {
        match self.kind {
            HyperKind::Collapsed => self.streams,
            HyperKind::Independent { .. } => 2 * self.streams,
            HyperKind::Mixed { .. } => self.streams * (2 + self.streams),
        }
    }

    /// Kinds of weights, each of which has a factor.
    pub fn kinds(&self) -> usize {
        match self.kind {
            HyperKind::Collapsed => 1,
            HyperKind::Independent { .. } => 2,
            HyperKind::Mixed { .. } => 3,
        }
    }
}

/// Weights of collapsing, adding to and mixing residual streams. See
/// [`hyper_weights`](super::GraphBuilder::hyper_weights).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperWeightsOp {
    /// (rows, streams · width).
    pub x: Value,
    /// (rows, weights): their logits.
    pub mix: Value,
    /// (weights), f32: added to logits.
    pub base: WeightId,
    /// (kinds), f32: factors on logits.
    pub factors: WeightId,
    /// How.
    pub shape: HyperConnection,
}

refers!(HyperWeightsOp { x, mix, base, factors, shape });

impl Operation for HyperWeightsOp {
    const NAME: &'static str = "hyper_weights";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, shape) = (Self::NAME, self.shape);
        check(op, "width left over by streams", 0, self.x.width % shape.streams.max(1))?;
        check(op, "logits", shape.weights(), self.mix.width)?;
        graph.vector(op, "length of the base", self.base, shape.weights())?;
        graph.vector(op, "factors", self.factors, shape.kinds())?;
        Ok(shape.weights())
    }
}

/// Σ over streams of weight · stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperCollapseOp {
    /// (rows, streams · width).
    pub x: Value,
    /// (rows, at least streams).
    pub weights: Value,
    /// Residual streams.
    pub streams: usize,
}

refers!(HyperCollapseOp { x, weights, streams });

impl Operation for HyperCollapseOp {
    const NAME: &'static str = "hyper_collapse";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { x, weights, streams }) = (Self::NAME, *self);
        check(op, "width left over by streams", 0, x.width % streams.max(1))?;
        if weights.width < streams {
            return Err(Error::Shape { op, what: "weights", expected: streams, got: weights.width });
        }
        Ok(x.width / streams.max(1))
    }
}

/// Mixes streams and adds a block's result to each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperExpandOp {
    /// (rows, streams · width).
    pub x: Value,
    /// (rows, width).
    pub block: Value,
    /// (rows, streams · (2 + streams)).
    pub weights: Value,
    /// Residual streams.
    pub streams: usize,
}

refers!(HyperExpandOp { x, block, weights, streams });

impl Operation for HyperExpandOp {
    const NAME: &'static str = "hyper_expand";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { x, block, weights, streams }) = (Self::NAME, *self);
        check(op, "width of the streams", block.width * streams, x.width)?;
        if weights.width != 2 * streams {
            check(op, "weights", streams * (2 + streams), weights.width)?;
        }
        Ok(x.width)
    }
}

/// Mean over streams of sigmoid(gate) ⊙ stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedMeanOp {
    /// (rows, streams · width).
    pub x: Value,
    /// The same shape.
    pub gate: Value,
    /// Residual streams.
    pub streams: usize,
}

refers!(GatedMeanOp { x, gate, streams });

impl Operation for GatedMeanOp {
    const NAME: &'static str = "gated_mean";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { x, gate, streams }) = (Self::NAME, *self);
        check(op, "width left over by streams", 0, x.width % streams.max(1))?;
        check(op, "width of the gate", x.width, gate.width)?;
        Ok(x.width / streams.max(1))
    }
}

/// Adds 2 · sigmoid(logit / streams) · block to each stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamAddOp {
    /// (rows, streams · width).
    pub x: Value,
    /// (rows, width).
    pub block: Value,
    /// (rows, streams).
    pub logits: Value,
}

refers!(StreamAddOp { x, block, logits });

impl Operation for StreamAddOp {
    const NAME: &'static str = "stream_add";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let Self { x, block, logits } = *self;
        check(Self::NAME, "width of the streams", block.width * logits.width, x.width)?;
        Ok(x.width)
    }
}

/// Gates a value for each stream. See [`stream_gate`](super::GraphBuilder::stream_gate).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamGateOp {
    /// (rows, streams · width).
    pub keys: Value,
    /// (rows, streams · width).
    pub queries: Value,
    /// (rows, width).
    pub value: Value,
}

refers!(StreamGateOp { keys, queries, value });

impl Operation for StreamGateOp {
    const NAME: &'static str = "stream_gate";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { keys, queries, value }) = (Self::NAME, *self);
        check(op, "width left over by streams", 0, keys.width % value.width.max(1))?;
        check(op, "width of queries", keys.width, queries.width)?;
        Ok(keys.width)
    }
}

/// Σ of values, weighted by the softmax over their logits.
#[derive(Debug, Clone, PartialEq)]
pub struct SoftmaxMixOp {
    /// (rows, width) each.
    pub values: Vec<Value>,
    /// (rows, 1) each, as many.
    pub logits: Vec<Value>,
}

refers!(SoftmaxMixOp { values, logits });

impl Operation for SoftmaxMixOp {
    const NAME: &'static str = "softmax_mix";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { values, logits }) = (Self::NAME, self);
        check(op, "logits", values.len(), logits.len())?;
        let Some(first) = values.first() else {
            return Err(Error::Shape { op, what: "values", expected: 1, got: 0 });
        };
        values.iter().try_for_each(|value| check(op, "width of a value", first.width, value.width))?;
        logits.iter().try_for_each(|logit| check(op, "width of a logit", 1, logit.width))?;
        Ok(first.width)
    }
}

impl GraphBuilder {
    /// Σ of `values`, each (rows, width), weighted by the softmax over their `logits`, each (rows, 1) (attention residuals: Kimi
    /// Team, 2026): (rows, width).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ, or there is not a logit for each value.
    pub fn softmax_mix(&mut self, values: Vec<Value>, logits: Vec<Value>) -> Result<Value> {
        self.record(SoftmaxMixOp { values, logits })
    }

    /// The weights of a hyper-connection: (rows, [`HyperConnection::weights`]). `mix` are their logits, a linear function
    /// of x (rows, streams · width), which are divided by the root mean square of x, multiplied by the factor of their
    /// kind and added to `base`. With s of that:
    ///
    /// collapsing: sigmoid(s) + floor; adding: 2 · sigmoid(s); mixing: softmax(s) over the stream that is mixed into,
    /// plus floor, divided by the sums over either side in turn, those over the stream that is mixed from first and last.
    /// Where streams are not mixed, adding is magnitude · sigmoid(s) + floor.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit; [`Error::Unsupported`] if `base` and `factors` are not f32.
    pub fn hyper_weights(
        &mut self,
        x: Value,
        mix: Value,
        [base, factors]: [WeightId; 2],
        shape: HyperConnection,
    ) -> Result<Value> {
        self.record(HyperWeightsOp { x, mix, base, factors, shape })
    }

    /// Σ over streams of weight · stream: (rows, width).
    ///
    /// # Errors
    /// [`Error::Shape`] if there are fewer weights than streams.
    pub fn hyper_collapse(&mut self, x: Value, weights: Value, streams: usize) -> Result<Value> {
        self.record(HyperCollapseOp { x, weights, streams })
    }

    /// The streams after a block: each is the block's result times its weight of adding, plus the mixture of all
    /// streams of x, or plus itself if there are no weights of mixing.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn hyper_expand(&mut self, x: Value, block: Value, weights: Value, streams: usize) -> Result<Value> {
        self.record(HyperExpandOp { x, block, weights, streams })
    }

    /// The mean over streams of sigmoid(gate) ⊙ stream (Qwen4-Exp's gated residual, transformers'
    /// `modeling_qwen4_exp.py`): (rows, width).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn gated_mean(&mut self, x: Value, gate: Value, streams: usize) -> Result<Value> {
        self.record(GatedMeanOp { x, gate, streams })
    }

    /// The streams with 2 · sigmoid(logit / streams) times the block's result added to each; `logits` has one a stream.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn stream_add(&mut self, x: Value, block: Value, logits: Value) -> Result<Value> {
        self.record(StreamAddOp { x, block, logits })
    }

    /// For each stream sigmoid(g) · value, where with s = key · query / √width of its own key and query
    /// g = sign(s) · √max(|s|, 1e-6): (rows, streams · width).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn stream_gate(&mut self, keys: Value, queries: Value, value: Value) -> Result<Value> {
        self.record(StreamGateOp { keys, queries, value })
    }
}
