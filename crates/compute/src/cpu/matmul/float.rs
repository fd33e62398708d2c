//! Products of quantised weights with f32 activations.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::{
    Job,
    int8::{Decode, Decoder, Format, Scales, Shape, Tile},
    tile::{Product, Sums, TILE_COLS, TileRows, get, put, walk},
};
use crate::cpu::{
    activations::BLOCK,
    simd::{Isa, Kernel, MAX_LANES},
};

/// Decoded weights, exactly as their dequantiser yields them: (column, row), f32.
#[repr(C, align(64))]
pub(super) struct Values([[f32; MAX_LANES]; TILE_COLS]);

impl Values {
    /// All zero.
    pub(super) fn new() -> Self {
        Self([[0.0; MAX_LANES]; TILE_COLS])
    }

    /// Sets column `col` of the row in lane `lane`.
    pub(super) fn put_one(&mut self, col: usize, lane: usize, value: f32) {
        self.0[col][lane] = value;
    }
}

/// The product of a job with f32 activations.
pub(super) struct Multiply<'a, F> {
    pub(super) job: &'a Job<'a>,
    pub(super) format: F,
    /// (n_tokens, cols), f32.
    pub(super) x: &'a [f32],
}

impl<F: Format> Kernel for Multiply<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { job, format, x } = self;
        isa.call(MultiplyShape {
            shape: PhantomData::<F::Shape>,
            job,
            x,
            decode: &|rows, cols, tile| isa.call(Decode(Scales { format, rows, cols, tile })),
            zero: F::ZERO,
        });
    }
}

/// [`Multiply`] of any format of a shape.
struct MultiplyShape<'a, S> {
    shape: PhantomData<S>,
    job: &'a Job<'a>,
    x: &'a [f32],
    decode: Decoder<'a>,
    /// [`Format::ZERO`].
    zero: i32,
}

impl<S: Shape> Kernel for MultiplyShape<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { shape, job, x, decode, zero } = self;
        let (mut tile, mut values) = (MaybeUninit::uninit(), Values::new());
        let (tile, values) = (Tile::clear(&mut tile, zero), &mut values);
        walk(isa, job, Float { shape, decode, x, cols: job.w.cols(), tile, values });
    }
}

struct Float<'a, S> {
    shape: PhantomData<S>,
    decode: Decoder<'a>,
    x: &'a [f32],
    cols: usize,
    tile: &'a mut Tile,
    values: &'a mut Values,
}

impl<I: Isa, S: Shape> Product<I> for Float<'_, S> {
    #[inline(always)]
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize) {
        (self.decode)(rows, (col, n), self.tile);
        isa.call(Expand { shape: self.shape, tile: &*self.tile, n, values: &mut *self.values });
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
        let x = tokens.map(|token| &self.x[token * self.cols..][col..col + n]);
        isa.call(MultiplyValues { values: self.values, n, x, sums });
    }
}

/// The first `n` columns of a tile as f32.
struct Expand<'a, S> {
    shape: PhantomData<S>,
    tile: &'a Tile,
    n: usize,
    values: &'a mut Values,
}

impl<S: Shape> Kernel for Expand<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { tile, values, .. } = self;
        let byte = isa.splat_u(0xff);
        let offset = isa.splat_u(if S::WIDE { u32::from(I::WIDE_OFFSET) * 0x0101_0101 } else { 0 });
        let zero = isa.splat(tile.zero() as f32);
        let factors = tile.factors(isa);
        for sub in 0..self.n / BLOCK {
            for k in 0..BLOCK / 4 {
                let i = if S::HALVES { 2 * sub + k / 4 } else { sub };
                let (mut scale, mut bias) = (tile.scale(isa, i), tile.bias(isa, i));
                if S::SUPER {
                    (scale, bias) = (isa.mul(factors[0], scale), isa.mul(factors[1], bias));
                }
                let codes = isa.xor(tile.codes(sub).get(isa, k), offset);
                let code = [
                    isa.and(codes, byte),
                    isa.and(isa.shr::<8>(codes), byte),
                    isa.and(isa.shr::<16>(codes), byte),
                    isa.shr::<24>(codes),
                ];
                for (i, code) in code.into_iter().enumerate() {
                    let q = isa.sub(isa.to_f32(code), zero);
                    // scale · q is exact, so fusing does not matter.
                    let w = if S::BIAS { isa.mul_add(scale, q, bias) } else { isa.mul(scale, q) };
                    put(isa, &mut values.0[sub * BLOCK + 4 * k + i], w);
                }
            }
        }
    }
}

/// `n` columns of decoded weights times those of some tokens.
pub(super) struct MultiplyValues<'a, const N: usize> {
    pub(super) values: &'a Values,
    pub(super) n: usize,
    /// (N, n), f32.
    pub(super) x: [&'a [f32]; N],
    /// Of even and of odd columns.
    pub(super) sums: &'a mut [Sums; N],
}

impl<const N: usize> Kernel for MultiplyValues<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { values, n, x, sums } = self;
        let mut acc = [[isa.splat(0.0); 2]; N];
        for (acc, (sums, x)) in acc.iter_mut().zip(sums.iter().zip(x)) {
            assert_eq!(x.len(), n, "tokens of these columns");
            *acc = [sums.get(isa, 0), sums.get(isa, 1)];
        }
        let (pairs, odd) = values.0[..n].as_chunks::<2>();
        for (pair, w) in pairs.iter().enumerate() {
            for (i, w) in w.iter().enumerate() {
                let w = get(isa, w);
                for (acc, x) in acc.iter_mut().zip(x) {
                    // SAFETY: below n, the length of the slice.
                    let x = unsafe { *x.get_unchecked(2 * pair + i) };
                    acc[i] = isa.mul_add(w, isa.splat(x), acc[i]);
                }
            }
        }
        if let [w] = odd {
            let w = get(isa, w);
            for (acc, x) in acc.iter_mut().zip(x) {
                acc[0] = isa.mul_add(w, isa.splat(x[n - 1]), acc[0]);
            }
        }
        for (acc, sums) in acc.into_iter().zip(sums) {
            sums.put(isa, 0, acc[0]);
            sums.put(isa, 1, acc[1]);
        }
    }
}
