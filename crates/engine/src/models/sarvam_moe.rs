//! Sarvam-30B. GLM-4.5's decoder with norms of queries and keys and heads that rotate whole, in checkpoints with Ling's names;
//! transformers saves it with GLM's.
//!
//! Source: transformers `configuration_sarvam_moe.py`, whose model is `modeling_glm4_moe.py`. llama.cpp runs it as
//! `bailingmoe2`; its converter takes the mean off the routers' biases, which changes no choice.

use moeflux_compute::graph::Value;

use super::config::{Config, DefaultValue, KeyDefaults};
use super::glm4_moe::{self, Defaults};
use super::names::Names;
use super::recorder::Recorder;
use super::{Family, SILU, bailing_moe};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Sarvam-30B",
    model_types: &["sarvam_moe"],
    gguf_architectures: &["bailingmoe2"],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[
            ("n_shared_experts", "num_shared_experts"),
            ("num_nextn_predict_layers", "num_mtp_layers"),
            ("scoring_func", "score_function"),
        ],
        ..*bailing_moe::FAMILY.names
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(64)),
    ("use_qk_norm", DefaultValue::Flag(true)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("intermediate_size", DefaultValue::Count(8192)),
    ("moe_intermediate_size", DefaultValue::Count(1024)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    glm4_moe::decoder(config, r, Defaults { eps: 1e-6, rotating: 1.0, theta: 8e6 })
}
