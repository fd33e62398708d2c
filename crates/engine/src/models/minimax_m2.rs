//! MiniMax-M2. Query and key norms over whole vectors; part of each head rotates; sigmoid routing with a correction
//! bias whose chosen weights are always normalised.
//!
//! Source: transformers `modeling_minimax_m2.py`; GGUF architecture `minimax-m2`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "MiniMax-M2",
    model_types: &["minimax_m2"],
    gguf_architectures: &["minimax-m2"],
    hidden_act: SILU,
    names: &Names { other_keys: &[("num_nextn_predict_layers", "num_mtp_modules")], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(48)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(196_608)),
];

/// Weights are always normalised, and never scaled, whatever a configuration says.
fn route(config: &Config<'_>) -> Result<Route> {
    let route = blocks::sigmoid_route(config)?;
    match config.format() {
        Format::Gguf => Ok(route),
        _ => Ok(Route { renormalize: true, scale: 1.0, groups: None, ..route }),
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    // Published configurations have a number of channels, which comes last.
    let channels = config.optional_size("rotary_dim")?.unwrap_or(d.head_dim);
    let rotary_dim = blocks::rotary_dim(config, d.head_dim, channels as f64 / d.head_dim as f64)?;
    let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 5e6)?;
    let kind = AttentionKind { qk_norm: QkNorm::Whole, clip_qkv: None, window: None, rope };
    // The module's name on the hub; transformers 5 saves it as `mlp`.
    let hub = r.has("model.layers.0.block_sparse_moe.gate");
    let moe = Moe {
        route: route(config)?,
        router: if hub { "block_sparse_moe.gate" } else { "mlp.gate" },
        correction_bias: Some(if hub { "block_sparse_moe" } else { "mlp" }),
        experts: ExpertNames {
            module: if hub { "block_sparse_moe.experts" } else { "mlp.experts" },
            projections: ["w1", "w3", "w2"],
        },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
