//! Integer products of several tokens on a unit for small matrices ([`crate::cpu::simd::Tiles`]).
//!
//! Rows of a tile are 16 tokens, lanes two times 16 rows of weights, and its depth is what shares a scale, 32 columns: with
//! scales for 16, vectors are faster ([`gains`]). All sub-blocks of 256 columns are multiplied first, then their sums are
//! scaled and added up in groups of tokens by the code that does so without such a unit ([`super::batch`]); since integers
//! are exact, results have the same bits.
//!
//! Half of a tile's depth is used, and that is not what limits the speed: scaling 16 × 16 sums of 32 columns takes 48 vector
//! operations (conversion, scale of weights, scale of activations), 64 with biases, for the 16 cycles of the product itself.
//! Ways to scale less: converting by adding a large number saves the conversion and costs a load of initial sums (not faster
//! in a loop); weights times their scales do not fit 8 bits; in bf16, which needs no scaling, decoding a token alone would
//! have to round as the unit does.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::marker::PhantomData;
use std::ops::Range;

use super::{
    Job,
    batch::{Dots, TILES, accumulate, fields, for_groups},
    int8::{Format, SUBS, Shape, Tile},
    tile::{NextRows, Sums, TILE_COLS},
};
use crate::cpu::{
    activations::{BLOCK, Q8Rows},
    simd::{Isa, Kernel, MAX_LANES, RESULTS, Step, TILE_ROWS, TileShape, Tiles},
};

/// Terms of tokens from which on the unit is faster than vectors.
pub(super) const MANY: usize = 64;

/// Whether the unit is ever faster: scaling sums of 16 columns takes longer than vectors need for all.
pub(super) const fn gains<S: Shape>() -> bool {
    !S::HALVES
}

/// 256 columns of a token's activations.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Rows([i8; TILE_COLS]);

/// [`Rows`] of so many tokens: those of whole tiles if there are more than one.
pub(super) const fn padded(tokens: usize) -> usize {
    if tokens > TILE_ROWS { tokens.next_multiple_of(TILE_ROWS) } else { tokens }
}

/// Copies the terms of tokens `range` of a job to `packed`: (256 columns, [`padded`] terms).
pub(super) fn pack_rows(job: &Job<'_>, x: &Q8Rows, range: Range<usize>, packed: &mut Vec<Rows>) {
    let cols = job.w.cols();
    packed.clear();
    packed.reserve(padded(range.len()) * cols.div_ceil(TILE_COLS));
    for col in (0..cols).step_by(TILE_COLS) {
        let n = TILE_COLS.min(cols - col);
        for i in range.clone() {
            let mut row = Rows([0; TILE_COLS]);
            row.0[..n].copy_from_slice(&x.term(job.term(i))[col..col + n]);
            packed.push(row);
        }
        packed.resize(packed.len() + padded(range.len()) - range.len(), Rows([0; TILE_COLS]));
    }
}

/// Tiles for `tokens` tokens.
pub(super) fn shape<I: Isa>(tokens: usize) -> TileShape {
    TileShape { rows: tokens.min(TILE_ROWS), depth: BLOCK, lanes: I::LANES }
}

/// Sums of 256 columns: (32 columns, tile of weights, token, row of weights), i32; rows are those of a vector.
#[repr(C, align(64))]
pub(super) struct Products([u32; SUBS * TILES * RESULTS]);

impl Products {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; SUBS * TILES * RESULTS]))
    }

    /// Where the sums of sub-block `sub` and tile `tile` begin.
    fn at(sub: usize, tile: usize) -> usize {
        (sub * TILES + tile) * RESULTS
    }
}

/// Turns the codes of a tile's first sub-blocks, as decoders leave them, into what the unit multiplies: codes − zero as
/// signed bytes or, where zero is 0, codes as unsigned bytes.
pub(super) struct Centre<'a, F> {
    pub(super) format: PhantomData<F>,
    pub(super) tile: &'a mut Tile,
    pub(super) n_subs: usize,
}

impl<F: Format> Kernel for Centre<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let flip = if F::Shape::WIDE { I::WIDE_OFFSET } else { 0 };
        if flip == 0 && F::ZERO == 0 {
            return;
        }
        let zeros = isa.splat_u(F::ZERO as u32 * 0x0101_0101);
        let flip = isa.splat_u(u32::from(flip) * 0x0101_0101);
        for sub in 0..self.n_subs {
            let codes = self.tile.codes_mut(sub);
            for k in 0..BLOCK / 4 {
                codes.put(isa, k, isa.sub_bytes(isa.xor(codes.get(isa, k), flip), zeros));
            }
        }
    }
}

