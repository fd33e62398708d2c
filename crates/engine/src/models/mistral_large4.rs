//! Mistral Large 4. DeepSeek-V3.2's latent attention with queries straight from the hidden state, whose heads grow with their
//! position; layers without positions between the others; layers that attend to the latents of one before them; Mistral 4's
//! routing; logits softly capped.
//!
//! Source: transformers `modeling_mistral_large4.py`; published inside multimodal checkpoints under names of their own. Every layer
//! keeps its latents here, also those of another. Contexts of no more tokens than the indexer chooses are recorded without it.

use moeflux_compute::graph::{
    Activation, Chosen, GroupRank, LatentAttention, LatentInputs, LatentWeights, Precision, RopeStyle, Route,
    Value,
};

use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::indexer::{self, IndexRotation, Indexer, head_scale};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::rope;
use super::{Family, SILU};
use crate::{Error, Result};

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Mistral Large 4",
    model_types: &["mistral_large4", "mistral_large4_text"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        other_tensors: OTHER_TENSORS,
        prefixes: &["model.", "model.language_model.", "language_model.model.", ""],
        top: &["embed_tokens", "tok_embeddings"],
        renamed: &[("embed_tokens", "tok_embeddings"), ("lm_head", "output")],
        ..Names::COMMON
    },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
    ("self_attn.kv_a_layernorm", "attention.kv_a_norm"),
    ("self_attn.kv_b_proj", "attention.wkv_b"),
    ("self_attn.o_proj", "attention.wo"),
    ("self_attn.softmax_scaling.scale", "attention.ssmax_scaling.s"),
    ("self_attn.softmax_scaling.bias", "attention.ssmax_scaling.b"),
    ("self_attn.indexer.q_input_norm", "attention.indexer.q_input_norm"),
    ("self_attn.indexer.wq_b", "attention.indexer.wq_b"),
    ("self_attn.indexer.wk", "attention.indexer.wk"),
    ("self_attn.indexer.k_norm", "attention.indexer.k_norm"),
    ("self_attn.indexer.weights_proj", "attention.indexer.weights_proj"),
    ("self_attn.indexer.softmax_scaling.scale", "attention.indexer.ssmax_scaling.s"),
    ("self_attn.indexer.softmax_scaling.bias", "attention.indexer.ssmax_scaling.b"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate", "gate"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.shared_experts.gate_proj", "shared_experts.w1"),
    ("mlp.shared_experts.up_proj", "shared_experts.w3"),
    ("mlp.shared_experts.down_proj", "shared_experts.w2"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(6144)),
    ("intermediate_size", DefaultValue::Count(24576)),
    ("moe_intermediate_size", DefaultValue::Count(6144)),
    ("num_hidden_layers", DefaultValue::Count(72)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(4)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(64)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
    ("index_topk", DefaultValue::Count(2048)),
    ("final_logit_softcapping", DefaultValue::Number(30.0)),
    ("max_position_embeddings", DefaultValue::Count(1_048_576)),
];

/// The rotary parameters of the published model, which configurations without any mean.
fn published_rope() -> serde_json::Value {
    serde_json::json!({
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    })
}

/// Logarithms of learned factors on the frequencies of the rotation, in the forms of checkpoints.
const FREQUENCIES: [&str; 3] =
    ["lerope.alpha", "model.language_model.rotary_emb.alpha", "model.rotary_emb.alpha"];

/// Epsilon of the norms of the indexer.
const INDEX_EPS: f32 = 1e-6;

/// The rotation of `channels`.
fn rotation(config: &Config<'_>, r: &mut Recorder, channels: usize) -> Result<usize> {
    let mut rope = rope::rotation(config, channels, RopeStyle::Interleaved, 1e4)?;
    let mut learned = None;
    for name in FREQUENCIES.iter().filter(|_| !r.is_outline()) {
        learned = learned.or(r.values(name)?.map(|values| (*name, values)));
    }
    let missing = || Error::MissingTensor { path: r.path().into(), tensor: FREQUENCIES[0].into() };
    if r.is_outline() {
        r.outline_values(FREQUENCIES[0], &vec![0.0; rope.inv_freq.len()])?;
    } else {
        let (name, learned) = learned.ok_or_else(missing)?;
        let factors: Vec<f32> = learned.iter().map(|alpha| alpha.exp()).collect();
        if factors.len() != rope.inv_freq.len() || factors.iter().any(|factor| !factor.is_finite()) {
            return Err(Error::Tensor {
                path: r.path().into(),
                tensor: name.into(),
                expected: format!("{} logarithms of finite factors", rope.inv_freq.len()),
                got: format!("{learned:?}"),
            });
        }
        rope.inv_freq.iter_mut().zip(factors).for_each(|(freq, factor)| *freq *= factor);
    }
    Ok(r.graph.rotation(rope))
}

