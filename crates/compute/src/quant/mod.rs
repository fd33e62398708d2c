//! Weight encodings: one file a format family, each with its scalar dequantiser (the definition of what the
//! bytes mean) and, where something writes it, its quantiser.

pub(crate) mod affine;
pub(crate) mod codebook;
mod fit;
pub(crate) mod fp8;
pub(crate) mod int;
mod k_encode;
pub(crate) mod k_quants;
pub(crate) mod legacy;
pub(crate) mod mxfp4;
pub(crate) mod nvfp4;

pub(crate) use codebook::NON_LINEAR;
use half::{bf16, f16, slice::HalfFloatSliceExt};

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

/// A value that is infinite or NaN, and where it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NotFinite {
    /// Row of the weight.
    pub row: usize,
    /// Column of the weight.
    pub col: usize,
    /// The value.
    pub value: f32,
}

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at row {}, column {}", self.value, self.row, self.col)
    }
}

/// The first value of `weight` that is not finite, in the order of rows.
///
/// # Errors
/// [`Error::Unsupported`] if no dequantiser exists for the dtype.
pub fn find_not_finite(weight: TensorView<'_>) -> Result<Option<NotFinite>> {
    let mut values = vec![0.0; weight.cols()];
    for row in 0..weight.rows() {
        dequantize_row(weight, row, &mut values)?;
        if let Some(col) = values.iter().position(|v| !v.is_finite()) {
            return Ok(Some(NotFinite { row, col, value: values[col] }));
        }
    }
    Ok(None)
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
    if weight.is_transposed() {
        for (col, out) in out.iter_mut().enumerate() {
            *out = float(weight.dtype(), weight.element(row, col))?;
        }
        return Ok(());
    }
    let bytes = weight.row(0, row);
    match weight.dtype() {
        DType::F32 => blocks(bytes, out, |&b, [o]| *o = f32::from_le_bytes(b)),
        DType::F16 => halves(bytes, out),
        DType::BF16 => blocks(bytes, out, |&b, [o]| *o = half_le(Half::BF16, b)),
        DType::Q4_0 => blocks(bytes, out, legacy::dequantize_q4_0),
        DType::Q4_1 => blocks(bytes, out, legacy::dequantize_q4_1),
        DType::Q5_0 => blocks(bytes, out, legacy::dequantize_q5_0),
        DType::Q5_1 => blocks(bytes, out, legacy::dequantize_q5_1),
        DType::Q8_0 => blocks(bytes, out, legacy::dequantize_q8_0),
        DType::MXFP4 => blocks(bytes, out, mxfp4::dequantize_block),
        DType::MXFP4_Planes => mxfp4::dequantize_row(bytes, weight.row(1, row), out),
        DType::Q2_K => blocks(bytes, out, k_quants::dequantize_q2_k),
        DType::Q3_K => blocks(bytes, out, k_quants::dequantize_q3_k),
        DType::Q4_K => blocks(bytes, out, k_quants::dequantize_q4_k),
        DType::Q5_K => blocks(bytes, out, k_quants::dequantize_q5_k),
        DType::Q6_K => blocks(bytes, out, k_quants::dequantize_q6_k),
        DType::IQ1_S => blocks(bytes, out, codebook::dequantize_iq1_s),
        DType::IQ1_M => blocks(bytes, out, codebook::dequantize_iq1_m),
        DType::IQ2_XXS => blocks(bytes, out, codebook::dequantize_iq2_xxs),
        DType::IQ2_XS => blocks(bytes, out, codebook::dequantize_iq2_xs),
        DType::IQ2_S => blocks(bytes, out, codebook::dequantize_iq2_s),
        DType::IQ3_XXS => blocks(bytes, out, codebook::dequantize_iq3_xxs),
        DType::IQ3_S => blocks(bytes, out, codebook::dequantize_iq3_s),
        DType::IQ4_NL => blocks(bytes, out, codebook::dequantize_iq4_nl),
        DType::IQ4_XS => blocks(bytes, out, codebook::dequantize_iq4_xs),
        DType::Fp8 { scale } => fp8::dequantize_row(scale, bytes, weight.row(1, row), out),
        DType::MXFP8_Planes => fp8::dequantize_mx_row(bytes, weight.row(1, row), out),
        DType::Int { bits, group, scale, zeros } => {
            let group = if group == 0 { out.len().max(1) } else { group.into() };
            let codes = int::Codes { bits: bits.into(), bytes, group };
            int::dequantize_row(codes, scale, weight.row(1, row), int::zeros(weight, zeros, row), out);
        }
        DType::NVFP4 { matrix } => {
            let factor = nvfp4::factor(matrix, weight.row(2, row));
            nvfp4::dequantize_row(factor, bytes, weight.row(1, row), out);
        }
        DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale } => {
            fp8::dequantize_whole_row(scale, bytes, weight.row(1, row), out)
        }
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

/// Encodes `values` (rows of `cols`, one after the other) as `dtype`: the bytes of each plane.
///
/// Q4_0 and Q8_0 give what ggml's reference gives; Q4_K, Q6_K and affine search for the least squared error.
///
/// # Errors
/// [`Error::RowLength`] if rows are no whole number of blocks, [`Error::Shape`] if `values` is no whole number of
/// rows, [`Error::Unrepresentable`] for a value that is not finite or too large for the encoding,
/// [`Error::Unsupported`] for an encoding that nothing here writes.
pub fn quantize(dtype: DType, values: &[f32], cols: usize) -> Result<Vec<Vec<u8>>> {
    let rows = values.len().checked_div(cols).unwrap_or(0);
    if values.len() != rows * cols {
        let expected = rows * cols;
        return Err(Error::Shape { op: "quantize", what: "values", expected, got: values.len() });
    }
    dtype.row_bytes(0, cols)?;
    let unrepresentable = |at: usize| {
        let (row, col) = (at / cols, at % cols);
        Error::Unrepresentable { dtype, row, col, value: values[at] }
    };
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        return Err(unrepresentable(at));
    }
    let plane = match dtype {
        DType::F32 => Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        DType::F16 => encode(values, |[v], out| store_half(Half::F16, *v, out)),
        DType::BF16 => encode(values, |[v], out| store_half(Half::BF16, *v, out)),
        DType::Q4_0 => encode(values, legacy::quantize_q4_0),
        DType::Q8_0 => encode(values, legacy::quantize_q8_0),
        DType::Q4_K => encode(values, k_encode::quantize_q4_k),
        DType::Q6_K => encode(values, k_encode::quantize_q6_k),
        DType::Affine { bits, group, scale } => {
            let planes = affine::quantize(values, bits.into(), group.into(), scale);
            return planes.map_err(unrepresentable);
        }
        _ => return Err(Error::Unsupported { what: "quantisation", dtype }),
    };
    Ok(vec![plane.map_err(unrepresentable)?])
}

