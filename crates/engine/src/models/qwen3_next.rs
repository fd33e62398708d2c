//! Qwen3-Next (80B-A3B): three layers of linear attention to one of gated full attention, 512 experts.
//!
//! Source: transformers `modeling_qwen3_next.py`; GGUF architecture `qwen3next`, whose converter takes the projections
//! apart but keeps the order of value heads.

use moeflux_compute::graph::{HeadPairing, Value};

use super::Family;
use super::blocks::hybrid::{self, Hybrid};
use super::config::Config;
use super::recorder::Recorder;
use crate::Result;

/// Registry entry.
pub(super) const FAMILY: Family =
    Family { name: "Qwen3-Next", model_types: &["qwen3_next"], gguf_architectures: &["qwen3next"], record };

fn record(config: &Config<'_>, r: &mut Recorder) -> Result<Value> {
    let renormalize = config.flag("norm_topk_prob", true)?;
    hybrid::decoder(config, r, &Hybrid { gguf_pairing: HeadPairing::Grouped, renormalize })
}
