//! Matrix products at every SIMD level of this machine: accuracy, exact integers, and independence of batch,
//! partition and threads.
#![allow(unsafe_code)]

use std::ops::Range;

use moeflux_compute::{
    DType, Error, Half, MatrixScale, Tensor, TensorView, Zeros,
    cpu::{
        activations::{Activations, BLOCK, Q8Rows},
        matmul::{OutRows, RowTasks, Tokens, accepts_q8, matmul, matmul_rows},
        pool::ThreadPool,
        simd::{Simd, SimdLevel},
    },
    quant,
};

use crate::support::{random::Random, weights::codebooks};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const GGUF: [DType; 13] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::Q8_0,
    DType::MXFP4,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

fn affine() -> impl Iterator<Item = DType> {
    [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
        [(32, Half::F16), (64, Half::BF16), (128, Half::F16)].map(|(group, scale)| DType::Affine {
            bits,
            group,
            scale,
        })
    })
}

fn integers() -> impl Iterator<Item = DType> {
    let groups = [(32, Half::BF16), (64, Half::F16), (128, Half::F16), (0, Half::BF16)];
    let kinds = [(4, Zeros::Middle), (4, Zeros::Stored), (8, Zeros::Middle), (8, Zeros::Stored)];
    kinds
        .into_iter()
        .flat_map(move |(bits, zeros)| groups.map(|(group, scale)| DType::Int { bits, group, scale, zeros }))
}

fn all_dtypes() -> impl Iterator<Item = DType> {
    let others = [
        DType::MXFP4_Planes,
        DType::MXFP8_Planes,
        DType::NVFP4 { matrix: MatrixScale::Factor },
        DType::NVFP4 { matrix: MatrixScale::Divisor },
    ];
    FLOATS.into_iter().chain(GGUF).chain(codebooks()).chain(others).chain(affine()).chain(integers())
}

/// Every level of this machine.
fn levels() -> impl Iterator<Item = Simd> {
    SimdLevel::available().into_iter().map(|level| Simd::new(level).unwrap())
}

/// Widths to try: one tile, several with a short last one, the least, and for floats ragged ones.
fn widths(dtype: DType) -> Vec<usize> {
    match dtype.block_len() {
        1 => vec![1, 7, 37, 256, 519],
        256 => vec![256, 768],
        block => vec![block, 3 * block, 256, 256 + 128, 1024 - block],
    }
}

/// The product in f64, and Σ|w · x| of each output.
fn reference(w: &[f32], x: &[f32], cols: usize) -> (Vec<f64>, Vec<f64>) {
    let product = |abs: bool| {
        let dot = |(&w, &x): (&f32, &f32)| {
            let p = f64::from(w) * f64::from(x);
            if abs { p.abs() } else { p }
        };
        let rows = x.chunks_exact(cols).flat_map(|x| w.chunks_exact(cols).map(move |w| (w, x)));
        rows.map(|(w, x)| w.iter().zip(x).map(dot).sum()).collect()
    };
    (product(false), product(true))
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], w: &[f32], x: &[f32], cols: usize) {
    let (expected, magnitude) = reference(w, x, cols);
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, &got) in got.iter().enumerate() {
        let error = (f64::from(got) - expected[i]).abs();
        // f32 sums of up to 1024 products: far below, unless something is wrong.
        assert!(error <= 1e-5 * magnitude[i], "{what}: output {i} is {got}, expected {}", expected[i]);
    }
}

/// In one term and in two.
fn q8(simd: Simd, x: &[f32], cols: usize) -> [Q8Rows; 2] {
    [false, true].map(|second| {
        let mut rows = Q8Rows::with_second_term(second);
        rows.quantize_from(simd, x, x.len() / cols, cols);
        rows
    })
}

/// [`q8`] where weights take it, else nothing.
fn accepted_q8(dtype: DType, simd: Simd, x: &[f32], cols: usize) -> Vec<Q8Rows> {
    if accepts_q8(dtype, cols) { q8(simd, x, cols).into() } else { vec![] }
}

fn dequantized(x: &Q8Rows) -> Vec<f32> {
    let mut out = vec![0.0; x.n_rows() * x.cols()];
    for (row, out) in out.chunks_exact_mut(x.cols()).enumerate() {
        x.dequantize_row(row, out);
    }
    out
}

