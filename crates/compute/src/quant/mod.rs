//! Weight encodings: one file a format family, each with its scalar dequantiser (the definition of what the
//! bytes mean) and, where something writes it, its quantiser.

use crate::{DType, Error, Result, TensorView};

/// Writes the values of row `row` of `weight` to `out`.
///
/// # Errors
/// [`Error::Unsupported`] if no dequantiser exists for the dtype.
///
/// # Panics
/// If `out` is not [`TensorView::cols`] long or `row` is out of range.
pub fn dequantize_row(weight: TensorView<'_>, row: usize, out: &mut [f32]) -> Result<()> {
    assert_eq!(out.len(), weight.cols(), "one value a column");
    let bytes = weight.row(0, row);
    match weight.dtype() {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *o = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        dtype => return Err(Error::Unsupported { what: "dequantisation", dtype }),
    }
    Ok(())
}
