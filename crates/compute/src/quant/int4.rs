//! INT4 of compressed-tensors (`pack-quantized`, symmetric): w = (code − 8) · scale per group of columns.
//!
//! Eight codes fill an int32 of the input dimension, the first in its lowest bits, so byte j of a row holds columns 2j (low
//! nibble) and 2j + 1. A product is exact in f32; compressed-tensors rounds it to the type of the scales.

use super::half_le;
use crate::Half;

/// What codes of zero are.
pub(crate) const ZERO: i32 = 8;

/// Values of a row: `codes` and `scales` are its bytes in the two planes.
pub(crate) fn dequantize_row(group: usize, half: Half, codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let groups = out.chunks_exact_mut(group).zip(codes.chunks_exact(group / 2));
    for ((out, codes), scale) in groups.zip(scales.as_chunks().0) {
        let scale = half_le(half, *scale);
        let value = |code: u8| (i32::from(code & 15) - ZERO) as f32 * scale;
        for (byte, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [value(*byte), value(byte >> 4)];
        }
    }
}
