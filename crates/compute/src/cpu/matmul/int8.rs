//! Products with int8 activations.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::marker::PhantomData;

use super::{
    Job,
    tile::{Product, Sums, TILE_COLS, TileRows, get, put, walk},
};
use crate::cpu::{
    activations::{BLOCK, Q8Block, Q8Rows},
    simd::{Isa, Kernel, MAX_LANES},
};

/// Sub-blocks of a tile.
const SUBS: usize = TILE_COLS / BLOCK;

/// What kernels have to know of an encoding whose weights are scale · (code − zero) + bias with codes of at most 8 bits.
pub(super) trait Shape: Copy {
    /// Scales, and biases if there are any, belong to 16 columns instead of 32.
    const HALVES: bool = false;
    /// Codes have 8 bits instead of at most 6.
    const WIDE: bool = false;
    /// There are biases; if not, zero is not 0.
    const BIAS: bool = false;
}

/// Zero points, no biases.
#[derive(Clone, Copy)]
pub(super) struct Centred;
impl Shape for Centred {}

/// Biases.
#[derive(Clone, Copy)]
pub(super) struct Biased;
impl Shape for Biased {
    const BIAS: bool = true;
}

/// Eight bits and zero points.
#[derive(Clone, Copy)]
pub(super) struct WideCentred;
impl Shape for WideCentred {
    const WIDE: bool = true;
}

/// Eight bits and biases.
#[derive(Clone, Copy)]
pub(super) struct WideBiased;
impl Shape for WideBiased {
    const WIDE: bool = true;
    const BIAS: bool = true;
}

/// Scales of 16 columns and zero points.
#[derive(Clone, Copy)]
pub(super) struct HalvesCentred;
impl Shape for HalvesCentred {
    const HALVES: bool = true;
}

/// Scales and biases of 16 columns.
#[derive(Clone, Copy)]
pub(super) struct HalvesBiased;
impl Shape for HalvesBiased {
    const HALVES: bool = true;
    const BIAS: bool = true;
}

/// An encoding.
pub(super) trait Format: Copy {
    /// Its kind.
    type Shape: Shape;
    /// Columns of a block of the first plane; divides [`TILE_COLS`].
    const COLS: usize = BLOCK;
    /// Bytes of a block of the first plane.
    const BYTES: usize;
    /// Subtracted from codes.
    const ZERO: i32 = 0;
    /// [`Format::group`] is there.
    const GROUPS: bool = true;

    /// Decodes scales and biases of columns `col`..`col` + `n` of `rows`, `n` being a multiple of the block length
    /// and of 32 and at most [`TILE_COLS`].
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Decodes the codes of the same columns.
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Codes of group `group` of one row whose blocks begin at `p`: two vectors of codes of consecutive columns, or
    /// of consecutive columns in each half; [`Format::subs`] says which.
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
    /// Subtracted from codes.
    zero: i32,
    /// (sub-block, 4 columns, row, column), u8.
    codes: [Codes; SUBS],
    /// (16 columns, row) if the format has scales for 16, else (32 columns, row).
    scale: [[f32; MAX_LANES]; 2 * SUBS],
    /// As `scale`.
    bias: [[f32; MAX_LANES]; 2 * SUBS],
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
    /// A tile for weights of format `F`.
    #[inline(always)]
    pub(super) fn new<F: Format>() -> Self {
        Self {
            zero: F::ZERO,
            codes: [Codes([0; BLOCK / 4 * MAX_LANES]); SUBS],
            scale: [[0.0; MAX_LANES]; 2 * SUBS],
            bias: [[0.0; MAX_LANES]; 2 * SUBS],
        }
    }

