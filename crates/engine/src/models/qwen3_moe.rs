//! Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder. Per-head query and key norms; softmax routing over all
//! experts; some layers may be dense.
//!
//! Published models have no layer that drafts tokens; one that was trained for them is read as GLM-4.5's, with a dense
//! feed-forward where it has no router.
//!
//! Source: transformers `modeling_qwen3_moe.py`; GGUF architecture `qwen3moe`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, draft};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3-MoE",
    model_types: &["qwen3_moe"],
    gguf_architectures: &["qwen3moe"],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(6144)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let window =
        if config.flag("use_sliding_window", false)? { config.positions("sliding_window")? } else { None };
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(
            experts,
            top_k,
            // GGUF has no key for it: every released checkpoint normalises.
            config.flag("norm_topk_prob", config.format() == Format::Gguf)?,
        ),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };
    let dense = config.sizes("mlp_only_layers")?;
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if dense.contains(&layer) || (layer + 1) % step != 0 {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    let logits = blocks::head(r, config, x, table, d.eps)?;
    r.draft(d.layers, |r, layer| {
        let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
        let (x, table) = draft::input(r, &d, layer)?;
        let x = blocks::attention(r, &d, layer, x, &AttentionKind { rope, ..kind })?;
        let x = if r.has(&format!("model.layers.{layer}.mlp.gate")) {
            blocks::moe(r, &d, layer, x, &moe)?
        } else {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        };
        draft::head(r, config, &d, layer, x, table)
    })?;
    Ok(logits)
}
