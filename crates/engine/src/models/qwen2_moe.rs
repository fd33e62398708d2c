//! Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B. Biases on q, k and v; softmax routing, by default without normalisation of the
//! chosen weights; a shared expert scaled by a sigmoid gate; some layers may be dense.
//!
//! Source: transformers `modeling_qwen2_moe.py`; GGUF architecture `qwen2moe`. Not supported: sliding windows, which no
//! published checkpoint uses.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::Family;
use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::Config;
use super::recorder::{ExpertNames, Recorder};
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen1.5-MoE, Qwen2-MoE",
    model_types: &["qwen2_moe"],
    gguf_architectures: &["qwen2moe"],
    record,
};

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let d = Decoder::new(config, 1e-6)?;
    if config.flag("use_sliding_window", false)? {
        return Err(config.unsupported("use_sliding_window", "false"));
    }
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::HalfSplit, 1e4)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let (experts, top_k) = blocks::expert_counts(config, None)?;
    let moe = Moe {
        route: Route::softmax(experts, top_k, config.flag("norm_topk_prob", false)?),
        router: "mlp.gate",
        correction_bias: None,
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared: Some(SharedExpert {
            module: "mlp.shared_expert",
            width: config.optional_size("shared_expert_intermediate_size")?.unwrap_or(5632),
            gate: Some("mlp.shared_expert_gate"),
        }),
    };
    let dense = config.sizes("mlp_only_layers")?;
    let step = config.optional_size("decoder_sparse_step")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        x = if dense.contains(&layer) || !(layer + 1).is_multiple_of(step) {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        } else {
            blocks::moe(r, &d, layer, x, &moe)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
