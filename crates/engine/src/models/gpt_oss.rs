//! gpt-oss-20b and gpt-oss-120b. Attention with sinks, every second layer within a window; experts with biases and a
//! clamped SwiGLU, in MXFP4; a biased router whose weights are the softmax over the chosen.
//!
//! Source: transformers `modeling_gpt_oss.py`; GGUF architecture `gpt-oss`. YaRN's ramp is not rounded to whole channels:
//! GGUF has no key for that, but all released checkpoints are so.

use moeflux_compute::graph::{Activation, ExpertMlp, Precision, RopeStyle, Route, Score, Value};

use super::blocks::{self, AttentionKind, Decoder, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{Names, POST_ATTENTION_NORM};
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "gpt-oss",
    model_types: &["gpt_oss"],
    gguf_architectures: &["gpt-oss"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[POST_ATTENTION_NORM, &[("mlp.router", "ffn_gate_inp")]],
        published: &[
            "self_attn.o_proj.bias",
            "mlp.router.bias",
            "self_attn.sinks",
            "mlp.experts.gate_proj.weight",
        ],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// The rotary parameters of the published models, which configurations without any mean.
fn published_rope() -> serde_json::Value {
    serde_json::json!({
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": false,
        "original_max_position_embeddings": 4096,
    })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let gguf = config.format() == Format::Gguf;
    let published = published_rope();
    let scaling = if gguf { config.assuming("truncate", false) } else { config.assuming_rope(&published) };
    let rope = blocks::rotation(r, &scaling, d.head_dim, RopeStyle::HalfSplit, 150_000.0)?;
    let window = if gguf { None } else { Some(128) };
    let windows = blocks::layer_windows(config, d.layers, window, |layer| layer.is_multiple_of(2))?;
    let (count, top_k) = blocks::expert_counts(config, None)?;
    let route = Route { score: Score::SoftmaxOfChosen, ..Route::softmax(count, top_k, false) };
    let activation = Activation::ClampedSwiGlu {
        alpha: config.number("swiglu_alpha")?.unwrap_or(1.702) as f32,
        limit: config.magnitude("swiglu_limit")?.unwrap_or(7.0) as f32,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, window) in windows.into_iter().enumerate() {
        let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window, rope };
        r.require_sinks(layer)?;
        x = blocks::attention(r, &d, layer, x, &kind)?;

        r.graph.scope(format!("layers.{layer}.mlp"));
        let base = format!("model.layers.{layer}");
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let logits = r.linear(h, &format!("{base}.mlp.router"), count, Precision::F32)?;
        let routing = r.graph.route(logits, None, route)?;
        let (experts, biases) = r.biased_experts(layer, count, d.hidden_size)?;
        let mlp = ExpertMlp { activation, biases: Some(biases), ..ExpertMlp::default() };
        let out = r.graph.moe_experts_with(h, routing, experts, mlp)?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
