//! ggml's encodings with codebooks (IQ): a code stands for 4 or 8 magnitudes at once, or for one value of a table.
//!
//! Layouts are those of ggml's `block_iq*`; a super-block has 256 columns. A scale has 11 significant bits, the integer
//! factors at most 11 more, so every product is exact in f32.

use super::f16_le;

/// Columns of a super-block.
const SUPER: usize = 256;

/// The codebooks one after the other, a byte a magnitude: of IQ2_XXS (256 × 8), IQ2_XS (512 × 8), IQ2_S (1024 × 8),
/// IQ3_XXS (256 × 4), IQ3_S (512 × 4), IQ1_S (2048 × 8, signed). Written by `tools/make_codebooks.py`.
const CODEBOOKS: &[u8; 33_792] = include_bytes!("codebooks.bin");

/// Magnitudes of eight values for each code of IQ2_XXS.
pub(crate) const IQ2_XXS: &[[u8; 8]] = book(0, 256);
/// As [`IQ2_XXS`].
pub(crate) const IQ2_XS: &[[u8; 8]] = book(2048, 512);
/// As [`IQ2_XXS`].
pub(crate) const IQ2_S: &[[u8; 8]] = book(6144, 1024);
/// Magnitudes of four values for each code of IQ3_XXS.
pub(crate) const IQ3_XXS: &[[u8; 4]] = book(14_336, 256);
/// As [`IQ3_XXS`].
pub(crate) const IQ3_S: &[[u8; 4]] = book(15_360, 512);
/// Eight values of −1, 0, 1 for each code of IQ1_S and IQ1_M.
pub(crate) const IQ1: &[[u8; 8]] = book(17_408, 2048);

/// `len` entries of the codebooks from byte `start` on.
const fn book<const N: usize>(start: usize, len: usize) -> &'static [[u8; N]] {
    CODEBOOKS.split_at(start).1.split_at(len * N).0.as_chunks().0
}

/// Values of four-bit codes.
pub(crate) const NON_LINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Signs of eight values from seven bits: the eighth makes their number even.
fn even_signs(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | ((seven.count_ones() as u8 & 1) << 7)
}

/// `scale` · magnitudes, negative where bits of `signs` are set, in order.
fn signed<const N: usize>(scale: f32, magnitudes: &[u8; N], signs: u8, out: &mut [f32]) {
    for (j, (out, m)) in out.iter_mut().zip(magnitudes).enumerate() {
        let value = scale * f32::from(*m);
        *out = if signs >> j & 1 == 1 { -value } else { value };
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// IQ4_NL, 18 bytes for 32 columns: d f16, qs\[16\] with elements 0..16 in low nibbles and 16..32 in high ones.
pub(crate) fn dequantize_iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    non_linear(f16_le(block[0], block[1]), &block[2..], out);
}

/// IQ4_XS: d f16, high bits of scales u16 (two a sub-block), low nibbles of scales\[4\], then 16 bytes as in IQ4_NL for
/// each of eight sub-blocks; scales are stored + 32.
pub(crate) fn dequantize_iq4_xs(block: &[u8; 136], out: &mut [f32; SUPER]) {
    let (d, high) = (f16_le(block[0], block[1]), u16_at(block, 2));
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
        let scale = i16::from(low) | ((high >> (2 * sub) & 3) << 4) as i16;
        non_linear(d * f32::from(scale - 32), &block[8 + 16 * sub..][..16], out);
    }
}

fn non_linear(scale: f32, nibbles: &[u8], out: &mut [f32; 32]) {
    for (j, &byte) in nibbles.iter().enumerate() {
        out[j] = scale * f32::from(NON_LINEAR[usize::from(byte & 15)]);
        out[j + 16] = scale * f32::from(NON_LINEAR[usize::from(byte >> 4)]);
    }
}

/// IQ2_XXS: d f16, then for each 32 columns four codes (bytes) and a word of four times seven bits of signs and, on
/// top, four bits of scale s: d · (½ + s) / 4.
pub(crate) fn dequantize_iq2_xxs(block: &[u8; 66], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (sub, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (codes, word) = (&block[2 + 8 * sub..][..4], u32_at(block, 6 + 8 * sub));
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (l, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed(scale, &IQ2_XXS[usize::from(codes[l])], even_signs(word >> (7 * l)), out);
        }
    }
}

