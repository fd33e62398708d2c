//! Sarvam-105B. DeepSeek-V3's latent attention and routing, without a latent of queries and without groups of experts.
//!
//! Source: transformers `configuration_sarvam_mla.py`, whose model is `modeling_deepseek_v3.py`. Published configurations
//! have a `head_dim` and a `q_head_dim` that nothing here is made of.

use moeflux_compute::graph::Value;

use super::blocks;
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v3::{self, Defaults};
use super::latent::Growth;
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Sarvam-105B",
    model_types: &["sarvam_mla"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[
            ("n_shared_experts", "num_shared_experts"),
            ("num_nextn_predict_layers", "num_mtp_layers"),
        ],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("intermediate_size", DefaultValue::Count(16384)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let route = blocks::sigmoid_route(config)?;
    let style = deepseek_v3::rope_style(config)?;
    let defaults = Defaults { eps: 1e-6, dense_layers: 1, shared_experts: 1, style, growth: Growth::OfGguf };
    deepseek_v3::decoder(config, r, route, &defaults)
}
