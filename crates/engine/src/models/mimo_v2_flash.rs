//! MiMo-V2-Flash. Sliding attention with sinks and twice the key heads in most layers, full attention in the others; values
//! are narrower than keys and scaled; sigmoid routing with a correction bias, no shared experts.
//!
//! Source: transformers `modeling_mimo_v2_flash.py`; published configurations have keys of their own. GGUF architecture
//! `mimo2`.

use moeflux_compute::graph::{Attention, PositionScale, Precision, RopeStyle, Value};

use super::blocks::{self, Decoder, Moe, draft};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{DraftNames, NameMap, Names};
use super::recorder::{ExpertNames, Form, Recorder};
use super::rope;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "MiMo-V2-Flash",
    model_types: &["mimo_v2_flash"],
    gguf_architectures: &["mimo2"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("rms_norm_eps", "layernorm_epsilon")],
        draft: Some(DraftNames {
            prefix: "model.mtp.layers.0.",
            modules: &[
                ("shared_head.norm", "model.mtp.layers.0.final_layernorm"),
                ("post_attention_layernorm", "model.mtp.layers.0.pre_mlp_layernorm"),
            ],
        }),
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("v_head_dim", "attention.value_length_mla"),
    ("value_length", "attention.value_length"),
    ("hybrid_layer_pattern", "attention.sliding_window_pattern"),
    ("attention_value_scale", "attention.value_scale"),
    ("swa_rope_theta", "rope.freq_base_swa"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("head_dim", DefaultValue::Count(192)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("intermediate_size", DefaultValue::Count(16384)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// Attention of one layer.
#[derive(Debug, Clone, Copy)]
struct LayerKind {
    shape: Attention,
    rope: usize,
    /// Whether there are sinks.
    sinks: bool,
}

impl LayerKind {
    /// Attention of a layer with `listed` key heads, if the configuration lists them by layer.
    fn new(
        config: &Config<'_>,
        r: &mut Recorder,
        d: &Decoder,
        sliding: bool,
        listed: Option<usize>,
    ) -> Result<Self> {
        // Published configurations have keys of sliding layers beside those of the others.
        let own = |key: &'static str, of_sliding: &'static str| {
            if sliding { config.optional_size(of_sliding) } else { config.optional_size(key) }
        };
        let heads = own("num_attention_heads", "swa_num_attention_heads")?.unwrap_or(d.heads);
        let kv_heads = match listed {
            Some(listed) => listed,
            None => {
                let default = if sliding { 2 * d.kv_heads } else { d.kv_heads };
                own("num_key_value_heads", "swa_num_key_value_heads")?.unwrap_or(default)
            }
        };
        if kv_heads == 0 || heads % kv_heads != 0 {
            let key =
                if sliding && listed.is_none() { "swa_num_key_value_heads" } else { "num_key_value_heads" };
            return Err(config.unsupported(key, &format!("a divisor of the {heads} heads")));
        }
        let head_dim = own("head_dim", "swa_head_dim")?.unwrap_or(d.head_dim);
        let value_dim = match own("v_head_dim", "swa_v_head_dim")? {
            Some(dim) => dim,
            None if config.format() == Format::Gguf => config.size("value_length")?,
            None => config.optional_size("v_head_dim")?.unwrap_or(128),
        };
        let window = match (sliding, config.count("sliding_window_size")?) {
            (false, _) => None,
            // The newest token is not counted.
            (true, Some(before)) => Some(before + 1),
            (true, None) => Some(config.positions("sliding_window")?.unwrap_or(129)),
        };
        let scale = (head_dim as f32).sqrt().recip();
        let shape = Attention { value_dim, window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
        let sinks = if sliding {
            config.flag("add_swa_attention_sink_bias", true)?
        } else {
            config.flag("add_full_attention_sink_bias", false)?
        };
        Ok(Self { shape, rope: rotation(config, r, head_dim, sliding)?, sinks })
    }

    /// Norm, attention, residual.
    fn attention(&self, r: &mut Recorder, d: &Decoder, layer: usize, x: Value, scale: f32) -> Result<Value> {
        let Attention { heads, kv_heads, head_dim, value_dim, .. } = self.shape;
        let base = format!("model.layers.{layer}");
        let module = |name: &str| format!("{base}.self_attn.{name}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, d.eps)?;
        let widths = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim];
        let [q, k, v] = if r.has(&module("qkv_proj")) {
            let ends = [widths[0], widths[0] + widths[1], widths.iter().sum()];
            let mut part = |rows| r.linear_part(h, &module("qkv_proj"), ends[2], &[rows], Precision::Fast);
            [part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?]
        } else {
            let mut all = |name, width| r.linear(h, &module(name), width, Precision::Fast);
            [all("q_proj", widths[0])?, all("k_proj", widths[1])?, all("v_proj", widths[2])?]
        };
        let v = if scale == 1.0 { v } else { r.graph.position_scale(v, PositionScale::constant(scale)) };
        let q = r.graph.rope(q, heads, self.rope)?;
        let k = r.graph.rope(k, kv_heads, self.rope)?;
        let sinks = if !self.sinks {
            None
        } else if r.format() == Format::Gguf {
            r.require_sinks(layer)?;
            r.sinks(layer, heads)?
        } else {
            let published = r.has_parameter(&module("attention_sink_bias"));
            let name = module(if published { "attention_sink_bias" } else { "sinks" });
            Some(r.constants(&name, &[heads], Form::F32)?)
        };
        let mixed = r.graph.attention_with_sinks(q, k, v, self.shape, sinks)?;
        let out = r.linear(mixed, &module("o_proj"), d.hidden_size, Precision::Fast)?;
        Ok(r.graph.add(x, out)?)
    }
}

/// The rotation of one kind of layers.
fn rotation(config: &Config<'_>, r: &mut Recorder, head_dim: usize, sliding: bool) -> Result<usize> {
    let (name, theta) = if sliding { ("sliding_attention", 1e4) } else { ("full_attention", 5e6) };
    let config = config.with_rope_in("rope_parameters");
    let own = config.with_rope(name)?;
    let set = own.unwrap_or(config);
    // transformers' functions for scaled rotations are those of all models, and rotate every channel.
    let default = if rope::is_scaled(&set)? { 1.0 } else { 0.334 };
    let part = set.rope_number("partial_rotary_factor")?.unwrap_or(default);
    // An odd number rotates one channel more.
    let given = match config.format() {
        Format::HuggingFace => None,
        _ => config.optional_size("rotary_dim")?,
    };
    let rotary_dim = given.unwrap_or((head_dim as f64 * part) as usize);
    if !(1..=head_dim).contains(&rotary_dim) || rotary_dim.next_multiple_of(2) > head_dim {
        let gguf = config.format() == Format::Gguf;
        let key = if gguf { "rotary_dim" } else { "partial_rotary_factor" };
        return Err(config.unsupported(key, &format!("a part of {head_dim} channels")));
    }
    let of_sliding = config.number("swa_rope_theta")?;
    let theta = match (own, sliding) {
        (None, true) if of_sliding.is_some() || config.format() != Format::Gguf => {
            of_sliding.unwrap_or(theta)
        }
        _ => set.rope_number("rope_theta")?.unwrap_or(theta),
    };
    let rope = rope::scaled(&set, rotary_dim, RopeStyle::HalfSplit, theta)?;
    Ok(r.graph.rotation(rope))
}

/// For each layer whether it slides: as `layer_types` says, or `hybrid_layer_pattern`, else all but the first and every
/// sixth.
fn sliding_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let key = "hybrid_layer_pattern";
    let pattern = match config.format() {
        Format::Gguf => config.flags(key)?.unwrap_or_default(),
        _ => config.sizes(key)?.into_iter().map(|kind| kind != 0).collect(),
    };
    let (key, listed) = match config.layer_kinds("layer_types")? {
        Some(kinds) if kinds.iter().all(|kind| kind == "sliding_attention" || kind == "full_attention") => {
            ("layer_types", kinds.iter().map(|kind| kind == "sliding_attention").collect())
        }
        Some(_) => return Err(config.unsupported("layer_types", "sliding_attention or full_attention")),
        None => (key, pattern),
    };
    match listed.len() {
        0 if config.format() != Format::Gguf => {
            Ok((0..layers).map(|layer| layer != 0 && !(layer + 1).is_multiple_of(6)).collect())
        }
        found if found < layers => {
            Err(config.unsupported(key, &format!("an entry for each of {layers} layers")))
        }
        _ => Ok(listed),
    }
}

/// For each layer whether its feed-forward is dense: as `mlp_layer_types` says, or zeros in `moe_layer_freq`, else the
/// first. In GGUF files such layers have no router.
fn dense_layers(config: &Config<'_>, r: &Recorder, layers: usize) -> Result<Vec<bool>> {
    if config.format() == Format::Gguf {
        return Ok((0..layers).map(|layer| !r.has(&format!("model.layers.{layer}.mlp.gate"))).collect());
    }
    let listed = config.sizes("moe_layer_freq")?;
    if listed.is_empty() || config.words("mlp_layer_types")?.is_some() {
        return blocks::dense_layers(config, layers, 1);
    }
    if listed.len() < layers {
        return Err(config.unsupported("moe_layer_freq", &format!("an entry for each of {layers} layers")));
    }
    Ok(listed.into_iter().map(|routed| routed == 0).collect())
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    // GGUF files list key heads by layer.
    let (layers, heads) = (blocks::layers(config)?, config.size("num_attention_heads")?);
    let listed = if gguf { config.per_layer("num_key_value_heads", layers)? } else { None };
    let d = match listed {
        None => Decoder::new(config, 1e-5)?,
        Some(_) => Decoder {
            hidden_size: config.size("hidden_size")?,
            layers,
            heads,
            kv_heads: heads,
            head_dim: config.size("head_dim")?,
            eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32,
        },
    };
    let scale = if config.is_null("attention_value_scale") {
        1.0
    } else {
        config.number("attention_value_scale")?.unwrap_or(if gguf { 1.0 } else { 0.707 }) as f32
    };
    let sliding = sliding_layers(config, layers)?;
    let dense = dense_layers(config, r, layers)?;
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        let kv_heads = listed.as_ref().map(|listed| listed[layer]);
        let mut kind = LayerKind::new(config, r, &d, sliding[layer], kv_heads)?;
        if gguf {
            // Files do not say which kind has sinks: if one layer of it has, all must.
            let alike = (0..layers).filter(|other| sliding[*other] == sliding[layer]);
            kind.sinks = { alike }.any(|other| r.require_sinks(other).is_ok());
        }
        x = kind.attention(r, &d, layer, x, scale)?;
        x = if dense[layer] {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    let logits = blocks::head(r, config, x, table, d.eps)?;
    if !gguf {
        // Attention slides and the feed-forward is dense.
        r.draft(d.layers, |r, layer| {
            let kind = LayerKind::new(config, r, &d, true, None)?;
            let (x, table) = draft::input(r, &d, layer)?;
            let x = kind.attention(r, &d, layer, x, scale)?;
            let x = blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?;
            draft::head(r, config, &d, layer, x, table)
        })?;
    }
    Ok(logits)
}