    /// Subtracted from codes.
    pub(super) fn zero(&self) -> i32 {
        self.zero
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

    /// Biases of the same columns as [`Tile::scale`].
    #[inline(always)]
    pub(super) fn bias<I: Isa>(&self, isa: I, i: usize) -> I::F {
        get(isa, &self.bias[i])
    }

    /// Sets [`Tile::bias`].
    #[inline(always)]
    pub(super) fn set_bias<I: Isa>(&mut self, isa: I, i: usize, bias: I::F) {
        put(isa, &mut self.bias[i], bias);
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
        let product = Int8 { format: self.format, x: self.x, tile: Tile::new::<F>() };
        walk(isa, self.job, product);
    }
}

/// [`Format::scales`].
pub(super) struct Scales<'a, F> {
    pub(super) format: F,
    pub(super) rows: &'a TileRows<'a>,
    /// First and number.
    pub(super) cols: (usize, usize),
    pub(super) tile: &'a mut Tile,
}

impl<F: Format> Kernel for Scales<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        self.format.scales(isa, self.rows, self.cols.0, self.cols.1, self.tile);
    }
}

/// [`Format::scales`] and [`Format::codes`].
pub(super) struct Decode<'a, F>(pub(super) Scales<'a, F>);

impl<F: Format> Kernel for Decode<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Scales { format, rows, cols, tile } = self.0;
        isa.call(Scales { format, rows, cols, tile });
        format.codes(isa, rows, cols.0, cols.1, tile);
    }
}

/// A tile times columns of some tokens.
struct MultiplyTile<'a, S, const N: usize> {
    shape: PhantomData<S>,
    tile: &'a Tile,
    /// (N, columns), in −127..=127.
    x: [&'a [i8]; N],
    /// (N, columns / 32).
    blocks: [&'a [Q8Block]; N],
    sums: &'a mut [Sums; N],
}

impl<S: Shape, const N: usize> Kernel for MultiplyTile<'_, S, N> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { tile, x, blocks, sums, .. } = self;
        let halves = if S::HALVES { 2 } else { 1 };
        let words = BLOCK / 4 / halves;
        let n_subs = blocks[0].len();
        for t in 0..N {
            assert!(blocks[t].len() == n_subs && x[t].len() == n_subs * BLOCK, "tokens of the same columns");
        }

        let mut acc = [isa.splat(0.0); N];
        for t in 0..N {
            acc[t] = sums[t].get(isa, 0);
        }
        for sub in 0..n_subs {
            let codes = tile.codes(sub);
            let mut dots = [[isa.splat_u(0); N]; 2];
            for half in 0..halves {
                for k in half * words..(half + 1) * words {
                    let w = codes.get(isa, k);
                    for t in 0..N {
                        // SAFETY: within the n_subs · BLOCK activations of the token.
                        let four = unsafe {
                            let p = x[t].as_ptr().add(sub * BLOCK + 4 * k).cast::<u32>();
                            p.read_unaligned()
                        };
                        dots[half][t] = dot::<I, S>(isa, dots[half][t], w, isa.splat_u(four));
                    }
                }
            }
            for t in 0..N {
                // SAFETY: sub is below n_subs, the length of this slice.
                let block = unsafe { blocks[t].get_unchecked(sub) };
                acc[t] = accumulate::<I, S>(isa, tile, sub, [dots[0][t], dots[1][t]], block, acc[t]);
            }
        }
        for t in 0..N {
            sums[t].put(isa, 0, acc[t]);
        }
    }
}

struct Int8<'a, F> {
    format: F,
    x: &'a Q8Rows,
    tile: Tile,
}

