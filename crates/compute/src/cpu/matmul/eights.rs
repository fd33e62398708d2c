//! Products with the bits of GPUs' kernels that multiply few rows by floats: those of `float_dots` in `gpu/kernels/floats.h`.
//!
//! There a lane of a warp takes eight columns, and those 256 further on, and adds one product after the other to its sum; the
//! lanes' sums are added up by halving the warp. Lanes here are those lanes: a vector has the same column of each one's eight.

use std::marker::PhantomData;
use std::ops::Range;

use super::{
    NextJob,
    fp8::Fp8,
    plain::{Bf16, F16, F32, Plain},
};
use crate::cpu::{
    activations::BLOCK,
    simd::{Isa, Kernel, MAX_LANES, Simd, SimdLevel, prefetch_second},
};
use crate::dtype::FP8_BLOCK;
use crate::{BlockScale, DType, Error, Result, TensorView};

/// Lanes of a warp.
const WARP: usize = 32;
/// Columns that a lane takes at once.
const EIGHT: usize = 8;
/// Columns that a warp takes at once.
const STEP: usize = EIGHT * WARP;
/// Rows of weights that are multiplied beside each other.
const ROWS: usize = 4;
/// Bytes of a line of a cache.
const LINE: usize = 64;
/// Bytes of a vector's weights at most.
const MOST_BYTES: usize = EIGHT * MAX_LANES * size_of::<f32>();

/// How many times too small scaled values are before they are scaled.
const TOO_SMALL: f32 = 256.0;

/// Whether [`multiply_eights`] takes weights of this encoding, at this level: it must round products that are added up once.
pub(crate) fn has_eights(simd: Simd, dtype: DType, cols: usize) -> bool {
    let known = matches!(
        dtype,
        DType::F32
            | DType::F16
            | DType::BF16
            | DType::Fp8 { .. }
            | DType::Fp8_Rows { .. }
            | DType::Fp8_Whole { .. }
            | DType::MXFP8_Planes
    );
    known && simd.level() != SimdLevel::Portable && cols.is_multiple_of(EIGHT)
}

/// Rows of activations, not rounded, in the order in which lanes take their columns.
#[derive(Debug, Default)]
pub(crate) struct EightRows {
    x: Vec<f32>,
    n_rows: usize,
    cols: usize,
}

/// Values of a row: those of whole steps.
fn row_len(cols: usize) -> usize {
    cols.next_multiple_of(STEP)
}

/// Where a row has a column.
fn place_of(column: usize) -> usize {
    column / STEP * STEP + column % EIGHT * WARP + column % STEP / EIGHT
}

impl EightRows {
    /// Makes room for `n_rows` rows of `cols` columns, each of which is to be written whole: only what follows its end is zeros.
    pub(crate) fn resize(&mut self, n_rows: usize, cols: usize) {
        if cols != self.cols {
            self.x.clear();
        }
        (self.n_rows, self.cols) = (n_rows, cols);
        self.x.resize(n_rows * row_len(cols), 0.0);
    }

    /// What several threads write rows by.
    pub(crate) fn writer(&mut self) -> EightWriter<'_> {
        let (n_rows, cols) = (self.n_rows, self.cols);
        EightWriter { x: self.x.as_mut_ptr(), n_rows, cols, rows: PhantomData }
    }

    fn row(&self, row: usize) -> &[f32] {
        let len = row_len(self.cols);
        &self.x[row * len..][..len]
    }
}

/// Writes blocks of [`EightRows`] from several threads.
pub(crate) struct EightWriter<'a> {
    x: *mut f32,
    n_rows: usize,
    cols: usize,
    rows: PhantomData<&'a mut EightRows>,
}

// SAFETY: what is written through it is not aliased, by the contract of its only method.
unsafe impl Send for EightWriter<'_> {}
// SAFETY: as above.
unsafe impl Sync for EightWriter<'_> {}

impl EightWriter<'_> {
    /// Writes 32 columns of a row.
    ///
    /// # Safety
    /// No other call writes this block at the same time.
    ///
    /// # Panics
    /// If there is no such block.
    pub(crate) unsafe fn write(&self, row: usize, block: usize, values: &[f32; BLOCK]) {
        assert!(row < self.n_rows && (block + 1) * BLOCK <= self.cols, "a block of a row");
        let first = row * row_len(self.cols);
        for (i, value) in values.iter().enumerate() {
            // SAFETY: within the row by the assertion; not aliased by the contract of this function.
            unsafe { self.x.add(first + place_of(block * BLOCK + i)).write(*value) };
        }
    }
}

