//! ggml's first block formats: 32 columns a block, one f16 scale `d`; w = d · q with q signed, or d · q + m with q unsigned.
//!
//! Layouts are those of ggml's `block_q4_0`, `block_q4_1`, `block_q5_0`, `block_q5_1` and `block_q8_0`. d has 11 significant bits and q at
//! most 8, so every product is exact in f32.

use half::f16;

use super::f16_le;

/// Columns of a block.
pub(crate) const BLOCK: usize = 32;

/// Integers of a Q4_0 block in −8..8; returns their scale.
///
/// 18 bytes: d f16, qs\[16\]. Element j < 16 is the low nibble of qs\[j\], element 16 + j its high nibble;
/// both are stored + 8.
pub(crate) fn unpack_q4_0(block: &[u8; 18], q: &mut [i8; BLOCK]) -> f32 {
    for (j, &b) in block[2..].iter().enumerate() {
        q[j] = (b & 15) as i8 - 8;
        q[j + 16] = (b >> 4) as i8 - 8;
    }
    f16_le(block[0], block[1])
}

/// Integers of a Q5_0 block in −16..16; returns their scale.
///
/// 22 bytes: d f16, qh u32, qs\[16\]. Low four bits as in Q4_0; bit j of qh is the fifth bit of element j; stored
/// + 16.
pub(crate) fn unpack_q5_0(block: &[u8; 22], q: &mut [i8; BLOCK]) -> f32 {
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (j, &b) in block[6..].iter().enumerate() {
        q[j] = (b & 15 | (high >> j << 4) as u8 & 16) as i8 - 16;
        q[j + 16] = (b >> 4 | (high >> (j + 16) << 4) as u8 & 16) as i8 - 16;
    }
    f16_le(block[0], block[1])
}

/// Integers of a Q8_0 block; returns their scale.
///
/// 34 bytes: d f16, qs i8\[32\].
pub(crate) fn unpack_q8_0(block: &[u8; 34], q: &mut [i8; BLOCK]) -> f32 {
    for (q, &b) in q.iter_mut().zip(&block[2..]) {
        *q = b as i8;
    }
    f16_le(block[0], block[1])
}

/// Values of a Q4_0 block.
pub(crate) fn dequantize_q4_0(block: &[u8; 18], out: &mut [f32; BLOCK]) {
    let mut q = [0; BLOCK];
    let d = unpack_q4_0(block, &mut q);
    scaled(d, &q, out);
}

/// Values of a Q5_0 block.
pub(crate) fn dequantize_q5_0(block: &[u8; 22], out: &mut [f32; BLOCK]) {
    let mut q = [0; BLOCK];
    let d = unpack_q5_0(block, &mut q);
    scaled(d, &q, out);
}

/// Values of a Q8_0 block.
pub(crate) fn dequantize_q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let mut q = [0; BLOCK];
    let d = unpack_q8_0(block, &mut q);
    scaled(d, &q, out);
}

/// Values of a Q4_1 block.
///
/// 20 bytes: d f16, m f16, qs\[16\] with nibbles as in Q4_0, stored as they are.
pub(crate) fn dequantize_q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    let (d, m) = (f16_le(block[0], block[1]), f16_le(block[2], block[3]));
    for (j, &b) in block[4..].iter().enumerate() {
        out[j] = d * f32::from(b & 15) + m;
        out[j + 16] = d * f32::from(b >> 4) + m;
    }
}

/// Values of a Q5_1 block.
///
/// 24 bytes: d f16, m f16, qh u32, qs\[16\] with bits as in Q5_0, stored as they are.
pub(crate) fn dequantize_q5_1(block: &[u8; 24], out: &mut [f32; BLOCK]) {
    let (d, m) = (f16_le(block[0], block[1]), f16_le(block[2], block[3]));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (j, &b) in block[8..].iter().enumerate() {
        out[j] = d * f32::from(b & 15 | (high >> j << 4) as u8 & 16) + m;
        out[j + 16] = d * f32::from(b >> 4 | (high >> (j + 16) << 4) as u8 & 16) + m;
    }
}

fn scaled(d: f32, q: &[i8; BLOCK], out: &mut [f32; BLOCK]) {
    for (o, &q) in out.iter_mut().zip(q) {
        *o = d * f32::from(q);
    }
}

/// Encodes `x` as Q4_0 with the integers that ggml's reference gives; false if it is too large for the format.
///
/// The first value of the largest magnitude becomes exactly −8.
pub(super) fn quantize_q4_0(x: &[f32; BLOCK], out: &mut [u8; 18]) -> bool {
    let peak = x.iter().fold(0.0f32, |peak, &x| if x.abs() > peak.abs() { x } else { peak });
    let d = peak / -8.0;
    let inverse = reciprocal(d);
    let q = |x: f32| ((x * inverse + 8.5) as u8).min(15);
    for (j, out) in out[2..].iter_mut().enumerate() {
        *out = q(x[j]) | q(x[j + 16]) << 4;
    }
    store_scale(d, out)
}

/// Encodes `x` as Q8_0 with the integers that ggml's reference gives; false if it is too large for the format.
///
/// The largest magnitude becomes ±127; halves round away from zero.
pub(super) fn quantize_q8_0(x: &[f32; BLOCK], out: &mut [u8; 34]) -> bool {
    let d = x.iter().fold(0.0f32, |max, x| if x.abs() > max { x.abs() } else { max }) / 127.0;
    let inverse = reciprocal(d);
    for (out, x) in out[2..].iter_mut().zip(x) {
        let v = x * inverse;
        let whole = v as i32;
        let rest = v - whole as f32;
        *out = (whole + i32::from(rest >= 0.5) - i32::from(rest <= -0.5)) as u8;
    }
    store_scale(d, out)
}

/// 1 / d; 0 where that overflows, which is where d is 0 as f16 too.
fn reciprocal(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Writes `d` as the f16 a block begins with; false if it overflows.
fn store_scale(d: f32, block: &mut [u8]) -> bool {
    let d = f16::from_f32(d);
    block[..2].copy_from_slice(&d.to_le_bytes());
    d.is_finite()
}
