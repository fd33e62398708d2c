//! Weight encodings: one file a format family, each with its scalar dequantiser (the definition of what the
//! bytes mean) and, where something writes it, its quantiser.

pub(crate) mod affine;
pub(crate) mod k_quants;
pub(crate) mod legacy;

use crate::{DType, Error, Half, Result, TensorView};

/// Values of the whole matrix, row after row.
///
/// # Errors
/// [`Error::Unsupported`] if no dequantiser exists for the dtype.
pub fn dequantize(weight: TensorView<'_>) -> Result<Vec<f32>> {
    let cols = weight.cols();
    let mut out = vec![0.0; weight.rows() * cols];
    if cols > 0 {
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            dequantize_row(weight, row, out)?;
        }
    }
    Ok(out)
}

/// Writes the values of row `row` of `weight` to `out`. Scales that are infinite or NaN give what IEEE
/// arithmetic gives.
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
            for (o, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = f32::from_le_bytes(b);
            }
        }
        DType::F16 => {
            for (o, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = half_le(Half::F16, b);
            }
        }
        DType::BF16 => {
            for (o, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = half_le(Half::BF16, b);
            }
        }
        DType::Q4_0 => blocks(bytes, out, legacy::dequantize_q4_0),
        DType::Q5_0 => blocks(bytes, out, legacy::dequantize_q5_0),
        DType::Q8_0 => blocks(bytes, out, legacy::dequantize_q8_0),
        DType::Q2_K => blocks(bytes, out, k_quants::dequantize_q2_k),
        DType::Q3_K => blocks(bytes, out, k_quants::dequantize_q3_k),
        DType::Q4_K => blocks(bytes, out, k_quants::dequantize_q4_k),
        DType::Q5_K => blocks(bytes, out, k_quants::dequantize_q5_k),
        DType::Q6_K => blocks(bytes, out, k_quants::dequantize_q6_k),
        dtype @ DType::Affine { bits, group, scale } => {
            let (group, planes) = (group.into(), [bytes, weight.row(1, row), weight.row(2, row)]);
            match bits {
                2 => affine::dequantize_row::<2>(group, scale, planes, out),
                3 => affine::dequantize_row::<3>(group, scale, planes, out),
                4 => affine::dequantize_row::<4>(group, scale, planes, out),
                5 => affine::dequantize_row::<5>(group, scale, planes, out),
                6 => affine::dequantize_row::<6>(group, scale, planes, out),
                8 => affine::dequantize_row::<8>(group, scale, planes, out),
                _ => return Err(Error::Unsupported { what: "dequantisation", dtype }),
            }
        }
    }
    Ok(())
}

/// Runs `block` over every block of `BYTES` bytes and `COLS` columns of a row.
fn blocks<const BYTES: usize, const COLS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; COLS]),
) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(bytes, out);
    }
}

/// The f16 of these two little-endian bytes.
pub(crate) fn f16_le(low: u8, high: u8) -> f32 {
    half::f16::from_le_bytes([low, high]).to_f32()
}

/// The 16-bit float of these little-endian bytes.
pub(crate) fn half_le(kind: Half, bytes: [u8; 2]) -> f32 {
    match kind {
        Half::F16 => half::f16::from_le_bytes(bytes).to_f32(),
        Half::BF16 => half::bf16::from_le_bytes(bytes).to_f32(),
    }
}
