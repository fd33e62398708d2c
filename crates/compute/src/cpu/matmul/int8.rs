//! Products with int8 activations.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::hint::black_box;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::{
    Job,
    batch::{self, MultiplyOne},
    pairs::{self, Columns},
    tile::{FEW, NextRows, Product, Sums, TILE_COLS, TileRows, get, put, walk},
};
use crate::cpu::{
    activations::{BLOCK, Q8Block, Q8Rows},
    simd::{Isa, Kernel, MAX_LANES},
};

/// Sub-blocks of a tile.
pub(super) const SUBS: usize = TILE_COLS / BLOCK;
/// Entries of a codebook in a sub-block, at most.
const MOST_ENTRIES: usize = 8;

/// What kernels have to know of an encoding whose weights are scale · (code − zero) + bias with codes of at most 8 bits.
pub(super) trait Shape: Copy {
    /// Scales, and biases if there are any, belong to 16 columns instead of 32.
    const HALVES: bool = false;
    /// Codes have 8 bits instead of at most 6.
    const WIDE: bool = false;
    /// There are biases; if not, zero is not 0.
    const BIAS: bool = false;
    /// Scales and biases are integers, and a tile has a factor for all its scales and one for all its biases.
    const SUPER: bool = Self::HALVES;
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

/// Integer scales and biases.
#[derive(Clone, Copy)]
pub(super) struct SuperBiased;
impl Shape for SuperBiased {
    const BIAS: bool = true;
    const SUPER: bool = true;
}

/// Eight bits, integer scales and zero points.
#[derive(Clone, Copy)]
pub(super) struct SuperCentred;
impl Shape for SuperCentred {
    const WIDE: bool = true;
    const SUPER: bool = true;
}

/// Integer scales and zero points, of at most six bits.
#[derive(Clone, Copy)]
pub(super) struct SmallSuperCentred;
impl Shape for SmallSuperCentred {
    const SUPER: bool = true;
}

/// Eight bits, integer scales of 16 columns and zero points.
#[derive(Clone, Copy)]
pub(super) struct WideHalvesCentred;
impl Shape for WideHalvesCentred {
    const HALVES: bool = true;
    const WIDE: bool = true;
}

/// Integer scales of 16 columns and zero points.
#[derive(Clone, Copy)]
pub(super) struct HalvesCentred;
impl Shape for HalvesCentred {
    const HALVES: bool = true;
}

/// Integer scales and biases of 16 columns.
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
    /// Codes are below 2 to this power.
    const BITS: u32;
    /// Bytes of a block of the first plane.
    const BYTES: usize;
    /// Subtracted from codes.
    const ZERO: i32 = 0;
    /// [`Format::group`] is there.
    const GROUPS: bool = true;
    /// [`Format::group`] asks for what [`Format::ahead`] finds.
    const AHEAD: bool = false;
    /// [`Format::group`] gives magnitudes below 64, whose signs are [`Ahead::bits`]: nothing is to be subtracted from them.
    const SIGNS: bool = false;
    /// Codes of [`Format::group`] lack the biases of the tile, whole numbers.
    const SHIFTS: bool = false;
    /// [`Format::raw`] and [`Format::expand`] are there.
    const RAW: bool = false;
    /// Blocks have 32 columns, whose codes are those of 16 bytes' low and then of their high nibbles, but for
    /// [`Format::NEIGHBOURS`]: where these begin.
    const NIBBLES: Option<usize> = None;
    /// Low nibbles are codes of even columns and high ones of odd columns.
    const NEIGHBOURS: bool = false;
    /// [`Format::whole`] gives signed scales.
    const SIGNED: bool = false;

