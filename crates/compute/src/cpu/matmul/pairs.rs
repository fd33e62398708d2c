//! Products of few tokens with int8 activations, of levels that have [`Pairs`].
//!
//! Sums of two products have 16 bits, and there is room for more: rows are mixed in pairs before codes are made of their bytes,
//! so that a vector has half of the columns of two rows, and what belongs to a row is added up before it becomes 32 bits
//! wide. Where scales are whole numbers, sums are multiplied with them as the last products are added up.

#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::hint::black_box;

use super::{
    int8::{Format, SUBS, Scales, Shape, Tile, Whole, add_biases, add_products, x_sums},
    tile::{NextRows, Sums, TILE_COLS, TileRows},
};
use crate::cpu::{
    activations::{BLOCK, Q8Block, Q8Rows},
    simd::{Isa, Pairs},
};

/// Rows of a tile: lanes of the levels that have [`Pairs`].
const ROWS: usize = 8;

/// Columns of a tile's rows and what they are multiplied with.
pub(super) struct Columns<'a, F> {
    pub(super) format: F,
    pub(super) rows: &'a TileRows<'a>,
    pub(super) x: &'a Q8Rows,
    /// The first of [`TILE_COLS`].
    pub(super) col: usize,
    pub(super) next: &'a mut NextRows,
}

/// Whether zero points are subtracted from the start: where scales belong to 16 columns or sums would not fit 16 bits.
const fn centred_first<F: Format>() -> bool {
    F::ZERO != 0 && (F::Shape::HALVES || F::BITS > 4)
}

/// Whether the sums of a sub-block's halves do not fit 16 bits together or have different scales: sixteen pairs' sums, each a
/// quarter of a row's, fit in any case.
const fn halves_apart<F: Format>() -> bool {
    F::BITS > 4 || F::Shape::HALVES
}

/// Adds the products of `tokens`, of which there are one or two, to their `sums`.
#[inline(always)]
pub(super) fn multiply<I: Isa, F: Format>(
    isa: I,
    pairs: I::Pairs,
    columns: Columns<'_, F>,
    tile: &mut Tile,
    tokens: &[usize],
    sums: &mut [Sums],
) {
    let Columns { format, rows, x, col, next } = columns;
    let whole = format.whole(isa, rows, col);
    if whole.is_none() {
        isa.call(Scales { format, rows, cols: (col, TILE_COLS), tile: &mut *tile });
    }
    let plane = rows.plane(0);
    let first = plane.span(col / F::COLS * F::BYTES, TILE_COLS / F::COLS * F::BYTES);
    let first = (first, plane.stride());
    match (tokens, sums) {
        (&[token], [sum]) => {
            let [dots] = dots(isa, pairs, format, first, [&x.term(token)[col..][..TILE_COLS]], next);
            let blocks = &x.term_blocks(token)[col / BLOCK..][..SUBS];
            add::<I, F>(isa, pairs, (tile, whole), &dots, blocks, sum);
        }
        (&[a, b], [sum_a, sum_b]) => {
            let x_of = [&x.term(a)[col..][..TILE_COLS], &x.term(b)[col..][..TILE_COLS]];
            let [dots_a, dots_b] = dots(isa, pairs, format, first, x_of, next);
            let blocks = &x.term_blocks(a)[col / BLOCK..][..SUBS];
            add::<I, F>(isa, pairs, (tile, whole), &dots_a, blocks, sum_a);
            let blocks = &x.term_blocks(b)[col / BLOCK..][..SUBS];
            add::<I, F>(isa, pairs, (tile, whole), &dots_b, blocks, sum_b);
        }
        _ => unreachable!("few tokens, and sums for each"),
    }
}

/// Sums of a tile's products with a token, of 16 bits: (sub-block, four rows); each half of a vector has two for each row.
type Dots<I> = [[<I as Isa>::U; 2]; SUBS];

/// What a tile's rows are multiplied with: (token, sub-block).
struct Factors<I: Isa, const N: usize> {
    x: [[I::U; SUBS]; N],
    /// With the words of each half exchanged.
    swapped: [[I::U; SUBS]; N],
    /// What sums start from.
    start: [[I::U; SUBS]; N],
}

