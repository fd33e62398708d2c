//! GLM-4.7-Flash. DeepSeek-V3's latent attention with GLM-4.5's routing.
//!
//! Source: transformers `modeling_glm4_moe_lite.py`. llama.cpp runs it as `deepseek2`.

use moeflux_compute::graph::Value;

use super::blocks;
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v3::{self, Defaults};
use super::latent::{self, Growth};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "GLM-4.7-Flash",
    model_types: &["glm4_moe_lite"],
    gguf_architectures: &["deepseek2"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[latent::GGUF_TENSORS], gguf_keys: &[latent::GGUF_KEYS], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(20)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("routed_scaling_factor", DefaultValue::Number(1.8)),
    ("intermediate_size", DefaultValue::Count(10240)),
    ("moe_intermediate_size", DefaultValue::Count(1536)),
    ("max_position_embeddings", DefaultValue::Count(202_752)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(768)),
    ("qk_nope_head_dim", DefaultValue::Count(192)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(256)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let route = blocks::sigmoid_route(config)?;
    let style = deepseek_v3::rope_style(config)?;
    let defaults = Defaults { eps: 1e-5, dense_layers: 1, shared_experts: 1, style, growth: Growth::OfGguf };
    deepseek_v3::decoder(config, r, route, &defaults)
}
