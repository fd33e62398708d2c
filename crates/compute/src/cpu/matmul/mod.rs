//! Matrix products with weights in any encoding: y[t, r] = Σ_c w[r, c] · x[t, c].
//!
//! Quantised weights meet int8 activations in one common form: 256 columns as unsigned bytes with a scale and a
//! minimum for every 16 of them ([`block::WeightBlock`]). A format only says how its bytes unpack into that form;
//! each instruction set only has one integer dot product of it ([`dot`]). Unpacking goes through the L1 cache, which
//! costs a few per cent of a kernel written for one format and instruction set and saves dozens of those.
//!
//! For one row and one token the operations and their order are always the same, whatever the number of tokens, the
//! partition into tasks or the number of threads: results are bit-identical across batches.

pub mod block;
mod dot;

use std::ops::Range;

use super::activations::{Activations, Q8Rows, Rows};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::Simd;
use super::vector;
use crate::quant::dequantize_row;
use crate::{DType, TensorView};

/// Where a product goes: one row of outputs a token, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub struct OutRows {
    start: *mut f32,
    stride: usize,
}

// SAFETY: whoever makes an `OutRows` promises that writers are disjoint.
unsafe impl Send for OutRows {}
// SAFETY: as above.
unsafe impl Sync for OutRows {}

impl OutRows {
    /// Outputs of token t begin at `start + t · stride`.
    ///
    /// # Safety
    /// For every product written through it, `start + t · stride + r` is valid for writing for all its tokens t and
    /// weight rows r, and nobody else reads or writes these elements meanwhile.
    pub unsafe fn new(start: *mut f32, stride: usize) -> Self {
        Self { start, stride }
    }

    fn set(&self, token: usize, row: usize, value: f32) {
        // SAFETY: promised to `new`.
        unsafe { self.start.add(token * self.stride + row).write(value) }
    }
}

/// Whether there is an integer kernel for weights of this encoding and row length.
pub fn accepts_q8(dtype: DType, cols: usize) -> bool {
    !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && cols.is_multiple_of(32)
}

/// Rows `rows` of `weight` times the activations `tokens` of `x`; the i-th of these is token i of `out`.
///
/// # Panics
/// If ranges exceed the matrix or the activations, or int8 activations meet weights that do not take them.
pub fn matmul_rows(
    simd: Simd,
    weight: TensorView<'_>,
    rows: Range<usize>,
    x: Activations<'_>,
    tokens: Rows<'_>,
    out: OutRows,
) {
    assert!(rows.end <= weight.rows(), "rows within the matrix");
    match x {
        Activations::Q8(x) => dot::matmul_q8(simd, weight, rows, x, &tokens, out),
        Activations::F32 { rows: x, cols } => {
            assert_eq!(cols, weight.cols(), "activations as wide as the weight");
            matmul_f32(simd, weight, rows, x, &tokens, out);
        }
    }
}

/// Every row is dequantised once, then multiplied with all tokens.
fn matmul_f32(
    simd: Simd,
    weight: TensorView<'_>,
    rows: Range<usize>,
    x: &[f32],
    tokens: &Rows<'_>,
    out: OutRows,
) {
    let cols = weight.cols();
    let mut scratch = vec![0.0; cols];
    for row in rows {
        dequantize_row(weight, row, &mut scratch).expect("every dtype has a dequantiser");
        for i in 0..tokens.len() {
            let token = tokens.get(i);
            out.set(i, row, vector::dot_f32(simd, &scratch, &x[token * cols..(token + 1) * cols]));
        }
    }
}

/// All of `weight` times f32 activations x (tokens, cols), quantised if `int8` and there is a kernel: the simplest way
/// to multiply.
///
/// # Panics
/// If `x` is not a whole number of rows or `out` is not (tokens, rows).
pub fn matmul(pool: &ThreadPool, simd: Simd, weight: TensorView<'_>, x: &[f32], int8: bool, out: &mut [f32]) {
    let tokens = x.len() / weight.cols();
    assert_eq!((tokens * weight.cols(), tokens * weight.rows()), (x.len(), out.len()), "shapes agree");
    let mut q8 = Q8Rows::default();
    let input = match int8 && accepts_q8(weight.dtype(), weight.cols()) {
        true => {
            q8.quantize(simd, x, weight.cols());
            Activations::Q8(&q8)
        }
        false => Activations::F32 { rows: x, cols: weight.cols() },
    };
    let block = weight.rows().div_ceil(8 * pool.threads()).max(1);
    let (rows, shared) = (weight.rows(), SharedMut::new(out));
    pool.run(rows.div_ceil(block), &|task| {
        // SAFETY: `out` is (tokens, rows), and a task writes only its rows.
        let out = unsafe { OutRows::new(shared.as_ptr(), rows) };
        let range = task * block..((task + 1) * block).min(rows);
        matmul_rows(simd, weight, range, input, Rows::Range(0..tokens), out);
    });
}