impl<I: Isa, const N: usize> Factors<I, N> {
    /// Of [`TILE_COLS`] activations each.
    #[inline(always)]
    fn new<F: Format>(isa: I, pairs: I::Pairs, x: [&[i8]; N]) -> Self {
        let none = isa.splat_u(0);
        let zeros = isa.splat_u(F::ZERO as u32 * 0x0101_0101);
        let mut factors = Self { x: [[none; SUBS]; N], swapped: [[none; SUBS]; N], start: [[none; SUBS]; N] };
        for t in 0..N {
            let x_of = &mut factors.x[t];
            for (sub, x) in x[t].as_chunks::<BLOCK>().0.iter().enumerate().take(SUBS) {
                // SAFETY: 32 columns.
                x_of[sub] = unsafe { isa.load_u(x.as_ptr().cast()) };
            }
            if F::NIBBLES.is_some() {
                for of_two in x_of.as_chunks_mut::<2>().0 {
                    let [a, b] = *of_two;
                    *of_two = if F::NEIGHBOURS { pairs.even_and_odd(a, b) } else { pairs.regroup(a, b) };
                }
            }
            for sub in 0..SUBS {
                let (x, swapped) = (x_of[sub], pairs.swap(x_of[sub]));
                factors.swapped[t][sub] = swapped;
                if centred_first::<F>() {
                    let zero = pairs.add(pairs.multiply(zeros, x), pairs.multiply(zeros, swapped));
                    factors.start[t][sub] = pairs.sub(none, zero);
                }
            }
        }
        factors
    }

    /// Sums of group `group` of four rows, the blocks of the first of which begin at `first`: (token, sub-block) or, if there are
    /// [`Format::NIBBLES`], both sub-blocks' in the halves of the first.
    ///
    /// # Safety
    /// All rows have this group.
    #[inline(always)]
    unsafe fn quad<F: Format>(
        &self,
        (isa, pairs): (I, I::Pairs),
        format: F,
        (first, stride): (*const u8, usize),
        group: usize,
    ) -> [[I::U; 2]; N] {
        let ones = isa.splat_u(0x0001_0001);
        let mut sums = [[[ones; 2]; 2]; N];
        for pair in 0..2 {
            let row = first.wrapping_add(2 * pair * stride);
            let (codes, others) = if let Some(at) = F::NIBBLES {
                let at = 2 * group * F::BYTES + at;
                // SAFETY: by the caller.
                let (a, b) = unsafe {
                    let (a, b) = (row.add(at), row.add(stride + at));
                    (pairs.load_halves(a, a.add(F::BYTES)), pairs.load_halves(b, b.add(F::BYTES)))
                };
                let [a, b] = pairs.mix(a, b);
                (nibbles::<I, F>(isa, a), nibbles::<I, F>(isa, b))
            } else {
                // SAFETY: by the caller.
                let (a, b) =
                    unsafe { (format.raw(isa, row, group), format.raw(isa, row.add(stride), group)) };
                let ([a, c], [b, d]) = (pairs.mix(a[0], b[0]), pairs.mix(a[1], b[1]));
                (format.expand(isa, [a, b], group), format.expand(isa, [c, d], group))
            };
            for (v, [sub, _]) in F::subs(ROWS, group).into_iter().enumerate() {
                for t in 0..N {
                    let mut sum = pairs.multiply(codes[v], self.x[t][sub]);
                    if centred_first::<F>() {
                        sum = pairs.add(sum, self.start[t][sub]);
                    }
                    sums[t][v][pair] = pairs.add(sum, pairs.multiply(others[v], self.swapped[t][sub]));
                }
            }
            for [first, second] in &mut sums {
                if F::NIBBLES.is_some() {
                    first[pair] = pairs.dot(pairs.add(first[pair], second[pair]), ones);
                } else {
                    first[pair] = pairs.dot(first[pair], ones);
                    second[pair] = pairs.dot(second[pair], ones);
                }
            }
        }
        let mut quads = [[ones; 2]; N];
        for t in 0..N {
            for v in 0..2 {
                quads[t][v] = pairs.pack(sums[t][v][0], sums[t][v][1]);
            }
        }
        quads
    }
}

/// Codes of the low and of the high nibbles.
#[inline(always)]
fn nibbles<I: Isa, F: Format>(isa: I, v: I::U) -> [I::U; 2] {
    let low = isa.splat_u(0x0f0f_0f0f);
    [F::of_nibbles(isa, isa.and(v, low)), F::of_nibbles(isa, isa.and(isa.shr::<4>(v), low))]
}

