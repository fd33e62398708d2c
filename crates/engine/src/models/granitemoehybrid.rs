//! Granite 4.0 hybrid (Tiny, Small): the factors, experts and shared MLP of Granite 3 MoE in layers of Mamba-2 or of
//! attention, which rotates nothing unless it says so.
//!
//! Source: transformers `modeling_granitemoehybrid.py`; GGUF architecture `granitehybrid`, whose layers of attention are
//! those that have key heads, and whose queries and keys are permuted as those of `granitemoe`.

use moeflux_compute::graph::{RopeStyle, SsmScan, Value};

use super::blocks::attention::Heads;
use super::blocks::mamba2::{self, Mamba2};
use super::blocks::{self, times};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::granitemoe::{self, factor};
use super::names::{NameMap, Names, PAIRED};
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Granite 4.0 hybrid",
    model_types: &["granitemoehybrid"],
    gguf_architectures: &["granitehybrid"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[granitemoe::GGUF_TENSORS, GGUF_TENSORS],
        gguf_keys: &[granitemoe::GGUF_KEYS, mamba2::GGUF_KEYS],
        other_keys: OTHER_KEYS,
        other_tensors: granitemoe::OTHER_TENSORS,
        gguf_orders: PAIRED,
        ..Names::COMMON
    },
    record,
};

/// Modules and tensors of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
];

