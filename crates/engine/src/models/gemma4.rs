//! Gemma 4 26B-A4B, the text part; the tower that reads pictures is in [`super::vision`]. A dense MLP and routed experts side by side, each behind norms of its own; norms before
//! and after every block; a router on normed input, with a factor for each expert; layers of two kinds with heads of two
//! widths and rotations of their own, of which full ones may take their keys for values too.
//!
//! Source: transformers `modeling_gemma4.py`; GGUF architecture `gemma4`. Layers that read other layers' keys and values
//! are refused, as are models without experts.

use moeflux_compute::graph::{
    Activation, Attention, ExpertMlp, Precision, Rope, RopeStyle, Route, Score, Value,
};
use serde_json::Value as Json;

use super::blocks::{self, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names, POST_ATTENTION_NORM};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, rope};
use crate::checkpoint::Format;
use crate::{Error, Result};

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Gemma 4 MoE (text)",
    model_types: &["gemma4", "gemma4_text"],
    gguf_architectures: &["gemma4"],
    // All are the form by the hyperbolic tangent.
    hidden_act: &["gelu_pytorch_tanh", "gelu_new", "gelu_fast"],
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS, POST_ATTENTION_NORM],
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
        ..Names::COMMON
    },
    record,
};

/// Modules and tensors of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("router.proj", "ffn_gate_inp"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("sliding_head_dim", "attention.key_length_swa"),
    ("slides", "attention.sliding_window_pattern"),
    ("num_kv_shared_layers", "attention.shared_kv_layers"),
    ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("sliding_rotary_dim", "rope.dimension_count_swa"),
    ("sliding_rope_theta", "rope.freq_base_swa"),
];

/// What llama.cpp's converter divides the frequencies of channels by that do not rotate.
const STILL: f32 = 1e30;

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2304)),
    ("intermediate_size", DefaultValue::Count(9216)),
    ("num_hidden_layers", DefaultValue::Count(30)),
    ("num_attention_heads", DefaultValue::Count(8)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(256)),
    ("sliding_window", DefaultValue::Count(512)),
    ("hidden_size_per_layer_input", DefaultValue::Count(256)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
];

/// The rotary parameters of configurations that have none.
fn default_rope() -> Json {
    serde_json::json!({
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6 },
    })
}

/// Attention of a layer.
#[derive(Debug, Clone, Copy)]
struct Layer {
    /// Positions that are seen, where not all are.
    window: Option<usize>,
    kv_heads: usize,
    head_dim: usize,
    /// Whether keys are values too.
    shares: bool,
    /// Index of the rotation in the graph.
    rope: usize,
}

/// What all layers have.
#[derive(Debug, Clone, Copy)]
struct Model {
    hidden_size: usize,
    layers: usize,
    heads: usize,
    eps: f32,
    experts: usize,
    top_k: usize,
    /// Width of the MLP.
    width: usize,
    /// Channels of each layer's own embedding; 0 without.
    embedded: usize,
    /// Whether tokens of a picture see all of it, where layers see a window.
    looks_ahead: bool,
}

impl Model {
    fn new(config: &Config<'_>) -> Result<Self> {
        for (key, expected) in [("enable_moe_block", "true"), ("num_kv_shared_layers", "0")] {
            let fits = match key {
                "enable_moe_block" => config.format() == Format::Gguf || config.flag(key, false)?,
                // mlx-lm's default.
                _ if config.format() == Format::Mlx => config.count(key)? == Some(0),
                _ => config.count(key)?.unwrap_or(0) == 0,
            };
            if !fits {
                return Err(config.unsupported(key, expected));
            }
        }
        let bidirectional = config.word("use_bidirectional_attention")?;
        if bidirectional.as_deref().is_some_and(|word| word != "vision") {
            return Err(config.unsupported("use_bidirectional_attention", "null or vision"));
        }
        let (experts, top_k) = blocks::expert_counts(config, None)?;
        Ok(Self {
            hidden_size: config.size("hidden_size")?,
            layers: blocks::layers(config)?,
            heads: config.size("num_attention_heads")?,
            eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            experts,
            top_k,
            width: config.size("intermediate_size")?,
            embedded: match (config.count("hidden_size_per_layer_input")?, config.format()) {
                (None, Format::Mlx) => 256,
                (count, _) => count.unwrap_or(0),
            },
            // GGUF files do not say; published models with experts do it.
            looks_ahead: bidirectional.is_some() || config.format() == Format::Gguf,
        })
    }
}

