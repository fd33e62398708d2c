//! `matmul_rows` against products in f64, for every encoding, kind of activations and instruction set.
//!
//! Also what the rest of the engine builds on: an output depends on its weight row and its activations alone, down to
//! the last bit, and nothing beyond the rows and tokens asked for is written.
#![allow(unsafe_code)]

mod support;

use std::ops::Range;

use moeflux_compute::cpu::Simd;
use moeflux_compute::cpu::activations::{Activations, BLOCK, PART, Q8Rows, Rows};
use moeflux_compute::cpu::matmul::{OutRows, accepts_q8, matmul, matmul_rows};
use moeflux_compute::cpu::pool::ThreadPool;
use moeflux_compute::{DType, Tensor, quant};
use support::{Random, dtypes, weight};

/// Weight rows: more than one block of any row tiling, and not a multiple of one.
const ROWS: usize = 19;
/// Activation rows that there are.
const TOKENS: usize = 33;
/// What outputs hold before a product.
const UNTOUCHED: f32 = -12345.678;

/// Largest difference from the exact product, relative to Σ|w·x|: f32 sums of up to 1024 products in 16 or more lanes
/// round some 70 times in a row at 6e-8 each; the split of w into scale and minimum adds terms a few times larger.
const TOLERANCE: f64 = 1e-5;

/// Row lengths: one block, and several that are no multiple of 256.
fn columns(dtype: DType) -> Vec<usize> {
    match dtype.block_len() {
        1 => vec![1, 37, 300],
        n => vec![n, 3 * n, 5 * n],
    }
}

/// Activations in one form, with the numbers that this form stands for.
struct Input {
    cols: usize,
    f32: Vec<f32>,
    q8: Option<Q8Rows>,
    exact: Vec<f64>,
}

impl Input {
    fn new(simd: Simd, x: &[f32], cols: usize, int8: bool) -> Self {
        let f32 = x.to_vec();
        if !int8 {
            return Self { cols, exact: x.iter().map(|v| f64::from(*v)).collect(), f32, q8: None };
        }
        let mut rows = Q8Rows::default();
        rows.quantize(simd, x, cols);
        let value = |i: usize| {
            let (block, at) = (&rows.row(i / cols)[i % cols / BLOCK], i % cols % BLOCK);
            f64::from(block.q[at]) * f64::from(block.scale[at / PART])
        };
        Self { cols, exact: (0..x.len()).map(value).collect(), f32, q8: Some(rows) }
    }

