//! Parts that families share: embedding, attention, dense and routed feed-forward, head.

use moeflux_compute::graph::{
    Activation, Attention, ExpertMlp, ExpertSetId, GroupRank, Groups, PositionScale, Precision, RopeStyle,
    Route, Score, Value, WeightId,
};

use super::config::Config;
use super::recorder::{ExpertNames, Form, Recorder};
use super::rope;
use crate::Result;
use crate::checkpoint::Format;

pub mod attention;
pub mod delta;
pub mod draft;
pub mod hybrid;
pub mod mamba2;
pub mod streams;

/// What every decoder's configuration says.
#[derive(Debug, Clone, Copy)]
pub struct Decoder {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Epsilon of all norms.
    pub eps: f32,
}

impl Decoder {
    /// Reads the shape keys that all families share; `eps` is the family's default.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what is missing or does not fit.
    pub fn new(config: &Config<'_>, eps: f64) -> Result<Self> {
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let kv_heads = config.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(config.unsupported("num_key_value_heads", &format!("a divisor of the {heads} heads")));
        }
        let head_dim = match config.optional_size("head_dim")? {
            Some(dim) => dim,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => {
                return Err(config.unsupported("hidden_size", &format!("a multiple of the {heads} heads")));
            }
        };
        let eps = config.magnitude("rms_norm_eps")?.unwrap_or(eps) as f32;
        Ok(Self { hidden_size, layers: layers(config)?, heads, kv_heads, head_dim, eps })
    }
}

/// Decoder layers, without those that predict further tokens, which GGUF counts with the others.
///
/// # Errors
/// [`crate::Error::Config`] for what is missing or leaves no layer.
pub fn layers(config: &Config<'_>) -> Result<usize> {
    let all = config.num_hidden_layers()?;
    if config.format() != Format::Gguf {
        return Ok(all);
    }
    match config.count("num_nextn_predict_layers")?.unwrap_or(0) {
        predicting if predicting < all => Ok(all - predicting),
        _ => Err(config.unsupported("num_nextn_predict_layers", &format!("below {all}"))),
    }
}

/// Refuses contexts beyond as many positions as `key` says, up to which a model computes what is implemented.
///
/// # Errors
/// [`crate::Error::Config`] if more positions are asked for.
pub fn limit_positions(r: &mut Recorder, config: &Config<'_>, key: &str) -> Result<()> {
    r.limit_context(config.positions(key)?);
    match (config.positions(key)?, config.context()) {
        (Some(limit), Some(wanted)) if wanted > limit => {
            Err(config.unsupported(key, &format!("at least the {wanted} positions of the context")))
        }
        _ => Ok(()),
    }
}

/// The window of each layer: as `layer_types` says, else of those that `slides` says; of `window` positions where no key
/// says how many.
///
/// # Errors
/// [`crate::Error::Config`] for unknown kinds or too few of them.
pub fn layer_windows(
    config: &Config<'_>,
    layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let window =
        if config.is_null("sliding_window") { None } else { config.positions("sliding_window")?.or(window) };
    let Some(types) = config.layer_kinds("layer_types")? else {
        return Ok((0..layers).map(|layer| window.filter(|_| slides(layer))).collect());
    };
    if types.len() != layers {
        return Err(config.unsupported("layer_types", &format!("a kind for each of {layers} layers")));
    }
    let kind = |kind: String| match kind.as_str() {
        "sliding_attention" => Ok(window),
        "full_attention" => Ok(None),
        _ => Err(config.unsupported("layer_types", "sliding_attention or full_attention")),
    };
    types.into_iter().map(kind).collect()
}

/// The truth value that the list under `key` has for each of `layers` layers.
///
/// # Errors
/// [`crate::Error::Config`] for something else, or too few.
pub fn flag_per_layer(config: &Config<'_>, key: &str, layers: usize) -> Result<Vec<bool>> {
    let flags = config.flags(key)?.filter(|flags| flags.len() >= layers);
    let flags = flags.ok_or_else(|| config.unsupported(key, &format!("{layers} truth values")))?;
    Ok(flags[..layers].to_vec())
}

/// For each of `layers` layers of a GGUF file whether it sees a window, by what the file has under `key`: a truth value for each,
/// or that every so many of them sees everything, by default every `every`; the last of so many, or the `first`.
///
/// # Errors
/// [`crate::Error::Config`] for something else, or too few.
pub fn gguf_slides(
    config: &Config<'_>,
    key: &str,
    layers: usize,
    (every, first): (usize, bool),
) -> Result<Vec<bool>> {
    if config.read(key, "", |value| Some(value.is_array()))?.unwrap_or(false) {
        return flag_per_layer(config, key, layers);
    }
    let every = config.optional_size(key)?.unwrap_or(every);
    Ok((0..layers).map(|layer| !(layer + usize::from(!first)).is_multiple_of(every)).collect())
}

