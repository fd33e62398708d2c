//! Jamba (Mini, Large). Layers of Mamba with norms of the time step and of what is written and read, between them attention
//! without positions; every few layers have experts, weighted as the softmax over all has them, the others a dense MLP.
//!
//! Source: transformers `modeling_jamba.py` (mlx-lm has the chosen weights add up to one, the model does not); GGUF architecture
//! `jamba`, whose layers of attention are those that have key heads, and whose layers with experts those that have a router.

use moeflux_compute::graph::{Activation, Precision, Route, SsmInputs, SsmScan, SsmWeights, Value};

use super::blocks::attention::Heads;
use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Jamba",
    model_types: &["jamba"],
    gguf_architectures: &["jamba"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS],
        renamed: &[("norm", "final_layernorm")],
        layer_kinds: "layers_block_type",
        ..Names::COMMON
    },
    record,
};

/// Modules and tensors of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("pre_ff_layernorm", "ffn_norm"),
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.x_proj", "ssm_x"),
    ("mamba.dt_proj", "ssm_dt"),
    ("mamba.dt_layernorm", "ssm_dt_norm"),
    ("mamba.b_layernorm", "ssm_b_norm"),
    ("mamba.c_layernorm", "ssm_c_norm"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.out_proj", "ssm_out"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("mamba_d_conv", "ssm.conv_kernel"),
    ("mamba_d_state", "ssm.state_size"),
    ("mamba_dt_rank", "ssm.time_step_rank"),
    ("mamba_inner_size", "ssm.inner_size"),
    // For files that are made up, of which nobody knows what they have.
    ("expert_layer_period", "expert_layer_period"),
    ("expert_layer_offset", "expert_layer_offset"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(4096)),
    ("intermediate_size", DefaultValue::Count(14336)),
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(16)),
    ("num_experts_per_tok", DefaultValue::Count(2)),
    ("max_position_embeddings", DefaultValue::Count(262_144)),
];

/// Layers of Mamba (Gu & Dao 2023).
#[derive(Debug, Clone, Copy)]
struct Mamba {
    /// Channels, of which each is a head.
    shape: SsmScan,
    /// Tokens that the convolution sees, and whether it has a bias.
    kernel: usize,
    bias: bool,
    /// Whether the projections to and from channels have biases.
    proj_bias: bool,
    /// Width of what time steps are made from.
    rank: usize,
    /// Epsilon of norms.
    eps: f32,
}

impl Mamba {
    fn new(config: &Config<'_>, hidden_size: usize, eps: f32) -> Result<Self> {
        let gguf = config.format() == Format::Gguf;
        let size = |key, default| {
            if gguf { config.size(key) } else { Ok(config.optional_size(key)?.unwrap_or(default)) }
        };
        let channels = if gguf {
            config.size("mamba_inner_size")?
        } else {
            size("mamba_expand", 2)?.saturating_mul(hidden_size)
        };
        let key = "mamba_dt_rank";
        let automatic = !gguf && config.read(key, "", |value| Some(value == "auto"))?.unwrap_or(true);
        let rank = if automatic { hidden_size.div_ceil(16) } else { config.size(key)? };
        let state_size = size("mamba_d_state", 16)?;
        // llama.cpp adds it whatever the file says.
        let bias = gguf || config.flag("mamba_conv_bias", true)?;
        let time_steps = (0.0, f32::INFINITY);
        let shape = SsmScan { heads: channels, head_dim: 1, groups: 1, state_size, time_steps };
        let proj_bias = config.flag("mamba_proj_bias", false)?;
        Ok(Self { shape, kernel: size("mamba_d_conv", 4)?, bias, proj_bias, rank, eps })
    }

