//! Nemotron-H (Nemotron 3 Nano and Super). A layer is one block behind one norm: Mamba-2, attention without positions,
//! a dense MLP of squared ReLU, or experts of the same kind, which may work on a projection to fewer channels.
//!
//! Source: transformers `modeling_nemotron_h.py`; GGUF architecture `nemotron_h_moe`, whose layers say by their numbers of
//! key heads and of channels what they are.

use moeflux_compute::graph::{Activation, Attention, ExpertMlp, Precision, Route, SsmScan, Value};

use super::blocks::mamba2::{self, Mamba2};
use super::blocks::{self, Decoder};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::Recorder;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Nemotron-H",
    model_types: &["nemotron_h"],
    gguf_architectures: &["nemotron_h_moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        gguf_keys: &[GGUF_KEYS, mamba2::GGUF_KEYS],
        other_keys: OTHER_KEYS,
        prefixes: &["backbone.", "model."],
        top: &["embeddings", "norm_f"],
        renamed: &[("embed_tokens", "embeddings"), ("norm", "norm_f")],
        layer_kinds: "layers_block_type",
        layer_letters: Some(LETTERS),
        ..Names::COMMON
    },
    record,
};

/// Modules and tensors of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("norm", "attn_norm"),
    ("mixer.in_proj", "ssm_in"),
    ("mixer.conv1d", "ssm_conv1d"),
    ("mixer.dt_bias", "ssm_dt.bias"),
    ("mixer.A_log", "ssm_a"),
    ("mixer.D", "ssm_d"),
    ("mixer.norm", "ssm_norm"),
    ("mixer.out_proj", "ssm_out"),
    ("mixer.q_proj", "attn_q"),
    ("mixer.k_proj", "attn_k"),
    ("mixer.v_proj", "attn_v"),
    ("mixer.o_proj", "attn_output"),
    ("mixer.up_proj", "ffn_up"),
    ("mixer.down_proj", "ffn_down"),
    ("mixer.gate", "ffn_gate_inp"),
    ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
    ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
    ("mixer.fc1_latent_proj", "ffn_latent_down"),
    ("mixer.fc2_latent_proj", "ffn_latent_up"),
];

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ("moe_latent_size", "moe_latent_size"),
];

/// Other keys of configurations.
const OTHER_KEYS: NameMap = &[
    ("layers_block_type", "layer_types"),
    ("n_groups", "mamba_n_groups"),
    ("conv_kernel", "mamba_d_conv"),
    ("use_conv_bias", "mamba_conv_bias"),
    ("time_step_min", "mamba_dt_min"),
    ("time_step_limit", "mamba_dt_limit"),
];

/// Key of configurations with a letter for each layer.
const LETTERS: &str = "hybrid_override_pattern";

/// What configurations need not say.
const DEFAULTS: &KeyDefaults =
    &[("num_experts", DefaultValue::Count(8)), ("num_experts_per_tok", DefaultValue::Count(2))];

/// What a layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Mamba,
    Attention,
    Mlp,
    Moe,
}

/// The kind of each layer.
fn kinds(config: &Config<'_>, r: &Recorder) -> Result<Vec<BlockKind>> {
    let layers = blocks::layers(config)?;
    if config.format() == Format::Gguf {
        return gguf_kinds(config, r, layers);
    }
    let (key, kinds): (_, Option<Vec<BlockKind>>) = match config.layer_kinds("layers_block_type")? {
        Some(words) => {
            let kind = |word: &String| match word.as_str() {
                "linear_attention" | "mamba" => Some(BlockKind::Mamba),
                "full_attention" | "attention" => Some(BlockKind::Attention),
                "mlp" => Some(BlockKind::Mlp),
                "moe" => Some(BlockKind::Moe),
                _ => None,
            };
            ("layers_block_type", words.iter().map(kind).collect())
        }
        None => {
            let kind = |letter: char| match letter {
                'M' => Some(BlockKind::Mamba),
                '*' => Some(BlockKind::Attention),
                '-' => Some(BlockKind::Mlp),
                'E' => Some(BlockKind::Moe),
                _ => None,
            };
            let letters = config.letters(LETTERS)?.unwrap_or_default();
            (LETTERS, letters.into_iter().map(kind).collect())
        }
    };
    match kinds {
        Some(mut kinds) if kinds.len() >= layers => {
            kinds.truncate(layers);
            Ok(kinds)
        }
        _ => {
            let expected =
                format!("Mamba (M), attention (*), mlp (-) or moe (E) for each of {layers} layers");
            Err(config.unsupported(key, &expected))
        }
    }
}