/// Runs `block`, which says whether the values fit, over every block of `COLS` values; the error is where the
/// largest value of a block that does not fit lies.
fn encode<const BYTES: usize, const COLS: usize>(
    values: &[f32],
    block: impl Fn(&[f32; COLS], &mut [u8; BYTES]) -> bool,
) -> Result<Vec<u8>, usize> {
    let mut bytes = vec![0; values.len() / COLS * BYTES];
    for (i, (x, out)) in values.as_chunks().0.iter().zip(bytes.as_chunks_mut().0).enumerate() {
        if !block(x, out) {
            return Err(i * COLS + largest(x));
        }
    }
    Ok(bytes)
}

/// Index of the first value of the largest magnitude.
fn largest(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i].abs() > x[best].abs() { i } else { best })
}

/// Writes `v` as a 16-bit float; false if it overflows.
fn store_half(kind: Half, v: f32, out: &mut [u8; 2]) -> bool {
    *out = half_to_le(kind, v);
    half_le(kind, *out).is_finite()
}

/// The values of a row of f16, converted in batches: whether the CPU can do it is then asked once a batch.
fn halves(bytes: &[u8], out: &mut [f32]) {
    const BATCH: usize = 64;
    let mut values = [f16::ZERO; BATCH];
    for (bytes, out) in bytes.chunks(2 * BATCH).zip(out.chunks_mut(BATCH)) {
        for (v, &b) in values.iter_mut().zip(bytes.as_chunks().0) {
            *v = f16::from_le_bytes(b);
        }
        values[..out.len()].convert_to_f32_slice(out);
    }
}

/// The plain float of these bytes.
///
/// # Errors
/// [`Error::Unsupported`] if the encoding has blocks.
pub(crate) fn float(dtype: DType, bytes: &[u8]) -> Result<f32> {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => Ok(f32::from_le_bytes([a, b, c, d])),
        (DType::F16, &[a, b]) => Ok(half_le(Half::F16, [a, b])),
        (DType::BF16, &[a, b]) => Ok(half_le(Half::BF16, [a, b])),
        _ => Err(Error::Unsupported { what: "a plain float", dtype }),
    }
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
    f16::from_le_bytes([low, high]).to_f32()
}

/// The 16-bit float of these little-endian bytes.
pub(crate) fn half_le(kind: Half, bytes: [u8; 2]) -> f32 {
    match kind {
        Half::F16 => f16::from_le_bytes(bytes).to_f32(),
        Half::BF16 => bf16::from_le_bytes(bytes).to_f32(),
    }
}

/// The little-endian bytes of the nearest 16-bit float.
pub(crate) fn half_to_le(kind: Half, v: f32) -> [u8; 2] {
    match kind {
        Half::F16 => f16::from_f32(v).to_le_bytes(),
        Half::BF16 => bf16::from_f32(v).to_le_bytes(),
    }
}
