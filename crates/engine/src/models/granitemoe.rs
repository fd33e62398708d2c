//! Granite 3 MoE. Mixtral's blocks with factors on embeddings, on scores of attention, on what blocks add and on logits;
//! weights are the softmax over the chosen experts; some have a shared expert.
//!
//! Source: transformers `modeling_granitemoe.py`, `modeling_granitemoeshared.py`; published checkpoints have other names for
//! experts. GGUF architecture `granitemoe`, whose converter permutes the rows of q and k so that rotation works on
//! interleaved pairs.

use moeflux_compute::graph::{RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Granite 3 MoE",
    model_types: &["granitemoe", "granitemoeshared"],
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

/// What configurations need not say.
pub(super) const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

/// The number `key`, which GGUF files leave out or have as 0 where there is none.
pub(super) fn factor(config: &Config<'_>, key: &str) -> Result<Option<f32>> {
    let gguf = config.format() == Format::Gguf;
    Ok(config.number(key)?.filter(|factor| !gguf || *factor != 0.0).map(|factor| factor as f32))
}

/// In which pairs channels of checkpoints rotate.
pub(super) fn rope_style(config: &Config<'_>) -> RopeStyle {
    if config.format() == Format::Gguf { RopeStyle::Interleaved } else { RopeStyle::HalfSplit }
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
    let layers = blocks::layers(config)?;
    // llama.cpp takes a file that denies it for one of a model that rotates nothing.
    if config.format() == Format::Gguf && !config.flag("rotates", true)? {
        return Err(config.unsupported("rotates", "true"));
    }
    let heads = heads(config)?;
    let rope = blocks::rotation(r, config, heads.head_dim, rope_style(config), 1e4)?;
    let attention = vec![Heads { rope: Some(rope), ..heads }; layers];
    decoder(config, r, &attention, (multipliers(config)?, &moe(config)?))
}

/// Attention without positions, with the configuration's factor on scores.
///
/// # Errors
/// [`crate::Error::Config`] for what is missing or does not fit.
pub(super) fn heads(config: &Config<'_>) -> Result<Heads> {
    let heads = Heads::new(config, config.size("hidden_size")?, None)?;
    let own_scale = if config.format() == Format::Gguf { heads.scale } else { 1.0 };
    let scale = factor(config, "attention_multiplier")?.unwrap_or(own_scale);
    Ok(Heads { scale, ..heads })
}

/// Records the whole decoder with the `attention` of each layer, [`multipliers`] and experts; returns its logits.
///
/// # Errors
/// If the configuration or weights are missing or do not fit.
pub(super) fn decoder(
    config: &Config<'_>,
    r: &mut Recorder,
    attention: &[Heads],
    ([embedding, residual, divisor], moe): ([f32; 3], &Moe),
) -> Result<Value> {
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;

    let (x, table) = blocks::embed(r, config.size("hidden_size")?)?;
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
        let out = blocks::moe_of(r, layer, h, moe)?;
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
