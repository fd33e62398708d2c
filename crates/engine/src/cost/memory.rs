//! [`memory_bandwidth`]: how fast threads read memory together; [`MemoryLoad`]: threads that do nothing else.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::io::buffer::HostBuffer;
use crate::{Error, Result};

/// Bytes that each thread reads in a turn, more than its share of any cache; and turns, of which the fastest counts.
const BYTES: usize = 96 << 20;
const TURNS: usize = 4;

/// Bytes per second that `threads` threads read from memory, which is in large pages where the system gives them, as weights
/// are.
///
/// # Errors
/// [`Error::Io`] if there is no memory for that.
pub fn memory_bandwidth(threads: usize) -> Result<f64> {
    let threads = threads.max(1);
    let buffers = (0..threads).map(|_| HostBuffer::zeroed(BYTES)).collect::<std::io::Result<Vec<_>>>();
    let buffers = buffers.map_err(|source| Error::Io {
        action: "find memory for",
        path: "a trial of memory".into(),
        source,
    })?;
    let barrier = Barrier::new(threads);
    let turn = |bytes: &[u8]| {
        barrier.wait();
        let start = Instant::now();
        read(bytes);
        barrier.wait();
        start.elapsed().as_secs_f64()
    };
    let thread = |mut buffer: HostBuffer| {
        // So that finding memory is not measured.
        buffer.as_mut_slice().fill(1);
        (0..TURNS).map(|_| turn(buffer.as_ref())).fold(f64::INFINITY, f64::min)
    };
    let thread = &thread;
    let seconds: Vec<f64> = std::thread::scope(|scope| {
        let started: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(move || thread(buffer))).collect();
        started.into_iter().map(|thread| thread.join().expect("reading memory does not panic")).collect()
    });
    let slowest = seconds.into_iter().fold(1e-9, f64::max);
    Ok((threads * BYTES) as f64 / slowest)
}

/// Reads all of `bytes`, a multiple of 128.
fn read(bytes: &[u8]) {
    // Sixteen sums, so that no addition waits for the one before.
    let mut sums = [0u64; 16];
    for chunk in bytes.as_chunks::<128>().0 {
        let words = chunk.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
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
    /// Bytes of a piece, and pieces that each thread has.
    const PIECE: usize = 64 << 10;
    const PIECES: usize = 512;

    pub(super) fn start(threads: usize) -> Self {
        let (stop, pieces) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let spawn = |_| {
            let (stop, pieces) = (Arc::clone(&stop), Arc::clone(&pieces));
            thread::spawn(move || {
                let bytes = vec![1u8; Self::PIECE * Self::PIECES];
                for piece in bytes.chunks_exact(Self::PIECE).cycle() {
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
