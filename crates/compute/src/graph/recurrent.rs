//! Operations with a state of fixed size a sequence: causal convolution, the gated delta rule and state space models.
//!
//! A state is f32 and belongs to a *slot*; a batch says for each of its sequences which slot it starts from and which
//! it leaves the new state in ([`crate::backend::StateSlots`]). A sequence at position 0 starts from zeros.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{GraphBuilder, MatrixSpec, Value, WeightId};
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
    pub(crate) fn key_head(&self, value_head: usize) -> usize {
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

/// Shape of a state space model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SsmScan {
    /// Heads; each has a state of its own.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of heads that share what they write and read: head h belongs to group h / (heads / groups).
    pub groups: usize,
    /// Numbers that a state has for each channel.
    pub state_size: usize,
    /// Smallest and largest time step.
    pub time_steps: (f32, f32),
}

impl SsmScan {
    /// The group of a head.
    pub fn group(&self, head: usize) -> usize {
        head / (self.heads / self.groups)
    }
}

/// What a state space model takes of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsmInputs {
    /// (tokens, heads · head_dim).
    pub x: Value,
    /// (tokens, groups · state_size): where x is written.
    pub b: Value,
    /// (tokens, groups · state_size): what is read.
    pub c: Value,
    /// (tokens, heads): what time steps are made from.
    pub dt: Value,
}

/// What is the same for all tokens; (heads), f32 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsmWeights {
    /// A < 0 of the decay exp(Δ · A); or (heads, state_size), where heads have one channel: each number of a state decays on
    /// its own (Mamba-1).
    pub a: WeightId,
    /// Weight of x itself in the result.
    pub d: WeightId,
    /// Added to dt.
    pub dt_bias: WeightId,
}

/// Depthwise causal convolution over the tokens of a sequence, then silu unless it is `plain`:
/// y_t = silu(Σ_j weight\[j\] · x_{t−(kernel−1−j)·dilation} + bias). See [`causal_conv1d`](super::GraphBuilder::causal_conv1d).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CausalConv1dOp {
    /// (tokens, channels).
    pub x: Value,
    /// (channels · kernel), f32: the kernel of each channel, oldest token first.
    pub weight: WeightId,
    /// (channels), f32: added before silu.
    pub bias: Option<WeightId>,
    /// Tokens that a result depends on.
    pub kernel: usize,
    /// Tokens from one of these to the next.
    pub dilation: usize,
    /// Whether there is no silu.
    pub plain: bool,
    /// The last (kernel − 1) · dilation inputs, channels each, oldest first.
    pub state: StateId,
}

refers!(CausalConv1dOp { x, weight, bias, kernel, dilation, plain, state });

impl Operation for CausalConv1dOp {
    const NAME: &'static str = "causal_conv1d";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, Self { x, kernel, .. }) = (Self::NAME, *self);
        if kernel == 0 || self.dilation == 0 {
            return Err(Error::Shape { op, what: "kernel and dilation", expected: 1, got: 0 });
        }
        graph.vector(op, "elements of the weight", self.weight, x.width.saturating_mul(kernel))?;
        if let Some(bias) = self.bias {
            graph.vector(op, "length of the bias", bias, x.width)?;
        }
        Ok(x.width)
    }
}

/// Linear attention by the gated delta rule. See [`gated_delta_rule`](super::GraphBuilder::gated_delta_rule).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedDeltaRuleOp {
    /// What is mixed.
    pub inputs: DeltaInputs,
    /// (value_heads), f32: A < 0 of the decay exp(A · softplus(a + dt_bias)).
    pub decay: WeightId,
    /// As wide as a, f32.
    pub dt_bias: WeightId,
    /// Heads and their widths.
    pub shape: DeltaRule,
    /// S: (value_heads, key_dim, value_dim).
    pub state: StateId,
}

refers!(GatedDeltaRuleOp { inputs, decay, dt_bias, shape, state });

impl Operation for GatedDeltaRuleOp {
    const NAME: &'static str = "gated_delta_rule";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, inputs) = (Self::NAME, self.inputs);
        let DeltaRule { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        if key_heads == 0 || value_heads == 0 || key_dim == 0 || value_dim == 0 {
            return Err(Error::Shape { op, what: "heads and their widths", expected: 1, got: 0 });
        }
        check(op, "value heads left over by key heads", 0, value_heads % key_heads)?;
        check(op, "width of q", key_heads.saturating_mul(key_dim), inputs.q.width)?;
        check(op, "width of k", key_heads.saturating_mul(key_dim), inputs.k.width)?;
        check(op, "width of v", value_heads.saturating_mul(value_dim), inputs.v.width)?;
        if inputs.a.width != value_heads {
            check(op, "width of a", value_heads.saturating_mul(key_dim), inputs.a.width)?;
        }
        check(op, "width of b", value_heads, inputs.b.width)?;
        graph.vector(op, "length of the decay", self.decay, value_heads)?;
        graph.vector(op, "length of dt_bias", self.dt_bias, inputs.a.width)?;
        Ok(inputs.v.width)
    }
}

