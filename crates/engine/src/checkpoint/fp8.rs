//! FP8 in safetensors folders: `NAME` (F8_E4M3) and its scales, which despite their usual name multiply.
//!
//! DeepSeek-V3 is published with `NAME_scale_inv`, one scale for each block of 128 × 128 weights; DeepSeek-V4 calls them
//! `MODULE.scale` and has powers of two (F8_E8M0). MiniMax-M3's MXFP8 has a power of two for each 32 weights of a row, as
//! bytes (U8) or F8_E8M0; MLX's the same as `MODULE.scales`, and four codes in a word. Other models have one scale for a whole matrix, for each matrix of a
//! stack, or, under `NAME_scale`, for all shards of a table, or, as compressed-tensors and ModelOpt write, for each row of a
//! matrix.

use moeflux_compute::dtype::FP8_BLOCK;
use moeflux_compute::{BlockScale, DType};
use serde_json::{Value, json};

use super::{Checkpoint, Encoding, StoredWeight, TensorEntry, quantization};
use crate::{Error, Result};

/// Columns that share a power of two in MXFP8.
const MX_BLOCK: usize = 32;

/// The name of the scales of the weight `name`, and of the one they would have if there are none.
pub(super) fn scales_of<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
) -> std::result::Result<&'a TensorEntry, String> {
    let usual = format!("{name}_scale_inv");
    let module = name.strip_suffix(".weight");
    let table = module.and_then(|module| module.rsplit_once(".shard_")).map(|(table, _)| table);
    let others = [
        module.map(|module| format!("{module}.scale")),
        Some(format!("{name}_scale")),
        table.map(|table| format!("{table}.weight_scale")),
    ];
    let mut names = std::iter::once(usual.clone()).chain(others.into_iter().flatten());
    names.find_map(|name| checkpoint.entry(&name)).ok_or(usual)
}

/// The weight whose codes are `entry`; `None` if `entry` is not FP8.
pub(super) fn scaled(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    if entry.encoding != Encoding::Other("F8_E4M3".into()) {
        return Ok(None);
    }
    let scales = scales_of(checkpoint, &entry.name).map_err(|tensor| {
        let path = checkpoint.file_path(entry).to_owned();
        Error::MissingTensor { path, tensor }
    })?;
    if let Some(weight) = mx(entry, scales) {
        return Ok(Some(weight));
    }
    let scale = match &scales.encoding {
        Encoding::Weight(DType::F32) => BlockScale::F32,
        Encoding::Weight(DType::BF16) => BlockScale::BF16,
        Encoding::Other(name) if name == "F8_E8M0" => BlockScale::E8M0,
        other => {
            let expected = "F32, BF16, F8_E8M0, or U8 for each 32 columns".to_owned();
            return Err(checkpoint.tensor_error(scales, expected, other.to_string()));
        }
    };
    let Some((outer, &[rows, cols])) = entry.shape.split_last_chunk::<2>().filter(|(_, last)| last[0] > 0)
    else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "a matrix, as it has scales of blocks".into(), got));
    };
    let blocks = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
    let of_blocks: Vec<usize> = outer.iter().copied().chain(blocks).collect();
    // A shape of ones may mean either.
    let said = weight_block_size(checkpoint)?;
    let may_be_whole = scales.name.ends_with("weight_scale") || said.is_null();
    let of_rows: Vec<usize> = outer.iter().copied().chain([rows]).collect();
    let is_of_rows = scales.shape == of_rows || scales.shape.strip_suffix(&[1]) == Some(&of_rows);
    let dtype = if may_be_whole && is_one_each(&scales.shape, outer) {
        DType::Fp8_Whole { scale }
    } else if scales.name.ends_with("weight_scale") && is_of_rows {
        DType::Fp8_Rows { scale }
    } else if scales.shape == of_blocks {
        check_blocks(checkpoint)?;
        DType::Fp8 { scale }
    } else {
        let expected = if said.is_null() {
            format!("shape {of_blocks:?}, one scale for each row, or for each of {outer:?} matrices")
        } else {
            format!("shape {of_blocks:?}")
        };
        return Err(checkpoint.tensor_error(scales, expected, format!("shape {:?}", scales.shape)));
    };
    let (name, shape) = (entry.name.clone(), entry.shape.clone());
    Ok(Some(StoredWeight { name, dtype, shape, planes: vec![entry.range, scales.range] }))
}

/// The weight of codes `entry` if `scales` are powers of two for each 32 columns.
fn mx(entry: &TensorEntry, scales: &TensorEntry) -> Option<StoredWeight> {
    let powers = ["U8", "F8_E8M0"].iter().any(|name| scales.encoding == Encoding::Other((*name).into()));
    let (cols, outer) = entry.shape.split_last()?;
    let of_rows: Vec<usize> = outer.iter().copied().chain([cols / MX_BLOCK]).collect();
    let fits = !outer.is_empty() && cols.is_multiple_of(MX_BLOCK) && scales.shape == of_rows;
    // Scales of blocks of 128 × 128 have the same shape if there is one row.
    (powers && fits).then(|| StoredWeight {
        name: entry.name.clone(),
        dtype: DType::MXFP8_Planes,
        shape: entry.shape.clone(),
        planes: vec![entry.range, scales.range],
    })
}

/// The MLX weight whose codes are `entry`, four to a word, and whose scales are `scales`.
///
/// # Errors
/// [`Error::Tensor`] if they do not fit each other.
pub(super) fn mx_words(
    checkpoint: &Checkpoint,
    entry: &TensorEntry,
    scales: &TensorEntry,
) -> Result<StoredWeight> {
    let mut codes = entry.clone();
    if let Some(words) = codes.shape.last_mut() {
        *words = words.saturating_mul(4);
    }
    let found = (entry.encoding == Encoding::Other("U32".into())).then(|| mx(&codes, scales)).flatten();
    found.ok_or_else(|| {
        let expected = format!("U32 with 8 words for each of the scales {:?}", scales.shape);
        checkpoint.tensor_error(entry, expected, format!("{} of shape {:?}", entry.encoding, entry.shape))
    })
}

/// Whether `scales` is the shape of one scale for each matrix of a stack of shape `outer`.
fn is_one_each(scales: &[usize], outer: &[usize]) -> bool {
    match scales.strip_prefix(outer) {
        Some(rest) => rest.iter().all(|n| *n == 1) && rest.len() <= 2,
        None => false,
    }
}

/// How large blocks are, if the configuration says so.
fn weight_block_size(checkpoint: &Checkpoint) -> Result<&Value> {
    let about = quantization::said(checkpoint.config());
    if about.is_null() || about.is_object() {
        Ok(&about["weight_block_size"])
    } else {
        Err(config_error(checkpoint, "quantization_config", "an object", about))
    }
}

/// That the configuration, if it says how large blocks are, says what is computed.
fn check_blocks(checkpoint: &Checkpoint) -> Result<()> {
    let block = weight_block_size(checkpoint)?;
    if block.is_null() || *block == json!([FP8_BLOCK, FP8_BLOCK]) {
        return Ok(());
    }
    let expected = format!("[{FP8_BLOCK}, {FP8_BLOCK}]");
    Err(config_error(checkpoint, "quantization_config.weight_block_size", &expected, block))
}

fn config_error(checkpoint: &Checkpoint, key: &str, expected: &str, got: &Value) -> Error {
    Error::Config {
        path: checkpoint.config_path(),
        key: key.into(),
        expected: expected.into(),
        got: got.to_string(),
    }
}
