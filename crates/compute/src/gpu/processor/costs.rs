//! How the experts that a batch misses are divided between the bus and the processor: by what both take.

/// Missing experts for which shares are known: `MOST_SHARED` of `kernels/handed.h`.
pub(crate) const MOST_SHARED: usize = 64;

/// What counts of a measurement when the next one comes.
const KEPT: f64 = 0.5;
/// What took more than so many times as long as usual was held up.
const HELD_UP: f64 = 3.0;
/// A share must make a batch this much faster to be larger than another.
const WORTH: f64 = 0.98;

/// Nanoseconds that n experts take, as a line through what was measured: sums of weights, n, n², t and n · t.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Line {
    count: f64,
    n: f64,
    squares: f64,
    time: f64,
    products: f64,
}

impl Line {
    pub(super) fn add(&mut self, n: f64, time: f64) {
        *self = self.plus(Self { count: 1.0, n, squares: n * n, time, products: n * time });
    }

    /// The sums in this order.
    pub(super) fn of_sums([count, n, squares, time, products]: [f64; 5]) -> Self {
        Self { count, n, squares, time, products }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            n: self.n + other.n,
            squares: self.squares + other.squares,
            time: self.time + other.time,
            products: self.products + other.products,
        }
    }

    /// As if it had been measured `factor` times.
    fn times(self, factor: f64) -> Self {
        Self {
            count: self.count * factor,
            n: self.n * factor,
            squares: self.squares * factor,
            time: self.time * factor,
            products: self.products * factor,
        }
    }

    /// As if what took much longer than `usual` says, a start and a slope, had taken less: a thread that others kept from its core
    /// says nothing of the work.
    pub(super) fn add_unless_held_up(&mut self, n: f64, time: f64, [start, slope]: [f64; 2]) {
        let usual = start + slope * n;
        self.add(n, if usual > 0.0 { time.min(HELD_UP * usual) } else { time });
    }

    /// Start and slope of the line of least squares; neither is negative.
    pub(super) fn fit(self) -> [f64; 2] {
        let spread = self.count * self.squares - self.n * self.n;
        if self.count <= 0.0 {
            return [0.0; 2];
        }
        if spread <= 1e-6 * self.count * self.squares {
            return [0.0, if self.n > 0.0 { self.time / self.n } else { 0.0 }];
        }
        let slope = ((self.count * self.products - self.n * self.time) / spread).max(0.0);
        let start = (self.time - slope * self.n) / self.count;
        // Through the origin, if it would begin below.
        if start < 0.0 { [0.0, self.products / self.squares] } else { [start, slope] }
    }
}

/// What was measured of the bus and of the processor.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Costs {
    bus: Measured,
    processor: Measured,
    /// Nanoseconds that handing over takes beside the processor's own time: as guessed, and as measured.
    guess: f64,
    hand_over: f64,
}

/// What was measured before the first batch, which is never quite forgotten, and since.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    first: Line,
    since: Line,
}

impl Measured {
    fn line(self) -> [f64; 2] {
        // A few batches weigh more than the trial.
        self.since.plus(self.first.times(4.0 / self.first.count.max(1.0))).fit()
    }

    fn add(&mut self, line: Line) {
        if line.count <= 0.0 {
            return;
        }
        self.since = self.since.times(KEPT).plus(line);
    }
}

impl Costs {
    /// Those of a trial, with a guess at what handing over takes.
    pub(super) fn new(bus: Line, processor: Line, hand_over: f64) -> Self {
        let of = |first| Measured { first, since: Line::default() };
        Self { bus: of(bus), processor: of(processor), guess: hand_over, hand_over }
    }

    /// What batches took; and of those that waited for the processor how many there were, the experts that it computed, and
    /// nanoseconds from the choice to their outputs.
    pub(super) fn add(&mut self, bus: Line, processor: Line, [waited, experts, time]: [f64; 3]) {
        self.bus.add(bus);
        self.processor.add(processor);
        // Where nothing waits any more, what once took long is tried again.
        let mut beside = self.guess;
        if waited > 0.0 {
            let [begin, compute] = self.processor.line();
            beside = ((time - experts * compute) / waited - begin).max(0.0);
        }
        self.hand_over = KEPT * self.hand_over + (1.0 - KEPT) * beside;
    }

    /// Forgets what batches have shown of the processor: it is to be tried again.
    pub(super) fn forget_processor(&mut self) {
        self.processor.since = Line::default();
        self.hand_over = self.guess;
    }

    /// Start and slope of what the processor takes.
    pub(super) fn usual(&self) -> [f64; 2] {
        self.processor.line()
    }

    /// Nanoseconds until so many experts are there over the bus.
    pub(super) fn bus(&self, experts: f64) -> f64 {
        let [begin, fetch] = self.bus.line();
        begin + fetch * experts
    }

    /// Nanoseconds until the processor has computed so many experts.
    fn processor(&self, experts: f64) -> f64 {
        let [start, compute] = self.processor.line();
        if experts > 0.0 { self.hand_over + start + compute * experts } else { 0.0 }
    }

    /// How many experts the processor computes, by how many are missing.
    pub(super) fn shares(&self) -> [u32; MOST_SHARED + 1] {
        let time = |missing: usize, share: usize| {
            self.bus((missing - share) as f64).max(self.processor(share as f64))
        };
        std::array::from_fn(|missing| {
            let better = |best: usize, share: usize| {
                if time(missing, share) < WORTH * time(missing, best) { share } else { best }
            };
            (1..=missing).fold(0, better) as u32
        })
    }
}

