//! Hunyuan 4 (Hy4). Residual streams joined by hyper-connections that keep them apart; gated multi-head latent attention
//! with sinks over the tokens that an indexer chooses, which layers share; DeepSeek-V3's routing over experts with a limited
//! SwiGLU; a dense first layer. And the text part of Hy4-VL, the same but for an epsilon; multimodal rotary embedding gives text
//! the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_hy_v4.py`, `modeling_hy_v4_vl.py`; published checkpoints have other names for modules, and
//! GGUF files (architecture `hy_v4`) a third kind. Published checkpoints rotate neighbouring channels: so do vLLM's `hy_v4` and
//! llama.cpp, with the weights as they are, and transformers with Hy4-VL. With Hy4 transformers rotates halves, which is another
//! model; what it saves of its own is read that way.

use moeflux_compute::graph::{Activation, HyperConnection, HyperKind, RopeStyle, Route, Value};

use super::blocks::streams::{self, Connection};
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::indexer::{self, IndexRotation, Indexer};
use super::latent::{self, Latent, More};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Hy4, Hy4-VL (text)",
    model_types: &["hy_v4", "hy_v4_vl", "hy_v4_vl_text"],
    gguf_architectures: &["hy_v4"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[
            latent::GGUF_TENSORS,
            indexer::GGUF_TENSORS,
            streams::GGUF_TENSORS,
            &[("self_attn.g_proj", "attn_gate"), ("self_attn.sinks", "attn_sinks.weight")],
        ],
        gguf_keys: &[
            latent::GGUF_KEYS,
            indexer::GGUF_KEYS,
            streams::GGUF_KEYS,
            &[("hc_magnitude", "hyper_connection.magnitude")],
        ],
        // What transformers writes for published checkpoints.
        other_tensors: &[
            ("mlp.gate_proj", "mlp.linear_gate"),
            ("mlp.shared_experts.gate_proj", "mlp.shared_experts.linear_gate"),
        ],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(6912)),
    ("moe_intermediate_size", DefaultValue::Count(768)),
    ("max_position_embeddings", DefaultValue::Count(262_144)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("qk_nope_head_dim", DefaultValue::Count(192)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(256)),
];

/// The same of Hy4-VL.
const VL_DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(18432)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(262_144)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(2048)),
    ("qk_nope_head_dim", DefaultValue::Count(192)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(256)),
    ("index_n_heads", DefaultValue::Count(32)),
];

/// Whether it is the text part of Hy4-VL.
fn is_multimodal(config: &Config<'_>) -> bool {
    config.architecture().starts_with("hy_v4_vl")
}

/// The tensors of a hyper-connection: `own` in transformers, or `published` within `base`; what transformers writes for
/// published ones has their parts in another order.
fn connection(
    r: &Recorder,
    base: &str,
    [own, published]: [&str; 2],
    [own_prefix, published_prefix]: [&str; 2],
) -> [String; 3] {
    let parts = ["fn", "base", "scale"];
    let within = |place: &str| parts.map(|part| format!("{base}.{place}.{published_prefix}{part}"));
    let places = [format!("{published}.hc_pre"), format!("hc_pre.{published}"), published.to_owned()];
    let found =
        places.iter().map(|place| within(place)).find(|names| names.iter().any(|n| r.has_parameter(n)));
    found.unwrap_or_else(|| parts.map(|part| format!("{base}.{own}.{own_prefix}{part}")))
}

/// Which channels form a pair. Published configurations say that attention is gated, which transformers does not ask.
fn rope_style(config: &Config<'_>) -> Result<RopeStyle> {
    if is_multimodal(config) {
        return Ok(RopeStyle::Interleaved);
    }
    let published = config.format() == Format::Gguf || config.flag("gated_mla", false)?;
    Ok(if config.flag("rope_interleave", published)? { RopeStyle::Interleaved } else { RopeStyle::HalfSplit })
}

