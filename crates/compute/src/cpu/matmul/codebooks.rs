//! Decoders of IQ1_S to IQ3_S, a code of which stands for four or eight values at once; layouts in [`crate::quant`].
//!
//! All values are integers: magnitudes of 4 to 62 with signs (IQ2, IQ3_XXS), odd ones below 16 with signs (IQ3_S), and
//! 8q ± 1 with q of −1, 0, 1 (IQ1), which are eight times what its definition shifts by ⅛. Their scales are odd integers
//! times d/8, d/4 or d. Entries of codebooks are looked up one by one, as words of eight bytes; only signs and shifts
//! are of whole vectors. So tiles are decoded row by row, as for a single token, and transposed.

use super::{
    int8::{Format, HalvesCentred, Shape, SmallSuperCentred, SuperCentred, Tile, WideHalvesCentred},
    tile::{Block, TILE_COLS, TileRows},
};
use crate::{
    cpu::{
        activations::BLOCK,
        simd::{Isa, MAX_LANES},
    },
    quant::codebook,
};

/// Of codes for eight values: magnitude + 128 of each.
static IQ2_XXS: [u64; 256] = entries_of_eight(codebook::IQ2_XXS, 1, 128);
static IQ2_XS: [u64; 512] = entries_of_eight(codebook::IQ2_XS, 1, 128);
static IQ2_S: [u64; 1024] = entries_of_eight(codebook::IQ2_S, 1, 128);
/// 8q + 15.
static IQ1: [u64; 2048] = entries_of_eight(codebook::IQ1, 8, 15);
/// Of codes for four values: magnitude + 128, and magnitude + 16.
static IQ3_XXS: [u32; 256] = entries_of_four(codebook::IQ3_XXS, 128);
static IQ3_S: [u32; 512] = entries_of_four(codebook::IQ3_S, 16);

/// v · `times` + `plus` for all values v.
const fn entries_of_eight<const N: usize>(book: &[[u8; 8]], times: u8, plus: u8) -> [u64; N] {
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        let mut values = book[i];
        let mut k = 0;
        while k < 8 {
            values[k] = values[k].wrapping_mul(times).wrapping_add(plus);
            k += 1;
        }
        entries[i] = u64::from_le_bytes(values);
        i += 1;
    }
    entries
}

/// v + `plus` for all values v.
const fn entries_of_four<const N: usize>(book: &[[u8; 4]], plus: u8) -> [u32; N] {
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        let [a, b, c, d] = book[i];
        entries[i] = u32::from_le_bytes([a + plus, b + plus, c + plus, d + plus]);
        i += 1;
    }
    entries
}

/// An encoding with blocks of 256 columns, whose codes stand for several values.
pub(super) trait Codebook: Copy {
    /// As in [`Format`].
    type Shape: Shape;
    /// As in [`Format`].
    const BITS: u32;
    /// As in [`Format`].
    const BYTES: usize;
    /// As in [`Format`].
    const ZERO: i32;

    /// As in [`Format`]: of 256 columns.
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile);

    /// Sub-block `sub` of 32 columns of the block at `p`: eight values a word, and what [`Codebook::bits`] makes a bit a
    /// value of.
    ///
    /// # Safety
    /// The block is readable.
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32);

    /// A bit a value, from what is stored for one sub-block in the low half and another in the high one.
    #[inline(always)]
    fn bits(stored: u64) -> u64 {
        stored
    }

    /// Codes from the values of a codebook and bits for each: signs.
    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        // Of 128 + m all bits are inverted, which is 127 − m, and 1 is added: no carry leaves a byte.
        let negative = isa.bytes_where(0xff, low, high);
        let codes = isa.add_u(isa.xor(values, negative), isa.and(negative, isa.splat_u(0x0101_0101)));
        if I::WIDE_OFFSET == 0 {
            codes
        } else {
            isa.xor(codes, isa.splat_u(u32::from(I::WIDE_OFFSET) * 0x0101_0101))
        }
    }
}

/// Vector `i` of the columns of the block at `p`: codes of consecutive columns.
///
/// # Safety
/// The block is readable.
#[inline(always)]
unsafe fn vector<I: Isa, B: Codebook>(isa: I, p: *const u8, i: usize) -> I::U {
    let parts = I::LANES / 8;
    let mut words = [0; MAX_LANES / 2];
    let mut stored = 0;
    for part in 0..parts {
        // SAFETY: by the caller.
        let (values, bits) = unsafe { B::sub_block(p, i * parts + part) };
        for (k, values) in values.into_iter().enumerate() {
            words[4 * part + k] = values;
        }
        stored |= u64::from(bits) << (32 * part);
    }
    let bits = B::bits(stored);
    B::codes(isa, isa.of_words(words), bits as u32, (bits >> 32) as u32)
}

