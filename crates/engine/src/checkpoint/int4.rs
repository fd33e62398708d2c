//! INT4 weights that compressed-tensors packs (`pack-quantized`): `MODULE.weight_packed` [.., rows, cols / 8] (I32) and
//! `MODULE.weight_scale` [.., rows, groups] (F16 or BF16), symmetric.
//!
//! `MODULE.weight_shape` repeats the shape and is not needed. Zero points and a permutation of columns are refused.

use moeflux_compute::{DType, Half};

use super::{Checkpoint, Encoding, PACKED, StoredWeight, TensorEntry};
use crate::{Error, Result};

/// Codes of an element.
const CODES: usize = 8;

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let Some(module) = entry.name.strip_suffix(PACKED) else { return Ok(None) };
    if entry.encoding != Encoding::Other("I32".into()) {
        return Ok(None);
    }
    for (part, meaning) in [("weight_zero_point", "symmetric"), ("weight_g_idx", "in the order of columns")] {
        if let Some(part) = checkpoint.entry(&format!("{module}.{part}")) {
            let expected = format!("none: groups of 4 bits {meaning}");
            return Err(checkpoint.tensor_error(part, expected, "a tensor".into()));
        }
    }
    let tensor = format!("{module}.weight_scale");
    let Some(scales) = checkpoint.entry(&tensor) else {
        return Err(Error::MissingTensor { path: checkpoint.file_path(entry).to_owned(), tensor });
    };
    let scale = match scales.encoding {
        Encoding::Weight(DType::F16) => Half::F16,
        Encoding::Weight(DType::BF16) => Half::BF16,
        ref other => {
            return Err(checkpoint.tensor_error(scales, "F16 or BF16".into(), other.to_string()));
        }
    };
    let Some((outer, &[rows, words])) = entry.shape.split_last_chunk::<2>() else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "at least 2 dimensions".into(), got));
    };
    let cols = words.saturating_mul(CODES);
    let group = [32u8, 64, 128].into_iter().find(|group| {
        let of_groups = outer.iter().copied().chain([rows, cols / usize::from(*group)]);
        cols.is_multiple_of((*group).into()) && of_groups.eq(scales.shape.iter().copied())
    });
    let Some(group) = group else {
        let expected =
            format!("shape {outer:?} + [{rows}, {cols} / 32, 64 or 128], as 4 bits are {:?}", entry.shape);
        return Err(checkpoint.tensor_error(scales, expected, format!("shape {:?}", scales.shape)));
    };
    Ok(Some(StoredWeight {
        name: format!("{module}.weight"),
        dtype: DType::Int4 { group, scale },
        shape: outer.iter().copied().chain([rows, cols]).collect(),
        planes: vec![entry.range, scales.range],
    }))
}
