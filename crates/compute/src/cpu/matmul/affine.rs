//! Decoders of MLX affine weights of 4 and 8 bits; layout in [`crate::quant`].

use super::{
    int8::{Format, Tile},
    tile::TileRows,
};
use crate::{
    Half,
    cpu::{activations::BLOCK, simd::Isa},
};

/// Groups of scales and biases.
#[derive(Clone, Copy)]
struct Groups {
    /// Columns of a group: 32, 64 or 128.
    cols: usize,
    half: Half,
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
    fn pairs<I: Isa>(self, isa: I, words: [I::U; 4]) -> [I::F; 8] {
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
pub(super) struct Affine4(Groups);

impl Affine4 {
    /// With groups of `cols` columns.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        Self(Groups { cols: cols.into(), half })
    }
}

impl Format for Affine4 {
    const BYTES: usize = 16;
    const BIAS: bool = true;

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
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
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
pub(super) struct Affine8(Groups);

impl Affine8 {
    /// With groups of `cols` columns.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        Self(Groups { cols: cols.into(), half })
    }
}

impl Format for Affine8 {
    const BYTES: usize = 32;
    const WIDE: bool = true;
    const BIAS: bool = true;

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
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2] {
        let flip = isa.splat_u(u32::from(I::WIDE_OFFSET) * 0x0101_0101);
        // SAFETY: the 8 · LANES bytes of this group, by the caller.
        unsafe {
            let p = p.add(8 * I::LANES * group);
            let (first, second) = (isa.load_u(p.cast()), isa.load_u(p.add(4 * I::LANES).cast()));
            [isa.xor(first, flip), isa.xor(second, flip)]
        }
    }
}
