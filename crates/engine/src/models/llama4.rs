//! Llama 4. Layers attend within chunks and rotate queries and keys, or to everything without any position; experts take
//! their input times the router's sigmoid, beside a shared one; layers may be dense in turn.
//!
//! Source: transformers `modeling_llama4.py`; GGUF architecture `llama4`, whose files leave out what has always been the
//! same.

use moeflux_compute::graph::{
    Attention, ExpertMlp, PositionScale, Precision, RopeStyle, Route, Score, Value, Weighted,
};
use serde_json::Value as Json;

use super::blocks::{self, Decoder};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Llama 4",
    model_types: &["llama4", "llama4_text"],
    gguf_architectures: &["llama4"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[&[("interleave_moe_layer_step", "interleave_moe_layer_step")]],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
    ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(40)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(16)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

const EXPERTS: ExpertNames =
    ExpertNames { module: "feed_forward.experts", projections: ["gate_proj", "up_proj", "down_proj"] };
/// Experts of the model that does not norm queries and keys; GGUF does not say.
const EXPERTS_WITHOUT_NORM: usize = 128;

/// Attention of all layers.
struct AttentionShape {
    d: Decoder,
    rope: usize,
    /// Whether rotated queries and keys are divided by their length.
    normed: bool,
    /// Factor on queries that are not rotated.
    temperature: Option<PositionScale>,
    chunk: Option<usize>,
}

/// For each layer whether it rotates queries and keys: as `no_rope_layers` says, which has zeros for those that do not,
/// else all but every few.
fn rotated_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let listed = config.sizes("no_rope_layers")?;
    if listed.is_empty() {
        let interval = config.optional_size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    }
    if listed.len() < layers {
        return Err(config.unsupported("no_rope_layers", &format!("an entry for each of {layers} layers")));
    }
    Ok(listed.into_iter().take(layers).map(|rotates| rotates != 0).collect())
}

/// For each layer whether it attends within chunks: as `layer_types` says, else those that rotate.
fn chunked_layers(config: &Config<'_>, rotated: &[bool]) -> Result<Vec<bool>> {
    let Some(kinds) = config.layer_kinds("layer_types")? else { return Ok(rotated.to_vec()) };
    let known = ["chunked_attention", "full_attention"];
    if kinds.len() < rotated.len() || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
        let expected = format!("chunked_attention or full_attention for each of {} layers", rotated.len());
        return Err(config.unsupported("layer_types", &expected));
    }
    Ok(kinds.iter().take(rotated.len()).map(|kind| kind == known[0]).collect())
}

/// For each layer whether it has experts: those that `moe_layers` names, else the last of every few.
fn routed_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.words("moe_layers").is_ok_and(|names| names.is_some_and(|names| names.is_empty())) {
        return Ok(vec![false; layers]);
    }
    let listed = config.sizes("moe_layers")?;
    if !listed.is_empty() {
        return Ok((0..layers).map(|layer| listed.contains(&layer)).collect());
    }
    let step = config.optional_size("interleave_moe_layer_step")?.unwrap_or(1);
    Ok((1..=layers).map(|layer| layer.is_multiple_of(step)).collect())
}

