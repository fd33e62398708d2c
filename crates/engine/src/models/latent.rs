//! Multi-head latent attention (DeepSeek-V2, 2024) as families record it: projections, norms, rotation.

mod window;

use moeflux_compute::graph::{
    Chosen, LatentAttention, LatentInputs, LatentWeights, PositionScale, Precision, RopeStyle, Value,
    WeightId,
};

use super::blocks::{self, Decoder};
use super::config::Config;
use super::names::NameMap;
use super::recorder::{Form, Recorder};
use super::rope;
use crate::Result;
use crate::checkpoint::Format;

/// Modules of GGUF files.
pub const GGUF_TENSORS: NameMap = &[
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.embed_q", "attn_k_b"),
    ("self_attn.unembed_out", "attn_v_b"),
];

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap = &[
    ("q_lora_rank", "attention.q_lora_rank"),
    ("kv_lora_rank", "attention.kv_lora_rank"),
    ("qk_rope_head_dim", "rope.dimension_count"),
    ("qk_head_dim", "attention.key_length_mla"),
    ("v_head_dim", "attention.value_length_mla"),
    ("value_length", "attention.value_length"),
    ("llama_4_scaling_beta", "attention.temperature_scale"),
    ("temperature_length", "attention.temperature_length"),
];

/// Epsilon of the norms of the query's and the keys' latents in most families, whatever `rms_norm_eps` says.
const LATENT_EPS: f32 = 1e-6;

/// The attention of all layers of a model.
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    shape: LatentAttention,
    /// Width of the query's latent; queries come straight from the hidden state without.
    q_lora_rank: Option<usize>,
    /// Index of the rotation in the graph, if there is one.
    rope: Option<usize>,
    /// Factor on queries (Mistral 4).
    temperature: Option<PositionScale>,
    /// Epsilon of the norms of latents.
    eps: f32,
    /// Factors on queries and on the normed latent of keys and values (LongCat-Flash).
    factors: [f32; 2],
    /// Sliding window in tokens.
    window: Option<usize>,
    /// Names of what some families have besides.
    more: More,
}

/// Modules and tensors of an attention that few families have, below its module.
#[derive(Debug, Clone, Copy, Default)]
pub struct More {
    /// A logit of each head that joins its softmax.
    pub sinks: Option<&'static str>,
    /// A linear layer of the hidden state whose sigmoid gates what heads give.
    pub gate: Option<&'static str>,
    /// The same with one gate for each head.
    pub head_gate: Option<&'static str>,
    /// In place of what makes queries: a linear layer of their latent, normed and then as it is, which gives each head's query and
    /// the logits of its gates (A.X-K2).
    pub gated_queries: Option<&'static str>,
    /// The norm of the key that all heads share, before it rotates.
    pub rotated_norm: Option<&'static str>,
}

/// What says how queries grow with their position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Growth {
    /// GGUF files, where one architecture stands for several families; other configurations have no key for it.
    OfGguf,
    /// The configuration; they do not grow if it says nothing.
    Configured,
    /// The configuration, or this slope if it says nothing.
    Published(f64),
}

