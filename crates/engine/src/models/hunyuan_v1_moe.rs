//! Hunyuan-A13B. Queries and keys are normed per head once they are rotated; softmax routing, always normalised; a shared
//! expert in every layer.
//!
//! Source: transformers `modeling_hunyuan_v1_moe.py`, which scales the base of the rotation for a fixed `alpha`; GGUF
//! architecture `hunyuan-moe`, whose base is scaled already.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU, rope};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Hunyuan-A13B",
    model_types: &["hunyuan_v1_moe"],
    gguf_architectures: &["hunyuan-moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_tensors: &[GGUF_TENSORS],
        other_keys: &[("num_experts_per_tok", "moe_topk")],
        // Published configurations have a list for each layer, which transformers does not read.
        first_keys: &[("moe_intermediate_size", "intermediate_size")],
        other_tensors: &[
            ("self_attn.q_norm", "self_attn.query_layernorm"),
            ("self_attn.k_norm", "self_attn.key_layernorm"),
        ],
        ..Names::COMMON
    },
    record,
};

/// Modules of GGUF files.
const GGUF_TENSORS: NameMap = &[
    ("mlp.gate.wg", "ffn_gate_inp"),
    ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
    ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_experts", DefaultValue::Count(1)),
    ("num_experts_per_tok", DefaultValue::Count(1)),
    ("intermediate_size", DefaultValue::Count(11008)),
    ("max_position_embeddings", DefaultValue::Count(2048)),
];

/// Experts a token goes through in each layer: one number, or a list.
fn top_k(config: &Config<'_>, experts: usize, layers: usize) -> Result<Vec<usize>> {
    let key = "num_experts_per_tok";
    let listed = config.read(key, "", |value| Some(value.is_array()))?.unwrap_or(false);
    let counts = match config.per_layer(key, layers) {
        Ok(counts) if listed => counts.unwrap_or_default(),
        Err(error) if listed => return Err(error),
        _ => vec![config.size(key)?; layers],
    };
    if counts.iter().any(|count| !(1..=experts).contains(count)) {
        return Err(config.unsupported(key, &format!("from 1 to the {experts} experts")));
    }
    Ok(counts)
}

/// Adds the rotation to the graph; `alpha` stretches its base.
fn rotation(r: &mut Recorder, config: &Config<'_>, head_dim: usize) -> Result<usize> {
    let (style, theta) = (RopeStyle::HalfSplit, 1e4);
    let kind = config.word("rope_type")?.or(config.word("type")?);
    let alpha = config.magnitude("alpha")?.filter(|alpha| *alpha != 0.0);
    let Some(alpha) = alpha.filter(|_| kind.as_deref() == Some("dynamic")) else {
        return blocks::rotation(r, config, head_dim, style, theta);
    };
    if head_dim <= 2 {
        return Err(config.unsupported("head_dim", "more than 2 channels, for this kind of rope scaling"));
    }
    let theta = config.number("rope_theta")?.unwrap_or(theta);
    let stretched = theta * alpha.powf(head_dim as f64 / (head_dim - 2) as f64);
    Ok(r.graph.rotation(rope::plain(config, head_dim, style, stretched)?))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rope = rotation(r, config, d.head_dim)?;
    let kind = AttentionKind { qk_norm: QkNorm::PerHeadRotated, clip_qkv: None, window: None, rope };
    let experts = blocks::experts(config)?;
    let top_k = top_k(config, experts, d.layers)?;
    let width = match config.format() {
        Format::Gguf => config.optional_size("shared_expert_intermediate_size")?,
        _ => None,
    };
    let width = width.map_or_else(|| config.size("intermediate_size"), Ok)?;

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for (layer, top_k) in top_k.into_iter().take(d.layers).enumerate() {
        let moe = Moe {
            route: Route::softmax(experts, top_k, true),
            router: "mlp.gate.wg",
            correction_bias: None,
            experts: ExpertNames {
                module: "mlp.experts",
                projections: ["gate_proj", "up_proj", "down_proj"],
            },
            shared: Some(SharedExpert { module: "mlp.shared_mlp", width, gate: None }),
        };
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