    fn activations(&self) -> Activations<'_> {
        match &self.q8 {
            Some(rows) => Activations::Q8(rows),
            None => Activations::F32 { rows: &self.f32, cols: self.cols },
        }
    }

    /// (tokens, ROWS) of outputs, of which `rows` are computed.
    fn product(&self, simd: Simd, weight: &Tensor, rows: Range<usize>, tokens: Rows<'_>) -> Vec<f32> {
        let mut out = vec![UNTOUCHED; tokens.len() * weight.rows()];
        // SAFETY: (tokens, rows of the weight) elements, borrowed by nobody else.
        let to = unsafe { OutRows::new(out.as_mut_ptr(), weight.rows()) };
        matmul_rows(simd, weight.view(), rows, self.activations(), tokens, to);
        out
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Calls `check` with every level and every input form that a dtype takes, on random weights and activations.
fn for_every(mut check: impl FnMut(&str, Simd, &Tensor, &Input)) {
    let mut random = Random::new(1);
    for dtype in dtypes() {
        for cols in columns(dtype) {
            let weight = weight(&mut random, dtype, ROWS, cols);
            let x = random.normals(TOKENS * cols);
            for int8 in [false, true] {
                if int8 && !accepts_q8(dtype, cols) {
                    continue;
                }
                for simd in Simd::available() {
                    let form = if int8 { "int8" } else { "f32" };
                    let case = format!("{dtype} {ROWS}×{cols}, {form}, {}", simd.level());
                    check(&case, simd, &weight, &Input::new(simd, &x, cols, int8));
                }
            }
        }
    }
}

#[test]
fn products_are_exact_to_rounding() {
    for_every(|case, simd, weight, input| {
        let w = quant::dequantize(weight.view()).unwrap();
        let got = input.product(simd, weight, 0..ROWS, Rows::Range(0..TOKENS));
        for (token, x) in input.exact.chunks_exact(input.cols).enumerate() {
            for (row, w) in w.chunks_exact(input.cols).enumerate() {
                let products = w.iter().zip(x).map(|(w, x)| f64::from(*w) * x);
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                let got = f64::from(got[token * ROWS + row]);
                let error = (got - sum).abs() / size;
                assert!(error <= TOLERANCE, "{case}: token {token}, row {row}: {got}, exactly {sum}");
            }
        }
    });
}

#[test]
fn every_quantised_encoding_takes_int8() {
    for dtype in dtypes() {
        let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        for cols in columns(dtype) {
            assert_eq!(accepts_q8(dtype, cols), !plain, "{dtype} {cols}");
        }
    }
}

#[test]
fn a_token_does_not_depend_on_its_batch() {
    for_every(|case, simd, weight, input| {
        let alone = |token: usize| bits(&input.product(simd, weight, 0..ROWS, Rows::Range(token..token + 1)));
        let alone: Vec<Vec<u32>> = (0..TOKENS).map(alone).collect();
        for count in (1..=9).chain([TOKENS]) {
            let start = (count * 5) % (TOKENS - count + 1);
            let batch = input.product(simd, weight, 0..ROWS, Rows::Range(start..start + count));
            for (i, got) in batch.chunks_exact(ROWS).enumerate() {
                assert_eq!(bits(got), alone[start + i], "{case}: {count} tokens, token {}", start + i);
            }
        }
        for listed in [&[7][..], &[3, 3, 0], &[32, 1, 30, 2, 28, 3, 31, 4, 5, 6, 9], &[8; 17], &[]] {
            let batch = input.product(simd, weight, 0..ROWS, Rows::Listed(listed));
            for (got, token) in batch.chunks_exact(ROWS).zip(listed) {
                assert_eq!(bits(got), alone[*token as usize], "{case}: {listed:?}, token {token}");
            }
        }
    });
}

#[test]
fn a_row_does_not_depend_on_the_partition_and_no_other_is_written() {
    for_every(|case, simd, weight, input| {
        for tokens in [1, 2, 9] {
            let tokens = Rows::Range(4..4 + tokens);
            let all = input.product(simd, weight, 0..ROWS, tokens.clone());
            assert!(!all.contains(&UNTOUCHED), "{case}: every row is written");
            for range in [0..1, 3..4, 5..18, 7..7, 16..19, 18..19] {
                let some = input.product(simd, weight, range.clone(), tokens.clone());
                for (i, got) in some.iter().enumerate() {
                    let expected = if range.contains(&(i % ROWS)) { all[i] } else { UNTOUCHED };
                    assert_eq!(got.to_bits(), expected.to_bits(), "{case}: rows {range:?}, element {i}");
                }
            }
        }
    });
}

#[test]
fn whole_products_are_the_same_for_any_number_of_threads() {
    let mut random = Random::new(2);
    let pools = [1, 2, 3, 5].map(|n| ThreadPool::new(n).unwrap());
    for dtype in dtypes() {
        let cols = columns(dtype)[1];
        let weight = weight(&mut random, dtype, 131, cols);
        let x = random.normals(3 * cols);
        for simd in Simd::available() {
            for int8 in [false, true] {
                let run = |pool| {
                    let mut out = vec![UNTOUCHED; 3 * 131];
                    matmul(pool, simd, weight.view(), &x, int8, &mut out);
                    bits(&out)
                };
                let one = run(&pools[0]);
                for pool in &pools[1..] {
                    assert_eq!(run(pool), one, "{dtype}, {} threads, {}", pool.threads(), simd.level());
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_token() {
    let mut random = Random::new(3);
    for dtype in dtypes() {
        let cols = columns(dtype)[1];
        let weight = weight(&mut random, dtype, ROWS, cols);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let clean = random.normals(9 * cols);
            let mut x = clean.clone();
            x[4 * cols + cols / 2] = bad;
            for (simd, int8) in Simd::available().into_iter().flat_map(|s| [(s, false), (s, true)]) {
                let int8 = int8 && accepts_q8(dtype, cols);
                let product = |x: &[f32]| {
                    Input::new(simd, x, cols, int8).product(simd, &weight, 0..ROWS, Rows::Range(0..9))
                };
                let (clean, got) = (product(&clean), product(&x));
                for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
                    let case = format!("{dtype}, int8 {int8}, {bad}, {}: element {i}", simd.level());
                    match i / ROWS {
                        4 => assert!(!got.is_finite(), "{case}: {got}"),
                        _ => assert_eq!(got.to_bits(), clean.to_bits(), "{case}"),
                    }
                }
            }
        }
    }
}
