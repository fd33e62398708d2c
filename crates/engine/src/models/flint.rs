//! Flint. Norms of queries and keys per head and sinks; layers with a window rotate, those that see everything do not; sigmoid
//! routing without a correction bias; a shared expert; dense first layers.
//!
//! Source: transformers `modeling_flint.py`; llama.cpp and mlx-lm do not have it.

use moeflux_compute::graph::{Activation, RopeStyle, Route, Score, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Flint",
    model_types: &["flint"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { other_tensors: &[("self_attn.sinks", "self_attn.softmax_offset")], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(6144)),
    ("moe_intermediate_size", DefaultValue::Count(512)),
    ("shared_expert_intermediate_size", DefaultValue::Count(1024)),
    ("num_hidden_layers", DefaultValue::Count(49)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(6)),
    ("sliding_window", DefaultValue::Count(513)),
    ("max_position_embeddings", DefaultValue::Count(262_144)),
];

/// For each layer whether it sees a window: by default all but the first two, every fourth and the last.
fn slides(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match config.words("layer_types")? {
        Some(kinds) => blocks::kinds_slide(config, &kinds, layers),
        None => Ok((0..layers).map(|layer| layer >= 2 && layer % 4 != 1 && layer + 1 != layers).collect()),
    }
}

/// For each layer whether its feed-forward is dense: by default the first two.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "mlp_only_layers";
    let listed = config.read(key, "", |value| Some(value.is_array()))?.is_some();
    let dense = if listed { config.sizes(key)? } else { vec![0, 1] };
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);
    Ok((0..layers).map(|layer| dense.contains(&layer) || !(layer + 1).is_multiple_of(step)).collect())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let heads = Heads { norm: Some(eps), ..Heads::new(config, hidden_size, None)? };
    let rope = blocks::rotation(r, config, heads.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let window = config.positions("sliding_window")?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let renormalize = config.flag("norm_topk_prob", true)?;
    let moe = Moe {
        route: Route { score: Score::Sigmoid, ..Route::softmax(experts, top_k, renormalize) },
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: config.size("shared_expert_intermediate_size")?,
            gate: None,
        }),
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    let kinds = slides(config, layers)?.into_iter().zip(dense_layers(config, layers)?);
    for (layer, (slides, dense)) in kinds.enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        r.require_sinks(layer)?;
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let own = Heads { window: window.filter(|_| slides), rope: slides.then_some(rope), ..heads };
        let out = own.mix(r, layer, h)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = if dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
