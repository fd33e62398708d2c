//! Products of weight matrices with rows of activations: y\[t, r\] = Σ_c w\[r, c\] · x\[t, c\].
//!
//! Weights are decoded from their blocks, `Isa::LANES` rows and 256 columns at a time, into a tile whose lanes are rows, and
//! the tile is multiplied with every token: one set of decoders serves every instruction set. Several tokens' int8
//! activations are packed, so that two tiles are multiplied with several tokens at a time. For a single token transposing
//! would cost more than multiplying, so lanes are columns until integers have been added up; from there on both ways are the
//! same.
//!
//! - int8 activations: dot products of a sub-block (32 columns, or 16) are exact integers, so it does not matter in
//!   which order they are summed; then, in order of columns, acc ← acc + dot · (w scale · x scale) and, for encodings
//!   with biases, acc ← acc + bias · (x scale · Σ x). Scales and minima of k-quants are integers times d and dmin of 256
//!   columns: acc₂ ← acc₂ + (dot · w scale) · x scale, whose product is an exact integer, and after 256 columns
//!   acc ← acc + d · acc₂; minima likewise.
//! - f32 activations: quantised weights become f32 exactly as their dequantiser defines; even and odd columns have
//!   a sum of fused products each. Plain float weights are read where they are, lanes being columns.
//!
//! An output depends on its row of weights and its row of activations only: not on the other tokens, the
//! partition of rows or the number of threads.

mod affine;
mod batch;
mod codebooks;
pub(crate) mod eights;
mod float;
mod fp8;
mod int8;
mod integers;
mod k_quants;
mod legacy;
mod mxfp4;
mod non_linear;
mod pairs;
pub(crate) mod pieces;
mod plain;
mod tile;
mod transposed;

use std::{marker::PhantomData, ops::Range};

use super::{
    activations::{Activations, BLOCK},
    pool::ThreadPool,
    simd::{Isa, MAX_LANES, Simd},
    vector,
};
use crate::dtype::FP8_BLOCK;
use crate::quant::dequantize_row;
use crate::{BlockScale, DType, Error, Half, Result, TensorView, Zeros};
use affine::{Affine4, Affine8, AffineOdd};
use codebooks::{Coded, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
use fp8::Fp8;
use int8::Format;
use integers::{Int4, Int4Zeros, Int8, Int8Zeros};
use k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K};
use legacy::{Q4, Q5, Q8, Q41, Q51};
use mxfp4::{Mxfp4, Mxfp4Planes, Nvfp4};
use non_linear::{Iq4Nl, Iq4Xs};
use plain::{Bf16, F16, F32};

/// Rows are best handed out in multiples of this.
pub const ROW_TILE: usize = 32;

/// Whether weights of `dtype` with `cols` columns can be multiplied with int8 activations: all but floats, in whole blocks of
/// both.
pub fn accepts_q8(dtype: DType, cols: usize) -> bool {
    let has_kernel = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => false,
        DType::Fp8 { .. } | DType::Fp8_Rows { .. } | DType::Fp8_Whole { .. } | DType::MXFP8_Planes => false,
        DType::Int { bits, group, .. } => matches!((bits, group), (4 | 8, 0 | 32 | 64 | 128)),
        DType::Affine { bits, group, .. } => matches!((bits, group), (2..=6 | 8, 32 | 64 | 128)),
        _ => true,
    };
    has_kernel && cols.is_multiple_of(dtype.block_len()) && cols.is_multiple_of(BLOCK)
}

/// Whether int8 activations for weights of `dtype` have a second term: where the files come from programs that compute in
/// f16, whose rounding is finer than that to one int8 (which is finer than that to bf16).
pub fn takes_second_term(dtype: DType) -> bool {
    matches!(dtype, DType::Affine { scale: Half::F16, .. })
}

