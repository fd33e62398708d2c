//! LongCat-Flash. A layer has latent attention and a dense MLP twice over; experts take what the first MLP takes, and their result
//! is added at the layer's end. Some of the experts that a router chooses from return what they take.
//!
//! Source: transformers `modeling_longcat_flash.py`, mlx-lm `longcat_flash.py`; llama.cpp does not have it. The layer that drafts
//! tokens is left out.

use moeflux_compute::graph::{Activation, ExpertMlp, Precision, RopeStyle, Route, Value};

use super::blocks::{self, Decoder};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::latent::{self, Latent};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "LongCat-Flash",
    model_types: &["longcat_flash"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names {
        // transformers counts attentions under the other name.
        first_keys: &[("num_hidden_layers", "num_layers")],
        other_keys: OTHER_KEYS,
        ..Names::COMMON
    },
    record,
};

/// Keys of configurations.
const OTHER_KEYS: NameMap = &[
    ("num_experts_per_tok", "moe_topk"),
    ("intermediate_size", "ffn_hidden_size"),
    ("moe_intermediate_size", "expert_ffn_hidden_size"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(6144)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("moe_intermediate_size", DefaultValue::Count(2048)),
    ("num_attention_heads", DefaultValue::Count(64)),
    ("num_experts", DefaultValue::Count(512)),
    ("num_experts_per_tok", DefaultValue::Count(12)),
    ("zero_expert_num", DefaultValue::Count(256)),
    ("routed_scaling_factor", DefaultValue::Number(6.0)),
    ("q_lora_rank", DefaultValue::Count(1536)),
    ("kv_lora_rank", DefaultValue::Count(512)),
    ("qk_nope_head_dim", DefaultValue::Count(128)),
    ("qk_rope_head_dim", DefaultValue::Count(64)),
    ("v_head_dim", DefaultValue::Count(128)),
    ("rope_theta", DefaultValue::Number(1e7)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

const EXPERTS: ExpertNames =
    ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] };

/// Experts of a layer.
#[derive(Debug, Clone, Copy)]
struct Experts {
    route: Route,
    /// Those of the router's that return what they take.
    identities: usize,
}

impl Experts {
    fn new(config: &Config<'_>) -> Result<Self> {
        let experts = blocks::experts(config)?;
        let identities = config.count("zero_expert_num")?.unwrap_or(0);
        if config.word("zero_expert_type")?.is_some_and(|kind| kind != "identity") {
            return Err(config.unsupported("zero_expert_type", "identity"));
        }
        // transformers does not read these; mlx-lm reads both.
        let renormalize = config.flag("norm_topk_prob", false)?;
        if renormalize && config.format() == Format::HuggingFace {
            return Err(config.unsupported("norm_topk_prob", "false"));
        }
        if config.flag("router_bias", false)? {
            return Err(config.unsupported("router_bias", "false"));
        }
        let all = blocks::check_experts(config, experts.saturating_add(identities), blocks::layers(config)?)?;
        let top_k = config.size("num_experts_per_tok")?;
        if top_k > all {
            return Err(config.unsupported("num_experts_per_tok", &format!("at most the {all} experts")));
        }
        let scale = config.magnitude("routed_scaling_factor")?.unwrap_or(1.0) as f32;
        Ok(Self { route: Route { scale, ..Route::softmax(all, top_k, renormalize) }, identities })
    }

    /// What those of `layer` make of normed h.
    fn mix(&self, r: &mut Recorder, layer: usize, h: Value) -> Result<Value> {
        let Self { route, identities } = *self;
        let module = |name: &str| format!("model.layers.{layer}.mlp.router{name}");
        let logits = r.linear(h, &module(".classifier"), route.experts, Precision::F32)?;
        let bias = r.correction_bias(&module(""), route.experts)?;
        let routing = r.graph.route(logits, Some(bias), route)?;
        let experts = r.experts(layer, route.experts - identities, h.width(), &EXPERTS)?;
        let mlp = ExpertMlp { identities, ..ExpertMlp::default() };
        Ok(r.graph.moe_experts_with(h, routing, experts, mlp)?)
    }
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let heads = config.size("num_attention_heads")?;
    let hidden_size = config.size("hidden_size")?;
    let d = Decoder {
        hidden_size,
        layers: blocks::layers(config)?,
        heads,
        kv_heads: heads,
        head_dim: config.size("qk_rope_head_dim")?,
        eps: config.magnitude("rms_norm_eps")?.unwrap_or(1e-5) as f32,
    };
    let grows = ["mla_scale_q_lora", "mla_scale_kv_lora"].map(|key| (key, config.flag(key, true)));
    let mut flags = [true; 2];
    for (flag, (key, grows)) in flags.iter_mut().zip(grows) {
        *flag = grows?;
        if !*flag && config.format() == Format::HuggingFace {
            return Err(config.unsupported(key, "true"));
        }
    }
    let latent = Latent::new(config, r, heads, RopeStyle::Interleaved)?.grown(hidden_size, flags);
    let experts = Experts::new(config)?;
    // transformers keeps gate and up of those, too.
    r.leave_out_experts(experts.identities);
    let width = config.size("intermediate_size")?;

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for layer in 0..d.layers {
        let mut of_experts = None;
        for half in 0..2 {
            let module = |name: &str| format!("model.layers.{layer}.{name}.{half}");
            r.graph.scope(format!("layers.{layer}.self_attn.{half}"));
            let h = r.rms_norm(x, &module("input_layernorm"), 1, d.eps)?;
            let out = latent::attention_in(r, &module("self_attn"), h, &latent, |_, _| Ok(None))?;
            x = r.graph.add(x, out)?;
            r.graph.scope(format!("layers.{layer}.mlps.{half}"));
            let h = r.rms_norm(x, &module("post_attention_layernorm"), 1, d.eps)?;
            if half == 0 {
                r.graph.scope(format!("layers.{layer}.mlp"));
                of_experts = Some(experts.mix(r, layer, h)?);
                r.graph.scope(format!("layers.{layer}.mlps.{half}"));
            }
            let out = blocks::mlp(r, h, &module("mlps"), width, Activation::SwiGlu)?;
            x = r.graph.add(x, out)?;
        }
        if let Some(out) = of_experts {
            x = r.graph.add(x, out)?;
        }
    }
    blocks::head(r, config, x, table, d.eps)
}
