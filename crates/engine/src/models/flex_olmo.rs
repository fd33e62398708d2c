//! FlexOlmo. OLMoE's blocks with norms after them in place of those before; experts that were trained apart.
//!
//! Source: transformers `modeling_flex_olmo.py`; llama.cpp does not have it.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "FlexOlmo",
    model_types: &["flex_olmo"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(7)),
    ("num_experts_per_tok", DefaultValue::Count(5)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-6)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 5e5)?;
    let kind = AttentionKind { qk_norm: QkNorm::Whole, clip_qkv: None, window: None, rope };
    let scale = (d.head_dim as f32).sqrt().recip();
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
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let out = blocks::attention_of(r, &d, layer, x, &kind, scale)?;
        let out = r.rms_norm(out, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let out = blocks::moe_of(r, layer, x, &moe)?;
        let out = r.rms_norm(out, &format!("{base}.post_feedforward_layernorm"), 1, d.eps)?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
