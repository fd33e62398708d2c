//! dots3-note, its text model. DeepSeek-V3.2's latent attention to the tokens that an indexer chooses in some layers; in the others
//! latent attention of another shape over a window; both gated by head, with a norm of the key that heads share and latents grown
//! by their ranks. DeepSeek-V3's routing.
//!
//! Source: transformers `modeling_dots3_note.py`. Published configurations have keys of their own for layers with a window, those
//! that transformers writes `per_layer_config`. Layers with a window keep keys and values of heads: with the published sizes 24,576
//! numbers a token each. Contexts of no more tokens than the indexer chooses are recorded without it.

use moeflux_compute::graph::{Activation, LatentAttention, RopeStyle, Value};
use serde_json::{Value as Json, json};

use super::blocks::{self, Moe, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults, MAX_SIZE};
use super::indexer::{IndexRotation, Indexer};
use super::latent::{self, Latent, More};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "dots3-note (text)",
    model_types: &["dots3_note", "dots3_note_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_keys: &[("sliding_window", "sliding_window_size")],
        uncounted_layers: 1,
        first_keys: &[("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size")],
        ..Names::COMMON
    },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(5120)),
    ("intermediate_size", DefaultValue::Count(13824)),
    ("moe_intermediate_size", DefaultValue::Count(1536)),
    ("shared_experts_intermediate_size", DefaultValue::Count(1536)),
    ("n_shared_experts", DefaultValue::Count(1)),
    ("num_hidden_layers", DefaultValue::Count(46)),
    ("num_attention_heads", DefaultValue::Count(128)),
    ("num_key_value_heads", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1024)),
    ("head_dim", DefaultValue::Count(256)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
    ("index_topk", DefaultValue::Count(2048)),
    ("swa_num_attention_heads", DefaultValue::Count(64)),
    ("swa_num_key_value_heads", DefaultValue::Count(64)),
    ("swa_q_lora_rank", DefaultValue::Count(1024)),
    ("swa_kv_lora_rank", DefaultValue::Count(1024)),
    ("swa_head_dim", DefaultValue::Count(256)),
    ("swa_qk_nope_head_dim", DefaultValue::Count(192)),
    ("swa_v_head_dim", DefaultValue::Count(128)),
    ("max_position_embeddings", DefaultValue::Count(524_288)),
];

/// Base of rotations.
const THETA: f64 = 8e7;

/// Epsilon of the norm of the index's keys.
const KEY_EPS: f32 = 1e-6;

/// Refuses what published configurations say of other models of this kind, which transformers does not read.
fn check_switches(config: &Config<'_>) -> Result<()> {
    for (key, only) in
        [("k_rope_only_layernorm", true), ("apply_mla_qkv_lora_rescale", true), ("use_dynamic_rsf", false)]
    {
        if config.flag(key, only)? != only {
            return Err(config.unsupported(key, &only.to_string()));
        }
    }
    for (key, only) in [
        ("attention_gate_type", "headwise"),
        ("swa_attention_gate_type", "headwise"),
        ("normalization", "RMSNorm"),
        ("final_norm", "RMSNorm"),
        ("topk_method", "noaux_tc"),
    ] {
        if config.word(key)?.is_some_and(|word| word != only) {
            return Err(config.unsupported(key, only));
        }
    }
    Ok(())
}

/// What a layer's attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// What an indexer chooses.
    Indexed,
    /// Everything.
    Full,
    /// A window.
    Sliding,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Indexed, Self::Full, Self::Sliding];

    /// What configurations call it.
    fn name(self) -> &'static str {
        match self {
            Self::Indexed => "indexed_attention",
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// The kinds of layers.
fn kinds(config: &Config<'_>, layers: usize) -> Result<Vec<Kind>> {
    let given = |key: &str| -> Result<bool> {
        Ok(config.is_null(key) || config.read(key, "", |_| Some(()))?.is_some())
    };
    let (key, by_layer) = ("use_dsa", given("per_layer_config")?);
    // Published configurations say "full" of layers with an indexer.
    let indexed = if given(key)? {
        config.read(key, "true or false", Json::as_bool)?
    } else {
        (!by_layer).then_some(true)
    };
    let Some(listed) = config.layer_kinds("layer_types")? else {
        let slides = config.flag("use_sliding_window", true)?;
        let rest = if indexed == Some(false) { Kind::Full } else { Kind::Indexed };
        let kind = |layer| if slides && layer >= 2 && layer % 4 != 1 { Kind::Sliding } else { rest };
        return Ok((0..layers).map(kind).collect());
    };
    let kind = |name: &String| match Kind::ALL.into_iter().find(|kind| kind.name() == name)? {
        Kind::Full if indexed == Some(true) => Some(Kind::Indexed),
        Kind::Indexed if indexed == Some(false) => Some(Kind::Full),
        other => Some(other),
    };
    let found: Option<Vec<Kind>> = listed.iter().map(kind).collect();
    found.filter(|found| found.len() == layers).ok_or_else(|| {
        let names = Kind::ALL.map(Kind::name).join(", ");
        config.unsupported("layer_types", &format!("one of {names} for each of {layers} layers"))
    })
}

/// Sizes of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    q_rank: usize,
    rank: usize,
    head_dim: usize,
    nope: usize,
    rope: usize,
    value: usize,
}

