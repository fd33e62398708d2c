//! Kolibri-1. Norms before and after attention and experts; layers with a window rotate, the others do not; experts are chosen by
//! logits and weighed by their sigmoids; a shared expert.
//!
//! Source: transformers `modeling_kolibri1.py`; llama.cpp and mlx-lm do not have it.

use moeflux_compute::graph::{RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Kolibri-1",
    model_types: &["kolibri1"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { other_tensors: OTHER_TENSORS, ..Names::COMMON },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("post_self_attn_layernorm", "post_attn_norm"),
    ("post_mlp_layernorm", "post_ffn_norm"),
    ("mlp.gate.e_score_correction_bias", "moe.router.expert_bias"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2560)),
    ("moe_intermediate_size", DefaultValue::Count(512)),
    ("shared_expert_intermediate_size", DefaultValue::Count(512)),
    ("num_hidden_layers", DefaultValue::Count(50)),
    ("num_attention_heads", DefaultValue::Count(48)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(384)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("max_position_embeddings", DefaultValue::Count(262_144)),
];

/// For each layer whether it sees a window: by default all but every fifth.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match config.words("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers),
        None => Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(5)).collect()),
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads { norm: Some(eps), ..Heads::new(config, hidden_size, None)? };
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let sliding = slides(config, layers)?;
    if config.is_null("sliding_window") {
        return Err(config.unsupported("sliding_window", "a number of positions"));
    }
    let window = config.positions("sliding_window")?.unwrap_or(513);
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let route = Route::softmax(experts, top_k, config.flag("norm_topk_prob", false)?);
    let moe = Moe {
        route: Route { score: Score::SigmoidOfChosen, ..route },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_experts",
            width: config.size("shared_expert_intermediate_size")?,
            gate: None,
        }),
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, slides) in sliding.into_iter().enumerate() {
        let name = |norm: &str| format!("model.layers.{layer}.{norm}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &name("input_layernorm"), 1, eps)?;
        let own = Heads { window: slides.then_some(window), rope: slides.then_some(rope), ..heads };
        let out = own.mix(r, layer, h)?;
        let out = r.rms_norm(out, &name("post_self_attn_layernorm"), 1, eps)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &name("post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        let out = r.rms_norm(out, &name("post_mlp_layernorm"), 1, eps)?;
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
