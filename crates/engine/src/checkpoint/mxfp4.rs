//! MXFP4 weights in safetensors folders: codes in one tensor, scales (E8M0) in another.
//!
//! Hugging Face's gpt-oss has `NAME_blocks` [.., rows, blocks, 16] (u8) and `NAME_scales` [.., rows, blocks]; MLX has
//! `MODULE.weight` [.., rows, words] (u32) and `MODULE.scales` [.., rows, blocks]; DeepSeek-V4's experts are
//! `MODULE.weight` [rows, cols / 2] (i8) and `MODULE.scale` [rows, blocks]. The bytes are the same.

use moeflux_compute::DType;

use super::{Checkpoint, Encoding, StoredWeight, TensorEntry, fp8};
use crate::{Error, Result};

/// Columns that share a scale.
const BLOCK: usize = 32;

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let Encoding::Other(encoding) = &entry.encoding else { return Ok(None) };
    let missing = |tensor| Error::MissingTensor { path: checkpoint.file_path(entry).to_owned(), tensor };
    let find = |name: String| checkpoint.entry(&name).ok_or(name);
    // Elements of the last dimension that hold a block, and whether blocks are a dimension.
    let (stack, module) = (entry.name.strip_suffix("_blocks"), entry.name.strip_suffix(".weight"));
    let (scales, each, apart) = match (encoding.as_str(), stack, module) {
        ("U8", Some(name), _) => (find(format!("{name}_scales")).map_err(missing)?, BLOCK / 2, true),
        ("U32", _, Some(module)) => (find(format!("{module}.scales")).map_err(missing)?, BLOCK / 8, false),
        ("I8" | "U8" | "F4", _, Some(_)) => {
            let Ok(scales) = fp8::scales_of(checkpoint, &entry.name) else { return Ok(None) };
            (scales, if encoding == "F4" { BLOCK } else { BLOCK / 2 }, false)
        }
        _ => return Ok(None),
    };
    if !["U8", "F8_E8M0"].iter().any(|name| scales.encoding == Encoding::Other((*name).into())) {
        return Ok(None);
    }
    let (Some((&blocks, outer)), true) = (scales.shape.split_last(), scales.shape.len() >= 2) else {
        let got = format!("shape {:?}", scales.shape);
        return Err(checkpoint.tensor_error(scales, "at least 2 dimensions".into(), got));
    };
    let stored: Vec<usize> = if apart {
        scales.shape.iter().copied().chain([each]).collect()
    } else {
        outer.iter().copied().chain([blocks.saturating_mul(each)]).collect()
    };
    if entry.shape != stored {
        let expected = format!("shape {stored:?} for MXFP4 with scales {:?}", scales.shape);
        return Err(checkpoint.tensor_error(entry, expected, format!("shape {:?}", entry.shape)));
    }
    let mut shape = outer.to_vec();
    shape.push(blocks.saturating_mul(BLOCK));
    let planes = vec![entry.range, scales.range];
    Ok(Some(StoredWeight { name: entry.name.clone(), dtype: DType::MXFP4_Planes, shape, planes }))
}