impl Shape {
    /// Of all layers.
    fn new(config: &Config<'_>) -> Result<Self> {
        let heads = config.size("num_attention_heads")?;
        Ok(Self {
            heads,
            kv_heads: config.optional_size("num_key_value_heads")?.unwrap_or(heads),
            q_rank: config.size("q_lora_rank")?,
            rank: config.size("kv_lora_rank")?,
            head_dim: config.size("head_dim")?,
            nope: config.size("qk_nope_head_dim")?,
            rope: config.size("qk_rope_head_dim")?,
            value: config.size("v_head_dim")?,
        })
    }

    /// Of layers with a window, by published keys.
    fn sliding(config: &Config<'_>) -> Result<Self> {
        let (head_dim, nope) = (config.size("swa_head_dim")?, config.size("swa_qk_nope_head_dim")?);
        let rope = config.optional_size("swa_qk_rope_head_dim")?.unwrap_or(head_dim.saturating_sub(nope));
        Ok(Self {
            heads: config.size("swa_num_attention_heads")?,
            kv_heads: config.size("swa_num_key_value_heads")?,
            q_rank: config.size("swa_q_lora_rank")?,
            rank: config.size("swa_kv_lora_rank")?,
            head_dim,
            nope,
            rope,
            value: config.size("swa_v_head_dim")?,
        })
    }

    /// The same with what an object has in place of it; nothing if it has something else too.
    fn with(mut self, own: &Json) -> Option<Self> {
        for (key, value) in own.as_object()? {
            let size = value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n))? as usize;
            *match key.as_str() {
                "num_attention_heads" => &mut self.heads,
                "num_key_value_heads" => &mut self.kv_heads,
                "q_lora_rank" => &mut self.q_rank,
                "kv_lora_rank" => &mut self.rank,
                "head_dim" => &mut self.head_dim,
                "qk_nope_head_dim" => &mut self.nope,
                "qk_rope_head_dim" => &mut self.rope,
                "v_head_dim" => &mut self.value,
                _ => return None,
            } = size;
        }
        Some(self)
    }

    /// Of the layers of `kind`, which are alike.
    fn of(config: &Config<'_>, kinds: &[Kind], kind: Kind) -> Result<Self> {
        let key = "per_layer_config";
        let given = config.read(key, "an object", |value| value.as_object().cloned())?;
        let own = Self::new(config)?;
        let shape = match &given {
            None if kind == Kind::Sliding && !config.is_null(key) => Self::sliding(config)?,
            None => own,
            Some(given) => {
                let known = |number: &String| number.parse().is_ok_and(|layer: usize| layer < kinds.len());
                let of_layer = |layer: usize| {
                    let mut found = given.iter().filter(|(number, _)| number.parse() == Ok(layer));
                    found.next().map_or(Some(own), |(_, changes)| own.with(changes))
                };
                let mut layers = (0..kinds.len()).filter(|layer| kinds[*layer] == kind);
                let first = layers.next().and_then(of_layer);
                let alike = given.keys().all(known) && layers.all(|layer| of_layer(layer) == first);
                let expected =
                    "heads, ranks and channels of layers by their numbers, the same for all of a kind";
                first.filter(|_| alike).ok_or_else(|| config.unsupported(key, expected))?
            }
        };
        let Self { heads, kv_heads, head_dim, nope, rope, .. } = shape;
        let place = |name: &str| match kind {
            _ if given.is_some() => key.to_owned(),
            Kind::Sliding => format!("swa_{name}"),
            Kind::Indexed | Kind::Full => name.to_owned(),
        };
        if kv_heads != heads {
            let expected = format!("the {heads} heads of {} layers", kind.name());
            return Err(config.unsupported(&place("num_key_value_heads"), &expected));
        }
        if kind == Kind::Sliding && head_dim != nope + rope || !rope.is_multiple_of(2) {
            let expected = format!("an even number of {} channels that rotate, beside {nope}", kind.name());
            return Err(config.unsupported(&place("qk_rope_head_dim"), &expected));
        }
        Ok(shape)
    }
}

/// The rotary parameters of configurations that have none.
fn published_rope(config: &Config<'_>) -> Result<Json> {
    let of = |theta: f64| json!({ "rope_theta": theta });
    let rest = of(config.number("rope_theta")?.unwrap_or(THETA));
    let sliding = of(config.number("swa_rope_theta")?.unwrap_or(5e4));
    Ok(json!({ "indexed_attention": rest, "full_attention": rest, "sliding_attention": sliding }))
}