    /// Decodes scales and biases of columns `col`..`col` + `n` of `rows`, `n` being a multiple of the block length
    /// and of 32 and at most [`TILE_COLS`].
    fn scales<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Decodes the codes of the same columns.
    fn codes<I: Isa>(self, isa: I, rows: &TileRows<'_>, col: usize, n: usize, tile: &mut Tile);

    /// Codes of group `group` of one row whose blocks begin at `p`: two vectors of codes of consecutive columns, or
    /// of consecutive columns in each half; [`Format::subs`] says which. `ahead` is of this row, if there is any.
    ///
    /// # Safety
    /// The row's blocks up to the end of this group are readable at `p`; they are whole blocks.
    unsafe fn group<I: Isa>(self, isa: I, p: *const u8, ahead: &Ahead, group: usize) -> [I::U; 2];

    /// Two vectors of a row's bytes from which [`Format::expand`] makes [`Format::group`], byte by byte.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn raw<I: Isa>(self, isa: I, _p: *const u8, _group: usize) -> [I::U; 2] {
        [isa.splat_u(0); 2]
    }

    /// Codes from [`Format::raw`].
    #[inline(always)]
    fn expand<I: Isa>(self, _isa: I, raw: [I::U; 2], _group: usize) -> [I::U; 2] {
        raw
    }

    /// Codes of [`Format::NIBBLES`].
    #[inline(always)]
    fn of_nibbles<I: Isa>(_isa: I, nibbles: I::U) -> I::U {
        nibbles
    }

    /// Scales and biases of the [`TILE_COLS`] columns from `col` on, if they are whole numbers.
    #[inline(always)]
    fn whole<I: Isa>(self, _isa: I, _rows: &TileRows<'_>, _col: usize) -> Option<Whole<I>> {
        None
    }

    /// What is wanted of the row's block of [`TILE_COLS`] columns at `p` before its groups.
    ///
    /// # Safety
    /// The block is readable.
    #[inline(always)]
    unsafe fn ahead<I: Isa>(self, _isa: I, _p: *const u8) -> Ahead {
        Ahead::NOTHING
    }

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

/// What is found of all columns of a row's tile at once and passes through memory, to be looked up later.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Numbers of a codebook's entries: (entry of a sub-block, sub-block).
    pub(super) numbers: [[u32; SUBS]; MOST_ENTRIES],
    /// A bit a column of each sub-block.
    pub(super) bits: [u32; SUBS],
}

impl Ahead {
    pub(super) const NOTHING: Self = Self { numbers: [[0; SUBS]; MOST_ENTRIES], bits: [0; SUBS] };
}

/// Scales and biases that are whole numbers of eight bits, and their factors; lanes are rows. Byte k of word i belongs to
/// columns 32 · (4i + k).. or, if the format has scales for 16, half as many.
#[derive(Clone, Copy)]
pub(super) struct Whole<I: Isa> {
    pub(super) scales: [I::U; 4],
    pub(super) biases: [I::U; 4],
    pub(super) factors: [I::F; 2],
}

impl<I: Isa> Whole<I> {
    /// Writes them to `tile` as those of a format.
    #[inline(always)]
    pub(super) fn put<F: Format>(self, isa: I, _: F, tile: &mut Tile) {
        let [scale, bias] = self.factors;
        tile.set_factors(isa, scale, bias);
        for i in 0..if F::Shape::HALVES { 4 } else { 2 } {
            let scales =
                if F::SIGNED { signed_bytes(isa, self.scales[i]) } else { isa.bytes(self.scales[i]) };
            for (j, scale) in scales.into_iter().enumerate() {
                tile.set_scale(isa, 4 * i + j, isa.to_f32(scale));
            }
            if F::Shape::BIAS {
                for (j, bias) in isa.bytes(self.biases[i]).into_iter().enumerate() {
                    tile.set_bias(isa, 4 * i + j, isa.to_f32(bias));
                }
            }
        }
    }
}