fn product(pool: &ThreadPool, simd: Simd, w: TensorView<'_>, x: Activations<'_>) -> Vec<f32> {
    // Not zero, so that an output left out is seen.
    let mut out = vec![f32::NAN; x.n_rows() * w.rows()];
    matmul(pool, simd, w, x, &mut out).unwrap();
    out
}

#[test]
fn products_are_close_to_f64() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(1);
    for dtype in all_dtypes() {
        for cols in widths(dtype) {
            for (rows, n_tokens) in
                [(1, 1), (3, 2), (15, 3), (16, 4), (17, 5), (19, 6), (33, 7), (16, 8), (7, 9)]
            {
                let w = random.tensor(dtype, rows, cols);
                let values = quant::dequantize(w.view()).unwrap();
                let x = random.normals(n_tokens * cols);
                for simd in levels() {
                    let what = format!("{dtype}, {rows} × {cols}, {n_tokens} tokens, {}", simd);
                    let exact = Activations::F32 { rows: &x, cols };
                    let got = product(&pool, simd, w.view(), exact);
                    assert_close(&format!("{what}, f32"), &got, &values, &x, cols);
                    for x in accepted_q8(dtype, simd, &x, cols) {
                        let got = product(&pool, simd, w.view(), Activations::Q8(&x));
                        let what = format!("{what}, int8 in {} terms", x.terms());
                        assert_close(&what, &got, &values, &dequantized(&x), cols);
                    }
                }
            }
        }
    }
}

/// Matrices that are every second row of a stored one, or its columns.
#[test]
fn products_of_views_are_close_to_f64() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(10);
    let blocks = [DType::Q8_0, DType::MXFP4, DType::MXFP4_Planes, DType::Q5_1, DType::IQ4_NL];
    for dtype in FLOATS.into_iter().chain(blocks) {
        let odd: &[_] = if FLOATS.contains(&dtype) { &[(5, 7, 1), (23, 33, 5), (9, 257, 2)] } else { &[] };
        let shapes = [(1, 32, 1), (19, 288, 1), (19, 288, 5), (40, 64, 3)];
        for (rows, cols, n_tokens) in shapes.into_iter().chain(odd.iter().copied()) {
            let stored = random.planes(dtype, 2 * rows, cols);
            let planes: Vec<&[u8]> = stored.iter().map(Vec::as_slice).collect();
            let mut views = TensorView::interleaved(dtype, rows, cols, &planes).unwrap().to_vec();
            if FLOATS.contains(&dtype) {
                views.extend(TensorView::interleaved_transposed(dtype, rows, cols, planes[0]).unwrap());
                views.push(TensorView::transposed(dtype, 2 * rows, cols, planes[0]).unwrap());
            }
            for (i, w) in views.into_iter().enumerate() {
                let values = quant::dequantize(w).unwrap();
                let x = random.normals(n_tokens * cols);
                for simd in levels() {
                    let what = format!("{dtype} view {i}, {} × {cols}, {n_tokens} tokens", w.rows());
                    let got = product(&pool, simd, w, Activations::F32 { rows: &x, cols });
                    assert_close(&format!("{what}, f32"), &got, &values, &x, cols);
                    for x in accepted_q8(dtype, simd, &x, cols) {
                        let got = product(&pool, simd, w, Activations::Q8(&x));
                        let what = format!("{what}, int8 in {} terms", x.terms());
                        assert_close(&what, &got, &values, &dequantized(&x), cols);
                    }
                }
            }
        }
    }
}

