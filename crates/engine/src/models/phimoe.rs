//! Phi-3.5-MoE, and Phi-mini-MoE and Phi-tiny-MoE, which were pruned from it. Layer norms with biases; two experts a token,
//! weighted by SparseMixer; a head with a bias.
//!
//! Source: transformers `modeling_phimoe.py`, mlx-lm `phimoe.py`; GGUF architecture `phimoe`.

use moeflux_compute::graph::{Precision, RopeStyle, Route, Score, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::checkpoint::Format;
use crate::{Error, Result};

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Phi-3.5-MoE",
    model_types: &["phimoe"],
    gguf_architectures: &["phimoe"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[&[("mlp.router", "ffn_gate_inp")]], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("intermediate_size", DefaultValue::Count(6400)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(16)),
    ("num_experts_per_tok", DefaultValue::Count(2)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// Divisors of `count` frequencies that a GGUF file has, if there are any.
fn divisors(r: &Recorder, config: &Config<'_>, tensor: &str, count: usize) -> Result<Option<Vec<f32>>> {
    let error = |got: String| Error::Tensor {
        path: config.path().into(),
        tensor: tensor.into(),
        expected: format!("{count} finite divisors"),
        got,
    };
    match r.values(tensor)? {
        // Both kinds are there, with their magnitude, or none.
        None if config.number("attention_factor")?.is_some() => Err(error("no tensor".into())),
        Some(found) if found.len() != count || found.iter().any(|d| !d.is_finite() || *d == 0.0) => {
            Err(error(format!("{found:?}")))
        }
        found => Ok(found),
    }
}

/// Adds the rotation of a GGUF file to the graph: divisors of frequencies are tensors, of two kinds for contexts within and
/// beyond the original one.
fn gguf_rotation(r: &mut Recorder, config: &Config<'_>, head_dim: usize) -> Result<usize> {
    let theta = config.number("rope_theta")?.unwrap_or(1e4);
    let mut rope = rope::plain(config, head_dim, RopeStyle::HalfSplit, theta)?;
    let original = config.positions("original_max_position_embeddings")?;
    let long = config.context().zip(original).is_some_and(|(wanted, original)| wanted > original);
    let count = rope.inv_freq.len();
    let of_short = divisors(r, config, "rope_factors_short.weight", count)?;
    let of_long = divisors(r, config, "rope_factors_long.weight", count)?;
    if let Some(divisors) = if long { of_long } else { of_short } {
        rope.inv_freq.iter_mut().zip(&divisors).for_each(|(freq, divisor)| *freq /= divisor);
        rope.magnitude = config.magnitude("attention_factor")?.unwrap_or(1.0) as f32;
        if config.context().is_none() {
            r.limit_context(original);
        }
    }
    Ok(r.graph.rotation(rope))
}

/// A layer norm with its bias.
fn norm(r: &mut Recorder, x: Value, module: &str, eps: f32) -> Result<Value> {
    let weight = r.vector(module, "weight", x.width())?;
    let bias = r.vector(module, "bias", x.width())?;
    Ok(r.graph.layer_norm(x, weight, bias, eps)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, if config.format() == Format::Mlx { 1e-6 } else { 1e-5 })?;
    let rope = match config.format() {
        Format::Gguf => gguf_rotation(r, config, d.head_dim)?,
        Format::Mlx => blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?,
        Format::HuggingFace => blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e6)?,
    };
    // A window of 0 in GGUF files is none.
    let window = match config.format() {
        Format::Gguf => config.count("sliding_window")?.filter(|window| *window > 0),
        _ => config.positions("sliding_window")?,
    };
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    if config.format() == Format::HuggingFace && top_k != 2 {
        return Err(config.unsupported("num_experts_per_tok", "2"));
    }
    // The module's name on the hub and in MLX; transformers 5 saves it as `mlp`.
    let hub = config.format() != Format::Gguf && r.has("model.layers.0.block_sparse_moe.gate");
    let moe = Moe {
        route: Route {
            score: Score::SparseMixer,
            epsilon: config.magnitude("router_jitter_noise")?.unwrap_or(0.01) as f32,
            ..Route::softmax(experts, top_k, false)
        },
        router: if hub { "block_sparse_moe.gate" } else { "mlp.router" },
        correction_bias: None,
        experts: ExpertNames {
            module: if hub { "block_sparse_moe.experts" } else { "mlp.experts" },
            projections: ["w1", "w3", "w2"],
        },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = norm(r, x, &format!("{base}.input_layernorm"), d.eps)?;
        let scale = (d.head_dim as f32).sqrt().recip();
        let out = blocks::attention_of(r, &d, layer, h, &kind, scale)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = norm(r, x, &format!("{base}.post_attention_layernorm"), d.eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        x = r.graph.add(x, out)?;
    }
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = norm(r, rows, "model.norm", d.eps)?;
    if config.format() != Format::HuggingFace || config.flag("lm_head_bias", false)? {
        let vocab_size = r.graph.matrix(table).rows;
        let tied = blocks::is_tied(r, config)?;
        let weight = if tied { table } else { r.matrix("lm_head", Some(vocab_size), h.width())? };
        let bias = r.vector("lm_head", "bias", vocab_size)?;
        return Ok(r.graph.linear(h, weight, Some(bias), Precision::Fast)?);
    }
    blocks::logits(r, config, h, table)
}
