//! A.X-K2. DeepSeek-V3.2's sparse latent attention, with queries and gates from one layer; norms before attention and experts are
//! gated by what they give.
//!
//! Source: transformers `modeling_axk2.py`; llama.cpp and mlx-lm do not have it. Contexts of no more tokens than the indexer
//! chooses are recorded without it.

use moeflux_compute::graph::{Activation, GroupRank, Groups, Precision, RopeStyle, Route, Value};

use super::blocks::{self, Moe};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::indexer::{IndexRotation, Indexer};
use super::latent::{self, Latent, More};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "A.X-K2",
    model_types: &["axk2"],
    gguf_architectures: &[],
    hidden_act: SILU,
    names: &Names { other_tensors: OTHER_TENSORS, ..Names::COMMON },
    record,
};

/// Names of published checkpoints.
const OTHER_TENSORS: NameMap = &[
    ("self_attn.q_gate_proj", "self_attn.q_b_proj"),
    ("input_layernorm.mlp.fc1", "input_layernorm.W_down"),
    ("input_layernorm.mlp.fc2", "input_layernorm.W_up"),
    ("post_attention_layernorm.mlp.fc1", "post_attention_layernorm.W_down"),
    ("post_attention_layernorm.mlp.fc2", "post_attention_layernorm.W_up"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("hidden_size", DefaultValue::Count(2048)),
    ("intermediate_size", DefaultValue::Count(5120)),
    ("moe_intermediate_size", DefaultValue::Count(512)),
    ("num_hidden_layers", DefaultValue::Count(48)),
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(128)),
    ("num_experts_per_tok", DefaultValue::Count(8)),
    ("routed_scaling_factor", DefaultValue::Number(2.5)),
    ("kv_lora_rank", DefaultValue::Count(128)),
    ("q_lora_rank", DefaultValue::Count(384)),
    ("qk_nope_head_dim", DefaultValue::Count(64)),
    ("qk_rope_head_dim", DefaultValue::Count(32)),
    ("v_head_dim", DefaultValue::Count(64)),
    ("index_topk", DefaultValue::Count(2048)),
    ("gated_norm_rank", DefaultValue::Count(16)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// Epsilon of the norm of the index's keys.
const KEY_EPS: f32 = 1e-6;

/// For each layer whether its feed-forward is dense.
fn dense_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let mut dense = blocks::dense_layers(config, layers, 1)?;
    if config.words("mlp_layer_types")?.is_none() {
        let step = config.optional_size("moe_layer_freq")?.unwrap_or(1);
        dense.iter_mut().enumerate().for_each(|(layer, dense)| *dense |= !layer.is_multiple_of(step));
    }
    Ok(dense)
}

/// What chooses tokens; nothing where contexts have no more than all queries see.
fn indexer(config: &Config<'_>, r: &mut Recorder) -> Result<Option<Indexer>> {
    let key = "index_topk";
    let seen = config.size(key)?;
    if config.context().is_some_and(|positions| positions <= seen) {
        blocks::limit_positions(r, config, key)?;
        return Ok(None);
    }
    let rope = config.size("qk_rope_head_dim")?;
    let indexer = Indexer::new(config, 16, KEY_EPS)?;
    if indexer.index.head_dim < rope {
        return Err(config.unsupported("index_head_dim", &format!("at least {rope} channels")));
    }
    let rope = r.graph.rotation(rope::rotation(config, rope, RopeStyle::HalfSplit, 1e4)?);
    Ok(Some(Indexer { rotation: Some(IndexRotation { rope, first: 0 }), ..indexer }))
}

/// The norm `module` of x, times the sigmoid of two layers of it with `rank` channels between them.
fn gated_norm(r: &mut Recorder, x: Value, module: &str, rank: usize, eps: f32) -> Result<Value> {
    let h = r.rms_norm(x, &format!("{module}.norm"), 1, eps)?;
    let low = r.linear(h, &format!("{module}.mlp.fc1"), rank, Precision::F32)?;
    let low = r.graph.scaled_silu(low, 1.0);
    let gate = r.linear(low, &format!("{module}.mlp.fc2"), x.width(), Precision::F32)?;
    Ok(r.graph.sigmoid_gate(h, gate)?)
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let (hidden_size, layers) = (config.size("hidden_size")?, blocks::layers(config)?);
    let eps = config.magnitude("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    let indexer = indexer(config, r)?;
    let latent = Latent::new(config, r, config.size("num_attention_heads")?, RopeStyle::Interleaved)?;
    let latent = latent.with(More { gated_queries: Some("q_gate_proj"), ..More::default() });
    let rank = config.size("gated_norm_rank")?;
    let route = blocks::sigmoid_route(config)?;
    let groups = route.groups.map(|groups| Groups { rank: GroupRank::BestTwoElseZero, ..groups });
    let moe = Moe {
        route: Route { groups, ..route },
        router: "mlp.gate",
        correction_bias: Some("mlp.gate"),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: blocks::shared_experts(config, "n_shared_experts", 1)?,
    };

    let (mut x, table) = blocks::embed(r, hidden_size)?;
    for (layer, dense) in dense_layers(config, layers)?.into_iter().enumerate() {
        let name = |norm: &str| format!("model.layers.{layer}.{norm}");
        r.graph.scope(format!("layers.{layer}.self_attn"));
        let h = gated_norm(r, x, &name("input_layernorm"), rank, eps)?;
        let out = latent::attention_of(r, layer, h, &latent, |r, inputs| match &indexer {
            Some(indexer) => Ok(Some(indexer.choose(r, layer, inputs)?)),
            None => Ok(None),
        })?;
        x = r.graph.add(x, out)?;
        r.graph.scope(format!("layers.{layer}.mlp"));
        let module = name("post_attention_layernorm");
        let out = if dense {
            let h = r.rms_norm(x, &module, 1, eps)?;
            let width = config.size("intermediate_size")?;
            blocks::mlp(r, h, &name("mlp"), width, Activation::SwiGlu)?
        } else {
            let h = gated_norm(r, x, &module, rank, eps)?;
            blocks::moe_of(r, layer, h, &moe)?
        };
        x = r.graph.add(x, out)?;
    }
    blocks::head(r, config, x, table, eps)
}
