//! Inkling's text model. No rotation: what a query says of each distance is added to scores; short convolutions after keys, values,
//! attention and feed-forward; shared experts that take part in the weights of the routed ones.
//!
//! Source: transformers `modeling_inkling.py`; llama.cpp and mlx-lm do not have it. Published inside multimodal checkpoints under
//! names of their own, gate and up interleaved. Shared experts are kept as routed ones are, and always chosen.

use moeflux_compute::graph::{Activation, Attention, PositionScale, Precision, Route, Score, Value};

use super::blocks;
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{Form, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Inkling",
    model_types: &["inkling_mm_model", "inkling_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_tensors: OTHER_TENSORS,
        other_keys: &[
            ("max_position_embeddings", "model_max_length"),
            ("conv_kernel_size", "sconv_kernel_size"),
            ("sliding_window_size", "sliding_window"),
        ],
        prefixes: &["model.", "model.language_model.", "model.llm."],
        top: &["embed_tokens", "embed"],
        renamed: &[
            ("embed_tokens", "embed"),
            ("embed_tokens.embed_norm", "embed_norm"),
            ("lm_head", "model.llm.unembed"),
        ],
        ..Names::COMMON
    },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "mlp_norm"),
    ("self_attn.q_proj", "attn.wq_du"),
    ("self_attn.k_proj", "attn.wk_dv"),
    ("self_attn.v_proj", "attn.wv_dv"),
    ("self_attn.r_proj", "attn.wr_du"),
    ("self_attn.o_proj", "attn.wo_ud"),
    ("self_attn.q_norm", "attn.q_norm"),
    ("self_attn.k_norm", "attn.k_norm"),
    ("self_attn.k_sconv.conv1d", "attn.k_sconv"),
    ("self_attn.v_sconv.conv1d", "attn.v_sconv"),
    ("self_attn.rel_logits_proj.proj", "attn.rel_logits_proj.proj"),
    ("attn_sconv.conv1d", "attn_sconv"),
    ("mlp_sconv.conv1d", "mlp_sconv"),
    ("mlp.down_proj", "mlp.w2_md"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.bias"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(6144)),
    ("moe_intermediate_size", DefaultValue::Count(3072)),
    ("num_hidden_layers", DefaultValue::Count(66)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("swa_num_attention_heads", DefaultValue::Count(64)),
    ("swa_num_key_value_heads", DefaultValue::Count(16)),
    ("swa_head_dim", DefaultValue::Count(128)),
    ("sliding_window_size", DefaultValue::Count(512)),
    ("d_rel", DefaultValue::Count(16)),
    ("rel_extent", DefaultValue::Count(1024)),
    ("conv_kernel_size", DefaultValue::Count(4)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("n_shared_experts", DefaultValue::Count(2)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// x and a causal convolution of it by `module`.
fn convolved(r: &mut Recorder, x: Value, module: &str, kernel: usize) -> Result<Value> {
    let taps = r.constants(&format!("{module}.conv1d.weight"), &[x.width(), kernel], Form::F32)?;
    let mixed = r.graph.plain_conv1d(x, taps, None, kernel)?;
    Ok(r.graph.add(x, mixed)?)
}

/// For each layer whether it sees a window: as `layer_types` says, else those of `local_layer_ids`, else all but every sixth.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(kinds) = config.words("layer_types")? else {
        let key = "local_layer_ids";
        let local = config.read(key, "", |value| Some(value.is_array()))?.unwrap_or(false);
        let ids = if local { config.sizes(key)? } else { vec![] };
        let slides = |layer: usize| if local { ids.contains(&layer) } else { !(layer + 1).is_multiple_of(6) };
        return Ok((0..layers).map(slides).collect());
    };
    let known = ["hybrid_sliding", "hybrid"];
    if kinds.len() != layers || kinds.iter().any(|kind| !known.contains(&kind.as_str())) {
        let expected = format!("hybrid_sliding or hybrid for each of {layers} layers");
        return Err(config.unsupported("layer_types", &expected));
    }
    Ok(kinds.iter().map(|kind| kind == known[0]).collect())
}

/// For each layer whether its feed-forward is dense, and the widths of such and of experts. Published configurations give the
/// first of these a name of its own, and the other its.
fn feed_forward(config: &Config<'_>, layers: usize) -> Result<(Vec<bool>, usize)> {
    let first = config.count("dense_mlp_idx")?.unwrap_or(0);
    let dense = match config.words("mlp_layer_types")? {
        Some(_) => blocks::dense_layers(config, layers, 0)?,
        None => (0..layers).map(|layer| layer < first).collect(),
    };
    let width = config.optional_size("dense_intermediate_size")?;
    let width = width.or(config.optional_size("intermediate_size")?).unwrap_or(24576);
    Ok((dense, width))
}

/// Heads of a kind of layers.
#[derive(Debug, Clone, Copy)]
struct Heads {
    shape: Attention,
    /// Distances for which something is added to scores.
    extent: usize,
}

impl Heads {
    fn new(config: &Config<'_>, slides: bool) -> Result<Self> {
        let key = |full, sliding| if slides { sliding } else { full };
        let heads = config.size(key("num_attention_heads", "swa_num_attention_heads"))?;
        let kv_key = key("num_key_value_heads", "swa_num_key_value_heads");
        let kv_heads = config.size(kv_key)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(config.unsupported(kv_key, &format!("a divisor of the {heads} heads")));
        }
        let head_dim = config.size(key("head_dim", "swa_head_dim"))?;
        let extent = config.size(key("rel_extent", "sliding_window_size"))?;
        // Queries and keys are normed.
        let shape = Attention::grouped(heads, kv_heads, head_dim, (head_dim as f32).recip());
        Ok(Self { shape: Attention { window: slides.then_some(extent), ..shape }, extent })
    }

    /// Attention of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value, sizes: [usize; 2], eps: f32) -> Result<Value> {
        let Attention { heads, kv_heads, head_dim, .. } = self.shape;
        let [kernel, d_rel] = sizes;
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let q = r.linear(h, &module("q_proj"), heads * head_dim, Precision::Fast)?;
        let k = r.linear(h, &module("k_proj"), kv_heads * head_dim, Precision::Fast)?;
        let k = convolved(r, k, &module("k_sconv"), kernel)?;
        let v = r.linear(h, &module("v_proj"), kv_heads * head_dim, Precision::Fast)?;
        let v = convolved(r, v, &module("v_sconv"), kernel)?;
        let relative = r.linear(h, &module("r_proj"), heads * d_rel, Precision::Fast)?;
        let q = r.rms_norm(q, &module("q_norm"), heads, eps)?;
        let k = r.rms_norm(k, &module("k_norm"), kv_heads, eps)?;
        let profiles =
            r.transposed_parameter(&module("rel_logits_proj.proj"), [d_rel, self.extent], heads)?;
        let added = r.graph.grouped_linear(relative, profiles, heads, Precision::F32)?;
        let mixed = r.graph.attention_by_distance([q, k, v], self.shape, added)?;
        r.linear(mixed, &module("o_proj"), h.width(), Precision::Fast)
    }
}

