//! Decoders whose layers alternate between linear attention (gated delta rule behind a causal convolution) and gated
//! full attention, with a sigmoid-gated shared expert beside the routed ones: Qwen3-Next and Qwen3.5.
//!
//! Projections that a checkpoint interleaves by head are taken apart where weights are loaded, by choosing rows, so
//! that nothing is shuffled while the model runs and all checkpoint forms give one graph.

use std::ops::Range;

use moeflux_compute::graph::{
    Attention, Decay, DeltaInputs, DeltaRule, HeadPairing, Precision, RopeStyle, Route, Value,
};

use super::{Decoder, Moe, SharedExpert, draft};
use crate::Result;
use crate::checkpoint::Format;
use crate::models::blocks;
use crate::models::config::Config;
use crate::models::names::{DraftNames, GgufOrder, NameMap, Names, POST_ATTENTION_NORM};
use crate::models::recorder::{ExpertNames, Form, Recorder};
use crate::models::rope;

/// Modules and tensors of GGUF files.
pub const GGUF_TENSORS: NameMap = &[
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
];

/// Keys of GGUF files.
pub const GGUF_KEYS: NameMap = &[
    ("full_attention_interval", "full_attention_interval"),
    ("recurrent_layers", "attention.recurrent_layers"),
    ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ("linear_key_head_dim", "ssm.state_size"),
    ("linear_num_key_heads", "ssm.group_count"),
    ("linear_num_value_heads", "ssm.time_step_rank"),
    ("linear_value_width", "ssm.inner_size"),
];

/// Modules whose value heads files with [`HeadPairing::Tiled`] have in another order.
pub const TILED: &[(&str, GgufOrder)] = &[
    ("linear_attn.in_proj_qkv", GgufOrder::TiledHeads),
    ("linear_attn.in_proj_z", GgufOrder::TiledHeads),
    ("linear_attn.in_proj_a", GgufOrder::TiledHeads),
    ("linear_attn.in_proj_b", GgufOrder::TiledHeads),
    ("linear_attn.out_proj", GgufOrder::TiledHeads),
];

/// What these decoders call things.
pub const NAMES: Names = Names {
    gguf_tensors: &[GGUF_TENSORS, POST_ATTENTION_NORM],
    gguf_keys: &[GGUF_KEYS],
    published: &["linear_attn.in_proj_qkv.weight"],
    draft: Some(DraftNames {
        prefix: "mtp.layers.0.",
        modules: &[
            ("eh_proj", "mtp.fc"),
            ("enorm", "mtp.pre_fc_norm_embedding"),
            ("hnorm", "mtp.pre_fc_norm_hidden"),
            ("shared_head.norm", "mtp.norm"),
        ],
    }),
    ..Names::COMMON
};

/// What gates the result of linear attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// silu(z).
    Silu,
    /// sigmoid(z).
    Sigmoid,
}

/// Linear attention of one family.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    shape: DeltaRule,
    /// Tokens that the convolution sees.
    kernel: usize,
    gate: OutputGate,
}

impl Linear {
    /// Reads the shape.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for what does not fit.
    pub fn new(config: &Config<'_>, pairing: HeadPairing, gate: OutputGate) -> Result<Self> {
        let size = |key, default| config.optional_size(key).map(|found| found.unwrap_or(default));
        let (key_heads, value_heads) =
            (size("linear_num_key_heads", 16)?, size("linear_num_value_heads", 32)?);
        if value_heads % key_heads != 0 {
            let expected = format!("a multiple of the {key_heads} key heads");
            return Err(config.unsupported("linear_num_value_heads", &expected));
        }
        let value_dim = match config.optional_size("linear_value_width")? {
            Some(width) if width % value_heads == 0 => width / value_heads,
            Some(_) => {
                let expected = format!("a multiple of the {value_heads} value heads");
                return Err(config.unsupported("linear_value_width", &expected));
            }
            None => size("linear_value_head_dim", 128)?,
        };
        let key_dim = size("linear_key_head_dim", 128)?;
        let decay = Decay::Softplus;
        let shape = DeltaRule { key_heads, value_heads, key_dim, value_dim, pairing, decay };
        Ok(Self { shape, kernel: size("linear_conv_kernel_dim", 4)?, gate })
    }

    fn key_width(&self) -> usize {
        self.shape.key_heads * self.shape.key_dim
    }

    fn value_width(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }
}

/// Rows `start..start + len` of each of `groups` groups of `each` rows.
fn per_group(groups: usize, each: usize, start: usize, len: usize) -> Vec<Range<usize>> {
    (0..groups).map(|group| group * each + start..group * each + start + len).collect()
}

