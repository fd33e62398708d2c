//! Speed of matrix products by encoding and SIMD level: bytes of weights a second for one token, multiplications and
//! additions a second for 64, with int8 activations where the encoding takes them and with f32 activations. Weights
//! are experts of Qwen3-30B-A3B's shape, more than any cache holds. One token cannot be faster than memory is read,
//! which is printed first.
//!
//! `cargo bench -p moeflux-compute --bench matmul -- [--threads N] [NAME]`, NAME being part of an encoding's and level's
//! name such as `Q4_K` or `"Q4_K avx2"`. The best of several runs is printed, so that what else the machine does
//! matters less.
#![allow(missing_docs)]

use std::{hint::black_box, time::Instant};

use moeflux_compute::{
    Bytes, DType, Half, Tensor,
    cpu::{
        activations::{Activations, Q8Rows},
        matmul::{accepts_q8, matmul, takes_second_term},
        pool::ThreadPool,
        simd::{Simd, SimdLevel},
    },
};

#[path = "../tests/it/support/random.rs"]
#[allow(dead_code)]
mod random;
use random::Random;

const ROWS: usize = 768;
const COLS: usize = 2048;
/// Tokens of a batch.
const BATCH: usize = 64;
/// Bytes of weights, several times the size of a last-level cache.
const TOTAL: usize = 256 << 20;
/// Weights that are timed together: long against the clock, short against interruptions.
const GROUP: usize = 8;

const fn affine(bits: u8) -> DType {
    DType::Affine { bits, group: 64, scale: Half::BF16 }
}

/// Of files whose activations have two terms.
const fn affine_f16(bits: u8) -> DType {
    DType::Affine { bits, group: 64, scale: Half::F16 }
}

const DTYPES: [DType; 28] = [
    DType::IQ1_S,
    DType::IQ1_M,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::IQ4_XS,
    DType::MXFP4,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q4_0,
    DType::Q5_0,
    DType::Q8_0,
    affine(2),
    affine(3),
    affine(4),
    affine(5),
    affine(6),
    affine(8),
    affine_f16(4),
    affine_f16(8),
    DType::F32,
    DType::F16,
    DType::BF16,
];

/// Seconds of the fastest of `runs` calls, after one that does not count.
fn best(runs: usize, mut work: impl FnMut()) -> f64 {
    work();
    let time = |_| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    (0..runs).map(time).fold(f64::INFINITY, f64::min)
}

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (mut threads, mut filter) =
        (std::thread::available_parallelism().map_or(1, usize::from), String::new());
    while let Some(arg) = args.next() {
        if arg == "--threads" {
            threads = args.next().and_then(|n| n.parse().ok()).expect("--threads takes a number");
        } else {
            filter = arg;
        }
    }
    let pool = ThreadPool::new(threads);
    println!("{threads} threads");
    println!("empty parallel region: {:.2} µs", best(1000, || pool.run(threads, &|_| ())) * 1e6);
    println!("memory reads: {:.1} GB/s\n", read_memory(&pool));
    println!(
        "| encoding | level | 1 token, GB/s | {BATCH} tokens, GFLOP/s | 1 token, f32 | {BATCH} tokens, f32 |"
    );
    println!("|---|---|---:|---:|---:|---:|");
    for dtype in DTYPES {
        for level in SimdLevel::available().into_iter().rev() {
            if format!("{dtype} {level}").contains(&filter) {
                print_row(&pool, level, dtype);
            }
        }
    }
}

/// Bytes a second, in 10⁹.
fn read_memory(pool: &ThreadPool) -> f64 {
    let memory: Vec<u64> = (0..TOTAL as u64 / 8).collect();
    let parts: Vec<&[u64]> = memory.chunks(1 << 17).collect();
    let read = |part: &[u64]| {
        let mut sums = [0u64; 32];
        for words in part.as_chunks::<32>().0 {
            sums.iter_mut().zip(words).for_each(|(sum, word)| *sum ^= word);
        }
        black_box(sums);
    };
    TOTAL as f64 / best(20, || pool.run(parts.len(), &|part| read(parts[part]))) / 1e9
}

fn print_row(pool: &ThreadPool, level: SimdLevel, dtype: DType) {
    let simd = Simd::new(level).expect("an available level");
    let size = dtype.matrix_bytes(ROWS, COLS).expect("whole blocks");
    let first = Random::new(1).planes(dtype, ROWS, COLS);
    let copy = |_| {
        let planes = first.iter().map(|plane| Bytes::new(plane.clone())).collect();
        Tensor::new(dtype, ROWS, COLS, planes).expect("planes of the right sizes")
    };
    let weights: Vec<Tensor> = (0..TOTAL / size).map(copy).collect();

    let x = Random::new(2).normals(BATCH * COLS);
    let [mut one, mut batch] = [(); 2].map(|()| Q8Rows::with_second_term(takes_second_term(dtype)));
    one.quantize_from(simd, &x[..COLS], 1, COLS);
    batch.quantize_from(simd, &x, BATCH, COLS);
    let f32 = |n: usize| Activations::F32 { rows: &x[..n * COLS], cols: COLS };

    let mut out = vec![0.0; BATCH * ROWS];
    let mut seconds = |n: usize, x: Activations<'_>, passes: usize, groups: usize| {
        let mut best = f64::INFINITY;
        for _ in 0..passes {
            for group in weights.chunks_exact(GROUP).take(groups) {
                let start = Instant::now();
                for w in group {
                    matmul(pool, simd, w.view(), x, &mut out[..n * ROWS]).expect("shapes agree");
                }
                best = best.min(start.elapsed().as_secs_f64() / GROUP as f64);
            }
        }
        best
    };
    let read = |seconds: f64| format!("{:.1}", size as f64 / seconds / 1e9);
    let flops = |seconds: f64| format!("{:.0}", (2 * BATCH * ROWS * COLS) as f64 / seconds / 1e9);
    let (mut fast, mut fast_batch) = ("–".to_owned(), "–".to_owned());
    if accepts_q8(dtype, COLS) {
        fast = read(seconds(1, Activations::Q8(&one), 3, usize::MAX));
        fast_batch = flops(seconds(BATCH, Activations::Q8(&batch), 1, 2));
    }
    let exact = read(seconds(1, f32(1), 1, usize::MAX));
    let exact_batch = flops(seconds(BATCH, f32(BATCH), 1, 2));
    println!("| {dtype} | {level} | {fast} | {fast_batch} | {exact} | {exact_batch} |");
}
