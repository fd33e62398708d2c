//! Integers in groups: w = (code − zero) · scale, with unsigned codes and zero points of 4 or 8 bits.
//!
//! The layout is that of compressed-tensors' `pack-quantized`, which adds half of the range to both: codes fill an int32 of
//! the input dimension, the first in its lowest bits, so byte j of a row of 4 bits holds columns 2j (low nibble) and
//! 2j + 1; zero points fill one of the output dimension, so a row of words stands for 8 rows, or 4 of 8 bits. GPTQ
//! (Frantar et al. 2022) and AWQ (Lin et al. 2023) store the same numbers transposed. A product is exact in f32;
//! compressed-tensors, GPTQ's and AWQ's own programs round it to the type of the scales.

use super::half_le;
use crate::dtype::Zeros;
use crate::{Half, TensorView};

/// What codes are counted from if no zero points are stored.
pub(crate) const fn middle(bits: usize) -> u8 {
    1 << (bits - 1)
}

/// The codes of a row.
pub(crate) struct Codes<'a> {
    /// 4 or 8.
    pub(crate) bits: usize,
    pub(crate) bytes: &'a [u8],
    /// Columns of a group.
    pub(crate) group: usize,
}

/// The zero point of each group of row `row`.
pub(crate) fn zeros(weight: TensorView<'_>, zeros: Zeros, row: usize) -> impl Iterator<Item = u8> + '_ {
    let per_word = weight.dtype().block_rows(2);
    let bits = 32 / per_word;
    let (words, place) = match zeros {
        Zeros::Middle => (&[] as &[u8], 0),
        Zeros::Stored => (weight.row(2, row), weight.row_in_block(2, row)),
    };
    let stored = words.as_chunks().0.iter().map(move |word| {
        let codes = u32::from_le_bytes(*word) >> (bits * place);
        (codes & (u32::MAX >> (32 - bits))) as u8
    });
    let middles = std::iter::repeat_n(middle(bits), if words.is_empty() { usize::MAX } else { 0 });
    stored.chain(middles)
}

/// Values of a row; `scales` are its bytes, `zeros` the zero points of its groups.
pub(crate) fn dequantize_row(
    codes: Codes<'_>,
    half: Half,
    scales: &[u8],
    zeros: impl Iterator<Item = u8>,
    out: &mut [f32],
) {
    let Codes { bits, bytes, group } = codes;
    let groups = out.chunks_exact_mut(group).zip(bytes.chunks_exact(group * bits / 8));
    for (((out, codes), scale), zero) in groups.zip(scales.as_chunks().0).zip(zeros) {
        let scale = half_le(half, *scale);
        let value = |code: u8| (i32::from(code) - i32::from(zero)) as f32 * scale;
        if bits == 8 {
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = value(*code));
            continue;
        }
        for (byte, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [value(byte & 15), value(byte >> 4)];
        }
    }
}
