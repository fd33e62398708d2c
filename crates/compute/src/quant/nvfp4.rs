//! NVFP4: 4-bit floats (E2M1) with a scale (e4m3) for 16 columns and one (f32) for the matrix.
//!
//! Source: NVIDIA, *Pretraining Large Language Models with NVFP4* (2025), and the tensors that ModelOpt and
//! compressed-tensors write: byte j of a row holds columns 2j (low nibble) and 2j + 1, and w = element · (scale · factor).
//! compressed-tensors stores the factor's reciprocal and divides; here the reciprocal is rounded once and multiplied, which
//! differs from that by at most a unit in the last place.

use super::{fp8, mxfp4};
use crate::dtype::MatrixScale;

/// Columns that share a scale.
const BLOCK: usize = 16;

/// What the scales of a matrix are multiplied by, of the bytes of its own.
pub(crate) fn factor(kind: MatrixScale, bytes: &[u8]) -> f32 {
    let scale = bytes.as_array().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes));
    match kind {
        MatrixScale::Factor => scale,
        MatrixScale::Divisor => 1.0 / scale,
    }
}

/// Values of a row: `codes` and `scales` are its bytes in the two planes.
pub(crate) fn dequantize_row(factor: f32, codes: &[u8], scales: &[u8], out: &mut [f32]) {
    for ((codes, scale), out) in codes.chunks_exact(BLOCK / 2).zip(scales).zip(out.chunks_exact_mut(BLOCK)) {
        // Halved, as elements are doubled: exact.
        let half_scale = fp8::VALUES[usize::from(*scale)] * (0.5 * factor);
        for (byte, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [mxfp4::value(*byte, half_scale), mxfp4::value(byte >> 4, half_scale)];
        }
    }
}
