//! Ling and Ring, 1.5 and 2.0 (Bailing MoE). One projection to queries, keys and values; softmax routing, or sigmoid routing
//! with a bias for choosing within the best groups; shared experts; dense first layers.
//!
//! Source: mlx-lm `bailing_moe.py`; transformers does not have it. GGUF architectures `bailingmoe`, whose queries and keys
//! are permuted so that rotation works on interleaved pairs, and `bailingmoe2`.

use moeflux_compute::graph::{Activation, GroupRank, Groups, RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert};
use super::config::Config;
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Ling and Ring 1.5, 2.0",
    model_types: &["bailing_moe"],
    gguf_architectures: &["bailingmoe", "bailingmoe2"],
    hidden_act: SILU,
    names: &Names {
        other_tensors: OTHER_TENSORS,
        top: &["word_embeddings", "embed_tokens"],
        renamed: &[("embed_tokens", "word_embeddings")],
        other_keys: &[("n_shared_experts", "num_shared_experts")],
        ..Names::COMMON
    },
    record,
};

/// Names of its own in other checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("self_attn.qkv_proj", "attention.query_key_value"),
    ("self_attn.o_proj", "attention.dense"),
    ("self_attn.q_norm", "attention.query_layernorm"),
    ("self_attn.k_norm", "attention.key_layernorm"),
    ("mlp.gate", "mlp.gate.gate_proj"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
];

/// Whether the file is one of the first generation as llama.cpp knows it.
fn is_first(config: &Config<'_>) -> bool {
    config.format() == Format::Gguf && config.architecture() == "bailingmoe"
}

/// What logits are turned into.
fn score(config: &Config<'_>) -> Result<Score> {
    if config.format() == Format::Gguf {
        // llama.cpp's numbers.
        return match config.count("expert_gating_func")? {
            _ if is_first(config) => Ok(Score::Softmax),
            Some(1) => Ok(Score::Softmax),
            Some(2) => Ok(Score::Sigmoid),
            _ => Err(config.unsupported("expert_gating_func", "1, softmax, or 2, sigmoid")),
        };
    }
    match config.word("score_function")?.as_deref() {
        None | Some("softmax") => Ok(Score::Softmax),
        Some("sigmoid") => Ok(Score::Sigmoid),
        Some(_) => Err(config.unsupported("score_function", "softmax or sigmoid")),
    }
}

fn route(config: &Config<'_>) -> Result<Route> {
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let groups = match config.optional_size("n_group")?.unwrap_or(1) {
        1 => None,
        _ if is_first(config) => None,
        count => {
            let keep = config.optional_size("topk_group")?.unwrap_or(4);
            if keep > count {
                return Err(config.unsupported("topk_group", &format!("at most the {count} groups")));
            }
            if !experts.is_multiple_of(count) {
                return Err(config.unsupported("n_group", "a divisor of the number of experts"));
            }
            Some(Groups { count, keep, rank: GroupRank::BestTwo })
        }
    };
    let scale = config.magnitude("routed_scaling_factor")?;
    let scale = scale.filter(|scale| config.format() != Format::Gguf || *scale != 0.0).unwrap_or(1.0);
    // mlx-lm leaves the weight of a single expert as it is.
    let several = top_k > 1 || config.format() == Format::Gguf;
    let normalised = several && config.flag("norm_topk_prob", false)?;
    Ok(Route {
        score: score(config)?,
        groups,
        scale: scale as f32,
        ..Route::softmax(experts, top_k, normalised)
    })
}

/// The width of the MLP that every token passes through besides; nothing without.
fn shared_width(config: &Config<'_>, r: &Recorder, layers: usize) -> Result<Option<usize>> {
    if config.format() == Format::Gguf && !r.is_outline() {
        // What llama.cpp's converter writes may be another number.
        let module = |layer: usize| format!("model.layers.{layer}.mlp.shared_experts.gate_proj");
        return (0..layers).map(module).find_map(|module| r.rows(&module).transpose()).transpose();
    }
    if !config.flag("moe_router_enable_shared_expert", true)? {
        return Ok(None);
    }
    let each = match config.count("moe_shared_expert_intermediate_size")? {
        Some(width) if width > 0 => width,
        _ => config.size("moe_intermediate_size")?,
    };
    let count = config.count("n_shared_experts")?.unwrap_or(0);
    Ok(Some(count.saturating_mul(each)).filter(|width| *width > 0))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let gguf = config.format() == Format::Gguf;
    for (key, fits) in [("norm_head", config.format() == Format::Mlx), ("norm_softmax", false)] {
        if config.flag(key, false)? && !fits {
            return Err(config.unsupported(key, "false"));
        }
    }
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads::new(config, hidden_size, None)?;
    let style = if is_first(config) { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    // Whatever the format, a number of channels counts before a part of them.
    let rotary_dim = match config.optional_size("rotary_dim")? {
        Some(dim) if dim % 2 == 0 && dim <= heads.head_dim => dim,
        Some(_) => {
            let expected = format!("an even number of the {} channels of a head", heads.head_dim);
            return Err(config.unsupported("rotary_dim", &expected));
        }
        None => blocks::rotary_dim(config, heads.head_dim, 1.0)?,
    };
    let rope = blocks::rotation(r, config, rotary_dim, style, 1e4)?;
    let normed =
        if gguf { r.has("model.layers.0.self_attn.q_norm") } else { config.flag("use_qk_norm", false)? };
    let heads = Heads { rope: Some(rope), norm: normed.then_some(eps), ..heads };
    let dense = config.count("first_k_dense_replace")?.unwrap_or(0);
    let biased = if gguf {
        (dense..layers).any(|layer| r.has_correction_bias(&format!("model.layers.{layer}.mlp.gate")))
    } else {
        config.flag("moe_router_enable_expert_bias", false)?
    };
    let moe = Moe {
        route: route(config)?,
        router: "mlp.gate",
        correction_bias: biased.then_some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: shared_width(config, r, layers)?.map(|width| SharedExpert {
            module: "mlp.shared_experts",
            width,
            gate: None,
        }),
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for layer in 0..layers {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = heads.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = if layer < dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