/// More tokens than sums are kept for at a time; the last are those of a product by themselves.
#[test]
fn many_tokens_are_close_to_f64() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(2);
    for (dtype, n_tokens) in [(DType::Q4_K, 33), (DType::Q6_K, 64), (DType::Q8_0, 131), (DType::BF16, 131)] {
        let (rows, cols) = (35, 512);
        let w = random.tensor(dtype, rows, cols);
        let values = quant::dequantize(w.view()).unwrap();
        let x = random.normals(n_tokens * cols);
        for simd in levels() {
            let what = format!("{dtype}, {n_tokens} tokens, {}", simd);
            let got = product(&pool, simd, w.view(), Activations::F32 { rows: &x, cols });
            assert_close(&what, &got, &values, &x, cols);
            for x in accepted_q8(dtype, simd, &x, cols) {
                let got = product(&pool, simd, w.view(), Activations::Q8(&x));
                assert_close(&what, &got, &values, &dequantized(&x), cols);
                let mut last = vec![f32::NAN; 3 * rows];
                // SAFETY: the matrix borrowed here; one call.
                let out = unsafe { OutRows::new(last.as_mut_ptr(), rows, 3, rows) };
                let tokens = Tokens::Range(n_tokens - 3..n_tokens);
                matmul_rows(simd, w.view(), 0..rows, Activations::Q8(&x), tokens, out).unwrap();
                assert_same(&what, &last, &got[(n_tokens - 3) * rows..]);
            }
        }
    }
}

/// Bits of `got` are those of `expected`.
#[track_caller]
fn assert_same(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.to_bits(), expected.to_bits(), "{what}: {got} against {expected} at {i}");
    }
}

#[test]
fn outputs_depend_on_their_row_and_token_only() {
    let pools = [1, 2, 3].map(ThreadPool::new);
    let mut random = Random::new(3);
    for dtype in all_dtypes() {
        let cols = *widths(dtype).last().unwrap();
        let (rows, n_tokens) = (53, 33);
        let w = random.tensor(dtype, rows, cols);
        let w = w.view();
        let x = random.normals(n_tokens * cols);
        for simd in levels() {
            let quantized = accepted_q8(dtype, simd, &x, cols);
            let exact = Activations::F32 { rows: &x, cols };
            let quantized =
                ["int8", "int8 in two terms"].into_iter().zip(quantized.iter().map(Activations::Q8));
            for (kind, x) in [("f32", exact)].into_iter().chain(quantized) {
                let what = format!("{dtype}, {kind}, {}", simd);
                let all = product(&pools[0], simd, w, x);
                for pool in &pools[1..] {
                    let got = product(pool, simd, w, x);
                    assert_same(&format!("{what}, {} threads", pool.threads()), &got, &all);
                }
                for n in 1..=9 {
                    for first in [0, 5, n_tokens - n] {
                        let mut got = vec![f32::NAN; n * rows];
                        // SAFETY: the matrix borrowed here; one call.
                        let out = unsafe { OutRows::new(got.as_mut_ptr(), rows, n, rows) };
                        matmul_rows(simd, w, 0..rows, x, Tokens::Range(first..first + n), out).unwrap();
                        let expected = &all[first * rows..(first + n) * rows];
                        assert_same(&format!("{what}, tokens {first} + {n}"), &got, expected);
                    }
                }
                // A gathered list, rows in uneven parts, into wider rows of output.
                let list = [31, 0, 7, 7, 19];
                let stride = rows + 3;
                let mut got = vec![-1.0; list.len() * stride];
                // SAFETY: the matrix borrowed here; one call after the other.
                let out = unsafe { OutRows::new(got.as_mut_ptr(), stride, list.len(), rows) };
                for part in [40..rows, 0..1, 1..4, 4..23, 23..23, 23..40] {
                    matmul_rows(simd, w, part, x, Tokens::List(&list), out).unwrap();
                }
                for (got, &token) in got.chunks_exact(stride).zip(&list) {
                    let token = token as usize;
                    assert_same(&format!("{what}, gathered"), &got[..rows], &all[token * rows..][..rows]);
                    assert_eq!(got[rows..], [-1.0; 3], "{what}: nothing beside the matrix is written");
                }
                // A matrix of a few of the rows.
                let few = product(&pools[0], simd, w.rows_range(48..53), x);
                for (few, all) in few.chunks_exact(5).zip(all.chunks_exact(rows)) {
                    assert_same(&format!("{what}, five rows"), few, &all[48..]);
                }
            }
        }
    }
}