/// For each layer whether it sees a window.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        let flags = config.flags("slides")?.filter(|flags| flags.len() >= layers);
        let flags = flags.ok_or_else(|| config.unsupported("slides", &format!("{layers} truth values")))?;
        return Ok(flags[..layers].to_vec());
    }
    // mlx-lm leaves the last layer as it is.
    let forced = config.format() == Format::HuggingFace;
    let Some(kinds) = config.words("layer_types")? else {
        let every = match config.format() {
            Format::Mlx => config.optional_size("sliding_window_pattern")?.unwrap_or(5),
            _ => 6,
        };
        let attends_all = |layer: usize| (layer + 1).is_multiple_of(every) || (forced && layer + 1 == layers);
        return Ok((0..layers).map(|layer| !attends_all(layer)).collect());
    };
    let kind = |(layer, kind): (usize, &String)| match kind.as_str() {
        "sliding_attention" => Some(!(forced && layer + 1 == layers)),
        "full_attention" => Some(false),
        _ => None,
    };
    let slides: Option<Vec<bool>> = kinds.iter().enumerate().map(kind).collect();
    slides.filter(|slides| slides.len() == layers).ok_or_else(|| {
        let expected = format!("sliding_attention or full_attention for each of {layers} layers");
        config.unsupported("layer_types", &expected)
    })
}

/// Heads of keys and channels of a head, of each layer.
fn head_shapes(config: &Config<'_>, sliding: &[bool]) -> Result<Vec<[usize; 2]>> {
    if config.format() == Format::Gguf {
        let full = config.size("head_dim")?;
        let narrow = config.optional_size("sliding_head_dim")?.unwrap_or(full);
        let key = "num_key_value_heads";
        let listed = config.read(key, "", |value| Some(value.is_array()))?.unwrap_or(false);
        let heads = match config.per_layer(key, sliding.len()) {
            Ok(heads) if listed => heads.unwrap_or_default(),
            Err(error) if listed => return Err(error),
            _ => vec![config.size(key)?; sliding.len()],
        };
        let shape = |(slides, heads): (&bool, usize)| [heads, if *slides { narrow } else { full }];
        return Ok(sliding.iter().zip(heads).map(shape).collect());
    }
    let own = [config.size("num_key_value_heads")?, config.size("head_dim")?];
    let key = "per_layer_config";
    let overrides = config.read(key, "an object", |value| value.as_object().cloned())?;
    let Some(overrides) = overrides else {
        // Where it is null, layers are alike.
        let alike = config.is_null(key);
        let head_dim = config.optional_size("global_head_dim")?.unwrap_or(512);
        let heads = match config.optional_size("num_global_key_value_heads")? {
            Some(heads) if config.flag("attention_k_eq_v", false)? => heads,
            _ => own[0],
        };
        let shape = |slides: &bool| if *slides || alike { own } else { [heads, head_dim] };
        return Ok(sliding.iter().map(shape).collect());
    };
    let expected = "head_dim and num_key_value_heads of layers by their numbers";
    let shape = |layer: usize| {
        let mut shape = own;
        let Some(values) = overrides.get(&layer.to_string()) else { return Some(shape) };
        for (key, value) in values.as_object()? {
            let size = value.as_u64().filter(|n| (1..=super::config::MAX_SIZE).contains(n));
            match key.as_str() {
                "num_key_value_heads" => shape[0] = size? as usize,
                "head_dim" => shape[1] = size? as usize,
                _ => return None,
            }
        }
        Some(shape)
    };
    let shapes: Option<Vec<_>> = (0..sliding.len()).map(shape).collect();
    shapes.ok_or_else(|| config.unsupported(key, expected))
}

