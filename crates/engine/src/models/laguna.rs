//! Poolside Laguna. Attention whose result is multiplied by the softplus of gates, with as many heads as each layer has, and
//! a rotation for layers that see a window and one for those that see everything; sigmoid routing with a bias for choosing,
//! of logits that may be softly capped; a shared expert.
//!
//! Source: transformers `modeling_laguna.py`; GGUF architecture `laguna`, whose files say by the gates' width what gates
//! multiply; mlx-lm's `laguna.py`.

use moeflux_compute::graph::{Activation, Gate, Precision, RopeStyle, Route, Score, Value};
use serde_json::json;

use super::blocks::attention::{Heads, MixedGate};
use super::blocks::{self, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Laguna",
    model_types: &["laguna"],
    gguf_architectures: &["laguna"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[&[("self_attn.g_proj", "attn_gate")]],
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("routed_scaling_factor", "moe_routed_scaling_factor")],
        other_tensors: OTHER_TENSORS,
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("slides", "attention.sliding_window_pattern"),
    ("sliding_rope_theta", "rope.freq_base_swa"),
    ("sliding_rotary_dim", "rope.dimension_count_swa"),
];

/// Names of published checkpoints and of mlx-lm's.
const OTHER_TENSORS: NameMap = &[
    ("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),
    ("mlp.gate", "mlp.gate.proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj"),
    ("mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
    ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(8192)),
    ("moe_intermediate_size", DefaultValue::Count(512)),
    ("shared_expert_intermediate_size", DefaultValue::Count(512)),
    ("num_hidden_layers", DefaultValue::Count(40)),
    ("num_attention_heads", DefaultValue::Count(48)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("sliding_window", DefaultValue::Count(512)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// Query heads of each layer.
fn heads(config: &Config<'_>, layers: usize) -> Result<Vec<usize>> {
    let key = match config.format() {
        Format::Gguf => "num_attention_heads",
        _ => "num_attention_heads_per_layer",
    };
    match config.per_layer(key, layers)? {
        Some(heads) if heads.contains(&0) => Err(config.unsupported(key, "at least 1 head a layer")),
        Some(heads) => Ok(heads),
        None => Ok(vec![config.size("num_attention_heads")?; layers]),
    }
}

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match config.words("layer_types")? {
        _ if config.format() == Format::Gguf => blocks::gguf_slides(config, "slides", layers, (4, true)),
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers),
        None => Ok(vec![false; layers]),
    }
}

/// Adds the rotation of layers of this kind to the graph.
fn rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<usize> {
    let style = RopeStyle::HalfSplit;
    if config.format() == Format::Gguf {
        let dim = blocks::rotary_dim(config, head_dim, 1.0)?;
        if !slides {
            return blocks::rotation(r, config, dim, style, 1e4);
        }
        let theta = config.number("sliding_rope_theta")?.or(config.number("rope_theta")?).unwrap_or(1e4);
        let own = config.optional_size("sliding_rotary_dim")?.unwrap_or(dim);
        if own % 2 != 0 || own > head_dim {
            let expected = format!("an even number of the {head_dim} channels of a head");
            return Err(config.unsupported("sliding_rotary_dim", &expected));
        }
        return Ok(r.graph.rotation(rope::plain(config, own, style, theta)?));
    }
    let name = if slides { "sliding_attention" } else { "full_attention" };
    let own = config.with_rope(name)?;
    let own = own.ok_or_else(|| config.unsupported("rope_parameters", &format!("parameters of {name}")))?;
    if own.rope_number("rope_theta")?.is_none() {
        return Err(own.unsupported("rope_theta", "a number"));
    }
    let dim = blocks::rotary_dim(&own, head_dim, 1.0)?;
    blocks::rotation(r, &own, dim, style, 1e4)
}

/// What gates multiply: as the configuration says, or in GGUF files as wide as they are in `layer`.
fn gate(r: &Recorder, config: &Config<'_>, layer: usize, heads: usize) -> Result<Option<MixedGate>> {
    let softplus = |by_head| MixedGate { module: "g_proj", by_head, function: Gate::Softplus, bias: None };
    let word = config.read("gating", "true, false or a word", |value| {
        value
            .as_bool()
            .map(|on| on.then(|| "per-head".to_owned()))
            .or(value.as_str().map(|word| Some(word.into())))
    })?;
    let by_head = match config.format() {
        Format::Gguf => {
            r.rows(&format!("model.layers.{layer}.self_attn.g_proj"))?.is_none_or(|rows| rows == heads)
        }
        // mlx-lm has gates for heads only, or none.
        Format::Mlx if word == Some(None) => return Ok(None),
        Format::Mlx => true,
        Format::HuggingFace => hub_gate(r, config, layer, heads, word)?,
    };
    Ok(Some(softplus(by_head)))
}

/// Whether a Hugging Face configuration has a gate for each head, rather than for each channel, as the weights must say too.
fn hub_gate(
    r: &Recorder,
    config: &Config<'_>,
    layer: usize,
    heads: usize,
    word: Option<Option<String>>,
) -> Result<bool> {
    let by_head = match word.unwrap_or(Some("per-head".into())).as_deref() {
        Some("per-head") => true,
        Some("per-element") => false,
        _ => return Err(config.unsupported("gating", "true, per-head or per-element")),
    };
    let all = heads * config.size("head_dim")?;
    let other = if by_head { all } else { heads };
    match r.rows(&format!("model.layers.{layer}.self_attn.g_proj"))? {
        Some(rows) if rows == other && heads != all => {
            Err(config.unsupported("gating", &format!("what layer {layer} has {rows} gates for")))
        }
        _ => Ok(by_head),
    }
}

/// The router, the experts and the one that every token goes through.
fn moe(config: &Config<'_>) -> Result<Moe> {
    // llama.cpp's number for sigmoid.
    if config.format() == Format::Gguf && config.count("expert_gating_func")?.unwrap_or(2) != 2 {
        return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
    }
    if config.flag("moe_apply_router_weight_on_input", false)? {
        return Err(config.unsupported("moe_apply_router_weight_on_input", "false"));
    }
    let score = match config.word("moe_router_score_func")?.as_deref() {
        None | Some("sigmoid") => Score::Sigmoid,
        Some("sqrtsoftplus") if config.format() == Format::Mlx => Score::SqrtSoftplus,
        Some(_) => return Err(config.unsupported("moe_router_score_func", "sigmoid")),
    };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let renormalize = config.format() != Format::Gguf || config.flag("norm_topk_prob", false)?;
    let width = config.size("shared_expert_intermediate_size")?;
    Ok(Moe {
        route: Route {
            score,
            scale: config.magnitude("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            ..Route::softmax(experts, top_k, renormalize)
        },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert { module: "mlp.shared_experts", width, gate: None }),
    })
}

/// The routed feed-forward of normed h; the router's logits are softly capped if there is a cap.
fn routed(r: &mut Recorder, layer: usize, h: Value, moe: &Moe, cap: Option<f32>) -> Result<Value> {
    let Some(cap) = cap else { return blocks::moe_of(r, layer, h, moe) };
    let router = format!("model.layers.{layer}.{}", moe.router);
    let weight = r.matrix(&router, Some(moe.route.experts), h.width())?;
    let logits = r.graph.capped_linear(h, weight, None, Precision::F32, cap)?;
    let experts = |r: &mut Recorder| r.experts(layer, moe.route.experts, h.width(), &moe.experts);
    blocks::moe_by(r, layer, (h, logits), (moe, [Activation::SwiGlu; 2]), experts)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let rope = json!({
        "full_attention": { "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0 },
    });
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&rope).with_rope_sets_only();
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let (head_dim, kv_heads) = (config.size("head_dim")?, config.size("num_key_value_heads")?);
    let window = config.positions("sliding_window")?;
    let gguf = config.format() == Format::Gguf;
    let slides = if gguf && window.is_none() { vec![false; layers] } else { slides(config, layers)? };
    let (moe, dense) = (moe(config)?, blocks::dense_layers(config, layers, usize::from(!gguf))?);
    let cap =
        config.magnitude("moe_router_logit_softcapping")?.filter(|cap| *cap > 0.0).map(|cap| cap as f32);
    let mut ropes = [None; 2];
    for slides in &slides {
        let rope = &mut ropes[usize::from(*slides)];
        if rope.is_none() {
            *rope = Some(rotation(r, config, *slides, head_dim)?);
        }
    }

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, heads) in heads(config, layers)?.into_iter().enumerate() {
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.unsupported("num_key_value_heads", &format!("a divisor of {heads} heads")));
        }
        let base = format!("model.layers.{layer}");
        let norm = |r: &mut Recorder, x, name: &str| r.rms_norm(x, &format!("{base}.{name}"), 1, eps);
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = norm(r, x, "input_layernorm")?;
        let of_layer = Heads {
            heads,
            kv_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
            window: window.filter(|_| slides[layer]),
            rope: ropes[usize::from(slides[layer])],
            norm: Some(eps),
            gate: gate(r, config, layer, heads)?,
            temperature: None,
        };
        let out = of_layer.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = norm(r, x, "post_attention_layernorm")?;
        let out = if dense[layer] {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            routed(r, layer, h, &moe, cap)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