/// The four bytes of each lane, signed, the lowest first.
#[inline(always)]
fn signed_bytes<I: Isa>(isa: I, v: I::U) -> [I::U; 4] {
    [
        isa.sar::<24>(isa.shl::<24>(v)),
        isa.sar::<24>(isa.shl::<16>(v)),
        isa.sar::<24>(isa.shl::<8>(v)),
        isa.sar::<24>(v),
    ]
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
    /// (row): factors of scales and of biases, for formats that have them.
    factors: [[f32; MAX_LANES]; 2],
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
    /// Makes `tile` one whose codes have `zero` subtracted, all zeros. Made where it stays: small products would spend more
    /// time on moving it than on multiplying.
    #[inline(always)]
    pub(super) fn clear(tile: &mut MaybeUninit<Self>, zero: i32) -> &mut Self {
        *tile = MaybeUninit::zeroed();
        // SAFETY: numbers, all of which zero bytes are values of.
        let tile = unsafe { tile.assume_init_mut() };
        tile.zero = zero;
        tile
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

    /// Factors of all scales and of all biases.
    #[inline(always)]
    pub(super) fn factors<I: Isa>(&self, isa: I) -> [I::F; 2] {
        [get(isa, &self.factors[0]), get(isa, &self.factors[1])]
    }

    /// Sets [`Tile::factors`].
    #[inline(always)]
    pub(super) fn set_factors<I: Isa>(&mut self, isa: I, scale: I::F, bias: I::F) {
        put(isa, &mut self.factors[0], scale);
        put(isa, &mut self.factors[1], bias);
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
        if self.job.n_terms() > FEW {
            let format = self.format;
            return isa.call(batch::Multiply {
                shape: PhantomData::<F::Shape>,
                job: self.job,
                x: self.x,
                decode: &|rows, cols, tile| isa.call(Decode(Scales { format, rows, cols, tile })),
                zero: F::ZERO,
                bytes: TILE_COLS / F::COLS * F::BYTES,
            });
        }
        let mut lanes = Lanes::zeroed();
        let mut tile = MaybeUninit::uninit();
        let tile = Tile::clear(&mut tile, F::ZERO);
        walk(isa, self.job, Int8 { format: self.format, x: self.x, tile, lanes: &mut lanes });
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

/// [`Decode`] of a format, behind a pointer and compiled for the same instructions: what multiplies is compiled once for all
/// formats of a shape.
pub(super) type Decoder<'a> = &'a dyn Fn(&TileRows<'_>, (usize, usize), &mut Tile);

struct Int8<'a, F> {
    format: F,
    x: &'a Q8Rows,
    tile: &'a mut Tile,
    lanes: &'a mut Lanes,
}

impl<I: Isa, F: Format> Product<I> for Int8<'_, F> {
    /// [`MultiplyOne`] is of one.
    const TOKENS: usize = 1;

    #[inline(always)]
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize) {
        isa.call(Decode(Scales { format: self.format, rows, cols: (col, n), tile: &mut *self.tile }));
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
        for (token, sums) in tokens.into_iter().zip(sums) {
            isa.call(MultiplyOne {
                shape: PhantomData::<F::Shape>,
                tile: self.tile,
                zero: zero_point::<I, F::Shape>(F::ZERO),
                x: &self.x.term(token)[col..col + n],
                blocks: &self.x.term_blocks(token)[col / BLOCK..(col + n) / BLOCK],
                sums,
            });
        }
    }

    /// Lanes are columns, and rows are added up crosswise: cheaper than a tile that is hardly used.
    #[inline(always)]
    fn multiply_few(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        tokens: &[usize],
        (col, n): (usize, usize),
        sums: &mut [Sums],
        next: &mut NextRows,
    ) -> bool {
        if !F::GROUPS || n != TILE_COLS {
            return false;
        }
        if (F::RAW || F::NIBBLES.is_some())
            && let Some(pairs) = isa.pairs()
        {
            let format = self.format;
            pairs::multiply(
                isa,
                pairs,
                Columns { format, rows, x: self.x, col, next },
                self.tile,
                tokens,
                sums,
            );
            return true;
        }
        isa.call(Scales { format: self.format, rows, cols: (col, n), tile: &mut *self.tile });
        let plane = rows.plane(0);
        let first = plane.span(col / F::COLS * F::BYTES, TILE_COLS / F::COLS * F::BYTES);
        let (format, stride) = (self.format, plane.stride());
        for (&token, sums) in tokens.iter().zip(sums) {
            let x = self.x.term(token)[col..col + TILE_COLS].as_ptr();
            isa.call(DotRows { format, first, stride, x, lanes: &mut *self.lanes, next: &mut *next });
            let blocks = &self.x.term_blocks(token)[col / BLOCK..][..SUBS];
            let format = PhantomData::<F>;
            isa.call(AddQuads { format, tile: self.tile, lanes: self.lanes, blocks, sums });
        }
        true
    }
}

/// Dot products of a tile with one token, before lanes are added up: (vector of columns, four rows, lane).
#[repr(C, align(64))]
pub(super) struct Lanes([[[u32; MAX_LANES]; 4]; SUBS]);

impl Lanes {
    pub(super) fn zeroed() -> Self {
        Self([[[0; MAX_LANES]; 4]; SUBS])
    }
}

/// Whether sums of two lanes of dot products fit 16 bits only if zero points are subtracted from the start.
const fn centred_first<F: Format>() -> bool {
    F::BITS == 6 && !F::Shape::BIAS
}

/// The rows of a tile times one token.
pub(super) struct DotRows<'a, F> {
    pub(super) format: F,
    /// The blocks of lane 0.
    pub(super) first: *const u8,
    /// From a row's blocks to the next's.
    pub(super) stride: usize,
    /// [`TILE_COLS`] activations.
    pub(super) x: *const i8,
    pub(super) lanes: &'a mut Lanes,
    pub(super) next: &'a mut NextRows,
}

