//! [`memory_bandwidth`]: how fast threads read memory together; [`MemoryLoad`]: threads that do nothing else.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
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
        read(words);
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

/// Reads all of `words`.
fn read(words: &[u64]) {
    // Eight sums, so that no addition waits for the one before.
    let mut sums = [0u64; 8];
    for chunk in words.as_chunks::<8>().0 {
        sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    }
    black_box(sums);
}

/// Threads that read memory, as computing does, until this is dropped.
pub(super) struct MemoryLoad {
    stop: Arc<AtomicBool>,
    /// Pieces that have been read.
    pieces: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl MemoryLoad {
    /// Words of a piece, and pieces that each thread has.
    const PIECE: usize = 8 << 10;
    const PIECES: usize = 512;

    pub(super) fn start(threads: usize) -> Self {
        let (stop, pieces) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let spawn = |_| {
            let (stop, pieces) = (Arc::clone(&stop), Arc::clone(&pieces));
            thread::spawn(move || {
                let words: Vec<u64> = (0..(Self::PIECE * Self::PIECES) as u64).collect();
                for piece in words.chunks_exact(Self::PIECE).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    read(piece);
                    pieces.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..threads.max(1)).map(spawn).collect();
        let load = Self { stop, pieces, threads };
        // Until every thread has its memory.
        while load.pieces() < (Self::PIECES * load.threads.len()) as u64 {
            thread::yield_now();
        }
        load
    }

    /// Pieces that all threads have read so far.
    pub(super) fn pieces(&self) -> u64 {
        self.pieces.load(Ordering::Relaxed)
    }
}

impl Drop for MemoryLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // They do not panic.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
