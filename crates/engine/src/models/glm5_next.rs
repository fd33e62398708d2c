//! GLM-5.3-Flash. Hyper-connected residual streams; Kimi Delta Attention, and every few layers multi-head latent attention
//! without any position, over pools of tokens that an indexer chooses; DeepSeek-V3's routing; every SwiGLU limited. The
//! text part of the multimodal model.
//!
//! Source: transformers `modeling_glm5_next.py`; published checkpoints and configurations have names of their own. GGUF
//! architecture `glm5-next`, whose files have limits of SwiGLU for each layer.

use moeflux_compute::graph::{Activation, Decay, HyperConnection, HyperKind, Route, Value};

use super::blocks::delta::{self, KimiDelta, LINEAR};
use super::blocks::streams::{self, Connection};
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::indexer::{self, Indexer};
use super::latent::{self, Latent};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "GLM-5.3-Flash",
    model_types: &["glm5_next", "glm5_next_text"],
    gguf_architectures: &["glm5-next"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[
            latent::GGUF_TENSORS,
            indexer::GGUF_TENSORS,
            delta::GGUF_TENSORS,
            streams::GGUF_TENSORS,
        ],
        gguf_keys: &[latent::GGUF_KEYS, indexer::GGUF_KEYS, delta::GGUF_KEYS, streams::GGUF_KEYS, GGUF_KEYS],
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("index_kpool", "attention.indexer.kpool"),
    ("index_kpool_always_select_tail", "attention.indexer.kpool_select_tail"),
    ("linear_lower_bound", "kda.gate_lower_bound"),
    ("swiglu_limits", "swiglu_clamp_exp"),
    ("swiglu_limits_shared", "swiglu_clamp_shexp"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(288)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("qk_nope_head_dim", DefaultValue::Count(256)),
    ("v_head_dim", DefaultValue::Count(256)),
];

/// Bound of decays if it is left open.
const SAFE_BOUND: f64 = -5.0;

/// How fast linear attention forgets.
fn decay(config: &Config<'_>) -> Result<Decay> {
    let key = "linear_lower_bound";
    let own = match config.number(key)? {
        None if config.is_null(key) || config.format() == Format::Gguf => None,
        own => Some(own.unwrap_or(SAFE_BOUND)),
    };
    let bound = match config.within(LINEAR)? {
        None => own,
        Some(linear) => match linear.number("gate_lower_bound")? {
            Some(bound) => Some(bound),
            None if linear.is_null("gate_lower_bound") => None,
            None => own,
        }
        .or(if linear.flag("safe_gate", true)? { Some(SAFE_BOUND) } else { None }),
    };
    match bound {
        Some(bound) if bound > 0.0 => Err(config.unsupported(key, "a number that is not above 0")),
        Some(bound) => Ok(Decay::Bounded(bound as f32)),
        None => Ok(Decay::Softplus),
    }
}

/// For each layer whether its attention is linear.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        // Layers of linear attention have no heads of keys.
        let heads = config.sizes("num_key_value_heads")?;
        return match heads.len() >= layers {
            true => Ok(heads.iter().take(layers).map(|heads| *heads == 0).collect()),
            false => {
                let expected = format!("a number for each of {layers} layers");
                Err(config.unsupported("num_key_value_heads", &expected))
            }
        };
    }
    let Some(kinds) = config.layer_kinds("layer_types")? else {
        return Ok((0..layers).map(|layer| layer % 4 != 3).collect());
    };
    let known = ["linear_attention", "indexed_attention", "full_attention"];
    if kinds.len() < layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
        let expected = format!("linear_attention or indexed_attention for each of {layers} layers");
        return Err(config.unsupported("layer_types", &expected));
    }
    Ok(kinds.iter().take(layers).map(|kind| kind == known[0]).collect())
}

/// The indexer, which chooses pools of tokens.
fn indexer(config: &Config<'_>) -> Result<Indexer> {
    let mut indexer = Indexer::new(config, 32, 1e-6)?;
    indexer.pool = config.optional_size("index_kpool")?.unwrap_or(16);
    if !indexer.index.top_k.is_multiple_of(indexer.pool) {
        let expected = format!("a multiple of the {} tokens of a pool", indexer.pool);
        return Err(config.unsupported("index_topk", &expected));
    }
    indexer.index.top_k /= indexer.pool;
    // The first queries of a sequence would see nothing, for which there is no meaning.
    if indexer.pool > 1 && !config.flag("index_kpool_always_select_tail", true)? {
        return Err(config.unsupported("index_kpool_always_select_tail", "true"));
    }
    Ok(indexer)
}

