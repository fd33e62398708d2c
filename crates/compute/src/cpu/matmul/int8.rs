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
    /// Columns of a block of the first plane; divides [`TILE_COLS`].
    const COLS: usize = BLOCK;
    /// Bytes of a block of the first plane.
    const BYTES: usize;
    /// Subtracted from codes.
    const ZERO: i32 = 0;
    /// Scales belong to 16 columns instead of 32.
    const HALVES: bool = false;
    /// Codes have 8 bits instead of at most 6.
    const WIDE: bool = false;
    /// There are biases.
    const BIAS: bool = false;

    /// Decodes scales and biases of columns `col`..`col` + `n` of `rows`, `n` being a multiple of the block length
    /// and of 32 and at most [`TILE_COLS`].
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Decodes the codes of the same columns.
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Codes of group `group` of one row whose blocks begin at `p`: two vectors of codes of consecutive columns, or
    /// of consecutive columns in each half. See [`Format::subs`].
    ///
    /// # Safety
    /// The row's blocks up to the end of this group are readable at `p`; they are whole blocks.
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, group: usize) -> [I::U; 2];

    /// Which sub-blocks of 32 columns the vectors of [`Format::group`] consist of; with eight lanes a vector holds one
    /// and the second is meaningless.
    #[inline(always)]
    fn subs(n_lanes: usize, group: usize) -> [[usize; 2]; 2] {
        if n_lanes == 16 {
            [[4 * group, 4 * group + 1], [4 * group + 2, 4 * group + 3]]
        } else {
            [[2 * group; 2], [2 * group + 1; 2]]
        }
    }
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
        self.format.scales(isa, rows, col, n, &mut self.tile);
        self.format.codes(isa, rows, col, n, &mut self.tile);
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
        let halves = if F::HALVES { 2 } else { 1 };
        let words = BLOCK / 4 / halves;

        let x = tokens.map(|token| self.x.row(token)[col..col + n].as_ptr());
        let blocks = tokens.map(|token| self.x.row_blocks(token)[col / BLOCK..(col + n) / BLOCK].as_ptr());
        let mut acc = *sums;
        for sub in 0..n / BLOCK {
            let codes = self.tile.codes(sub);
            // SAFETY: sub is below the number of blocks of the slices above.
            let blocks: [&Q8Block; N] = blocks.map(|blocks| unsafe { &*blocks.add(sub) });
            let mut dots = [[isa.splat_u(0); N]; 2];
            for half in 0..halves {
                for k in half * words..(half + 1) * words {
                    let w = codes.get(isa, k);
                    for t in 0..N {
                        // SAFETY: within the n columns of the slice above.
                        let four = unsafe { x[t].add(sub * BLOCK + 4 * k).cast::<u32>().read_unaligned() };
                        dots[half][t] = dot::<I, F>(isa, dots[half][t], w, isa.splat_u(four));
                    }
                }
            }
            accumulate::<I, F, N>(isa, &self.tile, sub, dots, blocks, &mut acc);
        }
        *sums = acc;
    }

    /// Lanes are columns, sixteen (or eight) rows are added up crosswise: cheaper than a tile that is used once.
    #[inline(always)]
    fn multiply_one(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        token: usize,
        (col, n): (usize, usize),
        sums: &mut I::F,
    ) -> Result<()> {
        let group_cols = 8 * I::LANES;
        if !n.is_multiple_of(group_cols) {
            self.decode(isa, rows, col, n)?;
            // SAFETY: just decoded.
            unsafe { self.multiply(isa, [token], col, n, std::array::from_mut(sums)) };
            return Ok(());
        }
        let x = self.x.row(token)[col..col + n].as_ptr().cast::<u8>();
        let plane = rows.plane(0);
        let first = plane.span(col / F::COLS * F::BYTES, n / F::COLS * F::BYTES);

        let mut dots = [[isa.splat_u(0); 2]; SUBS];
        for group in 0..n / group_cols {
            let subs = F::subs(I::LANES, group);
            let mut x_group = [isa.splat_u(0); 2];
            for v in 0..2 {
                let [low, high] = subs[v];
                // SAFETY: sub-blocks of these n columns; where there is no second one it repeats the first.
                x_group[v] = unsafe { isa.load_parts(x.add(BLOCK * low), x.add(BLOCK * high)) };
            }
            let mut quads = [[isa.splat_u(0); 4]; 2];
            for quad in 0..I::LANES / 4 {
                let mut rows = [[isa.splat_u(0); 4]; 2];
                for i in 0..4 {
                    // SAFETY: `span` covers these blocks of all rows.
                    let codes =
                        unsafe { self.format.group(isa, first.add((4 * quad + i) * plane.stride()), group) };
                    for v in 0..2 {
                        rows[v][i] = dot::<I, F>(isa, isa.splat_u(0), codes[v], x_group[v]);
                    }
                }
                for v in 0..2 {
                    quads[v][quad] = isa.sum_rows(rows[v]);
                }
            }
            let parts = I::LANES / 8;
            for v in 0..2 {
                if F::HALVES {
                    let sums = isa.gather_quarters(quads[v]);
                    for part in 0..parts {
                        dots[subs[v][part]] = [sums[2 * part], sums[2 * part + 1]];
                    }
                } else {
                    let sums = isa.gather_halves(quads[v]);
                    for part in 0..parts {
                        dots[subs[v][part]][0] = sums[part];
                    }
                }
            }
        }

        self.format.scales(isa, rows, col, n, &mut self.tile);
        let blocks = &self.x.row_blocks(token)[col / BLOCK..(col + n) / BLOCK];
        for (sub, block) in blocks.iter().enumerate() {
            let dots = dots[sub].map(|dots| [dots]);
            accumulate::<I, F, 1>(isa, &self.tile, sub, dots, [block], std::array::from_mut(sums));
        }
        Ok(())
    }

    #[inline(always)]
    fn finish(_: I, sums: I::F) -> I::F {
        sums
    }
}

