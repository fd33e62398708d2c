//! DeepSeek-V2, V2.5 and V2-Lite. As DeepSeek-V3, but softmax routing without a bias, groups ranked by their best
//! expert, and chosen weights that are never normalised.
//!
//! Source: transformers `modeling_deepseek_v2.py`, which does not read `norm_topk_prob` (false in every release). GGUF
//! architecture `deepseek2` is DeepSeek-V3's entry, which comes here for softmax scores.

use moeflux_compute::graph::{GroupRank, RopeStyle, Route, Value};

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
    name: "DeepSeek-V2, V2-Lite",
    model_types: &["deepseek_v2"],
    gguf_architectures: &["deepseek2"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[latent::GGUF_TENSORS], gguf_keys: &[latent::GGUF_KEYS], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(64)),
    ("intermediate_size", DefaultValue::Count(11008)),
    ("moe_intermediate_size", DefaultValue::Count(1407)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

pub(super) fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    let limited = match config.word("topk_method")?.as_deref() {
        None => gguf,
        Some("greedy") => false,
        Some("group_limited_greedy") => true,
        Some(_) => return Err(config.unsupported("topk_method", "greedy or group_limited_greedy")),
    };
    let groups = if limited { blocks::groups(config, GroupRank::Best, (1, 1))? } else { None };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let renormalize = gguf && config.flag("norm_topk_prob", false)?;
    let route = Route {
        groups,
        scale: config.magnitude("routed_scaling_factor")?.filter(|s| *s != 0.0).unwrap_or(1.0) as f32,
        ..Route::softmax(experts, top_k, renormalize)
    };
    let shared_experts = if gguf { 0 } else { 2 };
    let defaults = Defaults {
        eps: 1e-6,
        dense_layers: 0,
        shared_experts,
        style: RopeStyle::Interleaved,
        growth: Growth::OfGguf,
    };
    deepseek_v3::decoder(config, r, route, &defaults)
}
