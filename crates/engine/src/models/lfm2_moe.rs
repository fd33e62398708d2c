//! LFM2-8B-A1B, LFM2-24B-A2B. Layers of short convolutions, whose inputs and outputs are gated, or of attention; dense first
//! layers; sigmoid routing with a bias for choosing.
//!
//! Source: transformers `modeling_lfm2_moe.py`; GGUF architecture `lfm2moe`, whose layers of attention are those that have
//! key heads.

use moeflux_compute::graph::{Precision, RopeStyle, Route, Score, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "LFM2 MoE",
    model_types: &["lfm2_moe"],
    gguf_architectures: &["lfm2moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[&[("conv_L_cache", "shortconv.l_cache")]],
        other_keys: &[("rms_norm_eps", "norm_eps"), ("first_k_dense_replace", "num_dense_layers")],
        first_keys: &[("tie_word_embeddings", "tie_embedding")],
        other_tensors: OTHER_TENSORS,
        renamed: &[("norm", "embedding_norm")],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("model.norm", "token_embd_norm"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
];

/// Names of its own in other checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("feed_forward.gate_proj", "feed_forward.w1"),
    ("feed_forward.up_proj", "feed_forward.w3"),
    ("feed_forward.down_proj", "feed_forward.w2"),
    ("feed_forward.gate.e_score_correction_bias", "feed_forward.expert_bias"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(7168)),
    ("moe_intermediate_size", DefaultValue::Count(1792)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(32)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("first_k_dense_replace", DefaultValue::Count(2)),
    ("conv_L_cache", DefaultValue::Count(3)),
    ("max_position_embeddings", DefaultValue::Count(128_000)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
];

/// For each layer whether it is attention, and the heads of keys where it is.
fn kinds(config: &Config<'_>, layers: usize) -> Result<(Vec<bool>, usize)> {
    let key = "num_key_value_heads";
    if config.format() == Format::Gguf {
        let heads = config.per_layer(key, layers)?.unwrap_or_default();
        let attends: Vec<bool> = heads.iter().take(layers).map(|heads| *heads > 0).collect();
        let mut distinct: Vec<usize> = heads.into_iter().take(layers).filter(|heads| *heads > 0).collect();
        distinct.dedup();
        return match distinct[..] {
            _ if attends.len() != layers => {
                Err(config.unsupported(key, &format!("a number for each of {layers} layers")))
            }
            [] => Ok((attends, 1)),
            [heads] => Ok((attends, heads)),
            _ => Err(config.unsupported(key, "one number for all layers")),
        };
    }
    let heads = config.size(key)?;
    let attends = match config.words("layer_types")? {
        None => {
            let listed = config.sizes("full_attn_idxs")?;
            if listed.is_empty() || listed.iter().any(|layer| *layer >= layers) {
                let expected = format!("conv or full_attention for each of {layers} layers");
                return Err(config.unsupported("layer_types", &expected));
            }
            (0..layers).map(|layer| listed.contains(&layer)).collect()
        }
        Some(kinds) => {
            let kind = |kind: &String| match kind.as_str() {
                "conv" => Some(false),
                "full_attention" => Some(true),
                _ => None,
            };
            let found: Option<Vec<bool>> = kinds.iter().map(kind).collect();
            found.filter(|found| found.len() == layers).ok_or_else(|| {
                let expected = format!("conv or full_attention for each of {layers} layers");
                config.unsupported("layer_types", &expected)
            })?
        }
    };
    Ok((attends, heads))
}

/// The decoder's shape.
fn decoder(config: &Config<'_>, layers: usize, kv_heads: usize) -> Result<Decoder> {
    let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.unsupported("num_key_value_heads", &format!("a divisor of the {heads} heads")));
    }
    let head_dim = match config.optional_size("head_dim")? {
        Some(dim) => dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => return Err(config.unsupported("hidden_size", &format!("a multiple of the {heads} heads"))),
    };
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    Ok(Decoder { hidden_size, layers, heads, kv_heads, head_dim, eps })
}

/// out(C ⊙ conv(B ⊙ x)) of normed h, where B, C and x are what one projection makes of it.
fn convolution(r: &mut Recorder, config: &Config<'_>, layer: usize, h: Value) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.conv.{name}");
    let (width, kernel) = (h.width(), config.size("conv_L_cache")?);
    let mut part = |which: usize| {
        let rows = which * width..(which + 1) * width;
        r.linear_part(h, &module("in_proj"), 3 * width, &[rows], Precision::Fast)
    };
    let (b, c, x) = (part(0)?, part(1)?, part(2)?);
    let x = r.graph.product(b, x)?;
    let taps = r.constants(&module("conv.weight"), &[width, kernel], Form::F32)?;
    let bias = if config.format() != Format::Gguf && config.flag("conv_bias", false)? {
        Some(r.vector(&module("conv"), "bias", width)?)
    } else {
        None
    };
    let x = r.graph.plain_conv1d(x, taps, bias, kernel)?;
    let x = r.graph.product(c, x)?;
    r.linear(x, &module("out_proj"), width, Precision::Fast)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    let layers = blocks::layers(config)?;
    let (attends, kv_heads) = kinds(config, layers)?;
    let d = decoder(config, layers, kv_heads)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e6)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window: None, rope };
    // llama.cpp's number for sigmoid.
    if gguf && config.count("expert_gating_func")?.unwrap_or(2) != 2 {
        return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
    }
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let biased = gguf || config.flag("use_expert_bias", true)?;
    let moe = Moe {
        route: Route {
            score: Score::Sigmoid,
            epsilon: 1e-6,
            scale: config.magnitude("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?)
        },
        router: "feed_forward.gate",
        correction_bias: biased.then_some("feed_forward.gate"),
        experts: ExpertNames { module: "feed_forward.experts", projections: ["w1", "w3", "w2"] },
        shared: None,
    };
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, attends) in attends.into_iter().enumerate() {
        x = if attends {
            blocks::attention(r, &d, layer, x, &kind)?
        } else {
            r.graph.scope(format!("layers.{layer}.conv"));
            let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
            let out = convolution(r, config, layer, h)?;
            r.graph.add(x, out)?
        };
        x = if layer < dense {
            let width = config.size("intermediate_size")?;
            blocks::dense_mlp_of(r, &d, layer, x, width, "feed_forward")?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    match config.format() {
        // mlx-lm has no other head.
        Format::Mlx => {
            let tied = !r.has("lm_head");
            blocks::head_of(r, x, (table, tied), d.eps)
        }
        _ => blocks::head(r, config, x, table, d.eps),
    }
}
