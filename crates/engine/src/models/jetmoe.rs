//! JetMoE-8B. A mixture of attention heads: each expert of attention has queries and an output projection of its own, over keys and
//! values that all share; routed experts; weights of both are the softmax over the chosen ones.
//!
//! Source: transformers `modeling_jetmoe.py`, whose names published checkpoints have; llama.cpp and mlx-lm do not have it. Experts
//! of attention are part of the trunk and all computed, with a weight of 0 for those that are not chosen: of eight with two chosen,
//! four times the work that attention needs.

use moeflux_compute::graph::{Attention, Precision, RopeStyle, Route, Score, Value};

use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "JetMoE",
    model_types: &["jetmoe"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[("head_dim", "kv_channels"), ("hidden_act", "activation_function")],
        other_tensors: OTHER_TENSORS,
        ..Names::COMMON
    },
    record,
};

/// Names of stacks of experts.
const OTHER_TENSORS: NameMap = &[
    ("mlp.experts.gate_up_proj", "mlp.input_linear.weight"),
    ("mlp.experts.down_proj", "mlp.output_linear.weight"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(5632)),
    ("num_hidden_layers", DefaultValue::Count(12)),
    ("num_key_value_heads", DefaultValue::Count(16)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
];

/// Epsilon of the norms of layers, whatever is configured for the last one.
const EPS: f32 = 1e-6;

/// Heads of all experts of attention: each takes a note of where its rows are.
const MOST_HEADS: usize = 1 << 16;

/// Attention of all layers.
#[derive(Debug, Clone, Copy)]
struct Mixture {
    experts: usize,
    top_k: usize,
    /// Heads of an expert, and of keys and values.
    heads: usize,
    head_dim: usize,
    /// Index of the rotation in the graph.
    rope: usize,
}

impl Mixture {
    /// Attention of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { experts, top_k, heads, head_dim, rope } = *self;
        let module = |name: &str| format!("model.layers.{layer}.self_attention.{name}");
        let (width, all) = (heads * head_dim, experts * heads);
        let logits = r.linear(h, &module("experts.router.layer"), experts, Precision::F32)?;
        let weights = r.graph.top_softmax(logits, top_k)?;
        // Queries of all experts for a key head are next to each other.
        let place = |head: usize| (head % experts * heads + head / experts) * head_dim;
        let rows: Vec<_> = (0..all).map(|head| place(head)..place(head) + head_dim).collect();
        let shape = [experts, width, h.width()];
        let queries = r.stacked_rows(&module("experts.input_linear.weight"), shape, rows)?;
        let q = r.graph.linear(h, queries, None, Precision::Fast)?;
        let mut half = |rows| r.linear_part(h, &module("kv_proj"), 2 * width, &[rows], Precision::Fast);
        let (k, v) = (half(0..width)?, half(width..2 * width)?);
        let (q, k) = (r.graph.rope(q, all, rope)?, r.graph.rope(k, heads, rope)?);
        let scale = (head_dim as f32).sqrt().recip();
        let mixed = r.graph.attention(q, k, v, Attention::grouped(all, heads, head_dim, scale))?;
        let mut by_expert = r.graph.slice(mixed, heads, 0, head_dim)?;
        for expert in 1..experts {
            let own = r.graph.slice(mixed, heads, expert * head_dim, head_dim)?;
            by_expert = r.graph.join(by_expert, own);
        }
        let shape = [experts, h.width(), width];
        let output = r.stacked_parameter(&module("experts.output_linear.weight"), shape)?;
        let each = r.graph.grouped_linear(by_expert, output, experts, Precision::Fast)?;
        let out = r.graph.hyper_collapse(each, weights, experts)?;
        blocks::plus(r, out, &module("experts.bias"))
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (experts, top_k) = blocks::expert_counts(config, Some(2))?;
    let (heads, head_dim) = (config.size("num_key_value_heads")?, config.size("head_dim")?);
    if experts * heads > MOST_HEADS {
        let expected = format!("at most {} for each of {experts} experts", MOST_HEADS / experts);
        return Err(config.unsupported("num_key_value_heads", &expected));
    }
    let rope = blocks::rotation(r, config, head_dim, RopeStyle::HalfSplit, 1e4)?;
    let attention = Mixture { experts, top_k, heads, head_dim, rope };
    let moe = Moe {
        route: Route { score: Score::SoftmaxOfChosen, ..Route::softmax(experts, top_k, false) },
        router: "mlp.router.layer",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let width = config.size("intermediate_size")?;

    let (mut x, table) = blocks::embed(r, config.size("hidden_size")?)?;
    for layer in 0..blocks::layers(config)? {
        let module = |name: &str| format!("model.layers.{layer}.{name}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &module("input_layernorm"), 1, EPS)?;
        let out = attention.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &module("post_attention_layernorm"), 1, EPS)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        blocks::check_expert_width(r, config, "intermediate_size", width)?;
        let out = blocks::plus(r, out, &module("mlp.bias"))?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
