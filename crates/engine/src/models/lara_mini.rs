//! Lara Mini. Qwen3.5's gated delta rules, attention over a window with rotated heads and attention to everything without positions
//! by turns; Qwen3's norms of heads; softmax routing beside a shared expert without a gate.
//!
//! Source: transformers `modeling_lara_mini.py`; llama.cpp and mlx-lm do not have it. Published checkpoints have one tensor for all
//! that enters linear attention.

use moeflux_compute::graph::{HeadPairing, RopeStyle, Route, Value};

use super::blocks::attention::Heads;
use super::blocks::hybrid::{self, Linear, OutputGate};
use super::blocks::{self, Decoder, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Lara Mini",
    model_types: &["lara_mini"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_tensors: &[("linear_attn.norm", "linear_attn.out_norm")],
        published: &["linear_attn.in_proj.weight"],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(1024)),
    ("moe_intermediate_size", DefaultValue::Count(512)),
    ("shared_expert_intermediate_size", DefaultValue::Count(512)),
    ("num_hidden_layers", DefaultValue::Count(34)),
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(128)),
    ("linear_num_key_heads", DefaultValue::Count(8)),
    ("linear_num_value_heads", DefaultValue::Count(16)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("sliding_window", DefaultValue::Count(512)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
];

/// How a layer mixes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A gated delta rule.
    Linear,
    /// Attention over a window.
    Sliding,
    /// Attention to everything.
    Full,
}

/// The kinds of layers.
fn kinds(config: &Config<'_>, layers: usize) -> Result<Vec<Kind>> {
    let Some(listed) = config.layer_kinds("layer_types")? else {
        let published = [Kind::Linear, Kind::Sliding, Kind::Linear, Kind::Full, Kind::Sliding];
        return Ok(published.into_iter().cycle().take(layers).collect());
    };
    let kind = |name: &String| match name.as_str() {
        "linear_attention" => Some(Kind::Linear),
        "sliding_attention" => Some(Kind::Sliding),
        "full_attention" => Some(Kind::Full),
        _ => None,
    };
    let found: Option<Vec<Kind>> = listed.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        let names = "linear_attention, sliding_attention or full_attention";
        config.unsupported("layer_types", &format!("{names} for each of {layers} layers"))
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let kinds = kinds(config, d.layers)?;
    let linear = Linear::new(config, HeadPairing::Grouped, OutputGate::Silu)?;
    let full = Heads { norm: Some(d.eps), ..Heads::new(config, d.hidden_size, None)? };
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let window = config.positions("sliding_window")?;
    let window = window.ok_or_else(|| config.unsupported("sliding_window", "a number of positions"))?;
    let sliding = Heads { window: Some(window), rope: Some(rope), ..full };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: config.size("shared_expert_intermediate_size")?,
            gate: None,
        }),
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, kind) in kinds.into_iter().enumerate() {
        let module = if kind == Kind::Linear { "linear_attn" } else { "self_attn" };
        r.graph.scope(format!("layers.{layer}.{module}"));
        let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
        let mixed = match kind {
            Kind::Linear => hybrid::linear_attention(r, &d, layer, h, &linear)?,
            Kind::Sliding => sliding.mix(r, layer, h)?,
            Kind::Full => full.mix(r, layer, h)?,
        };
        x = r.graph.add(x, mixed)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