/// Linear attention of normed h.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn linear_attention(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    h: Value,
    linear: &Linear,
) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.linear_attn.{name}");
    let Linear { shape, kernel, gate } = *linear;
    let (key_width, value_width) = (linear.key_width(), linear.value_width());
    let heads = shape.value_heads;
    let qkv_width = 2 * key_width + value_width;
    // Lara Mini's: q, k, v, z, b and a.
    let (joint, joint_width) = (module("in_proj"), qkv_width + value_width + 2 * heads);
    let of_joint = |r: &mut Recorder, rows: Range<usize>, precision| {
        r.linear_part(h, &joint, joint_width, &[rows], precision)
    };
    let (mixed, z) = if r.has(&module("in_proj_qkv")) {
        let mixed = r.linear(h, &module("in_proj_qkv"), qkv_width, Precision::Fast)?;
        (mixed, r.linear(h, &module("in_proj_z"), value_width, Precision::Fast)?)
    } else if r.has(&joint) {
        let mixed = of_joint(r, 0..qkv_width, Precision::Fast)?;
        (mixed, of_joint(r, qkv_width..qkv_width + value_width, Precision::Fast)?)
    } else {
        // Of every key head: q, k, then v and z of its value heads.
        let (key, value) = (shape.key_dim, heads / shape.key_heads * shape.value_dim);
        let each = 2 * (key + value);
        let part = |start, len| per_group(shape.key_heads, each, start, len);
        let qkv = [part(0, key), part(key, key), part(2 * key, value)].concat();
        let name = module("in_proj_qkvz");
        let rows = shape.key_heads * each;
        let mixed = r.linear_part(h, &name, rows, &qkv, Precision::Fast)?;
        (mixed, r.linear_part(h, &name, rows, &part(2 * key + value, value), Precision::Fast)?)
    };
    let (b, a) = if r.has(&module("in_proj_ba")) {
        let each = heads / shape.key_heads;
        let part = |start| per_group(shape.key_heads, 2 * each, start, each);
        let name = module("in_proj_ba");
        let b = r.linear_part(h, &name, 2 * heads, &part(0), Precision::F32)?;
        (b, r.linear_part(h, &name, 2 * heads, &part(each), Precision::F32)?)
    } else if r.has(&joint) {
        let b = of_joint(r, joint_width - 2 * heads..joint_width - heads, Precision::F32)?;
        (b, of_joint(r, joint_width - heads..joint_width, Precision::F32)?)
    } else {
        let b = r.linear(h, &module("in_proj_b"), heads, Precision::F32)?;
        (b, r.linear(h, &module("in_proj_a"), heads, Precision::F32)?)
    };

    let taps = r.constants(&module("conv1d.weight"), &[qkv_width, kernel], Form::F32)?;
    let mixed = r.graph.causal_conv1d(mixed, taps, kernel)?;
    let q = r.graph.slice(mixed, 1, 0, key_width)?;
    let k = r.graph.slice(mixed, 1, key_width, key_width)?;
    let v = r.graph.slice(mixed, 1, 2 * key_width, value_width)?;
    // GGUF keeps A itself.
    let decay = if r.format() == Format::Gguf { Form::F32 } else { Form::F32NegativeExp };
    let decay = r.constants(&module("A_log"), &[heads], decay)?;
    let dt_bias = r.constants(&module("dt_bias"), &[heads], Form::F32)?;
    let inputs = DeltaInputs { q, k, v, a, b };
    let mixed = r.graph.gated_delta_rule(inputs, decay, dt_bias, shape)?;
    let normed = r.rms_norm_of(mixed, &module("norm"), heads, d.eps, Form::F32)?;
    let gated = match gate {
        OutputGate::Silu => r.graph.swiglu(z, normed)?,
        OutputGate::Sigmoid => r.graph.sigmoid_gate(normed, z)?,
    };
    r.linear(gated, &module("out_proj"), d.hidden_size, Precision::Fast)
}

/// Full attention of normed h, whose result is gated; `attend` mixes rotated queries, keys and values.
///
/// # Errors
/// If weights are missing or do not fit.
pub fn gated_attention(
    r: &mut Recorder,
    d: &Decoder,
    layer: usize,
    h: Value,
    rope: usize,
    attend: impl FnOnce(&mut Recorder, [Value; 3]) -> Result<Value>,
) -> Result<Value> {
    let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
    let Decoder { heads, kv_heads, head_dim, .. } = *d;
    // Of every head: the query, then its gate.
    let part = |start| per_group(heads, 2 * head_dim, start, head_dim);
    let (name, rows) = (module("q_proj"), 2 * heads * head_dim);
    let q = r.linear_part(h, &name, rows, &part(0), Precision::Fast)?;
    let gate = r.linear_part(h, &name, rows, &part(head_dim), Precision::Fast)?;
    let k = r.linear(h, &module("k_proj"), kv_heads * head_dim, Precision::Fast)?;
    let v = r.linear(h, &module("v_proj"), kv_heads * head_dim, Precision::Fast)?;
    let q = r.rms_norm(q, &module("q_norm"), heads, d.eps)?;
    let k = r.rms_norm(k, &module("k_norm"), kv_heads, d.eps)?;
    let q = r.graph.rope(q, heads, rope)?;
    let k = r.graph.rope(k, kv_heads, rope)?;
    let mixed = attend(r, [q, k, v])?;
    let mixed = r.graph.sigmoid_gate(mixed, gate)?;
    r.linear(mixed, &module("o_proj"), d.hidden_size, Precision::Fast)
}