/// Bytes that each thread takes while it computes products of up to `tokens` tokens, times terms, of `cols` columns.
pub fn scratch_bytes(tokens: usize, cols: usize) -> usize {
    batch::scratch_bytes(tokens, cols)
}

/// Which rows of the activations take part, in which order.
#[derive(Debug, Clone)]
pub enum Tokens<'a> {
    /// Consecutive rows.
    Range(Range<usize>),
    /// These rows, as gathered for an expert.
    List(&'a [u32]),
}

impl Tokens<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::List(list) => list.len(),
        }
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Activation row of the `i`-th.
    #[inline(always)]
    fn get(&self, i: usize) -> usize {
        match self {
            Self::Range(range) => range.start + i,
            Self::List(list) => list[i] as usize,
        }
    }

    fn end(&self) -> usize {
        match self {
            Self::Range(range) if range.is_empty() => 0,
            Self::Range(range) => range.end,
            Self::List(list) => list.iter().map(|&t| t as usize + 1).max().unwrap_or(0),
        }
    }
}

/// A matrix (n_tokens, n_rows), f32, that several threads write different columns of.
#[derive(Debug, Clone, Copy)]
pub struct OutRows<'a> {
    ptr: *mut f32,
    stride: usize,
    n_tokens: usize,
    n_rows: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: `OutRows::new` asks its callers to keep concurrent writes apart.
unsafe impl Send for OutRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for OutRows<'_> {}

impl<'a> OutRows<'a> {
    /// Element (t, r) is at `ptr` + t · `stride` + r.
    ///
    /// # Safety
    /// For `'a`, every element with t < `n_tokens` and r < `n_rows` is valid for writes and nobody else
    /// accesses it; and callers that hand copies to [`matmul_rows`] concurrently write disjoint sets of
    /// elements, that is, disjoint ranges of rows or disjoint matrices.
    pub unsafe fn new(ptr: *mut f32, stride: usize, n_tokens: usize, n_rows: usize) -> Self {
        Self { ptr, stride, n_tokens, n_rows, matrix: PhantomData }
    }

    /// Writes `values` to elements (`token`, `row`), (`token`, `row` + 1), …
    #[inline(always)]
    fn write(&self, token: usize, row: usize, values: &[f32]) {
        assert!(token < self.n_tokens && row + values.len() <= self.n_rows, "output within the matrix");
        // SAFETY: valid and not accessed by others by the contract of `new`.
        unsafe {
            let to = self.ptr.add(token * self.stride + row);
            to.copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
    }

    /// Writes lanes `lanes` of `values` to elements (`token`, `row`), (`token`, `row` + 1), …
    #[inline(always)]
    fn store<I: Isa>(&self, isa: I, token: usize, row: usize, values: I::F, lanes: Range<usize>) {
        if lanes.len() == I::LANES {
            assert!(token < self.n_tokens && row + I::LANES <= self.n_rows, "output within the matrix");
            // SAFETY: as in `write`.
            unsafe { isa.store(self.ptr.add(token * self.stride + row), values) };
        } else {
            let mut all = [0.0; MAX_LANES];
            tile::put(isa, &mut all, values);
            self.write(token, row, &all[lanes]);
        }
    }
}

/// Computes rows `rows` of the product of `w` and the activations `tokens`: the i-th token's go to row i
/// of `out`, at the same columns as their rows in `w`.
///
/// Meant to be called from within a task of a [`ThreadPool`]; any partition of the rows gives the same bits,
/// multiples of [`ROW_TILE`] are fastest.
///
/// # Errors
/// [`Error::Shape`] if rows, columns, tokens or output do not fit each other, [`Error::Unsupported`] for int8
/// activations with weights that [`accepts_q8`] refuses or an encoding that nothing can dequantise.
pub fn matmul_rows(
    simd: Simd,
    w: TensorView<'_>,
    rows: Range<usize>,
    x: Activations<'_>,
    tokens: Tokens<'_>,
    out: OutRows<'_>,
) -> Result<()> {
    matmul_rows_before(simd, w, rows, x, tokens, out, None)
}

/// The weights that a thread will probably read next: those of a matrix from a row on.
pub(crate) type NextJob<'a> = (TensorView<'a>, usize);