impl<F: Format> Kernel for DotRows<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        /// Groups of a tile for eight lanes; sixteen have half as many.
        const GROUPS: usize = TILE_COLS / 64;
        let n_groups = TILE_COLS / (8 * I::LANES);
        let zero = isa.splat_u(0);
        let (mut x, mut start) = ([[zero; 2]; GROUPS], [[zero; 2]; GROUPS]);
        for group in 0..n_groups {
            let subs = F::subs(I::LANES, group);
            for v in 0..2 {
                let [low, high] = subs[v];
                let from = self.x.cast::<u8>();
                // SAFETY: sub-blocks of the tile; where there is no second one it repeats the first.
                x[group][v] = unsafe { isa.load_parts(from.add(BLOCK * low), from.add(BLOCK * high)) };
                if centred_first::<F>() {
                    let zeros = isa.splat_u(F::ZERO as u32 * 0x0101_0101);
                    start[group][v] = isa.sub_u(zero, isa.dot(zero, zeros, x[group][v]));
                }
            }
        }
        // A loop that is unrolled needs more registers than there are.
        for quad in 0..black_box(I::LANES / 4) {
            let first = self.first.wrapping_add(4 * quad * self.stride);
            let mut ahead = [Ahead::NOTHING; 4];
            if const { F::AHEAD } {
                for i in 0..4 {
                    // SAFETY: blocks of LANES rows begin at `self.first`.
                    ahead[i] = unsafe { self.format.ahead(isa, first.add(i * self.stride)) };
                }
            }
            macro_rules! group {
                ($group:expr) => {
                    self.next.advance();
                    let (group, rows, format) = ($group, (first, self.stride), self.format);
                    let columns = (x[group], start[group]);
                    // SAFETY: as above.
                    let sums = unsafe { sums_of_four(isa, format, rows, &ahead, group, columns) };
                    for v in 0..2 {
                        let to = &mut self.lanes.0[2 * group + v][quad];
                        // SAFETY: LANES ≤ MAX_LANES.
                        unsafe { isa.store_u(to.as_mut_ptr(), sums[v]) };
                    }
                };
            }
            // Unrolled: shifts and places in memory are known.
            group!(0);
            group!(1);
            if n_groups > 2 {
                group!(2);
                group!(3);
            }
        }
    }
}

