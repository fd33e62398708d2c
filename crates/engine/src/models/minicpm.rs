//! MiniCPM-MoE. Mixtral's blocks with factors on embeddings, on what blocks add and on logits; weights are normalised.
//!
//! Source: vLLM's `minicpm.py`, llama.cpp's `minicpm.cpp` and its converter. GGUF architecture `minicpm`, whose converter permutes
//! the rows of q and k so that rotation works on interleaved pairs. Older files lack the factors: those of the first MiniCPM.

use moeflux_compute::graph::{Route, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe};
use super::config::Config;
use super::names::{NameMap, Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, granitemoe};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "MiniCPM-MoE",
    model_types: &["minicpm"],
    gguf_architectures: &["minicpm"],
    hidden_act: SILU,
    names: &Names { gguf_keys: &[GGUF_KEYS], gguf_orders: PAIRED, ..Names::COMMON },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("scale_emb", "embedding_scale"),
    ("residual_scale", "residual_scale"),
    ("logit_divisor", "logit_scale"),
];

/// Width of the residual stream for which logits are as they are.
const BASE_WIDTH: f64 = 256.0;

/// Factors on embeddings and on what a block adds, and what logits are divided by.
fn multipliers(config: &Config<'_>, layers: usize) -> Result<[f32; 3]> {
    let positive = |key: &str| -> Result<Option<f64>> {
        match config.number(key)? {
            Some(number) if number <= 0.0 => Err(config.unsupported(key, "a number above 0")),
            number => Ok(number),
        }
    };
    let (width, root) = (config.size("hidden_size")? as f64, (layers as f64).sqrt());
    let [embedding, residual, divisor] = match config.format() {
        Format::Gguf => [
            positive("scale_emb")?.unwrap_or(12.0),
            positive("residual_scale")?.unwrap_or(1.4 / root),
            positive("logit_divisor")?.unwrap_or(width / BASE_WIDTH),
        ],
        _ => [
            positive("scale_emb")?.unwrap_or(1.0),
            positive("scale_depth")?.unwrap_or(1.0) / root,
            width / config.optional_size("dim_model_base")?.unwrap_or(1) as f64,
        ],
    };
    Ok([embedding as f32, residual as f32, divisor as f32])
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let layers = blocks::layers(config)?;
    let heads = Heads::new(config, config.size("hidden_size")?, None)?;
    let rope = blocks::rotation(r, config, heads.head_dim, granitemoe::rope_style(config), 1e4)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["w1", "w3", "w2"] },
        shared: None,
    };
    let attention = vec![Heads { rope: Some(rope), ..heads }; layers];
    granitemoe::decoder(config, r, &attention, (multipliers(config, layers)?, &moe))
}