/// Codes of a tile before they are transposed: (row, column), u8.
#[repr(C, align(64))]
struct Rows([[u8; TILE_COLS]; MAX_LANES]);

/// What makes a [`Format`] of a codebook.
#[derive(Clone, Copy)]
pub(super) struct Coded<B>(pub(super) B);

impl<B: Codebook> Format for Coded<B> {
    type Shape = B::Shape;
    const COLS: usize = TILE_COLS;
    const BITS: u32 = B::BITS;
    const BYTES: usize = B::BYTES;
    const ZERO: i32 = B::ZERO;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        B::scales(isa, rows, col, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let plane = rows.plane(0);
        let first = plane.span(col / TILE_COLS * B::BYTES, B::BYTES);
        let mut codes = Rows([[0; TILE_COLS]; MAX_LANES]);
        for (row, codes) in codes.0.iter_mut().enumerate().take(I::LANES) {
            let block = first.wrapping_add(row * plane.stride());
            for (i, codes) in codes.chunks_exact_mut(4 * I::LANES).enumerate() {
                // SAFETY: `span` has checked that all rows have this block; a vector has 4 · LANES bytes.
                unsafe { isa.store_u(codes.as_mut_ptr().cast(), vector::<I, B>(isa, block, i)) };
            }
        }
        for sub in 0..TILE_COLS / BLOCK {
            for half in 0..2 {
                let at = codes.0.as_ptr().cast::<u8>().wrapping_add(BLOCK * sub + 16 * half);
                // SAFETY: 16 of each row's bytes.
                let words = unsafe { isa.load_transposed(at, TILE_COLS) };
                for (k, words) in words.into_iter().enumerate() {
                    tile.codes_mut(sub).put(isa, 4 * half + k, words);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller.
        unsafe { [vector::<I, B>(isa, p, 2 * group), vector::<I, B>(isa, p, 2 * group + 1)] }
    }
}

/// The little-endian integer at `p`.
///
/// # Safety
/// Its bytes are readable.
#[inline(always)]
unsafe fn u16_at(p: *const u8) -> u16 {
    // SAFETY: by the caller.
    u16::from_le(unsafe { p.cast::<u16>().read_unaligned() })
}

/// As [`u16_at`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn u32_at(p: *const u8) -> u32 {
    // SAFETY: by the caller.
    u32::from_le(unsafe { p.cast::<u32>().read_unaligned() })
}

/// As [`u16_at`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn u64_at(p: *const u8) -> u64 {
    // SAFETY: by the caller.
    u64::from_le(unsafe { p.cast::<u64>().read_unaligned() })
}

/// Byte `i`.
#[inline(always)]
fn byte(word: u32, i: usize) -> usize {
    (word >> (8 * i)) as usize & 255
}

/// Sets the top bit of all bytes so that an even number of their bits are set.
#[inline(always)]
fn even(seven: u64) -> u64 {
    let parity = seven ^ seven >> 4;
    let parity = parity ^ parity >> 2;
    let parity = parity ^ parity >> 1;
    seven | (parity & 0x0101_0101_0101_0101) << 7
}

/// Signs from four times seven bits of each half.
#[inline(always)]
fn signs_of_28_bits(stored: u64) -> u64 {
    let both = |mask: u64| mask | mask << 32;
    let low = stored & both(0x7f) | stored << 1 & both(0x7f00);
    even(low | stored << 2 & both(0x7f_0000) | stored << 3 & both(0x7f00_0000))
}

/// 2s + 1, s being the lowest `BITS` bits of each lane.
#[inline(always)]
fn odd<I: Isa, const BITS: u32>(isa: I, s: I::U) -> I::F {
    let s = isa.and(s, isa.splat_u((1 << BITS) - 1));
    isa.to_f32(isa.or(isa.shl::<1>(s), isa.splat_u(1)))
}

/// Sets the factor of all scales to d · `times`, d being the f16 that blocks begin with.
#[inline(always)]
fn set_factor<I: Isa, const BYTES: usize>(isa: I, block: Block<'_, BYTES>, times: f32, tile: &mut Tile) {
    let d = isa.f16_to_f32(block.words(isa, 0)[0]);
    tile.set_factors(isa, isa.mul(d, isa.splat(times)), isa.splat(0.0));
}

/// Sets scales from nibbles: eight in each of `words`.
#[inline(always)]
fn set_nibbles<I: Isa>(isa: I, words: &[I::U], tile: &mut Tile) {
    for (i, &word) in words.iter().enumerate() {
        for k in 0..8 {
            let s = isa.shr_parts(word, 4 * k, 4 * k);
            tile.set_scale(isa, 8 * i + k as usize, odd::<I, 4>(isa, s));
        }
    }
}

/// IQ2_XXS.
#[derive(Clone, Copy)]
pub(super) struct Iq2Xxs;

impl Codebook for Iq2Xxs {
    type Shape = SuperCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 66;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<66>(col / TILE_COLS * 66);
        set_factor(isa, block, 0.125, tile);
        for pair in 0..4 {
            let [_, first, _, second] = block.words(isa, 2 + 16 * pair);
            tile.set_scale(isa, 2 * pair, odd::<I, 4>(isa, isa.shr::<28>(first)));
            tile.set_scale(isa, 2 * pair + 1, odd::<I, 4>(isa, isa.shr::<28>(second)));
        }
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (codes, signs) = unsafe { (u32_at(p.add(2 + 8 * sub)), u32_at(p.add(6 + 8 * sub))) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            *values = IQ2_XXS[byte(codes, i)];
        }
        (values, signs)
    }

