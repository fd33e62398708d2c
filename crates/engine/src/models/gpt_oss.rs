//! gpt-oss-20b and gpt-oss-120b. Attention with sinks, every second layer within a window; experts with biases and a
//! clamped SwiGLU, in MXFP4; a biased router whose weights are the softmax over the chosen.
//!
//! Source: transformers `modeling_gpt_oss.py`; GGUF architecture `gpt-oss`. YaRN's ramp is not rounded to whole channels:
//! GGUF has no key for that, but all released checkpoints are so.

use moeflux_compute::graph::{Activation, ExpertMlp, Precision, RopeStyle, Route, Score, Value};

use super::Family;
use super::blocks::{self, AttentionKind, Decoder, QkNorm};
use super::config::Config;
use super::recorder::Recorder;
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family =
    Family { name: "gpt-oss", model_types: &["gpt_oss"], gguf_architectures: &["gpt-oss"], record };

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let d = Decoder::new(config, 1e-5)?;
    let gguf = config.format() == Format::Gguf;
    let scaling = if gguf { config.assuming("truncate", false) } else { *config };
    let rope = blocks::rotation(r, &scaling, d.head_dim, RopeStyle::HalfSplit, 150_000.0)?;
    let windows = blocks::layer_windows(config, d.layers, |layer| layer.is_multiple_of(2))?;
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
