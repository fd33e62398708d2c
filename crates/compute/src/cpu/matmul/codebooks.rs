//! Decoders of IQ1_S to IQ3_S, a code of which stands for four or eight values at once; layouts in [`crate::quant`].
//!
//! All values are integers: magnitudes of 4 to 62 with signs (IQ2, IQ3_XXS), odd ones below 16 with signs (IQ3_S), and
//! 8q ± 1 with q of −1, 0, 1 (IQ1), which are eight times what its definition shifts by ⅛. Their scales are odd integers
//! times d/8, d/4 or d. Entries of codebooks are looked up one by one, as words of eight bytes; only signs and shifts
//! are of whole vectors. So tiles are decoded row by row, as for a single token, and transposed. Of a single token the
//! activations get the signs.

use super::{
    int8::{
        Ahead, Format, HalvesCentred, SUBS, Shape, SmallSuperCentred, SuperCentred, Tile, WideHalvesCentred,
    },
    tile::{Block, TILE_COLS, TileRows},
};
use crate::{
    cpu::{
        activations::BLOCK,
        simd::{Isa, MAX_LANES, Pairs},
    },
    quant::codebook,
};

/// Of codes for eight values: magnitudes.
static IQ2_XXS: [u64; 256] = entries_of_eight(codebook::IQ2_XXS, 1, 0);
static IQ2_XS: [u64; 512] = entries_of_eight(codebook::IQ2_XS, 1, 0);
static IQ2_S: [u64; 1024] = entries_of_eight(codebook::IQ2_S, 1, 0);
/// 8q + 15.
static IQ1: [u64; 2048] = entries_of_eight(codebook::IQ1, 8, 15);
/// Of codes for four values: magnitudes.
static IQ3_XXS: [u32; 256] = entries_of_four(codebook::IQ3_XXS);
static IQ3_S: [u32; 512] = entries_of_four(codebook::IQ3_S);

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

const fn entries_of_four<const N: usize>(book: &[[u8; 4]]) -> [u32; N] {
    let mut entries = [0; N];
    let mut i = 0;
    while i < N {
        entries[i] = u32::from_le_bytes(book[i]);
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

    /// As in [`Format`].
    const SIGNS: bool = false;
    /// As in [`Format`].
    const SHIFTS: bool = false;

    /// What is found of the block at `p` at once: numbers of entries, where they are no whole bytes, and bits for
    /// [`Codebook::codes`].
    ///
    /// # Safety
    /// The block is readable.
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead;

    /// Eight values of the codebook a word: of sub-block `sub` of 32 columns of the block at `p`, of which `ahead` is.
    ///
    /// # Safety
    /// The block is readable, and `ahead` is what [`Codebook::ahead`] has found.
    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, p: *const u8, ahead: &Ahead, sub: usize) -> [u64; 4] {
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            // SAFETY: by the caller.
            let [first, second] = unsafe { Self::two(isa, p, ahead, sub, i) };
            *values = u64::from(first) | u64::from(second) << 32;
        }
        values
    }

    /// Entries have four values: [`Codebook::two`] is there instead of [`Codebook::values`].
    const FOURS: bool = false;

    /// Word `i` of [`Codebook::values`] as two of four values.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn two<I: Isa>(_isa: I, _p: *const u8, _ahead: &Ahead, _sub: usize, _i: usize) -> [u32; 2] {
        [0; 2]
    }

    /// Codes from the values of a codebook and bits for each: of magnitudes and signs.
    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        let codes = isa.negate_where(values, low, high);
        if I::WIDE_OFFSET == 0 { isa.xor(codes, isa.splat_u(0x8080_8080)) } else { codes }
    }
}