impl Latent {
    /// Reads the shape; channels rotate in pairs of `style`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn new(config: &Config<'_>, r: &mut Recorder, heads: usize, style: RopeStyle) -> Result<Self> {
        let rope = config.size("qk_rope_head_dim")?;
        let mut latent = Self::of(config, r, heads, rope)?;
        let factor = rope::latent_score_factor(config)?;
        let LatentAttention { nope, .. } = latent.shape;
        latent.shape.scale = (((nope + rope) as f64).sqrt().recip() * factor) as f32;
        latent.rope = Some(r.graph.rotation(rope::rotation(config, rope, style, 1e4)?));
        Ok(latent)
    }

    /// Reads the shape of attention whose heads have no channels for positions.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn without_positions(config: &Config<'_>, r: &mut Recorder, heads: usize) -> Result<Self> {
        Self::of(config, r, heads, 0)
    }

    /// Reads the shape of attention whose heads have channels for positions that are not rotated.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn unrotated(config: &Config<'_>, r: &mut Recorder, heads: usize) -> Result<Self> {
        Self::of(config, r, heads, config.size("qk_rope_head_dim")?)
    }

    /// Reads the shape with `rope` channels for positions, which are not rotated yet.
    fn of(config: &Config<'_>, r: &Recorder, heads: usize, rope: usize) -> Result<Self> {
        let gguf = config.format() == Format::Gguf;
        let (nope, value) = if gguf {
            // Files from before the split of kv_b describe expanded heads under the plain keys.
            let head_dim =
                config.optional_size("qk_head_dim")?.map_or_else(|| config.size("head_dim"), Ok)?;
            let value =
                config.optional_size("v_head_dim")?.map_or_else(|| config.size("value_length"), Ok)?;
            if head_dim <= rope {
                return Err(
                    config.unsupported("qk_rope_head_dim", &format!("fewer than {head_dim} channels"))
                );
            }
            (head_dim - rope, value)
        } else {
            (config.size("qk_nope_head_dim")?, config.size("v_head_dim")?)
        };
        let scale = ((nope + rope) as f64).sqrt().recip();
        let mut layers = 0..blocks::layers(config)?;
        let is_low_rank = layers.any(|layer| {
            let module = |name: &str| format!("model.layers.{layer}.{name}.q_a_proj");
            r.has(&module("self_attn")) || r.has(&module("self_attn.0"))
        });
        let q_lora_rank = if is_low_rank { Some(config.size("q_lora_rank")?) } else { None };
        let rank = config.size("kv_lora_rank")?;
        let shape = LatentAttention { heads, nope, rope, rank, value, scale: scale as f32 };
        let temperature = temperature(config, Growth::OfGguf)?;
        Ok(Self { temperature, ..Self::shaped(shape, q_lora_rank, None) })
    }

    /// Of this shape, with queries that have a latent of so many channels if they have one, and a rotation of the graph.
    pub fn shaped(shape: LatentAttention, q_lora_rank: Option<usize>, rope: Option<usize>) -> Self {
        let (eps, factors, more) = (LATENT_EPS, [1.0; 2], More::default());
        Self { shape, q_lora_rank, rope, temperature: None, eps, factors, window: None, more }
    }

    /// Channels of a head that are rotated, and the rotation.
    pub fn rotation(&self) -> Option<(usize, usize)> {
        Some((self.shape.rope, self.rope?))
    }
}

impl Latent {
    /// The same without a rotation: no position but what causality tells.
    pub fn not_rotated(self) -> Self {
        Self { rope: None, ..self }
    }

    /// The same with `eps` in the norms of latents.
    pub fn with_eps(self, eps: f32) -> Self {
        Self { eps, ..self }
    }

    /// The same with queries, and what keys and values are made of, grown by √(`hidden_size` / rank of their latent), where these
    /// flags are set.
    pub fn grown(mut self, hidden_size: usize, [queries, keys]: [bool; 2]) -> Self {
        let factor = |rank: usize| (hidden_size as f64 / rank as f64).sqrt() as f32;
        if let Some(rank) = self.q_lora_rank.filter(|_| queries) {
            self.factors[0] = factor(rank);
        }
        if keys {
            self.factors[1] = factor(self.shape.rank);
        }
        self
    }

    /// The same over a window of so many tokens, if there is one: with the keys and values of heads that latents make, which are
    /// kept in place of latents, as attention over those sees everything.
    pub fn within(self, window: Option<usize>) -> Self {
        Self { window, ..self }
    }

    /// The same with sinks or gates.
    pub fn with(self, more: More) -> Self {
        Self { more, ..self }
    }

    /// The same with queries that grow as `growth` says.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for values that are no numbers.
    pub fn growing(self, config: &Config<'_>, growth: Growth) -> Result<Self> {
        Ok(Self { temperature: temperature(config, growth)?, ..self })
    }
}