/// Products of rows of weights with a row of activations.
pub(crate) struct EightJob<'a> {
    /// The weights.
    pub(crate) w: TensorView<'a>,
    /// Which rows of them.
    pub(crate) rows: Range<usize>,
    /// The activations, and which row of them.
    pub(crate) x: &'a EightRows,
    pub(crate) row: usize,
    /// Fetched while the last rows are multiplied.
    pub(crate) next: Option<NextJob<'a>>,
}

/// Writes the products of `job.rows` to `out`, which is as long.
///
/// # Errors
/// [`Error::Shape`] if sizes do not fit each other, [`Error::Unsupported`] for weights that [`has_eights`] refuses.
pub(crate) fn multiply_eights(simd: Simd, job: &EightJob<'_>, out: &mut [f32]) -> Result<()> {
    let EightJob { w, rows, x, row, .. } = job;
    let fits = |what, expected, got| Err(Error::Shape { op: "matmul", what, expected, got });
    if x.cols != w.cols() {
        return fits("columns of the activations", w.cols(), x.cols);
    }
    if rows.end > w.rows() || *row >= x.n_rows {
        return fits("end of the range of rows", w.rows(), rows.end);
    }
    if out.len() != rows.len() {
        return fits("rows of the output", rows.len(), out.len());
    }
    let dtype = w.dtype();
    if !has_eights(simd, dtype, w.cols()) {
        return Err(Error::Unsupported { what: "a product by eights", dtype });
    }
    match dtype {
        DType::F32 => simd.run(Multiply { job, plain: F32, out }),
        DType::F16 => simd.run(Multiply { job, plain: F16, out }),
        DType::BF16 => simd.run(Multiply { job, plain: Bf16, out }),
        DType::Fp8 { scale } => {
            simd.run(Multiply { job, plain: Fp8::<FP8_BLOCK>::new(*w, scale), out });
        }
        DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale } => {
            simd.run(Multiply { job, plain: Fp8::<{ usize::MAX }>::new(*w, scale), out });
        }
        _ => simd.run(Multiply { job, plain: Fp8::<BLOCK>::new(*w, BlockScale::E8M0), out }),
    }
    Ok(())
}

/// A float encoding whose columns come by eights.
trait Eights: Plain {
    /// Column i of the eight columns that each of `LANES` lanes has from `p` on, side by side; those with scales
    /// [`TOO_SMALL`] times too small.
    ///
    /// # Safety
    /// `p` is valid for reads of as many values.
    unsafe fn eight<I: Isa>(isa: I, p: *const u8) -> [I::F; EIGHT];

    /// What the products of each eight of a row are multiplied by, which undoes what values are too small by.
    fn factors(self, _row: usize, _factors: &mut [f32]) {}
}

impl Eights for F32 {
    #[inline(always)]
    unsafe fn eight<I: Isa>(isa: I, p: *const u8) -> [I::F; EIGHT] {
        let bytes = EIGHT * F32::BYTES;
        // SAFETY: by the caller.
        let ([a, b, c, d], [e, f, g, h]) =
            unsafe { (isa.load_transposed(p, bytes), isa.load_transposed(p.add(bytes / 2), bytes)) };
        [
            isa.of_bits(a),
            isa.of_bits(b),
            isa.of_bits(c),
            isa.of_bits(d),
            isa.of_bits(e),
            isa.of_bits(f),
            isa.of_bits(g),
            isa.of_bits(h),
        ]
    }
}

impl Eights for F16 {
    #[inline(always)]
    unsafe fn eight<I: Isa>(isa: I, p: *const u8) -> [I::F; EIGHT] {
        // SAFETY: by the caller.
        let words = unsafe { isa.load_transposed(p, EIGHT * F16::BYTES) };
        let mut out = [isa.splat(0.0); EIGHT];
        for (pair, word) in out.as_chunks_mut::<2>().0.iter_mut().zip(words) {
            *pair = isa.f16_pairs_to_f32(word);
        }
        out
    }
}

impl Eights for Bf16 {
    #[inline(always)]
    unsafe fn eight<I: Isa>(isa: I, p: *const u8) -> [I::F; EIGHT] {
        // SAFETY: by the caller.
        let words = unsafe { isa.load_transposed(p, EIGHT * Bf16::BYTES) };
        let mut out = [isa.splat(0.0); EIGHT];
        for (pair, word) in out.as_chunks_mut::<2>().0.iter_mut().zip(words) {
            *pair = [isa.of_bits(isa.shl::<16>(word)), isa.of_bits(isa.and(word, isa.splat_u(0xffff_0000)))];
        }
        out
    }
}