/// What differs between the families.
#[derive(Debug, Clone, Copy)]
pub struct Hybrid {
    /// Order of value heads in GGUF files; everywhere else they are grouped by key head.
    pub gguf_pairing: HeadPairing,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalize: bool,
    /// Pairs of channels that rotate by time, row and column in turn, where the configuration does not say; `None` for families
    /// whose tokens have one position.
    pub mrope_section: Option<[f64; 3]>,
}

/// For each layer whether its attention is linear.
///
/// # Errors
/// [`crate::Error::Config`] for unknown kinds or too few of them.
pub fn linear_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = if config.format() == Format::Gguf { "recurrent_layers" } else { "layer_types" };
    let listed = match config.format() {
        Format::Gguf => config.flags(key)?,
        _ => {
            let kinds = config.words(key)?;
            let known = ["linear_attention", "full_attention"];
            if kinds.iter().flatten().any(|kind| !known.contains(&kind.as_str())) {
                return Err(config.unsupported(key, "linear_attention or full_attention for each layer"));
            }
            kinds.map(|kinds| kinds.iter().map(|kind| kind == known[0]).collect())
        }
    };
    match listed {
        Some(listed) if listed.len() < layers => {
            Err(config.unsupported(key, &format!("an entry for each of {layers} layers")))
        }
        Some(listed) => Ok(listed),
        None => {
            let interval = config.optional_size("full_attention_interval")?.unwrap_or(4);
            Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
        }
    }
}

/// Records the whole decoder; returns its logits.
///
/// # Errors
/// If the configuration or weights are missing or do not fit.
pub fn decoder(config: &Config<'_>, r: &mut Recorder, family: &Hybrid) -> Result<Value> {
    let gguf = config.format() == Format::Gguf;
    let mut d = Decoder::new(config, 1e-6)?;
    if config.optional_size("head_dim")?.is_none() && !gguf {
        d.head_dim = 256;
    }
    if config.format() == Format::HuggingFace {
        r.norms_are(Form::F32PlusOne);
    }
    let rotary_dim = blocks::rotary_dim(config, d.head_dim, 0.25)?;
    let axes = match family.mrope_section {
        Some(default) => rope::interleaved_axes(config, rotary_dim / 2, default)?,
        None => vec![],
    };
    let rope = blocks::rotation_of_axes(r, config, (rotary_dim, axes), RopeStyle::HalfSplit, 1e4)?;
    let pairing = if gguf { family.gguf_pairing } else { HeadPairing::Grouped };
    let linear = Linear::new(config, pairing, OutputGate::Silu)?;
    let scale = (d.head_dim as f32).sqrt().recip();
    let shape = Attention::grouped(d.heads, d.kv_heads, d.head_dim, scale);
    let is_linear = linear_layers(config, d.layers)?;
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, family.renormalize),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: config.optional_size("shared_expert_intermediate_size")?.unwrap_or(512),
            gate: Some("mlp.shared_expert_gate"),
        }),
    };
    let dense = config.sizes("mlp_only_layers")?;
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, linear_layer) in is_linear.into_iter().enumerate().take(d.layers) {
        r.graph.scope(format!("layers.{layer}.{}", if linear_layer { "linear_attn" } else { "self_attn" }));
        let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
        let mixed = if linear_layer {
            linear_attention(r, &d, layer, h, &linear)?
        } else {
            gated_attention(r, &d, layer, h, rope, |r, [q, k, v]| Ok(r.graph.attention(q, k, v, shape)?))?
        };
        x = r.graph.add(x, mixed)?;
        x = if dense.contains(&layer) || !(layer + 1).is_multiple_of(step) {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    let logits = blocks::head(r, config, x, table, d.eps)?;
    r.draft(d.layers, |r, layer| {
        let rope = blocks::rotation(r, config, rotary_dim, RopeStyle::HalfSplit, 1e4)?;
        let (x, table) = draft::input(r, &d, layer)?;
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("model.layers.{layer}.input_layernorm"), 1, d.eps)?;
        let attend = |r: &mut Recorder, [q, k, v]: [Value; 3]| Ok(r.graph.attention(q, k, v, shape)?);
        let mixed = gated_attention(r, &d, layer, h, rope, attend)?;
        let x = r.graph.add(x, mixed)?;
        let x = blocks::moe(r, &d, layer, x, &moe)?;
        draft::head(r, config, &d, layer, x, table)
    })?;
    Ok(logits)
}
