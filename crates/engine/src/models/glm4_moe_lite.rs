//! GLM-4.7-Flash. DeepSeek-V3's latent attention with GLM-4.5's routing.
//!
//! Source: transformers `modeling_glm4_moe_lite.py`. llama.cpp runs it as `deepseek2`.

use moeflux_compute::graph::Value;

use super::Family;
use super::blocks;
use super::config::Config;
use super::deepseek_v3::{self, Defaults};
use super::recorder::Recorder;
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "GLM-4.7-Flash",
    model_types: &["glm4_moe_lite"],
    gguf_architectures: &["deepseek2"],
    record,
};

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let route = blocks::sigmoid_route(config)?;
    let style = deepseek_v3::rope_style(config)?;
    let defaults = Defaults { eps: 1e-5, dense_layers: 1, shared_experts: 1, style, growth: None };
    deepseek_v3::decoder(config, r, route, &defaults)
}
