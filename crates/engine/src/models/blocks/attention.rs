//! Attention of families that rotate queries and keys in some layers only, or gate what is mixed.

use moeflux_compute::graph::{Attention, Gate, PositionScale, Precision, Value, WeightId};

use super::{Config, Recorder};
use crate::Result;

/// What multiplies the result of attention.
#[derive(Debug, Clone, Copy)]
pub struct MixedGate {
    /// The module, below `self_attn`, of the linear layer that makes gates.
    pub module: &'static str,
    /// Each head has one gate, rather than each of its channels.
    pub by_head: bool,
    /// What is made of gates.
    pub function: Gate,
    /// Added to gates: (heads · head_dim), f32.
    pub bias: Option<WeightId>,
}

impl MixedGate {
    /// The sigmoid of a gate for each channel.
    pub fn sigmoid(module: &'static str) -> Self {
        Self { module, by_head: false, function: Gate::Sigmoid, bias: None }
    }

    /// Gates of normed h.
    fn made(&self, r: &mut Recorder, h: Value, module: &str, heads: &Heads) -> Result<Value> {
        let width = if self.by_head { heads.heads } else { heads.heads * heads.head_dim };
        let Some(bias) = self.bias else { return r.linear(h, module, width, Precision::Fast) };
        let weight = r.matrix(module, Some(width), h.width())?;
        Ok(r.graph.linear(h, weight, Some(bias), Precision::Fast)?)
    }
}

/// Attention over `self_attn` of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Index of the rotation in the graph, if queries and keys rotate.
    pub rope: Option<usize>,
    /// Epsilon of the norm of each head of queries and keys before they rotate, if there is one.
    pub norm: Option<f32>,
    /// What multiplies the result, before the output projection.
    pub gate: Option<MixedGate>,
    /// Factors on queries.
    pub temperature: Option<PositionScale>,
}

impl Heads {
    /// Plain attention without positions, of the shape that the configuration says; heads are `head_dim` wide, else as wide
    /// as the residual stream divided by them.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn new(config: &Config<'_>, hidden_size: usize, kv_heads: Option<usize>) -> Result<Self> {
        let heads = config.size("num_attention_heads")?;
        let kv_heads = match kv_heads {
            Some(heads) => heads,
            None => config.optional_size("num_key_value_heads")?.unwrap_or(heads),
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.unsupported("num_key_value_heads", &format!("a divisor of the {heads} heads")));
        }
        let head_dim = match config.optional_size("head_dim")? {
            Some(dim) => dim,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                return Err(config.unsupported("hidden_size", &format!("a multiple of the {heads} heads")));
            }
        };
        let scale = (head_dim as f32).sqrt().recip();
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            scale,
            window: None,
            rope: None,
            norm: None,
            gate: None,
            temperature: None,
        })
    }

    /// Attention of normed h.
    ///
    /// # Errors
    /// If weights are missing or do not fit.
    pub fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { heads, kv_heads, head_dim, scale, window, rope, norm, gate, temperature } = *self;
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let (mut q, mut k, v) = if r.has(&module("qkv_proj")) {
            let ends = [q_width, q_width + kv_width, q_width + 2 * kv_width];
            let mut part = |rows| r.linear_part(h, &module("qkv_proj"), ends[2], &[rows], Precision::Fast);
            (part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?)
        } else {
            let mut all = |name, width| r.linear(h, &module(name), width, Precision::Fast);
            (all("q_proj", q_width)?, all("k_proj", kv_width)?, all("v_proj", kv_width)?)
        };
        let gate = match gate {
            Some(gate) => Some((gate.made(r, h, &module(gate.module), self)?, gate.function)),
            None => None,
        };
        if let Some(eps) = norm {
            q = r.rms_norm(q, &module("q_norm"), heads, eps)?;
            k = r.rms_norm(k, &module("k_norm"), kv_heads, eps)?;
        }
        if let Some(rope) = rope {
            (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, kv_heads, rope)?);
        }
        if let Some(temperature) = temperature {
            q = r.graph.position_scale(q, temperature);
        }
        let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
        let sinks = r.sinks(layer, heads)?;
        let mut mixed = r.graph.attention_with_sinks(q, k, v, shape, sinks)?;
        if let Some((gate, function)) = gate {
            mixed = r.graph.gate(mixed, gate, function)?;
        }
        r.linear(mixed, &module("o_proj"), h.width(), Precision::Fast)
    }
}
