//! DeepSeek-V4. Residual streams joined by hyper-connections; one key that is the value too for all heads, over a window
//! of recent tokens and, in most layers, over compressed entries of the older ones, of which an indexer chooses some;
//! experts chosen by the token's id in the first layers, by √softplus of the router's logits in the others.
//!
//! Source: transformers `modeling_deepseek_v4.py`; published checkpoints have other names for modules, which transformers
//! writes too, and GGUF files (architecture `deepseek4`) a third kind.

pub(super) mod attention;

use moeflux_compute::graph::{
    Activation, ExpertMlp, HyperConnection, HyperKind, Precision, Route, Routing, Score, Value, WeightId,
};

use super::blocks;
use super::blocks::streams::{self, Connection};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::indexer;
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;
use attention::{Attention, AttentionKind};

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V4",
    model_types: &["deepseek_v4"],
    gguf_architectures: &["deepseek4"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[indexer::GGUF_KEYS, streams::GGUF_KEYS, GGUF_KEYS],
        // Published checkpoints have nothing before their names.
        prefixes: &["model.", "model.language_model.", "language_model.model.", ""],
        top: &["embed_tokens", "embed"],
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("q_lora_rank", "attention.q_lora_rank"),
    ("qk_rope_head_dim", "rope.dimension_count"),
    ("o_groups", "attention.output_group_count"),
    ("o_lora_rank", "attention.output_lora_rank"),
    ("compress_ratios", "attention.compress_ratios"),
    ("compress_rope_theta", "attention.compress_rope_freq_base"),
    ("num_hash_layers", "hash_layer_count"),
    ("swiglu_limit_shared", "swiglu_clamp_shexp"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(256)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
];

/// What names a checkpoint has for modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Naming {
    Transformers,
    Published,
    Gguf,
}

/// Names of modules in transformers, in published checkpoints and in GGUF files.
const NAMES: &[[&str; 3]] = &[
    ["input_layernorm", "attn_norm", "attn_norm"],
    ["post_attention_layernorm", "ffn_norm", "ffn_norm"],
    ["attn_hc.fn", "hc_attn_fn", "hc_attn_fn.weight"],
    ["attn_hc.base", "hc_attn_base", "hc_attn_base.weight"],
    ["attn_hc.scale", "hc_attn_scale", "hc_attn_scale.weight"],
    ["ffn_hc.fn", "hc_ffn_fn", "hc_ffn_fn.weight"],
    ["ffn_hc.base", "hc_ffn_base", "hc_ffn_base.weight"],
    ["ffn_hc.scale", "hc_ffn_scale", "hc_ffn_scale.weight"],
    ["self_attn.q_a_proj", "attn.wq_a", "attn_q_a"],
    ["self_attn.q_a_norm", "attn.q_norm", "attn_q_a_norm"],
    ["self_attn.q_b_proj", "attn.wq_b", "attn_q_b"],
    ["self_attn.kv_proj", "attn.wkv", "attn_kv"],
    ["self_attn.kv_norm", "attn.kv_norm", "attn_kv_a_norm"],
    ["self_attn.o_a_proj", "attn.wo_a", "attn_output_a"],
    ["self_attn.o_b_proj", "attn.wo_b", "attn_output_b"],
    ["self_attn.sinks", "attn.attn_sink", "attn_sinks.weight"],
    ["self_attn.compressor.kv_proj", "attn.compressor.wkv", "attn_compressor_kv"],
    ["self_attn.compressor.gate_proj", "attn.compressor.wgate", "attn_compressor_gate"],
    ["self_attn.compressor.position_bias", "attn.compressor.ape", "attn_compressor_ape.weight"],
    ["self_attn.compressor.kv_norm", "attn.compressor.norm", "attn_compressor_norm"],
    ["self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv", "indexer_compressor_kv"],
    ["self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate", "indexer_compressor_gate"],
    [
        "self_attn.compressor.indexer.position_bias",
        "attn.indexer.compressor.ape",
        "indexer_compressor_ape.weight",
    ],
    ["self_attn.compressor.indexer.kv_norm", "attn.indexer.compressor.norm", "indexer_compressor_norm"],
    ["self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b", "indexer.attn_q_b"],
    ["self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj", "indexer.proj"],
    ["mlp.gate", "ffn.gate", "ffn_gate_inp"],
    ["mlp.gate.tid2eid", "ffn.gate.tid2eid", "ffn_gate_tid2eid.weight"],
    ["mlp.gate.e_score_correction_bias", "ffn.gate.bias", "exp_probs_b.bias"],
    ["mlp.shared_experts.gate_proj", "ffn.shared_experts.w1", "ffn_gate_shexp"],
    ["mlp.shared_experts.up_proj", "ffn.shared_experts.w3", "ffn_up_shexp"],
    ["mlp.shared_experts.down_proj", "ffn.shared_experts.w2", "ffn_down_shexp"],
];

