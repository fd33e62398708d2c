//! [`Turns`]: how many sequences a batch has, and whether batches overlap, by what makes the most tokens a second.

use std::collections::HashMap;
use std::time::Duration;

use crate::backend::Overlap;
use crate::gpu::memory::{BATCH_ROWS, FEW_ROWS_BESIDE_PANELS};

/// Rows that kernels take at most: of batches, whose lists are recorded and which attend with a query a sequence, and of few rows.
const MOST: [usize; 2] = [BATCH_ROWS, FEW_ROWS_BESIDE_PANELS];
/// Measurements before batches of so many rows are judged; the first ones are recorded on every device and find caches cold.
const FIRST: u32 = 8;
/// Batches after which what was hardly slower is tried again. What was n times slower is after n² times as many: it costs more to try,
/// and is less likely to have become faster.
const AGAIN: u64 = 64;
/// The same for batches one after the other where they overlap, and the other way round: devices run empty for that.
const WAY_AGAIN: u64 = 512;
/// What a slower measurement counts beside those before. A faster one is believed at once.
const NEW: f64 = 0.1;

/// How batches follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// Each once the one before has ended.
    Alone,
    /// One on every device.
    Overlapped,
}

/// From one end to the next, what batches of one token a sequence took, by their rows.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    of: HashMap<(Way, usize), Taken>,
    batches: u64,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    seconds: f64,
    count: u32,
    /// When that was measured last, in batches.
    last: u64,
}

/// Tokens a second, and when that was measured last, in batches.
#[derive(Debug, Clone, Copy)]
struct Known {
    speed: f64,
    last: u64,
}

/// Numbers of rows that are told apart.
fn key(rows: usize) -> usize {
    if rows <= 8 { rows } else { rows.next_multiple_of(8) }
}

impl Turns {
    /// A batch of so many rows took so long.
    pub(crate) fn add(&mut self, way: Way, rows: usize, took: Duration) {
        self.batches += 1;
        let (seconds, last) = (took.as_secs_f64(), self.batches);
        let taken = self.of.entry((way, key(rows))).or_insert(Taken { seconds, count: 0, last });
        taken.seconds = seconds.min(taken.seconds + NEW * (seconds - taken.seconds));
        (taken.count, taken.last) = (taken.count.saturating_add(1), last);
    }

    /// Rows of the next batch for so many sequences: all, as many as kernels of batches take, or as many as those of few rows.
    pub(crate) fn decode_rows(&self, way: Way, sequences: usize) -> usize {
        self.rows(way, &MOST, sequences)
    }

    /// How so many sequences are divided into as many `batches` under way; `None` if one after the other is faster.
    pub(crate) fn overlap(&self, batches: usize, sequences: usize) -> Option<Overlap> {
        let each = sequences.div_ceil(batches);
        let rows = self.decode_rows(Way::Overlapped, each);
        let best = |way, sequences: usize| {
            let all = self.known(way, sequences);
            MOST.iter().filter(|most| **most < sequences).fold(all, |best, most| {
                let [a, b] = [best?, self.known(way, *most)?];
                Some(Known { speed: a.speed.max(b.speed), last: a.last.max(b.last) })
            })
        };
        let ways = [best(Way::Overlapped, each), best(Way::Alone, sequences)];
        self.takes_first(ways, |_| WAY_AGAIN).then_some(Overlap { batches, rows })
    }

    /// Rows of the next batch for so many sequences: all, or one of `most`, which fall.
    fn rows(&self, way: Way, most: &[usize], sequences: usize) -> usize {
        let again = |ratio: f64| (AGAIN as f64 * ratio * ratio) as u64;
        let Some((&first, fewer)) = most.split_first() else { return sequences };
        if sequences <= first {
            return self.rows(way, fewer, sequences);
        }
        if self.takes_first([first, sequences].map(|rows| self.known(way, rows)), again) {
            return self.rows(way, fewer, first);
        }
        sequences
    }