/// Looks after which a processor without a share is tried again, at first and at most.
const IDLE_LOOKS: u32 = 2;
const MOST_IDLE: u32 = 256;

/// When a processor that has no share, of which nothing is measured then, is tried again.
#[derive(Debug)]
pub(super) struct Idle {
    /// Looks at which nothing was handed over, and after how many of them something is.
    looks: u32,
    patience: u32,
}

impl Default for Idle {
    fn default() -> Self {
        Self { looks: 0, patience: IDLE_LOOKS }
    }
}

impl Idle {
    /// Whether the processor is to be tried now, after a look at what it took: whether it `has_share` and something `was_handed`
    /// to it. After each trial that leaves it without a share it takes twice as long to the next.
    pub(super) fn tries_again(&mut self, has_share: bool, was_handed: bool) -> bool {
        if has_share {
            *self = Self::default();
        } else if was_handed {
            *self = Self { looks: 0, patience: (2 * self.patience).min(MOST_IDLE) };
        } else {
            self.looks += 1;
        }
        self.looks >= self.patience
    }
}

/// The one in the middle of what was measured; nothing of nothing.
pub(super) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The same part of all missing experts, rounded.
pub(super) fn fixed_shares(part: f32) -> [u32; MOST_SHARED + 1] {
    std::array::from_fn(|missing| (part.clamp(0.0, 1.0) * missing as f32).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(start: f64, slope: f64) -> Line {
        let mut line = Line::default();
        (1..=4).for_each(|n| line.add(f64::from(n), start + slope * f64::from(n)));
        line
    }

    #[test]
    fn the_slower_of_both_is_as_fast_as_it_can_be() {
        // An expert in 56 µs over the bus, in 30 by the processor, which is handed work in 10.
        let shares = Costs::new(line(5e3, 56e3), line(7e3, 30e3), 3e3).shares();
        assert_eq!(shares[..9], [0, 1, 1, 2, 3, 3, 4, 5, 5]);
        let slow = Costs::new(line(5e3, 56e3), line(10e3, 5e6), 0.0).shares();
        assert!(slow[..64].iter().all(|share| *share == 0), "{slow:?}");
        let fast = Costs::new(line(5e3, 56e3), line(0.0, 1.0), 0.0).shares();
        assert!(fast.iter().zip(0..).all(|(share, missing)| *share == missing), "{fast:?}");
    }

    #[test]
    fn what_batches_took_outweighs_the_trial() {
        let mut costs = Costs::new(line(5e3, 56e3), line(10e3, 30e3), 0.0);
        for _ in 0..10 {
            costs.add(line(5e3, 56e3).times(20.0), line(10e3, 300e3).times(20.0), [0.0; 3]);
        }
        assert_eq!(costs.shares()[..5], [0; 5]);
        let mut costs = Costs::new(line(5e3, 56e3), line(0.0, 30e3), 0.0);
        assert_eq!(costs.shares()[1], 1);
        // Handing over turns out to take longer than the bus.
        for _ in 0..10 {
            costs.add(line(5e3, 56e3), line(0.0, 30e3), [10.0, 10.0, 10.0 * 130e3]);
        }
        assert_eq!(costs.shares()[1], 0);
        (0..10).for_each(|_| costs.add(Line::default(), Line::default(), [0.0; 3]));
        assert_eq!(costs.shares()[1], 1);
        assert_eq!(fixed_shares(0.5)[..5], [0, 1, 1, 2, 2]);
    }

    #[test]
    fn who_is_held_up_once_is_not_taken_for_slow() {
        let mut line = Line::default();
        for request in 0..40 {
            let time = if request == 7 { 50e6 } else { 20e3 + 30e3 * f64::from(request % 4 + 1) };
            line.add_unless_held_up(f64::from(request % 4 + 1), time, [20e3, 30e3]);
        }
        let [start, slope] = line.fit();
        assert!((start + 2.0 * slope) < 1.2 * 80e3, "{start} + n · {slope}");
        let mut first = Line::default();
        first.add_unless_held_up(2.0, 90e3, [0.0; 2]);
        assert_eq!(first.fit(), [0.0, 45e3]);
        assert_eq!((median(vec![3.0, 50.0, 1.0]), median(vec![])), (3.0, 0.0));
    }

    #[test]
    fn a_processor_without_a_share_is_tried_less_and_less_often() {
        let mut idle = Idle::default();
        let mut looks = || (1..).find(|_| idle.tries_again(false, false)).unwrap();
        assert_eq!(looks(), 2);
        let mut after_trials = vec![];
        for _ in 0..9 {
            assert!(!idle.tries_again(false, true));
            after_trials.push((1..).find(|_| idle.tries_again(false, false)).unwrap());
        }
        assert_eq!(after_trials, [4, 8, 16, 32, 64, 128, 256, 256, 256]);
        assert!(!idle.tries_again(true, true));
        assert_eq!((1..).find(|_| idle.tries_again(false, false)), Some(2), "once it had a share");
    }

    #[test]
    fn measurements_of_one_number_give_a_line_through_the_origin() {
        let mut line = Line::default();
        (0..3).for_each(|_| line.add(2.0, 100.0));
        assert_eq!(line.fit(), [0.0, 50.0]);
        assert_eq!(Line::default().fit(), [0.0, 0.0]);
    }
}