/// Twice the elements of MXFP4.
const DOUBLED: [i64; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Values of the codes of IQ4_NL and IQ4_XS.
const NON_LINEAR: [i64; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Weights that are all code `code` with scale 1 and no bias, and the integer they stand for.
fn constant_weights(dtype: DType, rows: usize, cols: usize, code: u8) -> (Tensor, i64) {
    let one = half::f16::ONE.to_le_bytes();
    let zero = [0, 0];
    let nibbles = code & 15 | code << 4;
    let (block, value): (Vec<u8>, i64) = match dtype {
        DType::Q4_0 => ([&one[..], &[nibbles; 16]].concat(), i64::from(code & 15) - 8),
        DType::Q5_0 => {
            let high = if code & 16 == 0 { 0 } else { 255 };
            ([&one[..], &[high; 4], &[nibbles; 16]].concat(), i64::from(code & 31) - 16)
        }
        DType::Q8_0 => ([&one[..], &[code; 32]].concat(), i64::from(code as i8)),
        DType::Q4_1 => ([&one[..], &zero, &[nibbles; 16]].concat(), i64::from(code & 15)),
        DType::Q5_1 => {
            let high = if code & 16 == 0 { 0 } else { 255 };
            ([&one[..], &zero, &[high; 4], &[nibbles; 16]].concat(), i64::from(code & 31))
        }
        DType::IQ4_NL => ([&one[..], &[nibbles; 16]].concat(), NON_LINEAR[usize::from(code & 15)]),
        // Six-bit scales 33, stored with 32 added.
        DType::IQ4_XS => {
            let scales = [0xaa, 0xaa, 0x11, 0x11, 0x11, 0x11];
            ([&one[..], &scales, &[nibbles; 128]].concat(), NON_LINEAR[usize::from(code & 15)])
        }
        // Scales of 2, as elements are halves.
        DType::MXFP4 => ([&[128][..], &[nibbles; 16]].concat(), DOUBLED[usize::from(code & 15)]),
        DType::MXFP4_Planes => {
            let planes = [vec![nibbles; rows * cols / 2], vec![128; rows * cols / 32]];
            let planes = planes.map(moeflux_compute::Bytes::new).to_vec();
            return (Tensor::new(dtype, rows, cols, planes).unwrap(), DOUBLED[usize::from(code & 15)]);
        }
        DType::Int { bits, scale, zeros, .. } => {
            let one = if scale == Half::F16 { one } else { half::bf16::ONE.to_le_bytes() };
            let bytes = |plane| dtype.plane_bytes(plane, rows, cols).unwrap();
            let mut planes =
                vec![vec![if bits == 4 { nibbles } else { code }; bytes(0)], one.repeat(bytes(1) / 2)];
            let middle = if bits == 4 { 8 } else { 128 };
            let zero = if zeros == Zeros::Stored { 5 } else { middle };
            if zeros == Zeros::Stored {
                planes.push(vec![if bits == 4 { 0x55 } else { 5 }; bytes(2)]);
            }
            let planes = planes.into_iter().map(moeflux_compute::Bytes::new).collect();
            let code = if bits == 4 { code & 15 } else { code };
            return (Tensor::new(dtype, rows, cols, planes).unwrap(), i64::from(code) - zero);
        }
        // Scales of 2, as elements are halves.
        DType::NVFP4 { .. } => {
            let whole = 1f32.to_le_bytes().to_vec();
            let planes = [vec![nibbles; rows * cols / 2], vec![0x40; rows * cols / 16], whole];
            let planes = planes.map(moeflux_compute::Bytes::new).to_vec();
            return (Tensor::new(dtype, rows, cols, planes).unwrap(), DOUBLED[usize::from(code & 15)]);
        }
        // Sub-block scales 1, minima 0.
        DType::Q4_K => {
            let scales = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1];
            ([&one[..], &zero, &scales, &[nibbles; 128]].concat(), i64::from(code & 15))
        }
        DType::Q5_K => {
            let scales = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1];
            let high = if code & 16 == 0 { 0 } else { 255 };
            ([&one[..], &zero, &scales, &[high; 32], &[nibbles; 128]].concat(), i64::from(code & 31))
        }
        DType::Q6_K => {
            let high = (code >> 4 & 3) * 0b0101_0101;
            let (low, high) = ([nibbles; 128], [high; 64]);
            ([&low[..], &high, &[1; 16], &one].concat(), i64::from(code & 63) - 32)
        }
        // Scale nibble 1, minimum nibble 0.
        DType::Q2_K => {
            let packed = (code & 3) * 0b0101_0101;
            ([&[1; 16][..], &[packed; 64], &one, &zero].concat(), i64::from(code & 3))
        }
        // Six-bit scales 33, stored with 32 added.
        DType::Q3_K => {
            let high = if code & 4 == 0 { 0 } else { 255 };
            let packed = (code & 3) * 0b0101_0101;
            let scales = [0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0xaa, 0xaa, 0xaa, 0xaa];
            ([&[high; 32][..], &[packed; 64], &scales, &one].concat(), i64::from(code & 7) - 4)
        }
        DType::Affine { bits, .. } => {
            let value = code & (0xff >> (8 - bits));
            let stream = (0..8).fold(0u64, |stream, i| stream | u64::from(value) << (i * bits));
            let n = dtype.row_bytes(0, cols).unwrap() * rows / usize::from(bits);
            let groups = dtype.row_bytes(1, cols).unwrap() / 2 * rows;
            let packed = stream.to_le_bytes()[..bits.into()].repeat(n);
            let planes = [packed, one.repeat(groups), zero.repeat(groups)];
            let planes = planes.map(moeflux_compute::Bytes::new).to_vec();
            return (Tensor::new(dtype, rows, cols, planes).unwrap(), value.into());
        }
        other => panic!("{other} has no int8 kernel"),
    };
    let bytes = block.repeat(rows * cols / dtype.block_len());
    let planes = vec![moeflux_compute::Bytes::new(bytes)];
    (Tensor::new(dtype, rows, cols, planes).unwrap(), value)
}

