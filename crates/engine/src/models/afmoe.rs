//! Arcee Trinity (AFMoE). Norms before and after every block; attention whose result is gated, and which rotates in layers
//! with a window only; sigmoid routing with a bias for choosing; dense first layers; shared experts.
//!
//! Source: transformers `modeling_afmoe.py`; GGUF architecture `afmoe`, of whose layers every fourth sees everything.

use moeflux_compute::graph::{Activation, PositionScale, RopeStyle, Route, Score, Value};

use super::blocks::attention::{Heads, MixedGate};
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names, POST_ATTENTION_NORM};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Arcee Trinity (AFMoE)",
    model_types: &["afmoe"],
    gguf_architectures: &["afmoe"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS, POST_ATTENTION_NORM],
        gguf_keys: &[&[("sliding_rope_theta", "rope.freq_base_swa")]],
        other_keys: &[
            ("n_shared_experts", "num_shared_experts"),
            ("first_k_dense_replace", "num_dense_layers"),
            ("routed_scaling_factor", "route_scale"),
            ("norm_topk_prob", "route_norm"),
        ],
        other_tensors: &[("mlp.router.gate.e_score_correction_bias", "mlp.expert_bias")],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("pre_mlp_layernorm", "ffn_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("self_attn.gate_proj", "attn_gate"),
    ("mlp.router.gate", "ffn_gate_inp"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(6144)),
    ("moe_intermediate_size", DefaultValue::Count(1408)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(16)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("n_shared_experts", DefaultValue::Count(2)),
    ("first_k_dense_replace", DefaultValue::Count(1)),
    ("global_attn_every_n_layers", DefaultValue::Count(4)),
    ("sliding_window", DefaultValue::Count(1024)),
    ("max_position_embeddings", DefaultValue::Count(16384)),
];

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let every = |every: usize| (0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect();
    if config.format() == Format::Gguf {
        return Ok(every(4));
    }
    let Some(kinds) = config.words("layer_types")? else {
        return Ok(every(config.size("global_attn_every_n_layers")?));
    };
    blocks::kinds_slide(config, &kinds, layers)
}

/// The router, the experts and those that every token goes through.
fn moe(config: &Config<'_>) -> Result<Moe> {
    let gguf = config.format() == Format::Gguf;
    // llama.cpp's number for sigmoid.
    if gguf && config.count("expert_gating_func")?.unwrap_or(2) != 2 {
        return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
    }
    if config.word("score_func")?.is_some_and(|word| word != "sigmoid") {
        return Err(config.unsupported("score_func", "sigmoid"));
    }
    let renormalize = config.flag("norm_topk_prob", !gguf)?;
    if config.format() == Format::HuggingFace && !renormalize {
        return Err(config.unsupported("norm_topk_prob", "true"));
    }
    if config.count("n_group")?.unwrap_or(1) > 1 {
        return Err(config.unsupported("n_group", "1"));
    }
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    // mlx-lm's defaults are others.
    let (scale, shared) = if config.format() == Format::Mlx { (2.826, 1) } else { (1.0, 0) };
    Ok(Moe {
        route: Route {
            score: Score::Sigmoid,
            scale: config.magnitude("routed_scaling_factor")?.unwrap_or(scale) as f32,
            ..Route::softmax(experts, top_k, renormalize)
        },
        router: "mlp.router.gate",
        correction_bias: Some("mlp.router.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", shared)?,
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let heads = Heads {
        norm: Some(eps),
        gate: Some(MixedGate::sigmoid("gate_proj")),
        ..Heads::new(config, hidden_size, None)?
    };
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::HalfSplit, 1e4)?;
    if let Some(theta) = config.number("sliding_rope_theta")?
        && config.number("rope_theta")?.is_none_or(|own| own != theta)
    {
        return Err(config.unsupported("sliding_rope_theta", "that of all layers"));
    }
    let window = config.positions("sliding_window")?;
    let moe = moe(config)?;
    let dense = config.count("first_k_dense_replace")?;
    let dense = dense.unwrap_or(if config.format() == Format::Mlx { 2 } else { 0 });
    let scaled = match config.format() {
        Format::Gguf => true,
        Format::Mlx => config.flag("mup_enabled", true)?,
        Format::HuggingFace => config.flag("mup_enabled", false)?,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    if scaled {
        x = r.graph.position_scale(x, PositionScale::constant((hidden_size as f32).sqrt()));
    }
    for (layer, slides) in slides(config, layers)?.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        let norm = |r: &mut Recorder, x, name: &str| r.rms_norm(x, &format!("{base}.{name}"), 1, eps);
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = norm(r, x, "input_layernorm")?;
        let own = Heads { window: window.filter(|_| slides), rope: slides.then_some(rope), ..heads };
        let out = own.mix(r, layer, h)?;
        let out = norm(r, out, "post_attention_layernorm")?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = norm(r, x, "pre_mlp_layernorm")?;
        let out = if layer < dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        let out = norm(r, out, "post_mlp_layernorm")?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
