//! [`probe`]: whether this machine reads experts faster past the page cache or through it.
//!
//! The answer depends on the machine, so both are tried on the checkpoint itself, interleaved, so that a change of the
//! disk's speed affects both. What is in the page cache already counts for it, as it would later.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moeflux_compute::graph::ExpertSetId;

use super::store::ExpertStore;
use crate::io::buffer::HostBuffer;
use crate::io::file::ReadMode;
use crate::io::queue::{ReadQueue, ReadRequest};
use crate::sampler::random::Random;

/// Turns, of so many experts each way.
const TURNS: usize = 9;
const EXPERTS: usize = 3;
/// No turn starts later than this.
const MOST_TIME: Duration = Duration::from_millis(300);
/// Smaller models are read in a moment either way.
const LEAST_BYTES: u64 = 1 << 30;
/// Through the page cache must be this much faster, for it takes memory from others and time from the processor: what the
/// cache holds comes several times as fast, and a disk may change its speed by less than this from one turn to the next.
const LEAST_GAIN: f64 = 1.3;

/// What a probe found, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Probe {
    /// Past the page cache.
    pub direct: f64,
    /// Through it.
    pub buffered: f64,
}

impl Probe {
    /// The mode to use.
    pub fn choice(&self) -> ReadMode {
        if self.buffered > LEAST_GAIN * self.direct { ReadMode::Buffered } else { ReadMode::Direct }
    }
}

/// Reads experts of `store` both ways; `None` if it is too small to matter or cannot be read, which the engine will
/// notice when it needs it.
pub fn probe(store: &ExpertStore, queue: &mut dyn ReadQueue) -> Option<Probe> {
    if store.total_bytes() < LEAST_BYTES {
        return None;
    }
    // Others each time: those of the last start may be in the page cache because they were tried.
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut random = Random::new(since_epoch.as_nanos() as u64);
    let (mut direct, mut buffered) = (vec![], vec![]);
    let start = Instant::now();
    for _ in 0..TURNS {
        if start.elapsed() > MOST_TIME && !direct.is_empty() {
            break;
        }
        direct.push(speed(store, queue, &mut random, ReadMode::Direct)?);
        buffered.push(speed(store, queue, &mut random, ReadMode::Buffered)?);
    }
    Some(Probe { direct: median(direct), buffered: median(buffered) })
}

/// Bytes per second of a few experts.
fn speed(store: &ExpertStore, queue: &mut dyn ReadQueue, random: &mut Random, mode: ReadMode) -> Option<f64> {
    let mut below = |n: usize| (random.next_unit() * n as f64) as usize;
    let mut requests = vec![];
    for tag in 0..EXPERTS as u64 {
        let set = ExpertSetId(below(store.sets()));
        let parts = store.reads(set, below(store.set(set).experts) as u32);
        let mut buffer = HostBuffer::zeroed(store.slot_bytes(set)).ok()?;
        // So that finding memory for it is not measured.
        buffer.as_mut_slice().fill(1);
        requests.push(ReadRequest { tag, buffer, parts, by_columns: vec![], mode });
    }
    let bytes: usize = requests.iter().flat_map(|r| &r.parts).map(|part| part.len).sum();
    let start = Instant::now();
    requests.into_iter().for_each(|request| queue.submit(request));
    let mut whole = true;
    while let Some(done) = queue.wait() {
        whole &= done.result.is_ok();
    }
    whole.then(|| bytes as f64 / start.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_must_be_clearly_faster() {
        assert_eq!(Probe { direct: 1.0, buffered: 1.2 }.choice(), ReadMode::Direct);
        assert_eq!(Probe { direct: 1.0, buffered: 1.5 }.choice(), ReadMode::Buffered);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }
}
