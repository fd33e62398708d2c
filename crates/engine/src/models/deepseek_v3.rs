//! DeepSeek-V3 and R1, Cogito-V2 671B, Kimi-K2. Multi-head latent attention; sigmoid routing with a correction bias
//! within the best groups of experts; shared experts; dense first layers.
//!
//! Source: transformers `modeling_deepseek_v3.py`; GGUF architecture `deepseek2`, which DeepSeek-V2 shares.

use moeflux_compute::graph::{GroupRank, RopeStyle, Route, Score, Value};

use super::blocks::{self, Decoder, Moe, draft};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::deepseek_v2;
use super::indexer::{IndexRotation, Indexer};
use super::latent::{self, Growth, Latent};
use super::names::Names;
use super::recorder::{ExpertNames, Recorder};
use super::rope;
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "DeepSeek-V3, R1, Kimi-K2",
    model_types: &["deepseek_v3", "kimi_k2"],
    gguf_architectures: &["deepseek2"],
    hidden_act: SILU,
    names: &Names { gguf_tensors: &[latent::GGUF_TENSORS], gguf_keys: &[latent::GGUF_KEYS], ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(128)),
    ("num_experts", DefaultValue::Count(256)),
    ("intermediate_size", DefaultValue::Count(18432)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("max_position_embeddings", DefaultValue::Count(4096)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
];

/// GGUF's number for sigmoid scores; softmax when absent.
const GGUF_SIGMOID: usize = 2;

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let gguf = config.format() == Format::Gguf;
    if gguf && !is_sigmoid(config, r)? {
        return deepseek_v2::record(config, r);
    }
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if config.word(key)?.is_some_and(|word| word != only) {
            return Err(config.unsupported(key, only));
        }
    }
    // GGUF files leave out what their converter found absent or false.
    let default = |hf: f64, absent: f64| if gguf { absent } else { hf };
    let (experts, top_k) = blocks::expert_counts(config, Some(8))?;
    let route = Route {
        score: Score::Sigmoid,
        groups: blocks::groups(config, GroupRank::BestTwo, if gguf { (1, 1) } else { (8, 4) })?,
        scale: config.magnitude("routed_scaling_factor")?.unwrap_or(default(2.5, 1.0)) as f32,
        ..Route::softmax(experts, top_k, config.flag("norm_topk_prob", !gguf)?)
    };
    let style = rope_style(config)?;
    let defaults = Defaults {
        eps: 1e-6,
        dense_layers: default(3.0, 0.0) as usize,
        shared_experts: 1,
        style,
        growth: Growth::OfGguf,
    };
    decoder(config, r, route, &defaults)
}

/// Whether a GGUF file's router has sigmoid scores: as it says, else if it has a correction bias, which DeepSeek-V2 has
/// not.
fn is_sigmoid(config: &Config<'_>, r: &Recorder) -> Result<bool> {
    Ok(match config.count("expert_gating_func")? {
        Some(function) => function == GGUF_SIGMOID,
        None => (0..blocks::layers(config)?)
            .any(|layer| r.has_correction_bias(&format!("model.layers.{layer}.mlp.gate"))),
    })
}

/// Which channels form a pair, as `rope_interleave` says.
pub(super) fn rope_style(config: &Config<'_>) -> Result<RopeStyle> {
    Ok(if config.flag("rope_interleave", true)? { RopeStyle::Interleaved } else { RopeStyle::HalfSplit })
}

/// What families of this kind have in common but default differently.
pub(super) struct Defaults {
    /// Epsilon of the norms of hidden states.
    pub(super) eps: f64,
    /// Dense first layers.
    pub(super) dense_layers: usize,
    /// Shared experts.
    pub(super) shared_experts: usize,
    /// Which channels form a pair.
    pub(super) style: RopeStyle,
    /// What says how queries grow with their position.
    pub(super) growth: Growth,
}

