//! Decoders of MLX affine weights; layouts in [`crate::quant`].

use super::{
    int8::{Ahead, Biased, Format, Tile, WideBiased},
    tile::TileRows,
};
use crate::{
    Half,
    cpu::{activations::BLOCK, simd::Isa},
};

/// Groups of scales and biases.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    /// Columns of a group: 32, 64 or 128, or more than any row has.
    pub(super) cols: usize,
    pub(super) half: Half,
}

impl Groups {
    /// Scales and biases of columns `col`..`col` + `n`, repeated for every 32.
    #[inline(always)]
    fn decode<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let (at, len) = (2 * (col / self.cols), 2 * n.div_ceil(self.cols));
        let scales = self.pairs(isa, rows.plane(1).words_of(isa, at, len));
        let biases = self.pairs(isa, rows.plane(2).words_of(isa, at, len));
        for sub in 0..n / BLOCK {
            let group = sub * BLOCK / self.cols;
            tile.set_scale(isa, sub, scales[group]);
            tile.set_bias(isa, sub, biases[group]);
        }
    }

    /// The two 16-bit floats of each word.
    #[inline(always)]
    pub(super) fn pairs<I: Isa>(self, isa: I, words: [I::U; 4]) -> [I::F; 8] {
        let mut out = [isa.splat(0.0); 8];
        for (i, word) in words.into_iter().enumerate() {
            let (low, high) = match self.half {
                Half::F16 => (isa.f16_to_f32(word), isa.f16_to_f32(isa.shr::<16>(word))),
                Half::BF16 => {
                    let high = isa.and(word, isa.splat_u(0xffff_0000));
                    (isa.of_bits(isa.shl::<16>(word)), isa.of_bits(high))
                }
            };
            out[2 * i] = low;
            out[2 * i + 1] = high;
        }
        out
    }
}

/// 4 bits.
#[derive(Clone, Copy)]
pub(super) struct Affine4(pub(super) Groups);

impl Affine4 {
    /// With groups of `cols` columns.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        Self(Groups { cols: cols.into(), half })
    }
}

impl Format for Affine4 {
    type Shape = Biased;
    const BITS: u32 = 4;
    const BYTES: usize = 16;
    const NIBBLES: Option<usize> = Some(0);
    const NEIGHBOURS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        self.0.decode(isa, rows, col, n, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let low_half = isa.splat_u(0xffff);
        for sub in 0..n / BLOCK {
            let words = rows.plane(0).block::<16>(col / 2 + 16 * sub).words(isa, 0);
            let codes = tile.codes_mut(sub);
            for (k, word) in words.into_iter().enumerate() {
                codes.put(isa, 2 * k, spread(isa, isa.and(word, low_half)));
                codes.put(isa, 2 * k + 1, spread(isa, isa.shr::<16>(word)));
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: the 4 · LANES bytes of this group, by the caller.
        unsafe {
            let p = p.add(4 * I::LANES * group);
            [isa.load_nibbles(p), isa.load_nibbles(p.add(2 * I::LANES))]
        }
    }
}

/// Four nibbles to four bytes.
#[inline(always)]
fn spread<I: Isa>(isa: I, v: I::U) -> I::U {
    let v = isa.and(isa.or(v, isa.shl::<8>(v)), isa.splat_u(0x00ff_00ff));
    isa.and(isa.or(v, isa.shl::<4>(v)), isa.splat_u(0x0f0f_0f0f))
}

/// 8 bits.
#[derive(Clone, Copy)]
pub(super) struct Affine8(pub(super) Groups);

impl Affine8 {
    /// With groups of `cols` columns.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        Self(Groups { cols: cols.into(), half })
    }
}

impl Format for Affine8 {
    type Shape = WideBiased;
    const BITS: u32 = 8;
    const BYTES: usize = 32;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        self.0.decode(isa, rows, col, n, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let flip = isa.splat_u(u32::from(I::WIDE_OFFSET) * 0x0101_0101);
        for sub in 0..n / BLOCK {
            let block = rows.plane(0).block::<32>(col + BLOCK * sub);
            let codes = tile.codes_mut(sub);
            for half in 0..2 {
                for (k, word) in block.words(isa, 16 * half).into_iter().enumerate() {
                    codes.put(isa, 4 * half + k, isa.xor(word, flip));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, _: &Ahead, group: usize) -> [I::U; 2] {
        let flip = isa.splat_u(u32::from(I::WIDE_OFFSET) * 0x0101_0101);
        // SAFETY: the 8 · LANES bytes of this group, by the caller.
        unsafe {
            let p = p.add(8 * I::LANES * group);
            let (first, second) = (isa.load_u(p.cast()), isa.load_u(p.add(4 * I::LANES).cast()));
            [isa.xor(first, flip), isa.xor(second, flip)]
        }
    }
}

/// 2, 3, 5 or 6 bits: values that cross words.
#[derive(Clone, Copy)]
pub(super) struct AffineOdd<const BITS: usize>(Groups);

impl<const BITS: usize> AffineOdd<BITS> {
    /// With groups of `cols` columns.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        Self(Groups { cols: cols.into(), half })
    }
}

impl<const BITS: usize> Format for AffineOdd<BITS> {
    type Shape = Biased;
    const BITS: u32 = BITS as u32;
    const BYTES: usize = 4 * BITS;
    const GROUPS: bool = false;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        self.0.decode(isa, rows, col, n, tile);
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let mask = isa.splat_u((1 << BITS) - 1);
        for sub in 0..n / BLOCK {
            // 32 values are `BITS` words.
            let at = (col / BLOCK + sub) * Self::BYTES;
            let low = rows.plane(0).words_of(isa, at, Self::BYTES.min(16));
            let high = if BITS > 4 { rows.plane(0).words_of(isa, at + 16, Self::BYTES - 16) } else { low };
            let words = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]];
            let codes = tile.codes_mut(sub);
            for k in 0..BLOCK / 4 {
                let mut four = isa.splat_u(0);
                for i in 0..4 {
                    let bit = (4 * k + i) * BITS;
                    let (at, shift) = (bit / 32, bit as u32 % 32);
                    let mut code = isa.shr_parts(words[at], shift, shift);
                    if shift as usize + BITS > 32 {
                        code = isa.or(code, isa.shl_all(words[at + 1], 32 - shift));
                    }
                    four = isa.or(four, isa.shl_all(isa.and(code, mask), 8 * i as u32));
                }
                codes.put(isa, k, four);
            }
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, _: *const u8, _: &Ahead, _: usize) -> [I::U; 2] {
        [isa.splat_u(0); 2]
    }
}
