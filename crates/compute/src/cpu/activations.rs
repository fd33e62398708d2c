//! Activations in the forms that matrix kernels read.

use std::ops::Range;

use super::shared::SharedMut;
use super::simd::{Simd, for_every_level};

/// Columns that a block of quantised activations holds.
pub const BLOCK: usize = 256;
/// Columns that share a scale.
pub const GROUP: usize = 32;
/// Columns that share an entry of a block's `scale` and `sum`: the shortest group of any weight encoding.
pub const PART: usize = 16;

/// 256 columns as int8; columns beyond the row's end are zero.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct Q8Block {
    /// round(x / scale), ties to even.
    pub q: [i8; BLOCK],
    /// Scale of each 16 columns; two neighbours share it, being one group of 32.
    pub scale: [f32; BLOCK / PART],
    /// scale · Σ q of each 16 columns.
    pub sum: [f32; BLOCK / PART],
}

impl Q8Block {
    const ZERO: Self = Self { q: [0; BLOCK], scale: [0.0; BLOCK / PART], sum: [0.0; BLOCK / PART] };
}

/// Rows of activations, quantised to int8 with one scale per 32 columns (absolute maximum / 127).
///
/// A group that holds a value that is not finite gets the scale NaN, so that it cannot vanish in the result.
#[derive(Debug, Default)]
pub struct Q8Rows {
    blocks: Vec<Q8Block>,
    blocks_per_row: usize,
}

impl Q8Rows {
    /// Makes room for `rows` rows of `cols` columns. Their content is unspecified until quantised.
    pub fn resize(&mut self, rows: usize, cols: usize) {
        self.blocks_per_row = cols.div_ceil(BLOCK);
        let blocks = rows * self.blocks_per_row;
        // Ends of rows must be zero: their columns lie beyond the matrix.
        if !cols.is_multiple_of(BLOCK) || blocks > self.blocks.len() {
            self.blocks.clear();
            self.blocks.resize(blocks, Q8Block::ZERO);
        }
    }

    /// Quantises x (rows, cols).
    pub fn quantize(&mut self, simd: Simd, x: &[f32], cols: usize) {
        self.resize(x.len() / cols, cols);
        let shared = self.shared();
        for (row, values) in x.chunks_exact(cols).enumerate() {
            // SAFETY: one thread, one row at a time.
            unsafe { shared.quantize_part(simd, row, 0, values) };
        }
    }

    /// The blocks of row `row`.
    pub fn row(&self, row: usize) -> &[Q8Block] {
        &self.blocks[row * self.blocks_per_row..(row + 1) * self.blocks_per_row]
    }

    /// For several threads to quantise parts of it.
    pub(crate) fn shared(&mut self) -> SharedQ8<'_> {
        SharedQ8 { blocks: SharedMut::new(&mut self.blocks), blocks_per_row: self.blocks_per_row }
    }
}

/// Write access to [`Q8Rows`] from several threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharedQ8<'a> {
    blocks: SharedMut<'a, Q8Block>,
    blocks_per_row: usize,
}

impl SharedQ8<'_> {
    /// Quantises `values` as the columns of `row` from `col` on.
    ///
    /// # Safety
    /// No two threads write the same row's same block of 32 columns at a time, and nobody reads it.
    ///
    /// # Panics
    /// If `col` or the number of values is no multiple of 32 (the row's end excepted), or beyond the row.
    pub(crate) unsafe fn quantize_part(&self, simd: Simd, row: usize, col: usize, values: &[f32]) {
        assert!(col.is_multiple_of(GROUP), "whole groups");
        for (i, group) in values.chunks(GROUP).enumerate() {
            let at = col + i * GROUP;
            let block = row * self.blocks_per_row + at / BLOCK;
            assert!(at / BLOCK < self.blocks_per_row, "columns within the row");
            let within = at % BLOCK;
            // SAFETY: groups of a block are disjoint ranges of each array; the caller keeps others off this one.
            unsafe {
                let block = self.blocks.as_ptr().add(block);
                let q = (&raw mut (*block).q).cast::<i8>().add(within);
                let scale = (&raw mut (*block).scale).cast::<f32>().add(within / PART);
                let sum = (&raw mut (*block).sum).cast::<f32>().add(within / PART);
                quantize_group(
                    simd,
                    group,
                    &mut *q.cast::<[i8; GROUP]>(),
                    &mut *scale.cast::<[f32; 2]>(),
                    &mut *sum.cast::<[f32; 2]>(),
                );
            }
        }
    }
}

