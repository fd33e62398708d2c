//! Operations with a state of fixed size a sequence: causal convolution and the gated delta rule.
//!
//! A state is f32 and belongs to a *slot*; a batch says for each of its sequences which slot it starts from and which
//! it leaves the new state in ([`crate::backend::StateSlots`]). A sequence at position 0 starts from zeros.

use super::builder::check;
use super::{GraphBuilder, Op, Value, WeightId};
use crate::{Error, Result};

/// Recurrent state of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateId(pub usize);

/// Which key head a value head belongs to; r = value_heads / key_heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadPairing {
    /// Value head h reads key head h / r (transformers).
    Grouped,
    /// Value head h reads key head h mod key_heads (the order that ggml's broadcasting wants).
    Tiled,
}

/// How fast a state is forgotten: the logarithm of its factor g for A < 0 and x = a + dt_bias.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// A · softplus(x).
    Softplus,
    /// bound · sigmoid(−A · x), never below the bound (Kimi Delta Attention's safe gate).
    Bounded(f32),
}

/// Shape of a gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRule {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads; each has a state of its own.
    pub value_heads: usize,
    /// Channels of a query or key head.
    pub key_dim: usize,
    /// Channels of a value head.
    pub value_dim: usize,
    /// Which key head a value head belongs to.
    pub pairing: HeadPairing,
    /// What is forgotten.
    pub decay: Decay,
}

impl DeltaRule {
    /// Added to Σx² when queries and keys are normalised (flash-linear-attention's l2norm).
    pub const L2_EPS: f32 = 1e-6;

    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.pairing {
            HeadPairing::Grouped => value_head / (self.value_heads / self.key_heads),
            HeadPairing::Tiled => value_head % self.key_heads,
        }
    }
}

/// What a gated delta rule mixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaInputs {
    /// (tokens, key_heads · key_dim), not normalised.
    pub q: Value,
    /// (tokens, key_heads · key_dim), not normalised.
    pub k: Value,
    /// (tokens, value_heads · value_dim).
    pub v: Value,
    /// (tokens, value_heads), or (tokens, value_heads · key_dim) if each channel of a key decays on its own: what the decay
    /// is made from.
    pub a: Value,
    /// (tokens, value_heads): logits of the writing strength β.
    pub b: Value,
}

impl GraphBuilder {
    pub(super) fn state(&mut self, elements: Option<usize>, op: &'static str) -> Result<StateId> {
        let Some(elements) = elements else {
            return Err(Error::Shape { op, what: "elements of the state", expected: usize::MAX, got: 0 });
        };
        self.states.push(elements);
        Ok(StateId(self.states.len() - 1))
    }

    /// y_t = silu(Σ_j weight\[j\] · x_{t−kernel+1+j}) in every channel; `weight` holds (channels, kernel) values.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit.
    pub fn causal_conv1d(&mut self, x: Value, weight: WeightId, kernel: usize) -> Result<Value> {
        self.dilated_conv1d(x, weight, kernel, 1)
    }

    /// As [`GraphBuilder::causal_conv1d`], of every `dilation`th token back from the newest one.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit.
    pub fn dilated_conv1d(
        &mut self,
        x: Value,
        weight: WeightId,
        kernel: usize,
        dilation: usize,
    ) -> Result<Value> {
        let op = "causal_conv1d";
        if kernel == 0 || dilation == 0 {
            return Err(Error::Shape { op, what: "kernel and dilation", expected: 1, got: 0 });
        }
        self.vector(op, "elements of the weight", weight, x.width().saturating_mul(kernel))?;
        let held = (kernel - 1).checked_mul(dilation).and_then(|held| held.checked_mul(x.width()));
        let state = self.state(held, op)?;
        Ok(self.push(Op::CausalConv1d { x, weight, kernel, dilation, state }, x.width()))
    }

    /// Linear attention by the gated delta rule (Yang et al., *Gated Delta Networks*, 2024). For each token and value
    /// head, with q and k divided by their length (√(Σx² + 1e-6)), q scaled by key_dim^−½ and β = sigmoid(b):
    ///
    /// S ← g·S; δ = β(v − Sᵀk); S ← S + kδᵀ; out = Sᵀq.
    ///
    /// g is the exponential of what [`Decay`] says. With an `a` for each channel of a key, `dt_bias` has as many and g is that of a row of S (Kimi Delta Attention, Kimi
    /// Team, *Kimi Linear*, 2025).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths and head counts do not fit.
    pub fn gated_delta_rule(
        &mut self,
        inputs: DeltaInputs,
        decay: WeightId,
        dt_bias: WeightId,
        shape: DeltaRule,
    ) -> Result<Value> {
        let op = "gated_delta_rule";
        let DeltaRule { key_heads, value_heads, key_dim, value_dim, .. } = shape;
        if key_heads == 0 || value_heads == 0 || key_dim == 0 || value_dim == 0 {
            return Err(Error::Shape { op, what: "heads and their widths", expected: 1, got: 0 });
        }
        check(op, "value heads left over by key heads", 0, value_heads % key_heads)?;
        check(op, "width of q", key_heads.saturating_mul(key_dim), inputs.q.width())?;
        check(op, "width of k", key_heads.saturating_mul(key_dim), inputs.k.width())?;
        check(op, "width of v", value_heads.saturating_mul(value_dim), inputs.v.width())?;
        if inputs.a.width() != value_heads {
            check(op, "width of a", value_heads.saturating_mul(key_dim), inputs.a.width())?;
        }
        check(op, "width of b", value_heads, inputs.b.width())?;
        self.vector(op, "length of the decay", decay, value_heads)?;
        self.vector(op, "length of dt_bias", dt_bias, inputs.a.width())?;
        let state = self.state(inputs.v.width().checked_mul(key_dim), op)?;
        Ok(self.push(Op::GatedDeltaRule { inputs, decay, dt_bias, shape, state }, inputs.v.width()))
    }
}