/// How queries grow with their position.
fn temperature(config: &Config<'_>, growth: Growth) -> Result<Option<PositionScale>> {
    let given = match growth {
        Growth::OfGguf if config.format() != Format::Gguf => None,
        _ => config.number("llama_4_scaling_beta")?,
    };
    let slope = if let Growth::Published(slope) = growth { Some(slope) } else { None };
    let Some(slope) = given.or(slope) else { return Ok(None) };
    let key = "original_max_position_embeddings";
    let length = match config.positions(key)? {
        None if given.is_some() => config.positions("max_position_embeddings")?,
        length => length,
    };
    match config.positions("temperature_length")?.or(length) {
        Some(period) => Ok(Some(PositionScale::steps(slope as f32, 0, period))),
        None if given.is_none() => Ok(None),
        None => Err(config.unsupported(key, "a number of positions")),
    }
}

/// Norm, multi-head latent attention, residual.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn attention(r: &mut Recorder, d: &Decoder, layer: usize, x: Value, latent: &Latent) -> Result<Value> {
    attention_over(r, d, layer, x, latent, |_, _| Ok(None))
}

/// As [`attention`], over what `choose` says (see [`attention_of`]).
///
/// # Errors
/// As [`attention_of`].
pub fn attention_over(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    x: Value,
    latent: &Latent,
    choose: impl FnOnce(&mut Recorder, [Value; 2]) -> Result<Option<Chosen>>,
) -> Result<Value> {
    r.graph.scope(format!("layers.{layer}.self_attn"));
    let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
    let out = attention_of(r, layer, h, latent, choose)?;
    Ok(r.graph.add(x, out)?)
}

/// Multi-head latent attention of normed h; `choose` says by h and the normed latent of queries what is seen, everything
/// unless it does.
///
/// # Errors
/// If weights are missing or do not fit, and what `choose` returns.
pub fn attention_of(
    r: &mut Recorder,
    layer: usize,
    h: Value,
    latent: &Latent,
    choose: impl FnOnce(&mut Recorder, [Value; 2]) -> Result<Option<Chosen>>,
) -> Result<Value> {
    attention_in(r, &format!("model.layers.{layer}.self_attn"), h, latent, choose)
}

/// As [`attention_of`], of the module `base`.
///
/// # Errors
/// As [`attention_of`].
pub fn attention_in(
    r: &mut Recorder,
    base: &str,
    h: Value,
    latent: &Latent,
    choose: impl FnOnce(&mut Recorder, [Value; 2]) -> Result<Option<Chosen>>,
) -> Result<Value> {
    let module = |name: &str| format!("{base}.{name}");
    let LatentAttention { heads, nope, rope, rank, value, .. } = latent.shape;
    let q_width = heads * (nope + rope);
    let kv_a = module("kv_a_proj_with_mqa");
    let mut gate = None;
    let (q, kv, chosen) = match latent.q_lora_rank {
        Some(q_rank) => {
            let low = r.linear(h, &module("q_a_proj"), q_rank, Precision::Fast)?;
            let kv = r.linear(h, &kv_a, rank + rope, Precision::Fast)?;
            let q = r.rms_norm(low, &module("q_a_layernorm"), 1, latent.eps)?;
            let chosen = choose(r, [h, q])?;
            let q = if let Some(name) = latent.more.gated_queries {
                let both = r.graph.join(q, low);
                let all = r.linear(both, &module(name), q_width + heads * value, Precision::Fast)?;
                gate = Some(r.graph.slice(all, heads, nope + rope, value)?);
                r.graph.slice(all, heads, 0, nope + rope)?
            } else {
                r.linear(q, &module("q_b_proj"), q_width, Precision::Fast)?
            };
            (q, kv, chosen)
        }
        None => {
            let q = r.linear(h, &module("q_proj"), q_width, Precision::Fast)?;
            (q, r.linear(h, &kv_a, rank + rope, Precision::Fast)?, None)
        }
    };
    let q = blocks::times(r, q, latent.factors[0]);
    let q = match latent.temperature {
        Some(temperature) => r.graph.position_scale(q, temperature),
        None => q,
    };
    let mut mixed = match latent.window {
        Some(window) => latent.over_window(r, base, [q, kv], window)?,
        None => latent.over_all(r, base, [q, kv], chosen)?,
    };
    if let Some(name) = latent.more.gate {
        gate = Some(r.linear(h, &module(name), heads * value, Precision::Fast)?);
    }
    if let Some(gate) = gate {
        mixed = r.graph.sigmoid_gate(mixed, gate)?;
    }
    if let Some(name) = latent.more.head_gate {
        let gate = r.linear(h, &module(name), heads, Precision::F32)?;
        mixed = r.graph.sigmoid_gate(mixed, gate)?;
    }
    r.linear(mixed, &module("o_proj"), h.width(), Precision::Fast)
}