/// IQ2_XS: d f16, a u16 for eight columns (nine bits of code, seven of signs), a nibble of scale for sixteen:
/// d · (½ + s) / 4.
pub(crate) fn dequantize_iq2_xs(block: &[u8; 74], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(block, 2 + 2 * i);
        let s = block[66 + i / 4] >> (4 * (i / 2 % 2)) & 15;
        let scale = d * (0.5 + f32::from(s)) * 0.25;
        signed(scale, &IQ2_XS[usize::from(word & 511)], even_signs(u32::from(word >> 9)), out);
    }
}

/// IQ2_S: d f16, low bytes of codes\[32\], signs\[32\], two high bits a code\[8\], a nibble of scale for sixteen columns as
/// in IQ2_XS.
pub(crate) fn dequantize_iq2_s(block: &[u8; 82], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3);
        let s = block[74 + i / 4] >> (4 * (i / 2 % 2)) & 15;
        let scale = d * (0.5 + f32::from(s)) * 0.25;
        signed(scale, &IQ2_S[usize::from(block[2 + i]) | high << 8], block[34 + i], out);
    }
}

/// IQ3_XXS: d f16, a code for four columns\[64\], then for each 32 columns a word of signs and scale s as in IQ2_XXS:
/// d · (½ + s) / 2.
pub(crate) fn dequantize_iq3_xxs(block: &[u8; 98], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u32_at(block, 66 + 4 * (i / 4));
        let signs = even_signs(word >> (7 * (i % 4)));
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        let (first, second) = out.split_at_mut(4);
        signed(scale, &IQ3_XXS[usize::from(block[2 + 2 * i])], signs, first);
        signed(scale, &IQ3_XXS[usize::from(block[3 + 2 * i])], signs >> 4, second);
    }
}

/// IQ3_S: d f16, low bytes of codes for four columns\[64\], their ninth bits\[8\], signs\[32\], a nibble of scale s for 32
/// columns\[4\]: d · (1 + 2s).
pub(crate) fn dequantize_iq3_s(block: &[u8; 110], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
        let signs = block[74 + i / 2] >> (4 * (i % 2));
        let s = block[106 + i / 16] >> (4 * (i / 8 % 2)) & 15;
        let scale = d * f32::from(1 + 2 * s);
        signed(scale, &IQ3_S[usize::from(block[2 + i]) | high << 8], signs, out);
    }
}

/// IQ1_S: d f16, low bytes of codes for eight columns\[32\], a u16 for 32 columns\[8\] with three high bits a code, three
/// bits of scale s and the sign of a shift by ⅛: d · (2s + 1) · (q ± ⅛).
pub(crate) fn dequantize_iq1_s(block: &[u8; 50], out: &mut [f32; SUPER]) {
    let d = f16_le(block[0], block[1]);
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(block, 34 + 2 * (i / 4));
        let high = usize::from(word >> (3 * (i % 4)) & 7);
        let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
        shifted(scale, usize::from(block[2 + i]) | high << 8, word >> 15 == 1, out);
    }
}

/// IQ1_M: low bytes of codes for eight columns\[32\], a nibble for eight columns\[16\] with three high bits of the code and
/// the sign of a shift by ⅛, u16\[4\] with three bits of scale s for sixteen columns and, on top of each, four bits of the
/// f16 d: d · (2s + 1) · (q ± ⅛).
pub(crate) fn dequantize_iq1_m(block: &[u8; 56], out: &mut [f32; SUPER]) {
    let words: [u16; 4] = std::array::from_fn(|i| u16_at(block, 48 + 2 * i));
    let d = (0..4).fold(0, |d, i| d | words[i] >> 12 << (4 * i));
    let d = half::f16::from_bits(d).to_f32();
    for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let nibble = block[32 + i / 2] >> (4 * (i % 2)) & 15;
        let s = words[i / 8] >> (3 * (i / 2 % 4)) & 7;
        let code = usize::from(block[i]) | usize::from(nibble & 7) << 8;
        shifted(d * f32::from(2 * s + 1), code, nibble & 8 != 0, out);
    }
}

/// `scale` · (q ± ⅛) for the eight q of −1, 0, 1 that `code` stands for.
fn shifted(scale: f32, code: usize, down: bool, out: &mut [f32; 8]) {
    let shift = if down { -0.125 } else { 0.125 };
    for (out, &q) in out.iter_mut().zip(&IQ1[code]) {
        *out = scale * (f32::from(q as i8) + shift);
    }
}
