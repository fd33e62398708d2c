//! Decoders of MXFP4 and NVFP4; layouts in [`crate::quant`]. Twice an element is an integer of at most 12, so codes are that
//! integer + 16 and scales are halved.

use super::{
    int8::{Ahead, Centred, Format, HalvesCentred, Tile},
    legacy::heads,
    tile::TileRows,
};
use crate::cpu::{activations::BLOCK, simd::Isa};
use crate::dtype::MatrixScale;
use crate::{TensorView, quant::nvfp4};

/// Blocks with their scale.
#[derive(Clone, Copy)]
pub(super) struct Mxfp4;

impl Format for Mxfp4 {
    type Shape = Centred;
    const BITS: u32 = 5;
    const BYTES: usize = 17;
    const ZERO: i32 = 16;
    const NIBBLES: Option<usize> = Some(1);

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let byte = isa.splat_u(0xff);
        for sub in (0..n / BLOCK).step_by(2) {
            let [word, next] = heads::<I, 17>(isa, rows, col / BLOCK + sub, sub + 1 < n / BLOCK);
            tile.set_scale(isa, sub, half_scale(isa, isa.and(word, byte)));
            if sub + 1 < n / BLOCK {
                tile.set_scale(isa, sub + 1, half_scale(isa, isa.and(isa.shr::<8>(next), byte)));
            }
        }
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let low = isa.splat_u(0x0f0f_0f0f);
        for sub in 0..n / BLOCK {
            let block = rows.plane(0).block::<17>((col / BLOCK + sub) * 17);
            let codes = tile.codes_mut(sub);
            for (k, qs) in block.words(isa, 1).into_iter().enumerate() {
                codes.put(isa, k, code(isa, isa.and(qs, low)));
                codes.put(isa, k + 4, code(isa, isa.and(isa.shr::<4>(qs), low)));
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        let parts = I::LANES / 8;
        let mut out = [isa.splat_u(0); 2];
        for (v, out) in out.iter_mut().enumerate() {
            // SAFETY: blocks of this group, by the caller.
            let nibbles = unsafe {
                let block = p.add((2 * group + v) * parts * Self::BYTES);
                isa.load_low_high_nibbles(block.add(1), block.add((parts - 1) * Self::BYTES + 1))
            };
            *out = code(isa, nibbles);
        }
        out
    }

    #[inline(always)]
    fn of_nibbles<I: Isa>(isa: I, nibbles: I::U) -> I::U {
        code(isa, nibbles)
    }
}

/// Scales in a plane of their own.
#[derive(Clone, Copy)]
pub(super) struct Mxfp4Planes;

impl Format for Mxfp4Planes {
    type Shape = Centred;
    const BITS: u32 = 5;
    const BYTES: usize = 16;
    const ZERO: i32 = 16;
    const NIBBLES: Option<usize> = Some(0);
    const NEIGHBOURS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let byte = isa.splat_u(0xff);
        let scales = rows.plane(1).words_of(isa, col / BLOCK, n / BLOCK);
        for sub in 0..n / BLOCK {
            let word = scales[sub / 4];
            let scale = match sub % 4 {
                0 => isa.and(word, byte),
                1 => isa.and(isa.shr::<8>(word), byte),
                2 => isa.and(isa.shr::<16>(word), byte),
                _ => isa.shr::<24>(word),
            };
            tile.set_scale(isa, sub, half_scale(isa, scale));
        }
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let low_half = isa.splat_u(0xffff);
        for sub in 0..n / BLOCK {
            let words = rows.plane(0).block::<16>(col / 2 + 16 * sub).words(isa, 0);
            let codes = tile.codes_mut(sub);
            for (k, word) in words.into_iter().enumerate() {
                codes.put(isa, 2 * k, code(isa, spread(isa, isa.and(word, low_half))));
                codes.put(isa, 2 * k + 1, code(isa, spread(isa, isa.shr::<16>(word))));
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: the 4 · LANES bytes of this group, by the caller.
        let (first, second) = unsafe {
            let p = p.add(4 * I::LANES * group);
            (isa.load_nibbles(p), isa.load_nibbles(p.add(2 * I::LANES)))
        };
        // Not by a closure: `map` of an array would call it, and what it calls, one by one.
        [code(isa, first), code(isa, second)]
    }

    #[inline(always)]
    fn of_nibbles<I: Isa>(isa: I, nibbles: I::U) -> I::U {
        code(isa, nibbles)
    }
}

/// NVFP4: codes as in [`Mxfp4Planes`], scales of 16 columns and a factor. The product of a scale, which has four bits, and
/// the integer of its columns is exact.
#[derive(Clone, Copy)]
pub(super) struct Nvfp4 {
    /// Half of what scales are multiplied by.
    half_factor: f32,
}

impl Nvfp4 {
    /// For the weights `w`, which have rows.
    pub(super) fn new(w: TensorView<'_>, matrix: MatrixScale) -> Self {
        Self { half_factor: 0.5 * nvfp4::factor(matrix, w.row(2, 0)) }
    }
}

impl Format for Nvfp4 {
    type Shape = HalvesCentred;
    const BITS: u32 = Mxfp4Planes::BITS;
    const BYTES: usize = Mxfp4Planes::BYTES;
    const ZERO: i32 = Mxfp4Planes::ZERO;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let byte = isa.splat_u(0xff);
        let words = rows.plane(1).words_of(isa, col / 16, n / 16);
        for i in 0..n / 16 {
            let word = words[i / 4];
            let code = match i % 4 {
                0 => isa.and(word, byte),
                1 => isa.and(isa.shr::<8>(word), byte),
                2 => isa.and(isa.shr::<16>(word), byte),
                _ => isa.shr::<24>(word),
            };
            tile.set_scale(isa, i, e4m3(isa, code));
        }
        tile.set_factors(isa, isa.splat(self.half_factor), isa.splat(0.0));
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        Mxfp4Planes.codes(isa, rows, col, n, tile);
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, ahead: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller; the layouts are the same.
        unsafe { Mxfp4Planes.group(isa, p, ahead, group) }
    }
}

/// The values of codes of 8-bit floats: their bits as those of an f32 that is 2^120 times too small, subnormal ones included;
/// of the last code, all bits: NaN.
#[inline(always)]
fn e4m3<I: Isa>(isa: I, code: I::U) -> I::F {
    let magnitude = isa.and(code, isa.splat_u(0x7f));
    let small = isa.of_bits(isa.shl::<20>(magnitude));
    let value = isa.bits(isa.mul(small, isa.splat(f32::from_bits(247 << 23))));
    let is_last = isa.sub_u(isa.splat_u(0), isa.shr::<7>(isa.add_u(magnitude, isa.splat_u(1))));
    let sign = isa.shl::<24>(isa.and(code, isa.splat_u(0x80)));
    isa.of_bits(isa.or(isa.or(value, is_last), sign))
}

/// 2^(s − 128); of 255, all bits: NaN.
#[inline(always)]
fn half_scale<I: Isa>(isa: I, s: I::U) -> I::F {
    // Twice as much, which of 0 is subnormal.
    let twice = isa.max_i(isa.shl::<23>(s), isa.splat_u(1 << 22));
    let scale = isa.mul(isa.of_bits(twice), isa.splat(0.5));
    let is_last = isa.sub_u(isa.splat_u(0), isa.shr::<8>(isa.add_u(s, isa.splat_u(1))));
    isa.of_bits(isa.or(isa.bits(scale), is_last))
}

/// Four nibbles to four bytes.
#[inline(always)]
fn spread<I: Isa>(isa: I, v: I::U) -> I::U {
    let v = isa.and(isa.or(v, isa.shl::<8>(v)), isa.splat_u(0x00ff_00ff));
    isa.and(isa.or(v, isa.shl::<4>(v)), isa.splat_u(0x0f0f_0f0f))
}

/// In every byte, the element of a nibble s e e m as 16 + twice its value.
#[inline(always)]
fn code<I: Isa>(isa: I, nibbles: I::U) -> I::U {
    isa.lookup(&CODES, nibbles)
}

/// [`code`] of every nibble.
const CODES: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];