    #[inline(always)]
    fn bits(stored: u64) -> u64 {
        signs_of_28_bits(stored)
    }
}

/// IQ2_XS.
#[derive(Clone, Copy)]
pub(super) struct Iq2Xs;

impl Codebook for Iq2Xs {
    type Shape = WideHalvesCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 74;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<74>(col / TILE_COLS * 74);
        set_factor(isa, block, 0.125, tile);
        let [_, _, first, second] = block.words(isa, 58);
        set_nibbles(isa, &[first, second], tile);
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let codes = unsafe { u64_at(p.add(2 + 8 * sub)) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            *values = IQ2_XS[(codes >> (16 * i)) as usize & 511];
        }
        // Seven bits on top of each code, a byte each.
        let signs = codes >> 9 & 0x007f_007f_007f_007f;
        let signs = (signs | signs >> 8) & 0x0000_ffff_0000_ffff;
        (values, (signs | signs >> 16) as u32)
    }

    #[inline(always)]
    fn bits(stored: u64) -> u64 {
        even(stored)
    }
}

/// IQ2_S.
#[derive(Clone, Copy)]
pub(super) struct Iq2S;

impl Codebook for Iq2S {
    type Shape = WideHalvesCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 82;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<82>(col / TILE_COLS * 82);
        set_factor(isa, block, 0.125, tile);
        let [_, _, first, second] = block.words(isa, 66);
        set_nibbles(isa, &[first, second], tile);
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (low, signs, high) =
            unsafe { (u32_at(p.add(2 + 4 * sub)), u32_at(p.add(34 + 4 * sub)), *p.add(66 + sub)) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            *values = IQ2_S[byte(low, i) | usize::from(high) << (8 - 2 * i) & 0x300];
        }
        (values, signs)
    }
}

/// IQ3_XXS.
#[derive(Clone, Copy)]
pub(super) struct Iq3Xxs;

impl Codebook for Iq3Xxs {
    type Shape = SuperCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 98;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<98>(col / TILE_COLS * 98);
        set_factor(isa, block, 0.25, tile);
        for half in 0..2 {
            for (k, word) in block.words(isa, 66 + 16 * half).into_iter().enumerate() {
                tile.set_scale(isa, 4 * half + k, odd::<I, 4>(isa, isa.shr::<28>(word)));
            }
        }
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (codes, signs) = unsafe { (u64_at(p.add(2 + 8 * sub)), u32_at(p.add(66 + 4 * sub))) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            let first = IQ3_XXS[(codes >> (16 * i)) as usize & 255];
            let second = IQ3_XXS[(codes >> (16 * i + 8)) as usize & 255];
            *values = u64::from(first) | u64::from(second) << 32;
        }
        (values, signs)
    }

    #[inline(always)]
    fn bits(stored: u64) -> u64 {
        signs_of_28_bits(stored)
    }
}

/// Byte `i` of `low` and, above it, bit `i` of `ninth`.
#[inline(always)]
fn nine_bits(low: u64, ninth: u8, i: usize) -> usize {
    (low >> (8 * i)) as usize & 255 | usize::from(ninth) << (8 - i) & 256
}

/// IQ3_S.
#[derive(Clone, Copy)]
pub(super) struct Iq3S;

