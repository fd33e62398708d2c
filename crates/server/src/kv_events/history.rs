//! [`History`]: the batches that were published last, for subscribers that missed some.

use std::collections::VecDeque;

use axum::body::Bytes;

/// What a history may hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct HistoryLimits {
    pub(super) batches: usize,
    pub(super) bytes: usize,
}

/// Batches with their sequence numbers, ascending without gaps.
#[derive(Debug)]
pub(super) struct History {
    batches: VecDeque<(u64, Bytes)>,
    bytes: usize,
    limits: HistoryLimits,
}

impl History {
    pub(super) fn new(limits: HistoryLimits) -> Self {
        Self { batches: VecDeque::new(), bytes: 0, limits }
    }

    /// Adds a batch; the oldest go if there is too much.
    pub(super) fn add(&mut self, number: u64, batch: Bytes) {
        self.bytes += batch.len();
        self.batches.push_back((number, batch));
        while self.batches.len() > self.limits.batches || self.bytes > self.limits.bytes {
            let Some((_, oldest)) = self.batches.pop_front() else { return };
            self.bytes -= oldest.len();
        }
    }

    /// Those from `number` on that are still there.
    pub(super) fn since(&self, number: u64) -> Vec<(u64, Bytes)> {
        let from = self.batches.partition_point(|(earlier, _)| *earlier < number);
        self.batches.range(from..).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go() {
        for (batches, bytes, left) in
            [(9, 1000, &[0, 1, 2, 3, 4][..]), (2, 1000, &[3, 4]), (9, 35, &[2, 3, 4]), (9, 5, &[])]
        {
            let mut history = History::new(HistoryLimits { batches, bytes });
            (0..5).for_each(|number| history.add(number, Bytes::from_static(&[7; 10])));
            let numbers = |since| history.since(since).iter().map(|(number, _)| *number).collect::<Vec<_>>();
            assert_eq!(numbers(0), left, "{batches} {bytes}");
            let later: Vec<u64> = left.iter().copied().filter(|number| *number >= 4).collect();
            assert_eq!(numbers(4), later);
            assert!(numbers(5).is_empty());
        }
    }
}
