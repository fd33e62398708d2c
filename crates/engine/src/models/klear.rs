//! Klear-46B-A2.5B. Norms of each head of queries and keys; sigmoid routing with a bias for choosing; a shared expert that is
//! weighed against the routed ones by the softmax of two numbers of each token.
//!
//! Source: mlx-lm `Klear.py`; transformers and llama.cpp do not have it.

use moeflux_compute::graph::{Activation, Precision, RopeStyle, Route, Score, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, times};
use super::config::Config;
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Klear",
    model_types: &["Klear", "klear"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { other_tensors: OTHER_TENSORS, ..Names::COMMON },
    record,
};

/// Names of its own.
const OTHER_TENSORS: NameMap = &[("mlp.e_score_correction_bias", "mlp.expert_bias")];

/// Whether a layer has an MLP instead of experts.
fn is_dense(config: &Config<'_>, layer: usize) -> Result<bool> {
    let listed = config.sizes("mlp_only_layers")?;
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);
    Ok(listed.contains(&layer) || !(layer + 1).is_multiple_of(step))
}

/// Routed experts and the shared one, each times its part of the softmax of a token's two numbers, which are the sigmoids of
/// their difference.
fn mixed(r: &mut Recorder, layer: usize, h: Value, (moe, width): (&Moe, usize)) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.mlp.{name}");
    r.require_bias(&module("coefficient"))?;
    let pair = r.linear(h, &module("coefficient"), 2, Precision::F32)?;
    let (first, second) = (r.graph.slice(pair, 1, 0, 1)?, r.graph.slice(pair, 1, 1, 1)?);
    let less = times(r, second, -1.0);
    let ahead = r.graph.add(first, less)?;
    let behind = times(r, ahead, -1.0);
    let shared = blocks::mlp(r, h, &module("shared_experts"), width, Activation::SwiGlu)?;
    let routed = blocks::moe_of(r, layer, h, moe)?;
    let (routed, shared) = (r.graph.sigmoid_gate(routed, ahead)?, r.graph.sigmoid_gate(shared, behind)?);
    Ok(r.graph.add(routed, shared)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let d = Decoder::new(config, 1e-5)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 5e5)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHead, clip_qkv: None, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route {
            score: Score::Sigmoid,
            ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?)
        },
        router: "mlp.gate",
        correction_bias: Some("mlp"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };
    let shared = config.count("n_shared_experts")?.unwrap_or(1).max(1);
    let width = config.size("moe_intermediate_size")?.saturating_mul(shared);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        if is_dense(config, layer)? {
            x = blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?;
            continue;
        }
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("model.layers.{layer}.post_attention_layernorm"), 1, d.eps)?;
        let out = mixed(r, layer, h, (&moe, width))?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