    /// Mamba of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { shape, kernel, bias, proj_bias, rank, eps } = *self;
        let SsmScan { heads: channels, state_size, .. } = shape;
        let module = |name: &str| format!("model.layers.{layer}.mamba.{name}");
        if proj_bias {
            r.require_bias(&module("in_proj"))?;
            r.require_bias(&module("out_proj"))?;
        }
        let mut half = |rows| r.linear_part(h, &module("in_proj"), 2 * channels, &[rows], Precision::Fast);
        let (x, gate) = (half(0..channels)?, half(channels..2 * channels)?);
        let taps = r.constants(&module("conv1d.weight"), &[channels, kernel], Form::F32)?;
        let x = if bias {
            let bias = r.vector(&module("conv1d"), "bias", channels)?;
            r.graph.biased_conv1d(x, taps, bias, kernel)?
        } else {
            r.graph.causal_conv1d(x, taps, kernel)?
        };
        let made = r.linear(x, &module("x_proj"), rank + 2 * state_size, Precision::F32)?;
        let mut part = |start, width, norm: &str| -> Result<Value> {
            let part = r.graph.slice(made, 1, start, width)?;
            r.rms_norm(part, &module(norm), 1, eps)
        };
        let dt = part(0, rank, "dt_layernorm")?;
        let b = part(rank, state_size, "b_layernorm")?;
        let c = part(rank + state_size, state_size, "c_layernorm")?;
        let weight = r.matrix(&module("dt_proj"), Some(channels), rank)?;
        let dt = r.graph.linear(dt, weight, None, Precision::F32)?;
        // GGUF keeps A itself.
        let decay = if r.format() == Format::Gguf { Form::F32 } else { Form::F32NegativeExp };
        let weights = SsmWeights {
            a: r.constants(&module("A_log"), &[channels, state_size], decay)?,
            d: r.constants(&module("D"), &[channels], Form::F32)?,
            dt_bias: r.vector(&module("dt_proj"), "bias", channels)?,
        };
        let mixed = r.graph.ssm_scan(SsmInputs { x, b, c, dt }, weights, shape)?;
        let gated = r.graph.swiglu(gate, mixed)?;
        r.linear(gated, &module("out_proj"), h.width(), Precision::Fast)
    }
}

/// Whether `layer` is one of those at `offset` of every `period`, by the configuration's keys with this beginning.
fn every(
    config: &Config<'_>,
    of: &str,
    (period, offset): (usize, usize),
    layers: usize,
) -> Result<Vec<bool>> {
    let key = format!("{of}_layer_period");
    let period = config.optional_size(&key)?.unwrap_or(period);
    let key = format!("{of}_layer_offset");
    let offset = config.count(&key)?.unwrap_or(offset);
    if offset >= period {
        return Err(config.unsupported(&key, &format!("below the period of {period} layers")));
    }
    Ok((0..layers).map(|layer| layer % period == offset).collect())
}

/// For each layer the heads of keys that its attention has; nothing for Mamba.
fn key_heads(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let key = "num_key_value_heads";
    if config.format() == Format::Gguf {
        let Some(heads) = config.per_layer(key, layers)? else {
            return Err(config.unsupported(key, &format!("a number for each of {layers} layers")));
        };
        return Ok(heads.into_iter().take(layers).map(|heads| Some(heads).filter(|h| *h > 0)).collect());
    }
    let heads = config.optional_size(key)?.map_or_else(|| config.size("num_attention_heads"), Ok)?;
    let attends = match config.words("layers_block_type")? {
        // mlx-lm's, which comes before periods.
        Some(kinds) if config.format() == Format::Mlx => {
            let kind = |kind: &String| match kind.as_str() {
                "attention" => Some(true),
                "mamba" => Some(false),
                _ => None,
            };
            let found: Option<Vec<bool>> = kinds.iter().map(kind).collect();
            found.filter(|found| found.len() == layers).ok_or_else(|| {
                let expected = format!("mamba or attention for each of {layers} layers");
                config.unsupported("layers_block_type", &expected)
            })?
        }
        _ => every(config, "attn", (8, 4), layers)?,
    };
    Ok(attends.into_iter().map(|attends| attends.then_some(heads)).collect())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config =
        &config.with_defaults(DEFAULTS).assuming("tie_word_embeddings", config.format() == Format::Mlx);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let key_heads = key_heads(config, layers)?;
    let mamba = Mamba::new(config, hidden_size, eps)?;
    let width = config.size("intermediate_size")?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let routed = match config.format() {
        Format::Gguf if !r.is_outline() => {
            (0..layers).map(|layer| r.has(&format!("model.layers.{layer}.feed_forward.router"))).collect()
        }
        // A single expert is a dense MLP.
        _ if experts == 1 => vec![false; layers],
        _ => every(config, "expert", (2, 1), layers)?,
    };
    let projections = ["gate_proj", "up_proj", "down_proj"];
    let moe = Moe {
        route: Route::softmax(experts, top_k, false),
        router: "feed_forward.router",
        correction_bias: None,
        experts: ExpertNames { module: "feed_forward.experts", projections },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, (key_heads, routed)) in key_heads.into_iter().zip(routed).enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.{}", if key_heads.is_some() { "self_attn" } else { "mamba" }));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let mixed = match key_heads {
            Some(_) => Heads::new(config, hidden_size, key_heads)?.mix(r, layer, h)?,
            None => mamba.mix(r, layer, h)?,
        };
        x = r.graph.add(x, mixed)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.pre_ff_layernorm"), 1, eps)?;
        let out = if routed {
            let out = blocks::moe_of(r, layer, h, &moe)?;
            blocks::check_expert_width(r, config, "intermediate_size", width)?;
            out
        } else {
            blocks::mlp(r, h, &format!("{base}.feed_forward"), width, Activation::SwiGlu)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