/// For each of `layers` layers whether it sees a window, by the `kinds` that `layer_types` lists.
///
/// # Errors
/// [`crate::Error::Config`] for unknown kinds or another number of them.
pub fn kinds_slide(config: &Config<'_>, kinds: &[String], layers: usize) -> Result<Vec<bool>> {
    let kind = |kind: &String| match kind.as_str() {
        "sliding_attention" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    };
    let found: Option<Vec<bool>> = kinds.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        let expected = format!("sliding_attention or full_attention for each of {layers} layers");
        config.unsupported("layer_types", &expected)
    })
}

/// For each layer whether its feed-forward is dense: as `mlp_layer_types` says, else the first ones, by default as many
/// as `first`.
///
/// # Errors
/// [`crate::Error::Config`] for unknown kinds or too few of them.
pub fn dense_layers(config: &Config<'_>, layers: usize, first: usize) -> Result<Vec<bool>> {
    let Some(types) = config.words("mlp_layer_types")? else {
        let first = config.count("first_k_dense_replace")?.unwrap_or(first);
        return Ok((0..layers).map(|layer| layer < first).collect());
    };
    if types.len() != layers || types.iter().any(|kind| kind != "dense" && kind != "sparse") {
        let expected = format!("dense or sparse for each of {layers} layers");
        return Err(config.unsupported("mlp_layer_types", &expected));
    }
    Ok(types.iter().map(|kind| kind == "dense").collect())
}

/// Norm of queries and keys, before their rotation unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Each head on its own, one weight for all.
    PerHead,
    /// The same once they are rotated.
    PerHeadRotated,
    /// The whole vector before it is split into heads.
    Whole,
}

/// How a family's attention differs from plain grouped-query attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionKind {
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Limit on the magnitude of q, k and v.
    pub clip_qkv: Option<f32>,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Index of the rotation in the graph.
    pub rope: usize,
}

/// x times a factor.
pub fn times(r: &mut Recorder, x: Value, factor: f32) -> Value {
    if factor == 1.0 { x } else { r.graph.position_scale(x, PositionScale::constant(factor)) }
}

/// x plus the vector `name`.
///
/// # Errors
/// If it is missing or not as wide as x.
pub fn plus(r: &mut Recorder, x: Value, name: &str) -> Result<Value> {
    let negative = r.constants(name, &[x.width()], Form::F32Negative)?;
    let ones = r.made_up(name, [x.width(); 2], Form::Ones)?;
    Ok(r.graph.standardize(x, negative, ones)?)
}

/// Token embeddings, and the table for a tied head.
///
/// # Errors
/// If the checkpoint lacks the table or its width is not `hidden_size`.
pub fn embed(r: &mut Recorder, hidden_size: usize) -> Result<(Value, WeightId)> {
    let (x, table) = embed_tokens(r, hidden_size)?;
    Ok((r.with_embeddings(x), table))
}

/// As [`embed`], without what comes with pictures: families that scale embeddings put that in its place later.
///
/// # Errors
/// As [`embed`].
pub fn embed_tokens(r: &mut Recorder, hidden_size: usize) -> Result<(Value, WeightId)> {
    r.graph.scope("embed_tokens");
    let table = r.matrix("model.embed_tokens", None, hidden_size)?;
    Ok((r.graph.embed(table), table))
}

/// Adds the family's rotation to the graph, including Llama-style frequency factors that GGUF stores as a tensor;
/// `theta` is the family's default base.
///
/// # Errors
/// If the configuration asks for an unknown scaling.
pub fn rotation(
    r: &mut Recorder,
    config: &Config<'_>,
    rotary_dim: usize,
    style: RopeStyle,
    theta: f64,
) -> Result<usize> {
    rotation_of_axes(r, config, (rotary_dim, vec![]), style, theta)
}

