//! Products with int8 activations.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use super::{
    Job,
    tile::{Product, TILE_COLS, TileRows, get, put, walk},
};
use crate::{
    Result,
    cpu::{
        activations::{BLOCK, Q8Block, Q8Rows},
        simd::{Isa, Kernel, MAX_LANES},
    },
};

/// Sub-blocks of a tile.
const SUBS: usize = TILE_COLS / BLOCK;

/// An encoding whose weights are scale · (code − zero) + bias with codes of at most 8 bits.
pub(super) trait Format: Copy {
    /// Subtracted from codes.
    const ZERO: i32;
    /// Scales belong to 16 columns instead of 32.
    const HALVES: bool = false;
    /// Codes have 8 bits instead of at most 6.
    const WIDE: bool = false;
    /// There are biases.
    const BIAS: bool = false;

    /// Decodes columns `col`..`col` + `n` of `rows`, `n` being a multiple of the block length and
    /// of 32 and at most [`TILE_COLS`].
    fn decode<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);
}

/// Decoded weights; lanes are rows.
#[repr(C, align(64))]
pub(super) struct Tile {
    /// (sub-block, 4 columns, row, column), u8.
    codes: [Codes; SUBS],
    /// (16 columns, row) if the format has scales for 16, else (32 columns, row).
    scale: [[f32; MAX_LANES]; 2 * SUBS],
    /// (32 columns, row).
    bias: [[f32; MAX_LANES]; SUBS],
}

/// Codes of 32 columns: (4 columns, row, column), u8. Wide ones are stored as [`Isa::WIDE_OFFSET`] says.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Codes([u32; BLOCK / 4 * MAX_LANES]);

impl Codes {
    /// Sets columns 4 · `k`.. of all rows.
    #[inline(always)]
    pub(super) fn put<I: Isa>(&mut self, isa: I, k: usize, codes: I::U) {
        assert!(k < BLOCK / 4, "eight words a sub-block");
        // SAFETY: within the array, as LANES ≤ MAX_LANES.
        unsafe { isa.store_u(self.0.as_mut_ptr().add(k * I::LANES), codes) }
    }

    /// Columns 4 · `k`.. of all rows.
    #[inline(always)]
    pub(super) fn get<I: Isa>(&self, isa: I, k: usize) -> I::U {
        assert!(k < BLOCK / 4, "eight words a sub-block");
        // SAFETY: as above.
        unsafe { isa.load_u(self.0.as_ptr().add(k * I::LANES)) }
    }
}

impl Tile {
    /// All zero.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            codes: [Codes([0; BLOCK / 4 * MAX_LANES]); SUBS],
            scale: [[0.0; MAX_LANES]; 2 * SUBS],
            bias: [[0.0; MAX_LANES]; SUBS],
        }
    }

    /// Codes of sub-block `sub`.
    #[inline(always)]
    pub(super) fn codes(&self, sub: usize) -> &Codes {
        &self.codes[sub]
    }

    /// Codes of sub-block `sub`.
    #[inline(always)]
    pub(super) fn codes_mut(&mut self, sub: usize) -> &mut Codes {
        &mut self.codes[sub]
    }

    /// Scales of 32 columns or, where the format has them, 16.
    #[inline(always)]
    pub(super) fn scale<I: Isa>(&self, isa: I, i: usize) -> I::F {
        get(isa, &self.scale[i])
    }

    /// Sets [`Tile::scale`].
    #[inline(always)]
    pub(super) fn set_scale<I: Isa>(&mut self, isa: I, i: usize, scale: I::F) {
        put(isa, &mut self.scale[i], scale);
    }

    /// Biases of sub-block `sub`.
    #[inline(always)]
    pub(super) fn bias<I: Isa>(&self, isa: I, sub: usize) -> I::F {
        get(isa, &self.bias[sub])
    }

    /// Sets [`Tile::bias`].
    #[inline(always)]
    pub(super) fn set_bias<I: Isa>(&mut self, isa: I, sub: usize, bias: I::F) {
        put(isa, &mut self.bias[sub], bias);
    }
}

