//! Step-3.5 and Step-3.7 (Flash). Sliding attention with more heads in most layers, full attention with partial rotation in
//! the others, both gated by head; sigmoid routing with a correction bias; a shared expert; SwiGLU whose halves are limited
//! in some layers.
//!
//! Source: transformers `modeling_step3p7.py`, of which this is the text part; GGUF architecture `step35`.

use moeflux_compute::graph::{Activation, Attention, ExpertMlp, Precision, Rope, RopeStyle, Route, Value};
use serde_json::Value as Json;

use super::blocks::{self, Decoder};
use super::config::{Config, DefaultValue, KeyDefaults, MAX_SIZE};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::rope;
use super::{Family, SILU};
use crate::checkpoint::Format;
use crate::{Error, Result};

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Step-3.5 and Step-3.7",
    model_types: &["step3p7", "step3p5"],
    gguf_architectures: &["step35"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_keys: OTHER_KEYS,
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("self_attn.g_proj", "attn_gate"),
    ("mlp.share_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.share_expert.up_proj", "ffn_up_shexp"),
    ("mlp.share_expert.down_proj", "ffn_down_shexp"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("share_expert_dim", "expert_shared_feed_forward_length"),
    ("sliding_layers", "attention.sliding_window_pattern"),
    ("swa_rope_theta", "rope.freq_base_swa"),
    ("swa_rotary_dim", "rope.dimension_count_swa"),
    ("swiglu_limits", "swiglu_clamp_exp"),
    ("swiglu_limits_shared", "swiglu_clamp_shexp"),
];

/// Keys of published configurations.
const OTHER_KEYS: NameMap = &[
    ("num_experts", "moe_num_experts"),
    ("num_experts_per_tok", "moe_top_k"),
    ("num_key_value_heads", "num_attention_groups"),
    ("share_expert_dim", "share_expert_dims"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_experts", DefaultValue::Count(288)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(128_000)),
];

/// Object of published configurations for sliding layers.
const OTHER: &str = "attention_other_setting";

/// Attention of one layer.
#[derive(Debug, Clone, Copy)]
struct Layer {
    sliding: bool,
    heads: usize,
    kv_heads: usize,
}

/// For each layer whether it slides.
fn sliding_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let (key, listed) = match config.format() {
        Format::Gguf => ("sliding_layers", config.flags("sliding_layers")?),
        format => {
            let kinds = config.layer_kinds("layer_types")?;
            let known = ["sliding_attention", "full_attention"];
            if kinds.iter().flatten().any(|kind| !known.contains(&kind.as_str())) {
                return Err(config.unsupported("layer_types", "sliding_attention or full_attention"));
            }
            let listed = kinds.map(|kinds| kinds.iter().map(|kind| kind == known[0]).collect());
            let default = (format == Format::HuggingFace).then(|| vec![false; layers]);
            ("layer_types", listed.or(default))
        }
    };
    let listed: Option<Vec<bool>> = listed.filter(|listed: &Vec<bool>| listed.len() >= layers);
    listed.ok_or_else(|| config.unsupported(key, &format!("a kind for each of {layers} layers")))
}

/// Heads of single layers: `per_layer_config` has layers by their numbers, with nothing else in them.
fn heads_of_layers(config: &Config<'_>) -> Result<Vec<(usize, usize)>> {
    let name = "num_attention_heads";
    let layer = |(layer, own): (&String, &Json)| {
        let own = own.as_object()?;
        let size = own.get(name)?.as_u64().filter(|n| own.len() == 1 && (1..=MAX_SIZE).contains(n))?;
        Some((layer.parse().ok()?, size as usize))
    };
    let expected = format!("layers with an integer {name} each");
    let convert = |v: &Json| v.as_object()?.iter().map(layer).collect();
    Ok(config.read("per_layer_config", &expected, convert)?.unwrap_or_default())
}

/// Attention of each layer.
fn attention_layers(config: &Config<'_>, layers: usize) -> Result<Vec<Layer>> {
    let sliding = sliding_layers(config, layers)?;
    let (heads, kv_heads) = match config.format() {
        Format::Gguf => {
            let listed = |key: &str| match config.sizes(key)? {
                listed if listed.len() >= layers && listed.iter().all(|n| *n > 0) => Ok(listed),
                _ => Err(config.unsupported(key, &format!("a number for each of {layers} layers"))),
            };
            (listed("num_attention_heads")?, listed("num_key_value_heads")?)
        }
        format => {
            let heads = config.optional_size("num_attention_heads")?.unwrap_or(64);
            let kv_heads = config.optional_size("num_key_value_heads")?.unwrap_or(8);
            let other = match config.optional_size("num_sliding_attention_heads")? {
                Some(heads) => heads,
                None => config.size_in(OTHER, "num_attention_heads")?.unwrap_or(heads),
            };
            // transformers has one number of key heads for all layers.
            let other_kv = match format {
                Format::Mlx => config.size_in(OTHER, "num_attention_groups")?.unwrap_or(kv_heads),
                _ => kv_heads,
            };
            let pick = |own, other| sliding.iter().map(|s| if *s { other } else { own }).collect();
            let (mut heads, kv_heads): (Vec<usize>, Vec<usize>) =
                (pick(heads, other), pick(kv_heads, other_kv));
            for (layer, own) in heads_of_layers(config)? {
                if let Some(heads) = heads.get_mut(layer) {
                    *heads = own;
                }
            }
            (heads, kv_heads)
        }
    };
    let layer = |((sliding, heads), kv_heads): ((bool, usize), usize)| match heads % kv_heads {
        0 => Ok(Layer { sliding, heads, kv_heads }),
        _ => Err(config.unsupported("num_key_value_heads", &format!("a divisor of {heads} heads"))),
    };
    // Layers that predict further tokens are listed too.
    sliding.into_iter().zip(heads).zip(kv_heads).take(layers).map(layer).collect()
}

/// The set of rotary parameters of each kind of layers, if they are given by kind: transformers makes all anew where one
/// of them is missing.
fn rope_sets<'a>(config: &Config<'a>, kinds: &[bool]) -> Result<[Option<Config<'a>>; 2]> {
    let config = config.with_rope_in("rope_parameters");
    let sets = [config.with_rope(kind_of(false))?, config.with_rope(kind_of(true))?];
    let complete = kinds.iter().all(|sliding| sets[usize::from(*sliding)].is_some());
    Ok(if complete || config.format() == Format::Mlx { sets } else { [None, None] })
}