/// Integer sums do not saturate or round, at the ends of all ranges.
#[test]
fn integer_dot_products_are_exact() {
    let pool = ThreadPool::new(1);
    let int8 = all_dtypes().filter(|&dtype| {
        let half_ok = !matches!(dtype, DType::Affine { scale: Half::BF16, .. });
        half_ok && accepts_q8(dtype, 256) && !codebooks().contains(&dtype)
    });
    for dtype in int8 {
        for code in [0, 1, 7, 8, 15, 16, 31, 32, 63, 127, 128, 129, 254, 255] {
            let (w, value) = constant_weights(dtype, 17, 256, code);
            // Blocks with maximum 127 have the scale 1. Signs constant, alternating, and odd ones out.
            let patterns: [fn(usize) -> f32; 5] = [
                |_| 127.0,
                |_| -127.0,
                |i| if i % 2 == 0 { 127.0 } else { -127.0 },
                |i| if i % 4 < 2 { 127.0 } else { -126.0 },
                |i| if i % 32 == 5 { -127.0 } else { i as f32 % 11.0 - 5.0 },
            ];
            let x: Vec<f32> = patterns.iter().flat_map(|p| (0..256).map(p)).collect();
            for simd in levels() {
                let [quantized, _] = q8(simd, &x, 256);
                assert_eq!(dequantized(&quantized), x);
                let got = product(&pool, simd, w.view(), Activations::Q8(&quantized));
                for (token, got) in got.chunks_exact(17).enumerate() {
                    let sum: i64 = x[token * 256..(token + 1) * 256].iter().map(|&x| x as i64).sum();
                    let expected = (value * sum) as f32;
                    assert!(
                        got.iter().all(|&got| got == expected),
                        "{dtype}, {}, code {code}, pattern {token}: {got:?}, expected {expected}",
                        simd
                    );
                    // Few tokens are multiplied in another way.
                    for few in [token..token + 1, token..(token + 2).min(patterns.len())] {
                        let what = format!("{dtype}, {simd}, code {code}, tokens {few:?}");
                        let all = matmul_few(simd, w.view(), &quantized, few);
                        assert_same(&what, &all[..17], &[expected; 17]);
                    }
                }
            }
        }
    }
}

