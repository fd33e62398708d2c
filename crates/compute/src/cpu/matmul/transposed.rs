//! Products of plain float weights whose rows are stored as columns with f32 activations.
//!
//! Elements are gathered one at a time into a tile: correct for every stride, and slow beside [`super::plain`].

use super::{
    Job,
    float::{MultiplyValues, Values},
    tile::{Product, Sums, TileRows, walk},
};
use crate::{
    cpu::simd::{Isa, Kernel},
    quant,
};

/// The product of a job with f32 activations.
pub(super) struct Multiply<'a> {
    pub(super) job: &'a Job<'a>,
    /// (n_tokens, cols), f32.
    pub(super) x: &'a [f32],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let cols = self.job.w.cols();
        walk(isa, self.job, Transposed { x: self.x, cols, values: Values::new() });
    }
}

struct Transposed<'a> {
    x: &'a [f32],
    cols: usize,
    values: Values,
}

impl<I: Isa> Product<I> for Transposed<'_> {
    #[inline(always)]
    fn decode(&mut self, _: I, rows: &TileRows<'_>, col: usize, n: usize) {
        let w = rows.matrix();
        for c in 0..n {
            for lane in 0..I::LANES {
                let value = quant::float(w.dtype(), w.element(rows.row_of(lane), col + c));
                self.values.put_one(c, lane, value.expect("transposed views are of plain floats"));
            }
        }
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
        isa.call(MultiplyValues { values: &self.values, n, x, sums });
    }
}
