//! FP8 (e4m3) with a scale for each block of 128 × 128 weights, as DeepSeek-V3 is published, for 32 weights of a row, for a
//! row, or one for all: w = scale · q.
//!
//! e4m3 (Micikevicius et al. 2022, the "fn" variant): sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no
//! infinities, one NaN of either sign. A product is rounded once, in f32; published code rounds it to bf16 again.

use crate::Half;
use crate::dtype::{BlockScale, FP8_BLOCK};
use crate::quant::{half_le, mxfp4};

/// The value of every code.
pub(crate) const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u8);
        code += 1;
    }
    values
};

const fn value(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = if exponent == 15 && mantissa == 7 {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Values of a row: `codes` are its weights, `scales` those of its row of blocks.
pub(crate) fn dequantize_row(kind: BlockScale, codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let size = scales.len().checked_div(out.len().div_ceil(FP8_BLOCK)).unwrap_or(1);
    let blocks = out.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK));
    for ((out, codes), scale) in blocks.zip(scales.chunks_exact(size)) {
        scaled(codes, scale_of(kind, scale), out);
    }
}

/// Values of a row: `codes` are its weights, `scale` that of them all.
pub(crate) fn dequantize_whole_row(kind: BlockScale, codes: &[u8], scale: &[u8], out: &mut [f32]) {
    scaled(codes, scale_of(kind, scale), out);
}

/// Values of a row: `codes` are its weights, `scales` a power of two for each 32 of them.
pub(crate) fn dequantize_mx_row(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    for ((out, codes), scale) in out.chunks_mut(32).zip(codes.chunks(32)).zip(scales.chunks(1)) {
        scaled(codes, scale_of(BlockScale::E8M0, scale), out);
    }
}

/// The scale of these bytes.
pub(crate) fn scale_of(kind: BlockScale, bytes: &[u8]) -> f32 {
    match (kind, bytes) {
        (BlockScale::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (BlockScale::BF16, &[a, b]) => half_le(Half::BF16, [a, b]),
        (BlockScale::E8M0, &[byte @ 1..=254]) => f32::from_bits(u32::from(byte) << 23),
        // Below the normal numbers, and none.
        (BlockScale::E8M0, &[byte]) => 2.0 * mxfp4::half_scale(byte),
        _ => unreachable!("a scale has the bytes that its encoding says"),
    }
}

fn scaled(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (o, code) in out.iter_mut().zip(codes) {
        *o = VALUES[usize::from(*code)] * scale;
    }
}