/// As [`matmul_rows`]; the first rows of `next` are fetched while the last ones of this product are multiplied.
///
/// # Errors
/// As [`matmul_rows`].
pub(crate) fn matmul_rows_before(
    simd: Simd,
    w: TensorView<'_>,
    rows: Range<usize>,
    x: Activations<'_>,
    tokens: Tokens<'_>,
    out: OutRows<'_>,
    next: Option<NextJob<'_>>,
) -> Result<()> {
    let fits = |what, expected, got| Err(Error::Shape { op: "matmul", what, expected, got });
    if rows.end > w.rows() {
        return fits("end of the range of rows", w.rows(), rows.end);
    }
    if x.cols() != w.cols() {
        return fits("columns of the activations", w.cols(), x.cols());
    }
    if tokens.end() > x.n_rows() {
        return fits("rows of the activations", tokens.end(), x.n_rows());
    }
    if out.n_tokens < tokens.len() {
        return fits("tokens of the output", tokens.len(), out.n_tokens);
    }
    if out.n_rows < rows.end {
        return fits("rows of the output", rows.end, out.n_rows);
    }
    if rows.is_empty() || tokens.is_empty() {
        return Ok(());
    }
    let terms = if let Activations::Q8(x) = x { x.terms() } else { 1 };
    let job = Job { w, rows, tokens: &tokens, shift: terms.trailing_zeros(), out, next };
    if w.cols() == 0 {
        job.write_zeros();
        return Ok(());
    }
    job.run(simd, x)
}

/// The whole product on the threads of `pool`: `out` is (n_tokens, rows of `w`), f32.
///
/// # Errors
/// As [`matmul_rows`].
pub fn matmul(
    pool: &ThreadPool,
    simd: Simd,
    w: TensorView<'_>,
    x: Activations<'_>,
    out: &mut [f32],
) -> Result<()> {
    let (n_tokens, n_rows) = (x.n_rows(), w.rows());
    if out.len() != n_tokens * n_rows {
        let (expected, got) = (n_tokens * n_rows, out.len());
        return Err(Error::Shape { op: "matmul", what: "length of the output", expected, got });
    }
    // SAFETY: exactly this matrix, exclusively borrowed; tasks have disjoint ranges of rows.
    let out = unsafe { OutRows::new(out.as_mut_ptr(), n_rows, n_tokens, n_rows) };
    let tasks = RowTasks::new(n_rows, pool.threads());
    let failure = std::sync::Mutex::new(None);
    pool.run_in_order(tasks.len(), &|task, next| {
        let (rows, tokens) = (tasks.rows(task), Tokens::Range(0..n_tokens));
        let next = next.map(|next| (w, tasks.rows(next).start));
        if let Err(error) = matmul_rows_before(simd, w, rows, x, tokens, out, next)
            && let Ok(mut failure) = failure.lock()
        {
            *failure = Some(error);
        }
    });
    failure.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// A partition of rows into tasks: a few for each thread, in whole row tiles.
#[derive(Debug, Clone, Copy)]
pub struct RowTasks {
    n_rows: usize,
    rows_per_task: usize,
}

impl RowTasks {
    /// Tasks a thread, so that one that is held up leaves work to the others.
    const PER_THREAD: usize = 4;

    /// For `n_rows` rows on `threads` threads.
    pub fn new(n_rows: usize, threads: usize) -> Self {
        let n_tasks = if threads < 2 { 1 } else { threads * Self::PER_THREAD };
        let rows_per_task = n_rows.div_ceil(n_tasks).next_multiple_of(ROW_TILE);
        Self { n_rows, rows_per_task }
    }

    /// Number of tasks; none if there are no rows.
    #[allow(clippy::len_without_is_empty, reason = "a count of tasks, not a container")]
    pub fn len(&self) -> usize {
        if self.n_rows == 0 { 0 } else { self.n_rows.div_ceil(self.rows_per_task) }
    }

    /// Rows of task `task`.
    pub fn rows(&self, task: usize) -> Range<usize> {
        let start = (task * self.rows_per_task).min(self.n_rows);
        start..(start + self.rows_per_task).min(self.n_rows)
    }
}

/// A checked product: not empty, sizes agree.
struct Job<'a> {
    w: TensorView<'a>,
    rows: Range<usize>,
    tokens: &'a Tokens<'a>,
    /// Binary logarithm of the terms of an activation row.
    shift: u32,
    out: OutRows<'a>,
    next: Option<NextJob<'a>>,
}

