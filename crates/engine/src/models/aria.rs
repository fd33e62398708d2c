//! Aria, its text model. Llama's attention; weights are the softmax over the chosen experts, as wide as `intermediate_size`, beside
//! shared ones in every layer.
//!
//! Source: transformers `modeling_aria.py`; published checkpoints have other names for experts, whose matrices they store with
//! columns as rows.

use moeflux_compute::graph::{Activation, RopeStyle, Route, Score, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Aria (text)",
    model_types: &["aria", "aria_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_topk")],
        other_tensors: OTHER_TENSORS,
        ..Names::COMMON
    },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("mlp.experts.gate_up_proj", "mlp.experts.fc1.weight"),
    ("mlp.experts.down_proj", "mlp.experts.fc2.weight"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(4096)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, Some(2))?;
    let count = config.count("moe_num_shared_experts")?.unwrap_or(2);
    let width = count.saturating_mul(config.size("intermediate_size")?);
    let shared = SharedExpert { module: "mlp.shared_experts", width, gate: None };
    let moe = Moe {
        route: Route { score: Score::SoftmaxOfChosen, ..Route::softmax(experts, top_k, false) },
        router: "mlp.router",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(shared).filter(|_| count > 0),
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("model.layers.{layer}.post_attention_layernorm"), 1, d.eps)?;
        let declare = |r: &mut Recorder| r.transposed_experts(layer, experts, h.width(), &moe.experts);
        let out = blocks::moe_from(r, layer, h, (&moe, [Activation::SwiGlu; 2]), declare)?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
