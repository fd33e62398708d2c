//! Muse Spark (text). Norms without weights of embeddings, queries, keys and what attention mixes; gated attention over a window with
//! rotated heads, every fourth layer to everything without positions; residual streams that gates of their own mix with every block's
//! result; sigmoid routing by the residual stream for experts of a narrower one, each of whose results is normed.
//!
//! Source: transformers `modeling_muse_spark.py`; llama.cpp and mlx-lm do not have it.

use moeflux_compute::graph::{
    Activation, Attention, ExpertMlp, Gate, OutputNorm, Precision, RopeStyle, Route, Score, Value,
};

use super::blocks::{self, attention::Heads};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::model::Form;
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Muse Spark (text)",
    model_types: &["muse_spark", "muse_spark_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(8192)),
    ("intermediate_size", DefaultValue::Count(16384)),
    ("moe_hidden_size", DefaultValue::Count(4096)),
    ("moe_intermediate_size", DefaultValue::Count(4096)),
    ("num_hidden_layers", DefaultValue::Count(62)),
    ("num_attention_heads", DefaultValue::Count(128)),
    ("num_key_value_heads", DefaultValue::Count(16)),
    ("head_dim", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("sliding_window", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
];

/// Added to the sum that weights are divided by.
const EPSILON: f32 = 1e-15;

/// A layer's blocks, and how they join the residual stream.
struct Layers {
    /// Epsilons of norms in front of blocks, and of those behind.
    eps: [f32; 2],
    /// What residual gates are divided by.
    temperature: f32,
}

impl Layers {
    /// The norm in front of a block.
    fn enter(&self, r: &mut Recorder, x: Value, module: &str) -> Result<Value> {
        r.rms_norm_of(x, module, 1, self.eps[0], Form::F32PlusOne)
    }

    /// x ⊙ √(1 − σ²) + out ⊙ σ, with the sigmoids of the gate of `module`.
    fn join(&self, r: &mut Recorder, x: Value, out: Value, module: &str) -> Result<Value> {
        let temperature = self.temperature;
        let name = format!("{module}.gate");
        let kept = scaled(r, x, &name, Form::Kept { temperature })?;
        let taken = scaled(r, out, &name, Form::Taken { temperature })?;
        Ok(r.graph.add(kept, taken)?)
    }
}

/// x ⊙ the vector `name` in this form.
fn scaled(r: &mut Recorder, x: Value, name: &str, form: Form) -> Result<Value> {
    let factors = r.constants(name, &[x.width()], form)?;
    let none = r.made_up(name, [x.width(); 2], Form::Zeros)?;
    Ok(r.graph.standardize(x, none, factors)?)
}

/// For each layer whether it sees a window, and whether it rotates queries and keys.
fn kinds(config: &Config<'_>, layers: usize) -> Result<Vec<[bool; 2]>> {
    let is_fourth = |layer: usize| (layers - 1 - layer).is_multiple_of(4);
    let slides = match config.layer_kinds("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers)?,
        None => (0..layers).map(|layer| !is_fourth(layer)).collect(),
    };
    let rotates: Vec<bool> = match config.numbers("layer_rope_theta")? {
        None => (0..layers).map(|layer| !is_fourth(layer)).collect(),
        Some(bases) if bases.len() == layers => bases.iter().map(|base| *base != 0.0).collect(),
        Some(_) => return Err(config.unsupported("layer_rope_theta", &format!("{layers} numbers"))),
    };
    Ok(slides.into_iter().zip(rotates).map(|(slides, rotates)| [slides, rotates]).collect())
}

/// Gated attention of normed h, whose heads are normed.
fn attention(r: &mut Recorder, layer: usize, h: Value, heads: &Heads, eps: f32) -> Result<Value> {
    let Heads { heads, kv_heads, head_dim, scale, window, rope, .. } = *heads;
    let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let mut project =
        |name: &str, heads: usize| r.linear(h, &module(name), heads * head_dim, Precision::Fast);
    let (q, k, v) = (project("q_proj", heads)?, project("k_proj", kv_heads)?, project("v_proj", kv_heads)?);
    let gate = project("gate_proj", heads)?;
    let (mut q, mut k) = (r.graph.unit_norm(q, heads, eps)?, r.graph.unit_norm(k, kv_heads, eps)?);
    if let Some(rope) = rope {
        (q, k) = (r.graph.rope(q, heads, rope)?, r.graph.rope(k, kv_heads, rope)?);
    }
    let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
    let mixed = r.graph.attention(q, k, v, shape)?;
    let mixed = r.graph.unit_norm(mixed, heads, eps)?;
    let mixed = r.graph.gate(mixed, gate, Gate::Sigmoid)?;
    r.linear(mixed, &module("o_proj"), h.width(), Precision::Fast)
}

/// What routed experts are.
struct Moe {
    route: Route,
    /// Columns of what they take.
    width: usize,
    /// Factor on the router's logits.
    multiplier: f32,
}

/// Routed experts of normed h.
fn moe(r: &mut Recorder, layer: usize, h: Value, moe: &Moe, layers: &Layers) -> Result<Value> {
    let base = format!("model.layers.{layer}.mlp");
    let Moe { route, width, multiplier } = *moe;
    let router = format!("{base}.gate");
    let logits = r.linear(h, &router, route.experts, Precision::F32)?;
    let logits = blocks::times(r, logits, multiplier);
    let bias = r.correction_bias(&router, route.experts)?;
    let routing = r.graph.route(logits, Some(bias), route)?;
    let entering = r.linear(h, &format!("{base}.pre_expert_proj"), width, Precision::Fast)?;
    let entering = layers.enter(r, entering, &format!("{base}.pre_expert_norm"))?;
    let names = ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] };
    let experts = r.experts(layer, route.experts, width, &names)?;
    let weight =
        r.constants(&format!("{base}.experts.post_expert_norm.weight"), &[width], Form::F32PlusOne)?;
    let norm = Some(OutputNorm { weight, eps: layers.eps[1] });
    let mlp = ExpertMlp { norm, ..ExpertMlp::default() };
    let out = r.graph.moe_experts_with(entering, routing, experts, mlp)?;
    r.linear(out, &format!("{base}.post_expert_proj"), h.width(), Precision::Fast)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    // transformers looks for a base beside the object only where there is another one.
    let published = serde_json::json!({ "rope_type": "default", "rope_theta": 5e5 });
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&published);
    let (hidden_size, count) = (config.size("hidden_size")?, blocks::layers(config)?);
    let number =
        |key: &str, default: f64| -> Result<f32> { Ok(config.number(key)?.unwrap_or(default) as f32) };
    let magnitude =
        |key: &str, default: f64| -> Result<f32> { Ok(config.magnitude(key)?.unwrap_or(default) as f32) };
    let eps = magnitude("rms_norm_eps", 1e-5)?;
    let layers = Layers {
        eps: [eps, magnitude("post_norm_eps", 1e-8)?],
        temperature: magnitude("residual_gate_temperature", 0.3)?,
    };
    if layers.temperature == 0.0 {
        return Err(config.unsupported("residual_gate_temperature", "a positive number"));
    }
    let heads = Heads::new(config, hidden_size, None)?;
    let heads = Heads { scale: heads.scale * number("qk_scale_factor", 5.473_006_486_387_5)?, ..heads };
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let window = config.positions("sliding_window")?;
    let kinds = kinds(config, count)?;
    let dense = blocks::dense_layers(config, count, 0)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let multiplier = number("output_multiplier", 0.176_776_695_296_636_9)?;
    let routed = Moe {
        route: Route {
            score: Score::Sigmoid,
            epsilon: EPSILON,
            scale: magnitude("routed_scaling_factor", 1.0)?,
            ..Route::softmax(experts, top_k, true)
        },
        width: config.size("moe_hidden_size")?,
        multiplier,
    };

    let (table_rows, table) = blocks::embed_tokens(r, hidden_size)?;
    let x = r.graph.unit_norm(table_rows, 1, eps)?;
    let mut x = r.with_embeddings(x);
    for (layer, [slides, rotates]) in kinds.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = layers.enter(r, x, &format!("{base}.input_layernorm"))?;
        let own = Heads { window: window.filter(|_| slides), rope: rotates.then_some(rope), ..heads };
        let out = attention(r, layer, h, &own, eps)?;
        let out = r.graph.unit_norm(out, 1, layers.eps[1])?;
        x = layers.join(r, x, out, &format!("{base}.post_attention_residual_gate"))?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = layers.enter(r, x, &format!("{base}.pre_feedforward_layernorm"))?;
        let out = if dense[layer] {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            moe(r, layer, h, &routed, &layers)?
        };
        // Scaled first, then normed.
        let out = scaled(r, out, &format!("{base}.post_feedforward_layernorm.weight"), Form::F32PlusOne)?;
        let out = r.graph.unit_norm(out, 1, layers.eps[1])?;
        x = layers.join(r, x, out, &format!("{base}.post_feedforward_residual_gate"))?;
    }
    let cap = magnitude("final_logit_softcapping", 20.0)?;
    let tied = blocks::is_tied(r, config)?;
    r.graph.scope("lm_head");
    let rows = r.graph.gather_rows(x);
    let h = r.rms_norm(rows, "model.norm", 1, eps)?;
    // Before the head, whose logits it is a factor on.
    let h = blocks::times(r, h, multiplier);
    blocks::capped_logits(r, h, (table, tied), cap)
}