/// As [`rotation`], of `rotary_dim` channels whose pairs rotate by positions on these `axes`.
///
/// # Errors
/// As [`rotation`].
pub fn rotation_of_axes(
    r: &mut Recorder,
    config: &Config<'_>,
    (rotary_dim, axes): (usize, Vec<u8>),
    style: RopeStyle,
    theta: f64,
) -> Result<usize> {
    let mut rope = rope::rotation(config, rotary_dim, style, theta)?;
    rope.axes = axes;
    if config.format() == Format::Gguf
        && let Some(factors) = r.values("rope_freqs.weight")?
    {
        if factors.len() != rope.inv_freq.len() || factors.iter().any(|f| !f.is_finite() || *f == 0.0) {
            return Err(crate::Error::Tensor {
                path: config.path().into(),
                tensor: "rope_freqs.weight".into(),
                expected: format!("{} finite divisors", rope.inv_freq.len()),
                got: format!("{factors:?}"),
            });
        }
        rope.inv_freq.iter_mut().zip(&factors).for_each(|(freq, factor)| *freq /= factor);
    }
    Ok(r.graph.rotation(rope))
}

/// Leading channels of a head that rotate: a part of the head, by default `factor`; or as many as GGUF and MLX files say.
///
/// # Errors
/// If the configuration asks for more than a head, or an odd number.
pub fn rotary_dim(config: &Config<'_>, head_dim: usize, factor: f64) -> Result<usize> {
    let given = match config.format() {
        Format::HuggingFace => None,
        _ => config.optional_size("rotary_dim")?,
    };
    let (key, dim) = match given {
        Some(dim) => ("rotary_dim", dim),
        None => {
            let factor = config.number("partial_rotary_factor")?.unwrap_or(factor);
            ("partial_rotary_factor", (head_dim as f64 * factor) as usize)
        }
    };
    if dim == 0 || dim % 2 != 0 || dim > head_dim {
        return Err(config.unsupported(key, &format!("an even number of the {head_dim} channels of a head")));
    }
    Ok(dim)
}

/// Norm, attention, residual.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn attention(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    x: Value,
    kind: &AttentionKind,
) -> Result<Value> {
    r.graph.scope(format!("layers.{layer}.self_attn"));
    let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
    let out = attention_of(r, d, layer, h, kind, (d.head_dim as f32).sqrt().recip())?;
    Ok(r.graph.add(x, out)?)
}

/// Attention of normed h, with `scale` as the factor on scores.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn attention_of(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    h: Value,
    kind: &AttentionKind,
    scale: f32,
) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let (q_width, kv_width) = (d.heads * d.head_dim, d.kv_heads * d.head_dim);
    let [mut q, mut k, mut v] = if r.has(&module("qkv_proj")) {
        let ends = [q_width, q_width + kv_width, q_width + 2 * kv_width];
        let mut part = |rows| r.linear_part(h, &module("qkv_proj"), ends[2], &[rows], Precision::Fast);
        [part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?]
    } else {
        let mut all = |name, width| r.linear(h, &module(name), width, Precision::Fast);
        [all("q_proj", q_width)?, all("k_proj", kv_width)?, all("v_proj", kv_width)?]
    };
    let after = kind.qk_norm == QkNorm::PerHeadRotated;
    if !after && kind.qk_norm != QkNorm::None {
        let groups = |heads| if kind.qk_norm == QkNorm::PerHead { heads } else { 1 };
        q = r.rms_norm(q, &module("q_norm"), groups(d.heads), d.eps)?;
        k = r.rms_norm(k, &module("k_norm"), groups(d.kv_heads), d.eps)?;
    }
    if let Some(limit) = kind.clip_qkv {
        (q, k, v) = (r.graph.clamp(q, limit), r.graph.clamp(k, limit), r.graph.clamp(v, limit));
    }
    q = r.graph.rope(q, d.heads, kind.rope)?;
    k = r.graph.rope(k, d.kv_heads, kind.rope)?;
    if after {
        q = r.rms_norm(q, &module("q_norm"), d.heads, d.eps)?;
        k = r.rms_norm(k, &module("k_norm"), d.kv_heads, d.eps)?;
    }
    let shape =
        Attention { window: kind.window, ..Attention::grouped(d.heads, d.kv_heads, d.head_dim, scale) };
    let sinks = r.sinks(layer, d.heads)?;
    let mixed = r.graph.attention_with_sinks(q, k, v, shape, sinks)?;
    r.linear(mixed, &module("o_proj"), d.hidden_size, Precision::Fast)
}

/// Norm, dense SwiGLU of `width`, residual.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn dense_mlp(r: &mut Recorder, d: &Decoder, layer: usize, x: Value, width: usize) -> Result<Value> {
    dense_mlp_of(r, d, layer, x, width, "mlp")
}

