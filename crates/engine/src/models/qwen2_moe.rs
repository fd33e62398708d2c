//! Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B. Biases on q, k and v; softmax routing, by default without normalisation of the
//! chosen weights; a shared expert scaled by a sigmoid gate; some layers may be dense.
//!
//! Source: transformers `modeling_qwen2_moe.py`; GGUF architecture `qwen2moe`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen1.5-MoE, Qwen2-MoE",
    model_types: &["qwen2_moe"],
    gguf_architectures: &["qwen2moe"],
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
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

/// The window of each layer: where windows are used at all, of every second one of the first.
fn windows(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    if config.flag("use_sliding_window", false)? {
        let last = config.count("max_window_layers")?.unwrap_or(28);
        return blocks::layer_windows(config, layers, Some(4096), |layer| {
            layer.is_multiple_of(2) && layer < last
        });
    }
    let kinds = config.layer_kinds("layer_types")?.unwrap_or_default();
    match kinds.iter().all(|kind| kind == "full_attention") {
        true => Ok(vec![None; layers]),
        false => Err(config.unsupported("layer_types", "full_attention without use_sliding_window")),
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let windows = windows(config, d.layers)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", false)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: config.optional_size("shared_expert_intermediate_size")?.unwrap_or(5632),
            gate: Some("mlp.shared_expert_gate"),
        }),
    };
    let dense = config.sizes("mlp_only_layers")?;
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, window) in windows.into_iter().enumerate() {
        let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window, rope };
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if dense.contains(&layer) || !(layer + 1).is_multiple_of(step) {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
