//! Ling 3.0 (Bailing hybrid). Kimi Delta Attention without low-rank gates, and every few layers multi-head latent attention
//! whose heads are gated; DeepSeek-V3's routing.
//!
//! Source: transformers `modeling_bailing_hybrid.py`; published checkpoints have names of their own. mlx-lm
//! (`bailing_moe_v3.py`) has latent attention also in layers that fill no group. GGUF architecture `bailingmoe3`.

use moeflux_compute::graph::{Activation, Decay, RopeStyle, Value};

use super::blocks::delta::{self, KimiDelta};
use super::blocks::{self, Decoder, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::latent::{self, Latent, More};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, kimi_linear};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Ling 3.0",
    model_types: &["bailing_hybrid"],
    gguf_architectures: &["bailingmoe3"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[latent::GGUF_TENSORS, delta::GGUF_TENSORS, GGUF_TENSORS],
        gguf_keys: &[latent::GGUF_KEYS, delta::GGUF_KEYS, GGUF_KEYS],
        first_keys: kimi_linear::FIRST_KEYS,
        other_tensors: OTHER_TENSORS,
        top: &["word_embeddings", "embed_tokens"],
        renamed: &[("embed_tokens", "word_embeddings")],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files: gates of linear attention, and of the heads of the other.
const GGUF_TENSORS: NameMap =
    &[("self_attn.f_proj", "ssm_f_a"), ("self_attn.g_proj", "ssm_g_a"), ("self_attn.g_proj", "attn_gate")];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("kda_safe_gate", "kda.safe_gate"),
    ("kda_lower_bound", "kda.gate_lower_bound"),
    ("swiglu_limits", "swiglu_clamp_exp"),
    ("swiglu_limits_shared", "swiglu_clamp_shexp"),
];

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("self_attn.q_proj", "attention.q_proj"),
    ("self_attn.q_a_proj", "attention.q_a_proj"),
    ("self_attn.q_a_layernorm", "attention.q_a_layernorm"),
    ("self_attn.q_b_proj", "attention.q_b_proj"),
    ("self_attn.kv_a_proj_with_mqa", "attention.kv_a_proj_with_mqa"),
    ("self_attn.kv_a_layernorm", "attention.kv_a_layernorm"),
    ("self_attn.kv_b_proj", "attention.kv_b_proj"),
    ("self_attn.k_proj", "attention.k_proj"),
    ("self_attn.v_proj", "attention.v_proj"),
    ("self_attn.q_conv1d", "attention.q_conv1d"),
    ("self_attn.k_conv1d", "attention.k_conv1d"),
    ("self_attn.v_conv1d", "attention.v_conv1d"),
    ("self_attn.f_proj", "attention.f_proj"),
    ("self_attn.b_proj", "attention.b_proj"),
    ("self_attn.g_proj", "attention.g_proj"),
    ("self_attn.A_log", "attention.A_log"),
    ("self_attn.dt_bias", "attention.dt_bias"),
    ("self_attn.o_norm", "attention.o_norm"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.o_proj", "attention.o_proj"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2560)),
    ("intermediate_size", DefaultValue::Count(6144)),
    ("moe_intermediate_size", DefaultValue::Count(768)),
    ("num_hidden_layers", DefaultValue::Count(42)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(512)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("n_group", DefaultValue::Count(8)),
    ("topk_group", DefaultValue::Count(4)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
    ("rope_theta", DefaultValue::Number(6e6)),
    ("max_position_embeddings", DefaultValue::Count(262144)),
];

/// For each layer whether its attention is linear: as `layer_types` says, else all but the last one of each group.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return kimi_linear::gguf_linear_layers(config, layers);
    }
    let Some(kinds) = config.layer_kinds("layer_types")? else {
        let group = config.optional_size("layer_group_size")?.unwrap_or(6);
        let whole = match config.format() {
            Format::Mlx => layers / group * group,
            _ => layers,
        };
        return Ok((0..layers).map(|layer| layer < whole && (layer + 1) % group != 0).collect());
    };
    let known = ["linear_attention", "full_attention"];
    if kinds.len() != layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
        let expected = format!("linear_attention or full_attention for each of {layers} layers");
        return Err(config.unsupported("layer_types", &expected));
    }
    Ok(kinds.iter().map(|kind| kind == known[0]).collect())
}

