//! Products of plain float weights, or of FP8, with f32 activations.
//!
//! Lanes are columns: a row and a token have one vector of sums, to which the products of columns 0.., `LANES`.., …
//! are added in that order and whose lanes are added up in the end.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of registers")]

use std::ops::Range;

use super::{Job, OutRows};
use crate::cpu::simd::{Isa, Kernel, prefetch_second};

/// Tokens that all rows of a job are multiplied with before the next: their activations stay in cache.
const TOKEN_BLOCK: usize = 16;
/// Tokens from which on scaled weights are made floats first, once for all of the block, so many rows at once.
const LEAST_UNPACKED: usize = 4;
const UNPACKED_ROWS: usize = 4;

/// A float encoding.
pub(super) trait Plain: Copy {
    /// Bytes of a value.
    const BYTES: usize;
    /// Columns that share a scale, a multiple of 32 or [`usize::MAX`], if values have scales.
    const SCALED: Option<usize> = None;

    /// `LANES` values from `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of as many.
    unsafe fn load<I: Isa>(self, isa: I, p: *const u8) -> I::F;

    /// `n` < `LANES` values from `p`, then zeros.
    ///
    /// # Safety
    /// `p` is valid for reads of as many.
    unsafe fn load_first<I: Isa>(self, isa: I, p: *const u8, n: usize) -> I::F;

    /// What column `col` of row `row` is multiplied by.
    #[inline(always)]
    fn scale(self, _row: usize, _col: usize) -> f32 {
        1.0
    }
}

/// IEEE binary32.
#[derive(Clone, Copy)]
pub(super) struct F32;

impl Plain for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load<I: Isa>(self, isa: I, p: *const u8) -> I::F {
        // SAFETY: by the caller.
        unsafe { isa.load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_first<I: Isa>(self, isa: I, p: *const u8, n: usize) -> I::F {
        // SAFETY: by the caller.
        unsafe { isa.load_first(p.cast(), n) }
    }
}

/// IEEE binary16.
#[derive(Clone, Copy)]
pub(super) struct F16;

impl Plain for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<I: Isa>(self, isa: I, p: *const u8) -> I::F {
        // SAFETY: by the caller.
        unsafe { isa.load_f16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load_first<I: Isa>(self, isa: I, p: *const u8, n: usize) -> I::F {
        // SAFETY: by the caller.
        unsafe { isa.load_first_f16(p.cast(), n) }
    }
}

/// bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Plain for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load<I: Isa>(self, isa: I, p: *const u8) -> I::F {
        // SAFETY: by the caller.
        isa.of_bits(isa.shl::<16>(unsafe { isa.load_u16(p.cast()) }))
    }

    #[inline(always)]
    unsafe fn load_first<I: Isa>(self, isa: I, p: *const u8, n: usize) -> I::F {
        // SAFETY: by the caller.
        isa.of_bits(isa.shl::<16>(unsafe { isa.load_first_u16(p.cast(), n) }))
    }
}

/// The product of a job with f32 activations.
pub(super) struct Multiply<'a, P> {
    pub(super) job: &'a Job<'a>,
    pub(super) plain: P,
    /// (n_tokens, cols), f32.
    pub(super) x: &'a [f32],
}

impl<P: Plain> Kernel for Multiply<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (w, rows) = (self.job.w, self.job.rows.clone());
        let n_tokens = self.job.tokens.len();
        let stored = Weights { plain: self.plain, bytes: w.plane(0), stride: w.stride(0), first: 0 };
        let mut values = vec![];
        for first in (0..n_tokens).step_by(TOKEN_BLOCK) {
            let tokens = first..(first + TOKEN_BLOCK).min(n_tokens);
            let Self { job, x, .. } = self;
            if const { P::SCALED.is_some() } && tokens.len() >= LEAST_UNPACKED {
                values.resize(UNPACKED_ROWS * w.cols(), 0.0);
                for row in rows.clone().step_by(UNPACKED_ROWS) {
                    let rows = row..(row + UNPACKED_ROWS).min(rows.end);
                    let weights = stored.unpack(isa, rows.clone(), w.cols(), &mut values);
                    isa.call(MultiplyRows { job, x, weights, rows, tokens: tokens.clone() });
                }
            } else {
                isa.call(MultiplyRows { job, x, weights: stored, rows: rows.clone(), tokens });
            }
        }
    }
}

/// Rows of weights.
#[derive(Clone, Copy)]
struct Weights<'a, P> {
    plain: P,
    bytes: &'a [u8],
    /// Bytes from a row to the next.
    stride: usize,
    /// The row that `bytes` begin with.
    first: usize,
}

impl<P: Plain> Weights<'_, P> {
    /// Rows `rows` of `cols` values, each times its scale, in `values`.
    #[inline(always)]
    fn unpack<'v, I: Isa>(
        &self,
        isa: I,
        rows: Range<usize>,
        cols: usize,
        values: &'v mut [f32],
    ) -> Weights<'v, F32> {
        let whole = cols / I::LANES * I::LANES;
        for (row, out) in rows.clone().zip(values.chunks_exact_mut(cols)) {
            let codes = &self.bytes[(row - self.first) * self.stride..][..cols * P::BYTES];
            let mut scale = isa.splat(1.0);
            for col in (0..cols).step_by(I::LANES) {
                if P::SCALED.is_some_and(|shared| col % shared == 0) {
                    scale = isa.splat(self.plain.scale(row, col));
                }
                // SAFETY: codes and results have `cols` elements, of which all before `whole` are in whole vectors.
                unsafe {
                    let (p, to) = (codes.as_ptr().add(col * P::BYTES), out.as_mut_ptr().add(col));
                    if col < whole {
                        isa.store(to, isa.mul(self.plain.load(isa, p), scale));
                    } else {
                        isa.store_first(
                            to,
                            isa.mul(self.plain.load_first(isa, p, cols - col), scale),
                            cols - col,
                        );
                    }
                }
            }
        }
        let bytes = values_as_bytes(values);
        Weights { plain: F32, bytes, stride: cols * F32::BYTES, first: rows.start }
    }
}

