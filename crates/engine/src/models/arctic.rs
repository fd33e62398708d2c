//! Snowflake Arctic. An MLP of all tokens after attention, and beside both of them routed experts on what attention takes.
//!
//! Source: llama.cpp `src/models/arctic.cpp`; transformers does not have it. GGUF architecture `arctic`, whose queries and keys
//! are permuted so that rotation works on interleaved pairs.

use moeflux_compute::graph::{Activation, RopeStyle, Route, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Snowflake Arctic",
    model_types: &["arctic"],
    gguf_architectures: &["arctic"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        other_tensors: OTHER_TENSORS,
        gguf_orders: PAIRED,
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap =
    &[("residual_layernorm", "ffn_norm"), ("post_attention_layernorm", "ffn_norm_exps")];

/// Names of its own in other checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("mlp.gate_proj", "residual_mlp.w1"),
    ("mlp.up_proj", "residual_mlp.w3"),
    ("mlp.down_proj", "residual_mlp.w2"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
];

/// Refuses what Arctic's own code knows besides, which llama.cpp does not.
fn check(config: &Config<'_>) -> Result<()> {
    if config.format() == Format::Gguf {
        return Ok(());
    }
    for key in ["use_residual", "parallel_attn_mlp_res"] {
        if !config.flag(key, false)? {
            return Err(config.unsupported(key, "true"));
        }
    }
    if config.count("moe_layer_frequency")?.unwrap_or(2) != 1 {
        return Err(config.unsupported("moe_layer_frequency", "1"));
    }
    if config.count("num_experts_per_tok")?.unwrap_or(1) != 2 {
        return Err(config.unsupported("num_experts_per_tok", "2"));
    }
    Ok(())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    check(config)?;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let heads = Heads::new(config, hidden_size, None)?;
    let style = match config.format() {
        Format::Gguf => RopeStyle::Interleaved,
        _ => RopeStyle::HalfSplit,
    };
    let rope = blocks::rotation(r, config, heads.head_dim, style, 1e6)?;
    let heads = Heads { rope: Some(rope), ..heads };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: "block_sparse_moe.gate",
        correction_bias: None,
        experts: ExpertNames { module: "block_sparse_moe.experts", projections: ["w1", "w3", "w2"] },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for layer in 0..layers {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = heads.mix(r, layer, h)?;
        let attended = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.residual_mlp"));
        let h = r.rms_norm(attended, &format!("{base}.residual_layernorm"), 1, eps)?;
        let out = blocks::mlp(r, h, &format!("{base}.mlp"), hidden_size, Activation::SwiGlu)?;
        let dense = r.graph.add(attended, out)?;
        r.graph.scope(format!("layers.{layer}.block_sparse_moe"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        x = r.graph.add(dense, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
