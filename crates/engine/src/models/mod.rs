//! Architectures: one file a family, over shared [`blocks`]. Nothing outside this folder names a model.

pub mod blocks;
pub mod config;
mod deepseek_v2;
mod deepseek_v3;
mod glm4_moe;
mod gpt_oss;
pub mod latent;
mod minimax_m2;
mod mixtral;
mod olmoe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
pub mod recorder;
pub mod rope;

use std::sync::Arc;

use moeflux_compute::graph::Value;

use crate::checkpoint::{Checkpoint, Format, TensorEntry};
use crate::{Error, Result};
use config::Config;
pub use recorder::{Model, Recorder};

/// An architecture family.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Values of `model_type` in Hugging Face and MLX configurations.
    pub model_types: &'static [&'static str],
    /// Values of `general.architecture` in GGUF files; also the prefix of their keys.
    pub gguf_architectures: &'static [&'static str],
    record: fn(&Config<'_>, &mut Recorder) -> Result<Value>,
}

/// Every supported family.
pub const FAMILIES: &[Family] = &[
    qwen3_moe::FAMILY,
    qwen3_next::FAMILY,
    qwen3_5_moe::FAMILY,
    mixtral::FAMILY,
    olmoe::FAMILY,
    deepseek_v3::FAMILY,
    deepseek_v2::FAMILY,
    glm4_moe::FAMILY,
    minimax_m2::FAMILY,
    gpt_oss::FAMILY,
];

/// The architecture's name in a checkpoint: `model_type` or `general.architecture`.
///
/// # Errors
/// [`Error::Config`] if it has none.
pub fn architecture(checkpoint: &Checkpoint) -> Result<String> {
    let missing = |key: &str| Error::Config {
        path: checkpoint.config_path(),
        key: key.into(),
        expected: "the name of an architecture".into(),
        got: "nothing".into(),
    };
    if checkpoint.format() == Format::Gguf {
        let name = checkpoint.metadata().str("general.architecture")?;
        return name.map(str::to_owned).ok_or_else(|| missing("general.architecture"));
    }
    let name = checkpoint.config().get("model_type").and_then(|v| v.as_str());
    name.map(str::to_owned).ok_or_else(|| missing("model_type"))
}

/// Records the model of a checkpoint: its graph and where its weights are.
///
/// # Errors
/// [`Error::UnsupportedArchitecture`], or what its configuration or tensors lack.
pub fn record(checkpoint: Arc<Checkpoint>) -> Result<Model> {
    let name = architecture(&checkpoint)?;
    let names = |f: &Family| match checkpoint.format() {
        Format::Gguf => f.gguf_architectures,
        _ => f.model_types,
    };
    let Some(family) = FAMILIES.iter().find(|f| names(f).contains(&name.as_str())) else {
        let supported: Vec<&str> = FAMILIES.iter().flat_map(names).copied().collect();
        let path = checkpoint.config_path();
        return Err(Error::UnsupportedArchitecture { path, got: name, supported: supported.join(", ") });
    };
    let config = Config::new(&checkpoint, &name);
    config.check_common()?;
    check_layers(&config, &checkpoint)?;
    let mut recorder = Recorder::new(Arc::clone(&checkpoint));
    let logits = (family.record)(&config, &mut recorder).map_err(|error| match error {
        Error::Compute(source) => Error::Model {
            path: checkpoint.config_path(),
            part: recorder.graph.scoped().to_owned(),
            source: source.into(),
        },
        other => other,
    })?;
    let context_length = config.positions("max_position_embeddings")?.unwrap_or(4096);
    let model = recorder.finish(logits, context_length)?;
    check_sizes(&config, &model)?;
    Ok(model)
}

/// Layers that the configuration does not count would be left out without a word.
fn check_layers(config: &Config<'_>, checkpoint: &Checkpoint) -> Result<()> {
    let mut layers = config.size("num_hidden_layers")?;
    if checkpoint.format() != Format::Gguf {
        // Layers that predict further tokens follow the others. GGUF counts them with those.
        let more = ["num_nextn_predict_layers", "num_mtp_modules"].map(|key| config.count(key));
        layers += more.into_iter().map(|n| n.map(Option::unwrap_or_default)).sum::<Result<usize>>()?;
    }
    let layer = |name: &str| -> Option<usize> {
        let text = name.strip_prefix("language_model.").unwrap_or(name);
        let text = text.strip_prefix("model.").unwrap_or(text);
        let text = text.strip_prefix("language_model.").unwrap_or(text);
        let rest = text.strip_prefix("layers.").or_else(|| text.strip_prefix("blk."))?;
        rest.split('.').next()?.parse().ok()
    };
    let beyond = |entry: &&TensorEntry| layer(&entry.name).is_some_and(|layer| layer >= layers);
    let Some(entry) = checkpoint.entries().iter().find(beyond) else { return Ok(()) };
    Err(config.unsupported("num_hidden_layers", &format!("a number of layers that includes {}", entry.name)))
}

/// What the configuration says of sizes that a family takes from tensors.
fn check_sizes(config: &Config<'_>, model: &Model) -> Result<()> {
    if let Some(size) = config.positions("vocab_size")?
        && size != model.graph.vocab_size()
    {
        let expected = format!("the {} rows of the embedding", model.graph.vocab_size());
        return Err(config.unsupported("vocab_size", &expected));
    }
    if let Some(size) = config.optional_size("moe_intermediate_size")?
        && let Some(set) = model.graph.expert_sets().iter().find(|set| set.gate.rows != size)
    {
        let expected = format!("the {} rows of the experts of layer {}", set.gate.rows, set.layer);
        return Err(config.unsupported("moe_intermediate_size", &expected));
    }
    Ok(())
}
