//! Solar Open 100B. GLM-4.5's routing and shared experts in every layer, behind plain grouped-query attention.
//!
//! Source: transformers `modeling_solar_open.py`. llama.cpp runs it as `glm4moe`.

use moeflux_compute::graph::{RopeStyle, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{Names, POST_ATTENTION_NORM};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Solar Open",
    model_types: &["solar_open"],
    gguf_architectures: &["glm4moe"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[POST_ATTENTION_NORM], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("moe_intermediate_size", DefaultValue::Count(1280)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rotary_dim = blocks::rotary_dim(config, d.head_dim, 1.0)?;
    let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 1e6)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