/// As [`dense_mlp`], of the layer's `module`.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn dense_mlp_of(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    x: Value,
    width: usize,
    module: &str,
) -> Result<Value> {
    let base = format!("model.layers.{layer}");
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
    let out = mlp(r, h, &format!("{base}.{module}"), width, Activation::SwiGlu)?;
    Ok(r.graph.add(x, out)?)
}

/// Gate and up of h (or up alone), their product by `activation`, down; gate and up may be one matrix.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn mlp(r: &mut Recorder, h: Value, module: &str, width: usize, activation: Activation) -> Result<Value> {
    if !activation.is_gated() {
        let up = r.linear(h, &format!("{module}.up_proj"), width, Precision::Fast)?;
        let product = r.graph.activate(activation, None, up)?;
        return r.linear(product, &format!("{module}.down_proj"), h.width(), Precision::Fast);
    }
    let joint = format!("{module}.gate_up_proj");
    let [gate, up] = if r.has(&joint) {
        let mut half = |rows| r.linear_part(h, &joint, 2 * width, &[rows], Precision::Fast);
        [half(0..width)?, half(width..2 * width)?]
    } else {
        let mut all = |name| r.linear(h, &format!("{module}.{name}"), width, Precision::Fast);
        [all("gate_proj")?, all("up_proj")?]
    };
    let product = r.graph.activate(activation, Some(gate), up)?;
    r.linear(product, &format!("{module}.down_proj"), h.width(), Precision::Fast)
}

/// A routed feed-forward block.
#[derive(Debug, Clone, Copy)]
pub struct Moe {
    /// How experts are chosen.
    pub route: Route,
    /// The router's module, below the layer.
    pub router: &'static str,
    /// The module, below the layer, whose `e_score_correction_bias` is added to scores for choosing.
    pub correction_bias: Option<&'static str>,
    /// Where the experts are.
    pub experts: ExpertNames,
    /// An MLP that every token passes through besides.
    pub shared: Option<SharedExpert>,
}

/// An MLP beside the routed experts, whose output is added to theirs.
#[derive(Debug, Clone, Copy)]
pub struct SharedExpert {
    /// Its module, below the layer; several shared experts are stored as one.
    pub module: &'static str,
    /// Its intermediate size.
    pub width: usize,
    /// The module, below the layer, of a linear layer to one logit whose sigmoid scales the output.
    pub gate: Option<&'static str>,
}

/// Shared experts below `mlp.shared_experts`, as many as `key` says or else `default`, each as wide as a routed one.
///
/// # Errors
/// [`crate::Error::Config`] for numbers that are none.
pub fn shared_experts(config: &Config<'_>, key: &str, default: usize) -> Result<Option<SharedExpert>> {
    let width = match config.count(key)? {
        // GGUF files say how wide or how many.
        None if config.format() == Format::Gguf => config.optional_size("shared_expert_intermediate_size")?,
        Some(0) => None,
        None if default == 0 => None,
        count => Some(count.unwrap_or(default).saturating_mul(config.size("moe_intermediate_size")?)),
    };
    Ok(width.map(|width| SharedExpert { module: "mlp.shared_experts", width, gate: None }))
}

/// Most experts of all layers, ten times what any model has: where each is stored takes memory.
const MOST_EXPERTS: usize = 1 << 20;

/// Experts of a layer.
///
/// # Errors
/// [`crate::Error::Config`] for what is missing, or more experts than memory is for.
pub fn experts(config: &Config<'_>) -> Result<usize> {
    check_experts(config, config.size("num_experts")?, config.num_hidden_layers()?)
}

/// `experts` of each of `layers` layers.
///
/// # Errors
/// [`crate::Error::Config`] if they are more than memory is for.
pub fn check_experts(config: &Config<'_>, experts: usize, layers: usize) -> Result<usize> {
    if experts * layers > MOST_EXPERTS {
        let expected = format!("at most {} in each of {layers} layers", MOST_EXPERTS / layers);
        return Err(config.unsupported("num_experts", &expected));
    }
    Ok(experts)
}

/// Checks that the experts that were declared last are as wide as `key` says.
///
/// # Errors
/// [`crate::Error::Config`] if they are not.
pub fn check_expert_width(r: &Recorder, config: &Config<'_>, key: &str, width: usize) -> Result<()> {
    match r.expert_width() {
        Some(own) if own != width => {
            Err(config.unsupported(key, &format!("the {own} rows of the experts' projections")))
        }
        _ => Ok(()),
    }
}

