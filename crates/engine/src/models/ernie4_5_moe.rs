//! ERNIE 4.5 21B-A3B and 300B-A47B. Rotation on interleaved pairs; softmax routing with a correction bias, always
//! normalised; shared experts; some layers dense.
//!
//! Source: transformers `modeling_ernie4_5_moe.py`; GGUF architecture `ernie4_5-moe`.

use moeflux_compute::graph::{RopeStyle, Route, Value};

use super::blocks::{self, AttentionKind, Decoder, Moe, QkNorm, SharedExpert};
use super::config::{Config, DefaultValue, KeyDefaults};
use super::names::{NameMap, Names};
use super::recorder::{ExpertNames, Recorder};
use super::{Family, SILU};
use crate::Result;
use crate::checkpoint::Format;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "ERNIE 4.5 MoE",
    model_types: &["ernie4_5_moe"],
    gguf_architectures: &["ernie4_5-moe"],
    hidden_act: SILU,
    names: &Names {
        gguf_keys: &[GGUF_KEYS],
        other_keys: &[("num_experts", "moe_num_experts"), ("num_experts_per_tok", "moe_k")],
        ..Names::COMMON
    },
    record,
};

/// Keys of GGUF files.
const GGUF_KEYS: NameMap = &[
    ("moe_num_shared_experts", "expert_shared_count"),
    ("moe_layer_start_index", "leading_dense_block_count"),
    ("moe_layer_interval", "interleave_moe_layer_step"),
];

/// What configurations need not say.
const DEFAULTS: &KeyDefaults = &[
    ("num_attention_heads", DefaultValue::Count(20)),
    ("num_key_value_heads", DefaultValue::Count(4)),
    ("num_experts", DefaultValue::Count(64)),
    ("intermediate_size", DefaultValue::Count(12288)),
    ("moe_intermediate_size", DefaultValue::Count(1536)),
    ("tie_word_embeddings", DefaultValue::Flag(true)),
    ("max_position_embeddings", DefaultValue::Count(131_072)),
];

/// Experts of a layer, and how many of them a token goes through; `top_k` is the family's default.
///
/// # Errors
/// [`crate::Error::Config`] for numbers that are none, or a least sum of weights that counts.
pub(super) fn expert_counts(config: &Config<'_>, top_k: Option<usize>) -> Result<(usize, usize)> {
    let (experts, top_k) = blocks::expert_counts(config, top_k)?;
    // The least that weights are divided by: what the best of all experts always reach.
    let reached = top_k as f64 / experts as f64;
    if config.magnitude("moe_norm_min")?.is_some_and(|least| least >= reached) {
        return Err(config.unsupported("moe_norm_min", &format!("below {reached}")));
    }
    Ok((experts, top_k))
}

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let config = &config.with_defaults(DEFAULTS);
    let d = Decoder::new(config, 1e-5)?;
    let rope = blocks::rotation(r, config, d.head_dim, RopeStyle::Interleaved, 5e5)?;
    let kind = AttentionKind { qk_norm: QkNorm::None, clip_qkv: None, window: None, rope };
    let (experts, top_k) = expert_counts(config, Some(6))?;
    let gguf = config.format() == Format::Gguf;
    let of_layers = |name: &str| -> Vec<String> {
        (0..d.layers).map(|layer| format!("model.layers.{layer}.mlp.{name}")).collect()
    };
    // transformers 5 keeps it in the router.
    let modules = of_layers("gate.moe_statics");
    let in_router = !gguf && modules.iter().any(|module| r.has_correction_bias(module));
    let mut shared = blocks::shared_experts(config, "moe_num_shared_experts", 2)?;
    // An outline has what the configuration says.
    let by_tensors = gguf && !r.is_outline();
    if by_tensors {
        // What llama.cpp's converter writes is another number.
        let projections = ["shared_experts.gate_proj", "shared_experts.up_proj"];
        let modules: Vec<String> = projections.into_iter().flat_map(of_layers).collect();
        let rows = modules.iter().find_map(|module| r.rows(module).transpose()).transpose()?;
        shared = rows.map(|width| SharedExpert { module: "mlp.shared_experts", width, gate: None });
    }
    let moe = Moe {
        route: Route::softmax(experts, top_k, true),
        router: "mlp.gate",
        correction_bias: Some(if in_router { "mlp.gate.moe_statics" } else { "mlp.moe_statics" }),
        experts: ExpertNames { module: "mlp.experts", projections: ["gate_proj", "up_proj", "down_proj"] },
        shared,
    };
    let first = config.count("moe_layer_start_index")?.unwrap_or(1);
    let last = match config.number("moe_layer_end_index")? {
        None | Some(-1.0) => d.layers,
        Some(n) if n >= 0.0 && n.fract() == 0.0 => n as usize,
        Some(_) => return Err(config.unsupported("moe_layer_end_index", "a layer, or -1 for the last one")),
    };
    let step = config.optional_size("moe_layer_interval")?.unwrap_or(1);

    let (mut x, table) = blocks::embed(r, d.hidden_size)?;
    for layer in 0..d.layers {
        x = blocks::attention(r, &d, layer, x, &kind)?;
        // GGUF files do not say all of it.
        let routed = if by_tensors {
            r.has(&format!("model.layers.{layer}.mlp.gate"))
        } else {
            (first..=last).contains(&layer) && (layer + 1).is_multiple_of(step)
        };
        x = if routed {
            blocks::moe(r, &d, layer, x, &moe)?
        } else {
            blocks::dense_mlp(r, &d, layer, x, config.size("intermediate_size")?)?
        };
    }
    blocks::head(r, config, x, table, d.eps)
}