/// As [`integer_dot_products_are_exact`], where a code stands for several values: with d = 1 and the least of scales, products
/// are eighths whose sums are below 2²⁴.
#[test]
fn sums_of_codebooks_are_exact() {
    let pool = ThreadPool::new(1);
    let mut random = Random::new(11);
    let (rows, cols) = (40, 512);
    for dtype in codebooks() {
        let mut plane = random.planes(dtype, rows, cols).remove(0);
        for block in plane.chunks_exact_mut(dtype.block_bytes(0)) {
            // Where scales are, how many bytes apart, and the bits of theirs that are something else.
            let (scales, step, others) = match dtype {
                DType::IQ1_S => (35..50, 2, 0x8f),
                DType::IQ1_M => (48..56, 1, 0),
                DType::IQ2_XXS => (9..66, 8, 0x0f),
                DType::IQ2_XS => (66..74, 1, 0),
                DType::IQ2_S => (74..82, 1, 0),
                DType::IQ3_XXS => (69..98, 4, 0x0f),
                _ => (106..110, 1, 0),
            };
            block[scales].iter_mut().step_by(step).for_each(|byte| *byte &= others);
            let one = half::f16::ONE.to_le_bytes();
            if dtype == DType::IQ1_M {
                // Four bits on top of each word, the lowest first.
                (block[53], block[55]) = (one[1] << 4, one[1] & 0xf0);
            } else {
                block[..2].copy_from_slice(&one);
            }
        }
        let w = TensorView::new(dtype, rows, cols, &[&plane]).unwrap();
        let values = quant::dequantize(w).unwrap();
        // Scales of 1, as above.
        let patterns: [fn(usize) -> f32; 4] = [
            |_| -127.0,
            |i| if i % 2 == 0 { 127.0 } else { -127.0 },
            |i| if i % 32 == 9 { 127.0 } else { i as f32 % 13.0 - 6.0 },
            |i| if i % 32 == 3 { -127.0 } else { 127.0 - (i * i % 255) as f32 },
        ];
        let x: Vec<f32> = patterns.iter().flat_map(|p| (0..cols).map(p)).collect();
        for simd in levels() {
            let [quantized, _] = q8(simd, &x, cols);
            let (expected, _) = reference(&values, &dequantized(&quantized), cols);
            let expected: Vec<f32> = expected.into_iter().map(|sum| sum as f32).collect();
            assert_same(
                &format!("{dtype}, {simd}"),
                &product(&pool, simd, w, Activations::Q8(&quantized)),
                &expected,
            );
            let two = matmul_few(simd, w, &quantized, 0..2);
            assert_same(&format!("{dtype}, {simd}, two tokens"), &two, &expected[..2 * rows]);
        }
    }
}

/// The product with rows `tokens` of activations.
fn matmul_few(simd: Simd, w: TensorView<'_>, x: &Q8Rows, tokens: Range<usize>) -> Vec<f32> {
    let (n, rows) = (tokens.len(), w.rows());
    let mut out = vec![f32::NAN; n * rows];
    // SAFETY: the matrix borrowed here; one call.
    let to = unsafe { OutRows::new(out.as_mut_ptr(), rows, n, rows) };
    matmul_rows(simd, w, 0..rows, Activations::Q8(x), Tokens::Range(tokens), to).unwrap();
    out
}

#[test]
fn activations_are_rounded_alike_at_every_level() {
    let mut random = Random::new(4);
    let mut x = random.normals(40 * BLOCK);
    // Ties, extremes and blocks of zeros, tiny and huge values.
    x[..BLOCK].copy_from_slice(&std::array::from_fn::<f32, BLOCK, _>(|i| i as f32 - 4.5));
    x[3] = 127.0;
    x[BLOCK..2 * BLOCK].fill(0.0);
    x[2 * BLOCK..3 * BLOCK].fill(-1e-38);
    x[3 * BLOCK] = 3e38;
    x[4 * BLOCK] = -3e38;
    x[5 * BLOCK] = 1e-45;
    let mut all = levels().map(|simd| (simd, q8(simd, &x, 2 * BLOCK)));
    let (_, [first, first_of_two]) = all.next().unwrap();
    // 127 gives the scale 1: ties go to even numbers.
    assert_eq!(first.term(0)[..8], [-4, -4, -2, 127, 0, 0, 2, 2]);
    assert_eq!(first.scales(0).collect::<Vec<_>>(), [1.0, 0.0]);
    assert!(first.term(0)[BLOCK..].iter().chain(&first.term(1)[..BLOCK]).all(|&q| q == 0));
    for (row, x) in x.chunks_exact(2 * BLOCK).enumerate() {
        let mut back = vec![0.0; 2 * BLOCK];
        first.dequantize_row(row, &mut back);
        let scales: Vec<f32> = first.scales(row).collect();
        for (i, (&x, &back)) in x.iter().zip(&back).enumerate() {
            // Half a step, and what rounding of the scale and its inverse adds at 127 steps.
            let allowed = scales[i / BLOCK] * 0.50002 + 1e-30;
            assert!((x - back).abs() <= allowed, "row {row}, column {i}: {x} became {back}");
        }
        // What the first term left is at most half its step, and half of a 127th of that is left of it.
        first_of_two.dequantize_row(row, &mut back);
        for (i, (&x, &back)) in x.iter().zip(&back).enumerate() {
            let allowed = scales[i / BLOCK] * (0.5001 / 254.0) + 1e-30;
            assert!((x - back).abs() <= allowed, "two terms of row {row}, column {i}: {x} became {back}");
        }
        assert_eq!(first_of_two.term(2 * row), first.term(row), "the first term is that of one");
    }
    for (level, got) in all {
        for (got, first) in got.iter().zip([&first, &first_of_two]) {
            for term in 0..first.n_rows() * first.terms() {
                assert_eq!(got.term(term), first.term(term), "{level}, term {term}");
                let bits = |rows: &Q8Rows| rows.scales(term).map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(got), bits(first), "{level}, term {term}");
            }
        }
    }
}

