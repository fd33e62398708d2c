//! FP8 in safetensors folders as DeepSeek-V3 is published: `NAME` (F8_E4M3) and `NAME_scale_inv`, which despite its
//! name multiplies, with one scale for each block of 128 × 128 weights.

use moeflux_compute::dtype::FP8_BLOCK;
use moeflux_compute::{BlockScale, DType};
use serde_json::json;

use super::{Checkpoint, Encoding, StoredWeight, TensorEntry};
use crate::{Error, Result};

/// The weight whose codes are `entry`; `None` if `entry` is not FP8.
pub(super) fn block_scaled(checkpoint: &Checkpoint, entry: &TensorEntry) -> Result<Option<StoredWeight>> {
    if entry.encoding != Encoding::Other("F8_E4M3".into()) {
        return Ok(None);
    }
    let name = format!("{}_scale_inv", entry.name);
    let Some(scales) = checkpoint.entry(&name) else {
        let path = checkpoint.file_path(entry).to_owned();
        return Err(Error::MissingTensor { path, tensor: name });
    };
    let block = &checkpoint.config()["quantization_config"]["weight_block_size"];
    if !block.is_null() && *block != json!([FP8_BLOCK, FP8_BLOCK]) {
        return Err(Error::Config {
            path: checkpoint.config_path(),
            key: "quantization_config.weight_block_size".into(),
            expected: format!("[{FP8_BLOCK}, {FP8_BLOCK}]"),
            got: block.to_string(),
        });
    }
    let scale = match scales.encoding {
        Encoding::Weight(DType::F32) => BlockScale::F32,
        Encoding::Weight(DType::BF16) => BlockScale::BF16,
        ref other => {
            return Err(checkpoint.tensor_error(scales, "F32 or BF16".into(), other.to_string()));
        }
    };
    let Some((outer, &[rows, cols])) = entry.shape.split_last_chunk::<2>().filter(|(_, last)| last[0] > 0)
    else {
        let got = format!("shape {:?}", entry.shape);
        return Err(checkpoint.tensor_error(entry, "a matrix, as it has scales of blocks".into(), got));
    };
    let blocks = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
    let expected: Vec<usize> = outer.iter().copied().chain(blocks).collect();
    if scales.shape != expected {
        let (expected, got) = (format!("shape {expected:?}"), format!("shape {:?}", scales.shape));
        return Err(checkpoint.tensor_error(scales, expected, got));
    }
    let (name, shape) = (entry.name.clone(), entry.shape.clone());
    let planes = vec![entry.range, scales.range];
    Ok(Some(StoredWeight { name, dtype: DType::Fp8 { scale }, shape, planes }))
}
