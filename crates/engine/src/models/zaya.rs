//! Zyphra ZAYA1. Compressed convolutional attention (Figliolia et al. 2025): queries and keys are what two convolutions over tokens
//! make of them and their means, half of the values' channels are those of the token before; routers are MLPs over what the routers
//! of earlier layers saw, too; a router may choose none of the experts; residual streams and what is added to them are scaled
//! channel by channel.
//!
//! Source: transformers `modeling_zaya.py`, whose names published checkpoints have; llama.cpp and mlx-lm do not have it. Checkpoints
//! from before (`ZAYA1-base`), with attention and experts as layers of their own, are refused. What is added to the score of
//! choosing no expert is what the checkpoint has: transformers 5.24 puts −1 in its place.

use moeflux_compute::graph::{Attention, ExpertMlp, Gelu, Precision, RopeStyle, Route, Value, WeightId};
use serde_json::json;

use super::blocks::{self, Decoder};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "ZAYA1",
    model_types: &["zaya"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("num_hidden_layers", DefaultValue::Count(40)),
    ("num_attention_heads", DefaultValue::Count(8)),
    ("num_key_value_heads", DefaultValue::Count(2)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(16)),
    ("router_hidden_size", DefaultValue::Count(256)),
    ("cca_time0", DefaultValue::Count(2)),
    ("cca_time1", DefaultValue::Count(2)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
];

/// Tokens that a convolution may look at: each takes operations of its own.
const MOST_TAPS: usize = 64;

const EXPERTS: ExpertNames =
    ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] };

/// (x + bias) · scale, channel by channel, with the parameters `name` and what stands behind it.
fn scaled(r: &mut Recorder, x: Value, name: &str) -> Result<Value> {
    let mean = r.constants(&format!("{name}_bias"), &[x.width()], Form::F32Negative)?;
    let scale = r.constants(&format!("{name}_scale"), &[x.width()], Form::F32)?;
    Ok(r.graph.standardize(x, mean, scale)?)
}

/// The residual stream x and what a block made of it, each scaled.
fn merged(r: &mut Recorder, x: Value, out: Value, module: &str) -> Result<Value> {
    let out = scaled(r, out, &format!("{module}.hidden_states"))?;
    let x = scaled(r, x, &format!("{module}.residual"))?;
    Ok(r.graph.add(out, x)?)
}

/// Attention of a layer.
#[derive(Debug, Clone, Copy)]
struct Attending {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Tokens that a result of each convolution depends on: of one channel, then of the channels of a head.
    taps: [usize; 2],
    window: Option<usize>,
    /// Index of the rotation in the graph.
    rope: usize,
}

impl Attending {
    /// Channels of queries and keys.
    fn channels(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }

    /// Attention of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { heads, kv_heads, head_dim, window, rope, .. } = *self;
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let widths = [heads, kv_heads].map(|heads| heads * head_dim);
        let q = r.linear(h, &module("qkv_proj.q_proj"), widths[0], Precision::Fast)?;
        let k = r.linear(h, &module("qkv_proj.k_proj"), widths[1], Precision::Fast)?;
        let v = self.values(r, h, &module("qkv_proj"))?;
        let [q_mean, k_mean] = self.means(r, q, k)?;
        let joint = r.graph.join(q, k);
        let mixed = self.convolved(r, joint, &module("qkv_proj"))?;
        let q = r.graph.slice(mixed, 1, 0, widths[0])?;
        let q = r.graph.add(q, q_mean)?;
        let k = r.graph.slice(mixed, 1, widths[0], widths[1])?;
        let k = r.graph.add(k, k_mean)?;
        // transformers divides by lengths that are at least this; longer ones hardly change by what is added here.
        let eps = f32::EPSILON.powi(2) / head_dim as f32;
        let q = r.graph.unit_norm(q, heads, eps)?;
        let factors = Form::Repeated { times: head_dim };
        let factors = r.constants(&module("qk_norm.temp"), &[kv_heads], factors)?;
        let k = r.graph.rms_norm(k, factors, kv_heads, eps)?;
        let (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, kv_heads, rope)?);
        let scale = (head_dim as f32).sqrt().recip();
        let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
        let out = r.graph.attention(q, k, v, shape)?;
        r.linear(out, &module("o_proj"), h.width(), Precision::Fast)
    }

    /// Values: one half of their channels is of this token, the other of the one before.
    fn values(&self, r: &mut Recorder, h: Value, module: &str) -> Result<Value> {
        let width = self.kv_heads * self.head_dim / 2;
        let current = r.linear(h, &format!("{module}.v_proj_current"), width, Precision::Fast)?;
        let delayed = format!("{module}.v_proj_delayed");
        let weight = r.matrix(&delayed, Some(width), h.width())?;
        let before = r.graph.linear(h, weight, None, Precision::Fast)?;
        // The first token has no other than the bias.
        let bias = r.optional_vector(&delayed, "bias", width)?;
        let kernel = self.delay(r, module, width, 1)?;
        let before = r.graph.plain_conv1d(before, kernel, bias, 2)?;
        Ok(r.graph.join(current, before))
    }

    /// The kernel of a convolution of `width` channels that is what they were `by` tokens ago.
    fn delay(&self, r: &mut Recorder, module: &str, width: usize, by: usize) -> Result<WeightId> {
        let beside = format!("{module}.conv_qk_depthwise.bias");
        r.made_up(&beside, [self.channels(), width], Form::Delay { by })
    }

    /// The mean of each query head and its key head, and for each key head the mean of those.
    fn means(&self, r: &mut Recorder, q: Value, k: Value) -> Result<[Value; 2]> {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let group = heads / kv_heads;
        let mut keys = None;
        for head in 0..kv_heads {
            let own = r.graph.slice(k, 1, head * head_dim, head_dim)?;
            let own = r.graph.repeat(own, group);
            keys = Some(keys.map_or(own, |before| r.graph.join(before, own)));
        }
        let sum = r.graph.add(q, keys.unwrap_or(k))?;
        let of_queries = blocks::times(r, sum, 0.5);
        let mut sum = r.graph.slice(of_queries, kv_heads, 0, head_dim)?;
        for head in 1..group {
            let other = r.graph.slice(of_queries, kv_heads, head * head_dim, head_dim)?;
            sum = r.graph.add(sum, other)?;
        }
        Ok([of_queries, blocks::times(r, sum, (group as f32).recip())])
    }

    /// What the convolutions make of queries and keys. Before the first token are zeros for the first one, and what that makes of
    /// zeros for the second.
    fn convolved(&self, r: &mut Recorder, joint: Value, module: &str) -> Result<Value> {
        let Self { heads, kv_heads, head_dim, taps: [first, second], .. } = *self;
        let channels = self.channels();
        let name = |which: &str| format!("{module}.conv_qk_{which}");
        let kernel = r.constants(&format!("{}.weight", name("depthwise")), &[channels, first], Form::F32)?;
        let bias = Some(r.vector(&name("depthwise"), "bias", channels)?);
        let mut sum = r.graph.plain_conv1d(joint, kernel, bias, first)?;
        let matrix =
            |r: &mut Recorder, tap| r.kernel_tap(&name("grouped"), [channels, head_dim], [tap, second]);
        let newest = matrix(r, second - 1)?;
        sum = r.graph.grouped_linear(sum, newest, heads + kv_heads, Precision::F32)?;
        if second > 1 {
            let unbiased = r.graph.plain_conv1d(joint, kernel, None, first)?;
            for by in 1..second {
                let delay = self.delay(r, module, channels, by)?;
                let before = r.graph.plain_conv1d(unbiased, delay, bias, by + 1)?;
                let matrix = matrix(r, second - 1 - by)?;
                let out = r.graph.grouped_linear(before, matrix, heads + kv_heads, Precision::F32)?;
                sum = r.graph.add(sum, out)?;
            }
        }
        blocks::plus(r, sum, &format!("{}.bias", name("grouped")))
    }
}

/// Routed feed-forward of all layers.
#[derive(Debug, Clone, Copy)]
struct Routed {
    /// Experts, without the one that is none.
    experts: usize,
    /// Channels of what routers see.
    width: usize,
    eps: f32,
}

impl Routed {
    fn new(config: &Config<'_>, d: &Decoder) -> Result<Self> {
        let (experts, top_k) = blocks::expert_counts(config, Some(1))?;
        if top_k != 1 {
            return Err(config.unsupported("num_experts_per_tok", "1"));
        }
        Ok(Self { experts, width: config.size("router_hidden_size")?, eps: d.eps })
    }