/// GGUF files have for each layer key heads, else channels of its MLP or experts, else neither.
fn gguf_kinds(config: &Config<'_>, r: &Recorder, layers: usize) -> Result<Vec<BlockKind>> {
    let listed = |key: &str| -> Result<Vec<usize>> {
        let listed = config.sizes(key)?;
        if listed.len() >= layers {
            Ok(listed)
        } else {
            Err(config.unsupported(key, &format!("a number for each of {layers} layers")))
        }
    };
    let (key_heads, channels) = (listed("num_key_value_heads")?, listed("intermediate_size")?);
    let kind = |layer: usize| match (key_heads[layer], channels[layer]) {
        (0, 0) => BlockKind::Mamba,
        (_, 0) => BlockKind::Attention,
        _ if r.has(&format!("model.layers.{layer}.mixer.up_proj")) => BlockKind::Mlp,
        _ => BlockKind::Moe,
    };
    Ok((0..layers).map(kind).collect())
}

/// A size, or transformers' default where only GGUF files must have it.
fn size(config: &Config<'_>, key: &str, default: usize) -> Result<usize> {
    match config.format() {
        Format::Gguf => config.size(key),
        _ => Ok(config.optional_size(key)?.unwrap_or(default)),
    }
}

/// Mamba-2 layers.
fn mamba(config: &Config<'_>, eps: f32) -> Result<Mamba2> {
    let heads = size(config, "mamba_num_heads", 128)?;
    let head_dim = match config.format() {
        Format::Gguf => {
            let width = config.size("mamba_inner_size")?;
            if !width.is_multiple_of(heads) {
                let expected = format!("a multiple of the {heads} heads");
                return Err(config.unsupported("mamba_inner_size", &expected));
            }
            width / heads
        }
        _ => size(config, "mamba_head_dim", 64)?,
    };
    let groups = size(config, "n_groups", 8)?;
    if !heads.is_multiple_of(groups) {
        return Err(config.unsupported("n_groups", &format!("a divisor of the {heads} heads")));
    }
    // What each format's own implementation does.
    let time_steps = match config.format() {
        Format::Gguf => (0.0, f32::INFINITY),
        Format::Mlx => mamba2::time_step_limit(config, "time_step_limit")?.unwrap_or((0.0, f32::INFINITY)),
        Format::HuggingFace => {
            let least = config.number("time_step_min")?.unwrap_or(0.001);
            (least as f32, f32::INFINITY)
        }
    };
    let state_size = size(config, "ssm_state_size", 128)?;
    // llama.cpp adds it whatever the file says.
    let bias = config.format() == Format::Gguf || config.flag("use_conv_bias", true)?;
    let shape = SsmScan { heads, head_dim, groups, state_size, time_steps };
    let kernel = size(config, "conv_kernel", 4)?;
    Ok(Mamba2 { shape, kernel, bias, norm_groups: groups, eps })
}

/// Attention of normed h; queries and keys are not rotated.
fn attention(r: &mut Recorder, d: &Decoder, layer: usize, h: Value) -> Result<Value> {
    let Decoder { hidden_size, heads, kv_heads, head_dim, .. } = *d;
    let module = |name: &str| format!("model.layers.{layer}.mixer.{name}");
    let q = r.linear(h, &module("q_proj"), heads * head_dim, Precision::Fast)?;
    let k = r.linear(h, &module("k_proj"), kv_heads * head_dim, Precision::Fast)?;
    let v = r.linear(h, &module("v_proj"), kv_heads * head_dim, Precision::Fast)?;
    let scale = (head_dim as f32).sqrt().recip();
    let mixed = r.graph.attention(q, k, v, Attention::grouped(heads, kv_heads, head_dim, scale))?;
    r.linear(mixed, &module("o_proj"), hidden_size, Precision::Fast)
}

/// relu(up · h)² through down.
fn mlp(r: &mut Recorder, h: Value, module: &str, width: usize) -> Result<Value> {
    let up = r.linear(h, &format!("{module}.up_proj"), width, Precision::Fast)?;
    let product = r.graph.squared_relu(up);
    r.linear(product, &format!("{module}.down_proj"), h.width(), Precision::Fast)
}

/// Layers with experts.
#[derive(Debug, Clone, Copy)]
struct Moe {
    route: Route,
    /// Width of what experts take, if that is not the residual stream.
    latent: Option<usize>,
    /// Width of the MLP that every token passes through besides; none without.
    shared: usize,
}

