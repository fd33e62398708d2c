//! Decoders of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0; layouts in [`crate::quant`].

use std::marker::PhantomData;

use super::{
    int8::{Ahead, Biased, Centred, Format, Shape, Tile, WideCentred},
    tile::TileRows,
};
use crate::cpu::{activations::BLOCK, simd::Isa};

/// Blocks of `BYTES` bytes: a scale; a bias, if `S` has them; four bytes of fifth bits, if `BITS` is 5; 16 bytes of nibbles.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<S, const BITS: u32, const BYTES: usize>(PhantomData<S>);

/// Q4_0.
pub(super) const Q4: Nibbles<Centred, 4, 18> = Nibbles(PhantomData);
/// Q4_1.
pub(super) const Q41: Nibbles<Biased, 4, 20> = Nibbles(PhantomData);
/// Q5_0.
pub(super) const Q5: Nibbles<Centred, 5, 22> = Nibbles(PhantomData);
/// Q5_1.
pub(super) const Q51: Nibbles<Biased, 5, 24> = Nibbles(PhantomData);

impl<S: Shape, const BITS: u32, const BYTES: usize> Nibbles<S, BITS, BYTES> {
    /// Where fifth bits or, if there are none, nibbles begin.
    const CODES: usize = if S::BIAS { 4 } else { 2 };
}

impl<S: Shape, const BITS: u32, const BYTES: usize> Format for Nibbles<S, BITS, BYTES> {
    type Shape = S;
    const BITS: u32 = BITS;
    const BYTES: usize = BYTES;
    const ZERO: i32 = if S::BIAS { 0 } else { 1 << (BITS - 1) };
    const NIBBLES: Option<usize> = if BITS == 4 { Some(Self::CODES) } else { None };

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        if !S::BIAS {
            return scales::<I, BYTES>(isa, rows, col, n, tile);
        }
        for sub in 0..n / BLOCK {
            let word = rows.plane(0).block::<BYTES>((col / BLOCK + sub) * BYTES).words(isa, 0)[0];
            let [scale, bias] = isa.f16_pairs_to_f32(word);
            tile.set_scale(isa, sub, scale);
            tile.set_bias(isa, sub, bias);
        }
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let low = isa.splat_u(0x0f0f_0f0f);
        for sub in 0..n / BLOCK {
            let block = rows.plane(0).block::<BYTES>((col / BLOCK + sub) * BYTES);
            let codes = tile.codes_mut(sub);
            if BITS == 4 {
                for (k, qs) in block.words(isa, Self::CODES).into_iter().enumerate() {
                    codes.put(isa, k, isa.and(qs, low));
                    codes.put(isa, k + 4, isa.and(isa.shr::<4>(qs), low));
                }
                continue;
            }
            let mut high = block.words(isa, Self::CODES)[0];
            let qs = block.words(isa, Self::CODES + 4);
            // Words 0..4 are low nibbles of qs, words 4..8 high ones; their fifth bits follow each other.
            for (k, qs) in qs.into_iter().enumerate() {
                codes.put(isa, k, isa.or(isa.and(qs, low), fifth_bits(isa, high)));
                high = isa.shr::<4>(high);
            }
            for (k, qs) in qs.into_iter().enumerate() {
                codes.put(isa, k + 4, isa.or(isa.and(isa.shr::<4>(qs), low), fifth_bits(isa, high)));
                high = isa.shr::<4>(high);
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        if BITS == 4 {
            // SAFETY: blocks of this group, by the caller.
            return unsafe { nibble_group::<I, BYTES>(isa, p, group, Self::CODES) };
        }
        let parts = I::LANES / 8;
        let mut out = [isa.splat_u(0); 2];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: blocks of this group, by the caller.
            unsafe {
                let low = p.add((2 * group + v) * parts * BYTES + Self::CODES);
                let high = low.add((parts - 1) * BYTES);
                let fifth = |bits: *const u8| u32::from_le(bits.cast::<u32>().read_unaligned());
                let nibbles = isa.load_low_high_nibbles(low.add(4), high.add(4));
                *out = isa.or(nibbles, isa.bytes_where(16, fifth(low), fifth(high)));
            }
        }
        out
    }
}

