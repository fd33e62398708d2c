//! DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention sees the `index_topk` tokens that an indexer chooses for each query.
//! Contexts of no more tokens are recorded without the indexer, since it chooses all of them.
//!
//! Source: transformers `modeling_deepseek_v32.py`, `modeling_glm_moe_dsa.py`; GGUF architectures `deepseek32`,
//! `glm-dsa`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::Family;
use super::blocks;
use super::config::Config;
use super::deepseek_v3::{self, Choice, Defaults};
use super::indexer::{self, Indexer};
use super::recorder::Recorder;
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V3.2, GLM-5",
    model_types: &["deepseek_v32", "glm_moe_dsa"],
    gguf_architectures: &["deepseek32", "glm-dsa"],
    record,
};

/// Epsilon of the norm of the index's keys.
const KEY_EPS: f32 = 1e-6;

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
    let glm = ["glm_moe_dsa", "glm-dsa"].contains(&config.architecture());
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
    let choice = choice(config, r)?;
    let gguf = config.format() == Format::Gguf;
    // GGUF files leave it out where it is false.
    let renormalize = config.flag("norm_topk_prob", !gguf)?;
    let route = Route { renormalize, ..blocks::sigmoid_route(config)? };
    let dense_layers = if gguf { 0 } else { 3 };
    let defaults =
        Defaults { eps: 1e-6, dense_layers, shared_experts: 1, style: RopeStyle::Interleaved, growth: None };
    deepseek_v3::decoder_over(config, r, route, &defaults, choice)
}
