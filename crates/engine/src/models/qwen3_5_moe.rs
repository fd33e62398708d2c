//! Qwen3.5 and Qwen3.6 MoE (35B-A3B to 397B-A17B), and the text part of their multimodal checkpoints. As Qwen3-Next
//! with separate projections of linear attention; expert weights are always normalised.
//!
//! Multimodal rotary embedding is that of Qwen3-VL, over the channels that rotate. The tower that reads pictures is in
//! [`super::vision`].
//!
//! Source: transformers `modeling_qwen3_5_moe.py`; GGUF architecture `qwen35moe`, whose converter puts value heads in
//! tiled order: head h uses key head h mod key_heads.

use moeflux_compute::graph::{HeadPairing, Value};

use super::blocks::hybrid::{self, Hybrid};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3.5 MoE, Qwen3.6 MoE",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf_architectures: &["qwen35moe"],
    hidden_act: SILU,
    names: &Names { gguf_orders: hybrid::TILED, ..hybrid::NAMES },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_key_value_heads", DefaultValue::Count(2)),
    ("head_dim", DefaultValue::Count(256)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    hybrid::decoder(
        config,
        r,
        &Hybrid {
            gguf_pairing: HeadPairing::Tiled,
            renormalize: true,
            mrope_section: Some([11.0, 11.0, 10.0]),
        },
    )
}