/// Experts of a layer, and how many of them a token goes through; `top_k` is the family's default.
///
/// # Errors
/// [`crate::Error::Config`] for what is missing, more experts than memory is for, or more per token than there are.
pub fn expert_counts(config: &Config<'_>, top_k: Option<usize>) -> Result<(usize, usize)> {
    let key = "num_experts_per_tok";
    let experts = experts(config)?;
    let top_k = config.optional_size(key)?.or(top_k).map_or_else(|| config.size(key), Ok)?;
    if top_k > experts {
        return Err(config.unsupported(key, &format!("at most the {experts} experts")));
    }
    Ok((experts, top_k))
}

/// The limit to the best groups of experts, if there are several; by default, `keep` of `count`.
///
/// # Errors
/// [`crate::Error::Config`] for numbers that are none.
pub fn groups(config: &Config<'_>, rank: GroupRank, (count, keep): (usize, usize)) -> Result<Option<Groups>> {
    let count = config.optional_size("n_group")?.unwrap_or(count);
    let keep = config.optional_size("topk_group")?.unwrap_or(keep);
    if keep > count {
        return Err(config.unsupported("topk_group", &format!("at most the {count} groups")));
    }
    if !config.size("num_experts")?.is_multiple_of(count) {
        return Err(config.unsupported("n_group", "a divisor of the number of experts"));
    }
    Ok((count > 1).then_some(Groups { count, keep, rank }))
}

/// DeepSeek-V3's routing as other families configure it: sigmoid scores, the best groups by their two best experts,
/// weights normalised unless it says otherwise, and scaled.
///
/// # Errors
/// If the configuration asks for other scores, or lacks the experts' numbers.
pub fn sigmoid_route(config: &Config<'_>) -> Result<Route> {
    // llama.cpp's number for sigmoid.
    if config.format() == Format::Gguf && config.count("expert_gating_func")?.unwrap_or(2) != 2 {
        return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
    }
    if config.word("scoring_func")?.is_some_and(|word| word != "sigmoid") {
        return Err(config.unsupported("scoring_func", "sigmoid"));
    }
    let (experts, top_k) = expert_counts(config, None)?;
    // In GGUF files 0 stands for none.
    let gguf = config.format() == Format::Gguf;
    let scale = config.magnitude("routed_scaling_factor")?.filter(|scale| !gguf || *scale != 0.0);
    Ok(Route {
        score: Score::Sigmoid,
        groups: groups(config, GroupRank::BestTwo, (1, 1))?,
        scale: scale.unwrap_or(1.0) as f32,
        ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?)
    })
}

/// Norm, router, experts, shared expert, residual.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn moe(r: &mut Recorder, d: &Decoder, layer: usize, x: Value, moe: &Moe) -> Result<Value> {
    let base = format!("model.layers.{layer}");
    r.graph.scope(format!("layers.{layer}.mlp"));
    let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, d.eps)?;
    let out = moe_of(r, layer, h, moe)?;
    Ok(r.graph.add(x, out)?)
}

/// Router, experts, shared expert of normed h.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn moe_of(r: &mut Recorder, layer: usize, h: Value, moe: &Moe) -> Result<Value> {
    moe_with(r, layer, h, moe, [Activation::SwiGlu; 2])
}

/// As [`moe_of`], with the activation of routed experts and that of the shared one.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn moe_with(
    r: &mut Recorder,
    layer: usize,
    h: Value,
    moe: &Moe,
    activations: [Activation; 2],
) -> Result<Value> {
    let declare = |r: &mut Recorder| r.experts(layer, moe.route.experts, h.width(), &moe.experts);
    moe_from(r, layer, h, (moe, activations), declare)
}

/// As [`moe_with`], whose experts `declare` finds.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn moe_from(
    r: &mut Recorder,
    layer: usize,
    h: Value,
    (moe, [routed, of_shared]): (&Moe, [Activation; 2]),
    declare: impl FnOnce(&mut Recorder) -> Result<ExpertSetId>,
) -> Result<Value> {
    let router = format!("model.layers.{layer}.{}", moe.router);
    let logits = r.linear(h, &router, moe.route.experts, Precision::F32)?;
    moe_by(r, layer, (h, logits), (moe, [routed, of_shared]), declare)
}

