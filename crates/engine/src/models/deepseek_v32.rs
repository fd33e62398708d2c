//! DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention sees the `index_topk` tokens that an indexer chooses for each query.
//! Contexts of no more tokens are recorded without the indexer, since it chooses all of them.
//!
//! Source: transformers `modeling_deepseek_v32.py`, `modeling_glm_moe_dsa.py`; GGUF architectures `deepseek32`,
//! `glm-dsa`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks;
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v3::{self, Choice, Defaults};
use super::indexer::{self, Indexer};
use super::latent::{self, Growth};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V3.2, GLM-5",
    model_types: &["deepseek_v32", "glm_moe_dsa"],
    gguf_architectures: &["deepseek32", "glm-dsa"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[latent::GGUF_TENSORS, indexer::GGUF_TENSORS],
        gguf_keys: &[latent::GGUF_KEYS, indexer::GGUF_KEYS],
        ..Names::COMMON
    },
    record,
};

/// Defaults of DeepSeek-V3.2.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("n_group", DefaultValue::Count(8)),
    ("topk_group", DefaultValue::Count(4)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("intermediate_size", DefaultValue::Count(18432)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(163_840)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

/// Defaults of GLM-5.
const GLM_DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("rms_norm_eps", DefaultValue::Number(1e-5)),
    ("max_position_embeddings", DefaultValue::Count(202_752)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(2048)),
    ("qk_nope_head_dim", DefaultValue::Count(192)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(256)),
];

/// Epsilon of the norm of the index's keys.
const KEY_EPS: f32 = 1e-6;

/// Whether the model is a GLM.
fn is_glm(config: &Config<'_>) -> bool {
    ["glm_moe_dsa", "glm-dsa"].contains(&config.architecture())
}

/// What chooses tokens; nothing where contexts have no more than all queries see.
fn choice(config: &Config<'_>, r: &mut Recorder) -> Result<Option<Choice>> {
    let key = "index_topk";
    let seen = config.positions(key)?.unwrap_or(2048);
    let layers = blocks::layers(config)?;
    let chooses = (0..layers).any(|layer| r.has(&format!("model.layers.{layer}.self_attn.indexer.wk")));
    if !chooses || config.context().is_some_and(|positions| positions <= seen) {
        blocks::limit_positions(r, config, key)?;
        return Ok(None);
    }
    let glm = is_glm(config);
    let own = match (glm, config.format()) {
        (false, _) => vec![true; layers],
        (true, Format::Gguf) => indexer::layers_with_indexer(config, layers, vec![true; layers])?,
        (true, _) => indexer::layers_with_indexer(config, layers, indexer::pattern(config, layers)?)?,
    };
    let indexer = Indexer::new(config, if glm { 32 } else { 64 }, KEY_EPS)?;
    let style = if glm { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    Ok(Some(Choice { indexer, style, own }))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(if is_glm(config) { GLM_DEFAULTS } else { DEFAULTS });
    let choice = choice(config, r)?;
    let gguf = config.format() == Format::Gguf;
    // GGUF files leave it out where it is false.
    let renormalize = config.flag("norm_topk_prob", !gguf)?;
    let route = Route { renormalize, ..blocks::sigmoid_route(config)? };
    let dense_layers = if gguf { 0 } else { 3 };
    let defaults = Defaults {
        eps: 1e-6,
        dense_layers,
        shared_experts: 1,
        style: RopeStyle::Interleaved,
        growth: Growth::OfGguf,
    };
    deepseek_v3::decoder_over(config, r, route, &defaults, choice)
}
