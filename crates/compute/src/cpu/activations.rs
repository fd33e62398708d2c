//! Inputs of matrix products: f32 rows, or rows quantised to int8 ([`Q8Rows`]) so that a product with
//! quantised weights is integer arithmetic.
//!
//! Every 32 columns share one scale d = max|x| / 127 and hold q = round(x / d), ties to even; x ≈ d · q. One
//! scale per 32 rather than per 256 columns costs a multiplication per 32 columns and row of weights and keeps
//! an outlier from flattening its neighbours. Bits are the same at every SIMD level.
//!
//! Rows may have a second term, x − d · q rounded in the same way: x ≈ d · q + d₂ · q₂, off by at most max|x| / 64516, which is
//! half of what rounding to f16 may do to the largest value. Products add up both terms, for twice the multiplications.
//!
//! Blocks that hold an infinity or a NaN get the scale NaN, so every output that reads them is NaN. Blocks
//! whose values are all below 1e-30 in magnitude become zero.

use std::marker::PhantomData;

use super::simd::{Isa, Kernel, Simd};

/// Columns that share a scale.
pub const BLOCK: usize = 32;

/// Magnitudes below this are zero: the inverse scale 127 / max|x| must stay finite.
const TINY: f32 = 1e-30;

/// The rows that a matrix is multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum Activations<'a> {
    /// Exact inputs.
    F32 {
        /// (n_rows, cols), f32.
        rows: &'a [f32],
        /// Columns of a row.
        cols: usize,
    },
    /// Inputs rounded to int8.
    Q8(&'a Q8Rows),
}

impl Activations<'_> {
    /// Columns of a row.
    pub fn cols(&self) -> usize {
        match self {
            Self::F32 { cols, .. } => *cols,
            Self::Q8(rows) => rows.cols(),
        }
    }

    /// Rows (tokens).
    pub fn n_rows(&self) -> usize {
        match self {
            Self::F32 { rows, cols } => rows.len().checked_div(*cols).unwrap_or(0),
            Self::Q8(rows) => rows.n_rows(),
        }
    }
}

/// What a kernel needs to know of 32 quantised columns besides their integers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub(crate) struct Q8Block {
    /// d.
    pub(crate) scale: f32,
    /// d · Σq.
    pub(crate) sum: f32,
    /// Σq of the first and of the last 16 columns.
    pub(crate) sums: [i32; 2],
}

/// Rows quantised to int8 in blocks of [`BLOCK`] columns. Buffers are kept when it is filled again.
#[derive(Debug, Clone, Default)]
pub struct Q8Rows {
    n_rows: usize,
    cols: usize,
    /// Rows have a second term.
    second: bool,
    /// (n_rows, terms, cols), in −127..=127.
    q: Vec<i8>,
    /// (n_rows, terms, cols / 32).
    blocks: Vec<Q8Block>,
}

impl Q8Rows {
    /// No rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// No rows; those to come have two terms if `second`.
    pub fn with_second_term(second: bool) -> Self {
        Self { second, ..Self::default() }
    }

    /// Terms of a row: one or two.
    pub fn terms(&self) -> usize {
        1 + usize::from(self.second)
    }

    /// Rows (tokens).
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Integers of a term: (cols), i8. Term `t` of row `row` is `row` · [`Q8Rows::terms`] + `t`.
    ///
    /// # Panics
    /// If there is no such term.
    pub fn term(&self, term: usize) -> &[i8] {
        &self.q[term * self.cols..(term + 1) * self.cols]
    }