/// The kind of a layer in configurations.
fn kind_of(sliding: bool) -> &'static str {
    if sliding { "sliding_attention" } else { "full_attention" }
}

/// The rotation of sliding or of full layers, of which `layer` is one; `set` has their parameters, if there are sets.
fn rotation(
    config: &Config<'_>,
    set: Option<&Config<'_>>,
    head_dim: usize,
    layer: (usize, bool),
) -> Result<Rope> {
    let (index, sliding) = layer;
    let kind = kind_of(sliding);
    let config = match config.format() {
        Format::HuggingFace => config.with_rope_sets_only(),
        _ => *config,
    };
    if let Some(own) = set {
        let part = own.number("partial_rotary_factor")?.unwrap_or(1.0);
        let dim = rotary_dim(&config, head_dim, "partial_rotary_factor", part)?;
        let theta = own.rope_number("rope_theta")?.unwrap_or(1e4);
        let own = if config.format() == Format::HuggingFace { own.with_rope_sets_only() } else { *own };
        return rope::scaled(&own, dim, RopeStyle::HalfSplit, theta);
    }
    let config = &config.with_rope_in("rope_scaling");
    // transformers adds these to what full layers have, mlx-lm to neither.
    let added = config.format() == Format::HuggingFace && !sliding;
    let bases = if added { *config } else { config.without_rope_objects() };
    let theta = bases.number_by_layer("rope_theta", index + 1)?.map_or(1e4, |all| all[index]);
    let key = "partial_rotary_factors";
    let part = match config.numbers(key)? {
        None => 1.0,
        Some(all) => {
            let of_layer = all.get(index).copied();
            of_layer.ok_or_else(|| config.unsupported(key, &format!("a number for layer {index}")))?
        }
    };
    let dim = rotary_dim(config, head_dim, key, part)?;
    let scaled = match config.words("yarn_only_types")? {
        Some(kinds) if config.format() == Format::Mlx => {
            kinds.is_empty() || kinds.iter().any(|of| of == kind)
        }
        None if config.format() == Format::Mlx => true,
        // Added to a set that says `default`, which the older key `type` does not change.
        _ if config.format() == Format::HuggingFace => !sliding && config.word("rope_type")?.is_some(),
        _ => !sliding,
    };
    if scaled {
        rope::scaled(config, dim, RopeStyle::HalfSplit, theta)
    } else {
        rope::plain(config, dim, RopeStyle::HalfSplit, theta)
    }
}

