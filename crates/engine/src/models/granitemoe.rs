//! Granite 3 MoE and Granite Swash. Mixtral's blocks with factors on embeddings, on scores of attention, on what blocks add and on logits;
//! weights are the softmax over the chosen experts; some have a shared expert, some (`granitemoe_swa`) windows, sinks and a
//! rotation of its own for each layer.
//!
//! Source: transformers `modeling_granitemoe.py`, `modeling_granitemoeshared.py`, `modeling_granitemoe_swa.py`; published checkpoints have other names for
//! experts. GGUF architecture `granitemoe`, whose converter permutes the rows of q and k so that rotation works on
//! interleaved pairs.

use moeflux_compute::graph::{RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Granite 3 MoE, Granite Swash",
    model_types: &["granitemoe", "granitemoeshared", "granitemoe_swa"],
    gguf_architectures: &["granitemoe"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("shared_expert_intermediate_size", "shared_intermediate_size")],
        other_tensors: OTHER_TENSORS,
        gguf_orders: PAIRED,
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
pub(super) const GGUF_TENSORS: NameMap = &[
    ("block_sparse_moe.router", "ffn_gate_inp"),
    ("shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("shared_mlp.up_proj", "ffn_up_shexp"),
    ("shared_mlp.down_proj", "ffn_down_shexp"),
];

/// Keys of GGUF files.
pub(super) const GGUF_KEYS: NameMap = &[
    ("embedding_multiplier", "embedding_scale"),
    ("attention_multiplier", "attention.scale"),
    ("residual_multiplier", "residual_scale"),
    ("logits_scaling", "logit_scale"),
    ("rotates", "rope.scaling.finetuned"),
];

/// Names of published checkpoints.
pub(super) const OTHER_TENSORS: NameMap = &[
    ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("shared_mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("shared_mlp.down_proj", "shared_mlp.output_linear"),
];

/// The one with windows.
const WINDOWED: &str = "granitemoe_swa";

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

/// The number `key`, which GGUF files leave out or have as 0 where there is none.
pub(super) fn factor(config: &Config<'_>, key: &str) -> Result<Option<f32>> {
    let gguf = config.format() == Format::Gguf;
    Ok(config.number(key)?.filter(|factor| !gguf || *factor != 0.0).map(|factor| factor as f32))
}

/// The attention of each layer, which all have the same shape.
fn attention(config: &Config<'_>, r: &mut Recorder, heads: Heads, layers: usize) -> Result<Vec<Heads>> {
    let style = if config.format() == Format::Gguf { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    if config.architecture() != WINDOWED {
        let rope = Some(blocks::rotation(r, config, heads.head_dim, style, 1e4)?);
        return Ok(vec![Heads { rope, ..heads }; layers]);
    }
    let slides = match config.words("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers)?,
        None => (0..layers).map(|layer| layer % 4 != 0).collect(),
    };
    let open = config.is_null("sliding_window");
    let window = if open { None } else { Some(config.positions("sliding_window")?.unwrap_or(128)) };
    let bases = match config.numbers("layer_rope_theta")? {
        Some(bases) if bases.len() == layers && bases.iter().all(|base| *base == 0.0 || *base > 1.0) => bases,
        Some(_) => {
            let expected = format!("0 or a number above 1 for each of {layers} layers");
            return Err(config.unsupported("layer_rope_theta", &expected));
        }
        None => vec![config.number("rope_theta")?.unwrap_or(1e4); layers],
    };
    let mut ropes: Vec<(f64, usize)> = vec![];
    let layer = |(layer, (slides, base)): (usize, (bool, f64))| {
        // An outline goes without: they are a value a head.
        if !r.is_outline() {
            r.require_sinks(layer)?;
        }
        let own = Heads { window: window.filter(|_| slides), ..heads };
        // Layers of base 0 have no positions.
        if base == 0.0 {
            return Ok(own);
        }
        let known = ropes.iter().find(|(known, _)| *known == base).map(|(_, rope)| *rope);
        let rope = match known {
            Some(rope) => rope,
            None => r.graph.rotation(rope::scaled(config, heads.head_dim, style, base)?),
        };
        ropes.push((base, rope));
        Ok(Heads { rope: Some(rope), ..own })
    };
    slides.into_iter().zip(bases).enumerate().map(layer).collect()
}

/// Factors on embeddings and on what a block adds, and what logits are divided by.
///
/// # Errors
/// [`crate::Error::Config`] for numbers that are none, or a divisor of 0.
pub(super) fn multipliers(config: &Config<'_>) -> Result<[f32; 3]> {
    let divisor = factor(config, "logits_scaling")?.unwrap_or(1.0);
    if divisor == 0.0 {
        return Err(config.unsupported("logits_scaling", "a number other than 0"));
    }
    let of = |key| -> Result<f32> { Ok(factor(config, key)?.unwrap_or(1.0)) };
    Ok([of("embedding_multiplier")?, of("residual_multiplier")?, divisor])
}

/// The router, the experts and the shared one, if there is one.
///
/// # Errors
/// [`crate::Error::Config`] for counts that cannot be.
pub(super) fn moe(config: &Config<'_>) -> Result<Moe> {
    let (experts, top_k) = blocks::expert_counts(config, Some(2))?;
    let shared = config.count("shared_expert_intermediate_size")?.filter(|width| *width > 0);
    Ok(Moe {
        route: Route { score: Score::SoftmaxOfChosen, ..Route::softmax(experts, top_k, false) },
        router: "block_sparse_moe.router",
        correction_bias: None,
        experts: ExpertNames {
            module: "block_sparse_moe.experts",
            projections: ["gate_proj", "up_proj", "down_proj"],
        },
        shared: shared.map(|width| SharedExpert { module: "shared_mlp", width, gate: None }),
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads::new(config, hidden_size, None)?;
    // llama.cpp takes a file that denies it for one of a model that rotates nothing.
    if gguf && !config.flag("rotates", true)? {
        return Err(config.unsupported("rotates", "true"));
    }
    let own_scale = if gguf { heads.scale } else { 1.0 };
    let scale = factor(config, "attention_multiplier")?.unwrap_or(own_scale);
    let attention = attention(config, r, Heads { scale, ..heads }, layers)?;
    let ([embedding, residual, divisor], moe) = (multipliers(config)?, moe(config)?);

    let (x, table) = blocks::embed(r, hidden_size)?;
    let mut x = times(r, x, embedding);
    for (layer, heads) in attention.iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = heads.mix(r, layer, h)?;
        let out = times(r, out, residual);
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        let out = times(r, out, residual);
        x = r.graph.add(x, out)?;
    }
    // Before the rows are chosen, of which there is no position.
    r.graph.scope("lm_head");
    let h = r.rms_norm(x, "model.norm", 1, eps)?;
    let h = times(r, h, 1.0 / divisor);
    let h = r.graph.gather_rows(h);
    blocks::logits(r, config, h, table)
}
