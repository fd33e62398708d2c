//! dots.llm1. Per-head query and key norms; routing of DeepSeek-V3, by default without normalisation; dense first
//! layers; shared experts.
//!
//! Source: transformers `modeling_dots1.py`; GGUF architecture `dots1`.

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
    name: "dots.llm1",
    model_types: &["dots1"],
    gguf_architectures: &["dots1"],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(32)),
    ("intermediate_size", DefaultValue::Count(10944)),
    ("moe_intermediate_size", DefaultValue::Count(1408)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let sliding_from = config.count("max_window_layers")?.unwrap_or(62);
    let gguf = config.format() == Format::Gguf;
    let windows =
        blocks::layer_windows(config, d.layers, Some(4096), |layer| !gguf && layer >= sliding_from)?;
    let moe = Moe {
        route: Route { renormalize: config.flag("norm_topk_prob", false)?, ..blocks::sigmoid_route(config)? },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 0)?,
    };
    let dense = blocks::dense_layers(config, d.layers, 0)?;

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, (window, dense)) in windows.into_iter().zip(dense).enumerate() {
        let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window, rope };
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = match dense {
            true => blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?,
            false => blocks::moe(r, &d, layer, x, &moe)?,
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
