//! Text part of Qwen3-VL-MoE (30B-A3B, 235B-A22B). As Qwen3-MoE with weights of experts that are always normalised;
//! published checkpoints store the matrices of experts with columns as rows. The tower that reads pictures is in
//! [`super::vision`].
//!
//! Multimodal rotary embedding: pairs of channels rotate by time, row and column in turn, the last ones by time alone. Text
//! has the same position on all three.
//!
//! Source: transformers `modeling_qwen3_vl_moe.py`; GGUF architecture `qwen3vlmoe`.

use moeflux_compute::graph::{Activation, ExpertSetId, RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3-VL-MoE",
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    gguf_architectures: &["qwen3vlmoe"],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_key_value_heads", DefaultValue::Count(16)),
    ("num_experts", DefaultValue::Count(60)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("intermediate_size", DefaultValue::Count(5632)),
    ("moe_intermediate_size", DefaultValue::Count(1408)),
    ("max_position_embeddings", DefaultValue::Count(128_000)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    // mlx-lm takes the text model for a Qwen3-MoE, whose key counts.
    let normalised = config.format() != Format::Mlx || config.flag("norm_topk_prob", true)?;
    decoder(config, r, (5e5, normalised), Recorder::either_experts)
}

/// Finds the experts of a layer: how many there are, the columns that they take, their names.
type Declare = fn(&mut Recorder, usize, usize, usize, &ExpertNames) -> Result<ExpertSetId>;

/// The whole model: `theta` is the default base of its rotation; whether weights of experts are normalised; `declare` finds
/// these.
pub(super) fn decoder(
    config: &Config<'_>,
    r: &mut Recorder,
    (theta, normalised): (f64, bool),
    declare: Declare,
) -> Result<Value> {
    let d = Decoder::new(config, 1e-6)?;
    let axes = rope::interleaved_axes(config, d.head_dim / 2, [24.0, 20.0, 20.0])?;
    let rope = blocks::rotation_of_axes(r, config, (d.head_dim, axes), RopeStyle::HalfSplit, theta)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, normalised),
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
        x = if dense.contains(&layer) || !(layer + 1).is_multiple_of(step) {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            r.graph.scope(format!("layers.{layer}.mlp"));
            let norm = format!("model.layers.{layer}.post_attention_layernorm");
            let h = r.rms_norm(x, &norm, 1, d.eps)?;
            let out = blocks::moe_from(r, layer, h, (&moe, [Activation::SwiGlu; 2]), |r| {
                declare(r, layer, experts, d.hidden_size, &moe.experts)
            })?;
            r.graph.add(x, out)?
        };
        x = r.with_pictures(layer, x);
    }
    blocks::head(r, config, x, table, d.eps)
}
