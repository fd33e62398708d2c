//! Cohere2-MoE (Command A+, North Mini Code). Attention and experts side by side on one norm, which is a layer norm or an RMS
//! norm; layers with a window rotate, on interleaved pairs, the others have no positions unless they are dense first ones;
//! softmax or sigmoid of the chosen experts; shared experts, added or averaged; logits times a factor.
//!
//! Source: transformers `modeling_cohere2_moe.py`; GGUF architecture `cohere2moe`, whose routers have sigmoid scores, whose shared
//! experts are averaged with the others, and whose dense layers rotate.

use moeflux_compute::graph::{Activation, RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Cohere2-MoE, Command A+",
    model_types: &["cohere2_moe"],
    gguf_architectures: &["cohere2moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("n_shared_experts", "num_shared_experts")],
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("layer_norm_eps", "attention.layer_norm_epsilon"),
    ("logit_scale", "logit_scale"),
    ("slides", "attention.sliding_window_pattern"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(8192)),
    ("intermediate_size", DefaultValue::Count(22528)),
    ("num_hidden_layers", DefaultValue::Count(40)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(8)),
    ("num_experts_per_tok", DefaultValue::Count(2)),
    ("sliding_window", DefaultValue::Count(4096)),
    ("logit_scale", DefaultValue::Number(0.0625)),
    ("layer_norm_eps", DefaultValue::Number(1e-5)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
    ("max_position_embeddings", DefaultValue::Count(8192)),
];

/// The norm before every layer and before the head.
#[derive(Debug, Clone, Copy)]
enum Norm {
    Rms(f32),
    Layer(f32),
}

impl Norm {
    fn of(self, r: &mut Recorder, x: Value, module: &str) -> Result<Value> {
        match self {
            Self::Rms(eps) => r.rms_norm(x, module, 1, eps),
            Self::Layer(eps) => r.layer_norm(x, module, eps),
        }
    }
}

/// For each layer whether it sees a window: as `layer_types` says, else all but every so many, counted anew after the first
/// dense layers.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return blocks::gguf_slides(config, "slides", layers, (4, true));
    }
    let Some(kinds) = config.words("layer_types")? else {
        let first = config.count("first_k_dense_replace")?.unwrap_or(0).min(layers);
        let of_dense = config.optional_size("prefix_dense_sliding_window_pattern")?.unwrap_or(1);
        let of_others = config.optional_size("sliding_window_pattern")?.unwrap_or(4);
        let slides = |count: usize, every: usize| (1..=count).map(move |layer| !layer.is_multiple_of(every));
        return Ok(slides(first, of_dense).chain(slides(layers - first, of_others)).collect());
    };
    blocks::kinds_slide(config, &kinds, layers)
}

/// How experts are chosen and weighted.
fn route(config: &Config<'_>, averages: bool) -> Result<Route> {
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let halved = if averages { 0.5 } else { 1.0 };
    if config.format() == Format::Gguf {
        // llama.cpp's number for sigmoid.
        if config.count("expert_gating_func")?.unwrap_or(2) != 2 {
            return Err(config.unsupported("expert_gating_func", "2, sigmoid"));
        }
        let scale = config.magnitude("routed_scaling_factor")?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
        let renormalize = config.flag("norm_topk_prob", false)?;
        return Ok(Route {
            score: Score::Sigmoid,
            scale: halved * scale as f32,
            ..Route::softmax(experts, top_k, renormalize)
        });
    }
    let (score, renormalize) = match config.word("expert_selection_fn")?.as_deref() {
        None | Some("softmax") => (Score::SoftmaxOfChosen, false),
        Some("sigmoid") => (Score::Sigmoid, config.flag("norm_topk_prob", true)?),
        Some(_) => return Err(config.unsupported("expert_selection_fn", "softmax or sigmoid")),
    };
    Ok(Route { score, scale: halved, ..Route::softmax(experts, top_k, renormalize) })
}

/// The router and the experts, and whether those that every token goes through are averaged with the others.
fn moe(config: &Config<'_>) -> Result<(Moe, bool)> {
    let averages = match config.word("shared_expert_combination_strategy")?.as_deref() {
        None | Some("average") => true,
        Some("sum") => false,
        Some(_) => return Err(config.unsupported("shared_expert_combination_strategy", "average or sum")),
    };
    let shared = config.count("n_shared_experts")?.unwrap_or(0);
    let each = if config.format() == Format::Gguf { "moe_intermediate_size" } else { "intermediate_size" };
    let width = match config.optional_size("shared_expert_intermediate_size")? {
        Some(width) if shared > 0 && config.format() == Format::Gguf => width,
        _ if shared > 0 => shared.saturating_mul(config.size(each)?),
        _ => 0,
    };
    let averages = averages && shared > 0;
    let moe = Moe {
        route: route(config, averages)?,
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };
    let shared = SharedExpert { module: "mlp.shared_experts", width, gate: None };
    Ok((Moe { shared: (width > 0).then_some(shared), ..moe }, averages))
}

/// Experts of h, and half of what the shared ones give if they are averaged.
fn experts(r: &mut Recorder, layer: usize, h: Value, (moe, averages): (&Moe, bool)) -> Result<Value> {
    let Some(shared) = moe.shared.filter(|_| averages) else { return blocks::moe_of(r, layer, h, moe) };
    let module = format!("model.layers.{layer}.{}", shared.module);
    let out = blocks::mlp(r, h, &module, shared.width, Activation::SwiGlu)?;
    let out = times(r, out, 0.5);
    let routed = blocks::moe_of(r, layer, h, &Moe { shared: None, ..*moe })?;
    Ok(r.graph.add(routed, out)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let gguf = config.format() == Format::Gguf;
    let norm = match config.magnitude("rms_norm_eps")?.filter(|eps| !gguf || *eps != 0.0) {
        Some(eps) => Norm::Rms(eps as f32),
        None => Norm::Layer(config.magnitude("layer_norm_eps")?.unwrap_or(1e-5) as f32),
    };
    let heads = Heads::new(config, hidden_size, None)?;
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::Interleaved, 1e4)?;
    let window = config.positions("sliding_window")?;
    let dense = blocks::dense_layers(config, layers, 0)?;
    let dense_rotates =
        gguf || config.optional_size("prefix_dense_sliding_window_pattern")?.unwrap_or(1) == 1;
    let (moe, averages) = moe(config)?;
    let logit_scale = config.number("logit_scale")?.unwrap_or(1.0) as f32;

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, (slides, dense)) in slides(config, layers)?.into_iter().zip(dense).enumerate() {
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = norm.of(r, x, &format!("model.layers.{layer}.input_layernorm"))?;
        let window = window.filter(|_| slides);
        let rotates = window.is_some() || dense && dense_rotates;
        let own = Heads { window, rope: rotates.then_some(rope), ..heads };
        let mixed = own.mix(r, layer, h)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let out = if dense {
            let key = if gguf { "intermediate_size" } else { "prefix_dense_intermediate_size" };
            let width = config.size(key)?;
            blocks::mlp(r, h, &format!("model.layers.{layer}.mlp"), width, Activation::SwiGlu)?
        } else {
            experts(r, layer, h, (&moe, averages))?
        };
        let out = r.graph.add(mixed, out)?;
        x = r.graph.add(x, out)?;
    }
    // Before the rows are chosen, of which there is no position.
    r.graph.scope("lm_head");
    let h = norm.of(r, x, "model.norm")?;
    let h = times(r, h, logit_scale);
    let h = r.graph.gather_rows(h);
    blocks::logits(r, config, h, table)
}
