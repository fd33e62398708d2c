//! OLMoE 1B-7B. Query and key norms over the whole vector; softmax routing, by default without normalisation of the
//! chosen weights; optional clipping of q, k and v.
//!
//! Source: transformers `modeling_olmoe.py`; GGUF architecture `olmoe`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "OLMoE",
    model_types: &["olmoe"],
    gguf_architectures: &["olmoe"],
    hidden_act: SILU,
    names: &Names { gguf_keys: &[&[("clip_qkv", "attention.clamp_kqv")]], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(16)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    // GGUF files that clip nothing may say so with 0.
    let gguf = config.format() == Format::Gguf;
    let clip_qkv = config.magnitude("clip_qkv")?.filter(|c| !gguf || *c > 0.0).map(|c| c as f32);
    let kind = AttentionKind { qk_norm: QkNorm::Whole, clip_qkv, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", false)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