/// acc + products of four codes with four activations in each lane.
#[inline(always)]
fn dot<I: Isa, F: Format>(isa: I, acc: I::U, w: I::U, x: I::U) -> I::U {
    if F::WIDE { isa.dot_wide(acc, w, x) } else { isa.dot(acc, w, x) }
}

/// Σ (code − zero) · x from Σ code · x and Σ x.
#[inline(always)]
fn centred<I: Isa, F: Format>(isa: I, dots: I::U, sum: i32) -> I::F {
    let zero = F::ZERO - if F::WIDE { I::WIDE_OFFSET.into() } else { 0 };
    isa.to_f32(if zero == 0 { dots } else { isa.add_u(dots, isa.splat_u((-zero * sum) as u32)) })
}

/// Adds sub-block `sub` to `sums`, `dots` being the products of its codes: of all 32 columns, or, if the format has scales
/// for 16, of the first and the last 16. Every product of these formats goes through here, in order of sub-blocks.
#[inline(always)]
fn accumulate<I: Isa, F: Format, const N: usize>(
    isa: I,
    tile: &Tile,
    sub: usize,
    dots: [[I::U; N]; 2],
    x: [&Q8Block; N],
    sums: &mut [I::F; N],
) {
    for t in 0..N {
        let x_scale = isa.splat(x[t].scale);
        sums[t] = if F::HALVES {
            let first = isa.mul(centred::<I, F>(isa, dots[0][t], x[t].sums[0]), tile.scale(isa, 2 * sub));
            let both = isa.mul_add(
                centred::<I, F>(isa, dots[1][t], x[t].sums[1]),
                tile.scale(isa, 2 * sub + 1),
                first,
            );
            isa.mul_add(both, x_scale, sums[t])
        } else {
            let dots = centred::<I, F>(isa, dots[0][t], x[t].sums[0] + x[t].sums[1]);
            isa.mul_add(dots, isa.mul(tile.scale(isa, sub), x_scale), sums[t])
        };
        if F::BIAS {
            sums[t] = isa.mul_add(tile.bias(isa, sub), isa.splat(x[t].sum), sums[t]);
        }
    }
}