/// What all layers have in common.
#[derive(Debug, Clone)]
struct Dimensions {
    hidden_size: usize,
    vocab_size: usize,
    heads: usize,
    eps: f32,
    hyper: HyperConnection,
    naming: Naming,
    /// Limits of what each layer's experts multiply, routed and shared.
    limits: [Vec<f64>; 2],
}

impl Dimensions {
    /// The full name of a layer's module or tensor that transformers calls `name`.
    fn name(&self, layer: usize, name: &str) -> String {
        let found = NAMES.iter().find(|names| names[0] == name);
        format!("model.layers.{layer}.{}", found.map_or(name, |names| names[self.naming as usize]))
    }

    /// The norm of a layer's keys, which transformers writes under another name than that of published checkpoints.
    fn key_norm(&self, r: &Recorder, layer: usize) -> String {
        let rewritten = format!("model.layers.{layer}.attn.norm");
        if r.has(&rewritten) { rewritten } else { self.name(layer, "self_attn.kv_norm") }
    }
}

/// The module that the checkpoint has of two.
fn either<'a>(r: &Recorder, own: &'a str, published: &'a str) -> &'a str {
    if !r.has(own) && r.has(published) { published } else { own }
}

/// The limits of what each layer's experts multiply, routed and shared.
fn limits(config: &Config<'_>, layers: usize) -> Result<[Vec<f64>; 2]> {
    let routed = config.magnitude_per_layer("swiglu_limit", layers)?.unwrap_or(vec![10.0; layers]);
    let shared = match config.format() {
        Format::Gguf => config.magnitude_per_layer("swiglu_limit_shared", layers)?,
        _ => None,
    };
    Ok([routed.clone(), shared.unwrap_or(routed)])
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let hyper = HyperConnection {
        streams: size("hc_mult", 4)?,
        norm_eps: eps,
        floor: config.magnitude("hc_eps")?.unwrap_or(1e-6) as f32,
        kind: HyperKind::Mixed { iterations: size("hc_sinkhorn_iters", 20)? },
    };
    let hidden_size = config.size("hidden_size")?;
    r.graph.scope("embed_tokens");
    let table = either(r, "model.embed_tokens", "model.embed").to_owned();
    // GGUF files do not say.
    let vocab_size = config.optional_size("vocab_size")?;
    let table = r.matrix(&table, vocab_size, hidden_size)?;
    let layers = blocks::layers(config)?;
    let naming = match config.format() {
        Format::Gguf => Naming::Gguf,
        _ if r.has("model.layers.0.attn.wq_a") => Naming::Published,
        _ => Naming::Transformers,
    };
    let d = Dimensions {
        hidden_size,
        vocab_size: r.graph.matrix(table).rows,
        heads: config.size("num_attention_heads")?,
        eps,
        hyper,
        naming,
        limits: limits(config, layers)?,
    };
    // Before what else depends on the vocabulary.
    r.graph.scope("lm_head");
    let tied = match naming {
        Naming::Gguf => !r.has("lm_head"),
        _ => config.flag("tie_word_embeddings", false)? && !r.has(either(r, "lm_head", "head")),
    };
    let head = if tied {
        table
    } else {
        let name = either(r, "lm_head", "head").to_owned();
        r.matrix(&name, Some(d.vocab_size), d.hidden_size)?
    };
    let attention = Attention::new(config, r, &d)?;
    let kinds = AttentionKind::of_layers(config, layers)?;
    let route = route(config)?;
    let by_token = layers_by_token(config, layers)?;
    let shared = size("n_shared_experts", 1)?.saturating_mul(config.size("moe_intermediate_size")?);

    r.graph.scope("embed_tokens");
    let x = r.graph.embed(table);
    let mut x = r.graph.repeat(x, hyper.streams);
    for (layer, (kind, by_token)) in kinds.into_iter().zip(by_token).enumerate() {
        r.graph.scope(format!("layers.{layer}.self_attn"));
        x = joined(r, &d, layer, x, ["attn_hc", "input_layernorm"], |r, h| {
            attention.record(r, &d, layer, h, kind)
        })?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        x = joined(r, &d, layer, x, ["ffn_hc", "post_attention_layernorm"], |r, h| {
            moe(r, &d, layer, h, route, by_token, shared)
        })?;
    }

    r.graph.scope("lm_head");
    let x = r.graph.gather_rows(x);
    let collapse = HyperConnection { kind: HyperKind::Collapsed, ..hyper };
    let parts = ["fn", "base", "scale"];
    let own = parts.iter().any(|part| r.has_parameter(&format!("model.hc_head.hc_{part}")));
    let published = !own && parts.iter().any(|part| r.has_parameter(&format!("model.hc_head_{part}")));
    let name = |part: &str| match (naming, published) {
        (Naming::Gguf, _) => format!("output_hc_{part}.weight"),
        (_, true) => format!("model.hc_head_{part}"),
        (_, false) => format!("model.hc_head.hc_{part}"),
    };
    let weights = streams::weights(r, x, parts.map(name), collapse)?;
    let x = r.graph.hyper_collapse(x, weights, hyper.streams)?;
    let h = r.rms_norm(x, "model.norm", 1, eps)?;
    Ok(r.graph.linear(h, head, None, Precision::Fast)?)
}

