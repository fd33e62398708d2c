//! Experts in fewer bits.

use moeflux_compute::quant::{dequantize_row, quantize};
use moeflux_compute::{DType, Half};

use crate::checkpoint::{Checkpoint, Format, StoredWeight};
use crate::{Error, Result};

/// Rows that are encoded at once: few, so that their values in f32 take little memory.
const ROWS: usize = 64;
/// Columns of an affine group where the checkpoint does not say it.
const GROUPS: [u8; 2] = [64, 32];

/// Bits that experts of a checkpoint of `format` can be brought down to.
pub(super) fn widths(format: Format) -> &'static [u8] {
    match format {
        Format::Gguf => &[4, 6, 8],
        Format::Mlx => &[2, 3, 4, 5, 6, 8],
        Format::HuggingFace => &[],
    }
}

/// The encoding of about `bits` bits that `weight`, a matrix, is to get; `None` if that would not make it smaller.
pub(super) fn encoding(weight: &StoredWeight, bits: u8, format: Format) -> Option<DType> {
    let (rows, cols) = (weight.rows(), weight.cols());
    // The second where rows are no whole blocks of the first.
    let candidates = match (format, bits) {
        (Format::Gguf, 4) => vec![DType::Q4_K, DType::Q4_0],
        (Format::Gguf, 6) => vec![DType::Q6_K, DType::Q8_0],
        (Format::Gguf, _) => vec![DType::Q8_0],
        _ => {
            let (own, scale) = match weight.dtype {
                DType::Affine { group, scale, .. } => (Some(group), scale),
                DType::F16 => (None, Half::F16),
                _ => (None, Half::BF16),
            };
            let groups = own.into_iter().chain(GROUPS);
            groups.map(|group| DType::Affine { bits, group, scale }).collect()
        }
    };
    let bytes = |dtype: DType| dtype.matrix_bytes(rows, cols).ok();
    let now = bytes(weight.dtype)?;
    let fits = candidates.into_iter().find_map(|dtype| Some((dtype, bytes(dtype)?)));
    fits.filter(|(_, bytes)| *bytes < now).map(|(dtype, _)| dtype)
}

/// The planes of `weight`, a matrix, in the encoding `to`.
///
/// # Errors
/// [`Error::Read`] if it cannot be read, [`Error::Tensor`] for values that `to` cannot hold.
pub(super) fn requantise(checkpoint: &Checkpoint, weight: &StoredWeight, to: DType) -> Result<Vec<Vec<u8>>> {
    let fault = |error: moeflux_compute::Error| Error::Tensor {
        path: checkpoint.path().into(),
        tensor: weight.name.clone(),
        expected: format!("values that {to} can hold"),
        got: error.to_string(),
    };
    let tensor = checkpoint.read_weight(weight)?;
    let (view, cols) = (tensor.view(), tensor.cols());
    let mut planes = vec![vec![]; to.planes()];
    let mut values = vec![0.0; ROWS.min(view.rows()) * cols];
    for first in (0..view.rows()).step_by(ROWS) {
        let rows = ROWS.min(view.rows() - first);
        let values = &mut values[..rows * cols];
        for (row, out) in (first..).zip(values.chunks_exact_mut(cols)) {
            dequantize_row(view, row, out).map_err(fault)?;
        }
        for (plane, more) in planes.iter_mut().zip(quantize(to, values, cols).map_err(fault)?) {
            plane.extend(more);
        }
    }
    Ok(planes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_get_smaller_or_stay() {
        let affine = |bits, group| DType::Affine { bits, group, scale: Half::F16 };
        let check = |format, dtype, cols, bits, expected: Option<DType>| {
            let weight = StoredWeight { name: "w".into(), dtype, shape: vec![8, cols], planes: vec![] };
            assert_eq!(encoding(&weight, bits, format), expected, "{dtype} of {cols} columns to {bits} bits");
        };
        check(Format::Gguf, DType::BF16, 512, 4, Some(DType::Q4_K));
        check(Format::Gguf, DType::Q6_K, 512, 4, Some(DType::Q4_K));
        check(Format::Gguf, DType::Q8_0, 1408, 4, Some(DType::Q4_0));
        check(Format::Gguf, DType::F16, 512, 8, Some(DType::Q8_0));
        check(Format::Gguf, DType::Q8_0, 512, 8, None);
        check(Format::Gguf, DType::Q8_0, 1408, 6, None);
        check(Format::Gguf, DType::Q4_K, 512, 6, None);
        check(Format::Mlx, DType::BF16, 96, 4, Some(DType::Affine { bits: 4, group: 32, scale: Half::BF16 }));
        check(Format::Mlx, affine(8, 128), 256, 3, Some(affine(3, 128)));
        check(Format::Mlx, affine(4, 64), 256, 4, None);
    }
}