/// Mamba's state space model. See [`ssm_scan`](super::GraphBuilder::ssm_scan).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SsmScanOp {
    /// What is written and read.
    pub inputs: SsmInputs,
    /// What is the same for all tokens.
    pub weights: SsmWeights,
    /// Heads and their widths.
    pub shape: SsmScan,
    /// S: (heads, state_size, head_dim).
    pub state: StateId,
}

refers!(SsmScanOp { inputs, weights, shape, state });

impl Operation for SsmScanOp {
    const NAME: &'static str = "ssm_scan";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, Self { inputs, weights, .. }) = (Self::NAME, *self);
        let SsmScan { heads, head_dim, groups, state_size, time_steps } = self.shape;
        if heads == 0 || head_dim == 0 || groups == 0 || state_size == 0 {
            return Err(Error::Shape { op, what: "heads and their widths", expected: 1, got: 0 });
        }
        check(op, "heads left over by groups", 0, heads % groups)?;
        // Also if one is not a number.
        if time_steps.0.partial_cmp(&time_steps.1).is_none_or(std::cmp::Ordering::is_gt) {
            return Err(Error::Shape { op, what: "order of the limits of time steps", expected: 1, got: 0 });
        }
        check(op, "width of x", heads.saturating_mul(head_dim), inputs.x.width)?;
        check(op, "width of b", groups.saturating_mul(state_size), inputs.b.width)?;
        check(op, "width of c", groups.saturating_mul(state_size), inputs.c.width)?;
        check(op, "width of dt", heads, inputs.dt.width)?;
        let MatrixSpec { rows, cols, .. } = graph.matrix(weights.a);
        let one = rows.saturating_mul(cols) == heads;
        let decays = if head_dim > 1 || one { heads } else { heads.saturating_mul(state_size) };
        graph.vector(op, "length of a", weights.a, decays)?;
        graph.vector(op, "length of d", weights.d, heads)?;
        graph.vector(op, "length of dt_bias", weights.dt_bias, heads)?;
        Ok(inputs.x.width)
    }
}

refers!(DeltaInputs { q, k, v, a, b });
refers!(SsmInputs { x, b, c, dt });
refers!(SsmWeights { a, d, dt_bias });

impl GraphBuilder {
    /// The state that [`GraphBuilder::state`] will add.
    pub(super) fn next_state(&self) -> StateId {
        StateId(self.states.len())
    }

    /// Adds a state.
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
        self.conv1d(x, weight, None, [kernel, 1], false)
    }

    /// As [`GraphBuilder::causal_conv1d`], with `bias` (channels) added before silu.
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit.
    pub fn biased_conv1d(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: WeightId,
        kernel: usize,
    ) -> Result<Value> {
        self.conv1d(x, weight, Some(bias), [kernel, 1], false)
    }

    /// As [`GraphBuilder::causal_conv1d`] without silu, with `bias` (channels) added if there is one (LFM2).
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit.
    pub fn plain_conv1d(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        kernel: usize,
    ) -> Result<Value> {
        self.conv1d(x, weight, bias, [kernel, 1], true)
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
        self.conv1d(x, weight, None, [kernel, dilation], false)
    }

    fn conv1d(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        [kernel, dilation]: [usize; 2],
        plain: bool,
    ) -> Result<Value> {
        let op = CausalConv1dOp { x, weight, bias, kernel, dilation, plain, state: self.next_state() };
        let width = op.width(self)?;
        let held = (kernel - 1).checked_mul(dilation).and_then(|held| held.checked_mul(x.width));
        self.state(held, CausalConv1dOp::NAME)?;
        Ok(self.push(op, width))
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
        let op = GatedDeltaRuleOp { inputs, decay, dt_bias, shape, state: self.next_state() };
        let width = op.width(self)?;
        self.state(width.checked_mul(shape.key_dim), GatedDeltaRuleOp::NAME)?;
        Ok(self.push(op, width))
    }

    /// Mamba-2's state space model (Dao & Gu, *Transformers are SSMs*, 2024). For each token and head, with
    /// Δ = ln(1 + e^(dt + dt_bias)) limited to `shape.time_steps`:
    ///
    /// S ← exp(Δ·A)·S + Δ·b·xᵀ; out = Sᵀc + d·x.
    ///
    /// Where A has a row for each head, which has one channel, it is Mamba's selective scan (Gu & Dao 2023): row n of S decays
    /// by A\[n\].
    ///
    /// # Errors
    /// [`Error::Shape`] if widths and head counts do not fit, or no time step is within its limits.
    pub fn ssm_scan(&mut self, inputs: SsmInputs, weights: SsmWeights, shape: SsmScan) -> Result<Value> {
        let op = SsmScanOp { inputs, weights, shape, state: self.next_state() };
        let width = op.width(self)?;
        self.state(width.checked_mul(shape.state_size), SsmScanOp::NAME)?;
        Ok(self.push(op, width))
    }
}
