//! The text of all kernels, by unit.
//!
//! A unit is a file of kernels; executors compile it as one module. Kernel names are unique over all units.

/// Files that units include, by the name they are included with.
const HEADERS: &[(&str, &str)] = &[
    ("activate.h", include_str!("activate.h")),
    ("activations.h", include_str!("activations.h")),
    ("cache.h", include_str!("cache.h")),
    ("cached8.h", include_str!("cached8.h")),
    ("codebooks.h", include_str!("codebooks.h")),
    ("columns8.h", include_str!("columns8.h")),
    ("encodings.h", include_str!("encodings.h")),
    ("experts.h", include_str!("experts.h")),
    ("fetch.h", include_str!("fetch.h")),
    ("few_rows.h", include_str!("few_rows.h")),
    ("handed.h", include_str!("handed.h")),
    ("heads.h", include_str!("heads.h")),
    ("dialect.h", include_str!("dialect.h")),
    ("metal/dialect.h", include_str!("metal/dialect.h")),
    ("pieces.h", include_str!("pieces.h")),
    ("placing.h", include_str!("placing.h")),
    ("quantize.h", include_str!("quantize.h")),
    ("routing.h", include_str!("routing.h")),
    ("row_dots.h", include_str!("row_dots.h")),
    ("quads.h", include_str!("quads.h")),
    ("scores.h", include_str!("scores.h")),
    ("seen.h", include_str!("seen.h")),
    ("sequences.h", include_str!("sequences.h")),
    ("ssm.h", include_str!("ssm.h")),
    ("state_columns.h", include_str!("state_columns.h")),
    ("tiles.h", include_str!("tiles.h")),
    ("weights.h", include_str!("weights.h")),
];

/// Declares the units: the files of kernels in this folder.
macro_rules! units {
    ($($name:literal),* $(,)?) => {
        /// Name and text of every unit.
        const UNITS: &[(&str, &str)] = &[$(($name, include_str!(concat!($name, ".h")))),*];
    };
}

units![
    "angles",
    "attention",
    "batch",
    "compressed",
    "decode",
    "delta_rule",
    "divided",
    "draw",
    "elementwise",
    "encoder",
    "few_experts",
    "few_rows",
    "floats",
    "foresight",
    "kept_rows",
    "latent",
    "linear",
    "low_rank",
    "moe",
    "ngrams",
    "recurrent",
    "rms_norm",
    "route",
    "rows",
    "selective_scan",
    "share",
    "ssm_scan",
    "streams",
    "tiers"
];

/// Units that only CUDA has, and whose kernels wait for the dispatch before them by themselves, as the common ones do: attention
/// of decoding on tensor cores, and products whose weights are copied ahead.
pub(super) const TENSOR_DECODE_UNIT: &str = "cuda/tensor_decode";
/// See [`TENSOR_DECODE_UNIT`].
pub(super) const EARLY_UNIT: &str = "cuda/early";
/// Products of several rows that read a weight once: linear layers, and experts' down projections.
pub(super) const JOINT_ROWS_UNIT: &str = "cuda/joint_rows";
/// See [`JOINT_ROWS_UNIT`].
pub(super) const JOINT_EXPERTS_UNIT: &str = "cuda/joint_experts";

/// Products on matrix units of bytes, which CUDA and the emulator have: compiled for CUDA once for each encoding.
pub(super) const BATCHED_UNIT: &str = "cuda/batched";

/// Products with resident weights on tensor cores, which go straight into registers: compiled once for each encoding.
pub(super) const PRODUCTS_UNIT: &str = "cuda/products";
/// The same of experts: compiled once for each encoding.
pub(super) const PANELS_UNIT: &str = "cuda/panels";
/// Products of experts, whose weights pass through shared memory: compiled once for each encoding.
pub(super) const EXPERT_PANELS_UNIT: &str = "cuda/expert_panels";
/// Activations as panels take them.
pub(super) const BLOCKS_UNIT: &str = "cuda/blocks";
/// The same with pairs sorted by expert.
pub(super) const ENTER_EXPERTS_UNIT: &str = "cuda/enter_experts";

/// Waiting for other GPUs.
pub(super) const MEET_UNIT: &str = "cuda/meet";

/// Units that only Metal has.
const METAL_UNITS: &[(&str, &str)] = &[("metal/gemm", include_str!("metal/gemm.h"))];

/// Names of all units, those that only Metal has last.
pub fn units() -> impl Iterator<Item = &'static str> {
    UNITS.iter().chain(METAL_UNITS).map(|(name, _)| *name)
}

/// The text of a unit as one file: what it includes with quotes is put in place, each file once. Other includes are
/// left to the compiler.
///
/// # Panics
/// If there is no such unit.
pub fn source(unit: &str) -> String {
    let mut all = UNITS.iter().chain(METAL_UNITS);
    let text = all.find(|(name, _)| *name == unit).expect("a unit of UNITS or METAL_UNITS").1;
    let mut out = String::new();
    append(text, &mut vec![], &mut out);
    out
}

fn append(text: &str, seen: &mut Vec<String>, out: &mut String) {
    for line in text.lines() {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match included.and_then(|name| HEADERS.iter().find(|(header, _)| *header == name)) {
            Some((name, _)) if seen.iter().any(|s| s == name) => {}
            Some((name, text)) => {
                seen.push((*name).into());
                append(text, seen, out);
            }
            None if line == "#pragma once" => {}
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
}