/// Channels that rotate: an odd number rotates one more.
fn rotary_dim(config: &Config<'_>, head_dim: usize, key: &str, part: f64) -> Result<usize> {
    match (head_dim as f64 * part) as usize {
        dim if (1..=head_dim).contains(&dim) && dim.next_multiple_of(2) <= head_dim => Ok(dim),
        _ => Err(config.unsupported(key, &format!("a part of {head_dim} channels"))),
    }
}

/// As llama.cpp has it: full layers rotate half of the channels, by frequencies with divisors of their own.
fn gguf_rotation(config: &Config<'_>, r: &Recorder, head_dim: usize, sliding: bool) -> Result<Rope> {
    let all = config.optional_size("rotary_dim")?.unwrap_or(head_dim);
    let theta = config.number("rope_theta")?.unwrap_or(1e4);
    let most = config.optional_size("swa_rotary_dim")?.unwrap_or(all);
    if sliding {
        let dim = rotary_dim(config, head_dim, "swa_rotary_dim", most as f64 / head_dim as f64)?;
        let theta = config.number("swa_rope_theta")?.unwrap_or(theta);
        return rope::plain(config, dim, RopeStyle::HalfSplit, theta);
    }
    let dim = rotary_dim(config, head_dim, "rotary_dim", (all / 2) as f64 / head_dim as f64)?;
    let mut rope = rope::scaled(config, dim, RopeStyle::HalfSplit, theta)?;
    let name = "rope_freqs.weight";
    if let Some(divisors) = r.values(name)? {
        // As many as the layers that rotate most would need.
        let (count, needed) = (most.max(dim) / 2, rope.inv_freq.len());
        if divisors.len() != count || needed > count || divisors.iter().any(|f| !f.is_finite() || *f == 0.0) {
            return Err(Error::Tensor {
                path: config.path().into(),
                tensor: name.into(),
                expected: format!("{count} finite divisors"),
                got: format!("{divisors:?}"),
            });
        }
        rope.inv_freq.iter_mut().zip(&divisors).for_each(|(freq, divisor)| *freq /= divisor);
    }
    Ok(rope)
}

/// The limit of each layer's SwiGLU, if it has one.
fn limits(config: &Config<'_>, key: &str, layers: usize) -> Result<Vec<Option<f32>>> {
    let item = |v: &Json| match v {
        Json::Null => Some(None),
        v => v.as_f64().filter(|n| *n >= 0.0 && (*n as f32).is_finite()).map(Some),
    };
    let convert = |v: &Json| v.as_array()?.iter().map(item).collect();
    let expected = "a list of numbers that are not negative";
    let listed: Vec<Option<f64>> = config.read(key, expected, convert)?.unwrap_or_default();
    if listed.is_empty() {
        return Ok(vec![None; layers]);
    }
    if listed.len() < layers {
        return Err(config.unsupported(key, &format!("a limit for each of {layers} layers")));
    }
    let limit = |limit: Option<f64>| limit.filter(|limit| *limit > 0.0).map(|limit| limit as f32);
    Ok(listed.into_iter().take(layers).map(limit).collect())
}