impl Latent {
    /// x, channels of so many heads, rotated if there is a rotation.
    fn rotated(&self, r: &mut Recorder, x: Value, heads: usize) -> Result<Value> {
        Ok(match self.rope {
            Some(rope) => r.graph.rope(x, heads, rope)?,
            None => x,
        })
    }

    /// The key that all heads share, of what `kv_a_proj_with_mqa` gives: normed if it is, and rotated.
    fn shared_key(&self, r: &mut Recorder, base: &str, kv: Value) -> Result<Value> {
        let LatentAttention { rope, rank, .. } = self.shape;
        let mut key = r.graph.slice(kv, 1, rank, rope)?;
        if let Some(name) = self.more.rotated_norm {
            key = r.rms_norm(key, &format!("{base}.{name}"), 1, self.eps)?;
        }
        self.rotated(r, key, 1)
    }

    /// The normed latent of keys and values.
    fn normed(&self, r: &mut Recorder, base: &str, c: Value) -> Result<Value> {
        let c = r.rms_norm(c, &format!("{base}.kv_a_layernorm"), 1, self.eps)?;
        Ok(blocks::times(r, c, self.factors[1]))
    }

    /// The logits of heads that join their softmax, if they have some.
    fn sinks(&self, r: &mut Recorder, base: &str) -> Result<Option<WeightId>> {
        let Some(name) = self.more.sinks else { return Ok(None) };
        r.constants(&format!("{base}.{name}"), &[self.shape.heads], Form::F32).map(Some)
    }

    /// Attention of queries over the latents of all tokens, or of those that are `chosen`.
    fn over_all(
        &self,
        r: &mut Recorder,
        base: &str,
        [q, kv]: [Value; 2],
        chosen: Option<Chosen>,
    ) -> Result<Value> {
        let module = |name: &str| format!("{base}.{name}");
        let LatentAttention { heads, nope, rope, rank, value, .. } = self.shape;
        let (mut q_nope, mut c, mut rotated) = (q, kv, None);
        if rope > 0 {
            q_nope = r.graph.slice(q, heads, 0, nope)?;
            let q_rope = r.graph.slice(q, heads, nope, rope)?;
            let q_rope = self.rotated(r, q_rope, heads)?;
            c = r.graph.slice(kv, 1, 0, rank)?;
            rotated = Some([q_rope, self.shared_key(r, base, kv)?]);
        }
        let c = self.normed(r, base, c)?;
        let joint = module("kv_b_proj");
        let weights = if r.has(&joint) {
            LatentWeights::Joint(r.matrix(&joint, Some(heads * (nope + value)), rank)?)
        } else {
            LatentWeights::Split {
                k: r.head_matrices(&module("embed_q"), heads, rank, nope)?,
                v: r.head_matrices(&module("unembed_out"), heads, value, rank)?,
            }
        };
        let sinks = self.sinks(r, base)?;
        let inputs = LatentInputs { q_nope, c, rotated, sinks, chosen };
        Ok(r.graph.latent_attention(inputs, weights, self.shape)?)
    }
}
