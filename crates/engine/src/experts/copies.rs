//! [`Copies`]: which copy of a checkpoint an expert is read from.
//!
//! Copies lie on disks of different speeds. A read goes where it is expected to end first: after what that copy is already
//! reading, at the speed that was measured there. So a slow copy gets what it finishes in time, and no more.

use std::time::{Duration, Instant};

/// What a copy has read counts this much when the next read ends.
const MEMORY: f64 = 0.9;

/// Bytes that were read, and the seconds that took, the last ones counting most.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    bytes: f64,
    seconds: f64,
}

impl Measured {
    /// Bytes a second, once something was read.
    fn speed(self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.bytes / self.seconds.max(1e-9))
    }

    fn add(&mut self, bytes: u64, took: Duration) {
        self.bytes = MEMORY * self.bytes + bytes as f64;
        self.seconds = MEMORY * self.seconds + took.as_secs_f64();
    }
}

#[derive(Debug, Default)]
struct OneCopy {
    measured: Measured,
    /// Bytes of reads under way.
    pending: u64,
    /// When the last read ended, or the first began after the copy was idle.
    since: Option<Instant>,
    /// Whether that was noticed at once.
    exact: bool,
    /// Whether a read has failed.
    broken: bool,
}

/// Copies of one checkpoint, the original first.
#[derive(Debug)]
pub(super) struct Copies {
    all: Vec<OneCopy>,
}

impl Copies {
    pub(super) fn new(count: usize) -> Self {
        Self { all: (0..count.max(1)).map(|_| OneCopy::default()).collect() }
    }

    /// The copy from which `bytes` are expected first. One that has never been read from is tried.
    pub(super) fn choose(&self, bytes: u64) -> usize {
        let expected = |copy: &OneCopy| match copy.measured.speed() {
            _ if copy.broken => f64::INFINITY,
            Some(speed) => (copy.pending + bytes) as f64 / speed,
            None if copy.pending == 0 => 0.0,
            None => f64::INFINITY,
        };
        let all = self.all.iter().map(expected).enumerate();
        all.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(0, |(copy, _)| copy)
    }

    /// Reads nothing from a copy any more; whether it was read from until then.
    pub(super) fn give_up(&mut self, copy: usize) -> bool {
        !std::mem::replace(&mut self.all[copy].broken, true)
    }

    /// A read of `bytes` has begun.
    pub(super) fn started(&mut self, copy: usize, bytes: u64, now: Instant) {
        let copy = &mut self.all[copy];
        copy.pending += bytes;
        if copy.since.is_none() {
            (copy.since, copy.exact) = (Some(now), true);
        }
    }

    /// A read of `bytes` has ended, which was noticed `at_once` or in passing, some time after it did.
    pub(super) fn finished(&mut self, copy: usize, bytes: u64, now: Instant, at_once: bool) {
        let copy = &mut self.all[copy];
        copy.pending = copy.pending.saturating_sub(bytes);
        let took = copy.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let exact = copy.exact && at_once;
        // What was noticed late took less than it seems.
        let faster = copy.measured.speed().is_none_or(|speed| bytes as f64 > speed * took.as_secs_f64());
        if exact || faster {
            copy.measured.add(bytes, took);
        }
        copy.exact = at_once;
        copy.since = (copy.pending > 0).then_some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPERT: u64 = 3_000_000;

    /// Seconds that reading so many experts at a time takes, 40 times, from disks that read so many bytes a second, one after
    /// the other each.
    fn seconds(speeds: &[f64], at_a_time: usize) -> f64 {
        let (mut copies, begin) = (Copies::new(speeds.len()), Instant::now());
        let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
        let mut now = 0.0;
        for _ in 0..40 {
            let mut free = vec![now; speeds.len()];
            let mut ends: Vec<(f64, usize)> = vec![];
            for _ in 0..at_a_time {
                let copy = copies.choose(EXPERT);
                copies.started(copy, EXPERT, at(now));
                free[copy] += EXPERT as f64 / speeds[copy];
                ends.push((free[copy], copy));
            }
            ends.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (end, copy) in ends {
                copies.finished(copy, EXPERT, at(end), true);
                now = end;
            }
        }
        now
    }

    #[test]
    fn a_copy_helps_by_what_it_is_fast_and_never_hurts() {
        for at_a_time in [1, 2, 3, 5, 8, 40] {
            let alone = seconds(&[2e9], at_a_time);
            for slow in [1e7, 2e8, 5e8, 1e9, 2e9, 8e9] {
                let both = seconds(&[2e9, slow], at_a_time);
                // The slow one is tried once, with one expert.
                let tried = EXPERT as f64 / slow;
                assert!(both <= 1.001 * alone + tried, "{at_a_time} from {slow}: {both} instead of {alone}");
                if at_a_time == 40 {
                    let best = alone * 2e9 / (2e9 + slow);
                    assert!(both <= 1.1 * best + 2.0 * tried, "{slow}: {both}, at best {best}");
                }
            }
        }
    }

    #[test]
    fn a_read_that_is_noticed_late_makes_no_copy_slow() {
        let (mut copies, begin) = (Copies::new(2), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        for copy in [0, 1] {
            copies.started(copy, EXPERT, at(0));
            copies.finished(copy, EXPERT, at(2), true);
        }
        copies.started(0, EXPERT, at(10));
        copies.finished(0, EXPERT, at(500), false);
        assert_eq!(copies.choose(EXPERT), 0);
        copies.started(0, EXPERT, at(600));
        assert_eq!(copies.choose(EXPERT), 1);
    }
}