for_every_level! {
    fn quantize_group(x: &[f32], q: &mut [i8; GROUP], scale: &mut [f32; 2], sum: &mut [f32; 2]) {
        // Adding and subtracting 1.5 · 2²³ rounds to an integer, ties to even.
        const ROUND: f32 = 12_582_912.0;
        let mut padded = [0.0f32; GROUP];
        padded[..x.len()].copy_from_slice(x);
        let (mut largest, mut poison) = (0.0f32, 0.0f32);
        for v in padded {
            let magnitude = v.abs();
            largest = if magnitude > largest { magnitude } else { largest };
            poison += v * 0.0;
        }
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        // A group of tiny values has no finite inverse scale; it is zero for all purposes.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        let step = largest / 127.0 + poison;
        *scale = [step; 2];
        for ((q, sum), x) in q.chunks_exact_mut(PART).zip(sum).zip(padded.chunks_exact(PART)) {
            let mut total = 0i32;
            for (q, v) in q.iter_mut().zip(x) {
                *q = ((v * inverse + ROUND) - ROUND) as i32 as i8;
                total += i32::from(*q);
            }
            *sum = step * total as f32;
        }
    }
}

/// A batch of activation rows.
#[derive(Debug, Clone, Copy)]
pub enum Activations<'a> {
    /// f32 (rows, cols).
    F32 {
        /// All rows.
        rows: &'a [f32],
        /// Columns.
        cols: usize,
    },
    /// int8.
    Q8(&'a Q8Rows),
}

/// Which rows of a batch of activations enter a product.
#[derive(Debug, Clone)]
pub enum Rows<'a> {
    /// Consecutive ones.
    Range(Range<usize>),
    /// These, in this order.
    Listed(&'a [u32]),
}

impl Rows<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Range(range) => range.len(),
            Self::Listed(rows) => rows.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `i`-th of them.
    pub fn get(&self, i: usize) -> usize {
        match self {
            Self::Range(range) => range.start + i,
            Self::Listed(rows) => rows[i] as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_quantises_alike_and_within_half_a_step() {
        let x: Vec<f32> =
            (0..300).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013 * (1 + i / 64) as f32).collect();
        let mut first = Q8Rows::default();
        first.quantize(Simd::available()[0], &x, 300);
        for simd in Simd::available() {
            let mut rows = Q8Rows::default();
            rows.quantize(simd, &x, 300);
            for (col, v) in x.iter().enumerate() {
                let block = &rows.row(0)[col / BLOCK];
                let (q, scale) = (block.q[col % BLOCK], block.scale[col % BLOCK / PART]);
                assert!((f32::from(q) * scale - v).abs() <= 0.5001 * scale, "column {col}");
                assert_eq!(q, first.row(0)[col / BLOCK].q[col % BLOCK]);
            }
            let sum: f32 = rows.row(0)[1].sum.iter().sum();
            let direct: f32 = (256..300)
                .map(|c| f32::from(rows.row(0)[1].q[c - 256]) * rows.row(0)[1].scale[(c - 256) / PART])
                .sum();
            assert!((sum - direct).abs() < 1e-4);
        }
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 64];
            x[40] = bad;
            let mut rows = Q8Rows::default();
            rows.quantize(Simd::detect(), &x, 64);
            let scale = rows.row(0)[0].scale;
            assert!(scale[0].is_finite() && scale[2].is_nan(), "{bad} {scale:?}");
        }
    }

    #[test]
    fn extremes_do_not_overflow() {
        let mut rows = Q8Rows::default();
        rows.quantize(Simd::detect(), &[f32::MAX, -f32::MAX, 1e-45, 0.0], 4);
        assert_eq!(rows.row(0)[0].q[..4], [127, -127, 0, 0]);
        rows.quantize(Simd::detect(), &[1e-45; 32], 32);
        assert_eq!(rows.row(0)[0].sum[0], 0.0);
    }
}
