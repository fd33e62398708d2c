//! Multi-head latent attention (DeepSeek-V2, 2024) as families record it: projections, norms, rotation.

use moeflux_compute::graph::{LatentAttention, LatentWeights, PositionScale, Precision, RopeStyle, Value};

use super::blocks::{self, Decoder};
use super::config::Config;
use super::recorder::Recorder;
use super::rope;
use crate::Result;
use crate::checkpoint::Format;

/// Epsilon of the norms of the query's and the keys' latents, whatever `rms_norm_eps` says.
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
}

impl Latent {
    /// Reads the shape; channels rotate in pairs of `style`.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn new(config: &Config<'_>, r: &mut Recorder, heads: usize, style: RopeStyle) -> Result<Self> {
        let rope = config.size("qk_rope_head_dim")?;
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
        let scale = ((nope + rope) as f64).sqrt().recip() * rope::latent_score_factor(config)?;
        let rotation = rope::rotation(config, rope, style, 1e4)?;
        let mut layers = 0..blocks::layers(config)?;
        let q_lora_rank = match layers.any(|layer| r.has(&format!("model.layers.{layer}.self_attn.q_a_proj")))
        {
            true => Some(config.size("q_lora_rank")?),
            false => None,
        };
        let rank = config.size("kv_lora_rank")?;
        let shape = LatentAttention { heads, nope, rope, rank, value, scale: scale as f32 };
        let temperature = temperature(config, None)?;
        Ok(Self { shape, q_lora_rank, rope: Some(r.graph.rotation(rotation)), temperature })
    }
}

impl Latent {
    /// The same without a rotation: no position but what causality tells.
    pub fn not_rotated(self) -> Self {
        Self { rope: None, ..self }
    }

    /// The same with queries that grow by `slope`, if the configuration does not say by how much.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for values that are no numbers.
    pub fn growing(self, config: &Config<'_>, slope: f64) -> Result<Self> {
        Ok(Self { temperature: temperature(config, Some(slope))?, ..self })
    }
}

/// How queries grow with their position: as the configuration says, else by `slope`.
fn temperature(config: &Config<'_>, slope: Option<f64>) -> Result<Option<PositionScale>> {
    let given = config.number("llama_4_scaling_beta")?;
    let Some(slope) = given.or(slope) else { return Ok(None) };
    let key = "original_max_position_embeddings";
    match config.positions("temperature_length")?.or(config.positions(key)?) {
        Some(period) => Ok(Some(PositionScale { base: 1.0, slope: slope as f32, offset: 0, period })),
        None if given.is_none() => Ok(None),
        None => Err(config.unsupported(key, "a number of positions")),
    }
}

/// Norm, multi-head latent attention, residual.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn attention(r: &mut Recorder, d: &Decoder, layer: usize, x: Value, latent: &Latent) -> Result<Value> {
    let base = format!("model.layers.{layer}");
    let module = |name: &str| format!("{base}.self_attn.{name}");
    let shape = latent.shape;
    let LatentAttention { heads, nope, rope, rank, value, .. } = shape;
    r.graph.scope(format!("layers.{layer}.self_attn"));
    let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, d.eps)?;
    let q_width = heads * (nope + rope);
    let kv_a = module("kv_a_proj_with_mqa");
    let (q, kv) = match latent.q_lora_rank {
        Some(q_rank) => {
            let q = r.linear(h, &module("q_a_proj"), q_rank, Precision::Fast)?;
            let kv = r.linear(h, &kv_a, rank + rope, Precision::Fast)?;
            let q = r.rms_norm(q, &module("q_a_layernorm"), 1, LATENT_EPS)?;
            (r.linear(q, &module("q_b_proj"), q_width, Precision::Fast)?, kv)
        }
        None => {
            let q = r.linear(h, &module("q_proj"), q_width, Precision::Fast)?;
            (q, r.linear(h, &kv_a, rank + rope, Precision::Fast)?)
        }
    };
    let q = match latent.temperature {
        Some(temperature) => r.graph.position_scale(q, temperature),
        None => q,
    };
    let q_nope = r.graph.slice(q, heads, 0, nope)?;
    let q_rope = r.graph.slice(q, heads, nope, rope)?;
    let rotate = |r: &mut Recorder, x, heads| match latent.rope {
        Some(rope) => r.graph.rope(x, heads, rope),
        None => Ok(x),
    };
    let q_rope = rotate(r, q_rope, heads)?;
    let c = r.graph.slice(kv, 1, 0, rank)?;
    let c = r.rms_norm(c, &module("kv_a_layernorm"), 1, LATENT_EPS)?;
    let k_rope = r.graph.slice(kv, 1, rank, rope)?;
    let k_rope = rotate(r, k_rope, 1)?;
    let joint = module("kv_b_proj");
    let weights = match r.has(&joint) {
        true => LatentWeights::Joint(r.matrix(&joint, Some(heads * (nope + value)), rank)?),
        false => LatentWeights::Split {
            k: r.head_matrices(&module("embed_q"), heads, rank, nope)?,
            v: r.head_matrices(&module("unembed_out"), heads, value, rank)?,
        },
    };
    let mixed = r.graph.latent_attention([q_nope, q_rope], [c, k_rope], weights, shape)?;
    let out = r.linear(mixed, &module("o_proj"), d.hidden_size, Precision::Fast)?;
    Ok(r.graph.add(x, out)?)
}
