//! [`Disk`]: how long reading experts takes, measured.
//!
//! A layer waits for the last of its misses, so what counts is the time of a batch of reads that are submitted together:
//! a latency, and bytes at a bandwidth. Batches of two sizes tell the two apart. Reads also slow concurrent computing: the
//! system works for them, and they write to the memory that computing reads. By how much is measured with threads that
//! read memory, alone and beside batches.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use moeflux_compute::graph::ExpertSetId;

use super::memory::MemoryLoad;
use crate::checkpoint::CheckpointFile;
use crate::experts::ExpertStore;
use crate::io::buffer::{HostBuffer, PAGE_BYTES};
use crate::io::file::ReadMode;
use crate::io::queue::{ReadPart, ReadQueue, ReadRequest};
use crate::sampler::random::{Random, entropy};
use crate::{Error, Result};

/// Experts of a small and of a large batch.
const BATCHES: [usize; 2] = [2, 12];
/// No batch starts later than this.
const MOST_TIME: Duration = Duration::from_millis(700);
/// Batches of each size and way, at most and at least.
const MOST_TURNS: usize = 60;
const LEAST_TURNS: usize = 3;
/// The same for the slowdown: rounds, and of each the time without and with reads.
const ROUNDS: usize = 4;
const ROUND_TIME: Duration = Duration::from_millis(60);
/// Bytes that batches are read into, at most, unless one expert is larger.
const SLOTS_BYTES: usize = 256 << 20;
/// Bytes of the file that stands in for a model.
const STAND_IN_BYTES: usize = 256 << 20;

/// What reads cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Disk {
    /// Seconds until the first byte of a batch.
    pub latency: f64,
    /// Bytes per second from then on.
    pub bandwidth: f64,
    /// Seconds that computing, on all threads, loses for each byte that is read meanwhile.
    pub slowdown: f64,
}

impl Disk {
    /// Seconds of a batch of `bytes`.
    pub fn seconds(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { self.latency + bytes / self.bandwidth.max(1.0) } else { 0.0 }
    }

    /// From the seconds that batches of two sizes took.
    fn fit([small, large]: [(f64, f64); 2], slowdown: f64) -> Self {
        let (more_bytes, more_seconds) = (large.0 - small.0, large.1 - small.1);
        let bandwidth = large.0 / large.1.max(1e-9);
        if more_bytes <= 0.0 || more_seconds <= 0.0 {
            return Self { latency: 0.0, bandwidth, slowdown };
        }
        let latency = (small.1 - small.0 * more_seconds / more_bytes).max(0.0);
        // The bandwidth explains what the latency leaves of the large batch.
        Self { latency, bandwidth: large.0 / (large.1 - latency).max(1e-9), slowdown }
    }

    /// Reads experts of `store` through `queue` in the way that the engine would choose, or in `mode`, for an engine that
    /// computes with `threads`; `None` if there is nothing to read or it cannot be read.
    pub fn of_store(
        store: &ExpertStore,
        queue: &mut dyn ReadQueue,
        mode: Option<ReadMode>,
        threads: usize,
    ) -> Option<(Self, ReadMode)> {
        let mode = mode
            .or_else(|| crate::experts::probe::probe(store, queue).map(|probe| probe.choice()))
            .unwrap_or(ReadMode::Buffered);
        let mut random = Random::new(entropy());
        let mut below = move |n: usize| (random.next_unit() * n as f64) as usize;
        let expert = || {
            let set = ExpertSetId(below(store.sets()));
            let experts = store.set(set).experts;
            (experts > 0).then(|| store.reads(set, below(experts) as u32))
        };
        let slot_bytes = (0..store.sets()).map(|set| store.slot_bytes(ExpertSetId(set))).max()?;
        Some((Self::try_out(queue, mode, slot_bytes, threads, expert)?, mode))
    }

    /// Writes a file to `folder` and reads pieces of `expert_bytes` from it, past the page cache; for models that are not
    /// on disk.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be written to.
    pub fn of_folder(
        folder: &Path,
        queue: &mut dyn ReadQueue,
        expert_bytes: u64,
        threads: usize,
    ) -> Result<Self> {
        let io = |action| move |source| Error::Io { action, path: folder.into(), source };
        let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io("write to"))?;
        let mut random = Random::new(entropy());
        let mut piece = vec![0u8; 4 << 20];
        piece.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.next().to_le_bytes());
        for _ in 0..STAND_IN_BYTES / piece.len() {
            file.write_all(&piece).map_err(io("write to"))?;
        }
        file.as_file().sync_all().map_err(io("write to"))?;
        let source = Arc::new(CheckpointFile::open(file.path())?);
        let pages = (expert_bytes as usize).clamp(PAGE_BYTES, STAND_IN_BYTES / 16) / PAGE_BYTES;
        let len = pages * PAGE_BYTES;
        let expert = || {
            let places = (STAND_IN_BYTES - len) / PAGE_BYTES;
            let offset = ((random.next_unit() * places as f64) as usize * PAGE_BYTES) as u64;
            Some(vec![ReadPart { file: Arc::clone(&source), offset, len, at: 0 }])
        };
        let found = Self::try_out(queue, ReadMode::Direct, len, threads, expert);
        found.ok_or_else(|| {
            io("read from")(std::io::Error::other("a file that was just written cannot be read"))
        })
    }

    /// Reads batches of what `expert` gives, each into `slot_bytes`.
    fn try_out(
        queue: &mut dyn ReadQueue,
        mode: ReadMode,
        slot_bytes: usize,
        threads: usize,
        mut expert: impl FnMut() -> Option<Vec<ReadPart>>,
    ) -> Option<Self> {
        let mut measured: [Vec<(f64, f64)>; 2] = Default::default();
        // One piece of memory, as the engine's slots are, because where memory is in large pages reads are faster.
        let slots = (SLOTS_BYTES / slot_bytes.max(1)).clamp(1, BATCHES[1]);
        let mut memory = HostBuffer::zeroed(slot_bytes * slots).ok()?;
        // So that finding memory is not measured.
        memory.as_mut_slice().fill(1);
        let mut free = memory.split(slots, slot_bytes);
        let mut read = |size: usize| {
            let mut requests = vec![];
            for tag in 0..size.min(slots) as u64 {
                let (parts, buffer) = (expert()?, free.pop()?);
                requests.push(ReadRequest { tag, buffer, parts, by_columns: vec![], mode });
            }
            let (result, buffers) = batch(queue, requests);
            free.extend(buffers);
            result
        };
        let start = Instant::now();
        for turn in 0..MOST_TURNS {
            if turn >= LEAST_TURNS && start.elapsed() > MOST_TIME {
                break;
            }
            for (size, measured) in BATCHES.into_iter().zip(&mut measured) {
                measured.push(read(size)?);
            }
        }
        let slowdown = slowdown(threads, || Some(read(BATCHES[1])?.0))?;
        Some(Self::fit(measured.map(median), slowdown))
    }
}