/// Layers with experts: a list, or a text with commas.
fn routed_layers(config: &Config<'_>) -> Result<Option<Vec<usize>>> {
    let item = |v: &Json| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
    let part = |part: &str| part.parse().ok().filter(|n| *n as u64 <= MAX_SIZE);
    config.read("moe_layers_enum", "integers with commas between them", |v| match v {
        Json::String(text) => {
            let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
            parts.map(part).collect()
        }
        other => other.as_array()?.iter().map(item).collect(),
    })
}

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, r: &Recorder, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        let first = config.count("first_k_dense_replace")?.unwrap_or(0);
        let dense = |layer| layer < first || r.has(&format!("model.layers.{layer}.mlp.gate_proj"));
        return Ok((0..layers).map(dense).collect());
    }
    if let Some(kinds) = config.words("mlp_layer_types")? {
        if kinds.len() < layers || kinds.iter().any(|kind| kind != "dense" && kind != "sparse") {
            let expected = format!("dense or sparse for each of {layers} layers");
            return Err(config.unsupported("mlp_layer_types", &expected));
        }
        return Ok(kinds.iter().take(layers).map(|kind| kind == "dense").collect());
    }
    let first = if config.format() == Format::Mlx { 1 } else { 3 };
    let routed = routed_layers(config)?.unwrap_or_else(|| (first..layers).collect());
    let dense: Vec<bool> = (0..layers).map(|layer| !routed.contains(&layer)).collect();
    let routers =
        |layer| ["moe.gate", "mlp.gate", "mlp.gate.gate"].map(|name| format!("model.layers.{layer}.{name}"));
    let has_router = |layer: &usize| dense[*layer] && routers(*layer).iter().any(|name| r.has(name));
    if !r.is_outline()
        && let Some(layer) = (0..layers).find(has_router)
    {
        return Err(
            config.unsupported("moe_layers_enum", &format!("a list with layer {layer}, which has a router"))
        );
    }
    Ok(dense)
}

/// SwiGLU of h.
fn mlp(r: &mut Recorder, h: Value, module: &str, width: usize, limit: Option<f32>) -> Result<Value> {
    let gate = r.linear(h, &format!("{module}.gate_proj"), width, Precision::Fast)?;
    let up = r.linear(h, &format!("{module}.up_proj"), width, Precision::Fast)?;
    let activation = limit.map_or(Activation::SwiGlu, |limit| Activation::CappedSwiGlu { limit });
    let product = r.graph.activate(activation, Some(gate), up)?;
    r.linear(product, &format!("{module}.down_proj"), h.width(), Precision::Fast)
}

/// A layer's router, shared expert and experts, which have other names by who wrote them.
struct Modules {
    router: &'static str,
    bias: &'static str,
    shared: &'static str,
    experts: ExpertNames,
}

impl Modules {
    fn new(r: &Recorder, layer: usize) -> Self {
        let has = |name: &str| r.has(&format!("model.layers.{layer}.{name}"));
        let (router, bias, shared, module) = if r.format() == Format::Gguf {
            ("mlp.gate", "", "mlp.share_expert", "mlp.experts")
        } else if has("moe.gate") {
            ("moe.gate", "moe.router_bias", "share_expert", "moe")
        } else if has("mlp.gate.gate") {
            ("mlp.gate.gate", "mlp.gate.router_bias", "mlp.share_expert", "mlp.experts")
        } else {
            ("mlp.gate", "mlp.gate.e_score_correction_bias", "mlp.shared_experts", "mlp.experts")
        };
        let experts = ExpertNames { module, projections: ["gate_proj", "up_proj", "down_proj"] };
        Self { router, bias, shared, experts }
    }
}

