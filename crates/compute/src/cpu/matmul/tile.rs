//! Walking a product tile by tile, and what tiles are made of.

use std::mem::MaybeUninit;

use super::Job;
use crate::{
    TensorView,
    cpu::simd::{Isa, MAX_LANES, prefetch, prefetch_second},
};

/// Columns that are decoded at a time.
pub(super) const TILE_COLS: usize = 256;

/// Terms of tokens whose sums are kept while the columns of a tile of rows pass by; more decode it again.
const TOKEN_BLOCK: usize = 64;

/// Terms of tokens for which transposing a tile costs more than it saves: of 256 columns and sixteen rows it is some 350 instructions
/// of about 300 for a token without and 100 with it.
pub(super) const FEW: usize = 2;

/// Larger row tiles than this are not prefetched, as they would not stay in the second-level cache.
const MAX_PREFETCH: usize = 256 << 10;

/// Running sums of a token and a tile of rows: two of each row, which are added up in the end.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Sums([[f32; MAX_LANES]; 2]);

impl Sums {
    pub(super) const ZERO: Self = Self([[0.0; MAX_LANES]; 2]);

    /// The first or second sums.
    #[inline(always)]
    pub(super) fn get<I: Isa>(&self, isa: I, which: usize) -> I::F {
        get(isa, &self.0[which])
    }

    /// Sets [`Sums::get`].
    #[inline(always)]
    pub(super) fn put<I: Isa>(&mut self, isa: I, which: usize, sums: I::F) {
        put(isa, &mut self.0[which], sums);
    }
}

/// The first `n` of `sums`, zero. The others are not touched: most products are of few tokens.
#[inline(always)]
pub(super) fn zeroed(sums: &mut [MaybeUninit<Sums>], n: usize) -> &mut [Sums] {
    let sums = &mut sums[..n];
    for sum in &mut *sums {
        *sum = MaybeUninit::new(Sums::ZERO);
    }
    // SAFETY: all of them have just been written.
    unsafe { sums.assume_init_mut() }
}

/// One kind of product: how columns are decoded and multiplied.
pub(super) trait Product<I: Isa> {
    /// Most tokens that are multiplied together.
    const TOKENS: usize = I::TOKENS;