#[test]
fn rows_can_be_written_in_parts() {
    let mut random = Random::new(5);
    let (n_rows, cols) = (5, 4 * BLOCK);
    let x = random.normals(n_rows * cols);
    for simd in levels() {
        let [_, whole] = q8(simd, &x, cols);
        let mut parts = Q8Rows::with_second_term(true);
        parts.resize(9, 2 * BLOCK);
        parts.resize(n_rows, cols);
        let writer = parts.writer();
        ThreadPool::new(2).run(2 * n_rows, &|task| {
            let (row, half) = (task / 2, task % 2);
            let (col, n) = if half == 0 { (0, BLOCK) } else { (BLOCK, cols - BLOCK) };
            // SAFETY: every task has columns of its own.
            unsafe { writer.write(simd, row, col, &x[row * cols + col..][..n]) };
        });
        for term in 0..2 * n_rows {
            assert_eq!(parts.term(term), whole.term(term));
            assert!(parts.scales(term).eq(whole.scales(term)));
        }
        let w = random.tensor(DType::Q4_K, 3, 2 * cols);
        assert!(matches!(
            matmul(&ThreadPool::new(1), simd, w.view(), Activations::Q8(&parts), &mut [0.0; 15]),
            Err(Error::Shape { expected: 256, got: 128, .. })
        ));
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let pool = ThreadPool::new(1);
    let mut random = Random::new(6);
    let (rows, cols) = (18, 256);
    for dtype in all_dtypes() {
        let w = random.tensor(dtype, rows, cols);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random.normals(3 * cols);
            x[cols + 77] = bad;
            for simd in levels() {
                let what = format!("{dtype}, {bad}, {}", simd);
                let quantized = accepted_q8(dtype, simd, &x, cols);
                let exact = Activations::F32 { rows: &x, cols };
                for x in [exact].into_iter().chain(quantized.iter().map(Activations::Q8)) {
                    let got = product(&pool, simd, w.view(), x);
                    assert!(got[..rows].iter().all(|y| y.is_finite()), "{what}: token before");
                    assert!(got[2 * rows..].iter().all(|y| y.is_finite()), "{what}: token after");
                    assert!(!got[rows..2 * rows].iter().any(|y| y.is_finite()), "{what}: the token itself");
                }
            }
        }
        // A bad scale of weights.
        let (mut planes, at) = (random.planes(dtype, rows, cols), random.scale_at(dtype));
        let Some((plane, at, bad)) = at else { continue };
        planes[plane][at..at + bad.len()].copy_from_slice(bad);
        let slices: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
        let w = TensorView::new(dtype, rows, cols, &slices).unwrap();
        let x = random.normals(cols);
        for simd in levels() {
            let quantized = accepted_q8(dtype, simd, &x, cols);
            let exact = Activations::F32 { rows: &x, cols };
            for x in [exact].into_iter().chain(quantized.iter().map(Activations::Q8)) {
                let got = product(&pool, simd, w, x);
                assert!(got[0].is_nan(), "{dtype}, {}: {}", simd, got[0]);
                assert!(got[1..].iter().all(|y| y.is_finite()), "{dtype}, {}", simd);
            }
        }
    }
}