/// Layers with experts.
struct Moe {
    route: Route,
    /// Width of the shared expert.
    shared: usize,
}

impl Moe {
    fn new(config: &Config<'_>) -> Result<Self> {
        let gguf = config.format() == Format::Gguf;
        let (scale, renormalize) = match config.format() {
            Format::Gguf => {
                (config.magnitude("routed_scaling_factor")?, config.flag("norm_topk_prob", false)?)
            }
            Format::Mlx => (
                config.magnitude("moe_router_scaling_factor")?.or(Some(3.0)),
                config.flag("norm_expert_weight", true)?,
            ),
            Format::HuggingFace => (config.magnitude("moe_router_scaling_factor")?, true),
        };
        let route = Route {
            renormalize,
            scale: scale.unwrap_or(1.0) as f32,
            groups: None,
            ..blocks::sigmoid_route(config)?
        };
        let shared = match config.optional_size("share_expert_dim")? {
            None if gguf => config.size("share_expert_dim")?,
            width => width.unwrap_or(1280),
        };
        Ok(Self { route, shared })
    }

    /// Router, experts, shared expert of normed h; `limits` are those of experts and of the shared one.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value, limits: [Option<f32>; 2]) -> Result<Value> {
        let base = format!("model.layers.{layer}");
        let names = Modules::new(r, layer);
        let router = format!("{base}.{}", names.router);
        let logits = r.linear(h, &router, self.route.experts, Precision::F32)?;
        let bias = match names.bias {
            "" => r.correction_bias(&router, self.route.experts)?,
            name => r.constants(&format!("{base}.{name}"), &[self.route.experts], Form::F32)?,
        };
        let routing = r.graph.route(logits, Some(bias), self.route)?;
        // Before the experts, so that it is computed while they are read.
        let shared = mlp(r, h, &format!("{base}.{}", names.shared), self.shared, limits[1])?;
        let experts = r.experts(layer, self.route.experts, h.width(), &names.experts)?;
        let activation = limits[0].map_or(Activation::SwiGlu, |limit| Activation::CappedSwiGlu { limit });
        let body = ExpertMlp { activation, ..ExpertMlp::default() };
        let out = r.graph.moe_experts_with(h, routing, experts, body)?;
        Ok(r.graph.add(out, shared)?)
    }
}

/// What attention has besides the layer's heads.
struct AttentionShape {
    d: Decoder,
    scale: f32,
    window: Option<usize>,
    gated: bool,
    /// Of full and of sliding layers.
    ropes: [Option<usize>; 2],
}