impl<I: Isa, F: Format> Product<I> for Int8<'_, F> {
    #[inline(always)]
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize) {
        isa.call(Decode(Scales { format: self.format, rows, cols: (col, n), tile: &mut self.tile }));
    }

    #[inline(always)]
    fn multiply<const N: usize>(
        &self,
        isa: I,
        tokens: [usize; N],
        col: usize,
        n: usize,
        sums: &mut [Sums; N],
    ) {
        let x = tokens.map(|token| &self.x.row(token)[col..col + n]);
        let blocks = tokens.map(|token| &self.x.row_blocks(token)[col / BLOCK..(col + n) / BLOCK]);
        isa.call(MultiplyTile { shape: PhantomData::<F::Shape>, tile: &self.tile, x, blocks, sums });
    }

    /// Lanes are columns, sixteen (or eight) rows are added up crosswise: cheaper than a tile that is used once.
    #[inline(always)]
    fn multiply_one(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        token: usize,
        (col, n): (usize, usize),
        sums: &mut Sums,
    ) -> bool {
        let group_cols = 8 * I::LANES;
        if !F::GROUPS || !n.is_multiple_of(group_cols) {
            return false;
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
                        rows[v][i] = dot::<I, F::Shape>(isa, isa.splat_u(0), codes[v], x_group[v]);
                    }
                }
                for v in 0..2 {
                    quads[v][quad] = isa.sum_rows(rows[v]);
                }
            }
            let parts = I::LANES / 8;
            for v in 0..2 {
                if F::Shape::HALVES {
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

        isa.call(Scales { format: self.format, rows, cols: (col, n), tile: &mut self.tile });
        let blocks = &self.x.row_blocks(token)[col / BLOCK..(col + n) / BLOCK];
        let mut acc = sums.get(isa, 0);
        for (sub, block) in blocks.iter().enumerate() {
            acc = accumulate::<I, F::Shape>(isa, &self.tile, sub, dots[sub], block, acc);
        }
        sums.put(isa, 0, acc);
        true
    }
}

/// acc + products of four codes with four activations in each lane.
#[inline(always)]
fn dot<I: Isa, S: Shape>(isa: I, acc: I::U, w: I::U, x: I::U) -> I::U {
    if S::WIDE { isa.dot_wide(acc, w, x) } else { isa.dot(acc, w, x) }
}

/// Σ (code − zero) · x from Σ code · x and Σ x.
#[inline(always)]
fn centred<I: Isa, S: Shape>(isa: I, tile: &Tile, dots: I::U, sum: i32) -> I::F {
    if S::BIAS && (!S::WIDE || I::WIDE_OFFSET == 0) {
        return isa.to_f32(dots);
    }
    let zero = tile.zero - if S::WIDE { I::WIDE_OFFSET.into() } else { 0 };
    isa.to_f32(isa.add_u(dots, isa.splat_u((-zero * sum) as u32)))
}

/// acc + the products of sub-block `sub`, `dots` being the sums of its codes times x: of all 32 columns or, if the
/// format has scales for 16, of the first and the last 16. Every product goes through here, in order of sub-blocks.
#[inline(always)]
fn accumulate<I: Isa, S: Shape>(
    isa: I,
    tile: &Tile,
    sub: usize,
    dots: [I::U; 2],
    x: &Q8Block,
    acc: I::F,
) -> I::F {
    let x_scale = isa.splat(x.scale);
    if S::HALVES {
        let first = isa.mul(centred::<I, S>(isa, tile, dots[0], x.sums[0]), tile.scale(isa, 2 * sub));
        let second = centred::<I, S>(isa, tile, dots[1], x.sums[1]);
        let acc = isa.mul_add(isa.mul_add(second, tile.scale(isa, 2 * sub + 1), first), x_scale, acc);
        if !S::BIAS {
            return acc;
        }
        let [first, second] = [isa.splat(x.scale * x.sums[0] as f32), isa.splat(x.scale * x.sums[1] as f32)];
        let acc = isa.mul_add(tile.bias(isa, 2 * sub), first, acc);
        isa.mul_add(tile.bias(isa, 2 * sub + 1), second, acc)
    } else {
        let dots = centred::<I, S>(isa, tile, dots[0], x.sums[0] + x.sums[1]);
        let acc = isa.mul_add(dots, isa.mul(tile.scale(isa, sub), x_scale), acc);
        if S::BIAS { isa.mul_add(tile.bias(isa, sub), isa.splat(x.sum), acc) } else { acc }
    }
}
