//! Text part of the thinker of Qwen3-Omni (30B-A3B). As Qwen3-MoE, one level further down.
//!
//! Multimodal rotary embedding gives text the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_qwen3_omni_moe.py`. GGUF files of it have the architecture `qwen3vlmoe`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3-Omni (text)",
    model_types: &["qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { prefixes: &["thinker.model.", "model."], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(18944)),
    ("moe_intermediate_size", DefaultValue::Count(768)),
    ("num_hidden_layers", DefaultValue::Count(28)),
    ("num_attention_heads", DefaultValue::Count(28)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e6)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?),
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
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