impl AttentionShape {
    /// Norm, attention, residual.
    fn attention(&self, r: &mut Recorder, index: usize, layer: Layer, x: Value) -> Result<Value> {
        let Decoder { hidden_size, head_dim, eps, .. } = self.d;
        let Layer { sliding, heads, kv_heads } = layer;
        let base = format!("model.layers.{index}");
        let module = |name: &str| format!("{base}.self_attn.{name}");
        r.graph.scope(format!("layers.{index}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let mut q = r.linear(h, &module("q_proj"), heads * head_dim, Precision::Fast)?;
        let mut k = r.linear(h, &module("k_proj"), kv_heads * head_dim, Precision::Fast)?;
        let v = r.linear(h, &module("v_proj"), kv_heads * head_dim, Precision::Fast)?;
        let gate =
            if self.gated { Some(r.linear(h, &module("g_proj"), heads, Precision::Fast)?) } else { None };
        q = r.rms_norm(q, &module("q_norm"), heads, eps)?;
        k = r.rms_norm(k, &module("k_norm"), kv_heads, eps)?;
        if let Some(rope) = self.ropes[usize::from(sliding)] {
            q = r.graph.rope(q, heads, rope)?;
            k = r.graph.rope(k, kv_heads, rope)?;
        }
        let window = self.window.filter(|_| sliding);
        let over = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, self.scale) };
        let mut mixed = r.graph.attention(q, k, v, over)?;
        if let Some(gate) = gate {
            mixed = r.graph.sigmoid_gate(mixed, gate)?;
        }
        let out = r.linear(mixed, &module("o_proj"), hidden_size, Precision::Fast)?;
        Ok(r.graph.add(x, out)?)
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (gguf, format) = (config.format() == Format::Gguf, config.format());
    if format == Format::HuggingFace {
        r.norms_are(Form::F32PlusOne);
    }
    let layers = blocks::layers(config)?;
    let attention = attention_layers(config, layers)?;
    let head_dim = match config.optional_size("head_dim")? {
        None if gguf => config.size("head_dim")?,
        dim => dim.unwrap_or(128),
    };
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers,
        heads: attention[0].heads,
        kv_heads: attention[0].kv_heads,
        head_dim,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32,
    };
    let kinds: Vec<bool> = attention.iter().map(|layer| layer.sliding).collect();
    let sets = if gguf { [None, None] } else { rope_sets(config, &kinds)? };
    let mut ropes = [None, None];
    for (index, sliding) in kinds.into_iter().enumerate() {
        let of_kind = usize::from(sliding);
        if ropes[of_kind].is_none() {
            let rope = if gguf {
                gguf_rotation(config, r, head_dim, sliding)?
            } else {
                rotation(config, sets[of_kind].as_ref(), head_dim, (index, sliding))?
            };
            ropes[of_kind] = Some(r.graph.rotation(rope));
        }
    }
    let scalar = match (format, config.number("query_pre_attn_scalar")?) {
        (Format::HuggingFace, Some(scalar)) if scalar > 0.0 => scalar,
        (Format::HuggingFace, Some(_)) => {
            return Err(config.unsupported("query_pre_attn_scalar", "a positive number"));
        }
        _ => head_dim as f64,
    };
    let window = config.positions("sliding_window")?;
    if window.is_none() && attention.iter().any(|layer| layer.sliding) {
        return Err(config.unsupported("sliding_window", "a number of positions"));
    }
    let gated = match format {
        Format::Gguf => (0..layers).any(|layer| r.has(&format!("model.layers.{layer}.self_attn.g_proj"))),
        Format::Mlx => config.flag("use_head_wise_attn_gate", true)?,
        Format::HuggingFace => true,
    };
    if config.flag("use_bidirectional_attention", false)? {
        return Err(config.unsupported("use_bidirectional_attention", "false"));
    }
    let shape = AttentionShape { d, scale: scalar.sqrt().recip() as f32, window, gated, ropes };
    let dense = dense_layers(config, r, layers)?;
    let moe = if dense.contains(&false) { Some(Moe::new(config)?) } else { None };
    let routed_limits = limits(config, "swiglu_limits", layers)?;
    let other_limits = limits(config, "swiglu_limits_shared", layers)?;

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (index, layer) in attention.into_iter().enumerate() {
        let base = format!("model.layers.{index}");
        x = shape.attention(r, index, layer, x)?;
        r.graph.scope(format!("layers.{index}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let out = match &moe {
            Some(moe) if !dense[index] => {
                moe.mix(r, index, h, [routed_limits[index], other_limits[index]])?
            }
            _ => {
                let width = match config.optional_size("intermediate_size")? {
                    None if gguf => config.size("intermediate_size")?,
                    width => width.unwrap_or(11264),
                };
                mlp(r, h, &format!("{base}.mlp"), width, other_limits[index])?
            }
        };
        x = r.graph.add(x, out)?;
    }
    let tied = match format {
        Format::Gguf => !r.has("lm_head"),
        Format::Mlx => false,
        Format::HuggingFace => config.outer_flag("tie_word_embeddings", false)? && !r.has("lm_head"),
    };
    blocks::head_of(r, x, (table, tied), d.eps)
}