/// The rotation of `channels` in layers of `kind`.
fn rotation(config: &Config<'_>, r: &mut Recorder, kind: Kind, channels: usize) -> Result<usize> {
    let mut sets = false;
    for kind in Kind::ALL {
        sets |= config.with_rope(kind.name())?.is_some();
    }
    let own = match config.with_rope(kind.name())? {
        Some(own) => own,
        // transformers has a copy for each kind.
        None if !sets => config.with_rope_sets_only(),
        None => {
            return Err(config.unsupported("rope_parameters", &format!("parameters of {}", kind.name())));
        }
    };
    Ok(r.graph.rotation(rope::rotation(&own, channels, RopeStyle::Interleaved, THETA)?))
}

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let mut dense = blocks::dense_layers(config, layers, 1)?;
    if config.words("mlp_layer_types")?.is_some() {
        return Ok(dense);
    }
    let key = "moe_layer_freq";
    let expected = format!("a positive integer, or 0 or 1 for each of {layers} layers");
    let routed = config.read(key, &expected, |value| match value {
        Json::Array(all) if all.len() >= layers => {
            all.iter().map(|one| one.as_bool().or(Some(one.as_u64()? != 0))).collect()
        }
        one => {
            let every = one.as_u64().filter(|every| *every > 0)?;
            Some((0..layers as u64).map(|layer| layer.is_multiple_of(every)).collect())
        }
    })?;
    let routed: Vec<bool> = routed.unwrap_or_else(|| vec![true; layers]);
    dense.iter_mut().zip(routed).for_each(|(dense, routed)| *dense |= !routed);
    Ok(dense)
}

/// What chooses tokens; nothing where contexts have no more than all queries see.
fn indexer(config: &Config<'_>, r: &mut Recorder, rotation: usize, rope: usize) -> Result<Option<Indexer>> {
    let key = "index_topk";
    let seen = config.size(key)?;
    if config.context().is_some_and(|positions| positions <= seen) {
        blocks::limit_positions(r, config, key)?;
        return Ok(None);
    }
    let indexer = Indexer::new(config, 64, KEY_EPS)?;
    if indexer.index.head_dim < rope {
        return Err(config.unsupported("index_head_dim", &format!("at least {rope} channels")));
    }
    Ok(Some(Indexer { rotation: Some(IndexRotation { rope: rotation, first: 0 }), ..indexer }))
}

/// The attention of one kind of layers.
#[derive(Debug, Clone, Copy)]
struct Attention {
    latent: Latent,
    indexer: Option<Indexer>,
}

impl Attention {
    fn new(
        config: &Config<'_>,
        r: &mut Recorder,
        (kinds, kind): (&[Kind], Kind),
        (hidden_size, eps): (usize, f32),
    ) -> Result<Self> {
        let Shape { heads, q_rank, rank, nope, rope, value, .. } = Shape::of(config, kinds, kind)?;
        let rotation = rotation(config, r, kind, rope)?;
        let indexer = if kind == Kind::Indexed { indexer(config, r, rotation, rope)? } else { None };
        let window = config.positions("sliding_window")?.unwrap_or(512);
        let scale = ((nope + rope) as f64).sqrt().recip() as f32;
        let shape = LatentAttention { heads, nope, rope, rank, value, scale };
        let latent = Latent::shaped(shape, Some(q_rank), Some(rotation))
            .with_eps(eps)
            .grown(hidden_size, [true; 2])
            .within((kind == Kind::Sliding).then_some(window))
            .with(More {
                head_gate: Some("g_proj"),
                rotated_norm: Some("k_rope_only_layernorm"),
                ..More::default()
            });
        Ok(Self { latent, indexer })
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let published = published_rope(config)?;
    let config = &config.assuming_rope(&published);
    check_switches(config)?;
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let kinds = kinds(config, layers)?;
    let mut attention = vec![];
    for kind in Kind::ALL.into_iter().filter(|kind| kinds.contains(kind)) {
        attention.push((kind, Attention::new(config, r, (&kinds, kind), (hidden_size, eps))?));
    }
    let width =
        config.size("n_shared_experts")?.saturating_mul(config.size("shared_experts_intermediate_size")?);
    let moe = Moe {
        route: blocks::sigmoid_route(config)?,
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert { module: "mlp.shared_experts", width, gate: None }),
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, dense) in dense_layers(config, layers)?.into_iter().enumerate() {
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &name("input_layernorm"), 1, eps)?;
        let own = attention.iter().find(|(kind, _)| *kind == kinds[layer]);
        let (_, Attention { latent, indexer }) = own.expect("of all kinds");
        let out = latent::attention_of(r, layer, h, latent, |r, inputs| match indexer {
            Some(indexer) => Ok(Some(indexer.choose(r, layer, inputs)?)),
            None => Ok(None),
        })?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &name("post_attention_layernorm"), 1, eps)?;
        let out = if dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &name("mlp"), width, Activation::SwiGlu)?
        } else {
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