/// Whether queries that are not rotated have factors by their positions: Scout says so by a number.
fn tunes_temperature(config: &Config<'_>) -> Result<bool> {
    let flag = |value: &Json| value.as_bool().or_else(|| Some(value.as_f64()? != 0.0));
    Ok(config.read("attn_temperature_tuning", "true, false or a number", flag)?.unwrap_or(true))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    let d = Decoder::new(config, 1e-5)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::Interleaved, 5e5)?;
    let (experts, top_k) = blocks::expert_counts(config, Some(1))?;
    let period = config.positions("floor_scale")?.unwrap_or(8192);
    let temperature = PositionScale::steps(config.number("attn_scale")?.unwrap_or(0.1) as f32, 1, period);
    let chunk = if config.is_null("attention_chunk_size") {
        None
    } else {
        Some(config.positions("attention_chunk_size")?.unwrap_or(8192))
    };
    let shape = AttentionShape {
        d,
        rope,
        normed: config.flag("use_qk_norm", !gguf || experts != EXPERTS_WITHOUT_NORM)?,
        temperature: tunes_temperature(config)?.then_some(temperature),
        chunk,
    };
    let rotated = rotated_layers(config, d.layers)?;
    let chunked = chunked_layers(config, &rotated)?;
    let routed = routed_layers(config, d.layers)?;
    let (expert_width, dense_width) = if gguf {
        (config.size("moe_intermediate_size")?, config.size("intermediate_size")?)
    } else {
        (
            config.optional_size("intermediate_size")?.unwrap_or(8192),
            config.optional_size("intermediate_size_mlp")?.unwrap_or(16384),
        )
    };
    let route = Route { score: Score::Sigmoid, ..Route::softmax(experts, top_k, false) };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, routed) in routed.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        x = attention(r, &shape, layer, x, [rotated[layer], chunked[layer]])?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
        let out = if routed {
            moe(r, layer, h, route, expert_width)?
        } else {
            mlp(r, h, &format!("{base}.feed_forward"), dense_width)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, d.eps)
}

/// Norm, attention, residual.
fn attention(
    r: &mut Recorder,
    shape: &AttentionShape,
    layer: usize,
    x: Value,
    [rotated, chunked]: [bool; 2],
) -> Result<Value> {
    let Decoder { hidden_size, heads, kv_heads, head_dim, eps, .. } = shape.d;
    let base = format!("model.layers.{layer}");
    let module = |name: &str| format!("{base}.self_attn.{name}");
    r.graph.scope(format!("layers.{layer}.self_attn"));
    let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
    let mut q = r.linear(h, &module("q_proj"), heads * head_dim, Precision::Fast)?;
    let mut k = r.linear(h, &module("k_proj"), kv_heads * head_dim, Precision::Fast)?;
    let v = r.linear(h, &module("v_proj"), kv_heads * head_dim, Precision::Fast)?;
    if rotated {
        q = r.graph.rope(q, heads, shape.rope)?;
        k = r.graph.rope(k, kv_heads, shape.rope)?;
        if shape.normed {
            q = r.graph.unit_norm(q, heads, eps)?;
            k = r.graph.unit_norm(k, kv_heads, eps)?;
        }
    } else if let Some(temperature) = shape.temperature {
        q = r.graph.position_scale(q, temperature);
    }
    let scale = (head_dim as f32).sqrt().recip();
    let chunk = shape.chunk.filter(|_| chunked);
    let over = Attention { chunk, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
    let mixed = r.graph.attention(q, k, v, over)?;
    let out = r.linear(mixed, &module("o_proj"), hidden_size, Precision::Fast)?;
    Ok(r.graph.add(x, out)?)
}

/// SwiGLU of h.
fn mlp(r: &mut Recorder, h: Value, module: &str, width: usize) -> Result<Value> {
    let gate = r.linear(h, &format!("{module}.gate_proj"), width, Precision::Fast)?;
    let up = r.linear(h, &format!("{module}.up_proj"), width, Precision::Fast)?;
    let product = r.graph.swiglu(gate, up)?;
    r.linear(product, &format!("{module}.down_proj"), h.width(), Precision::Fast)
}

/// Router, experts, shared expert of h.
fn moe(r: &mut Recorder, layer: usize, h: Value, route: Route, width: usize) -> Result<Value> {
    let base = format!("model.layers.{layer}.feed_forward");
    let logits = r.linear(h, &format!("{base}.router"), route.experts, Precision::F32)?;
    let routing = r.graph.route(logits, None, route)?;
    let shared = mlp(r, h, &format!("{base}.shared_expert"), width)?;
    let experts = r.transposed_experts(layer, route.experts, h.width(), &EXPERTS)?;
    let body = ExpertMlp { weighted: Weighted::Input, ..ExpertMlp::default() };
    let out = r.graph.moe_experts_with(h, routing, experts, body)?;
    Ok(r.graph.add(out, shared)?)
}
