//! [`Desk`]: memory of the host where a device and the processor hand each other rows and outputs of experts.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::gpu::memory::FEW_ROWS;

/// Words of the desk: as `DESK_…` of `kernels/handed.h`.
const ASKED: usize = 0;
const DONE: usize = 64;
const LATE: usize = 128;
const PAIRS: usize = 192;
const SET: usize = 193;
const LIST: usize = 194;
/// Most pairs, as `MAX_PAIRS` of `kernels/tiers.h`.
pub(crate) const MOST_PAIRS: usize = 8 * 64;

/// Where things lie on a desk, in words of 32 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeskLayout {
    /// Rows of activations.
    pub(crate) rows: usize,
    /// From a row to the next.
    pub(crate) row_words: usize,
    /// (pairs, width), f32.
    pub(crate) outputs: usize,
    words: usize,
}

impl DeskLayout {
    /// For rows of so many words, at most, of which each has `top_k` experts with up to `width` outputs.
    pub(crate) fn new(row_words: usize, width: usize, top_k: usize) -> Self {
        let rows = (LIST + MOST_PAIRS).next_multiple_of(64);
        let outputs = (rows + FEW_ROWS * row_words).next_multiple_of(64);
        Self { rows, row_words, outputs, words: outputs + FEW_ROWS * top_k * width }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words * 4
    }
}

/// How rows of activations are multiplied with a set's weights, and lie on the desk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowForm {
    /// Bytes with scales of 32 columns.
    Bytes,
    /// f32, not rounded.
    Floats,
}

impl RowForm {
    /// Words of a row with so many columns: `hand_row` of `kernels/handed.h` writes it, and what products are multiplied with.
    pub(crate) fn words(self, cols: usize) -> usize {
        let own = match self {
            Self::Bytes => cols / 4 + cols / 16,
            Self::Floats => cols,
        };
        (own + 1).next_multiple_of(4)
    }
}

/// A pair of a row with an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HandedPair {
    pub(crate) expert: u32,
    /// Its number among the batch's pairs.
    pub(crate) pair: u32,
}

impl HandedPair {
    /// As `handed_pair` of `kernels/handed.h`.
    pub(crate) fn word(&self) -> u32 {
        self.pair << 16 | self.expert
    }
}

/// A row of activations on the desk, as bytes.
pub(super) struct DeskRow<'a> {
    /// (cols), i8.
    pub(super) codes: &'a [u8],
    /// (cols / 32, 2): scales d, and d · Σq.
    pub(super) scales: &'a [[u32; 2]],
    /// What products are multiplied with.
    pub(super) factor: f32,
}

/// The desk, as the processor sees it. What is read here has been written before [`Desk::asked`], and is not written again
/// before [`Desk::answer`].
#[derive(Debug)]
pub(super) struct Desk {
    start: *mut u32,
    layout: DeskLayout,
}

// SAFETY: memory that lives longer than the desk and may be used by any thread.
unsafe impl Send for Desk {}
// SAFETY: the words that both sides write are atomic; of the others, its methods say who may use them.
unsafe impl Sync for Desk {}

impl Desk {
    /// # Safety
    /// `memory` outlives the desk, and nothing but a device and the desk uses it as long.
    pub(super) unsafe fn new(memory: &mut [u8], layout: DeskLayout) -> Self {
        assert!(
            memory.len() >= layout.bytes() && memory.as_ptr().cast::<u32>().is_aligned(),
            "a desk's memory"
        );
        Self { start: memory.as_mut_ptr().cast(), layout }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: within the memory, aligned, and accessed by atomic operations only where it is written twice.
        unsafe { AtomicU32::from_ptr(self.start.add(at)) }
    }

    /// Words that nobody writes meanwhile.
    fn words(&self, range: Range<usize>) -> &[u32] {
        assert!(range.end <= self.layout.words, "words of the desk");
        // SAFETY: within the memory; the device writes them only while the processor is not asked.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Whether the device asks for something.
    pub(super) fn asked(&self) -> bool {
        self.word(ASKED).load(Ordering::Acquire) == 1
    }

    /// The same; it is then not asked for again.
    pub(super) fn take_asked(&self) -> bool {
        self.word(ASKED).swap(0, Ordering::AcqRel) == 1
    }

    /// The outputs are there.
    pub(super) fn answer(&self) {
        self.word(DONE).store(1, Ordering::Release);
    }

    /// Whether the device waited in vain, which it then no longer has.
    pub(super) fn take_late(&self) -> bool {
        self.word(LATE).swap(0, Ordering::AcqRel) == 1
    }

    /// The set of experts that is asked for, and the pairs.
    pub(super) fn request(&self, pairs: &mut Vec<HandedPair>) -> usize {
        let count = self.word(PAIRS).load(Ordering::Relaxed) as usize;
        let listed = self.words(LIST..LIST + count.min(MOST_PAIRS)).iter();
        pairs.clear();
        pairs.extend(listed.map(|word| HandedPair { expert: word & 0xffff, pair: word >> 16 }));
        pairs.sort_unstable();
        self.word(SET).load(Ordering::Relaxed) as usize
    }

    /// The experts of so many pairs, which were put there by themselves.
    pub(super) fn ids(&self, pairs: usize) -> &[u32] {
        self.words(LIST..LIST + pairs.min(MOST_PAIRS))
    }

    /// The words of a row of `cols` columns.
    fn row_words(&self, form: RowForm, row: usize, cols: usize) -> &[u32] {
        let start = self.layout.rows + row * self.layout.row_words;
        self.words(start..start + form.words(cols))
    }

    /// A row of `cols` columns as bits of f32, and what products are multiplied with.
    pub(super) fn floats(&self, row: usize, cols: usize) -> (&[u32], f32) {
        let (values, rest) = self.row_words(RowForm::Floats, row, cols).split_at(cols);
        (values, f32::from_bits(rest[0]))
    }

    /// A row of `cols` columns as bytes.
    pub(super) fn bytes(&self, row: usize, cols: usize) -> DeskRow<'_> {
        let words = self.row_words(RowForm::Bytes, row, cols);
        let (codes, rest) = words.split_at(cols / 4);
        let (scales, rest) = rest.split_at(cols / 16);
        // SAFETY: words have no padding, and bytes no invalid values.
        let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), cols) };
        DeskRow { codes, scales: scales.as_chunks().0, factor: f32::from_bits(rest[0]) }
    }

    /// Outputs (pairs, width), for the processor to write while it is asked.
    ///
    /// # Safety
    /// What this gave before is no longer used.
    #[allow(clippy::mut_from_ref, reason = "memory that two sides take turns to write")]
    pub(super) unsafe fn outputs(&self) -> &mut [f32] {
        let Range { start, end } = self.layout.outputs..self.layout.words;
        // SAFETY: within the memory; the device reads it only once it is answered.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start).cast(), end - start) }
    }
}
