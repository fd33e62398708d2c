//! Hunyuan 3 (Hy3). Per-head query and key norms; sigmoid routing with a correction bias, always normalised and scaled;
//! a dense first layer; shared experts.
//!
//! Source: transformers `modeling_hy_v3.py`; GGUF architecture `hy_v3`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Hy3",
    model_types: &["hy_v3"],
    gguf_architectures: &["hy_v3"],
    hidden_act: SILU,
    names: &Names { other_tensors: &[("mlp.e_score_correction_bias", "mlp.expert_bias")], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(192)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(13312)),
    ("moe_intermediate_size", DefaultValue::Count(1536)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 11_158_840.0)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window: None, rope };
    let dense = match config.format() {
        // GGUF has no key for it.
        Format::Gguf => {
            (0..d.layers).map(|layer| !r.has(&format!("model.layers.{layer}.mlp.gate"))).collect()
        }
        _ => blocks::dense_layers(config, d.layers, 1)?,
    };
    // The modules' names on the hub; transformers 5 saves them otherwise.
    let first = dense.iter().position(|dense| !dense).unwrap_or(0);
    let hub = r.has(&format!("model.layers.{first}.mlp.router.gate"));
    let scale = match config.format() {
        Format::Gguf => config.number("routed_scaling_factor")?.unwrap_or(1.0),
        _ => config.number("router_scaling_factor")?.unwrap_or(2.826),
    };
    let moe = Moe {
        route: Route {
            renormalize: true,
            scale: scale as f32,
            groups: None,
            ..blocks::sigmoid_route(config)?
        },
        router: if hub { "mlp.router.gate" } else { "mlp.gate" },
        correction_bias: Some("mlp"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "num_shared_experts", 1)?.map(|shared| SharedExpert {
            module: if hub { "mlp.shared_mlp" } else { shared.module },
            ..shared
        }),
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, dense) in dense.into_iter().enumerate() {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = match dense {
            true => blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?,
            false => blocks::moe(r, &d, layer, x, &moe)?,
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
