//! DeepSeekMoE 16B, the first of its line. Plain attention; softmax routing whose weights are by default as they are; shared
//! experts; dense first layers.
//!
//! Source: mlx-lm `deepseek.py`, transformers does not have it; the model's own code normalises weights where `norm_topk_prob`
//! says so. GGUF architecture `deepseek`, whose queries and keys are permuted so that rotation works on interleaved pairs.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeekMoE",
    model_types: &["deepseek"],
    gguf_architectures: &["deepseek"],
    hidden_act: SILU,
    names: &Names { gguf_orders: PAIRED, ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("num_hidden_layers", DefaultValue::Count(30)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("intermediate_size", DefaultValue::Count(11_008)),
    ("moe_intermediate_size", DefaultValue::Count(1407)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

fn route(config: &Config<'_>) -> Result<Route> {
    if config.word("scoring_func")?.is_some_and(|word| word != "softmax") {
        return Err(config.unsupported("scoring_func", "softmax"));
    }
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    // Neither mlx-lm nor llama.cpp looks at it.
    let normalised = config.format() == Format::HuggingFace && config.flag("norm_topk_prob", false)?;
    let scale = match config.format() {
        Format::Gguf => config.magnitude("routed_scaling_factor")?.filter(|scale| *scale != 0.0),
        _ => None,
    };
    Ok(Route {
        scale: scale.unwrap_or(1.0) as f32,
        ..Route::softmax(experts, top_k, normalised && top_k > 1)
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let style = match config.format() {
        Format::Gguf => RopeStyle::Interleaved,
        _ => RopeStyle::HalfSplit,
    };
    let rope = blocks::rotation(r, config, d.head_dim, style, 1e4)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let moe = Moe {
        route: route(config)?,
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 0)?,
    };
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
    let every = config.optional_size("moe_layer_freq")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if layer < dense || !layer.is_multiple_of(every) {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