    /// Decodes columns `col`..`col` + `n`; `n` is [`TILE_COLS`] or, at the end of a row, less.
    fn decode(&mut self, isa: I, rows: &TileRows<'_>, col: usize, n: usize);

    /// Adds the products of columns `col`..`col` + `n`, which were just decoded, with activation rows `tokens`.
    fn multiply<const N: usize>(
        &self,
        isa: I,
        tokens: [usize; N],
        col: usize,
        n: usize,
        sums: &mut [Sums; N],
    );

    /// Does `decode` and `multiply` for at most [`FEW`] tokens and advances `next` if there is a shorter way, else returns
    /// false.
    #[inline(always)]
    fn multiply_few(
        &mut self,
        _isa: I,
        _rows: &TileRows<'_>,
        _tokens: &[usize],
        (_col, _n): (usize, usize),
        _sums: &mut [Sums],
        _next: &mut NextRows,
    ) -> bool {
        false
    }
}

/// Computes all of `job`.
#[inline(always)]
pub(super) fn walk<I: Isa, P: Product<I>>(isa: I, job: &Job<'_>, mut product: P) {
    let (cols, n_terms) = (job.w.cols(), job.n_terms());
    let mut few = [0; FEW];
    let few = &mut few[..if n_terms <= FEW { n_terms } else { 0 }];
    for (i, term) in few.iter_mut().enumerate() {
        *term = job.term(i);
    }
    let mut sums = [MaybeUninit::uninit(); TOKEN_BLOCK];
    let mut row = job.rows.start;
    while row < job.rows.end {
        let rows = TileRows::new(job.w, I::LANES, row);
        let valid = (rows.lanes.len()).min(job.rows.end - row);
        let mut next = NextRows::after(job, I::LANES, rows.first + I::LANES, NextRows::STEPS);
        for first in (0..n_terms).step_by(TOKEN_BLOCK) {
            let sums = zeroed(&mut sums, TOKEN_BLOCK.min(n_terms - first));
            for col in (0..cols).step_by(TILE_COLS) {
                let n = TILE_COLS.min(cols - col);
                if !few.is_empty() && product.multiply_few(isa, &rows, few, (col, n), sums, &mut next) {
                    continue;
                }
                if first == 0 {
                    for _ in 0..NextRows::STEPS {
                        next.advance();
                    }
                }
                product.decode(isa, &rows, col, n);
                multiply_all(isa, job, &product, first, (col, n), sums);
            }
            for (token, sums) in sums.chunks_exact(1 << job.shift).enumerate() {
                let sum = of_all_terms(isa, sums, |sums| isa.add(sums.get(isa, 0), sums.get(isa, 1)));
                let lanes = rows.lanes.start..rows.lanes.start + valid;
                job.out.store(isa, (first >> job.shift) + token, row, sum, lanes);
            }
        }
        row += valid;
    }
}

/// What the terms of a token have come to, `sum` being that of one.
#[inline(always)]
pub(super) fn of_all_terms<I: Isa>(isa: I, terms: &[Sums], sum: impl Fn(&Sums) -> I::F) -> I::F {
    let mut all = sum(&terms[0]);
    for term in &terms[1..] {
        all = isa.add(all, sum(term));
    }
    all
}

/// Multiplies the terms of tokens from the `first` on, as many at a time as fit registers.
#[inline(always)]
fn multiply_all<I: Isa, P: Product<I>>(
    isa: I,
    job: &Job<'_>,
    product: &P,
    mut first: usize,
    (col, n): (usize, usize),
    mut sums: &mut [Sums],
) {
    macro_rules! multiply_by {
        ($n:literal) => {
            // Of more, nothing is compiled.
            if const { P::TOKENS >= $n } {
                while sums.len() >= $n {
                    let (some, rest) =
                        std::mem::take(&mut sums).split_first_chunk_mut::<$n>().expect("as many tokens");
                    let mut tokens = [0; $n];
                    for (i, token) in tokens.iter_mut().enumerate() {
                        *token = job.term(first + i);
                    }
                    product.multiply(isa, tokens, col, n, some);
                    (first, sums) = (first + $n, rest);
                }
            }
        };
    }
    multiply_by!(8);
    multiply_by!(4);
    multiply_by!(2);
    multiply_by!(1);
}

/// The rows of a weight matrix that the lanes of a tile stand for: consecutive ones, or the same row in
/// all lanes if the matrix has fewer rows than there are lanes.
pub(super) struct TileRows<'a> {
    w: TensorView<'a>,
    /// Row of lane 0.
    first: usize,
    /// Lanes whose rows are wanted.
    lanes: std::ops::Range<usize>,
    planes: [PlaneRows<'a>; 3],
}

impl<'a> TileRows<'a> {
    /// Some rows from `row` on, which exists.
    #[inline(always)]
    pub(super) fn new(w: TensorView<'a>, n_lanes: usize, row: usize) -> Self {
        let repeat = w.rows() < n_lanes;
        let first = if repeat { row } else { row.min(w.rows() - n_lanes) };
        let lanes = if repeat { 0..1 } else { row - first..n_lanes };
        let planes = [
            PlaneRows::new(w.plane(0), stride(w, 0), first, n_lanes, repeat),
            PlaneRows::new(w.plane(1), stride(w, 1), first, n_lanes, repeat),
            PlaneRows::new(w.plane(2), stride(w, 2), first, n_lanes, repeat),
        ];
        Self { w, first, lanes, planes }
    }

    /// Lanes whose rows are wanted.
    pub(super) fn lanes(&self) -> std::ops::Range<usize> {
        self.lanes.clone()
    }

    /// The matrix.
    pub(super) fn matrix(&self) -> TensorView<'a> {
        self.w
    }

    /// Row of the matrix that lane `lane` stands for.
    pub(super) fn row_of(&self, lane: usize) -> usize {
        if self.planes[0].stride == 0 { self.first } else { self.first + lane }
    }

    /// Bytes in plane `plane`.
    #[inline(always)]
    pub(super) fn plane(&self, plane: usize) -> &PlaneRows<'a> {
        &self.planes[plane]
    }
}