    /// Scales of a term, one every [`BLOCK`] columns.
    ///
    /// # Panics
    /// If there is no such term.
    pub fn scales(&self, term: usize) -> impl Iterator<Item = f32> + '_ {
        self.term_blocks(term).iter().map(|block| block.scale)
    }

    pub(crate) fn term_blocks(&self, term: usize) -> &[Q8Block] {
        let n = self.cols / BLOCK;
        &self.blocks[term * n..(term + 1) * n]
    }

    /// Writes the values that row `row` stands for, the sum of its terms' d · q, to `out`.
    ///
    /// # Panics
    /// If there is no such row or `out` is not [`Q8Rows::cols`] long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "one value a column");
        out.fill(0.0);
        for term in row * self.terms()..(row + 1) * self.terms() {
            let blocks = self.term(term).chunks_exact(BLOCK).zip(self.scales(term));
            for (out, (q, scale)) in out.chunks_exact_mut(BLOCK).zip(blocks) {
                for (out, &q) in out.iter_mut().zip(q) {
                    *out += scale * f32::from(q);
                }
            }
        }
    }

    /// Makes room for `n_rows` rows of `cols` columns, whose content is unspecified until written.
    ///
    /// # Panics
    /// If `cols` is not a multiple of [`BLOCK`].
    pub fn resize(&mut self, n_rows: usize, cols: usize) {
        assert!(cols.is_multiple_of(BLOCK), "{cols} columns are no whole number of blocks");
        let len = n_rows.checked_mul(cols).and_then(|n| n.checked_mul(self.terms()));
        let len = len.expect("activations fit the address space");
        self.n_rows = n_rows;
        self.cols = cols;
        self.q.resize(len, 0);
        self.blocks.resize(len / BLOCK, Q8Block::default());
    }

    /// Becomes `x`: (n_rows, cols), f32.
    ///
    /// # Panics
    /// If `cols` is not a multiple of [`BLOCK`] or `x` has another length.
    pub fn quantize_from(&mut self, simd: Simd, x: &[f32], n_rows: usize, cols: usize) {
        self.resize(n_rows, cols);
        assert_eq!(x.len(), n_rows * cols, "n_rows rows of cols columns");
        let writer = self.writer();
        for (row, x) in x.chunks_exact(cols.max(1)).enumerate() {
            // SAFETY: a row after the other.
            unsafe { writer.write(simd, row, 0, x) };
        }
    }

    /// A handle through which several threads fill different rows.
    pub fn writer(&mut self) -> Q8Writer<'_> {
        Q8Writer {
            n_rows: self.n_rows,
            cols: self.cols,
            terms: self.terms(),
            q: self.q.as_mut_ptr(),
            blocks: self.blocks.as_mut_ptr(),
            rows: PhantomData,
        }
    }
}

/// Shared access to the rows of a [`Q8Rows`] for writing.
#[derive(Debug, Clone, Copy)]
pub struct Q8Writer<'a> {
    n_rows: usize,
    cols: usize,
    terms: usize,
    q: *mut i8,
    blocks: *mut Q8Block,
    rows: PhantomData<&'a mut Q8Rows>,
}

// SAFETY: the pointers stand for an exclusive borrow of a `Q8Rows`; `write` asks its callers to keep concurrent
// writes apart.
unsafe impl Send for Q8Writer<'_> {}
// SAFETY: as above.
unsafe impl Sync for Q8Writer<'_> {}

