//! Kimi-Linear (48B-A3B). Linear attention whose channels decay on their own, and every few layers multi-head latent
//! attention without any position; DeepSeek-V3's experts.
//!
//! Source: transformers `modeling_kimi_linear.py`; published checkpoints and configurations have names of their own, and so
//! have GGUF files (architecture `kimi-linear`) and what mlx-lm writes.

use moeflux_compute::graph::{Decay, RopeStyle, Route, Value};

use super::blocks::delta::{self, KimiDelta, LINEAR};
use super::blocks::{self, Decoder, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::latent::{self, Latent};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Kimi-Linear",
    model_types: &["kimi_linear"],
    gguf_architectures: &["kimi-linear"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[latent::GGUF_TENSORS, delta::GGUF_TENSORS],
        gguf_keys: &[latent::GGUF_KEYS, delta::GGUF_KEYS],
        other_keys: &[("scoring_func", "moe_router_activation_func")],
        first_keys: FIRST_KEYS,
        ..Names::COMMON
    },
    record,
};

/// Keys of published configurations, with which transformers overwrites its own.
pub(super) const FIRST_KEYS: NameMap = &[
    ("num_experts_per_tok", "num_experts_per_token"),
    ("norm_topk_prob", "moe_renormalize"),
    ("n_group", "num_expert_group"),
    ("n_shared_experts", "num_shared_experts"),
    ("max_position_embeddings", "model_max_length"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(9216)),
    ("moe_intermediate_size", DefaultValue::Count(1024)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

/// For each layer of a GGUF file whether its attention is linear: such layers have no key heads.
///
/// # Errors
/// [`crate::Error::Config`] unless there is a number for each layer.
pub(super) fn gguf_linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(kv_heads) = config.per_layer("num_key_value_heads", layers)? else {
        let expected = format!("a number for each of {layers} layers");
        return Err(config.unsupported("num_key_value_heads", &expected));
    };
    Ok(kv_heads.iter().take(layers).map(|heads| *heads == 0).collect())
}

/// For each layer whether its attention is linear: as `layer_types` says, or lists of layers counted from one, else all
/// but every fourth after the first.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return gguf_linear_layers(config, layers);
    }
    if let Some(kinds) = config.layer_kinds("layer_types")? {
        let known = ["linear_attention", "full_attention"];
        if kinds.len() < layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
            let expected = format!("linear_attention or full_attention for each of {layers} layers");
            return Err(config.unsupported("layer_types", &expected));
        }
        return Ok(kinds.iter().take(layers).map(|kind| kind == known[0]).collect());
    }
    let (full, linear) =
        (config.sizes_in(LINEAR, "full_attn_layers")?, config.sizes_in(LINEAR, "kda_layers")?);
    let (Some(full), Some(linear)) = (full, linear) else {
        return Ok((0..layers).map(|layer| layer == 0 || !layer.is_multiple_of(4)).collect());
    };
    let kind = |layer: usize| match (full.contains(&layer), linear.contains(&layer)) {
        (true, false) => Ok(false),
        (false, true) => Ok(true),
        _ => Err(config.unsupported(LINEAR, &format!("layer {layer} in one list of kinds"))),
    };
    (1..=layers).map(kind).collect()
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let heads = config.size("num_attention_heads")?;
    let latent = Latent::new(config, r, heads, RopeStyle::Interleaved)?.not_rotated();
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32,
    };
    let linear = KimiDelta::new(config, 32, Decay::Softplus, d.eps)?;
    let is_linear = linear_layers(config, d.layers)?;
    let dense = blocks::dense_layers(config, d.layers, 1)?;
    let published = config.format() != Format::Gguf
        && (0..d.layers).any(|layer| r.has(&format!("model.layers.{layer}.block_sparse_moe.gate")));
    let name = |published_name, own| if published { published_name } else { own };
    // What GGUF files leave out scales nothing.
    let scale = if config.format() == Format::Gguf { 1.0 } else { 2.446 };
    let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(scale) as f32;
    let mut shared = blocks::shared_experts(config, "n_shared_experts", 1)?;
    if let Some(shared) = &mut shared {
        shared.module = name("block_sparse_moe.shared_experts", "mlp.shared_experts");
    }
    // mlx-lm keeps the bias beside the router.
    let beside = (0..d.layers)
        .any(|layer| r.has_parameter(&format!("model.layers.{layer}.mlp.e_score_correction_bias")));
    let moe = Moe {
        route: Route { scale, ..blocks::sigmoid_route(config)? },
        router: name("block_sparse_moe.gate", "mlp.gate"),
        correction_bias: Some(if beside { "mlp" } else { name("block_sparse_moe.gate", "mlp.gate") }),
        experts: ExpertNames {
            module: name("block_sparse_moe.experts", "mlp.experts"),
            projections: ["w1", "w3", "w2"],
        },
        shared,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, linear_layer) in is_linear.into_iter().enumerate() {
        x = if linear_layer {
            r.graph.scope(format!("layers.{layer}.self_attn"));
            let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
            let out = linear.attention(r, layer, h)?;
            r.graph.add(x, out)?
        } else {
            latent::attention(r, &d, layer, x, &latent)?
        };
        x = if dense[layer] {
            // transformers writes dense layers under the experts' name.
            let renamed = r.has(&format!("model.layers.{layer}.block_sparse_moe.gate_proj"));
            let module = if renamed { "block_sparse_moe" } else { "mlp" };
            blocks::dense_mlp_of(r, &d, layer, x, config.size("intermediate_size")?, module)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
