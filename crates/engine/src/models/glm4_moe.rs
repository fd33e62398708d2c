//! GLM-4.5 and GLM-4.6, and the text part of GLM-4.5V. Half of each head rotates; biases on q, k and v; sigmoid routing
//! with a correction bias within the best groups; dense first layers; shared experts.
//!
//! Multimodal rotary embedding gives text the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_glm4_moe.py`, `modeling_glm4v_moe.py`; GGUF architecture `glm4moe`, whose block count includes the layers
//! that predict further tokens.

use moeflux_compute::graph::{RopeStyle, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, draft};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{Names, POST_ATTENTION_NORM};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "GLM-4.5, GLM-4.6, GLM-4.5V (text)",
    model_types: &["glm4_moe", "glm4v_moe", "glm4v_moe_text"],
    gguf_architectures: &["glm4moe"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[POST_ATTENTION_NORM], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(96)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(10944)),
    ("moe_intermediate_size", DefaultValue::Count(1408)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    decoder(&config.with_defaults(DEFAULTS), r, Defaults { eps: 1e-5, rotating: 0.5, theta: 1e4 })
}

/// What families of this kind have in common but default differently.
pub(super) struct Defaults {
    /// Epsilon of all norms.
    pub(super) eps: f64,
    /// Part of a head that rotates.
    pub(super) rotating: f64,
    /// Base of the rotation.
    pub(super) theta: f64,
}

/// The whole model.
pub(super) fn decoder(config: &Config<'_>, r: &mut Recorder, defaults: Defaults) -> Result<Value> {
    let Defaults { eps, rotating, theta } = defaults;
    let d = Decoder::new(config, eps)?;
    let gguf = config.format() == Format::Gguf;
    let rotary_dim = blocks::rotary_dim(config, d.head_dim, rotating)?;
    let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, theta)?;
    // GGUF has no key for it, and multimodal models do not have it whatever they say.
    let text_part = config.architecture().starts_with("glm4v");
    let qk_norm =
        if !text_part && config.flag("use_qk_norm", gguf && r.has("model.layers.0.self_attn.q_norm"))? {
            QkNorm::PerHead
        } else {
            QkNorm::None
        };
    let kind = AttentionKind { qk_norm, clip_qkv: None, window: None, rope };
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };
    let dense = config.count("first_k_dense_replace")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if layer < dense {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    let logits = blocks::head(r, config, x, table, d.eps)?;
    r.draft(d.layers, |r, layer| {
        let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, theta)?;
        let (x, table) = draft::input(r, &d, layer)?;
        let x = blocks::attention(r, &d, layer, x, &AttentionKind { rope, ..kind })?;
        let x = blocks::moe(r, &d, layer, x, &moe)?;
        draft::head(r, config, &d, layer, x, table)
    })?;
    Ok(logits)
}