/// Sums of the two vectors of group `group` of four rows, the blocks of the first of which begin at `first`, times those of
/// `x`.
///
/// # Safety
/// All rows have this group.
#[inline(always)]
unsafe fn sums_of_four<I: Isa, F: Format>(
    isa: I,
    format: F,
    (first, stride): (*const u8, usize),
    ahead: &[Ahead; 4],
    group: usize,
    (x, start): ([I::U; 2], [I::U; 2]),
) -> [I::U; 2] {
    let zero = isa.splat_u(0);
    let subs = F::subs(I::LANES, group);
    let mut dots = [[zero; 4]; 2];
    for i in 0..4 {
        // SAFETY: by the caller.
        let codes = unsafe { format.group(isa, first.add(i * stride), &ahead[i], group) };
        for v in 0..2 {
            dots[v][i] = if const { F::SIGNS } {
                let [low, high] = subs[v];
                isa.dot(zero, codes[v], isa.negate_where(x[v], ahead[i].bits[low], ahead[i].bits[high]))
            } else {
                dot::<I, F::Shape>(isa, start[v], codes[v], x[v])
            };
        }
    }
    if const { F::BITS <= 6 } {
        [isa.sum_rows_of_16_bits(dots[0]), isa.sum_rows_of_16_bits(dots[1])]
    } else {
        [isa.sum_rows(dots[0]), isa.sum_rows(dots[1])]
    }
}

/// What [`DotRows`] left, added up: Σ (code − zero) · x of each sub-block or, if the format has scales for 16 columns, of its
/// first and its last 16; lanes are rows.
#[inline(always)]
pub(super) fn exact_dots<I: Isa, F: Format>(
    isa: I,
    tile: &Tile,
    lanes: &Lanes,
    blocks: &[Q8Block],
) -> [[I::F; 2]; SUBS] {
    let none = isa.splat_u(0);
    let mut dots = [[none; 2]; SUBS];
    for group in 0..TILE_COLS / (8 * I::LANES) {
        let subs = F::subs(I::LANES, group);
        for v in 0..2 {
            let mut quads = [none; 4];
            for quad in 0..I::LANES / 4 {
                // SAFETY: LANES ≤ MAX_LANES.
                quads[quad] = unsafe { isa.load_u(lanes.0[2 * group + v][quad].as_ptr()) };
            }
            let [low, high] = subs[v];
            if F::Shape::HALVES {
                let sums = isa.gather_quarters(quads);
                dots[low] = [sums[0], sums[1]];
                if const { I::LANES == 16 } {
                    dots[high] = [sums[2], sums[3]];
                }
            } else {
                let sums = isa.gather_halves(quads);
                dots[low][0] = sums[0];
                if const { I::LANES == 16 } {
                    dots[high][0] = sums[1];
                }
            }
        }
    }
    let zero = if F::SIGNS { 0 } else { zero_point::<I, F::Shape>(F::ZERO) };
    let mut exact = [[isa.splat(0.0); 2]; SUBS];
    for sub in 0..SUBS {
        let mut dots = dots[sub];
        if zero != 0 && !centred_first::<F>() {
            let [first, second] = blocks[sub].sums;
            let first = if F::Shape::HALVES { first } else { first + second };
            dots[0] = isa.add_u(dots[0], isa.splat_u((-zero * first) as u32));
            dots[1] = isa.add_u(dots[1], isa.splat_u((-zero * second) as u32));
        }
        exact[sub] = [isa.to_f32(dots[0]), isa.to_f32(dots[1])];
        if const { F::SHIFTS } {
            let [first, second] = blocks[sub].sums;
            exact[sub][0] =
                isa.mul_add(tile.bias(isa, sub), isa.splat((first + second) as f32), exact[sub][0]);
        }
    }
    exact
}

/// Adds what [`DotRows`] left to the sums of a tile's rows.
struct AddQuads<'a, F> {
    format: PhantomData<F>,
    tile: &'a Tile,
    lanes: &'a Lanes,
    blocks: &'a [Q8Block],
    sums: &'a mut Sums,
}

impl<F: Format> Kernel for AddQuads<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let dots = exact_dots::<I, F>(isa, self.tile, self.lanes, self.blocks);
        let Self { tile, sums, .. } = self;
        let sum = sums.get(isa, 0);
        let mut acc = begin::<I, F::Shape>(isa, sum);
        let mut biases = isa.splat(0.0);
        for sub in 0..SUBS {
            let x = &self.blocks[sub];
            acc = add_products::<I, F::Shape>(isa, tile, sub, dots[sub], isa.splat(x.scale), acc);
            if F::Shape::BIAS {
                let [first, second] = x_sums::<F::Shape>(x);
                let x = [isa.splat(first), isa.splat(second)];
                if F::Shape::SUPER {
                    biases = add_biases::<I, F::Shape>(isa, tile, sub, x, biases);
                } else {
                    acc = add_biases::<I, F::Shape>(isa, tile, sub, x, acc);
                }
            }
        }
        sums.put(isa, 0, end::<I, F::Shape>(isa, tile, [acc, biases], sum));
    }
}