/// [`Dots`] of a tile's rows, the first and the way from one to the next, with tokens.
#[inline(always)]
fn dots<I: Isa, F: Format, const N: usize>(
    isa: I,
    pairs: I::Pairs,
    format: F,
    (first, stride): (*const u8, usize),
    x: [&[i8]; N],
    next: &mut NextRows,
) -> [Dots<I>; N] {
    let factors = Factors::<I, N>::new::<F>(isa, pairs, x);
    let mut dots = [[[isa.splat_u(0); 2]; SUBS]; N];
    // A loop that is unrolled needs more registers than there are.
    for quad in 0..black_box(ROWS / 4).min(ROWS / 4) {
        let first = first.wrapping_add(4 * quad * stride);
        // Of each group, what bits are shifted by is known when this is compiled.
        macro_rules! group {
            ($group:literal) => {
                next.advance();
                // SAFETY: blocks of ROWS rows begin at `first`.
                let quads = unsafe { factors.quad((isa, pairs), format, (first, stride), $group) };
                for (v, [sub, _]) in F::subs(ROWS, $group).into_iter().enumerate() {
                    for t in 0..N {
                        dots[t][sub][quad] = quads[t][v];
                    }
                }
            };
        }
        group!(0);
        group!(1);
        group!(2);
        group!(3);
    }
    dots
}

/// Adds [`dots`] to the sums of a tile's rows.
#[inline(always)]
fn add<I: Isa, F: Format>(
    isa: I,
    pairs: I::Pairs,
    (tile, whole): (&Tile, Option<Whole<I>>),
    dots: &Dots<I>,
    blocks: &[Q8Block],
    sums: &mut Sums,
) {
    let sum = sums.get(isa, 0);
    let Some(Whole { scales, biases, factors: [scale, bias] }) = whole else {
        return sums.put(isa, 0, add_scaled::<I, F>(isa, pairs, tile, dots, blocks, sum));
    };
    let none = isa.splat(0.0);
    let mut halves = [[isa.splat_u(0); 2]; 4];
    if halves_apart::<F>() {
        for i in 0..4 {
            halves[i] = pairs.repeat_halves(scales[i]);
        }
    }
    let (mut acc, mut less) = (none, none);
    for word in 0..if F::Shape::HALVES { 4 } else { 2 } {
        let biases = if F::Shape::BIAS { isa.bytes(biases[word]) } else { [isa.splat_u(0); 4] };
        for i in 0..if F::Shape::HALVES { 2 } else { 4 } {
            let (sub, low, high) =
                if F::Shape::HALVES { (2 * word + i, 2 * i, 2 * i + 1) } else { (4 * word + i, i, i) };
            let [first, last] = dots[sub];
            let x = &blocks[sub];
            let scale = |word: I::U| {
                if F::SIGNED {
                    pairs.spread::<true>(word, low, high)
                } else {
                    pairs.spread::<false>(word, low, high)
                }
            };
            let products = if halves_apart::<F>() {
                let [first_scale, last_scale] = halves[word];
                pairs.add_halves_of_32(
                    pairs.dot(first, scale(first_scale)),
                    pairs.dot(last, scale(last_scale)),
                )
            } else {
                pairs.dot(pairs.add_halves(first, last), scale(scales[word]))
            };
            acc = isa.mul_add(isa.to_f32(products), isa.splat(x.scale), acc);
            if F::Shape::BIAS {
                let [x_first, x_last] = x_sums::<F::Shape>(x);
                less = isa.mul_add(isa.to_f32(biases[low]), isa.splat(x_first), less);
                if F::Shape::HALVES {
                    less = isa.mul_add(isa.to_f32(biases[high]), isa.splat(x_last), less);
                }
            }
        }
    }
    let mut sum = isa.mul_add(scale, acc, sum);
    if F::Shape::BIAS {
        sum = isa.mul_add(bias, less, sum);
    }
    sums.put(isa, 0, sum);
}

/// As [`add`], where scales are not whole numbers: the sum of a tile's rows, given that of the columns before.
#[inline(always)]
fn add_scaled<I: Isa, F: Format>(
    isa: I,
    pairs: I::Pairs,
    tile: &Tile,
    dots: &Dots<I>,
    blocks: &[Q8Block],
    sum: I::F,
) -> I::F {
    let ones = isa.splat_u(0x0001_0001);
    let mut acc = sum;
    for pair in 0..SUBS / 2 {
        let [first, last] = dots[2 * pair];
        for (i, sums) in pairs.regroup(first, last).into_iter().enumerate() {
            let (sub, x) = (2 * pair + i, &blocks[2 * pair + i]);
            let mut sums = pairs.dot(sums, ones);
            if F::ZERO != 0 && !centred_first::<F>() {
                let [first, second] = x.sums;
                sums = isa.add_u(sums, isa.splat_u((-F::ZERO * (first + second)) as u32));
            }
            let dots = [isa.to_f32(sums), isa.splat(0.0)];
            acc = add_products::<I, F::Shape>(isa, tile, sub, dots, isa.splat(x.scale), acc);
            if F::Shape::BIAS {
                let [first, second] = x_sums::<F::Shape>(x);
                acc = add_biases::<I, F::Shape>(isa, tile, sub, [isa.splat(first), isa.splat(second)], acc);
            }
        }
    }
    acc
}
