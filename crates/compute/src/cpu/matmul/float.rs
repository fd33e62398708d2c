//! Products with f32 activations.

use super::{
    Job,
    int8::{Format, Tile},
    tile::{Product, TILE_COLS, TileRows, get, put, walk},
};
use crate::{
    Result,
    cpu::{
        activations::BLOCK,
        simd::{Isa, Kernel, MAX_LANES},
    },
};

/// Decoded weights: (column, row), f32.
#[repr(C, align(64))]
pub(super) struct Tile32([[f32; MAX_LANES]; TILE_COLS]);

impl Tile32 {
    /// Sets column `col` of all rows.
    #[inline(always)]
    pub(super) fn put<I: Isa>(&mut self, isa: I, col: usize, v: I::F) {
        put(isa, &mut self.0[col], v);
    }

    /// Sets column `col` of the row in lane `lane`.
    pub(super) fn put_one(&mut self, col: usize, lane: usize, v: f32) {
        self.0[col][lane] = v;
    }
}

/// Weights as f32.
pub(super) trait Source {
    /// Decodes columns `col`..`col` + `n` of `rows`.
    fn decode<I: Isa>(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        tile: &mut Tile32,
    ) -> Result<()>;
}

/// Weights of an int8-capable format, as f32 exactly as the format's dequantiser yields them.
pub(super) struct Expand<F>(pub(super) F);

impl<F: Format> Source for Expand<F> {
    #[inline(always)]
    fn decode<I: Isa>(
        &mut self,
        isa: I,
        rows: &TileRows<'_>,
        col: usize,
        n: usize,
        out: &mut Tile32,
    ) -> Result<()> {
        let mut tile = Tile::new();
        self.0.scales(isa, rows, col, n, &mut tile);
        self.0.codes(isa, rows, col, n, &mut tile);
        let byte = isa.splat_u(0xff);
        let offset = isa.splat_u(if F::WIDE { u32::from(I::WIDE_OFFSET) * 0x0101_0101 } else { 0 });
        let zero = isa.splat(F::ZERO as f32);
        for sub in 0..n / BLOCK {
            let bias = tile.bias(isa, sub);
            for k in 0..BLOCK / 4 {
                let scale = tile.scale(isa, if F::HALVES { 2 * sub + k / 4 } else { sub });
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
                    let w = if F::BIAS { isa.mul_add(scale, q, bias) } else { isa.mul(scale, q) };
                    out.put(isa, sub * BLOCK + 4 * k + i, w);
                }
            }
        }
        Ok(())
    }
}

/// The product of a job with f32 activations.
pub(super) struct Multiply<'a, S> {
    pub(super) job: &'a Job<'a>,
    pub(super) source: S,
    /// (n_tokens, cols), f32.
    pub(super) x: &'a [f32],
}

impl<S: Source> Kernel for Multiply<'_, S> {
    type Output = Result<()>;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> Result<()> {
        let (x, cols) = (self.x, self.job.w.cols());
        let tile = Tile32([[0.0; MAX_LANES]; TILE_COLS]);
        walk(isa, self.job, Float { source: self.source, x, cols, tile })
    }
}

struct Float<'a, S> {
    source: S,
    x: &'a [f32],
    cols: usize,
    tile: Tile32,
}

impl<I: Isa, S: Source> Product<I> for Float<'_, S> {
    /// Of even and of odd columns.
    type Sums = [I::F; 2];

    #[inline(always)]
    fn zero(isa: I) -> Self::Sums {
        [isa.splat(0.0); 2]
    }

    #[inline(always)]
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize) -> Result<()> {
        self.source.decode(isa, rows, col, n, &mut self.tile)
    }

    #[inline(always)]
    unsafe fn multiply<const N: usize>(
        &self,
        isa: I,
        tokens: [usize; N],
        col: usize,
        n: usize,
        sums: &mut [Self::Sums; N],
    ) {
        let x = tokens.map(|token| self.x[token * self.cols..][col..col + n].as_ptr());
        let mut acc = *sums;
        let w = &self.tile.0[..n];
        for (pair, w) in w.chunks(2).enumerate() {
            for (i, w) in w.iter().enumerate() {
                let w = get(isa, w);
                for t in 0..N {
                    // SAFETY: below n, the length of the slice above.
                    let x = unsafe { *x[t].add(2 * pair + i) };
                    acc[t][i] = isa.mul_add(w, isa.splat(x), acc[t][i]);
                }
            }
        }
        *sums = acc;
    }

    #[inline(always)]
    fn finish(isa: I, [even, odd]: Self::Sums) -> I::F {
        isa.add(even, odd)
    }
}