    fn known(&self, way: Way, rows: usize) -> Option<Known> {
        let taken = self.of.get(&(way, key(rows))).filter(|taken| taken.count >= FIRST)?;
        Some(Known { speed: rows as f64 / taken.seconds, last: taken.last })
    }

    /// Of two ways, whether the next batch is of the first: it is the faster one, or is to be tried, which `again` says by how many
    /// times slower it is.
    fn takes_first(&self, ways: [Option<Known>; 2], again: impl Fn(f64) -> u64) -> bool {
        let (first, second) = match ways {
            [None, _] => return true,
            [_, None] => return false,
            [Some(first), Some(second)] => (first, second),
        };
        let faster = first.speed > second.speed;
        let (faster_one, slower) = if faster { (first, second) } else { (second, first) };
        faster != (self.batches - slower.last >= again(faster_one.speed / slower.speed))
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
            let rows = turns.decode_rows(Way::Alone, sequences);
            turns.add(Way::Alone, rows, Duration::from_millis(time(rows)));
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
    fn more_than_kernels_of_batches_take_are_divided_where_that_is_faster() {
        // A batch of 256 takes 17, all of them 65, and eight 4.
        let time = |rows: usize| [4, 17, 65][usize::from(rows > 8) + usize::from(rows > 256)];
        let counts = chosen(257, time);
        assert!(counts[&256] > 990, "{counts:?}");
        let counts = chosen(300, |rows| 10 + rows as u64 / 32);
        assert!(counts[&300] > 950, "{counts:?}");
    }

    #[test]
    fn what_is_much_slower_is_seldom_tried() {
        let few = |slow: u64| chosen(64, |rows| if rows <= 8 { slow } else { 80 })[&8];
        // 1.3 and 4 times slower.
        let [near, far] = [13, 40].map(few);
        assert!((9..=16).contains(&near) && far == 1, "{near} {far}");
    }

    #[test]
    fn what_has_changed_is_found_out() {
        let mut turns = Turns::default();
        let mut run = |slow: u64| {
            let rows = turns.decode_rows(Way::Alone, 16);
            turns.add(Way::Alone, rows, Duration::from_millis(if rows == 8 { slow } else { 60 }));
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

    /// How often batches overlapped, of a thousand after the first hundred, if they take so many milliseconds by their rows.
    fn overlapped(sequences: usize, mut time: impl FnMut(Way, usize) -> u64) -> usize {
        let mut turns = Turns::default();
        let mut count = 0;
        for batch in 0..1100 {
            let (way, rows) = match turns.overlap(2, sequences) {
                Some(Overlap { rows, .. }) => (Way::Overlapped, rows),
                None => (Way::Alone, turns.decode_rows(Way::Alone, sequences)),
            };
            assert!((1..=sequences).contains(&rows));
            turns.add(way, rows, Duration::from_millis(time(way, rows)));
            count += usize::from(batch >= 100 && way == Way::Overlapped);
        }
        count
    }

    /// Milliseconds of a batch of which two devices have a half each.
    fn halves(way: Way, rows: usize) -> u64 {
        match way {
            Way::Alone => 40 + rows as u64,
            Way::Overlapped => 20 + rows as u64 / 2,
        }
    }

    #[test]
    fn what_is_recorded_at_first_decides_nothing() {
        let mut recorded = 0;
        let count = overlapped(2, |way, rows| {
            recorded += u32::from(way == Way::Overlapped);
            if way == Way::Overlapped && recorded <= 6 { 500 } else { halves(way, rows) }
        });
        assert!((950..1000).contains(&count), "{count}");
    }

    #[test]
    fn batches_overlap_where_that_makes_more_tokens_a_second() {
        for sequences in [2, 5, 16, 64] {
            assert!((950..1000).contains(&overlapped(sequences, halves)), "{sequences}");
        }
        // What is between two batches takes longer than half of one.
        let slow = |way, rows| halves(way, rows) + if way == Way::Overlapped { 60 } else { 0 };
        for sequences in [2, 5, 16] {
            assert!((1..50).contains(&overlapped(sequences, slow)), "{sequences}");
        }
    }
}