/// [`Format::group`] of blocks of `BYTES` bytes with 16 bytes of nibbles from byte `at` on.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn nibble_group<I: Isa, const BYTES: usize>(
    isa: I,
    p: *const u8,
    group: usize,
    at: usize,
) -> [I::U; 2] {
    let parts = I::LANES / 8;
    let mut out = [isa.splat_u(0); 2];
    for (v, out) in out.iter_mut().enumerate() {
        // SAFETY: blocks of this group, by the caller.
        *out = unsafe {
            let block = p.add((2 * group + v) * parts * BYTES + at);
            isa.load_low_high_nibbles(block, block.add((parts - 1) * BYTES))
        };
    }
    out
}

/// Bit b < 4 of each lane becomes bit 4 of its byte b; other bits are ignored.
#[inline(always)]
fn fifth_bits<I: Isa>(isa: I, bits: I::U) -> I::U {
    let bits = isa.and(bits, isa.splat_u(15));
    let spread = isa.or(
        isa.or(isa.shl::<4>(bits), isa.shl::<11>(bits)),
        isa.or(isa.shl::<18>(bits), isa.shl::<25>(bits)),
    );
    isa.and(spread, isa.splat_u(0x1010_1010))
}

/// Q8_0.
#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Format for Q8 {
    type Shape = WideCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 34;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        scales::<I, 34>(isa, rows, col, n, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        // Signed to unsigned by flipping the top bit, unless the level wants it signed.
        let flip = isa.splat_u(u32::from(128 ^ I::WIDE_OFFSET) * 0x0101_0101);
        for sub in 0..n / BLOCK {
            let block = rows.plane(0).block::<34>((col / BLOCK + sub) * 34);
            let codes = tile.codes_mut(sub);
            for half in 0..2 {
                for (k, qs) in block.words(isa, 2 + 16 * half).into_iter().enumerate() {
                    codes.put(isa, 4 * half + k, isa.xor(qs, flip));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        let flip = isa.splat_u(u32::from(128 ^ I::WIDE_OFFSET) * 0x0101_0101);
        let parts = I::LANES / 8;
        let mut out = [isa.splat_u(0); 2];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: blocks of this group, by the caller.
            let codes = unsafe {
                let block = p.add((2 * group + v) * parts * Self::BYTES);
                isa.load_parts(block.add(2), block.add((parts - 1) * Self::BYTES + 2))
            };
            *out = isa.xor(codes, flip);
        }
        out
    }
}

/// Scales of blocks of `BYTES` bytes that begin with them.
#[inline(always)]
pub(super) fn scales<I: Isa, const BYTES: usize>(
    isa: I,
    rows: &TileRows<'_>,
    col: usize,
    n: usize,
    tile: &mut Tile,
) {
    for sub in (0..n / BLOCK).step_by(if BYTES == 18 { 2 } else { 1 }) {
        let two = BYTES == 18 && sub + 1 < n / BLOCK;
        let [word, next] = heads::<I, BYTES>(isa, rows, col / BLOCK + sub, two);
        tile.set_scale(isa, sub, isa.f16_to_f32(word));
        if two {
            tile.set_scale(isa, sub + 1, isa.f16_to_f32(isa.shr::<16>(next)));
        }
    }
}

/// The words that block `block` of each row begins with and, if there are `two`, those 16 bytes further on, where the next
/// block begins a little later.
#[inline(always)]
pub(super) fn heads<I: Isa, const BYTES: usize>(
    isa: I,
    rows: &TileRows<'_>,
    block: usize,
    two: bool,
) -> [I::U; 2] {
    const { assert!(2 * BYTES >= 32, "words within two blocks") }
    if two {
        rows.plane(0).block::<32>(block * BYTES).words_apart(isa)
    } else {
        [rows.plane(0).block::<BYTES>(block * BYTES).words(isa, 0)[0], isa.splat_u(0)]
    }
}