impl Job<'_> {
    /// Terms of all tokens: a token's follow each other.
    fn n_terms(&self) -> usize {
        self.tokens.len() << self.shift
    }

    /// Where the activations have the `i`-th term.
    #[inline(always)]
    fn term(&self, i: usize) -> usize {
        let row = self.tokens.get(i >> self.shift);
        (row << self.shift) + (i & ((1 << self.shift) - 1))
    }

    /// The weights from row `row` of this product on: if it has no such row, those that come after it, if that is known.
    #[inline(always)]
    fn from(&self, row: usize) -> NextJob<'_> {
        match self.next {
            Some(next) if row >= self.rows.end => next,
            _ => (self.w, row),
        }
    }

    fn run(&self, simd: Simd, x: Activations<'_>) -> Result<()> {
        let dtype = self.w.dtype();
        match (dtype, x) {
            (_, Activations::F32 { rows, .. }) if self.w.is_transposed() => {
                simd.run(transposed::Multiply { job: self, x: rows });
            }
            (DType::F32, Activations::F32 { rows, .. }) => {
                simd.run(plain::Multiply { job: self, plain: F32, x: rows })
            }
            // Unit tests multiply plain floats alone, and are compiled in a third of the time without the other kernels.
            _ if cfg!(test) => return Err(Error::Unsupported { what: "a product in a unit test", dtype }),
            (DType::F16, Activations::F32 { rows, .. }) => {
                simd.run(plain::Multiply { job: self, plain: F16, x: rows })
            }
            (DType::BF16, Activations::F32 { rows, .. }) => {
                simd.run(plain::Multiply { job: self, plain: Bf16, x: rows });
            }
            (DType::Fp8 { scale }, Activations::F32 { rows, .. }) => {
                let plain = Fp8::<FP8_BLOCK>::new(self.w, scale);
                simd.run(plain::Multiply { job: self, plain, x: rows });
            }
            (DType::Fp8_Rows { scale } | DType::Fp8_Whole { scale }, Activations::F32 { rows, .. }) => {
                let plain = Fp8::<{ usize::MAX }>::new(self.w, scale);
                simd.run(plain::Multiply { job: self, plain, x: rows });
            }
            (DType::MXFP8_Planes, Activations::F32 { rows, .. }) => {
                let plain = Fp8::<BLOCK>::new(self.w, BlockScale::E8M0);
                simd.run(plain::Multiply { job: self, plain, x: rows });
            }
            (_, Activations::F32 { rows, .. }) if !accepts_q8(dtype, self.w.cols()) => {
                return self.run_rows(simd, rows);
            }
            _ if !accepts_q8(dtype, self.w.cols()) => {
                return Err(Error::Unsupported { what: "a product with these activations", dtype });
            }
            (DType::Q4_0, x) => self.run_format(simd, Q4, x),
            (DType::Q5_0, x) => self.run_format(simd, Q5, x),
            (DType::Q4_1, x) => self.run_format(simd, Q41, x),
            (DType::Q5_1, x) => self.run_format(simd, Q51, x),
            (DType::IQ4_NL, x) => self.run_format(simd, Iq4Nl, x),
            (DType::IQ4_XS, x) => self.run_format(simd, Iq4Xs, x),
            (DType::Q8_0, x) => self.run_format(simd, Q8, x),
            (DType::MXFP4, x) => self.run_format(simd, Mxfp4, x),
            (DType::MXFP4_Planes, x) => self.run_format(simd, Mxfp4Planes, x),
            (DType::NVFP4 { matrix }, x) => self.run_format(simd, Nvfp4::new(self.w, matrix), x),
            (DType::Int { bits, group, scale, zeros }, x) => match (bits, zeros) {
                (4, Zeros::Middle) => self.run_format(simd, Int4::new(group, scale), x),
                (4, Zeros::Stored) => self.run_format(simd, Int4Zeros::new(group, scale), x),
                (_, Zeros::Middle) => self.run_format(simd, Int8::new(group, scale), x),
                (_, Zeros::Stored) => self.run_format(simd, Int8Zeros::new(group, scale), x),
            },
            (DType::IQ1_S, x) => self.run_format(simd, Coded(Iq1S), x),
            (DType::IQ1_M, x) => self.run_format(simd, Coded(Iq1M), x),
            (DType::IQ2_XXS, x) => self.run_format(simd, Coded(Iq2Xxs), x),
            (DType::IQ2_XS, x) => self.run_format(simd, Coded(Iq2Xs), x),
            (DType::IQ2_S, x) => self.run_format(simd, Coded(Iq2S), x),
            (DType::IQ3_XXS, x) => self.run_format(simd, Coded(Iq3Xxs), x),
            (DType::IQ3_S, x) => self.run_format(simd, Coded(Iq3S), x),
            (DType::Q2_K, x) => self.run_format(simd, Q2K, x),
            (DType::Q3_K, x) => self.run_format(simd, Q3K, x),
            (DType::Q4_K, x) => self.run_format(simd, Q4K, x),
            (DType::Q5_K, x) => self.run_format(simd, Q5K, x),
            (DType::Q6_K, x) => self.run_format(simd, Q6K, x),
            (DType::Affine { bits, group, scale }, x) => match bits {
                2 => self.run_format(simd, AffineOdd::<2>::new(group, scale), x),
                3 => self.run_format(simd, AffineOdd::<3>::new(group, scale), x),
                4 => self.run_format(simd, Affine4::new(group, scale), x),
                5 => self.run_format(simd, AffineOdd::<5>::new(group, scale), x),
                6 => self.run_format(simd, AffineOdd::<6>::new(group, scale), x),
                _ => self.run_format(simd, Affine8::new(group, scale), x),
            },
            _ => return Err(Error::Unsupported { what: "a product with int8 activations", dtype }),
        }
        Ok(())
    }

    /// Encodings without a kernel of their own: every row is dequantised once for all tokens.
    fn run_rows(&self, simd: Simd, x: &[f32]) -> Result<()> {
        let cols = self.w.cols();
        let mut row = vec![0.0; cols];
        for r in self.rows.clone() {
            dequantize_row(self.w, r, &mut row)?;
            for i in 0..self.tokens.len() {
                let token = self.tokens.get(i);
                self.out.write(i, r, &[vector::dot_f32(simd, &row, &x[token * cols..(token + 1) * cols])]);
            }
        }
        Ok(())
    }

    fn run_format<F: Format>(&self, simd: Simd, format: F, x: Activations<'_>) {
        match x {
            Activations::Q8(x) => simd.run(int8::Multiply { job: self, format, x }),
            Activations::F32 { rows, .. } => simd.run(float::Multiply { job: self, format, x: rows }),
        }
    }

    fn write_zeros(&self) {
        for token in 0..self.tokens.len() {
            for row in self.rows.clone() {
                self.out.write(token, row, &[0.0]);
            }
        }
    }
}
