//! MLX affine quantisation: per group of 32, 64 or 128 columns, w = scale · q + bias with q unsigned.
//!
//! A row of packed values is one little-endian bit stream, lowest bit first: value i is bits
//! \[i · bits, (i + 1) · bits), so eight values always fill `bits` bytes. (MLX stores it as u32 words; on its
//! little-endian machines that is the same.) Scale and bias are f16 or bf16. scale · q is exact in f32, so a
//! value is rounded once, in the addition. MLX itself rounds the result to the type of the scales.

use super::{
    fit::{self, Line, Span},
    half_le, half_to_le,
};
use crate::Half;

/// The eight values in `bytes`.
pub(crate) fn unpack8<const BITS: usize>(bytes: &[u8; BITS]) -> [u8; 8] {
    let mut word = [0; 8];
    word[..BITS].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    std::array::from_fn(|i| (word >> (i * BITS)) as u8 & (((1u32 << BITS) - 1) as u8))
}

/// Values of a row: `packed`, `scales` and `biases` are its bytes in the three planes.
pub(crate) fn dequantize_row<const BITS: usize>(
    group: usize,
    half: Half,
    [packed, scales, biases]: [&[u8]; 3],
    out: &mut [f32],
) {
    let groups = out.chunks_exact_mut(group).zip(packed.chunks_exact(group / 8 * BITS));
    let params = scales.as_chunks().0.iter().zip(biases.as_chunks().0);
    for ((out, packed), (&scale, &bias)) in groups.zip(params) {
        let (scale, bias) = (half_le(half, scale), half_le(half, bias));
        for (out, bytes) in out.as_chunks_mut::<8>().0.iter_mut().zip(packed.as_chunks::<BITS>().0) {
            let q = unpack8(bytes);
            for (o, q) in out.iter_mut().zip(q) {
                *o = scale * f32::from(q) + bias;
            }
        }
    }
}

/// Encodes groups of `group` values with `bits` bits as the three planes; the error is where the largest value of
/// a group that does not fit lies.
///
/// Scale and bias are fitted freely ([`fit::line`]) and rounded; the integers are the nearest for what is stored.
pub(super) fn quantize(values: &[f32], bits: usize, group: usize, half: Half) -> Result<Vec<Vec<u8>>, usize> {
    let span = Span { min: 0.0, max: ((1u32 << bits) - 1) as f32 };
    let groups = values.len() / group;
    let mut packed = Vec::with_capacity(values.len() / 8 * bits);
    let mut scales = Vec::with_capacity(2 * groups);
    let mut biases = Vec::with_capacity(2 * groups);
    let mut q = vec![0; group];
    for (i, x) in values.chunks_exact(group).enumerate() {
        let free = fit::line(x, span.max, f32::INFINITY);
        let (scale, bias) = (half_to_le(half, free.scale), half_to_le(half, free.base));
        let stored = Line { scale: half_le(half, scale), base: half_le(half, bias) };
        // Not even the largest integer may overflow.
        if !(stored.scale * span.max + stored.base).is_finite() {
            return Err(i * group + super::largest(x));
        }
        stored.assign(x, span, &mut q);
        scales.extend(scale);
        biases.extend(bias);
        for q in q.as_chunks::<8>().0 {
            let word = q.iter().rev().fold(0u64, |word, &q| word << bits | u64::from(q));
            packed.extend_from_slice(&word.to_le_bytes()[..bits]);
        }
    }
    Ok(vec![packed, scales, biases])
}