/// How scores of experts become weights.
fn route(config: &Config<'_>) -> Result<Route> {
    // llama.cpp's number for it.
    if config.format() == Format::Gguf && config.count("expert_gating_func")?.is_some_and(|n| n != 4) {
        return Err(config.unsupported("expert_gating_func", "4, sqrtsoftplus"));
    }
    let score = match config.word("scoring_func")?.as_deref() {
        None | Some("sqrtsoftplus") => Score::SqrtSoftplus,
        Some("sigmoid") => Score::Sigmoid,
        Some("softmax") => Score::Softmax,
        Some(_) => return Err(config.unsupported("scoring_func", "sqrtsoftplus, sigmoid or softmax")),
    };
    let (experts, top_k) = blocks::expert_counts(config, Some(6))?;
    let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(1.5) as f32;
    Ok(Route { score, scale, ..Route::softmax(experts, top_k, true) })
}

/// For each layer whether its experts are chosen by the token's id: as `mlp_layer_types` says, else the first ones.
fn layers_by_token(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(kinds) = config.words("mlp_layer_types")? else {
        let first = config.count("num_hash_layers")?.unwrap_or(3);
        return Ok((0..layers).map(|layer| layer < first).collect());
    };
    if kinds.len() < layers || kinds.iter().any(|kind| kind != "hash_moe" && kind != "moe") {
        let expected = format!("hash_moe or moe for each of {layers} layers");
        return Err(config.unsupported("mlp_layer_types", &expected));
    }
    Ok(kinds.iter().take(layers).map(|kind| kind == "hash_moe").collect())
}

/// The streams x after `block`, which takes their normed collapse.
fn joined(
    r: &mut Recorder,
    d: &Dimensions,
    layer: usize,
    x: Value,
    [connection, norm]: [&str; 2],
    block: impl FnOnce(&mut Recorder, Value) -> Result<Value>,
) -> Result<Value> {
    let names = ["fn", "base", "scale"].map(|part| d.name(layer, &format!("{connection}.{part}")));
    let connection = Connection { names, norm: d.name(layer, norm), eps: d.eps, shape: d.hyper };
    connection.around(r, x, block)
}

/// Router, experts, shared expert.
fn moe(
    r: &mut Recorder,
    d: &Dimensions,
    layer: usize,
    h: Value,
    route: Route,
    by_token: bool,
    shared: usize,
) -> Result<Value> {
    let name = |part: &str| d.name(layer, part);
    let linear = |r: &mut Recorder, x: Value, module: &str, rows: usize| {
        let weight = r.matrix(&name(module), Some(rows), x.width())?;
        Ok::<Value, crate::Error>(r.graph.linear(x, weight, None, Precision::Fast)?)
    };
    // Not `Recorder::linear`: published checkpoints call the correction bias the router's bias.
    let router: WeightId = r.matrix(&name("mlp.gate"), Some(route.experts), d.hidden_size)?;
    let logits = r.graph.linear(h, router, None, Precision::F32)?;
    let routing: Routing = if by_token {
        let table = r.id_table(&name("mlp.gate.tid2eid"), [d.vocab_size, route.top_k], route.experts)?;
        r.graph.route_by_token(logits, table, route)?
    } else {
        let bias = r.constants(&name("mlp.gate.e_score_correction_bias"), &[route.experts], Form::F32)?;
        r.graph.route(logits, Some(bias), route)?
    };
    let gate = linear(r, h, "mlp.shared_experts.gate_proj", shared)?;
    let up = linear(r, h, "mlp.shared_experts.up_proj", shared)?;
    let [limit, shared_limit] = [0, 1].map(|kind| d.limits[kind][layer] as f32);
    let product = r.graph.activate(Activation::LimitedSwiGlu { limit: shared_limit }, Some(gate), up)?;
    let shared = linear(r, product, "mlp.shared_experts.down_proj", d.hidden_size)?;
    let published = d.naming == Naming::Published;
    let names = ExpertNames {
        module: if published { "ffn.experts" } else { "mlp.experts" },
        projections: if published { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] },
    };
    let experts = r.experts(layer, route.experts, d.hidden_size, &names)?;
    let mlp = ExpertMlp { activation: Activation::LimitedSwiGlu { limit }, ..ExpertMlp::default() };
    let out = r.graph.moe_experts_with(h, routing, experts, mlp)?;
    Ok(r.graph.add(out, shared)?)
}
