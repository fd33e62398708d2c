//! MLX affine quantisation: per group of 32, 64 or 128 columns, w = scale · q + bias with q unsigned.
//!
//! A row of packed values is one little-endian bit stream, lowest bit first: value i is bits
//! \[i · bits, (i + 1) · bits), so eight values always fill `bits` bytes. (MLX stores it as u32 words; on its
//! little-endian machines that is the same.) Scale and bias are f16 or bf16. scale · q is exact in f32, so a
//! value is rounded once, in the addition. MLX itself rounds the result to the type of the scales.

use super::half_le;
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