#[test]
fn misfits_are_errors() {
    let simd = Simd::detect();
    let w = Random::new(7).tensor(DType::F32, 4, 8);
    let w = w.view();
    let x = [0.0; 24];
    let call = |x: &[f32], cols, rows, tokens, n_tokens, n_rows| {
        let mut out = [0.0; 12];
        // SAFETY: no test has more than three tokens of four rows.
        let out = unsafe { OutRows::new(out.as_mut_ptr(), 4, n_tokens, n_rows) };
        matmul_rows(simd, w, rows, Activations::F32 { rows: x, cols }, tokens, out)
    };
    let shape = |result, wanted: &str| match result {
        Err(Error::Shape { what, .. }) => assert_eq!(what, wanted),
        other => panic!("{other:?} instead of a complaint about {wanted}"),
    };
    assert_eq!(call(&x, 8, 0..4, Tokens::Range(0..3), 3, 4), Ok(()));
    shape(call(&x, 8, 0..5, Tokens::Range(0..3), 3, 4), "end of the range of rows");
    shape(call(&x, 12, 0..4, Tokens::Range(0..2), 3, 4), "columns of the activations");
    shape(call(&x, 8, 0..4, Tokens::Range(1..4), 3, 4), "rows of the activations");
    shape(call(&x, 8, 0..4, Tokens::List(&[0, 3]), 3, 4), "rows of the activations");
    shape(call(&x, 8, 0..4, Tokens::Range(0..3), 2, 4), "tokens of the output");
    shape(call(&x, 8, 0..4, Tokens::Range(0..3), 3, 3), "rows of the output");

    let [q, _] = q8(simd, &[1.0; 32], 32);
    let w = Random::new(8).tensor(DType::BF16, 4, 32);
    let result = matmul(&ThreadPool::new(1), simd, w.view(), Activations::Q8(&q), &mut [0.0; 4]);
    assert!(matches!(result, Err(Error::Unsupported { dtype: DType::BF16, .. })), "{result:?}");
    let result = matmul(&ThreadPool::new(1), simd, w.view(), Activations::Q8(&q), &mut [0.0; 5]);
    assert!(matches!(result, Err(Error::Shape { expected: 4, got: 5, .. })), "{result:?}");
}

#[test]
fn empty_products() {
    let simd = Simd::detect();
    let pool = ThreadPool::new(2);
    let no_rows = TensorView::new(DType::F32, 0, 8, &[&[]]).unwrap();
    matmul(&pool, simd, no_rows, Activations::F32 { rows: &[0.0; 16], cols: 8 }, &mut []).unwrap();
    let some = Random::new(9).tensor(DType::Q4_K, 5, 256);
    matmul(&pool, simd, some.view(), Activations::F32 { rows: &[], cols: 256 }, &mut []).unwrap();
}

#[test]
fn row_tasks_cover_all_rows_once() {
    for n_rows in [0, 1, 15, 16, 17, 100, 768, 151_936] {
        for threads in [1, 2, 7, 64] {
            let tasks = RowTasks::new(n_rows, threads);
            let mut next = 0;
            for task in 0..tasks.len() {
                let rows = tasks.rows(task);
                assert_eq!(rows.start, next, "{n_rows} rows, {threads} threads, task {task}");
                assert!(!rows.is_empty());
                next = rows.end;
            }
            assert_eq!(next, n_rows);
        }
    }
}

#[test]
fn levels_are_named_and_checked() {
    assert!(SimdLevel::available().contains(&SimdLevel::Portable));
    assert_eq!(SimdLevel::available().last(), Some(&SimdLevel::detect()));
    for level in [SimdLevel::Portable, SimdLevel::Neon, SimdLevel::Avx2, SimdLevel::Avx512] {
        assert_eq!(level.to_string().parse(), Ok(level));
        let available = SimdLevel::available().contains(&level);
        assert_eq!(Simd::new(level).is_ok(), available, "{level}");
    }
    let error = "avx9000".parse::<SimdLevel>().unwrap_err().to_string();
    assert!(error.contains("avx9000") && error.contains("portable"), "{error}");
}
