//! Text part of ERNIE 4.5 VL (28B-A3B, 424B-A47B). As ERNIE 4.5 MoE with experts of its own for text, which come first;
//! those for images are not used.
//!
//! Multimodal rotary embedding gives text the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_ernie4_5_vl_moe.py`; published checkpoints have one list for the experts of both kinds, and
//! store routers with columns as rows.

use moeflux_compute::graph::{Activation, Precision, RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, ernie4_5_moe, rope};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "ERNIE 4.5 VL (text)",
    model_types: &["ernie4_5_vl_moe", "ernie4_5_vl_moe_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k")],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2560)),
    ("num_hidden_layers", DefaultValue::Count(28)),
    ("num_attention_heads", DefaultValue::Count(20)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("num_experts", DefaultValue::Count(64)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("moe_num_shared_experts", DefaultValue::Count(2)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// The router, the text's experts and those that every token goes through.
#[derive(Debug, Clone, Copy)]
struct TextMoe {
    route: Route,
    /// Whether names and routers are those of published checkpoints.
    published: bool,
    /// Width of the MLP that every token passes through besides; 0 without.
    shared: usize,
}

impl TextMoe {
    fn new(config: &Config<'_>, published: bool) -> Result<Self> {
        let (experts, top_k) = ernie4_5_moe::expert_counts(config, None)?;
        let widths = config.sizes("moe_intermediate_size")?;
        let width = match widths[..] {
            [] => 1536,
            [width, _] if width > 0 => width,
            _ => {
                return Err(
                    config.unsupported("moe_intermediate_size", "a width for text and one for images")
                );
            }
        };
        let shared = config.count("moe_num_shared_experts")?.unwrap_or(0).saturating_mul(width);
        Ok(Self { route: Route::softmax(experts, top_k, true), published, shared })
    }

    /// Router, experts, shared experts of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { route, published, shared } = *self;
        let module = |name: &str| format!("model.layers.{layer}.mlp.{name}");
        let (logits, bias) = if published {
            let gate = r.transposed(&module("gate"), route.experts, h.width())?;
            let name = module("moe_statics.e_score_correction_bias");
            let bias = r.constants_part(&name, [2, route.experts], 0..1)?;
            (r.graph.linear(h, gate, None, Precision::F32)?, bias)
        } else {
            let logits = r.linear(h, &module("text_moe.gate"), route.experts, Precision::F32)?;
            (logits, r.correction_bias(&module("text_moe.gate.moe_statics"), route.experts)?)
        };
        let routing = r.graph.route(logits, Some(bias), route)?;
        // Before the experts, so that it is computed while they are read.
        let beside = match shared {
            0 => None,
            width => Some(blocks::mlp(r, h, &module("shared_experts"), width, Activation::SwiGlu)?),
        };
        let names = ExpertNames {
            module: if published { "mlp.experts" } else { "mlp.text_moe.experts" },
            projections: ["gate_proj", "up_proj", "down_proj"],
        };
        let experts = r.experts(layer, route.experts, h.width(), &names)?;
        let out = r.graph.moe_experts(h, routing, experts)?;
        match beside {
            Some(beside) => Ok(r.graph.add(out, beside)?),
            None => Ok(out),
        }
    }
}

/// Adds the rotation to the graph. Pairs that stand for height and width take turns: as many for each.
fn rotation(r: &mut Recorder, config: &Config<'_>, head_dim: usize) -> Result<usize> {
    if rope::is_scaled(config)? {
        return Err(config.unsupported("rope_type", "default"));
    }
    let key = "mrope_section";
    let sections = config.sizes(key)?;
    if !matches!(sections[..], [] | [_, _, _]) || sections.len() == 3 && sections[0] != sections[1] {
        return Err(config.unsupported(key, "as many pairs for height as for width, and those for time"));
    }
    if sections.len() == 3 && 2 * sections.iter().sum::<usize>() != head_dim {
        return Err(config.unsupported(key, &format!("pairs of {head_dim} channels")));
    }
    blocks::rotation(r, config, head_dim, RopeStyle::Interleaved, 5e5)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rope = rotation(r, config, d.head_dim)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let dense = blocks::dense_layers(config, d.layers, 1)?;
    let published = (0..d.layers).any(|layer| r.has(&format!("model.layers.{layer}.mlp.gate")));
    let moe = TextMoe::new(config, published)?;

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, dense) in dense.into_iter().enumerate() {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if dense {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            r.graph.scope(format!("layers.{layer}.mlp"));
            let norm = format!("model.layers.{layer}.post_attention_layernorm");
            let h = r.rms_norm(x, &norm, 1, d.eps)?;
            let out = moe.mix(r, layer, h)?;
            r.graph.add(x, out)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