    /// What the experts of `layer` make of normed h, and what its router saw, which adds what the layer `before` saw.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value, before: Option<Value>) -> Result<[Value; 2]> {
        let Self { experts, width, eps } = *self;
        let module = |name: &str| format!("model.layers.{layer}.mlp.gate.{name}");
        let biased = |r: &mut Recorder, x: Value, name: &str| {
            let weight = r.matrix(&module(name), Some(width), x.width())?;
            let bias = r.vector(&module(name), "bias", width)?;
            Ok::<_, crate::Error>(r.graph.linear(x, weight, Some(bias), Precision::F32)?)
        };
        let mut seen = biased(r, h, "down_proj")?;
        if let Some(before) = before {
            let name = module("router_states_scale");
            let scale = r.constants(&name, &[width], Form::F32)?;
            let none = r.made_up(&name, [width; 2], Form::Zeros)?;
            let before = r.graph.standardize(before, none, scale)?;
            seen = r.graph.add(seen, before)?;
        }
        let mut x = r.rms_norm(seen, &module("router_mlp.norm"), 1, eps)?;
        for name in ["router_mlp.fc1", "router_mlp.fc2"] {
            x = biased(r, x, name)?;
            x = r.graph.gelu(x, Gelu::Erf);
        }
        let logits = r.linear(x, &module("router_mlp.out_proj"), experts + 1, Precision::F32)?;
        let name = module("balancing_biases");
        let bias = r.constants(&name, &[experts + 1], Form::F32)?;
        let weights = r.made_up(&name, [experts + 1; 2], Form::OnesBut { zeros: 1 })?;
        let routing =
            r.graph.scaled_route(logits, Some(bias), weights, Route::softmax(experts + 1, 1, false))?;
        let set = r.experts(layer, experts, h.width(), &EXPERTS)?;
        // The last expert of the router's has no weight, so that what it returns does not count.
        let mlp = ExpertMlp { identities: 1, ..ExpertMlp::default() };
        Ok([r.graph.moe_experts_with(h, routing, set, mlp)?, seen])
    }
}

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "layer_types";
    let Some(kinds) = config.words(key)? else { return Ok(vec![false; layers]) };
    let kind = |kind: &String| match kind.as_str() {
        "hybrid" => Some(false),
        "hybrid_sliding" => Some(true),
        _ => None,
    };
    let found: Option<Vec<bool>> = kinds.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        config.unsupported(key, &format!("hybrid or hybrid_sliding for each of {layers} layers"))
    })
}

/// Adds the rotation of layers of this kind to the graph.
fn rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<usize> {
    let name = if slides { "hybrid_sliding" } else { "hybrid" };
    let own = config.with_rope(name)?;
    let own = own.ok_or_else(|| config.unsupported("rope_parameters", &format!("parameters of {name}")))?;
    if own.rope_number("rope_theta")?.is_none() {
        return Err(own.unsupported("rope_theta", "a number"));
    }
    // What stands beside the sets does not count.
    let key = "partial_rotary_factor";
    let dim = (head_dim as f64 * own.rope_number(key)?.unwrap_or(1.0)) as usize;
    if dim == 0 || !dim.is_multiple_of(2) || dim > head_dim {
        return Err(own.unsupported(key, &format!("an even number of the {head_dim} channels of a head")));
    }
    blocks::rotation(r, &own, dim, RopeStyle::HalfSplit, 1e4)
}

/// Attention of each layer.
fn attentions(r: &mut Recorder, config: &Config<'_>, d: &Decoder) -> Result<Vec<Attending>> {
    let &Decoder { layers, heads, kv_heads, head_dim, .. } = d;
    if !(kv_heads * head_dim).is_multiple_of(2) {
        let expected =
            format!("a number of which {kv_heads} are even, as half of the values are those before");
        return Err(config.unsupported("head_dim", &expected));
    }
    let slides = slides(config, layers)?;
    let window = config.positions("sliding_window")?;
    if slides.contains(&true) && window.is_none() {
        return Err(config.unsupported("sliding_window", "a number of positions"));
    }
    let mut taps = [0; 2];
    for (taps, key) in taps.iter_mut().zip(["cca_time0", "cca_time1"]) {
        *taps = config.size(key)?;
        if *taps > MOST_TAPS {
            return Err(config.unsupported(key, &format!("at most {MOST_TAPS}")));
        }
    }
    let attention = |slides| {
        let rope = rotation(r, config, slides, head_dim)?;
        Ok(Attending { heads, kv_heads, head_dim, taps, window: window.filter(|_| slides), rope })
    };
    slides.into_iter().map(attention).collect()
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let rope = json!({
        "hybrid": { "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5 },
        "hybrid_sliding": { "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5 },
    });
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&rope).with_rope_sets_only();
    let key = "zaya_mlp_expansion";
    if config.count(key)?.is_some() {
        return Err(config.unsupported(key, "router_hidden_size and layers as transformers has them"));
    }
    let d = Decoder::new(config, 1e-5)?;
    let attentions = attentions(r, config, &d)?;
    let routed = Routed::new(config, &d)?;
    if config.flag("lm_head_bias", false)? && !r.is_outline() {
        r.require_bias("lm_head")?;
    }

    let (x, table) = blocks::embed(r, d.hidden_size)?;
    let mut x = scaled(r, x, "model.input_hidden_states")?;
    let mut seen = None;
    for (layer, attention) in attentions.into_iter().enumerate() {
        let module = |name: &str| format!("model.layers.{layer}.{name}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &module("input_layernorm"), 1, d.eps)?;
        let out = attention.mix(r, layer, h)?;
        x = merged(r, x, out, &module("post_attention_residual_scale"))?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &module("post_attention_layernorm"), 1, d.eps)?;
        let [out, of_router] = routed.mix(r, layer, h, seen)?;
        seen = Some(of_router);
        x = merged(r, x, out, &module("post_mlp_residual_scale"))?;
    }
    blocks::head(r, config, x, table, d.eps)
}