/// For each layer the activation of routed experts, and that of other MLPs.
fn activations(config: &Config<'_>, layers: usize) -> Result<Vec<[Activation; 2]>> {
    if config.format() != Format::Gguf {
        let limit = config.number("swiglu_limit")?.unwrap_or(10.0) as f32;
        return match limit > 0.0 {
            true => Ok(vec![[Activation::LimitedSwiGlu { limit }; 2]; layers]),
            false => Err(config.unsupported("swiglu_limit", "a number above 0")),
        };
    }
    let listed = |key: &str| -> Result<Option<Vec<Activation>>> {
        let Some(limits) = config.numbers(key)? else { return Ok(None) };
        if limits.len() < layers {
            return Err(config.unsupported(key, &format!("a number for each of {layers} layers")));
        }
        let activation = |limit: f64| match limit > 0.0 {
            true => Activation::LimitedSwiGlu { limit: limit as f32 },
            false => Activation::SwiGlu,
        };
        Ok(Some(limits.into_iter().take(layers).map(activation).collect()))
    };
    let routed = listed("swiglu_limits")?.unwrap_or_else(|| vec![Activation::SwiGlu; layers]);
    let shared = listed("swiglu_limits_shared")?.unwrap_or_else(|| routed.clone());
    Ok(routed.into_iter().zip(shared).map(|(routed, shared)| [routed, shared]).collect())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let heads = config.size("num_attention_heads")?;
    let gguf = config.format() == Format::Gguf;
    if !gguf && config.optional_size("num_key_value_heads")?.is_some_and(|count| count != heads) {
        return Err(config.unsupported("num_key_value_heads", &format!("the {heads} heads")));
    }
    if config.count("qk_rope_head_dim")?.is_some_and(|channels| channels > 0) {
        return Err(config.unsupported("qk_rope_head_dim", "0"));
    }
    let hyper = HyperConnection {
        streams: size("hc_mult", 4)?,
        norm_eps: eps,
        floor: config.magnitude("hc_eps")?.unwrap_or(1e-6) as f32,
        kind: HyperKind::Mixed { iterations: size("hc_sinkhorn_iters", 20)? },
    };
    let linear = KimiDelta::new(config, if gguf { heads } else { 64 }, decay(config)?, eps)?;
    let latent = Latent::without_positions(config, r, heads)?.with_eps(eps);
    let indexer = indexer(config)?;
    let is_linear = linear_layers(config, layers)?;
    let own_index = if gguf { vec![true; layers] } else { indexer::pattern(config, layers)? };
    let own_index = indexer::layers_with_indexer(config, layers, own_index)?;
    let dense = blocks::dense_layers(config, layers, if gguf { 0 } else { 3 })?;
    let activations = activations(config, layers)?;
    let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(if gguf { 1.0 } else { 2.5 }) as f32;
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
            names: ["fn", "base", "scale"].map(|part| {
                let published = format!("{base}.{published}_{part}");
                if r.has_parameter(&published) { published } else { format!("{base}.{own}.{part}") }
            }),
            norm: format!("{base}.{norm}"),
            eps,
            shape: hyper,
        };
        r.graph.scope(format!("layers.{layer}.self_attn"));
        x = around(r, "attn_hc", "hc_attn", "input_layernorm").around(r, x, |r, h| {
            if is_linear[layer] {
                return linear.attention(r, layer, h);
            }
            latent::attention_of(r, layer, h, &latent, |r, inputs| {
                if own_index[layer] {
                    chosen = Some(indexer.choose(r, layer, inputs)?);
                }
                let shared = || config.unsupported("indexer_types", "full before the first shared");
                chosen.map(Some).ok_or_else(shared)
            })
        })?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        x = around(r, "ffn_hc", "hc_ffn", "post_attention_layernorm").around(r, x, |r, h| {
            match dense[layer] {
                true => {
                    let width = config.size("intermediate_size")?;
                    blocks::mlp(r, h, &format!("{base}.mlp"), width, activations[layer][1])
                }
                false => blocks::moe_with(r, layer, h, &moe, activations[layer]),
            }
        })?;
    }

    r.graph.scope("lm_head");
    let x = r.graph.gather_rows(x);
    // The norm of the mean over streams is that of their sum, with another epsilon.
    let mut sum = r.graph.slice(x, 1, 0, hidden_size)?;
    for stream in 1..hyper.streams {
        let next = r.graph.slice(x, 1, stream * hidden_size, hidden_size)?;
        sum = r.graph.add(sum, next)?;
    }
    let h = r.rms_norm(sum, "model.norm", 1, eps * (hyper.streams * hyper.streams) as f32)?;
    blocks::logits(r, config, h, table)
}
