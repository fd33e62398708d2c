//! DeepSeek-V3 and R1, Cogito-V2 671B, Kimi-K2. Multi-head latent attention; sigmoid routing with a correction bias
//! within the best groups of experts; shared experts; dense first layers.
//!
//! Source: transformers `modeling_deepseek_v3.py`; GGUF architecture `deepseek2`, which DeepSeek-V2 shares.

use moeflux_compute::graph::{GroupRank, RopeStyle, Route, Score, Value};

use super::Family;
use super::blocks::{self, Decoder, Moe, SharedExpert};
use super::config::Config;
use super::deepseek_v2;
use super::latent::{self, Latent};
use super::recorder::{ExpertNames, Recorder};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family =
    Family { model_types: &["deepseek_v3", "kimi_k2"], gguf_architectures: &["deepseek2"], record };

/// GGUF's number for sigmoid scores; softmax when absent.
const GGUF_SIGMOID: usize = 2;

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let gguf = config.format() == Format::Gguf;
    if gguf && config.count("expert_gating_func")? != Some(GGUF_SIGMOID) {
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
        experts,
        top_k,
        score: Score::Sigmoid,
        groups: blocks::groups(config, GroupRank::BestTwo, if gguf { (1, 1) } else { (8, 4) })?,
        renormalize: config.flag("norm_topk_prob", !gguf)?,
        scale: config.magnitude("routed_scaling_factor")?.unwrap_or(default(2.5, 1.0)) as f32,
    };
    let style = match config.flag("rope_interleave", true)? {
        true => RopeStyle::Interleaved,
        false => RopeStyle::HalfSplit,
    };
    let defaults = Defaults { dense_layers: default(3.0, 0.0) as usize, shared_experts: 1, style };
    decoder(config, r, route, &defaults)
}

/// What DeepSeek-V2 and V3 have in common but default differently.
pub(super) struct Defaults {
    /// Dense first layers.
    pub(super) dense_layers: usize,
    /// Shared experts.
    pub(super) shared_experts: usize,
    /// Which channels form a pair.
    pub(super) style: RopeStyle,
}

/// The whole model, with routing as `route` says.
pub(super) fn decoder(
    config: &Config<'_>,
    r: &mut Recorder,
    route: Route,
    defaults: &Defaults,
) -> Result<Value> {
    let heads = config.size("num_attention_heads")?;
    let latent = Latent::new(config, r, heads, defaults.style)?;
    let d = Decoder {
        hidden_size: config.size("hidden_size")?,
        layers: config.size("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32,
    };
    let dense_layers = config.count("first_k_dense_replace")?.unwrap_or(defaults.dense_layers);
    let step = config.optional_size("moe_layer_freq")?.unwrap_or(1);
    let shared = config.count("n_shared_experts")?.unwrap_or(defaults.shared_experts);
    let moe = Moe {
        route,
        router: "mlp.gate",
        correction_bias: (route.score == Score::Sigmoid).then_some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: match shared {
            0 => None,
            n => Some(SharedExpert {
                module: "mlp.shared_experts",
                width: n.saturating_mul(config.size("moe_intermediate_size")?),
                gate: None,
            }),
        },
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = latent::attention(r, &d, layer, x, &latent)?;
        // transformers does not read moe_layer_freq: where a layer has a router, it is used.
        let router = format!("model.layers.{layer}.mlp.gate");
        if layer < dense_layers || layer % step != 0 && !r.has(&router) {
            x = blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?;
            continue;
        }
        // Converters leave the bias out where the model has none.
        let unbiased = config.format() == Format::Gguf && !r.has_correction_bias(&router);
        let correction_bias = moe.correction_bias.filter(|_| !unbiased);
        x = blocks::moe(r, &d, layer, x, &Moe { correction_bias, ..moe })?;
    }
    blocks::head(r, config, x, table, d.eps)
}
