//! Matrix products on weights that no cache holds: bytes of weights a second for one token, multiplications
//! and additions a second for 64, beside the speed at which the same threads read memory.
//!
//! `cargo bench -p moeflux-compute --bench matmul`; a filter such as `decode` or `q4_k` may follow `--`.
#![allow(missing_docs)]

use std::hint::black_box;

use divan::{Bencher, counter::BytesCount, counter::ItemsCount};
use moeflux_compute::{
    DType, Half, Tensor,
    cpu::{
        activations::{Activations, Q8Rows},
        matmul::{accepts_q8, matmul},
        pool::ThreadPool,
        simd::{Simd, SimdLevel},
    },
};

#[path = "../tests/support/random.rs"]
#[allow(dead_code)]
mod random;
use random::Random;

/// Shape of an expert's gate and up projections in Qwen3-30B-A3B.
const ROWS: usize = 768;
const COLS: usize = 2048;
/// Bytes of weights that a measurement goes through.
const TOTAL: usize = 256 << 20;

const fn affine(bits: u8) -> DType {
    DType::Affine { bits, group: 64, scale: Half::BF16 }
}

const DTYPES: [DType; 11] = [
    DType::Q4_0,
    DType::Q5_0,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    affine(4),
    affine(8),
    DType::F32,
    DType::F16,
    DType::BF16,
];

fn main() {
    divan::main();
}

fn cases() -> Vec<(SimdLevel, DType, usize)> {
    let levels = SimdLevel::available().into_iter().filter(|&level| level != SimdLevel::Portable).rev();
    let cases = levels.flat_map(|level| DTYPES.map(|dtype| [1, 2].map(|threads| (level, dtype, threads))));
    cases.flatten().collect()
}

/// Weights of as many experts as `bytes` hold, and at least one.
fn experts(dtype: DType, bytes: usize) -> Vec<Tensor> {
    let mut random = Random::new(1);
    let size = dtype.matrix_bytes(ROWS, COLS).expect("whole blocks");
    (0..(bytes / size).max(1)).map(|_| random.tensor(dtype, ROWS, COLS)).collect()
}

/// Multiplies each of `experts` with `n_tokens` tokens, quantised if that is how the engine does it.
fn run(
    bencher: Bencher<'_, '_>,
    case: (SimdLevel, DType, usize),
    bytes: usize,
    n_tokens: usize,
    exact: bool,
) {
    let (level, dtype, threads) = case;
    let (simd, pool) = (Simd::new(level).expect("an available level"), ThreadPool::new(threads));
    let experts = experts(dtype, bytes);
    let x = Random::new(2).normal(n_tokens * COLS);
    let mut q8 = Q8Rows::new();
    q8.quantize_from(simd, &x, n_tokens, COLS);
    let x = if accepts_q8(dtype, COLS) && !exact {
        Activations::Q8(&q8)
    } else {
        Activations::F32 { rows: &x, cols: COLS }
    };
    let mut out = vec![0.0; n_tokens * ROWS];
    let mut all = || {
        for expert in &experts {
            matmul(&pool, simd, expert.view(), x, &mut out).expect("shapes agree");
            black_box(&mut out);
        }
    };
    if n_tokens == 1 {
        let bytes: usize = experts.iter().map(Tensor::bytes).sum();
        bencher.counter(BytesCount::new(bytes)).bench_local(&mut all);
    } else {
        bencher.counter(ItemsCount::new(2 * n_tokens * ROWS * COLS * experts.len())).bench_local(&mut all);
    }
}

/// How fast memory can be read: the bound of `decode`.
#[divan::bench(args = [1, 2], sample_count = 20)]
fn a_memory_read(bencher: Bencher<'_, '_>, threads: usize) {
    let pool = ThreadPool::new(threads);
    let memory: Vec<u64> = (0..TOTAL as u64 / 8).collect();
    let parts: Vec<&[u64]> = memory.chunks(1 << 17).collect();
    bencher.counter(BytesCount::new(TOTAL)).bench_local(|| {
        pool.run(parts.len(), &|part| {
            let mut sums = [0u64; 32];
            for lines in parts[part].as_chunks::<32>().0 {
                for (sum, word) in sums.iter_mut().zip(lines) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        });
    });
}

/// One token; the engine's fast mode.
#[divan::bench(args = cases(), sample_count = 20)]
fn decode(bencher: Bencher<'_, '_>, case: (SimdLevel, DType, usize)) {
    run(bencher, case, TOTAL, 1, false);
}

/// One token, activations not rounded.
#[divan::bench(args = cases(), sample_count = 5)]
fn decode_exact(bencher: Bencher<'_, '_>, case: (SimdLevel, DType, usize)) {
    run(bencher, case, TOTAL / 4, 1, true);
}

/// 64 tokens; items are multiplications and additions.
#[divan::bench(args = cases(), sample_count = 5)]
fn prefill(bencher: Bencher<'_, '_>, case: (SimdLevel, DType, usize)) {
    run(bencher, case, TOTAL / 8, 64, false);
}

/// 64 tokens, activations not rounded.
#[divan::bench(args = cases(), sample_count = 5)]
fn prefill_exact(bencher: Bencher<'_, '_>, case: (SimdLevel, DType, usize)) {
    run(bencher, case, TOTAL / 16, 64, true);
}

/// A region of empty tasks, one for each thread.
#[divan::bench(args = [1, 2])]
fn empty_region(bencher: Bencher<'_, '_>, threads: usize) {
    let pool = ThreadPool::new(threads);
    bencher.bench_local(|| pool.run(threads, &|task| _ = black_box(task)));
}