impl Codebook for Iq3S {
    type Shape = SmallSuperCentred;
    const BITS: u32 = 5;
    const BYTES: usize = 110;
    const ZERO: i32 = 16;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<110>(col / TILE_COLS * 110);
        set_factor(isa, block, 1.0, tile);
        let [.., nibbles] = block.words(isa, 94);
        set_nibbles(isa, &[nibbles], tile);
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (low, ninth, signs) =
            unsafe { (u64_at(p.add(2 + 8 * sub)), *p.add(66 + sub), u32_at(p.add(74 + 4 * sub))) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            let first = IQ3_S[nine_bits(low, ninth, 2 * i)];
            let second = IQ3_S[nine_bits(low, ninth, 2 * i + 1)];
            *values = u64::from(first) | u64::from(second) << 32;
        }
        (values, signs)
    }

    /// 32 − (16 + m) is all bits of 16 + m inverted but the lowest, as magnitudes m are odd.
    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        isa.xor(values, isa.bytes_where(0x1e, low, high))
    }
}

/// IQ1_S.
#[derive(Clone, Copy)]
pub(super) struct Iq1S;

impl Codebook for Iq1S {
    type Shape = SmallSuperCentred;
    const BITS: u32 = 5;
    const BYTES: usize = 50;
    const ZERO: i32 = 16;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<50>(col / TILE_COLS * 50);
        set_factor(isa, block, 0.125, tile);
        for (pair, word) in block.words(isa, 34).into_iter().enumerate() {
            tile.set_scale(isa, 2 * pair, odd::<I, 3>(isa, isa.shr::<12>(word)));
            tile.set_scale(isa, 2 * pair + 1, odd::<I, 3>(isa, isa.shr::<28>(word)));
        }
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (low, high) = unsafe { (u32_at(p.add(2 + 4 * sub)), u16_at(p.add(34 + 2 * sub))) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            *values = IQ1[byte(low, i) | usize::from(high) << 8 >> (3 * i) & 0x700];
        }
        (values, u32::from(high >> 15).wrapping_sub(1))
    }

    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        up(isa, values, low, high)
    }
}

/// IQ1_M.
#[derive(Clone, Copy)]
pub(super) struct Iq1M;

impl Codebook for Iq1M {
    type Shape = HalvesCentred;
    const BITS: u32 = 5;
    const BYTES: usize = 56;
    const ZERO: i32 = 16;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<56>(col / TILE_COLS * 56);
        let [.., first, second] = block.words(isa, 40);
        // Four bits of d on top of each half of a word.
        let mut d = isa.splat_u(0);
        for (i, word) in [first, second].into_iter().enumerate() {
            let low = isa.and(isa.shr::<12>(word), isa.splat_u(15));
            let byte = isa.or(low, isa.and(isa.shr::<24>(word), isa.splat_u(0xf0)));
            d = isa.or(d, isa.shl_all(byte, 8 * i as u32));
        }
        let d = isa.f16_to_f32(d);
        tile.set_factors(isa, isa.mul(d, isa.splat(0.125)), isa.splat(0.0));
        for (i, word) in [first, second].into_iter().enumerate() {
            for k in 0..8 {
                let at = 16 * (k / 4) + 3 * (k % 4);
                let s = isa.shr_parts(word, at, at);
                tile.set_scale(isa, 8 * i + k as usize, odd::<I, 3>(isa, s));
            }
        }
    }

    #[inline(always)]
    unsafe fn sub_block(p: *const u8, sub: usize) -> ([u64; 4], u32) {
        // SAFETY: by the caller.
        let (low, high) = unsafe { (u32_at(p.add(4 * sub)), u16_at(p.add(32 + 2 * sub))) };
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            *values = IQ1[byte(low, i) | usize::from(high) << 8 >> (4 * i) & 0x700];
        }
        (values, u32::from(high))
    }

    /// The top bits of four nibbles, for eight values each.
    #[inline(always)]
    fn bits(stored: u64) -> u64 {
        let bytes = (stored | stored << 8) & 0x00ff_00ff_00ff_00ff;
        let nibbles = (bytes | bytes << 4) & 0x0f0f_0f0f_0f0f_0f0f;
        !((nibbles >> 3 & 0x0101_0101_0101_0101) * 255)
    }

    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        up(isa, values, low, high)
    }
}

/// 16 + 8q + 1 where bits are set, 16 + 8q − 1 elsewhere.
#[inline(always)]
fn up<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
    isa.add_u(values, isa.bytes_where(2, low, high))
}
