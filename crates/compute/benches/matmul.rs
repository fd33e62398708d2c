//! Speed of matrix products by encoding: bytes of weights read per second for one token, and multiply-adds per
//! second for many. Prints the machine's plain read bandwidth beside it, which one token cannot exceed.
//!
//! `cargo bench -p moeflux-compute [-- THREADS]`

use std::time::Instant;

use moeflux_compute::cpu::matmul::matmul;
use moeflux_compute::cpu::pool::ThreadPool;
use moeflux_compute::cpu::{Simd, SimdLevel};
use moeflux_compute::{DType, Half, TensorView};

const COLS: usize = 2048;
/// Weights are several times the last-level cache.
const BYTES: usize = 256 << 20;

/// Median seconds of some runs.
fn time(mut work: impl FnMut()) -> f64 {
    work();
    let mut seconds: Vec<f64> = (0..7)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn main() {
    let threads: usize = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(2);
    let pool = ThreadPool::new(threads).expect("threads");
    let words = vec![1u64; BYTES / 8];
    let part = words.len() / (threads * 16);
    let seconds = time(|| {
        pool.run(threads * 16, &|task| {
            let sum = words[task * part..(task + 1) * part].iter().fold(0u64, |s, w| s.wrapping_add(*w));
            assert_eq!(sum, part as u64);
        });
    });
    println!("{threads} threads, plain reading: {:.1} GB/s", BYTES as f64 / seconds / 1e9);
    println!("| encoding | level | 1 token GB/s | 64 tokens GMAC/s |\n|---|---|---|---|");
    let affine = |bits| DType::Affine { bits, group: 64, scale: Half::BF16 };
    let dtypes =
        [DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q8_0, DType::Q4_0, affine(4), affine(8), DType::BF16, DType::F32];
    for dtype in dtypes {
        let rows = BYTES / dtype.matrix_bytes(1, COLS).expect("whole blocks");
        // Small bytes are valid blocks of every encoding, with finite scales.
        let plane = |p| vec![21u8; rows * dtype.row_bytes(p, COLS).expect("whole blocks")];
        let planes: Vec<Vec<u8>> = (0..dtype.planes()).map(plane).collect();
        let slices: Vec<&[u8]> = planes.iter().map(|p| &p[..]).collect();
        let weight = TensorView::new(dtype, rows, COLS, &slices).expect("sizes fit");
        for simd in Simd::available() {
            if simd.level() == SimdLevel::Portable {
                continue;
            }
            let (x, mut out) = (vec![0.5; COLS], vec![0.0; rows]);
            let one = time(|| matmul(&pool, simd, weight, &x, true, &mut out));
            let few = weight.rows_range(0..4096);
            let (x, mut out) = (vec![0.5; 64 * COLS], vec![0.0; 64 * 4096]);
            let many = time(|| matmul(&pool, simd, few, &x, true, &mut out));
            println!(
                "| {dtype} | {} | {:.1} | {:.1} |",
                simd.level(),
                BYTES as f64 / one / 1e9,
                (64 * 4096 * COLS) as f64 / many / 1e9
            );
        }
    }
}
