//! ggml's k-quants: super-blocks of 256 columns in sub-blocks of 16 or 32, whose small integer scales
//! (and minima) are themselves scaled by one f16 `d` (and `dmin`): w = d · sc · q \[− dmin · m\].
//!
//! Layouts are those of ggml's `block_q2_K` … `block_q6_K`. Every product d · sc · q has at most 24 significant
//! bits and is exact in f32, so a value is rounded once, in the subtraction, and contraction to a fused
//! multiply-add changes nothing.

use super::f16_le;

/// Columns of a super-block.
pub(crate) const BLOCK: usize = 256;

/// Integers of a Q2_K block in 0..4 and the scale and minimum of each 16: w = scale · q − min.
///
/// 84 bytes: sc\[16\] (low nibble scale, high nibble minimum), qs\[64\], d f16, dmin f16. Element
/// 128n + 32k + l (l < 32) is bits 2k, 2k + 1 of qs\[32n + l\].
pub(crate) fn unpack_q2_k(block: &[u8; 84], q: &mut [i8; BLOCK], scale: &mut [f32; 16], min: &mut [f32; 16]) {
    let (d, dmin) = (f16_le(block[80], block[81]), f16_le(block[82], block[83]));
    for (s, &b) in block[..16].iter().enumerate() {
        scale[s] = d * f32::from(b & 15);
        min[s] = dmin * f32::from(b >> 4);
    }
    two_bits(&block[16..80], q);
}

/// Integers of a Q3_K block in −4..4 and the scale of each 16: w = scale · q.
///
/// 110 bytes: hmask\[32\], qs\[64\], sc\[12\], d f16. Low two bits as in Q2_K; the third bit of element 128n + 32k + l
/// is bit 4n + k of hmask\[l\]; stored + 4. Scale s is stored + 32 in six bits: the low four are nibble s / 8 of
/// sc\[s % 8\], the high two are bits 2(s / 4) of sc\[8 + s % 4\].
pub(crate) fn unpack_q3_k(block: &[u8; 110], q: &mut [i8; BLOCK], scale: &mut [f32; 16]) {
    let (hmask, sc) = (&block[..32], &block[96..108]);
    let d = f16_le(block[108], block[109]);
    for (s, scale) in scale.iter_mut().enumerate() {
        let low = sc[s % 8] >> (4 * (s / 8)) & 15;
        let high = sc[8 + s % 4] >> (2 * (s / 4)) & 3;
        *scale = d * f32::from((low | high << 4) as i8 - 32);
    }
    two_bits(&block[32..96], q);
    for (row, q) in q.chunks_exact_mut(32).enumerate() {
        for (q, &h) in q.iter_mut().zip(hmask) {
            *q |= (h >> row & 1) as i8 * 4;
            *q -= 4;
        }
    }
}

/// Integers of a Q4_K block in 0..16 and the scale and minimum of each 32: w = scale · q − min.
///
/// 144 bytes: d f16, dmin f16, sc\[12\] (see [`scales_and_mins`]), qs\[128\]. Sub-block j is the low (even j) or
/// high (odd j) nibbles of qs\[32(j / 2)..\].
pub(crate) fn unpack_q4_k(block: &[u8; 144], q: &mut [i8; BLOCK], scale: &mut [f32; 8], min: &mut [f32; 8]) {
    super_scales(block, scale, min);
    nibbles(&block[16..], q);
}

/// Integers of a Q5_K block in 0..32 and the scale and minimum of each 32: w = scale · q − min.
///
/// 176 bytes: d f16, dmin f16, sc\[12\], qh\[32\], qs\[128\]. Low four bits as in Q4_K; the fifth bit of element
/// 32j + l is bit j of qh\[l\].
pub(crate) fn unpack_q5_k(block: &[u8; 176], q: &mut [i8; BLOCK], scale: &mut [f32; 8], min: &mut [f32; 8]) {
    super_scales(block, scale, min);
    nibbles(&block[48..], q);
    for (j, q) in q.chunks_exact_mut(32).enumerate() {
        for (q, &h) in q.iter_mut().zip(&block[16..48]) {
            *q |= (h >> j & 1) as i8 * 16;
        }
    }
}

/// Integers of a Q6_K block in −32..32 and the scale of each 16: w = scale · q.
///
/// 210 bytes: ql\[128\], qh\[64\], sc i8\[16\], d f16. Element 128n + 32k + l (l < 32) has its low four bits in
/// nibble k / 2 of ql\[64n + 32(k % 2) + l\] and its high two in bits 2k of qh\[32n + l\]; stored + 32.
pub(crate) fn unpack_q6_k(block: &[u8; 210], q: &mut [i8; BLOCK], scale: &mut [f32; 16]) {
    let d = f16_le(block[208], block[209]);
    for (scale, &sc) in scale.iter_mut().zip(&block[192..208]) {
        *scale = d * f32::from(sc as i8);
    }
    let halves = block[..128].chunks_exact(64).zip(block[128..192].chunks_exact(32));
    for (q, (ql, qh)) in q.chunks_exact_mut(128).zip(halves) {
        for l in 0..32 {
            let (a, c, h) = (ql[l], ql[l + 32], qh[l]);
            q[l] = (a & 15 | (h & 3) << 4) as i8 - 32;
            q[l + 32] = (c & 15 | (h >> 2 & 3) << 4) as i8 - 32;
            q[l + 64] = (a >> 4 | (h >> 4 & 3) << 4) as i8 - 32;
            q[l + 96] = (c >> 4 | h >> 6 << 4) as i8 - 32;
        }
    }
}

