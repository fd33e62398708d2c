//! Mixtral 8x7B and 8x22B. Softmax routing whose chosen weights are always normalised.
//!
//! Source: transformers `modeling_mixtral.py`. GGUF architecture `llama` with experts; its converter permutes the
//! rows of q and k so that rotation works on interleaved pairs.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{Names, PAIRED};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Mixtral",
    model_types: &["mixtral"],
    gguf_architectures: &["llama"],
    hidden_act: SILU,
    names: &Names { gguf_orders: PAIRED, ..Names::COMMON },
    record,
};

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(32)),
    ("num_key_value_heads", DefaultValue::Count(8)),
    ("num_experts", DefaultValue::Count(8)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let (style, rotary_dim) = match config.format() {
        Format::Gguf => (RopeStyle::Interleaved, config.optional_size("rotary_dim")?.unwrap_or(d.head_dim)),
        _ => (RopeStyle::HalfSplit, d.head_dim),
    };
    let rope = blocks::rotation(r, config, rotary_dim, style, 1e6)?;
    let window = config.positions("sliding_window")?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window, rope };
    // The module's name on the hub; transformers 5 saves it as `mlp`.
    let hub = r.has("model.layers.0.block_sparse_moe.gate");
    let (experts, top_k) = blocks::expert_counts(config, Some(2))?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: if hub { "block_sparse_moe.gate" } else { "mlp.gate" },
        correction_bias: None,
        experts: ExpertNames {
            module: if hub { "block_sparse_moe.experts" } else { "mlp.experts" },
            projections: ["w1", "w3", "w2"],
        },
        shared: None,
    };

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = blocks::moe(r, &d, layer, x, &moe)?;
    }
    blocks::head(r, config, x, table, d.eps)
}