/// The bytes of `values`.
fn values_as_bytes(values: &[f32]) -> &[u8] {
    // SAFETY: any bytes are bytes, and there are as many.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Rows of a job times some of its tokens.
struct MultiplyRows<'a, P> {
    job: &'a Job<'a>,
    /// (n_tokens, cols), f32.
    x: &'a [f32],
    weights: Weights<'a, P>,
    rows: Range<usize>,
    tokens: Range<usize>,
}

impl<P: Plain> Kernel for MultiplyRows<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { rows, tokens: Range { start: first, end }, .. } = &self;
        let (first, end) = (*first, *end);
        let mut row = rows.start;
        while end - first == 1 && row + 8 <= rows.end {
            self.tile::<I, 8, 1>(isa, row, first);
            row += 8;
        }
        while row + 4 <= rows.end {
            let mut token = first;
            if const { I::TOKENS >= 8 } {
                while token + 4 <= end {
                    self.tile::<I, 4, 4>(isa, row, token);
                    token += 4;
                }
            }
            if const { I::TOKENS >= 4 } {
                while token + 2 <= end {
                    self.tile::<I, 4, 2>(isa, row, token);
                    token += 2;
                }
            }
            while token < end {
                self.tile::<I, 4, 1>(isa, row, token);
                token += 1;
            }
            row += 4;
        }
        for row in row..rows.end {
            for token in first..end {
                self.tile::<I, 1, 1>(isa, row, token);
            }
        }
    }
}

impl<P: Plain> MultiplyRows<'_, P> {
    /// Computes `R` rows from `row` on of `N` tokens from `token` on.
    #[inline(always)]
    fn tile<I: Isa, const R: usize, const N: usize>(&self, isa: I, row: usize, token: usize) {
        let Job { w, tokens, out, .. } = self.job;
        let Weights { plain, stride, first, bytes } = self.weights;
        let cols = w.cols();
        let row_bytes = cols * P::BYTES;
        let weights = &bytes[(row - first) * stride..];
        assert!(weights.len() >= (R - 1) * stride + row_bytes, "rows within the matrix");
        let mut x = [std::ptr::null(); N];
        for (i, x) in x.iter_mut().enumerate() {
            *x = self.x[tokens.get(token + i) * cols..][..cols].as_ptr();
        }

        let mut sums = [[isa.splat(0.0); N]; R];
        let whole = cols / I::LANES * I::LANES;
        let mut scales = [isa.splat(1.0); R];
        for col in (0..whole).step_by(I::LANES) {
            if let Some(shared) = P::SCALED
                && col % shared == 0
            {
                for r in 0..R {
                    scales[r] = isa.splat(plain.scale(row + r, col));
                }
            }
            // The next rows follow in memory: they are asked for in order of addresses.
            let next = R * (stride + col * P::BYTES);
            for at in (next..next + R * I::LANES * P::BYTES).step_by(64) {
                prefetch_second(weights.as_ptr().wrapping_add(at));
            }
            let mut inputs = [isa.splat(0.0); N];
            for t in 0..N {
                // SAFETY: col + LANES ≤ cols, the length of this row of activations.
                inputs[t] = unsafe { isa.load(x[t].add(col)) };
            }
            for r in 0..R {
                // SAFETY: within row r of the R rows that `weights` holds.
                let mut w = unsafe { plain.load(isa, weights.as_ptr().add(r * stride + col * P::BYTES)) };
                if P::SCALED.is_some() {
                    w = isa.mul(w, scales[r]);
                }
                for t in 0..N {
                    sums[r][t] = isa.mul_add(w, inputs[t], sums[r][t]);
                }
            }
        }
        if whole < cols {
            let rest = cols - whole;
            for t in 0..N {
                // SAFETY: whole + rest = cols.
                let x = unsafe { isa.load_first(x[t].add(whole), rest) };
                for r in 0..R {
                    // SAFETY: as above.
                    let mut w = unsafe {
                        let p = weights.as_ptr().add(r * stride + whole * P::BYTES);
                        plain.load_first(isa, p, rest)
                    };
                    if P::SCALED.is_some() {
                        w = isa.mul(w, isa.splat(plain.scale(row + r, whole)));
                    }
                    sums[r][t] = isa.mul_add(w, x, sums[r][t]);
                }
            }
        }
        write_sums(isa, out, row, token, &sums);
    }
}

/// Writes the sums of `R` rows and `N` tokens.
#[inline(always)]
fn write_sums<I: Isa, const R: usize, const N: usize>(
    isa: I,
    out: &OutRows<'_>,
    row: usize,
    token: usize,
    sums: &[[I::F; N]; R],
) {
    if const { R * N == 16 } {
        let mut all = [isa.splat(0.0); 16];
        for t in 0..N {
            for r in 0..R {
                all[t * R + r] = sums[r][t];
            }
        }
        for (t, totals) in isa.reduce_add_16(all).chunks_exact(R).enumerate() {
            out.write(token + t, row, totals);
        }
        return;
    }
    for t in 0..N {
        let mut totals = [0.0; R];
        for (total, sums) in totals.iter_mut().zip(sums) {
            *total = isa.reduce_add(sums[t]);
        }
        out.write(token + t, row, &totals);
    }
}