/// Other keys of configurations.
const OTHER_KEYS: NameMap = &[
    ("shared_expert_intermediate_size", "shared_intermediate_size"),
    ("layer_types", "layers_block_type"),
    ("conv_kernel", "mamba_d_conv"),
    ("ssm_state_size", "mamba_d_state"),
    ("n_groups", "mamba_n_groups"),
    ("mamba_num_heads", "mamba_n_heads"),
    ("use_conv_bias", "mamba_conv_bias"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_hidden_layers", DefaultValue::Count(32)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(8)),
    ("shared_expert_intermediate_size", DefaultValue::Count(1024)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
    ("mamba_num_heads", DefaultValue::Count(128)),
    ("n_groups", DefaultValue::Count(1)),
    ("ssm_state_size", DefaultValue::Count(256)),
    ("conv_kernel", DefaultValue::Count(4)),
    ("mamba_expand", DefaultValue::Count(2)),
];

/// Attention of the layers that have it.
fn attention(config: &Config<'_>, r: &mut Recorder, hidden_size: usize, kv_heads: usize) -> Result<Heads> {
    let gguf = config.format() == Format::Gguf;
    let heads = Heads::new(config, hidden_size, Some(kv_heads))?;
    let word = config.word("position_embedding_type")?;
    let rotates = match config.format() {
        Format::Gguf => config.flag("rotates", true)?,
        Format::Mlx => word.as_deref() != Some("nope"),
        Format::HuggingFace => word.as_deref() == Some("rope"),
    };
    let style = if gguf { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    let rope = if rotates { Some(blocks::rotation(r, config, heads.head_dim, style, 1e4)?) } else { None };
    let own_scale = if gguf { heads.scale } else { 1.0 };
    let scale = factor(config, "attention_multiplier")?.unwrap_or(own_scale);
    Ok(Heads { scale, rope, ..heads })
}

/// For each layer the heads of keys that its attention has; nothing for Mamba-2.
fn key_heads(config: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let key = "num_key_value_heads";
    if config.format() == Format::Gguf {
        let listed = config.read(key, "", |value| Some(value.is_array()))?.unwrap_or(false);
        if !listed {
            return Ok(vec![config.count(key)?.filter(|heads| *heads > 0); layers]);
        }
        let heads = config.per_layer(key, layers)?.unwrap_or_default();
        return Ok(heads.into_iter().take(layers).map(|heads| Some(heads).filter(|h| *h > 0)).collect());
    }
    let heads = config.optional_size(key)?.map_or_else(|| config.size("num_attention_heads"), Ok)?;
    let Some(kinds) = config.layer_kinds("layer_types")? else { return Ok(vec![None; layers]) };
    let kind = |kind: &String| match kind.as_str() {
        "linear_attention" => Some(None),
        "full_attention" => Some(Some(heads)),
        _ => None,
    };
    let found: Option<Vec<_>> = kinds.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        config.unsupported("layer_types", &format!("mamba or attention for each of {layers} layers"))
    })
}

fn mamba(config: &Config<'_>, hidden_size: usize, eps: f32) -> Result<Mamba2> {
    let heads = config.size("mamba_num_heads")?;
    let inner = match config.format() {
        Format::Gguf => config.size("mamba_inner_size")?,
        Format::Mlx => heads * config.size("mamba_d_head")?,
        Format::HuggingFace => config.size("mamba_expand")? * hidden_size,
    };
    if !inner.is_multiple_of(heads) {
        let expected = format!("a divisor of the {inner} channels of Mamba-2");
        return Err(config.unsupported("mamba_num_heads", &expected));
    }
    let auto = config.read("mamba_d_head", "", |value| Some(value == "auto"))?.unwrap_or(true);
    if !auto && config.optional_size("mamba_d_head")?.is_some_and(|dim| dim * heads != inner) {
        return Err(config.unsupported("mamba_d_head", &format!("{}", inner / heads)));
    }
    let groups = config.size("n_groups")?;
    if !heads.is_multiple_of(groups) || !inner.is_multiple_of(groups) {
        return Err(config.unsupported("n_groups", &format!("a divisor of the {heads} heads")));
    }
    let unlimited = (0.0, f32::INFINITY);
    let limit = mamba2::time_step_limit(config, "time_step_limit")?;
    let time_steps = match config.format() {
        Format::Gguf => unlimited,
        // mlx-lm's default.
        Format::Mlx => limit.unwrap_or((0.001, 100.0)),
        Format::HuggingFace => limit.unwrap_or(unlimited),
    };
    let (head_dim, state_size) = (inner / heads, config.size("ssm_state_size")?);
    let shape = SsmScan { heads, head_dim, groups, state_size, time_steps };
    // llama.cpp adds it whatever the file says.
    let bias = config.format() == Format::Gguf || config.flag("use_conv_bias", true)?;
    // mlx-lm norms the whole row.
    let norm_groups = if config.format() == Format::Mlx { 1 } else { groups };
    Ok(Mamba2 { shape, kernel: config.size("conv_kernel")?, bias, norm_groups, eps })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let ([embedding, residual, divisor], moe) = (granitemoe::multipliers(config)?, granitemoe::moe(config)?);
    let key_heads = key_heads(config, layers)?;
    let mamba = if key_heads.contains(&None) { Some(mamba(config, hidden_size, eps)?) } else { None };

    let (x, table) = blocks::embed(r, hidden_size)?;
    let mut x = times(r, x, embedding);
    for (layer, key_heads) in key_heads.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        let part = if key_heads.is_some() { "self_attn" } else { "mamba" };
        r.graph.scope(format!("layers.{layer}.{part}"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        let out = match (key_heads, &mamba) {
            (None, Some(mamba)) => mamba.mix(r, &format!("{base}.mamba"), h)?,
            (heads, _) => attention(config, r, hidden_size, heads.unwrap_or(1))?.mix(r, layer, h)?,
        };
        let out = times(r, out, residual);
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = blocks::moe_of(r, layer, h, &moe)?;
        let out = times(r, out, residual);
        x = r.graph.add(x, out)?;
    }
    // Before the rows are chosen, of which there is no position.
    r.graph.scope("lm_head");
    let h = r.rms_norm(x, "model.norm", 1, eps)?;
    let h = times(r, h, 1.0 / divisor);
    let h = r.graph.gather_rows(h);
    blocks::logits(r, config, h, table)
}
