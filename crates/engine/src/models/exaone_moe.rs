//! K-EXAONE (EXAONE-MoE). Norms of queries and keys per head; rotation in layers with a window only, or in all where none has
//! one; sigmoid routing with a correction bias within the best groups; dense first layers; shared experts.
//!
//! Source: transformers `modeling_exaone_moe.py`; GGUF architecture `exaone-moe`, of whose layers every fourth sees
//! everything unless it says otherwise.

use moeflux_compute::graph::{Activation, RopeStyle, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "K-EXAONE",
    model_types: &["exaone_moe"],
    gguf_architectures: &["exaone-moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[&[("slides", "attention.sliding_window_pattern")]],
        other_keys: &[("n_shared_experts", "num_shared_experts")],
        other_tensors: &[("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias")],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("intermediate_size", DefaultValue::Count(16384)),
    ("moe_intermediate_size", DefaultValue::Count(1024)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("sliding_window", DefaultValue::Count(4096)),
    ("sliding_window_pattern", DefaultValue::Count(4)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let every = |every: usize| (0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect();
    if config.format() == Format::Gguf {
        return blocks::gguf_slides(config, "slides", layers, (4, false));
    }
    let Some(kinds) = config.words("layer_types")? else {
        return Ok(every(config.size("sliding_window_pattern")?));
    };
    blocks::kinds_slide(config, &kinds, layers)
}

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match config.flags("is_moe_layer")? {
        Some(routed) if config.format() == Format::Mlx && routed.len() == layers => {
            Ok(routed.into_iter().map(|routed| !routed).collect())
        }
        Some(_) if config.format() == Format::Mlx => {
            Err(config.unsupported("is_moe_layer", &format!("{layers} truth values")))
        }
        _ => blocks::dense_layers(config, layers, usize::from(config.format() == Format::HuggingFace)),
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let heads = Heads { norm: Some(eps), ..Heads::new(config, hidden_size, None)? };
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let sliding = slides(config, layers)?;
    let window = config.positions("sliding_window")?;
    let all_rotate = match config.format() {
        Format::Mlx => !sliding.contains(&true),
        _ => window.is_none(),
    };
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    let kinds = sliding.into_iter().zip(dense_layers(config, layers)?);
    for (layer, (slides, dense)) in kinds.enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let rope = (slides || all_rotate).then_some(rope);
        let own = Heads { window: window.filter(|_| slides), rope, ..heads };
        let out = own.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = if dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