/// Bytes from a row of `plane` to the next; 0 where one stands for several rows, which decoders find by themselves.
#[inline(always)]
fn stride(w: TensorView<'_>, plane: usize) -> usize {
    if w.dtype().block_rows(plane) == 1 { w.stride(plane) } else { 0 }
}

/// Prefetches the row tile after a given one while that is multiplied. Rows follow each other, so memory is read in
/// order of addresses although decoding jumps from row to row. Little is asked for at a time: when a core waits for as
/// many lines as it can, it does nothing else.
pub(super) struct NextRows {
    planes: [NextBytes; 3],
}

/// Brings what is decoded next from the second-level cache, where [`NextRows`] has put it, to the first.
pub(super) struct NextBlock {
    at: *const u8,
    /// From a row to the next.
    stride: usize,
    /// Rows that are left, and those that a step fetches.
    rows: usize,
    each: usize,
    /// Bytes of a row.
    len: usize,
}

impl NextBlock {
    /// Bytes `at`..`at` + `len` of `n_rows` rows from `row` on, in `steps` steps. Rows need not exist.
    #[inline(always)]
    pub(super) fn new(
        (w, row): (TensorView<'_>, usize),
        (at, len): (usize, usize),
        n_rows: usize,
        steps: usize,
    ) -> Self {
        let stride = w.stride(0);
        Self {
            at: w.plane(0).as_ptr().wrapping_add(row * stride + at),
            stride,
            rows: n_rows,
            each: (n_rows as u32).div_ceil(steps as u32) as usize,
            len,
        }
    }

    /// A step.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        let n = self.each.min(self.rows);
        for _ in 0..n {
            for byte in (0..self.len).step_by(64) {
                prefetch(self.at.wrapping_add(byte));
            }
            prefetch(self.at.wrapping_add(self.len - 1));
            self.at = self.at.wrapping_add(self.stride);
        }
        self.rows -= n;
    }
}

#[derive(Clone, Copy)]
struct NextBytes {
    at: *const u8,
    left: usize,
    /// Bytes a [`NextRows::advance`].
    step: usize,
}

impl NextRows {
    /// Calls of [`NextRows::advance`] a tile where tokens are few.
    pub(super) const STEPS: usize = 8;

    /// The `n_rows` rows of `job` from `row` on or, if it has none, the first ones of what comes after it; `steps` is how
    /// often [`NextRows::advance`] is called for a tile of rows and columns.
    #[inline(always)]
    pub(super) fn after(job: &Job<'_>, n_rows: usize, row: usize, steps: usize) -> Self {
        let (w, row) = job.from(row);
        let end = if row < job.rows.end { job.rows.end } else { w.rows() };
        Self::new(w, n_rows, row, end, steps)
    }

    /// The `n_lanes` rows from `row` on, as far as they are before row `end`.
    #[inline(always)]
    pub(super) fn new(w: TensorView<'_>, n_lanes: usize, row: usize, end: usize, steps: usize) -> Self {
        let n_rows = n_lanes.min(end.saturating_sub(row));
        let steps = w.cols().div_ceil(TILE_COLS) * steps;
        Self {
            planes: [
                NextBytes::new(w.plane(0), stride(w, 0), row, n_rows, steps),
                NextBytes::new(w.plane(1), stride(w, 1), row, n_rows, steps),
                NextBytes::new(w.plane(2), stride(w, 2), row, n_rows, steps),
            ],
        }
    }

    /// A part of what is prefetched: into the second-level cache, as few lines can be on their way to the first one at once.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        for plane in &mut self.planes {
            // Most encodings have a single plane.
            if plane.left == 0 {
                continue;
            }
            let n = plane.step.min(plane.left);
            let end = plane.at.wrapping_add(n);
            while plane.at < end {
                prefetch_second(plane.at);
                plane.at = plane.at.wrapping_add(64);
            }
            plane.at = end;
            plane.left -= n;
        }
    }
}

impl NextBytes {
    #[inline(always)]
    fn new(bytes: &[u8], stride: usize, row: usize, n_rows: usize, steps: usize) -> Self {
        let len = n_rows * stride;
        Self {
            at: bytes.as_ptr().wrapping_add(row * stride),
            left: if len <= MAX_PREFETCH { len } else { 0 },
            step: if len == 0 {
                0
            } else {
                (len as u32).div_ceil(steps as u32).next_multiple_of(64) as usize
            },
        }
    }
}