/// Adds a layer's rotation to the graph.
fn rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<usize> {
    let style = RopeStyle::HalfSplit;
    if config.format() == Format::Gguf {
        return gguf_rotation(r, config, slides, head_dim);
    }
    let (name, theta) = if slides { ("sliding_attention", 1e4) } else { ("full_attention", 1e6) };
    let own = config.with_rope(name)?;
    let own = own.ok_or_else(|| config.unsupported("rope_parameters", &format!("parameters of {name}")))?;
    let theta = own.rope_number("rope_theta")?.unwrap_or(theta);
    let part = own.rope_number("partial_rotary_factor")?;
    let rope = match own.word("rope_type")?.as_deref() {
        None | Some("default") => rope::plain(&own, head_dim, style, theta)?,
        Some("proportional") => {
            let mut rope = rope::plain(&own, head_dim, style, theta)?;
            let pairs = part.unwrap_or(1.0) * head_dim as f64 / 2.0;
            if !(0.0..=(head_dim / 2) as f64).contains(&pairs) {
                return Err(own.unsupported("partial_rotary_factor", "a part of a head"));
            }
            let factor = own.rope_number("factor")?.unwrap_or(1.0) as f32;
            if factor == 0.0 {
                return Err(own.unsupported("factor", "a number other than 0"));
            }
            rope.inv_freq.iter_mut().for_each(|freq| *freq /= factor);
            // These channels have pairs, which do not rotate.
            rope.inv_freq.iter_mut().skip(pairs as usize).for_each(|freq| *freq = 0.0);
            rope
        }
        Some(_) if part.is_some_and(|part| part != 1.0) => {
            return Err(own.unsupported("partial_rotary_factor", "1, for this kind of rope scaling"));
        }
        Some(_) => rope::scaled(&own, head_dim, style, theta)?,
    };
    Ok(r.graph.rotation(rope))
}

/// As llama.cpp has it: layers that see everything have divisors of their frequencies.
fn gguf_rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<usize> {
    let style = RopeStyle::HalfSplit;
    let theta = config.number("rope_theta")?.unwrap_or(1e4);
    let all = config.optional_size("rotary_dim")?;
    let (dim, theta) = if slides {
        let dim = config.optional_size("sliding_rotary_dim")?.or(all);
        (dim, config.number("sliding_rope_theta")?.unwrap_or(theta))
    } else {
        (all, theta)
    };
    let dim = dim.unwrap_or(head_dim);
    if dim > head_dim || dim % 2 != 0 {
        let key = if slides { "sliding_rotary_dim" } else { "rotary_dim" };
        return Err(config.unsupported(key, &format!("an even number of the {head_dim} channels of a head")));
    }
    let mut rope: Rope = rope::scaled(config, dim, style, theta)?;
    let name = "rope_freqs.weight";
    if r.is_outline() && !slides {
        // A quarter of the channels rotate in published models.
        let pairs = rope.inv_freq.len();
        let divisors = |pair| if pair < pairs / 4 { 1.0 } else { STILL };
        r.outline_values(name, &(0..pairs).map(divisors).collect::<Vec<f32>>())?;
    }
    if let Some(divisors) = r.values(name)?.filter(|_| !slides) {
        let wrong = divisors.iter().any(|f| !f.is_finite() || *f == 0.0);
        if divisors.len() != rope.inv_freq.len() || wrong {
            return Err(Error::Tensor {
                path: config.path().into(),
                tensor: name.into(),
                expected: format!("{} finite divisors", rope.inv_freq.len()),
                got: format!("{divisors:?}"),
            });
        }
        rope.inv_freq.iter_mut().zip(&divisors).for_each(|(freq, divisor)| *freq /= divisor);
    }
    Ok(r.graph.rotation(rope))
}