/// Seconds that `threads` threads, which read memory, lose for each byte that `read` reads at a time.
fn slowdown(threads: usize, mut read: impl FnMut() -> Option<f64>) -> Option<f64> {
    let load = MemoryLoad::start(threads);
    // Seconds and pieces, without reads and beside them.
    let (mut alone, mut beside, mut bytes) = ((0.0, 0.0), (0.0, 0.0), 0.0);
    let phase = |sum: &mut (f64, f64), work: &mut dyn FnMut(Instant) -> Option<()>| {
        let (start, pieces) = (Instant::now(), load.pieces());
        work(start)?;
        sum.0 += start.elapsed().as_secs_f64();
        sum.1 += (load.pieces() - pieces) as f64;
        Some(())
    };
    for _ in 0..ROUNDS {
        phase(&mut alone, &mut |_| {
            thread::sleep(ROUND_TIME);
            Some(())
        })?;
        phase(&mut beside, &mut |start| {
            while start.elapsed() < ROUND_TIME {
                bytes += read()?;
            }
            Some(())
        })?;
    }
    let speed = (beside.1 / beside.0) / (alone.1 / alone.0).max(1e-9);
    Some(beside.0 * (1.0 - speed).max(0.0) / f64::max(bytes, 1.0))
}

/// Bytes and seconds of reading all of `requests`, unless one fails; and their buffers.
fn batch(queue: &mut dyn ReadQueue, requests: Vec<ReadRequest>) -> (Option<(f64, f64)>, Vec<HostBuffer>) {
    let bytes: usize = requests.iter().flat_map(|r| &r.parts).map(|part| part.len).sum();
    let start = Instant::now();
    requests.into_iter().for_each(|request| queue.submit(request));
    let (mut whole, mut buffers) = (true, vec![]);
    while let Some(done) = queue.wait() {
        whole &= done.result.is_ok();
        buffers.push(done.buffer);
    }
    (whole.then(|| (bytes as f64, start.elapsed().as_secs_f64())), buffers)
}

/// The mean of bytes, and those bytes at the median speed.
fn median(of: Vec<(f64, f64)>) -> (f64, f64) {
    let bytes = of.iter().map(|(bytes, _)| bytes).sum::<f64>() / of.len().max(1) as f64;
    let mut speeds: Vec<f64> = of.iter().map(|(bytes, seconds)| bytes / seconds.max(1e-9)).collect();
    speeds.sort_by(f64::total_cmp);
    (bytes, bytes / speeds.get(speeds.len() / 2).copied().unwrap_or(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::queue;

    #[test]
    fn latency_and_bandwidth_are_told_apart() {
        let disk = Disk::fit([(1e6, 2e-3), (6e6, 7e-3)], 1e-11);
        assert!((disk.latency - 1e-3).abs() < 1e-9 && (disk.bandwidth - 1e9).abs() < 1.0, "{disk:?}");
        assert!((disk.seconds(3e6) - 4e-3).abs() < 1e-9);
        assert_eq!(disk.seconds(0.0), 0.0);
        // Noise that says that more bytes take less time.
        let backwards = Disk::fit([(1e6, 3e-3), (6e6, 2e-3)], 0.0);
        assert_eq!(backwards, Disk { latency: 0.0, bandwidth: 3e9, slowdown: 0.0 });
    }

    #[test]
    fn a_folder_can_be_tried() {
        let folder = tempfile::tempdir().unwrap();
        let (_, mut queue) = queue::open(None, 32).unwrap();
        let disk = Disk::of_folder(folder.path(), &mut *queue, 1 << 20, 2).unwrap();
        assert!(disk.bandwidth > 1e6 && disk.latency >= 0.0, "{disk:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let nowhere = folder.path().join("none");
        assert!(Disk::of_folder(&nowhere, &mut *queue, 1, 2).is_err());
    }
}
