//! Text part of the thinker of Qwen3-Omni (30B-A3B). As Qwen3-MoE, one level further down.
//!
//! Multimodal rotary embedding gives text the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_qwen3_omni_moe.py`. GGUF files of it have the architecture `qwen3vlmoe`.

use moeflux_compute::graph::Value;

use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU, qwen3_vl_moe};
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
    let normalised = config.flag("norm_topk_prob", true)?;
    qwen3_vl_moe::decoder(config, r, (1e6, normalised), Recorder::experts)
}