/// As [`moe_from`], by the router's `logits`.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn moe_by(
    r: &mut Recorder,
    layer: usize,
    (h, logits): (Value, Value),
    (moe, [routed, of_shared]): (&Moe, [Activation; 2]),
    declare: impl FnOnce(&mut Recorder) -> Result<ExpertSetId>,
) -> Result<Value> {
    let base = format!("model.layers.{layer}");
    let bias = match moe.correction_bias {
        Some(module) => Some(r.correction_bias(&format!("{base}.{module}"), moe.route.experts)?),
        None => None,
    };
    let routing = r.graph.route(logits, bias, moe.route)?;
    // Before the experts, so that it is computed while they are read.
    let shared = match &moe.shared {
        Some(shared) => Some(shared_expert(r, &base, h, shared, of_shared)?),
        None => None,
    };
    let experts = declare(r)?;
    let mlp = ExpertMlp { activation: routed, ..ExpertMlp::default() };
    let out = r.graph.moe_experts_with(h, routing, experts, mlp)?;
    match shared {
        Some(shared) => Ok(r.graph.add(out, shared)?),
        None => Ok(out),
    }
}

/// The MLP of all tokens, scaled by its gate if it has one.
fn shared_expert(
    r: &mut Recorder,
    base: &str,
    h: Value,
    shared: &SharedExpert,
    activation: Activation,
) -> Result<Value> {
    let out = mlp(r, h, &format!("{base}.{}", shared.module), shared.width, activation)?;
    let Some(gate) = shared.gate else { return Ok(out) };
    let gate = r.linear(h, &format!("{base}.{gate}"), 1, Precision::F32)?;
    Ok(r.graph.sigmoid_gate(out, gate)?)
}

/// Output rows, final norm, logits; the head is `table` if the embeddings are tied.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn head(r: &mut Recorder, config: &Config<'_>, x: Value, table: WeightId, eps: f32) -> Result<Value> {
    let tied = is_tied(r, config)?;
    head_of(r, x, (table, tied), eps)
}

/// As [`head`], whose weights are those of `table` if it is `tied`.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn head_of(r: &mut Recorder, x: Value, (table, tied): (WeightId, bool), eps: f32) -> Result<Value> {
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = r.rms_norm(rows, "model.norm", 1, eps)?;
    logits_of(r, h, (table, tied))
}

/// As [`head`], whose logits are softly capped.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn capped_head(
    r: &mut Recorder,
    config: &Config<'_>,
    x: Value,
    (table, eps): (WeightId, f32),
    cap: f32,
) -> Result<Value> {
    let tied = is_tied(r, config)?;
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = r.rms_norm(rows, "model.norm", 1, eps)?;
    capped_logits(r, h, (table, tied), cap)
}

/// Softly capped logits of normed output rows; the head is `table` if the embeddings are `tied`.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn capped_logits(r: &mut Recorder, h: Value, (table, tied): (WeightId, bool), cap: f32) -> Result<Value> {
    let vocab_size = r.graph.matrix(table).rows;
    let weight = if tied { table } else { r.matrix("lm_head", Some(vocab_size), h.width())? };
    let bias = r.optional_vector("lm_head", "bias", vocab_size)?;
    Ok(r.graph.capped_linear(h, weight, bias, Precision::Fast, cap)?)
}

/// Logits of normed output rows; the head is `table` if the embeddings are tied.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn logits(r: &mut Recorder, config: &Config<'_>, h: Value, table: WeightId) -> Result<Value> {
    let tied = is_tied(r, config)?;
    logits_of(r, h, (table, tied))
}

/// Whether the head is the table of embeddings. Of multimodal models either configuration may say so. A head that is in
/// the file is used whatever they say, as transformers does; mlx-lm drops it where embeddings are tied.
///
/// # Errors
/// [`crate::Error::Config`] if one says neither true nor false.
pub fn is_tied(r: &Recorder, config: &Config<'_>) -> Result<bool> {
    let has_head = r.has("lm_head");
    if config.format() == Format::Gguf {
        return Ok(!has_head);
    }
    let key = "tie_word_embeddings";
    let (own, outer) = (config.flag(key, false)?, config.outer_flag(key, false)?);
    let dropped = config.format() == Format::Mlx && own && outer;
    Ok((own || outer) && (dropped || !has_head))
}

fn logits_of(r: &mut Recorder, h: Value, (table, tied): (WeightId, bool)) -> Result<Value> {
    let vocab_size = r.graph.matrix(table).rows;
    if tied {
        let bias = r.optional_vector("lm_head", "bias", vocab_size)?;
        return Ok(r.graph.linear(h, table, bias, Precision::Fast)?);
    }
    r.linear(h, "lm_head", vocab_size, Precision::Fast)
}