/// Values of a Q2_K block.
pub(crate) fn dequantize_q2_k(block: &[u8; 84], out: &mut [f32; BLOCK]) {
    let (mut q, mut scale, mut min) = ([0; BLOCK], [0.0; 16], [0.0; 16]);
    unpack_q2_k(block, &mut q, &mut scale, &mut min);
    with_mins(&q, &scale, &min, out);
}

/// Values of a Q3_K block.
pub(crate) fn dequantize_q3_k(block: &[u8; 110], out: &mut [f32; BLOCK]) {
    let (mut q, mut scale) = ([0; BLOCK], [0.0; 16]);
    unpack_q3_k(block, &mut q, &mut scale);
    without_mins(&q, &scale, out);
}

/// Values of a Q4_K block.
pub(crate) fn dequantize_q4_k(block: &[u8; 144], out: &mut [f32; BLOCK]) {
    let (mut q, mut scale, mut min) = ([0; BLOCK], [0.0; 8], [0.0; 8]);
    unpack_q4_k(block, &mut q, &mut scale, &mut min);
    with_mins(&q, &scale, &min, out);
}

/// Values of a Q5_K block.
pub(crate) fn dequantize_q5_k(block: &[u8; 176], out: &mut [f32; BLOCK]) {
    let (mut q, mut scale, mut min) = ([0; BLOCK], [0.0; 8], [0.0; 8]);
    unpack_q5_k(block, &mut q, &mut scale, &mut min);
    with_mins(&q, &scale, &min, out);
}

/// Values of a Q6_K block.
pub(crate) fn dequantize_q6_k(block: &[u8; 210], out: &mut [f32; BLOCK]) {
    let (mut q, mut scale) = ([0; BLOCK], [0.0; 16]);
    unpack_q6_k(block, &mut q, &mut scale);
    without_mins(&q, &scale, out);
}

/// The eight 6-bit scales and minima packed in the 12 bytes `s` of Q4_K and Q5_K.
///
/// For j < 4 the scale is the low six bits of s\[j\] and the minimum those of s\[j + 4\]. For j ≥ 4 their low
/// nibbles are the low and high nibble of s\[j + 4\], their high two bits the top bits of s\[j − 4\] and s\[j\].
pub(crate) fn scales_and_mins(s: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        scales[j] = s[j] & 63;
        mins[j] = s[j + 4] & 63;
        scales[j + 4] = s[j + 8] & 15 | s[j] >> 6 << 4;
        mins[j + 4] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
    (scales, mins)
}

/// Scales and minima of the 16-byte head (d, dmin, sc\[12\]) that Q4_K and Q5_K share.
fn super_scales(block: &[u8], scale: &mut [f32; 8], min: &mut [f32; 8]) {
    let (d, dmin) = (f16_le(block[0], block[1]), f16_le(block[2], block[3]));
    let packed = block[4..16].first_chunk().expect("twelve bytes");
    let (sc, m) = scales_and_mins(packed);
    for j in 0..8 {
        scale[j] = d * f32::from(sc[j]);
        min[j] = dmin * f32::from(m[j]);
    }
}

fn two_bits(qs: &[u8], q: &mut [i8; BLOCK]) {
    for (qs, q) in qs.chunks_exact(32).zip(q.chunks_exact_mut(128)) {
        for (k, q) in q.chunks_exact_mut(32).enumerate() {
            for (q, &b) in q.iter_mut().zip(qs) {
                *q = (b >> (2 * k) & 3) as i8;
            }
        }
    }
}

fn nibbles(qs: &[u8], q: &mut [i8; BLOCK]) {
    for (qs, q) in qs.chunks_exact(32).zip(q.chunks_exact_mut(64)) {
        let (low, high) = q.split_at_mut(32);
        for ((low, high), &b) in low.iter_mut().zip(high).zip(qs) {
            *low = (b & 15) as i8;
            *high = (b >> 4) as i8;
        }
    }
}

fn with_mins(q: &[i8; BLOCK], scale: &[f32], min: &[f32], out: &mut [f32; BLOCK]) {
    let sub = BLOCK / scale.len();
    let scales = scale.iter().zip(min);
    for ((out, q), (&scale, &min)) in out.chunks_exact_mut(sub).zip(q.chunks_exact(sub)).zip(scales) {
        for (o, &q) in out.iter_mut().zip(q) {
            *o = scale * f32::from(q) - min;
        }
    }
}

fn without_mins(q: &[i8; BLOCK], scale: &[f32; 16], out: &mut [f32; BLOCK]) {
    for ((out, q), &scale) in out.chunks_exact_mut(16).zip(q.chunks_exact(16)).zip(scale) {
        for (o, &q) in out.iter_mut().zip(q) {
            *o = scale * f32::from(q);
        }
    }
}
