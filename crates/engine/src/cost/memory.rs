//! [`memory_bandwidth`]: how fast threads read memory together.

use std::sync::Barrier;
use std::time::Instant;

/// Bytes that each thread reads in a turn, more than its share of any cache; and turns, of which the fastest counts.
const BYTES: usize = 96 << 20;
const TURNS: usize = 4;

/// Bytes per second that `threads` threads read from memory.
pub fn memory_bandwidth(threads: usize) -> f64 {
    let threads = threads.max(1);
    let barrier = Barrier::new(threads);
    let turn = |words: &[u64]| {
        barrier.wait();
        let start = Instant::now();
        // Eight sums, so that no addition waits for the one before.
        let mut sums = [0u64; 8];
        for chunk in words.as_chunks::<8>().0 {
            sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
        }
        std::hint::black_box(sums);
        barrier.wait();
        start.elapsed().as_secs_f64()
    };
    let thread = || {
        let words: Vec<u64> = (0..BYTES as u64 / 8).collect();
        (0..TURNS).map(|_| turn(&words)).fold(f64::INFINITY, f64::min)
    };
    let seconds: Vec<f64> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(thread)).collect();
        started.into_iter().map(|thread| thread.join().expect("reading memory does not panic")).collect()
    });
    let slowest = seconds.into_iter().fold(1e-9, f64::max);
    (threads * BYTES) as f64 / slowest
}
