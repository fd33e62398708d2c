//! MiniMax-Text-01. Lightning attention (Qin et al. 2024), linear with a fixed decay of each head, and every few layers
//! attention; norms before blocks whose results are what blocks add to, with factors; Mixtral's experts.
//!
//! Lightning attention is the state space model of Mamba-2 with time steps of one: S ← e^(−slope) S + kᵀv, o = qS.
//!
//! Source: transformers `modeling_minimax.py`. Decays follow from the number of a head and of a layer; what some checkpoints
//! store of them is not read. GGUF architecture `minimax-01`, whose files have one factor, on what blocks are given, and say how
//! many channels rotate.

use moeflux_compute::graph::{Precision, RopeStyle, Route, SsmInputs, SsmScan, SsmWeights, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "MiniMax-Text-01",
    model_types: &["minimax"],
    gguf_architectures: &["minimax-01"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        other_tensors: &[
            ("block_sparse_moe.gate", "mlp.gate"),
            ("block_sparse_moe.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
            ("block_sparse_moe.experts.down_proj", "mlp.experts.down_proj"),
        ],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("self_attn.norm", "attn_norm_2"),
    ("self_attn.output_gate", "attn_gate"),
    ("self_attn.out_proj", "attn_output"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("mlp_alpha_factor", "residual_scale"),
    ("recurrent_layers", "attention.recurrent_layers"),
    ("full_attention_interval", "full_attention_interval"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(8)),
    ("num_experts_per_tok", DefaultValue::Count(2)),
    ("max_position_embeddings", DefaultValue::Count(131072)),
];

/// Epsilon of the norm of lightning attention, whatever `rms_norm_eps` says.
const MIXED_EPS: f32 = 1e-6;

/// For each layer of a GGUF file whether its attention is linear: as it lists, else all but every eighth.
fn gguf_linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "recurrent_layers";
    if config.flags(key)?.is_some() {
        return blocks::flag_per_layer(config, key, layers);
    }
    let every = config.optional_size("full_attention_interval")?.unwrap_or(8);
    Ok((1..=layers).map(|layer| !layer.is_multiple_of(every)).collect())
}

/// For each layer whether its attention is linear: as `layer_types` says, else every second one.
fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return gguf_linear_layers(config, layers);
    }
    let Some(kinds) = config.layer_kinds("layer_types")? else {
        return Ok((0..layers).map(|layer| layer % 2 == 1).collect());
    };
    let kind = |kind: &String| match kind.as_str() {
        "linear_attention" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    };
    let found: Option<Vec<bool>> = kinds.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        let expected = format!("linear_attention or full_attention for each of {layers} layers");
        config.unsupported("layer_types", &expected)
    })
}

/// Lightning attention of normed h.
fn lightning(r: &mut Recorder, (layer, layers): (usize, usize), h: Value, shape: &Heads) -> Result<Value> {
    let Heads { heads, head_dim, .. } = *shape;
    let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let width = heads * head_dim;
    let qkv = r.linear(h, &module("qkv_proj"), 3 * width, Precision::Fast)?;
    let qkv = r.graph.scaled_silu(qkv, 1.0);
    let mut part = |place: usize| r.graph.slice(qkv, heads, place * head_dim, head_dim);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    // Time steps are one, whatever they are made from.
    let dt = r.graph.slice(v, 1, 0, heads)?;
    let norm = module("norm.weight");
    let zeros = r.made_up(&norm, [width, heads], Form::Zeros)?;
    let a = r.made_up(&norm, [width, heads], Form::Slopes { layer, layers })?;
    let scan = SsmScan { heads, head_dim, groups: heads, state_size: head_dim, time_steps: (1.0, 1.0) };
    let weights = SsmWeights { a, d: zeros, dt_bias: zeros };
    let mixed = r.graph.ssm_scan(SsmInputs { x: v, b: k, c: q, dt }, weights, scan)?;
    let normed = r.rms_norm(mixed, &module("norm"), 1, MIXED_EPS)?;
    let gate = r.linear(h, &module("output_gate"), width, Precision::Fast)?;
    let gated = r.graph.sigmoid_gate(normed, gate)?;
    r.linear(gated, &module("out_proj"), h.width(), Precision::Fast)
}

/// Factors on what a block is given and on what it gives.
fn factors(config: &Config<'_>, block: &str) -> Result<[f32; 2]> {
    if config.format() == Format::Gguf {
        let key = "mlp_alpha_factor";
        let alpha = config.number(key)?.ok_or_else(|| config.unsupported(key, "a number"))?;
        return Ok([alpha as f32, 1.0]);
    }
    let factor =
        |name| -> Result<f32> { Ok(config.number(&format!("{block}_{name}_factor"))?.unwrap_or(1.0) as f32) };
    Ok([factor("alpha")?, factor("beta")?])
}

/// The sum of both times their factors.
fn sum(r: &mut Recorder, h: Value, out: Value, [alpha, beta]: [f32; 2]) -> Result<Value> {
    let (h, out) = (times(r, h, alpha), times(r, out, beta));
    Ok(r.graph.add(h, out)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let heads = Heads::new(config, hidden_size, None)?;
    let rotary_dim = match config.format() {
        Format::Gguf => blocks::rotary_dim(config, heads.head_dim, 1.0)?,
        _ => heads.head_dim,
    };
    let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 1e6)?;
    let heads = Heads { rope: Some(rope), window: config.positions("sliding_window")?, ..heads };
    let [full, linear, of_moe] =
        [factors(config, "full_attn")?, factors(config, "linear_attn")?, factors(config, "mlp")?];
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: "block_sparse_moe.gate",
        correction_bias: None,
        experts: ExpertNames { module: "block_sparse_moe.experts", projections: ["w1", "w3", "w2"] },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, is_linear) in linear_layers(config, layers)?.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let (out, own) = if is_linear {
            (lightning(r, (layer, layers), h, &heads)?, linear)
        } else {
            (heads.mix(r, layer, h)?, full)
        };
        x = sum(r, h, out, own)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        x = sum(r, h, out, of_moe)?;
    }
    blocks::head(r, config, x, table, eps)
}