/// The activation of each layer's routed experts: GGUF files may leave the limit out.
fn activations(config: &Config<'_>, layers: usize) -> Result<Vec<Activation>> {
    let key = "swiglu_limit";
    let gguf = config.format() == Format::Gguf;
    let default = if gguf { 0.0 } else { 10.0 };
    let limits = config.magnitude_per_layer(key, layers)?.unwrap_or_else(|| vec![default; layers]);
    let activation = |limit: &f64| {
        if *limit > 0.0 {
            Ok(Activation::LimitedSwiGlu { limit: *limit as f32 })
        } else if gguf {
            Ok(Activation::SwiGlu)
        } else {
            Err(config.unsupported(key, "a number above 0"))
        }
    };
    limits.iter().take(layers).map(activation).collect()
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let multimodal = is_multimodal(config);
    let config = &config.with_defaults(if multimodal { VL_DEFAULTS } else { DEFAULTS });
    let gguf = config.format() == Format::Gguf;
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let hyper = HyperConnection {
        streams: size("hc_mult", 4)?,
        norm_eps: eps,
        floor: config.magnitude("hc_eps")?.unwrap_or(1e-6) as f32,
        kind: HyperKind::Independent { magnitude: config.number("hc_magnitude")?.unwrap_or(2.0) as f32 },
    };
    let published = r.has("model.layers.0.self_attn.linear_gate");
    let mut latent =
        Latent::new(config, r, config.size("num_attention_heads")?, rope_style(config)?)?.with(More {
            sinks: Some(if published { "learnable_sink_param" } else { "sinks" }),
            gate: Some(if published {
                "linear_gate"
            } else if gguf {
                "g_proj"
            } else {
                "gate_proj"
            }),
            ..More::default()
        });
    if multimodal {
        latent = latent.with_eps(eps);
    }
    let mut indexer = Indexer::new(config, 16, eps)?;
    if let Some((channels, rope)) = latent.rotation() {
        let first = indexer.index.head_dim.checked_sub(channels);
        let narrow = || config.unsupported("index_head_dim", &format!("at least {channels} channels"));
        indexer.rotation = Some(IndexRotation { rope, first: first.ok_or_else(narrow)? });
    }
    let own_index = (0..layers).map(|layer| layer == 0 || (layer - 1).is_multiple_of(4)).collect();
    let own_index = indexer::layers_with_indexer(config, layers, own_index)?;
    let dense = blocks::dense_layers(config, layers, if gguf { 0 } else { 1 })?;
    let activations = activations(config, layers)?;
    let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(if gguf { 1.0 } else { 2.827 }) as f32;
    // GGUF files leave it out where it is false.
    let renormalize = config.flag("norm_topk_prob", !gguf)?;
    let moe = Moe {
        route: Route { scale, renormalize, ..blocks::sigmoid_route(config)? },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };

    let (x, table) = blocks::embed(r, hidden_size)?;
    let mut x = r.graph.repeat(x, hyper.streams);
    let mut chosen = None;
    for layer in 0..layers {
        let base = format!("model.layers.{layer}");
        let around = |r: &Recorder, own: &str, published: &str, norm: &str| Connection {
            names: connection(r, &base, [own, published], ["", "hc_"]),
            norm: format!("{base}.{norm}"),
            eps,
            shape: hyper,
        };
        r.graph.scope(format!("layers.{layer}.self_attn"));
        x = around(r, "attn_hc", "hc_attn_layer", "input_layernorm").around(r, x, |r, h| {
            latent::attention_of(r, layer, h, &latent, |r, inputs| {
                if own_index[layer] {
                    chosen = Some(indexer.choose(r, layer, inputs)?);
                }
                let shared = || config.unsupported("indexer_types", "full before the first shared");
                chosen.map(Some).ok_or_else(shared)
            })
        })?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        x = around(r, "ffn_hc", "hc_mlp_layer", "post_attention_layernorm").around(r, x, |r, h| {
            if dense[layer] {
                let width = config.size("intermediate_size")?;
                blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)
            } else {
                blocks::moe_with(r, layer, h, &moe, [activations[layer], Activation::SwiGlu])
            }
        })?;
    }

    r.graph.scope("lm_head");
    let x = r.graph.gather_rows(x);
    let head = HyperConnection { kind: HyperKind::Collapsed, ..hyper };
    let names = if gguf {
        ["fn", "base", "scale"].map(|part| format!("output_hc_{part}.weight"))
    } else {
        connection(r, "model", ["hc_head"; 2], ["hc_", "hc_head_"])
    };
    let weights = streams::weights(r, x, names, head)?;
    let x = r.graph.hyper_collapse(x, weights, head.streams)?;
    let h = r.rms_norm(x, "model.norm", 1, eps)?;
    blocks::logits(r, config, h, table)
}
