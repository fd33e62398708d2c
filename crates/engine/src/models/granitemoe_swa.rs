//! Granite Swash. Granite 3 MoE with windows, sinks, and a rotation of its own for each layer, or none.
//!
//! Source: transformers `modeling_granitemoe_swa.py`. GGUF architecture `granite_swa`, whose layers have one rotation if
//! any, and whose shared expert has gate and up in one matrix.

use moeflux_compute::graph::Value;

use super::blocks;
use super::blocks::attention::Heads;
use super::config::Config;
use super::names::{NameMap, Names, PAIRED};
use super::recorder::Recorder;
use super::{Family, SILU, granitemoe, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Granite Swash",
    model_types: &["granitemoe_swa"],
    gguf_architectures: &["granite_swa"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("shared_expert_intermediate_size", "shared_intermediate_size")],
        other_tensors: granitemoe::OTHER_TENSORS,
        gguf_orders: PAIRED,
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("block_sparse_moe.router", "ffn_gate_inp"),
    ("shared_mlp.gate_up_proj", "ffn_up_shexp"),
    ("shared_mlp.down_proj", "ffn_down_shexp"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("embedding_multiplier", "embedding_scale"),
    ("attention_multiplier", "attention.scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("window_pattern", "attention.sliding_window_pattern"),
    ("rope_pattern", "attention.rope_pattern"),
];

/// For each layer whether it sees a window: as listed, else all but every fourth from the first on.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return blocks::flag_per_layer(config, "window_pattern", layers);
    }
    match config.words("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers),
        None => Ok((0..layers).map(|layer| layer % 4 != 0).collect()),
    }
}

/// The base of each layer's rotation, 0 for those that have no positions.
fn bases(config: &Config<'_>, layers: usize) -> Result<Vec<f64>> {
    let base = config.number("rope_theta")?.unwrap_or(1e4);
    if config.format() == Format::Gguf {
        if config.flags("rope_pattern")?.is_none() {
            return Ok(vec![base; layers]);
        }
        let rotate = blocks::flag_per_layer(config, "rope_pattern", layers)?;
        return Ok(rotate.into_iter().map(|rotates| if rotates { base } else { 0.0 }).collect());
    }
    match config.numbers("layer_rope_theta")? {
        Some(bases) if bases.len() == layers && bases.iter().all(|base| *base == 0.0 || *base > 1.0) => {
            Ok(bases)
        }
        Some(_) => {
            let expected = format!("0 or a number above 1 for each of {layers} layers");
            Err(config.unsupported("layer_rope_theta", &expected))
        }
        None => Ok(vec![base; layers]),
    }
}

/// The rotation of `rotary_dim` channels of the base `theta`.
fn rotation(config: &Config<'_>, r: &mut Recorder, rotary_dim: usize, theta: f64) -> Result<usize> {
    let style = granitemoe::rope_style(config);
    if config.format() == Format::Gguf {
        return blocks::rotation(r, config, rotary_dim, style, theta);
    }
    Ok(r.graph.rotation(rope::scaled(config, rotary_dim, style, theta)?))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(granitemoe::DEFAULTS);
    let (heads, layers) = (granitemoe::heads(config)?, blocks::layers(config)?);
    let (slides, bases) = (slides(config, layers)?, bases(config, layers)?);
    let open = config.is_null("sliding_window");
    let window = if open { None } else { Some(config.positions("sliding_window")?.unwrap_or(128)) };
    let mut ropes: Vec<(f64, usize)> = vec![];
    let mut attention = vec![];
    for (layer, (slides, base)) in slides.into_iter().zip(bases).enumerate() {
        // An outline goes without: they are a value a head.
        if !r.is_outline() {
            r.require_sinks(layer)?;
        }
        let known = ropes.iter().find(|(known, _)| *known == base).map(|(_, rope)| *rope);
        let rope = match known {
            _ if base == 0.0 => None,
            Some(rope) => Some(rope),
            None => {
                let rope = rotation(config, r, heads.head_dim, base)?;
                ropes.push((base, rope));
                Some(rope)
            }
        };
        attention.push(Heads { window: window.filter(|_| slides), rope, ..heads });
    }
    let parts = (granitemoe::multipliers(config)?, &granitemoe::moe(config)?);
    granitemoe::decoder(config, r, &attention, parts)
}