/// The layers' attention.
fn layers(r: &mut Recorder, config: &Config<'_>, model: &Model) -> Result<Vec<Layer>> {
    let sliding = slides(config, model.layers)?;
    let window = config.positions("sliding_window")?;
    if window.is_none() && sliding.contains(&true) {
        return Err(config.unsupported("sliding_window", "a number of positions"));
    }
    let same = config.format() != Format::Gguf && config.flag("attention_k_eq_v", false)?;
    let shapes = head_shapes(config, &sliding)?;
    let layer = |(layer, (slides, [kv_heads, head_dim])): (usize, (bool, [usize; 2]))| {
        if kv_heads == 0 || !model.heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of the {} heads", model.heads);
            return Err(config.unsupported("num_key_value_heads", &expected));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(config.unsupported("head_dim", "an even number"));
        }
        let v = format!("model.layers.{layer}.self_attn.v_proj");
        let gguf = config.format() == Format::Gguf;
        let joint = gguf && r.has(&format!("model.layers.{layer}.self_attn.qkv_proj"));
        // An outline does not know of which layer a name is: published models have it so.
        let absent = if r.is_outline() { !slides } else { !r.has(&v) };
        let shares = !slides && same || gguf && !joint && absent;
        let rope = rotation(r, config, slides, head_dim)?;
        Ok(Layer { window: window.filter(|_| slides), kv_heads, head_dim, shares, rope })
    };
    sliding.into_iter().zip(shapes).enumerate().map(layer).collect()
}

/// Attention of normed h.
fn attention(r: &mut Recorder, model: &Model, index: usize, layer: &Layer, h: Value) -> Result<Value> {
    let Layer { window, kv_heads, head_dim, shares, rope } = *layer;
    let module = |name: &str| format!("model.layers.{index}.self_attn.{name}");
    let (q_width, kv_width) = (model.heads * head_dim, kv_heads * head_dim);
    let (q, k, v) = if r.format() == Format::Gguf && r.has(&module("qkv_proj")) {
        let ends = [q_width, q_width + kv_width, q_width + 2 * kv_width];
        let mut part = |rows| r.linear_part(h, &module("qkv_proj"), ends[2], &[rows], Precision::Fast);
        (part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?)
    } else {
        let q = r.linear(h, &module("q_proj"), q_width, Precision::Fast)?;
        let k = r.linear(h, &module("k_proj"), kv_width, Precision::Fast)?;
        let v = if shares { k } else { r.linear(h, &module("v_proj"), kv_width, Precision::Fast)? };
        (q, k, v)
    };
    let q = r.rms_norm(q, &module("q_norm"), model.heads, model.eps)?;
    let k = r.rms_norm(k, &module("k_norm"), kv_heads, model.eps)?;
    let v = r.graph.unit_norm(v, kv_heads, model.eps)?;
    let q = r.graph.rope(q, model.heads, rope)?;
    let k = r.graph.rope(k, kv_heads, rope)?;
    let ahead = model.looks_ahead && window.is_some() && r.reads_pictures();
    let shape = Attention { window, ahead, ..Attention::grouped(model.heads, kv_heads, head_dim, 1.0) };
    let mixed = r.graph.attention(q, k, v, shape)?;
    r.linear(mixed, &module("o_proj"), model.hidden_size, Precision::Fast)
}

/// The router and the experts on x, which is not normed.
fn routed(r: &mut Recorder, model: &Model, layer: usize, x: Value) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.{name}");
    let scale = r.constants(&module("router.scale"), &[model.hidden_size], Form::F32)?;
    let h = r.graph.rms_norm(x, scale, 1, model.eps)?;
    let h = times(r, h, (model.hidden_size as f32).sqrt().recip());
    let logits = r.linear(h, &module("router.proj"), model.experts, Precision::F32)?;
    let scales = r.constants(&module("router.per_expert_scale"), &[model.experts], Form::F32)?;
    // As softmax over all and division by the sum of the chosen.
    let route = Route { score: Score::SoftmaxOfChosen, ..Route::softmax(model.experts, model.top_k, false) };
    let routing = r.graph.scaled_route(logits, None, scales, route)?;
    let h = r.rms_norm(x, &module("pre_feedforward_layernorm_2"), 1, model.eps)?;
    let names = ExpertNames {
        module: if r.format() == Format::Mlx { "experts.switch_glu" } else { "experts" },
        projections: ["gate_proj", "up_proj", "down_proj"],
    };
    let experts = r.experts(layer, model.experts, model.hidden_size, &names)?;
    let mlp = ExpertMlp { activation: Activation::GeGlu, ..ExpertMlp::default() };
    let out = r.graph.moe_experts_with(h, routing, experts, mlp)?;
    r.rms_norm(out, &module("post_feedforward_layernorm_2"), 1, model.eps)
}