impl<const COLS: usize> Eights for Fp8<'_, COLS> {
    #[inline(always)]
    unsafe fn eight<I: Isa>(isa: I, p: *const u8) -> [I::F; EIGHT] {
        // SAFETY: by the caller.
        let [first, second] = unsafe { isa.load_pairs(p) };
        let [a, b, c, d] = e4m3_floats(isa, first);
        let [e, f, g, h] = e4m3_floats(isa, second);
        [a, b, c, d, e, f, g, h]
    }

    fn factors(self, row: usize, factors: &mut [f32]) {
        // Beyond the end of a row there is nothing to multiply.
        self.scales(row, |i, scale| {
            let first = if COLS == usize::MAX { 0 } else { i * (COLS / EIGHT) };
            let end = first.saturating_add(COLS / EIGHT).min(factors.len());
            factors[first..end].fill(TOO_SMALL * scale);
        });
    }
}

/// The four floats of eight bits in each word, 2⁸ times too small: their bits are those of f16 that are.
#[inline(always)]
fn e4m3_floats<I: Isa>(isa: I, word: I::U) -> [I::F; 4] {
    let own = isa.and(word, isa.splat_u(0x7f7f_7f7f));
    // What is not a number gets an exponent of ones.
    let last = isa.and(isa.add_u(own, isa.splat_u(0x0101_0101)), isa.splat_u(0x8080_8080));
    let all = isa.or(own, last);
    let (signs, magnitudes) = (isa.splat_u(0x8000_8000), isa.splat_u(0x7f80_7f80));
    let odd = isa.or(isa.and(word, signs), isa.and(isa.shr::<1>(all), magnitudes));
    let even = isa.or(isa.and(isa.shl::<8>(word), signs), isa.and(isa.shl::<7>(all), magnitudes));
    let ([a, c], [b, d]) = (isa.f16_pairs_to_f32(even), isa.f16_pairs_to_f32(odd));
    [a, b, c, d]
}

/// Sums of a warp's lanes.
#[repr(C, align(64))]
struct Warp([f32; WARP]);

impl Warp {
    /// Their sum.
    #[inline(always)]
    fn sum(&mut self) -> f32 {
        let mut half = WARP / 2;
        while half > 0 {
            let (low, high) = self.0.split_at_mut(half);
            for (sum, more) in low.iter_mut().zip(high) {
                *sum += *more;
            }
            half /= 2;
        }
        self.0[0]
    }
}

struct Multiply<'a, P> {
    job: &'a EightJob<'a>,
    plain: P,
    out: &'a mut [f32],
}