/// acc + products of four codes with four activations in each lane.
#[inline(always)]
pub(super) fn dot<I: Isa, S: Shape>(isa: I, acc: I::U, w: I::U, x: I::U) -> I::U {
    if S::WIDE { isa.dot_wide(acc, w, x) } else { isa.dot(acc, w, x) }
}

/// What is to be subtracted from the codes that [`dot`] multiplies, of an encoding that subtracts `zero`.
#[inline(always)]
pub(super) fn zero_point<I: Isa, S: Shape>(zero: i32) -> i32 {
    zero - if S::WIDE { i32::from(I::WIDE_OFFSET) } else { 0 }
}

/// What [`add_products`] starts from, given the sum of the columns before the tile.
#[inline(always)]
pub(super) fn begin<I: Isa, S: Shape>(isa: I, sum: I::F) -> I::F {
    if S::SUPER { isa.splat(0.0) } else { sum }
}

/// The sum after the tile, given the sums of products and of biases and the sum before.
#[inline(always)]
pub(super) fn end<I: Isa, S: Shape>(isa: I, tile: &Tile, [acc, biases]: [I::F; 2], sum: I::F) -> I::F {
    if !S::SUPER {
        return acc;
    }
    let [scale, bias] = tile.factors(isa);
    let sum = isa.mul_add(scale, acc, sum);
    if S::BIAS { isa.mul_add(bias, biases, sum) } else { sum }
}

/// acc + the products of sub-block `sub`, `dots` being the sums of its (code − zero) · x: of all 32 columns or, if the
/// format has scales for 16, of the first and the last 16; `x_scale` is that of x. Every product goes through here, in
/// order of sub-blocks.
///
/// Integer scales times `dots`, and sums of two halves, are integers below 2²⁴ and thus exact.
#[inline(always)]
pub(super) fn add_products<I: Isa, S: Shape>(
    isa: I,
    tile: &Tile,
    sub: usize,
    dots: [I::F; 2],
    x_scale: I::F,
    acc: I::F,
) -> I::F {
    if S::HALVES {
        let first = isa.mul(dots[0], tile.scale(isa, 2 * sub));
        let both = isa.mul_add(dots[1], tile.scale(isa, 2 * sub + 1), first);
        isa.mul_add(both, x_scale, acc)
    } else if S::SUPER {
        isa.mul_add(isa.mul(dots[0], tile.scale(isa, sub)), x_scale, acc)
    } else {
        isa.mul_add(dots[0], isa.mul(tile.scale(isa, sub), x_scale), acc)
    }
}

/// What biases of a block are multiplied with: the scaled sum of all columns or, if there are biases for 16, those of the
/// first and the last 16.
#[inline(always)]
pub(super) fn x_sums<S: Shape>(x: &Q8Block) -> [f32; 2] {
    if S::HALVES { [x.scale * x.sums[0] as f32, x.scale * x.sums[1] as f32] } else { [x.sum, 0.0] }
}

/// acc + the biases of sub-block `sub`, given [`x_sums`]. With integer biases these sums are kept apart, else they follow
/// the sub-block's products.
#[inline(always)]
pub(super) fn add_biases<I: Isa, S: Shape>(isa: I, tile: &Tile, sub: usize, x: [I::F; 2], acc: I::F) -> I::F {
    if S::HALVES {
        let acc = isa.mul_add(tile.bias(isa, 2 * sub), x[0], acc);
        isa.mul_add(tile.bias(isa, 2 * sub + 1), x[1], acc)
    } else {
        isa.mul_add(tile.bias(isa, sub), x[0], acc)
    }
}
