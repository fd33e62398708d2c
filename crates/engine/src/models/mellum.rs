//! Mellum 2. Qwen3-MoE's blocks, with a rotation of its own for layers that see a window and for those that see everything;
//! some layers may be dense.
//!
//! Source: transformers `modeling_mellum.py`; GGUF architecture `mellum`, which has no dense layers, and scales the rotation of
//! layers that see everything only.

use moeflux_compute::graph::{RopeStyle, Route, Value};
use serde_json::json;

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Mellum 2",
    model_types: &["mellum"],
    gguf_architectures: &["mellum"],
    hidden_act: SILU,
    names: &Names { gguf_keys: &[GGUF_KEYS], ..Names::COMMON },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap =
    &[("slides", "attention.sliding_window_pattern"), ("sliding_rope_theta", "rope.freq_base_swa")];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2304)),
    ("intermediate_size", DefaultValue::Count(7168)),
    ("moe_intermediate_size", DefaultValue::Count(896)),
    ("num_hidden_layers", DefaultValue::Count(28)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("sliding_window", DefaultValue::Count(1024)),
    ("max_position_embeddings", DefaultValue::Count(131072)),
];

/// Adds the rotation of layers of this kind to the graph.
fn rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<usize> {
    let style = RopeStyle::HalfSplit;
    if config.format() == Format::Gguf {
        if !slides {
            return blocks::rotation(r, config, head_dim, style, 1e4);
        }
        let theta = config.number("sliding_rope_theta")?.or(config.number("rope_theta")?).unwrap_or(1e4);
        return Ok(r.graph.rotation(rope::plain(config, head_dim, style, theta)?));
    }
    let name = if slides { "sliding_attention" } else { "full_attention" };
    let own = config.with_rope(name)?;
    let own = own.ok_or_else(|| config.unsupported("rope_parameters", &format!("parameters of {name}")))?;
    if own.rope_number("rope_theta")?.is_none() {
        return Err(own.unsupported("rope_theta", "a number"));
    }
    if own.rope_number("partial_rotary_factor")?.is_some_and(|part| part != 1.0) {
        return Err(own.unsupported("partial_rotary_factor", "1"));
    }
    blocks::rotation(r, &own, head_dim, style, 1e4)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let rope = json!({
        "full_attention": { "rope_type": "default", "rope_theta": 5e5 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
    });
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&rope).with_rope_sets_only();
    let d = Decoder::new(config, 1e-6)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };
    let window = config.positions("sliding_window")?;
    let slides = match config.words("layer_types")? {
        _ if config.format() == Format::Gguf && window.is_none() => vec![false; d.layers],
        _ if config.format() == Format::Gguf => blocks::gguf_slides(config, "slides", d.layers, (4, false))?,
        Some(kinds) => blocks::kinds_slide(config, &kinds, d.layers)?,
        None => vec![false; d.layers],
    };
    let dense = blocks::dense_layers(config, d.layers, 0)?;
    let mut ropes = [None; 2];
    for slides in &slides {
        let rope = &mut ropes[usize::from(*slides)];
        if rope.is_none() {
            *rope = Some(rotation(r, config, *slides, d.head_dim)?);
        }
    }

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, (slides, dense)) in slides.into_iter().zip(dense).enumerate() {
        let rope = ropes[usize::from(slides)].unwrap_or_default();
        let window = window.filter(|_| slides);
        let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window, rope };
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if dense {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