impl<P: Eights> Kernel for Multiply<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let EightJob { w, ref rows, x, row: of_x, next } = *self.job;
        let (cols, plane, stride) = (w.cols(), w.plane(0), w.stride(0));
        let x = x.row(of_x);
        let unit = EIGHT * I::LANES;
        let whole = cols / unit;
        let mut tail = [0u8; MOST_BYTES];
        let eights = row_len(cols) / EIGHT;
        let mut factors = vec![0.0; if P::SCALED.is_some() { ROWS * eights } else { 0 }];
        let mut row = rows.start;
        while row < rows.end {
            let n = ROWS.min(rows.end - row);
            let after = row + n;
            let (of_next, first_next) = match next {
                Some(next) if after == rows.end => next,
                _ => (w, after),
            };
            let of_next = of_next.plane(0).as_ptr().wrapping_add(first_next * of_next.stride(0));
            if P::SCALED.is_some() {
                for (i, factors) in factors.chunks_exact_mut(eights).enumerate().take(n) {
                    self.plain.factors(row + i, factors);
                }
            }
            let mut sums = [const { Warp([0.0; WARP]) }; ROWS];
            for (unit_at, at) in (0..cols).step_by(unit).enumerate() {
                let (step, lane) = (at / STEP * STEP, at % STEP / EIGHT);
                let mut own_x = [isa.splat(0.0); EIGHT];
                for (i, value) in own_x.iter_mut().enumerate() {
                    // SAFETY: within the row's step, whose lanes from `lane` on are at least LANES.
                    *value = unsafe { isa.load(x[step + i * WARP + lane..][..I::LANES].as_ptr()) };
                }
                for (i, sums) in sums.iter_mut().enumerate().take(n) {
                    let start = (row + i) * stride + at * P::BYTES;
                    let values = if unit_at < whole {
                        let ahead = of_next.wrapping_add(i * stride + at * P::BYTES);
                        for line in (0..unit * P::BYTES).step_by(LINE) {
                            prefetch_second(ahead.wrapping_add(line));
                        }
                        // SAFETY: as many bytes as there are.
                        unsafe { P::eight(isa, plane[start..][..unit * P::BYTES].as_ptr()) }
                    } else {
                        let bytes = (cols - at).min(unit) * P::BYTES;
                        tail[..bytes].copy_from_slice(&plane[start..][..bytes]);
                        tail[bytes..].fill(0);
                        // SAFETY: there are as many.
                        unsafe { P::eight(isa, tail.as_ptr()) }
                    };
                    // SAFETY: LANES of the warp's lanes, as LANES divides their number.
                    let sum = unsafe { isa.load(sums.0[lane..][..I::LANES].as_ptr()) };
                    let mut own = if P::SCALED.is_some() { isa.splat(0.0) } else { sum };
                    for (value, x) in values.into_iter().zip(own_x) {
                        own = isa.mul_add(value, x, own);
                    }
                    if P::SCALED.is_some() {
                        let own_factors = &factors[i * eights + at / EIGHT..][..I::LANES];
                        // SAFETY: LANES of them.
                        own = isa.mul_add(own, unsafe { isa.load(own_factors.as_ptr()) }, sum);
                    }
                    // SAFETY: as above.
                    unsafe { isa.store(sums.0[lane..][..I::LANES].as_mut_ptr(), own) };
                }
            }
            for (i, sums) in sums.iter_mut().enumerate().take(n) {
                self.out[row - rows.start + i] = sums.sum();
            }
            row = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::fp8::VALUES;

    const OUTPUTS: usize = 6;

    /// The product of a row as a warp makes it: `values` with one scale for each `scales.1` columns.
    fn by_lanes(values: &[f32], x: &[f32], scales: Option<(&[f32], usize)>) -> f32 {
        let mut lanes = [0.0f32; WARP];
        for (i, (values, x)) in values.chunks(EIGHT).zip(x.chunks(EIGHT)).enumerate() {
            let lane = &mut lanes[i % WARP];
            let add = |sum: f32| values.iter().zip(x).fold(sum, |sum, (v, x)| v.mul_add(*x, sum));
            *lane = match scales {
                Some((scales, shared)) => add(0.0).mul_add(scales[i * EIGHT / shared], *lane),
                None => add(*lane),
            };
        }
        let mut half = WARP / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// Numbers without a pattern, in −1..1.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn check(dtype: DType, cols: usize, planes: &[&[u8]], right: impl Fn(&[f32]) -> Vec<f32>) {
        let w = TensorView::new(dtype, OUTPUTS, cols, planes).expect("weights");
        let x = numbers(cols, 5);
        let mut rows = EightRows::default();
        rows.resize(1, cols);
        for (block, values) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: one thread writes.
            unsafe { rows.writer().write(0, block, values) };
        }
        let right = right(&x);
        for level in SimdLevel::available() {
            let simd = Simd::new(level).expect("a level of this machine");
            if !has_eights(simd, dtype, cols) {
                continue;
            }
            let mut out = [0.0; OUTPUTS];
            let job = EightJob { w, rows: 0..OUTPUTS, x: &rows, row: 0, next: None };
            multiply_eights(simd, &job, &mut out).expect("a product");
            assert_eq!(out.map(f32::to_bits)[..], right.iter().map(|v| v.to_bits()).collect::<Vec<_>>()[..]);
        }
    }

    /// Rows that are no whole number of vectors or steps too.
    #[test]
    fn lanes_add_in_the_order_of_a_warp() {
        for cols in [32, 96, 256, 288, 736, 2048, 2880] {
            let values = numbers(OUTPUTS * cols, 3);
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let of_rows = |values: &[f32], x: &[f32]| -> Vec<f32> {
                values.chunks(cols).map(|row| by_lanes(row, x, None)).collect()
            };
            check(DType::F32, cols, &[&bytes], |x| of_rows(&values, x));
            let halves: Vec<u8> = bytes.as_chunks::<4>().0.iter().flat_map(|b| [b[2], b[3]]).collect();
            let cut: Vec<f32> = values.iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
            check(DType::BF16, cols, &[&halves], |x| of_rows(&cut, x));
            let code = |v: &f32| (v.abs() * 127.0) as u8 | u8::from(*v < 0.0) << 7;
            let codes: Vec<u8> = numbers(OUTPUTS * cols, 9).iter().map(code).collect();
            let decoded: Vec<f32> = codes.iter().map(|code| VALUES[usize::from(*code)] / 256.0).collect();
            let exponents: Vec<u8> = (0..OUTPUTS * cols / 32).map(|i| 120 + (i * 5 % 9) as u8).collect();
            let scales: Vec<f32> =
                exponents.iter().map(|e| 256.0 * f32::from_bits(u32::from(*e) << 23)).collect();
            check(DType::MXFP8_Planes, cols, &[&codes, &exponents], |x| {
                let rows = decoded.chunks(cols).zip(scales.chunks(cols / 32));
                rows.map(|(row, scales)| by_lanes(row, x, Some((scales, 32)))).collect()
            });
        }
    }
}
