//! Decoders of IQ4_NL and IQ4_XS, whose four bits stand for one of sixteen values; layouts in [`crate::quant`]. Codes are
//! the value + 128.

use super::{
    int8::{Ahead, Format, SuperCentred, Tile, WideCentred},
    legacy::{nibble_group, scales},
    tile::{TILE_COLS, TileRows},
};
use crate::{
    cpu::{activations::BLOCK, simd::Isa},
    quant::NON_LINEAR,
};

/// IQ4_NL.
#[derive(Clone, Copy)]
pub(super) struct Iq4Nl;

impl Format for Iq4Nl {
    type Shape = WideCentred;
    const BITS: u32 = 8;
    const BYTES: usize = 18;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        scales::<I, 18>(isa, rows, col, n, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        for sub in 0..n / BLOCK {
            let words = rows.plane(0).block::<18>((col / BLOCK + sub) * 18).words(isa, 2);
            put_codes(isa, tile, sub, words);
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: blocks of this group, by the caller.
        let [first, second] = unsafe { nibble_group::<I, 18>(isa, p, group, 2) };
        [look_up(isa, first), look_up(isa, second)]
    }
}

/// IQ4_XS.
#[derive(Clone, Copy)]
pub(super) struct Iq4Xs;

impl Format for Iq4Xs {
    type Shape = SuperCentred;
    const COLS: usize = TILE_COLS;
    const BITS: u32 = 8;
    const BYTES: usize = 136;
    const ZERO: i32 = 128;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let [d, low, ..] = rows.plane(0).block::<136>(col / TILE_COLS * 136).words(isa, 0);
        tile.set_factors(isa, isa.f16_to_f32(d), isa.splat(0.0));
        let (nibble, top) = (isa.splat_u(15), isa.splat_u(0x30));
        for sub in 0..8 {
            let low = isa.and(isa.shr_parts(low, 4 * sub, 4 * sub), nibble);
            // The high bits begin at bit 16 of the first word; here they go to bits 4 and 5.
            let high = isa.and(isa.shr_parts(d, 12 + 2 * sub, 12 + 2 * sub), top);
            let scale = isa.to_f32(isa.sub_u(isa.or(low, high), isa.splat_u(32)));
            tile.set_scale(isa, sub as usize, scale);
        }
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, _: usize, tile: &mut Tile) {
        let block = rows.plane(0).block::<136>(col / TILE_COLS * 136);
        for sub in 0..TILE_COLS / BLOCK {
            put_codes(isa, tile, sub, block.words(isa, 8 + 16 * sub));
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: sub-blocks of 16 bytes each follow eight bytes of scales, by the caller.
        let [first, second] = unsafe { nibble_group::<I, 16>(isa, p, group, 8) };
        [look_up(isa, first), look_up(isa, second)]
    }
}

/// Codes of a sub-block from its nibbles: elements 0..16 are low ones, 16..32 high ones.
#[inline(always)]
fn put_codes<I: Isa>(isa: I, tile: &mut Tile, sub: usize, words: [I::U; 4]) {
    let low = isa.splat_u(0x0f0f_0f0f);
    let codes = tile.codes_mut(sub);
    for (k, qs) in words.into_iter().enumerate() {
        codes.put(isa, k, look_up(isa, isa.and(qs, low)));
        codes.put(isa, k + 4, look_up(isa, isa.and(isa.shr::<4>(qs), low)));
    }
}

/// The codes of nibbles. Their table is a constant: one made where it is needed would be written and read again each time.
#[inline(always)]
fn look_up<I: Isa>(isa: I, nibbles: I::U) -> I::U {
    isa.lookup(const { &table::<I>() }, nibbles)
}

/// The sixteen codes, stored as [`Isa::WIDE_OFFSET`] says.
const fn table<I: Isa>() -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (NON_LINEAR[i] as u8) ^ 128 ^ I::WIDE_OFFSET;
        i += 1;
    }
    codes
}