/// The product of a job with int8 activations.
pub(super) struct Multiply<'a, F> {
    pub(super) job: &'a Job<'a>,
    pub(super) format: F,
    pub(super) x: &'a Q8Rows,
}

impl<F: Format> Kernel for Multiply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let product = Int8 { format: self.format, x: self.x, tile: Tile::new() };
        walk(isa, self.job, product).expect("decoding these formats cannot fail");
    }
}

struct Int8<'a, F> {
    format: F,
    x: &'a Q8Rows,
    tile: Tile,
}

impl<I: Isa, F: Format> Product<I> for Int8<'_, F> {
    type Sums = I::F;

    #[inline(always)]
    fn zero(isa: I) -> I::F {
        isa.splat(0.0)
    }

    #[inline(always)]
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize) -> Result<()> {
        self.format.decode(isa, rows, col, n, &mut self.tile);
        Ok(())
    }

    #[inline(always)]
    unsafe fn multiply<const N: usize>(
        &self,
        isa: I,
        tokens: [usize; N],
        col: usize,
        n: usize,
        sums: &mut [I::F; N],
    ) {
        let zero = F::ZERO - if F::WIDE { I::WIDE_OFFSET.into() } else { 0 };
        let halves = if F::HALVES { 2 } else { 1 };
        let words = BLOCK / 4 / halves;

        let x = tokens.map(|token| self.x.row(token)[col..col + n].as_ptr());
        let blocks = tokens.map(|token| self.x.row_blocks(token)[col / BLOCK..(col + n) / BLOCK].as_ptr());
        let mut acc = *sums;
        for sub in 0..n / BLOCK {
            let codes = self.tile.codes(sub);
            // SAFETY: sub is below the number of blocks of the slices above.
            let block = |t: usize| -> &Q8Block { unsafe { &*blocks[t].add(sub) } };
            let mut scaled = [isa.splat(0.0); N];
            for half in 0..halves {
                let mut dots = [isa.splat_u(0); N];
                if zero != 0 {
                    for t in 0..N {
                        let sums = block(t).sums;
                        let sum = if F::HALVES { sums[half] } else { sums[0] + sums[1] };
                        dots[t] = isa.splat_u((-zero * sum) as u32);
                    }
                }
                for k in half * words..(half + 1) * words {
                    let w = codes.get(isa, k);
                    for t in 0..N {
                        // SAFETY: within the n columns of the slice above.
                        let four = unsafe { x[t].add(sub * BLOCK + 4 * k).cast::<u32>().read_unaligned() };
                        let four = isa.splat_u(four);
                        dots[t] =
                            if F::WIDE { isa.dot_wide(dots[t], w, four) } else { isa.dot(dots[t], w, four) };
                    }
                }
                let scale = self.tile.scale(isa, sub * halves + half);
                for t in 0..N {
                    let dot = isa.to_f32(dots[t]);
                    if F::HALVES {
                        scaled[t] =
                            if half == 0 { isa.mul(dot, scale) } else { isa.mul_add(dot, scale, scaled[t]) };
                    } else {
                        acc[t] = isa.mul_add(dot, isa.mul(scale, isa.splat(block(t).scale)), acc[t]);
                    }
                }
            }
            if F::HALVES {
                for t in 0..N {
                    acc[t] = isa.mul_add(scaled[t], isa.splat(block(t).scale), acc[t]);
                }
            }
            if F::BIAS {
                let bias = self.tile.bias(isa, sub);
                for t in 0..N {
                    acc[t] = isa.mul_add(bias, isa.splat(block(t).sum), acc[t]);
                }
            }
        }
        *sums = acc;
    }

    #[inline(always)]
    fn finish(_: I, sums: I::F) -> I::F {
        sums
    }
}
