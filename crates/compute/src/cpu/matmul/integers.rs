//! Decoders of integers in groups, with and without zero points; layouts in [`crate::quant`]. Codes lie as in MLX's affine
//! encodings of as many bits; a zero point times a scale, which is exact in f32, is what those call a bias.

use std::marker::PhantomData;

use super::{
    affine::{Affine4, Affine8, Groups},
    int8::{Ahead, Biased, Centred, Format, Shape, Tile, WideBiased, WideCentred},
    tile::TileRows,
};
use crate::{
    Half, TensorView,
    cpu::{
        activations::BLOCK,
        simd::{Isa, MAX_LANES},
    },
    quant::int::middle,
};

/// Codes of `BITS` bits; `S` has biases if zero points are stored.
#[derive(Clone, Copy)]
pub(super) struct Integers<S, const BITS: usize> {
    groups: Groups,
    shape: PhantomData<S>,
}

/// 4 bits.
pub(super) type Int4 = Integers<Centred, 4>;
/// 4 bits with zero points.
pub(super) type Int4Zeros = Integers<Biased, 4>;
/// 8 bits.
pub(super) type Int8 = Integers<WideCentred, 8>;
/// 8 bits with zero points.
pub(super) type Int8Zeros = Integers<WideBiased, 8>;

/// Groups that a tile of 256 columns touches at most.
const MAX_GROUPS: usize = 8;

impl<S: Shape, const BITS: usize> Integers<S, BITS> {
    /// Rows whose zero points share a word.
    const PER_WORD: usize = 32 / BITS;

    /// With groups of `cols` columns, or of whole rows for 0.
    pub(super) fn new(cols: u8, half: Half) -> Self {
        let cols = if cols == 0 { usize::MAX } else { cols.into() };
        Self { groups: Groups { cols, half }, shape: PhantomData }
    }

    /// The zero points of `n` groups from group `first` on, lanes being rows.
    #[inline(always)]
    fn zeros<I: Isa>(isa: I, rows: &TileRows<'_>, first: usize, n: usize) -> [I::F; MAX_GROUPS] {
        let w = rows.matrix();
        let mut out = [isa.splat(0.0); MAX_GROUPS];
        let follow_each_other = rows.row_of(1) != rows.row_of(0);
        let aligned = follow_each_other && w.row_in_block(2, rows.row_of(0)) == 0;
        for (group, out) in out.iter_mut().enumerate().take(n) {
            let at = 4 * (first + group);
            let mut codes = [0u16; MAX_LANES];
            if aligned {
                let (words, _) = codes[..I::LANES].as_chunks_mut::<4>();
                for (i, four) in words.iter_mut().enumerate() {
                    let lane = 4 * i;
                    let word = word(w, rows.row_of(lane), at) >> (BITS * (lane % Self::PER_WORD));
                    *four = spread::<BITS>(word);
                }
            } else {
                for (lane, code) in codes.iter_mut().enumerate().take(I::LANES) {
                    let row = rows.row_of(lane);
                    let word = word(w, row, at) >> (BITS * w.row_in_block(2, row));
                    *code = spread::<BITS>(word)[0];
                }
            }
            // SAFETY: there are MAX_LANES ≥ LANES of them.
            *out = isa.to_f32(unsafe { isa.load_u16(codes.as_ptr()) });
        }
        out
    }
}

/// The word at byte `at` of the zero points that row `row` is among.
#[inline(always)]
fn word(w: TensorView<'_>, row: usize, at: usize) -> u32 {
    w.row(2, row)[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// The four lowest codes of a word.
#[inline(always)]
fn spread<const BITS: usize>(word: u32) -> [u16; 4] {
    let codes = if BITS == 4 {
        let pairs = (u64::from(word & 0xffff) | u64::from(word & 0xff00) << 24) & 0x0000_00ff_0000_00ff;
        (pairs | pairs << 12) & 0x000f_000f_000f_000f
    } else {
        let pairs = (u64::from(word) | u64::from(word) << 16) & 0x0000_ffff_0000_ffff;
        (pairs | pairs << 8) & 0x00ff_00ff_00ff_00ff
    };
    [codes as u16, (codes >> 16) as u16, (codes >> 32) as u16, (codes >> 48) as u16]
}

impl<S: Shape, const BITS: usize> Format for Integers<S, BITS> {
    type Shape = S;
    const BITS: u32 = BITS as u32;
    const BYTES: usize = 4 * BITS;
    const ZERO: i32 = if S::BIAS { 0 } else { middle(BITS) as i32 };
    const NIBBLES: Option<usize> = if BITS == 4 { Some(0) } else { None };
    const NEIGHBOURS: bool = true;

    #[inline(always)]
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        let Groups { cols, .. } = self.groups;
        let (first, count) = (col / cols, n.div_ceil(cols));
        let scales = self.groups.pairs(isa, rows.plane(1).words_of(isa, 2 * first, 2 * count));
        let zeros = if S::BIAS { Self::zeros(isa, rows, first, count) } else { [isa.splat(0.0); MAX_GROUPS] };
        for sub in 0..n / BLOCK {
            let group = sub * BLOCK / cols;
            tile.set_scale(isa, sub, scales[group]);
            if S::BIAS {
                let less = isa.mul(scales[group], zeros[group]);
                tile.set_bias(isa, sub, isa.sub(isa.splat(0.0), less));
            }
        }
    }

    #[inline(always)]
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile) {
        if BITS == 4 {
            Affine4(self.groups).codes(isa, rows, col, n, tile);
        } else {
            Affine8(self.groups).codes(isa, rows, col, n, tile);
        }
    }

    #[inline(always)]
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, ahead: &Ahead, group: usize) -> [I::U; 2] {
        // SAFETY: by the caller; the layouts are the same.
        unsafe {
            if BITS == 4 {
                Affine4(self.groups).group(isa, p, ahead, group)
            } else {
                Affine8(self.groups).group(isa, p, ahead, group)
            }
        }
    }
}