/// What each layer does.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// Whether queries and keys rotate.
    rotates: bool,
    /// The layer whose latents it attends to.
    source: usize,
}

/// A whole number for each of `layers` layers under `key`, if it is there.
fn by_layer(config: &Config<'_>, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
    let whole = |value: &serde_json::Value| Some(value.as_u64()? as usize);
    let all = config.read(key, "a list of whole numbers", |v| v.as_array()?.iter().map(whole).collect())?;
    let all: Option<Vec<usize>> = all;
    match all {
        Some(all) if all.len() < layers => {
            Err(config.unsupported(key, &format!("a number for each of {layers} layers")))
        }
        all => Ok(all),
    }
}

/// What the layers do, by the configuration.
fn kinds(config: &Config<'_>, layers: usize) -> Result<Vec<Kind>> {
    let rotate = match by_layer(config, "no_rope_layers", layers)? {
        Some(rotate) => rotate.into_iter().map(|rotates| rotates != 0).collect(),
        None => {
            let every = config.optional_size("no_rope_layer_interval")?.unwrap_or(4);
            (0..layers).map(|layer| !(layer + 1).is_multiple_of(every)).collect::<Vec<_>>()
        }
    };
    let key = "kv_source_layers";
    let sources = by_layer(config, key, layers)?.unwrap_or_else(|| (0..layers).collect());
    if sources.len() != layers {
        return Err(config.unsupported(key, &format!("a number for each of {layers} layers")));
    }
    let shared = |layer: usize| sources[layer + 1..].contains(&layer);
    for (layer, source) in sources.iter().enumerate() {
        // Of layers of a kind, transformers keeps the latents of the last one that others share.
        let last = (0..layer)
            .rev()
            .find(|own| sources[*own] == *own && rotate[*own] == rotate[layer] && shared(*own));
        if *source != layer && Some(*source) != last {
            let expected = "the layer itself, or the last one before it of its kind that others share";
            return Err(config.unsupported(key, expected));
        }
    }
    let kind = |(rotates, source)| Kind { rotates, source };
    Ok(rotate.into_iter().zip(sources).map(kind).collect())
}

/// Attention of all layers.
struct Attention {
    heads: usize,
    nope: usize,
    rope: usize,
    rank: usize,
    value: usize,
    /// Factor on scores.
    scale: f32,
    eps: f32,
    /// Index of the rotation in the graph.
    rotation: usize,
    kinds: Vec<Kind>,
    /// The normed latents of each layer so far, and its rotated keys if it has some.
    latents: Vec<(Value, Option<Value>)>,
}

impl Attention {
    fn new(config: &Config<'_>, r: &mut Recorder, eps: f32) -> Result<Self> {
        let (nope, rope) = (config.size("qk_nope_head_dim")?, config.size("qk_rope_head_dim")?);
        let factor = rope::latent_score_factor(config)?;
        Ok(Self {
            heads: config.size("num_attention_heads")?,
            nope,
            rope,
            rank: config.size("kv_lora_rank")?,
            value: config.size("v_head_dim")?,
            scale: (((nope + rope) as f64).sqrt().recip() * factor) as f32,
            eps,
            rotation: rotation(config, r, rope)?,
            kinds: kinds(config, blocks::layers(config)?)?,
            latents: vec![],
        })
    }

    /// The normed latents that `layer` attends to, and their rotated keys if it rotates.
    fn latents(&mut self, r: &mut Recorder, layer: usize, h: Value) -> Result<(Value, Option<Value>)> {
        let Kind { rotates, source } = self.kinds[layer];
        if source != layer {
            return Ok(self.latents[source]);
        }
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let rope = if rotates { self.rope } else { 0 };
        let kv = r.linear(h, &module("kv_a_proj_with_mqa"), self.rank + rope, Precision::Fast)?;
        let (mut c, mut keys) = (kv, None);
        if rotates {
            c = r.graph.slice(kv, 1, 0, self.rank)?;
            let own = r.graph.slice(kv, 1, self.rank, rope)?;
            keys = Some(r.graph.rope(own, 1, self.rotation)?);
        }
        Ok((r.rms_norm(c, &module("kv_a_layernorm"), 1, self.eps)?, keys))
    }

