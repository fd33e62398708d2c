//! NVFP4 weights: codes [.., rows, cols / 2] (U8), `MODULE.weight_scale` [.., rows, cols / 16] (F8_E4M3), and a scale of the
//! matrix (F32).
//!
//! ModelOpt calls them `MODULE.weight` and `MODULE.weight_scale_2`, which multiplies; compressed-tensors
//! `MODULE.weight_packed` and `MODULE.weight_global_scale`, which divides.

use moeflux_compute::{DType, MatrixScale};

use super::{Checkpoint, Encoding, PACKED, StoredWeight, TensorEntry};
use crate::{Error, Result};

/// Columns that share a scale.
const BLOCK: usize = 16;

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    if entry.encoding != Encoding::Other("U8".into()) {
        return Ok(None);
    }
    let packed =
        entry.name.strip_suffix(PACKED).map(|module| (module, "weight_global_scale", MatrixScale::Divisor));
    let plain =
        || entry.name.strip_suffix(".weight").map(|module| (module, "weight_scale_2", MatrixScale::Factor));
    let Some((module, whole, matrix)) = packed.or_else(plain) else { return Ok(None) };
    let find = |part: &str| {
        let tensor = format!("{module}.{part}");
        let path = checkpoint.file_path(entry).to_owned();
        checkpoint.entry(&tensor).ok_or(Error::MissingTensor { path, tensor })
    };
    // Beside bytes without such scales lies something else.
    let Ok(scales) = find("weight_scale") else { return Ok(None) };
    if scales.encoding != Encoding::Other("F8_E4M3".into()) {
        return Ok(None);
    }
    let whole = find(whole)?;
    if whole.encoding != Encoding::Weight(DType::F32) {
        return Err(checkpoint.tensor_error(whole, "F32".into(), whole.encoding.to_string()));
    }
    let Some((outer, &[rows, bytes])) = entry.shape.split_last_chunk::<2>() else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "at least 2 dimensions".into(), got));
    };
    let cols = bytes.saturating_mul(2);
    let of_blocks: Vec<usize> = outer.iter().copied().chain([rows, cols / BLOCK]).collect();
    if !cols.is_multiple_of(BLOCK) || scales.shape != of_blocks {
        let expected = format!("shape {of_blocks:?} for {cols} columns in blocks of {BLOCK}");
        return Err(checkpoint.tensor_error(scales, expected, format!("shape {:?}", scales.shape)));
    }
    let one_each = whole.shape.strip_prefix(outer).is_some_and(|rest| rest.iter().all(|n| *n == 1));
    if !one_each {
        let expected = format!("one scale for each of {outer:?} matrices");
        return Err(checkpoint.tensor_error(whole, expected, format!("shape {:?}", whole.shape)));
    }
    Ok(Some(StoredWeight {
        name: format!("{module}.weight"),
        dtype: DType::NVFP4 { matrix },
        shape: outer.iter().copied().chain([rows, cols]).collect(),
        planes: vec![entry.range, scales.range, whole.range],
    }))
}
