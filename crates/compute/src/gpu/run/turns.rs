//! [`Turns`]: whether many sequences make more tokens a second in one batch, or by turns in batches of few rows.

use std::collections::HashMap;
use std::time::Duration;

use crate::gpu::memory::FEW_ROWS_BESIDE_PANELS;

/// Measurements before batches of so many rows are judged; the first ones are recorded and find caches cold.
const FIRST: u32 = 4;
/// Batches after which what was slower is tried again.
const AGAIN: u64 = 64;
/// What a slower measurement counts beside those before. A faster one is believed at once.
const NEW: f64 = 0.1;

/// What batches of one token a sequence took, by their rows.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    of: HashMap<usize, Taken>,
    batches: u64,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    seconds: f64,
    count: u32,
    /// When that was measured last, in batches.
    last: u64,
}

/// Numbers of rows that are told apart.
fn key(rows: usize) -> usize {
    if rows <= 8 { rows } else { rows.next_multiple_of(8) }
}

impl Turns {
    /// A batch of so many rows took so long.
    pub(crate) fn add(&mut self, rows: usize, took: Duration) {
        self.batches += 1;
        let (seconds, last) = (took.as_secs_f64(), self.batches);
        let taken = self.of.entry(key(rows)).or_insert(Taken { seconds, count: 0, last });
        taken.seconds = seconds.min(taken.seconds + NEW * (seconds - taken.seconds));
        (taken.count, taken.last) = (taken.count.saturating_add(1), last);
    }

    /// Rows of the next batch for so many sequences: all, or as many as kernels of few rows take.
    pub(crate) fn decode_rows(&self, sequences: usize) -> usize {
        self.rows(FEW_ROWS_BESIDE_PANELS, sequences)
    }

    /// Rows of the next batch for so many sequences: all, or `few`.
    fn rows(&self, few: usize, sequences: usize) -> usize {
        if sequences <= few {
            return sequences;
        }
        let known = |rows| self.of.get(&key(rows)).filter(|taken| taken.count >= FIRST);
        let (of_few, of_all) = match (known(few), known(sequences)) {
            (None, _) => return few,
            (_, None) => return sequences,
            (Some(of_few), Some(of_all)) => (of_few, of_all),
        };
        let by_turns = few as f64 / of_few.seconds > sequences as f64 / of_all.seconds;
        let slower = if by_turns { of_all } else { of_few };
        let again = self.batches - slower.last >= AGAIN;
        if by_turns != again { few } else { sequences }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs batches for so many sequences that take as many milliseconds as `time` says of their rows: how often each number of
    /// rows was chosen after the first hundred.
    fn chosen(sequences: usize, time: impl Fn(usize) -> u64) -> HashMap<usize, usize> {
        let mut turns = Turns::default();
        let mut counts = HashMap::new();
        for batch in 0..1100 {
            let rows = turns.rows(8, sequences);
            turns.add(rows, Duration::from_millis(time(rows)));
            *counts.entry(rows).or_insert(0) += usize::from(batch >= 100);
        }
        counts
    }

    #[test]
    fn what_makes_more_tokens_a_second_is_chosen() {
        assert_eq!(chosen(6, |_| 30)[&6], 1000);
        // Eight rows are cheap, and one more costs three times as much.
        let by_turns = chosen(9, |rows| if rows <= 8 { 40 } else { 120 });
        assert!(by_turns[&8] > 950 && by_turns[&9] > 0, "{by_turns:?}");
        let together = chosen(64, |rows| if rows <= 8 { 40 } else { 120 });
        assert!(together[&64] > 950 && together[&8] > 0, "{together:?}");
    }

    #[test]
    fn what_has_changed_is_found_out() {
        let mut turns = Turns::default();
        let mut run = |slow: u64| {
            let rows = turns.rows(8, 16);
            turns.add(rows, Duration::from_millis(if rows == 8 { slow } else { 60 }));
            rows
        };
        for _ in 0..200 {
            run(20);
        }
        assert!((0..10).filter(|_| run(20) == 8).count() >= 9);
        for _ in 0..400 {
            run(90);
        }
        assert!((0..10).filter(|_| run(90) == 16).count() >= 9);
    }
}