    /// Attention of normed h over what is `chosen`.
    fn mix(&mut self, r: &mut Recorder, layer: usize, h: Value, chosen: Option<Chosen>) -> Result<Value> {
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        let (c, keys) = self.latents(r, layer, h)?;
        self.latents.push((c, keys));
        let Self { heads, nope, rope, rank, value, scale, .. } = *self;
        let q = r.linear(h, &module("q_proj"), heads * (nope + rope), Precision::Fast)?;
        let q = head_scale(r, q, &module("softmax_scaling"), heads)?;
        let (mut q_nope, mut rotated) = (q, None);
        let mut shape = LatentAttention { heads, nope: nope + rope, rope: 0, rank, value, scale };
        if let Some(keys) = keys {
            q_nope = r.graph.slice(q, heads, 0, nope)?;
            let own = r.graph.slice(q, heads, nope, rope)?;
            rotated = Some([r.graph.rope(own, heads, self.rotation)?, keys]);
            shape = LatentAttention { nope, rope, ..shape };
        }
        let joint = r.matrix(&module("kv_b_proj"), Some(heads * (shape.nope + value)), rank)?;
        let inputs = LatentInputs { q_nope, c, rotated, sinks: None, chosen };
        let mixed = r.graph.latent_attention(inputs, LatentWeights::Joint(joint), shape)?;
        r.linear(mixed, &module("o_proj"), h.width(), Precision::Fast)
    }
}

/// The indexer, and for each layer whether it has one of its own; nothing where contexts have no more tokens than all
/// queries see.
fn choice(config: &Config<'_>, r: &mut Recorder, layers: usize) -> Result<Option<(Indexer, Vec<bool>)>> {
    let key = "index_topk";
    let seen = config.positions(key)?.unwrap_or(2048);
    let has = |layer: usize| r.has(&format!("model.layers.{layer}.self_attn.indexer.wk"));
    if !(0..layers).any(has) || config.context().is_some_and(|positions| positions <= seen) {
        blocks::limit_positions(r, config, key)?;
        return Ok(None);
    }
    let own = indexer::layers_with_indexer(config, layers, indexer::pattern(config, layers)?)?;
    let indexer = Indexer::new(config, 32, INDEX_EPS)?;
    let rope = config.size("qk_rope_head_dim")?;
    if indexer.index.head_dim < rope {
        return Err(config.unsupported("index_head_dim", &format!("at least {rope} channels")));
    }
    Ok(Some((Indexer { scaling: Some("softmax_scaling"), ..indexer }, own)))
}

/// Where the routed experts of `layer` are.
fn expert_names(r: &Recorder, layer: usize) -> ExpertNames {
    if r.has(&format!("model.layers.{layer}.experts.0.w1")) {
        return ExpertNames { module: "experts", projections: ["w1", "w3", "w2"] };
    }
    ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let published = published_rope();
    let config = &config.assuming_rope(&published);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let mut attention = Attention::new(config, r, eps)?;
    let choice = choice(config, r, layers)?;
    let (experts, top_k) = blocks::expert_counts(config, Some(4))?;
    let route = Route {
        groups: blocks::groups(config, GroupRank::BestTwo, (1, 1))?,
        scale: config.magnitude("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..Route::softmax(experts, top_k, true)
    };
    let shared = blocks::shared_experts(config, "n_shared_experts", 1)?;

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    let mut chosen = None;
    for (layer, dense) in blocks::dense_layers(config, layers, 1)?.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = r.rms_norm(x, &format!("{base}.input_layernorm"), 1, eps)?;
        if let Some((indexer, own)) = &choice {
            if own[layer] {
                let rotates = attention.kinds[layer].rotates;
                let rotation = rotates.then_some(IndexRotation { rope: attention.rotation, first: 0 });
                let norm = format!("{base}.self_attn.indexer.q_input_norm");
                if !r.is_outline() {
                    r.require_bias(&norm)?;
                }
                let q = r.layer_norm(h, &norm, INDEX_EPS)?;
                chosen = Some(Indexer { rotation, ..*indexer }.choose(r, layer, [h, q])?);
            }
            if chosen.is_none() {
                return Err(config.unsupported("indexer_types", "full before the first shared"));
            }
        }
        let out = attention.mix(r, layer, h, chosen)?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let h = r.rms_norm(x, &format!("{base}.post_attention_layernorm"), 1, eps)?;
        let out = if dense {
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &format!("{base}.mlp"), width, Activation::SwiGlu)?
        } else {
            let experts = expert_names(r, layer);
            let moe = Moe { route, router: "mlp.gate", correction_bias: None, experts, shared };
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    let cap = config.magnitude("final_logit_softcapping")?.unwrap_or(30.0);
    if cap == 0.0 {
        return Err(config.unsupported("final_logit_softcapping", "more than 0"));
    }
    blocks::capped_head(r, config, x, (table, eps), cap as f32)
}
