//! Mistral 4. DeepSeek-V3's blocks with softmax routing within the best groups of experts, no correction bias, and queries
//! that grow with their position.
//!
//! Source: transformers `modeling_mistral4.py`; published inside multimodal checkpoints. GGUF architecture `mistral4`.

use moeflux_compute::graph::{GroupRank, Route, Value};

use super::blocks;
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v3::{self, Defaults};
use super::latent::{self, Growth};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Mistral 4",
    model_types: &["mistral4"],
    gguf_architectures: &["mistral4"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[latent::GGUF_TENSORS], gguf_keys: &[latent::GGUF_KEYS], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(128)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
    ("kv_lora_rank", DefaultValue::Count(256)),
    ("q_lora_rank", DefaultValue::Count(1024)),
    ("qk_nope_head_dim", DefaultValue::Count(64)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

/// GGUF's number for softmax.
const GGUF_SOFTMAX: usize = 1;

/// The rotary parameters of the published models, which configurations without any mean.
fn published_rope() -> serde_json::Value {
    serde_json::json!({
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    if gguf && config.count("expert_gating_func")?.is_some_and(|function| function != GGUF_SOFTMAX) {
        return Err(config.unsupported("expert_gating_func", "1, softmax"));
    }
    let (experts, top_k) = blocks::expert_counts(config, Some(4))?;
    let route = Route {
        groups: blocks::groups(config, GroupRank::BestTwo, (1, 1))?,
        scale: config.magnitude("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", !gguf)?)
    };
    let published = published_rope();
    let config = &config.assuming_rope(&published);
    let style = deepseek_v3::rope_style(config)?;
    // llama.cpp's converter leaves out how queries grow: as published.
    let growth = if gguf { Growth::Published(0.1) } else { Growth::Configured };
    let defaults = Defaults { eps: 1e-6, dense_layers: 0, shared_experts: 1, style, growth };
    deepseek_v3::decoder(config, r, route, &defaults)
}