/// Vector `i` of the columns of the block at `p`: values of consecutive columns.
///
/// # Safety
/// The block is readable.
#[inline(always)]
unsafe fn values<I: Isa, B: Codebook>(isa: I, p: *const u8, ahead: &Ahead, i: usize) -> I::U {
    let parts = I::LANES / 8;
    if B::FOURS
        && let Some(pairs) = isa.pairs()
    {
        let mut words = [[0; 2]; 4];
        for (k, words) in words.iter_mut().enumerate() {
            // SAFETY: by the caller.
            *words = unsafe { B::two(isa, p, ahead, i, k) };
        }
        return pairs.of_words(words);
    }
    let mut words = [0; MAX_LANES / 2];
    for part in 0..parts {
        // SAFETY: by the caller.
        for (k, values) in unsafe { B::values(isa, p, ahead, i * parts + part) }.into_iter().enumerate() {
            words[4 * part + k] = values;
        }
    }
    isa.of_words(words)
}

/// The same as codes.
///
/// # Safety
/// The block is readable.
#[inline(always)]
unsafe fn codes<I: Isa, B: Codebook>(isa: I, p: *const u8, ahead: &Ahead, i: usize) -> I::U {
    let first = i * (I::LANES / 8);
    let high = if I::LANES == 16 { ahead.bits[first + 1] } else { 0 };
    // SAFETY: by the caller.
    B::codes(isa, unsafe { values::<I, B>(isa, p, ahead, i) }, ahead.bits[first], high)
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
    const AHEAD: bool = true;
    const SIGNS: bool = B::SIGNS;
    const SHIFTS: bool = B::SHIFTS;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        B::scales(isa, rows, col, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let plane = rows.plane(0);
        let first = plane.span(col / TILE_COLS * B::BYTES, B::BYTES);
        let mut decoded = Rows([[0; TILE_COLS]; MAX_LANES]);
        for (row, decoded) in decoded.0.iter_mut().enumerate().take(I::LANES) {
            let block = first.wrapping_add(row * plane.stride());
            // SAFETY: `span` has checked that all rows have this block.
            let ahead = unsafe { B::ahead(isa, block) };
            for (i, decoded) in decoded.chunks_exact_mut(4 * I::LANES).enumerate() {
                // SAFETY: as above; a vector has 4 · LANES bytes.
                unsafe { isa.store_u(decoded.as_mut_ptr().cast(), codes::<I, B>(isa, block, &ahead, i)) };
            }
        }
        for sub in 0..TILE_COLS / BLOCK {
            for half in 0..2 {
                let at = decoded.0.as_ptr().cast::<u8>().wrapping_add(BLOCK * sub + 16 * half);
                // SAFETY: 16 of each row's bytes.
                let words = unsafe { isa.load_transposed(at, TILE_COLS) };
                for (k, words) in words.into_iter().enumerate() {
                    tile.codes_mut(sub).put(isa, 4 * half + k, words);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(self, isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        unsafe { B::ahead(isa, p) }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, ahead: &Ahead, group: usize) -> [I::U; 2] {
        let (first, second) = (2 * group, 2 * group + 1);
        // SAFETY: by the caller.
        unsafe {
            if B::SIGNS || B::SHIFTS {
                [values::<I, B>(isa, p, ahead, first), values::<I, B>(isa, p, ahead, second)]
            } else {
                [codes::<I, B>(isa, p, ahead, first), codes::<I, B>(isa, p, ahead, second)]
            }
        }
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

/// The entry of that number. Compilers would make gathers of several, which take longer.
///
/// # Safety
/// There is one.
#[inline(always)]
unsafe fn entry<I: Isa, T: Copy>(isa: I, book: &[T], number: usize) -> T {
    // SAFETY: by the caller.
    unsafe { *book.get_unchecked(isa.scalar(number)) }
}

/// Eight words from `p`, in the lowest eight lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn eight_words<I: Isa>(isa: I, p: *const u8) -> I::U {
    // SAFETY: by the caller.
    unsafe { isa.load_parts(p, p) }
}

/// The lowest eight lanes.
#[inline(always)]
fn eight_lanes<I: Isa>(isa: I, v: I::U) -> [u32; SUBS] {
    let mut lanes = [0; MAX_LANES];
    // SAFETY: LANES ≤ MAX_LANES.
    unsafe { isa.store_u(lanes.as_mut_ptr(), v) };
    let [a, b, c, d, e, f, g, h, ..] = lanes;
    [a, b, c, d, e, f, g, h]
}

/// Of each sub-block, numbers of four entries: the bytes of `low` and, above them, the bits of `high` that are set in `more`.
#[inline(always)]
fn four_numbers<I: Isa>(isa: I, low: I::U, high: [I::U; 4], more: u32) -> [[u32; SUBS]; 4] {
    let (byte, more) = (isa.splat_u(0xff), isa.splat_u(more));
    let [a, b, c, d] = high;
    let first = isa.or(isa.and(low, byte), isa.and(a, more));
    let second = isa.or(isa.and(isa.shr::<8>(low), byte), isa.and(b, more));
    let third = isa.or(isa.and(isa.shr::<16>(low), byte), isa.and(c, more));
    let fourth = isa.or(isa.shr::<24>(low), isa.and(d, more));
    [eight_lanes(isa, first), eight_lanes(isa, second), eight_lanes(isa, third), eight_lanes(isa, fourth)]
}

/// [`Ahead`] of four entries a sub-block.
#[inline(always)]
fn ahead_of_four(numbers: [[u32; SUBS]; 4], bits: [u32; SUBS]) -> Ahead {
    let [a, b, c, d] = numbers;
    let mut ahead = Ahead { bits, ..Ahead::NOTHING };
    (ahead.numbers[0], ahead.numbers[1], ahead.numbers[2], ahead.numbers[3]) = (a, b, c, d);
    ahead
}

/// Sets the top bit of all bytes, whose others are `seven`, so that an even number of their bits are set.
#[inline(always)]
fn even<I: Isa>(isa: I, seven: I::U) -> I::U {
    /// The top bit of an odd number of bits.
    const ODD: [u8; 16] = [0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0];
    let nibble = isa.splat_u(0x0f0f_0f0f);
    let low = isa.lookup(&ODD, isa.and(seven, nibble));
    let high = isa.lookup(&ODD, isa.and(isa.shr::<4>(seven), nibble));
    isa.or(seven, isa.xor(low, high))
}

/// Signs from four times seven bits.
#[inline(always)]
fn signs_of_28_bits<I: Isa>(isa: I, v: I::U) -> I::U {
    let first = isa.and(v, isa.splat_u(0x7f));
    let second = isa.and(isa.shl::<1>(v), isa.splat_u(0x7f00));
    let third = isa.and(isa.shl::<2>(v), isa.splat_u(0x7f_0000));
    let fourth = isa.and(isa.shl::<3>(v), isa.splat_u(0x7f00_0000));
    even(isa, isa.or(isa.or(first, second), isa.or(third, fourth)))
}

/// The top seven bits of both halves, a byte each.
#[inline(always)]
fn signs_of_two_codes<I: Isa>(isa: I, v: I::U) -> I::U {
    let first = isa.and(isa.shr::<9>(v), isa.splat_u(0x7f));
    isa.or(first, isa.and(isa.shr::<17>(v), isa.splat_u(0x7f00)))
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
    const SIGNS: bool = true;

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
    unsafe fn values<I: Isa>(isa: I, p: *const u8, _: &Ahead, sub: usize) -> [u64; 4] {
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            // SAFETY: by the caller; there are 256 entries.
            *values = unsafe { entry(isa, &IQ2_XXS, usize::from(*p.add(2 + 8 * sub + i))) };
        }
        values
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let [_, signs] = unsafe { isa.load_eight_pairs(p.add(2)) };
        Ahead { bits: eight_lanes(isa, signs_of_28_bits(isa, signs)), ..Ahead::NOTHING }
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
    const SIGNS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<74>(col / TILE_COLS * 74);
        set_factor(isa, block, 0.125, tile);
        let [_, _, first, second] = block.words(isa, 58);
        set_nibbles(isa, &[first, second], tile);
    }

    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, p: *const u8, _: &Ahead, sub: usize) -> [u64; 4] {
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            // SAFETY: by the caller; there are 512 entries.
            *values = unsafe { entry(isa, &IQ2_XS, usize::from(u16_at(p.add(2 + 8 * sub + 2 * i))) & 511) };
        }
        values
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let [first, second] = unsafe { isa.load_eight_pairs(p.add(2)) };
        let (first, second) = (signs_of_two_codes(isa, first), signs_of_two_codes(isa, second));
        let signs = even(isa, isa.or(first, isa.shl::<16>(second)));
        Ahead { bits: eight_lanes(isa, signs), ..Ahead::NOTHING }
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
    const SIGNS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<82>(col / TILE_COLS * 82);
        set_factor(isa, block, 0.125, tile);
        let [_, _, first, second] = block.words(isa, 66);
        set_nibbles(isa, &[first, second], tile);
    }

    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, _: *const u8, ahead: &Ahead, sub: usize) -> [u64; 4] {
        let mut values = [0; 4];
        for (i, values) in values.iter_mut().enumerate() {
            // SAFETY: there are 1,024 entries, and numbers have ten bits.
            *values = unsafe { entry(isa, &IQ2_S, ahead.numbers[i][sub] as usize) };
        }
        values
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let (low, high, signs) = unsafe {
            (eight_words(isa, p.add(2)), isa.load_eight_u8(p.add(66)), eight_words(isa, p.add(34)))
        };
        let high = [isa.shl::<8>(high), isa.shl::<6>(high), isa.shl::<4>(high), isa.shl::<2>(high)];
        ahead_of_four(four_numbers(isa, low, high, 0x300), eight_lanes(isa, signs))
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
    const SIGNS: bool = true;
    const FOURS: bool = true;

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
    unsafe fn two<I: Isa>(isa: I, p: *const u8, _: &Ahead, sub: usize, i: usize) -> [u32; 2] {
        // SAFETY: by the caller; there are 256 entries.
        unsafe {
            let numbers = p.add(2 + 8 * sub + 2 * i);
            let (first, second) = (usize::from(*numbers), usize::from(*numbers.add(1)));
            [entry(isa, &IQ3_XXS, first), entry(isa, &IQ3_XXS, second)]
        }
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let signs = unsafe { eight_words(isa, p.add(66)) };
        Ahead { bits: eight_lanes(isa, signs_of_28_bits(isa, signs)), ..Ahead::NOTHING }
    }
}

/// IQ3_S.
#[derive(Clone, Copy)]
pub(super) struct Iq3S;

impl Codebook for Iq3S {
    type Shape = SmallSuperCentred;
    const BITS: u32 = 5;
    const BYTES: usize = 110;
    const ZERO: i32 = 16;
    const SIGNS: bool = true;
    const FOURS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<110>(col / TILE_COLS * 110);
        set_factor(isa, block, 1.0, tile);
        let [.., nibbles] = block.words(isa, 94);
        set_nibbles(isa, &[nibbles], tile);
    }

    #[inline(always)]
    unsafe fn two<I: Isa>(isa: I, _: *const u8, ahead: &Ahead, sub: usize, i: usize) -> [u32; 2] {
        let (first, second) = (ahead.numbers[2 * i][sub] as usize, ahead.numbers[2 * i + 1][sub] as usize);
        // SAFETY: there are 512 entries, and numbers have nine bits.
        unsafe { [entry(isa, &IQ3_S, first), entry(isa, &IQ3_S, second)] }
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let ([low, next], ninth, signs) = unsafe {
            (isa.load_eight_pairs(p.add(2)), isa.load_eight_u8(p.add(66)), eight_words(isa, p.add(74)))
        };
        let first = [isa.shl::<8>(ninth), isa.shl::<7>(ninth), isa.shl::<6>(ninth), isa.shl::<5>(ninth)];
        let last = [isa.shl::<4>(ninth), isa.shl::<3>(ninth), isa.shl::<2>(ninth), isa.shl::<1>(ninth)];
        let [a, b, c, d] = four_numbers(isa, low, first, 0x100);
        let [e, f, g, h] = four_numbers(isa, next, last, 0x100);
        Ahead { numbers: [a, b, c, d, e, f, g, h], bits: eight_lanes(isa, signs) }
    }

    /// 16 + m; 32 − (16 + m) is all of its bits inverted but the lowest, as magnitudes m are odd.
    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        let codes = isa.xor(values, isa.splat_u(0x1010_1010));
        isa.xor(codes, isa.bytes_where(0x1e, low, high))
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
    const SHIFTS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(isa: I, rows: &TileRows<'_>, col: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<50>(col / TILE_COLS * 50);
        set_factor(isa, block, 0.125, tile);
        for (pair, word) in block.words(isa, 34).into_iter().enumerate() {
            for (sub, word) in [(2 * pair, isa.shl::<16>(word)), (2 * pair + 1, word)] {
                tile.set_scale(isa, sub, odd::<I, 3>(isa, isa.shr::<28>(word)));
                // What codes are short of where they are shifted upwards.
                let up = isa.sub_u(isa.splat_u(1), isa.shr::<31>(word));
                tile.set_bias(isa, sub, isa.to_f32(isa.shl::<1>(up)));
            }
        }
    }

    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, _: *const u8, ahead: &Ahead, sub: usize) -> [u64; 4] {
        // SAFETY: [`four_numbers`] has set eight bits and three.
        unsafe { iq1_values(isa, ahead, sub) }
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let (low, high) = unsafe { (eight_words(isa, p.add(2)), isa.load_eight_u16(p.add(34).cast())) };
        let up = isa.sub_u(isa.shr::<15>(high), isa.splat_u(1));
        let high = [isa.shl::<8>(high), isa.shl::<5>(high), isa.shl::<2>(high), isa.shr::<1>(high)];
        ahead_of_four(four_numbers(isa, low, high, 0x700), eight_lanes(isa, up))
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
    unsafe fn values<I: Isa>(isa: I, _: *const u8, ahead: &Ahead, sub: usize) -> [u64; 4] {
        // SAFETY: [`four_numbers`] has set eight bits and three.
        unsafe { iq1_values(isa, ahead, sub) }
    }

    #[inline(always)]
    unsafe fn ahead<I: Isa>(isa: I, p: *const u8) -> Ahead {
        // SAFETY: by the caller.
        let (low, high) = unsafe { (eight_words(isa, p), isa.load_eight_u16(p.add(32).cast())) };
        // The top bits of four nibbles, for eight values each.
        let bytes = isa.and(isa.or(high, isa.shl::<8>(high)), isa.splat_u(0x00ff_00ff));
        let nibbles = isa.or(bytes, isa.shl::<4>(bytes));
        let down = isa.and(isa.shr::<3>(nibbles), isa.splat_u(0x0101_0101));
        let up = isa.xor(isa.sub_u(isa.shl::<8>(down), down), isa.splat_u(u32::MAX));
        let high = [isa.shl::<8>(high), isa.shl::<4>(high), high, isa.shr::<4>(high)];
        ahead_of_four(four_numbers(isa, low, high, 0x700), eight_lanes(isa, up))
    }

    #[inline(always)]
    fn codes<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
        up(isa, values, low, high)
    }
}

/// 15 + 8q.
///
/// # Safety
/// Numbers have eleven bits.
#[inline(always)]
unsafe fn iq1_values<I: Isa>(isa: I, ahead: &Ahead, sub: usize) -> [u64; 4] {
    let mut values = [0; 4];
    for (i, values) in values.iter_mut().enumerate() {
        // SAFETY: there are 2,048 entries; numbers by the caller.
        *values = unsafe { entry(isa, &IQ1, ahead.numbers[i][sub] as usize) };
    }
    values
}

/// 16 + 8q + 1 where bits are set, 16 + 8q − 1 elsewhere.
#[inline(always)]
fn up<I: Isa>(isa: I, values: I::U, low: u32, high: u32) -> I::U {
    isa.add_u(values, isa.bytes_where(2, low, high))
}
