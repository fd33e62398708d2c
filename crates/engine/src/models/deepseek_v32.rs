//! DeepSeek-V3.2 and GLM-5, for contexts of at most `index_topk` tokens. Their attention is DeepSeek-V3's over the
//! `index_topk` keys that an indexer chooses for each query. Up to that many tokens it chooses all of them, so the
//! indexer is left out, and longer contexts are refused.
//!
//! Source: transformers `modeling_deepseek_v32.py`, `modeling_glm_moe_dsa.py`; GGUF architectures `deepseek32`,
//! `glm-dsa`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::Family;
use super::blocks;
use super::config::Config;
use super::deepseek_v3::{self, Defaults};
use super::recorder::Recorder;
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V3.2, GLM-5 (contexts up to `index_topk`)",
    model_types: &["deepseek_v32", "glm_moe_dsa"],
    gguf_architectures: &["deepseek32", "glm-dsa"],
    record,
};

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    blocks::limit_positions(r, config, "index_topk")?;
    let gguf = config.format() == Format::Gguf;
    // GGUF files leave it out where it is false.
    let renormalize = config.flag("norm_topk_prob", !gguf)?;
    let route = Route { renormalize, ..blocks::sigmoid_route(config)? };
    let dense_layers = if gguf { 0 } else { 3 };
    let defaults =
        Defaults { eps: 1e-6, dense_layers, shared_experts: 1, style: RopeStyle::Interleaved, growth: None };
    deepseek_v3::decoder(config, r, route, &defaults)
}
