//! A.X-K1. DeepSeek-V3's latent attention and routing, with a norm after the experts.
//!
//! Source: transformers `modeling_axk1.py`; published checkpoints keep that norm in the layer, and have no correction bias.
//! llama.cpp does not have it.

use moeflux_compute::graph::{RopeStyle, Value};

use super::blocks::{self, Decoder, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::latent::{self, Latent};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, deepseek_v3};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "A.X-K1",
    model_types: &["axk1"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { other_tensors: &[("post_mlp_layernorm", "mlp.post_mlp_layernorm")], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(7168)),
    ("intermediate_size", DefaultValue::Count(18432)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("num_hidden_layers", DefaultValue::Count(61)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(192)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("n_group", DefaultValue::Count(8)),
    ("topk_group", DefaultValue::Count(4)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
    ("max_position_embeddings", DefaultValue::Count(32768)),
];

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let mut dense = blocks::dense_layers(config, layers, 1)?;
    if config.words("mlp_layer_types")?.is_none() {
        let step = config.optional_size("moe_layer_freq")?.unwrap_or(1);
        dense.iter_mut().enumerate().for_each(|(layer, dense)| *dense |= !layer.is_multiple_of(step));
    }
    Ok(dense)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let heads = config.size("num_attention_heads")?;
    let style: RopeStyle = deepseek_v3::rope_style(config)?;
    let latent = Latent::new(config, r, heads, style)?;
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32,
    };
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, dense) in dense_layers(config, d.layers)?.into_iter().enumerate() {
        x = latent::attention(r, &d, layer, x, &latent)?;
        if dense {
            x = blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?;
            continue;
        }
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let biased = r.has_correction_bias(&format!("{base}.mlp.gate"));
        let own = Moe { correction_bias: biased.then_some("mlp.gate"), ..moe };
        let out = blocks::moe_of(r, layer, h, &own)?;
        let out = r.rms_norm(out, &format!("{base}.post_mlp_layernorm"), 1, d.eps)?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