/// Two tiles of weights times columns of some tokens.
pub(super) struct MultiplyTiled<'a, F> {
    pub(super) format: PhantomData<F>,
    /// Configured for [`shape`].
    pub(super) unit: &'a Tiles,
    /// After [`Centre`].
    pub(super) tiles: [&'a Tile; TILES],
    /// ([`padded`] tokens).
    pub(super) rows: &'a [Rows],
    /// As [`super::batch::Packed`] has them, of these columns.
    pub(super) fields: &'a [u32],
    pub(super) products: &'a mut Products,
    /// Prefetched on the way, if wanted.
    pub(super) next: Option<&'a mut NextRows>,
    /// (tokens).
    pub(super) sums: &'a mut [Sums],
}

impl<F: Format> Kernel for MultiplyTiled<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        assert!(gains::<F::Shape>(), "a scale for 32 columns");
        let Self { unit, tiles, rows, mut fields, products, mut next, sums, .. } = self;
        let n_fields = self::fields::<F::Shape>();
        let n_subs = fields.len() / (sums.len() * n_fields);
        assert!(n_subs <= SUBS && fields.len() == sums.len() * n_subs * n_fields, "a tile's scales");
        assert!(rows.len() == padded(sums.len()), "a row of each token");
        for (rows, sums) in rows.chunks(TILE_ROWS).zip(sums.chunks_mut(TILE_ROWS)) {
            multiply_rows::<I, F>(unit, tiles, n_subs, rows, products, next.take());
            for_groups!(I, F::Shape, sums.len(), first, N, {
                let some = sums[first..].first_chunk_mut::<N>().expect("a group of tokens");
                let (f, rest) = fields.split_at(N * n_subs * n_fields);
                fields = rest;
                if I::LANES == 16 {
                    let dots = Stored { shape: PhantomData::<F::Shape>, products, tile: 0, first };
                    accumulate::<I, F::Shape, _, 2, N>(isa, tiles, n_subs, f, dots, some, 0);
                } else {
                    for (r, tile) in tiles.into_iter().enumerate() {
                        let dots = Stored { shape: PhantomData::<F::Shape>, products, tile: r, first };
                        accumulate::<I, F::Shape, _, 1, N>(isa, [tile], n_subs, f, dots, some, r);
                    }
                }
            });
        }
    }
}

/// All sub-blocks of at most [`TILE_ROWS`] tokens.
#[inline(always)]
fn multiply_rows<I: Isa, F: Format>(
    unit: &Tiles,
    tiles: [&Tile; TILES],
    n_subs: usize,
    rows: &[Rows],
    products: &mut Products,
    mut next: Option<&mut NextRows>,
) {
    assert!(n_subs <= SUBS && I::LANES <= MAX_LANES, "within buffers");
    let (a, c) = (rows.as_ptr().cast::<i8>(), products.0.as_mut_ptr());
    for sub in (0..n_subs).step_by(2) {
        let step = |sub: usize| {
            let c = c.wrapping_add(Products::at(sub, 0));
            let b = tiles.map(|tile| tile.codes(sub).words());
            Step { a: a.wrapping_add(sub * BLOCK), stride: size_of::<Rows>(), b, c }
        };
        // If they are odd, the last is computed twice.
        let steps = [step(sub), step((sub + 1).min(n_subs - 1))];
        // SAFETY: sub-blocks are below SUBS, so columns are below those of `Rows`, words within the codes of a sub-block,
        // and results within `Products`, which has RESULTS for each. `unit` is configured for as many tokens as there are
        // rows, this depth and these lanes.
        unsafe {
            if F::ZERO == 0 {
                unit.multiply::<false>(steps);
            } else {
                unit.multiply::<true>(steps);
            }
        }
        if let Some(next) = &mut next {
            // A little at a time: loads wait while a core waits for as many lines as it can.
            for _ in 0..NextRows::STEPS.div_ceil(n_subs.div_ceil(2)) {
                next.advance_to_second();
            }
        }
    }
}

/// Sums that [`multiply_rows`] left.
struct Stored<'a, S> {
    shape: PhantomData<S>,
    products: &'a Products,
    /// First tile of weights.
    tile: usize,
    /// First token of the group.
    first: usize,
}

impl<I: Isa, S: Shape, const R: usize, const N: usize> Dots<I, R, N> for Stored<'_, S> {
    #[inline(always)]
    fn dots(&mut self, isa: I, sub: usize) -> [[[I::U; N]; R]; 2] {
        assert!(sub < SUBS && self.tile + R <= TILES && self.first + N <= TILE_ROWS, "within the products");
        let mut dots = [[[isa.splat_u(0); N]; R]; 2];
        for r in 0..R {
            let at = Products::at(sub, self.tile + r) + self.first * I::LANES;
            for t in 0..N {
                // SAFETY: within the tile's sums by the assertion, as LANES ≤ MAX_LANES.
                dots[0][r][t] = unsafe { isa.load_u(self.products.0.as_ptr().add(at + t * I::LANES)) };
            }
        }
        dots
    }
}