/// Bytes of as many rows of one plane as a vector has lanes.
pub(super) struct PlaneRows<'a> {
    /// From the first byte of lane 0's row to the end of the plane.
    bytes: &'a [u8],
    /// From a lane's row to the next's.
    stride: usize,
    /// Start of the last lane's row.
    last: usize,
}

impl<'a> PlaneRows<'a> {
    /// `n_lanes` rows of `stride` bytes from row `first` on, or this row for all lanes.
    #[inline(always)]
    fn new(bytes: &'a [u8], stride: usize, first: usize, n_lanes: usize, repeat: bool) -> Self {
        let bytes = &bytes[first * stride..];
        let stride = if repeat { 0 } else { stride };
        Self { bytes, stride, last: (n_lanes - 1) * stride }
    }

    /// Bytes `at`..`at` + `LEN` of each row.
    ///
    /// # Panics
    /// If they do not lie within the plane.
    #[inline(always)]
    pub(super) fn block<const LEN: usize>(&self, at: usize) -> Block<'_, LEN> {
        assert!(self.last + at + LEN <= self.bytes.len(), "block within the plane");
        Block { first: &self.bytes[at..], stride: self.stride }
    }

    /// Where bytes `at`..`at` + `len` of lane 0's row begin; those of the next lanes' rows follow in steps of
    /// [`PlaneRows::stride`].
    ///
    /// # Panics
    /// If they do not lie within the plane for all lanes.
    #[inline(always)]
    pub(super) fn span(&self, at: usize, len: usize) -> *const u8 {
        assert!(self.last + at + len <= self.bytes.len(), "span within the plane");
        self.bytes[at..].as_ptr()
    }

    /// From a lane's row to the next's.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Four vectors as of [`Block::words`] with the first `len` ≤ 16 bytes at `at` of each row; what follows
    /// them is unspecified.
    #[inline(always)]
    pub(super) fn words_of<I: Isa>(&self, isa: I, at: usize, len: usize) -> [I::U; 4] {
        if self.last + at + 16 <= self.bytes.len() {
            return self.block::<16>(at).words(isa, 0);
        }
        let mut copy = [0; 16 * MAX_LANES];
        for (lane, copy) in copy.chunks_exact_mut(16).enumerate().take(I::LANES) {
            let start = lane * self.stride + at;
            copy[..len].copy_from_slice(&self.bytes[start..start + len]);
        }
        Block::<16> { first: &copy, stride: 16 }.words(isa, 0)
    }
}

/// `LEN` bytes of every row of a tile.
#[derive(Clone, Copy)]
pub(super) struct Block<'a, const LEN: usize> {
    /// From the first byte of lane 0; long enough for all lanes.
    first: &'a [u8],
    stride: usize,
}

impl<const LEN: usize> Block<'_, LEN> {
    /// The four little-endian words at `at` of every row, a vector each, lanes being rows.
    #[inline(always)]
    pub(super) fn words<I: Isa>(self, isa: I, at: usize) -> [I::U; 4] {
        assert!(at + 16 <= LEN, "words within the block");
        // SAFETY: lanes · stride + LEN bytes are there by construction.
        unsafe { isa.load_transposed(self.first.as_ptr().add(at), self.stride) }
    }

    /// The first words of the first and of the second 16 bytes of every row.
    #[inline(always)]
    pub(super) fn words_apart<I: Isa>(self, isa: I) -> [I::U; 2] {
        assert!(32 <= LEN, "words within the block");
        // SAFETY: as above.
        unsafe { isa.load_words_apart(self.first.as_ptr(), self.stride) }
    }
}

/// Stores `v` at the start of `to`.
#[inline(always)]
pub(super) fn put<I: Isa>(isa: I, to: &mut [f32; MAX_LANES], v: I::F) {
    // SAFETY: LANES ≤ MAX_LANES.
    unsafe { isa.store(to.as_mut_ptr(), v) }
}

/// The vector at the start of `from`.
#[inline(always)]
pub(super) fn get<I: Isa>(isa: I, from: &[f32; MAX_LANES]) -> I::F {
    // SAFETY: LANES ≤ MAX_LANES.
    unsafe { isa.load(from.as_ptr()) }
}