/// How fast linear attention forgets.
fn decay(config: &Config<'_>) -> Result<Decay> {
    if !config.flag("kda_safe_gate", true)? {
        return Ok(Decay::Softplus);
    }
    // llama.cpp opens no file without.
    if config.format() == Format::Gguf && config.number("kda_lower_bound")?.is_none() {
        return Err(config.unsupported("kda_lower_bound", "a number"));
    }
    match config.number("kda_lower_bound")?.unwrap_or(-5.0) {
        bound if bound > 0.0 => Err(config.unsupported("kda_lower_bound", "a number that is not above 0")),
        bound => Ok(Decay::Bounded(bound as f32)),
    }
}

/// Heads of linear attention, their channels, and tokens that convolutions see. transformers writes them under names of their
/// own, and another width under `head_dim`.
fn linear_shape(config: &Config<'_>, d: &Decoder) -> Result<[usize; 3]> {
    if config.format() == Format::Gguf {
        return Ok([d.heads, config.size("linear_head_dim")?, config.size("linear_conv_kernel_dim")?]);
    }
    let kernel = config.optional_size("short_conv_kernel_size")?.unwrap_or(4);
    Ok([
        config.optional_size("linear_num_heads")?.unwrap_or(d.heads),
        config.optional_size("linear_head_dim")?.unwrap_or(d.head_dim),
        config.optional_size("linear_conv_kernel_dim")?.unwrap_or(kernel),
    ])
}

/// In which pairs channels rotate: in halves in GGUF files of models that see, which say how pairs are divided among axes.
fn rope_style(config: &Config<'_>) -> Result<RopeStyle> {
    let sections = match config.format() {
        Format::Gguf => config.sizes("mrope_section")?,
        _ => vec![],
    };
    let divided = sections.iter().any(|pairs| *pairs > 0);
    Ok(if divided { RopeStyle::HalfSplit } else { RopeStyle::Interleaved })
}

/// The activation of each layer, with the limits that GGUF files have under `key`; 0 is none.
fn activations(config: &Config<'_>, key: &str, layers: usize) -> Result<Vec<Activation>> {
    let limits = match config.format() {
        Format::Gguf => config.number_by_layer(key, layers)?,
        _ => None,
    };
    let activation = |limit: f64| {
        if limit > 1e-6 { Activation::CappedSwiGlu { limit: limit as f32 } } else { Activation::SwiGlu }
    };
    Ok(limits.unwrap_or_else(|| vec![0.0; layers]).into_iter().map(activation).collect())
}

/// DeepSeek-V3's routing with a shared expert.
fn moe(config: &Config<'_>) -> Result<Moe> {
    let gguf = config.format() == Format::Gguf;
    let own = if gguf { config.assuming("norm_topk_prob", false) } else { *config };
    // GGUF files that say no width say how many are as wide as a routed one.
    let width = if gguf { config.count("shared_expert_intermediate_size")? } else { None };
    let shared = match width.filter(|width| *width > 0) {
        Some(width) => Some(SharedExpert { module: "mlp.shared_experts", width, gate: None }),
        None => blocks::shared_experts(config, "n_shared_experts", 1)?,
    };
    Ok(Moe {
        route: blocks::sigmoid_route(&own)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared,
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let heads = config.size("num_attention_heads")?;
    let latent = Latent::new(config, r, heads, rope_style(config)?)?;
    let latent = latent.with(More { head_gate: Some("g_proj"), ..More::default() });
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.optional_size("head_dim")?.unwrap_or(128),
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32,
    };
    let linear = KimiDelta::full_rank(linear_shape(config, &d)?, decay(config)?, d.eps);
    let dense = blocks::dense_layers(config, d.layers, 2)?;
    let moe = moe(config)?;
    let routed = activations(config, "swiglu_limits", d.layers)?;
    let others = activations(config, "swiglu_limits_shared", d.layers)?;

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, is_linear) in linear_layers(config, d.layers)?.into_iter().enumerate() {
        x = if is_linear {
            r.graph.scope(format!("layers.{layer}.self_attn"));
            let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
            let out = linear.attention(r, layer, h)?;
            r.graph.add(x, out)?
        } else {
            latent::attention(r, &d, layer, x, &latent)?
        };
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let out = if dense[layer] {
            blocks::mlp(r, h, &format!("{base}.mlp"), config.size("intermediate_size")?, others[layer])?
        } else {
            blocks::moe_with(r, layer, h, &moe, [routed[layer], others[layer]])?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