/// What every layer is given of a token besides the residual stream: (tokens, layers · channels).
fn layer_inputs(r: &mut Recorder, model: &Model, x: Value, vocab_size: usize) -> Result<Value> {
    let (width, channels) = (model.layers * model.embedded, model.embedded as f32);
    r.graph.scope("embed_tokens_per_layer");
    let table = r.matrix("model.embed_tokens_per_layer", Some(vocab_size), width)?;
    let own = r.graph.embed(table);
    let own = times(r, own, channels.sqrt());
    let seen = r.linear(x, "model.per_layer_model_projection", width, Precision::Fast)?;
    let seen = times(r, seen, (model.hidden_size as f32).sqrt().recip());
    let seen = r.rms_norm(seen, "model.per_layer_projection_norm", model.layers, model.eps)?;
    let sum = r.graph.add(seen, own)?;
    Ok(times(r, sum, std::f32::consts::FRAC_1_SQRT_2))
}

/// A layer's input gated by the residual stream, added to it.
fn add_layer_input(r: &mut Recorder, model: &Model, layer: usize, x: Value, inputs: Value) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.{name}");
    let own = r.graph.slice(inputs, 1, layer * model.embedded, model.embedded)?;
    let gate = r.linear(x, &module("per_layer_input_gate"), model.embedded, Precision::Fast)?;
    let gated = r.graph.activate(Activation::GeGlu, Some(gate), own)?;
    let out = r.linear(gated, &module("per_layer_projection"), model.hidden_size, Precision::Fast)?;
    let out = r.rms_norm(out, &module("post_per_layer_input_norm"), 1, model.eps)?;
    Ok(r.graph.add(x, out)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let defaults = default_rope();
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&defaults);
    let model = Model::new(config)?;
    let layers = layers(r, config, &model)?;
    let cap = match (config.number("final_logit_softcapping")?, config.format()) {
        (None, Format::Mlx) if !config.is_null("final_logit_softcapping") => Some(30.0),
        (Some(0.0), Format::Gguf) => None,
        (Some(0.0), _) => {
            return Err(config.unsupported("final_logit_softcapping", "a number other than 0"));
        }
        (cap, _) => cap,
    };

    let (x, table) = blocks::embed_tokens(r, model.hidden_size)?;
    let x = times(r, x, (model.hidden_size as f32).sqrt());
    let mut x = r.with_embeddings(x);
    let inputs = match model.embedded {
        0 => None,
        _ => {
            let rows = r.graph.matrix(table).rows;
            Some(layer_inputs(r, &model, x, rows)?)
        }
    };
    for (index, layer) in layers.iter().enumerate() {
        let base = format!("model.layers.{index}");
        let norm = |r: &mut Recorder, x, name: &str| r.rms_norm(x, &format!("{base}.{name}"), 1, model.eps);
        r.graph.scope(format!("layers.{index}.self_attn"));
        let h = norm(r, x, "input_layernorm")?;
        let out = attention(r, &model, index, layer, h)?;
        let out = norm(r, out, "post_attention_layernorm")?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{index}.mlp"));
        let h = norm(r, x, "pre_feedforward_layernorm")?;
        let out = blocks::mlp(r, h, &format!("{base}.mlp"), model.width, Activation::GeGlu)?;
        let dense = norm(r, out, "post_feedforward_layernorm_1")?;
        let routed = routed(r, &model, index, x)?;
        let out = r.graph.add(dense, routed)?;
        let out = norm(r, out, "post_feedforward_layernorm")?;
        x = r.graph.add(x, out)?;
        if let Some(inputs) = inputs {
            x = add_layer_input(r, &model, index, x, inputs)?;
        }
        let factor = format!("{base}.layer_scalar");
        // GGUF files may lack it.
        let absent = config.format() == Format::Gguf && !r.is_outline() && !r.has_parameter(&factor);
        let factor = if absent { 1.0 } else { r.required_scalar(&factor)? };
        x = times(r, x, factor);
    }
    match cap {
        Some(cap) => blocks::capped_head(r, config, x, (table, model.eps), cap.abs() as f32),
        None => blocks::head(r, config, x, table, model.eps),
    }
}
