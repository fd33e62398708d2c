//! Reflection Beam. Norms before and after every block, whose results are added to the residual stream by weights that
//! depend on how many were added before; attention with gates for each channel and a bias a head, which rotates in layers
//! with a window, and elsewhere has queries that grow with positions; sigmoid routing by groups, without a shared expert.
//!
//! Source: transformers `modeling_beam.py`.

use moeflux_compute::graph::{Activation, Gate, GroupRank, PositionScale, RopeStyle, Route, Score, Value};
use serde_json::json;

use super::blocks::attention::{Heads, MixedGate};
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::model::Form;
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Beam",
    model_types: &["beam"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names::COMMON,
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(5120)),
    ("intermediate_size", DefaultValue::Count(20480)),
    ("moe_intermediate_size", DefaultValue::Count(2560)),
    ("num_hidden_layers", DefaultValue::Count(52)),
    ("num_attention_heads", DefaultValue::Count(48)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("sliding_window", DefaultValue::Count(512)),
    ("max_position_embeddings", DefaultValue::Count(8192)),
];

/// Factor on queries of layers that do not rotate: (1 + (position + 1) / 2048)^0.1.
fn temperature() -> PositionScale {
    PositionScale::power(0.1, 1, 2048)
}

/// For each layer whether it sees a window: by default five of six, and not the last.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match config.words("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers),
        None => Ok((1..=layers).map(|layer| layer % 6 != 0 && layer != layers).collect()),
    }
}

/// The rotation of layers of this kind; `None` if they have none.
fn rotation(r: &mut Recorder, config: &Config<'_>, slides: bool, head_dim: usize) -> Result<Option<usize>> {
    let name = if slides { "sliding_attention" } else { "full_attention" };
    let Some(own) = config.with_rope(name)? else { return Ok(None) };
    blocks::rotation(r, &own, head_dim, RopeStyle::HalfSplit, 1e4).map(Some)
}

/// The router and the experts.
fn moe(config: &Config<'_>) -> Result<Moe> {
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    Ok(Moe {
        route: Route {
            score: Score::Sigmoid,
            groups: blocks::groups(config, GroupRank::BestTwo, (8, 4))?,
            scale: config.magnitude("routed_scaling_factor")?.unwrap_or(2.5) as f32,
            ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", true)?)
        },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    })
}

/// The residual stream, to which `added` blocks were added before, and the result of the next: both weighted so that they
/// keep their size.
fn add(r: &mut Recorder, x: Value, out: Value, added: usize) -> Result<Value> {
    let n = (added + 2) as f64;
    let x = blocks::times(r, x, ((n - 1.0) / n).sqrt() as f32);
    let out = blocks::times(r, out, n.sqrt().recip() as f32);
    Ok(r.graph.add(x, out)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let rope = json!({
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        "full_attention": null,
    });
    let config = &config.with_defaults(DEFAULTS).assuming_rope(&rope).with_rope_sets_only();
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads { norm: Some(eps), ..Heads::new(config, hidden_size, None)? };
    let window = config.positions("sliding_window")?;
    let (moe, dense) = (moe(config)?, blocks::dense_layers(config, layers, 3.min(layers))?);
    let slides = slides(config, layers)?;
    let mut ropes = [None; 2];
    for slides in &slides {
        let rope = &mut ropes[usize::from(*slides)];
        if rope.is_none() {
            *rope = Some(rotation(r, config, *slides, heads.head_dim)?);
        }
    }

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, slides) in slides.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        let norm = |r: &mut Recorder, x, name: &str| r.rms_norm(x, &format!("{base}.{name}"), 1, eps);
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = norm(r, x, "input_layernorm")?;
        let times = heads.head_dim;
        let bias =
            r.constants(&format!("{base}.self_attn.gate_bias"), &[heads.heads], Form::Repeated { times })?;
        let rope = ropes[usize::from(slides)].flatten();
        let of_layer = Heads {
            window: window.filter(|_| slides),
            rope,
            gate: Some(MixedGate {
                module: "gate_proj",
                by_head: false,
                function: Gate::Sigmoid,
                bias: Some(bias),
            }),
            temperature: rope.is_none().then(temperature),
            ..heads
        };
        let out = of_layer.mix(r, layer, h)?;
        let out = norm(r, out, "post_attention_layernorm")?;
        x = add(r, x, out, 2 * layer)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = norm(r, x, "pre_feedforward_layernorm")?;
        let out = if dense[layer] {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        let out = norm(r, out, "post_feedforward_layernorm")?;
        x = add(r, x, out, 2 * layer + 1)?;
    }
    let cap = match config.is_null("final_logit_softcapping") {
        true => None,
        false => Some(config.magnitude("final_logit_softcapping")?.unwrap_or(30.0) as f32),
    };
    match cap {
        Some(cap) => blocks::capped_head(r, config, x, (table, eps), cap),
        None => blocks::head(r, config, x, table, eps),
    }
}