/// What says which tokens each layer's queries see.
pub(super) struct Choice {
    pub(super) indexer: Indexer,
    /// Which channels of the index form a pair.
    pub(super) style: RopeStyle,
    /// For each layer whether it has an indexer; the others see what the last one before them chose.
    pub(super) own: Vec<bool>,
}

/// The whole model, with routing as `route` says.
pub(super) fn decoder(
    config: &Config<'_>,
    r: &mut Recorder,
    route: Route,
    defaults: &Defaults,
) -> Result<Value> {
    decoder_over(config, r, route, defaults, None)
}

/// As [`decoder`], over the tokens of a choice, if there is one.
pub(super) fn decoder_over(
    config: &Config<'_>,
    r: &mut Recorder,
    route: Route,
    defaults: &Defaults,
    mut choice: Option<Choice>,
) -> Result<Value> {
    let heads = config.size("num_attention_heads")?;
    let latent = Latent::new(config, r, heads, defaults.style)?;
    if let Some(Choice { indexer, style, .. }) = &mut choice {
        let rope = config.size("qk_rope_head_dim")?;
        if indexer.index.head_dim < rope {
            return Err(config.unsupported("index_head_dim", &format!("at least {rope} channels")));
        }
        let rope = r.graph.rotation(rope::rotation(config, rope, *style, 1e4)?);
        indexer.rotation = Some(IndexRotation { rope, first: 0 });
    }
    let latent = latent.growing(config, defaults.growth)?;
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(defaults.eps) as f32,
    };
    let dense = blocks::dense_layers(config, d.layers, defaults.dense_layers)?;
    let step = config.optional_size("moe_layer_freq")?.unwrap_or(1);
    let moe = Moe {
        route,
        router: "mlp.gate",
        correction_bias: (route.score == Score::Sigmoid).then_some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", defaults.shared_experts)?,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    let mut chosen = None;
    for (layer, dense) in dense.into_iter().enumerate() {
        x = latent::attention_over(r, &d, layer, x, &latent, |r, inputs| match &choice {
            Some(Choice { indexer, own, .. }) => {
                if own[layer] {
                    chosen = Some(indexer.choose(r, layer, inputs)?);
                }
                let shared = || config.unsupported("indexer_types", "full before the first shared");
                chosen.map(Some).ok_or_else(shared)
            }
            None => Ok(None),
        })?;
        // transformers does not read moe_layer_freq: where a layer has a router, it is used.
        let router = format!("model.layers.{layer}.mlp.gate");
        let dense = dense || layer % step != 0 && !r.has(&router);
        x = feed_forward(config, r, &d, (layer, x), (!dense).then_some(&moe))?;
    }
    let logits = blocks::head(r, config, x, table, d.eps)?;
    if choice.is_none() {
        r.draft(d.layers, |r, layer| {
            let latent = Latent::new(config, r, heads, defaults.style)?.growing(config, defaults.growth)?;
            let (x, table) = draft::input(r, &d, layer)?;
            let x = latent::attention_over(r, &d, layer, x, &latent, |_, _| Ok(None))?;
            let routed = r.has(&format!("model.layers.{layer}.mlp.gate"));
            let x = feed_forward(config, r, &d, (layer, x), routed.then_some(&moe))?;
            draft::head(r, config, &d, layer, x, table)
        })?;
    }
    Ok(logits)
}

/// Norm, the experts of `moe` or a dense MLP, residual.
fn feed_forward(
    config: &Config<'_>,
    r: &mut Recorder,
    d: &Decoder,
    (layer, x): (usize, Value),
    moe: Option<&Moe>,
) -> Result<Value> {
    let Some(moe) = moe else {
        return blocks::dense_mlp(r, d, layer, x, config.size("intermediate_size")?);
    };
    // Converters leave the bias out where the model has none.
    let router = format!("model.layers.{layer}.mlp.gate");
    let unbiased = config.format() == Format::Gguf && !r.has_correction_bias(&router);
    let correction_bias = moe.correction_bias.filter(|_| !unbiased);
    blocks::moe(r, d, layer, x, &Moe { correction_bias, ..*moe })
}