impl Q8Writer<'_> {
    /// Quantises `x` into row `row` from column `col` on.
    ///
    /// # Safety
    /// No other call writes any of these columns of this row at the same time.
    ///
    /// # Panics
    /// If `col` or the length of `x` is not a multiple of [`BLOCK`] or the columns do not lie within the row.
    pub unsafe fn write(&self, simd: Simd, row: usize, col: usize, x: &[f32]) {
        assert!(row < self.n_rows && col <= self.cols && x.len() <= self.cols - col, "columns within a row");
        assert!(col.is_multiple_of(BLOCK) && x.len().is_multiple_of(BLOCK), "whole blocks");
        let term = |term: usize| {
            let start = (row * self.terms + term) * self.cols + col;
            // SAFETY: within the buffers by the assertions, which `resize` gave these lengths; not aliased by the
            // contract of this function, the borrow that `self` stands for, and as terms lie apart.
            unsafe {
                let q = std::slice::from_raw_parts_mut(self.q.add(start), x.len());
                let blocks = self.blocks.add(start / BLOCK);
                Term { q, blocks: std::slice::from_raw_parts_mut(blocks, x.len() / BLOCK) }
            }
        };
        simd.run(Quantize { x, first: term(0), second: (self.terms == 2).then(|| term(1)) });
    }

    /// Writes block `block` of row `row`, of rows with one term: `codes` of scale d.
    ///
    /// # Safety
    /// No other call writes this block at the same time.
    ///
    /// # Panics
    /// If there is no such block or rows have two terms.
    pub(crate) unsafe fn write_codes(&self, row: usize, block: usize, codes: &[i8; BLOCK], d: f32) {
        let blocks = self.cols / BLOCK;
        assert!(row < self.n_rows && block < blocks && self.terms == 1, "a block of a row");
        let at = row * blocks + block;
        let half = |half: &[i8]| half.iter().map(|code| i32::from(*code)).sum::<i32>();
        let sums = [half(&codes[..BLOCK / 2]), half(&codes[BLOCK / 2..])];
        let sum = d * (sums[0] + sums[1]) as f32;
        // SAFETY: within the buffers by the assertion, which `resize` gave these lengths; not aliased by the contract of
        // this function and the borrow that `self` stands for.
        unsafe {
            self.q.add(at * BLOCK).copy_from_nonoverlapping(codes.as_ptr(), BLOCK);
            *self.blocks.add(at) = Q8Block { scale: d, sum, sums };
        }
    }
}

/// Some columns of a term, in whole blocks.
struct Term<'a> {
    q: &'a mut [i8],
    blocks: &'a mut [Q8Block],
}

/// Quantises `x`, whose length is a whole number of blocks.
struct Quantize<'a> {
    x: &'a [f32],
    first: Term<'a>,
    second: Option<Term<'a>>,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (x, _) = self.x.as_chunks::<BLOCK>();
        let (q, _) = self.first.q.as_chunks_mut::<BLOCK>();
        for ((x, q), block) in x.iter().zip(&mut *q).zip(&mut *self.first.blocks) {
            *block = quantize_block(isa, x, q);
        }
        let Some(second) = self.second else { return };
        let (q2, _) = second.q.as_chunks_mut::<BLOCK>();
        let first = q.iter().zip(self.first.blocks);
        for (((x, (q, block)), q2), block2) in x.iter().zip(first).zip(q2).zip(second.blocks) {
            // Not fused, which not every SIMD level can.
            let left = std::array::from_fn(|i| x[i] - block.scale * f32::from(q[i]));
            *block2 = quantize_block(isa, &left, q2);
        }
    }
}

#[inline(always)]
fn quantize_block<I: Isa>(isa: I, x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> Q8Block {
    // The order of the bits of non-negative floats is that of their values, with infinity and NaN on top.
    let mut max = isa.splat_u(0);
    let magnitude = isa.splat_u(0x7fff_ffff);
    for i in (0..BLOCK).step_by(I::LANES) {
        // SAFETY: LANES divides BLOCK.
        let bits = isa.bits(unsafe { isa.load(x.as_ptr().add(i)) });
        max = isa.max_i(max, isa.and(bits, magnitude));
    }
    let max = f32::from_bits(isa.reduce_max_i(max) as u32);
    if !max.is_finite() || max < TINY {
        *q = [0; BLOCK];
        let scale = if max.is_finite() { 0.0 } else { f32::NAN };
        return Q8Block { scale, sum: scale, sums: [0; 2] };
    }

    let inverse = isa.splat(127.0 / max);
    let mut sums = [0; 2];
    for (half, sum) in sums.iter_mut().enumerate() {
        let mut total = isa.splat_u(0);
        for i in (16 * half..16 * (half + 1)).step_by(I::LANES) {
            // SAFETY: LANES divides 16, so i + LANES ≤ BLOCK.
            unsafe {
                let rounded = isa.round(isa.mul(isa.load(x.as_ptr().add(i)), inverse));
                isa.store_i8(q.as_mut_ptr().add(i), rounded);
                total = isa.add_u(total, rounded);
            }
        }
        *sum = isa.reduce_add_u(total) as i32;
    }
    let scale = max / 127.0;
    Q8Block { scale, sum: scale * (sums[0] + sums[1]) as f32, sums }
}
