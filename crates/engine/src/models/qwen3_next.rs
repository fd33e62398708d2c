//! Qwen3-Next (80B-A3B): three layers of linear attention to one of gated full attention, 512 experts.
//!
//! Source: transformers `modeling_qwen3_next.py`; GGUF architecture `qwen3next`, whose converter takes the projections
//! apart but keeps the order of value heads.

use moeflux_compute::graph::{HeadPairing, Value};

use super::blocks::hybrid::{self, Hybrid};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3-Next",
    model_types: &["qwen3_next"],
    gguf_architectures: &["qwen3next"],
    hidden_act: SILU,
    names: &hybrid::NAMES,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_key_value_heads", DefaultValue::Count(2)),
    ("head_dim", DefaultValue::Count(256)),
    ("num_experts", DefaultValue::Count(512)),
    ("num_experts_per_tok", DefaultValue::Count(10)),
    ("intermediate_size", DefaultValue::Count(5632)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let renormalize = config.flag("norm_topk_prob", true)?;
    hybrid::decoder(
        config,
        r,
        &Hybrid { gguf_pairing: HeadPairing::Grouped, renormalize, mrope_section: None },
    )
}