/// Gate and up of h, their product, down, times a factor.
fn dense_mlp(r: &mut Recorder, layer: usize, h: Value, width: usize) -> Result<Value> {
    let base = format!("model.layers.{layer}.mlp");
    let joint = format!("{base}.w13_dn");
    let out = if r.has(&joint) {
        let every =
            |first: usize| (0..width).map(|row| 2 * row + first..2 * row + first + 1).collect::<Vec<_>>();
        let gate = r.linear_part(h, &joint, 2 * width, &every(0), Precision::Fast)?;
        let up = r.linear_part(h, &joint, 2 * width, &every(1), Precision::Fast)?;
        let product = r.graph.swiglu(gate, up)?;
        r.linear(product, &format!("{base}.down_proj"), h.width(), Precision::Fast)?
    } else {
        blocks::mlp(r, h, &base, width, Activation::SwiGlu)?
    };
    let factor = r.required_scalar(&format!("{base}.global_scale"))?;
    Ok(blocks::times(r, out, factor))
}

/// Router, experts and shared experts of normed h, whose weights add up to a factor together.
fn moe(r: &mut Recorder, layer: usize, h: Value, route: Route, shared: usize) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.mlp.gate{name}");
    let all = route.experts + shared;
    // Not `Recorder::linear`: published checkpoints call the correction bias the router's bias.
    let router = r.matrix(&module(""), Some(all), h.width())?;
    let logits = r.graph.linear(h, router, None, Precision::F32)?;
    let factor = r.required_scalar(&module(".global_scale"))?;
    let form = Form::Followed { count: shared };
    let bias = r.constants(&module(".e_score_correction_bias"), &[route.experts], form)?;
    let route = Route { experts: all, top_k: route.top_k + shared, scale: route.scale * factor, ..route };
    let routing = r.graph.route(logits, Some(bias), route)?;
    let experts = r.experts_with_shared(layer, [all - shared, shared], h.width())?;
    Ok(r.graph.moe_experts(h, routing, experts)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let sliding = slides(config, layers)?;
    let heads = [Heads::new(config, false)?, Heads::new(config, true)?];
    if sliding.contains(&false) {
        // Further on scores of layers without a window grow.
        blocks::limit_positions(r, config, "log_scaling_n_floor")?;
    }
    let (dense, width) = feed_forward(config, layers)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let scale = config.number("route_scale")?.unwrap_or(8.0) as f32;
    let route = Route { score: Score::Sigmoid, scale, ..Route::softmax(experts, top_k, true) };
    let shared = config.size("n_shared_experts")?;
    let sizes = [config.size("conv_kernel_size")?, config.size("d_rel")?];

    let (x, table) = blocks::embed_tokens(r, hidden_size)?;
    let x = r.rms_norm(x, "model.embed_tokens.embed_norm", 1, eps)?;
    let mut x = r.with_embeddings(x);
    for (layer, (slides, dense)) in sliding.into_iter().zip(dense).enumerate() {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &name("input_layernorm"), 1, eps)?;
        let out = heads[usize::from(slides)].mix(r, layer, h, sizes, eps)?;
        let out = convolved(r, out, &name("attn_sconv"), sizes[0])?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &name("post_attention_layernorm"), 1, eps)?;
        let out = if dense { dense_mlp(r, layer, h, width)? } else { moe(r, layer, h, route, shared)? };
        let out = convolved(r, out, &name("mlp_sconv"), sizes[0])?;
        x = r.graph.add(x, out)?;
    }

    r.graph.scope("lm_head");
    let h = r.rms_norm(x, "model.norm", 1, eps)?;
    let key = "logits_mup_width_multiplier";
    let divisor = config.number(key)?.unwrap_or(24.0);
    if divisor == 0.0 {
        return Err(config.unsupported(key, "a number that is not 0"));
    }
    let h = r.graph.position_scale(h, PositionScale::constant(divisor.recip() as f32));
    let h = r.graph.gather_rows(h);
    let vocab_size = r.graph.matrix(table).rows;
    // Rows beyond these are padding, which some checkpoints do not have.
    let real = config.positions("unpadded_vocab_size")?.unwrap_or(vocab_size).min(vocab_size);
    match r.rows("lm_head")? {
        Some(rows) if rows != real && rows == vocab_size => {
            r.linear_part(h, "lm_head", rows, std::slice::from_ref(&(0..real)), Precision::Fast)
        }
        _ => r.linear(h, "lm_head", real, Precision::Fast),
    }
}
