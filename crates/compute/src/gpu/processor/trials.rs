//! [`Trials`]: how many of the experts at hand the processor computes, by trying what takes least time.

/// Parts that are tried, from none to all.
const PARTS: usize = 5;
/// Numbers of experts that are told apart: 1, 2 or 3, 4 to 7, 8 to 15, and more.
const SIZES: usize = 5;
/// How often every part is tried before one is chosen, and of how many requests one is a trial afterwards.
const FIRST: u32 = 3;
const AGAIN: u32 = 40;
/// Requests before anything is measured: caches and clocks are cold.
const WARM_UP: u32 = 96;
/// What a measurement counts beside those before; and no more than so many times the mean is believed.
const NEW: f64 = 0.15;
const OUTLIER: f64 = 3.0;

/// What a part took: nanoseconds an expert, and how often it was measured.
#[derive(Debug, Clone, Copy, Default)]
struct Tried {
    time: f64,
    count: u32,
}

#[derive(Debug, Default)]
pub(super) struct Trials {
    sizes: [[Tried; PARTS]; SIZES],
    requests: u32,
    /// The part that was chosen last.
    part: usize,
}

fn size_of(experts: usize) -> usize {
    (experts.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Trials {
    /// How many of so many experts, at least one, are the processor's.
    pub(super) fn choose(&mut self, experts: usize) -> usize {
        self.requests = self.requests.saturating_add(1);
        let tried = &self.sizes[size_of(experts)];
        let least = (0..PARTS).min_by_key(|part| tried[*part].count).unwrap_or(0);
        self.part = if self.requests <= WARM_UP {
            PARTS / 2
        } else if tried[least].count < FIRST {
            least
        } else if self.requests.is_multiple_of(AGAIN) {
            (self.requests / AGAIN) as usize % PARTS
        } else {
            best(tried)
        };
        (self.part * experts + PARTS / 2) / (PARTS - 1)
    }

    /// What the last choice for so many experts took, in nanoseconds.
    pub(super) fn add(&mut self, experts: usize, time: f64) {
        if self.requests <= WARM_UP || experts == 0 {
            return;
        }
        let tried = &mut self.sizes[size_of(experts)][self.part];
        let each = time / experts as f64;
        tried.time = match tried.count {
            0 => each,
            _ => tried.time + NEW * (each.min(OUTLIER * tried.time) - tried.time),
        };
        tried.count = tried.count.saturating_add(1);
    }
}

/// The part that took least time.
fn best(tried: &[Tried; PARTS]) -> usize {
    let known = (0..PARTS).filter(|part| tried[*part].count > 0);
    known.min_by(|a, b| tried[*a].time.total_cmp(&tried[*b].time)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs requests of 1 to 12 experts on a bus and a processor that take so long each.
    fn settled(bus: f64, begin: f64, processor: f64) -> (Trials, Vec<usize>) {
        let mut trials = Trials::default();
        let run = |trials: &mut Trials, experts: usize| {
            let share = trials.choose(experts);
            let own = if share > 0 { begin + processor * share as f64 } else { 0.0 };
            trials.add(experts, own.max(bus * (experts - share) as f64));
            share
        };
        for request in 0..4000 {
            run(&mut trials, request % 12 + 1);
        }
        // A trial in between is not what is chosen.
        let chosen = (1..=12).map(|experts| {
            let mut shares: Vec<usize> = (0..5).map(|_| run(&mut trials, experts)).collect();
            shares.sort_unstable();
            shares[2]
        });
        let chosen = chosen.collect();
        (trials, chosen)
    }

    #[test]
    fn what_takes_least_time_is_chosen() {
        // Alike: half of them, but one expert is not worth beginning for.
        let (_, shares) = settled(50.0, 20.0, 50.0);
        assert_eq!((shares[0], shares[7], shares[11]), (0, 4, 6), "{shares:?}");
        let (_, slow) = settled(50.0, 20.0, 5000.0);
        assert!(slow.iter().all(|share| *share == 0), "{slow:?}");
        let (_, fast) = settled(50.0, 0.0, 1.0);
        assert!(fast.iter().zip(1..).all(|(share, experts)| *share == experts), "{fast:?}");
    }

    /// An outlier does not decide for long.
    #[test]
    fn what_changes_is_found_out() {
        let (mut trials, _) = settled(50.0, 20.0, 50.0);
        for _ in 0..4000 {
            let share = trials.choose(8);
            let own = if share > 0 { 20.0 + 900.0 * share as f64 } else { 0.0 };
            trials.add(8, own.max(50.0 * (8 - share) as f64));
        }
        let zero = (0..3).filter(|_| trials.choose(8) == 0).count();
        assert!(zero >= 2);
    }
}
