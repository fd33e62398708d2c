//! MXFP4 weights in safetensors folders: codes in one tensor, scales (u8) in another.
//!
//! Hugging Face's gpt-oss has `NAME_blocks` [.., rows, blocks, 16] (u8) and `NAME_scales` [.., rows, blocks]; MLX has
//! `MODULE.weight` [.., rows, words] (u32) and `MODULE.scales` [.., rows, blocks]. The bytes are the same.

use moeflux_compute::DType;

use super::{Checkpoint, Encoding, StoredWeight, TensorEntry};
use crate::{Error, Result};

/// The weight whose codes are `entry`; `None` if `entry` is not such a part.
pub(super) fn weight(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    let (scales, element, block) = if let Some(name) = entry.name.strip_suffix("_blocks") {
        (format!("{name}_scales"), "U8", 16)
    } else if let Some(module) = entry.name.strip_suffix(".weight") {
        (format!("{module}.scales"), "U32", 4)
    } else {
        return Ok(None);
    };
    if entry.encoding != Encoding::Other(element.into()) {
        return Ok(None);
    }
    let Some(scales) = checkpoint.entry(&scales) else {
        let path = checkpoint.file_path(entry).to_owned();
        return Err(Error::MissingTensor { path, tensor: scales });
    };
    if scales.encoding != Encoding::Other("U8".into()) {
        return Ok(None);
    }
    let (Some((&blocks, outer)), true) = (scales.shape.split_last(), scales.shape.len() >= 2) else {
        let got = format!("shape {:?}", scales.shape);
        return Err(checkpoint.tensor_error(scales, "at least 2 dimensions".into(), got));
    };
    let stored: Vec<usize> = match element {
        "U8" => scales.shape.iter().copied().chain([block]).collect(),
        _ => outer.iter().copied().chain([blocks.saturating_mul(block)]).collect(),
    };
    if entry.shape != stored {
        let expected = format!("shape {stored:?} for MXFP4 with scales {:?}", scales.shape);
        return Err(checkpoint.tensor_error(entry, expected, format!("shape {:?}", entry.shape)));
    }
    let mut shape = outer.to_vec();
    shape.push(blocks.saturating_mul(32));
    let planes = vec![entry.range, scales.range];
    Ok(Some(StoredWeight { name: entry.name.clone(), dtype: DType::MXFP4_Planes, shape, planes }))
}