impl Moe {
    fn new(config: &Config<'_>) -> Result<Self> {
        let gguf = config.format() == Format::Gguf;
        if gguf && config.count("n_group")?.unwrap_or(1) > 1 && config.count("topk_group")?.is_none() {
            return Err(config.unsupported("topk_group", "the number of groups that are kept"));
        }
        Ok(Self {
            route: blocks::sigmoid_route(config)?,
            latent: config.optional_size("moe_latent_size")?,
            shared: size(config, "moe_shared_expert_intermediate_size", 7688)?,
        })
    }

    /// Router, experts, shared expert of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let module = |name: &str| format!("model.layers.{layer}.mixer.{name}");
        let Self { route, latent, shared } = *self;
        let logits = r.linear(h, &module("gate"), route.experts, Precision::F32)?;
        let bias = r.correction_bias(&module("gate"), route.experts)?;
        let routing = r.graph.route(logits, Some(bias), route)?;
        let taken = match latent {
            Some(width) => r.linear(h, &module("fc1_latent_proj"), width, Precision::Fast)?,
            None => h,
        };
        // Before the experts, so that it is computed while they are read.
        let shared = mlp(r, h, &module("shared_experts"), shared)?;
        let experts = r.ungated_experts(layer, route.experts, taken.width(), "mixer.experts")?;
        let body = ExpertMlp { activation: Activation::SquaredRelu, ..ExpertMlp::default() };
        let mut out = r.graph.moe_experts_with(taken, routing, experts, body)?;
        if latent.is_some() {
            out = r.linear(out, &module("fc2_latent_proj"), h.width(), Precision::Fast)?;
        }
        Ok(r.graph.add(out, shared)?)
    }
}

/// The attention layers' shape.
fn decoder(config: &Config<'_>, kv_heads: usize) -> Result<Decoder> {
    let (hidden_size, heads) = (config.size("hidden_size")?, size(config, "num_attention_heads", 32)?);
    let head_dim = match (config.optional_size("head_dim")?, config.format()) {
        (Some(dim), _) => dim,
        (None, Format::Mlx) if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        (None, _) => size(config, "head_dim", 128)?,
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.unsupported("num_key_value_heads", &format!("a divisor of the {heads} heads")));
    }
    let eps = match config.format() {
        Format::Gguf => config.magnitude("rms_norm_eps")?,
        _ => config.magnitude("layer_norm_epsilon")?,
    };
    let eps = eps.unwrap_or(1e-5) as f32;
    Ok(Decoder { hidden_size, layers: blocks::layers(config)?, heads, kv_heads, head_dim, eps })
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    for (key, expected) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        if config.word(key)?.is_some_and(|word| word != expected) {
            return Err(config.unsupported(key, expected));
        }
    }
    let kinds = kinds(config, r)?;
    let kv_heads = match config.format() {
        // A number for each layer; all that have any have the same.
        Format::Gguf => {
            let mut all = config.sizes("num_key_value_heads")?;
            all.retain(|heads| *heads > 0);
            all.dedup();
            match all[..] {
                [] => 1,
                [heads] => heads,
                _ => return Err(config.unsupported("num_key_value_heads", "one number for all layers")),
            }
        }
        _ if config.is_null("num_key_value_heads") => size(config, "num_attention_heads", 32)?,
        _ => size(config, "num_key_value_heads", 8)?,
    };
    let d = decoder(config, kv_heads)?;
    let mamba = if kinds.contains(&BlockKind::Mamba) { Some(mamba(config, d.eps)?) } else { None };
    let moe = if kinds.contains(&BlockKind::Moe) { Some(Moe::new(config)?) } else { None };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, kind) in kinds.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        let part = match kind {
            BlockKind::Mamba => "mamba",
            BlockKind::Attention => "self_attn",
            BlockKind::Mlp | BlockKind::Moe => "mlp",
        };
        r.graph.scope(format!("layers.{layer}.{part}"));
        let h = r.rms_norm(x, &format!("{base}.norm"), 1, d.eps)?;
        let out = match (kind, &mamba, &moe) {
            (BlockKind::Mamba, Some(mamba), _) => mamba.mix(r, &format!("{base}.mixer"), h)?,
            (BlockKind::Moe, _, Some(moe)) => moe.mix(r, layer, h)?,
            (BlockKind::Attention, ..) => attention(r, &d, layer, h)?,
            _ => mlp(r, h, &format!("{base}.mixer"), size(config, "intermediate_size", 21504)?)?,
        };
        x = r.graph.add(x, out)?;
    }
    // The flag for tied embeddings has no effect on this family.
    let tied = config.format() == Format::Gguf && !r.has("lm_head");
    blocks::head_of(r, x, (table, tied), d.eps)
}
