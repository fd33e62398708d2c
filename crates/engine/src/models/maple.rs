//! Maple. Windows with rotation in most layers, and everything without positions in the others; norms of each head of queries and
//! keys; normalised softmax routing, and limits on what experts multiply.
//!
//! Source: llama.cpp `maple.cpp` and its converter. GGUF architecture `maple`.

use moeflux_compute::graph::{Activation, RopeStyle, Route, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe};
use super::config::Config;
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Maple",
    model_types: &["maple"],
    gguf_architectures: &["maple"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[&[
            ("window_pattern", "attention.sliding_window_pattern"),
            ("sliding_rope_theta", "rope.freq_base_swa"),
            ("swiglu_limits", "swiglu_clamp_exp"),
        ]],
        ..Names::COMMON
    },
    record,
};

/// Limit of gate and up in checkpoints that do not say it.
const LIMIT: f64 = 7.0;

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return blocks::flag_per_layer(config, "window_pattern", layers);
    }
    let key = "layer_types";
    let kinds = config.words(key)?;
    let kinds = kinds.ok_or_else(|| config.unsupported(key, "a list of kinds"))?;
    blocks::kinds_slide(config, &kinds, layers)
}

/// The activation of each layer's experts.
fn activations(config: &Config<'_>, layers: usize) -> Result<Vec<Activation>> {
    let limits = match config.format() {
        Format::Gguf => {
            let key = "swiglu_limits";
            let limits = config.number_by_layer(key, layers)?;
            limits.ok_or_else(|| config.unsupported(key, "a number for each layer"))?
        }
        _ => vec![LIMIT; layers],
    };
    let activation = |limit: f64| {
        if limit > 1e-6 { Activation::LimitedSwiGlu { limit: limit as f32 } } else { Activation::SwiGlu }
    };
    Ok(limits.into_iter().map(activation).collect())
}

/// Refuses what llama.cpp's converter does: the architecture has no keys for it.
fn check_published(config: &Config<'_>) -> Result<()> {
    if config.format() == Format::Gguf {
        return Ok(());
    }
    if config.count("num_shared_experts")?.is_some_and(|count| count > 0) {
        return Err(config.unsupported("num_shared_experts", "0"));
    }
    for (key, default) in [("norm_topk_prob", true), ("nope_on_global_attention", false)] {
        if !config.flag(key, default)? {
            return Err(config.unsupported(key, "true"));
        }
    }
    Ok(())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    check_published(config)?;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads { norm: Some(eps), ..Heads::new(config, hidden_size, None)? };
    let rotary_dim = blocks::rotary_dim(config, heads.head_dim, 1.0)?;
    let theta = match config.format() {
        Format::Gguf => config.number("sliding_rope_theta")?,
        _ => None,
    };
    let theta = theta.or(config.number("rope_theta")?).unwrap_or(1e4);
    let rope = super::rope::scaled(config, rotary_dim, RopeStyle::HalfSplit, theta)?;
    let rope = Some(r.graph.rotation(rope));
    let key = "sliding_window";
    let window = config.positions(key)?.ok_or_else(|| config.unsupported(key, "a number of positions"))?;
    let (slides, activations) = (slides(config, layers)?, activations(config, layers)?);
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, slides) in slides.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let own = if slides { Heads { window: Some(window), rope, ..heads } } else { heads };
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = own.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_with(r, layer, h, &moe, [activations[layer], Activation::SwiGlu])?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
