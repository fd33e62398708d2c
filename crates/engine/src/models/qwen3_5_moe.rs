//! Qwen3.5 and Qwen3.6 MoE (35B-A3B to 397B-A17B), and the text part of their multimodal checkpoints. As Qwen3-Next
//! with separate projections of linear attention; expert weights are always normalised.
//!
//! Multimodal rotary embedding gives text the positions of plain rotary embedding.
//!
//! Source: transformers `modeling_qwen3_5_moe.py`; GGUF architecture `qwen35moe`, whose converter puts value heads in
//! tiled order: head h uses key head h mod key_heads.

use moeflux_compute::graph::{HeadPairing, Value};

use super::Family;
use super::blocks::hybrid::{self, Hybrid};
use super::config::Config;
use super::recorder::Recorder;
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family = Family {
    name: "Qwen3.5 MoE, Qwen3.6 MoE",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf_architectures: &["qwen35moe"],
    record,
};

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    hybrid::decoder(config, r, &Hybrid { gguf_pairing: HeadPairing::Tiled, renormalize: true })
}
