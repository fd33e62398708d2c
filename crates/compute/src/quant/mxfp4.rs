//! MXFP4: blocks of 32 four-bit floats with a shared power of two.
//!
//! Source: Open Compute Project, *Microscaling Formats (MX) Specification 1.0*. An element has a sign, two bits of
//! exponent and one of mantissa; a scale s stands for 2^(s − 127), but 255 for NaN.

/// Twice the values of the codes: integers, so that products with integers are exact.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of the scale that `s` stands for, 2^(s − 128), exact down to the subnormal ones.
pub(crate) fn half_scale(s: u8) -> f32 {
    match s {
        0 | 1 => f32::from_bits(0x0020_0000 << s),
        255 => f32::NAN,
        _ => f32::from_bits((u32::from(s) - 1) << 23),
    }
}

pub(super) fn value(code: u8, half_scale: f32) -> f32 {
    f32::from(DOUBLED[usize::from(code & 15)]) * half_scale
}

/// ggml's block: the scale, then 16 bytes whose low nibbles are elements 0..16 and high ones 16..32.
pub(crate) fn dequantize_block(block: &[u8; 17], out: &mut [f32; 32]) {
    let scale = half_scale(block[0]);
    for (i, byte) in block[1..].iter().enumerate() {
        out[i] = value(*byte, scale);
        out[i + 16] = value(byte >> 4, scale);
    }
}

/// A row with scales apart: byte j holds elements 2j (low nibble) and 2j + 1.
pub(crate) fn dequantize_row(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    for ((codes, scale), out) in codes.chunks_exact(16).zip(scales).zip(out.chunks_exact_mut(32)) {
        let scale = half_scale(*scale);
        for (byte, out) in codes.iter().zip(out.chunks_exact_mut(2)) {
            out[0] = value(*byte, scale);
            out[1] = value(byte >> 4, scale);
        }
    }
}
