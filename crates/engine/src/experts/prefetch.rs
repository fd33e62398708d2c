//! Prefetching: whether reading experts before they are requested pays.
//!
//! A backend can run the next layer's router on the current layer's hidden state and so guess which experts that layer
//! will need. A right guess is read while the trunk computes and the disk would be idle; a wrong one delays the layer's
//! reads by as much of it as did not fit that gap. So what matters is measured continuously: how often a guess that is
//! not in memory is right, how long a read takes, and how long the disk is idle between a layer's last read and the next
//! layer's requests. With g the remaining gap and t the time of a read, a guess that is right with probability p gains
//! p · min(g, t) and costs (1 − p) · max(t − g, 0).
//!
//! (A second predictor, that a layer needs what it needed one token ago, requires no code here: those experts are cached.)

use std::str::FromStr;
use std::time::Duration;

use crate::{Error, Result};

/// Whether experts are read before they are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefetch {
    /// Where measurements say that it gains.
    #[default]
    Auto,
    /// Never.
    Off,
    /// All that are guessed.
    Always,
}

impl std::fmt::Display for Prefetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Always => "always",
        })
    }
}

impl FromStr for Prefetch {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            "always" => Ok(Self::Always),
            _ => Err(Error::Option {
                option: "prefetch",
                expected: "auto, off or always".into(),
                got: text.into(),
            }),
        }
    }
}

/// Guesses below this are not worth an eviction.
const LEAST_PRECISION: f64 = 0.15;
/// Guesses that tell how good guesses are.
const ENOUGH: u32 = 8;
/// Where guesses are known not to gain, one in so many layers is guessed, without reading, in case that changes.
const SAMPLE_EVERY: u64 = 16;
/// 2⁶⁴ divided by the golden ratio. Its multiples are spread evenly however many of them are skipped each time, so that
/// samples fall on all layers alike whatever number of them a model has.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
/// Batches of at least this many tokens may need almost every expert; their guesses are of another kind, and measured apart.
pub(super) const MANY_ROWS: usize = 8;

/// A mean that forgets.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    value: f64,
    samples: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.samples = (self.samples + 1).min(200);
        self.value += (value - self.value) / f64::from(self.samples);
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    /// Whether a guess that was not in memory was right.
    precision: Mean,
    /// Seconds between a layer's last arrival and the next layer's requests.
    gap: Mean,
}

/// Decides how many guessed experts to read.
#[derive(Debug)]
pub(crate) struct Forecaster {
    mode: Prefetch,
    /// Of few and of many rows.
    measured: [Measured; 2],
    /// Seconds a byte takes.
    byte: Mean,
    /// How often a guess was offered.
    offers: u64,
    rows: usize,
}

impl Forecaster {
    pub(crate) fn new(mode: Prefetch) -> Self {
        Self { mode, measured: Default::default(), byte: Mean::default(), offers: 0, rows: 1 }
    }

    fn now(&mut self) -> &mut Measured {
        &mut self.measured[usize::from(self.rows >= MANY_ROWS)]
    }

    /// A layer of a batch of `rows` tokens has asked for experts.
    pub(crate) fn layer(&mut self, rows: usize) {
        self.rows = rows;
    }

    /// Whether a guess for the next layer is of use: to read by it, or to know how good guesses are. Asked wherever one
    /// could be made, which is not in the last layer.
    pub(crate) fn wants(&mut self) -> bool {
        self.offers += 1;
        let unknown = self.now().precision.samples < ENOUGH;
        let sampled = self.offers.wrapping_mul(SPREAD) < u64::MAX / SAMPLE_EVERY;
        match self.mode {
            Prefetch::Off => false,
            Prefetch::Always => true,
            Prefetch::Auto => unknown || sampled || self.count(1) > 0,
        }
    }

    /// How many experts of `bytes` each to read by guesses.
    pub(crate) fn count(&mut self, bytes: u64) -> usize {
        let read = self.byte.value * bytes as f64;
        let Measured { precision, gap } = *self.now();
        match self.mode {
            Prefetch::Off => return 0,
            Prefetch::Always => return usize::MAX,
            Prefetch::Auto if precision.samples < ENOUGH || precision.value < LEAST_PRECISION => return 0,
            Prefetch::Auto => {}
        }
        // The n-th read has what the others leave of the gap.
        let gains = |n: &usize| {
            let left = (gap.value - read * *n as f64).max(0.0);
            precision.value * left.min(read) > (1.0 - precision.value) * (read - left).max(0.0)
        };
        (0..1024).take_while(gains).count()
    }

    /// Of `guesses` that were not in memory, `right` were asked for.
    pub(crate) fn guessed(&mut self, guesses: usize, right: usize) {
        let precision = &mut self.now().precision;
        (0..guesses).for_each(|i| precision.add(if i < right { 1.0 } else { 0.0 }));
    }

    /// The disk had nothing to do for this long before a layer asked.
    pub(crate) fn idle(&mut self, gap: Duration) {
        self.now().gap.add(gap.as_secs_f64());
    }

    /// The disk took this long for `bytes`.
    pub(crate) fn read(&mut self, bytes: u64, busy: Duration) {
        if bytes > 0 {
            self.byte.add(busy.as_secs_f64() / bytes as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forecaster(precision: f64, gap_ms: u64, read_ms: u64) -> Forecaster {
        let mut f = Forecaster::new(Prefetch::Auto);
        f.layer(1);
        f.guessed(100, (100.0 * precision) as usize);
        f.idle(Duration::from_millis(gap_ms));
        f.read(1000, Duration::from_millis(read_ms));
        f
    }

    #[test]
    fn reads_ahead_where_it_gains() {
        let check = |precision, gap, read, count| {
            assert_eq!(forecaster(precision, gap, read).count(1000), count, "{precision} {gap} {read}");
        };
        check(0.9, 10, 2, 5);
        check(0.2, 10, 2, 5);
        check(0.1, 10, 2, 0);
        check(0.4, 1, 2, 0);
        check(0.6, 1, 2, 1);
        check(1.0, 0, 2, 0);
    }

    #[test]
    fn guesses_are_sampled_even_if_they_are_bad() {
        let mut f = forecaster(0.0, 10, 1);
        let wanted = (0..1600).filter(|_| {
            f.layer(1);
            f.wants()
        });
        assert!((95..=105).contains(&wanted.count()));
        assert!((0..100).all(|_| !Forecaster::new(Prefetch::Off).wants()));
    }

    #[test]
    fn the_first_layers_tell_how_good_guesses_are() {
        let mut f = Forecaster::new(Prefetch::Auto);
        for rows in [1, MANY_ROWS] {
            f.layer(rows);
            assert!((0..100).all(|_| f.wants()), "nothing is known yet");
            f.guessed(ENOUGH as usize, 0);
            assert!(!(0..100).all(|_| f.wants()));
        }
    }

    /// Models have any number of layers; each of them but the last is to be sampled about as often as the others.
    #[test]
    fn samples_fall_on_all_layers() {
        for layers in 2..=100 {
            let mut f = forecaster(0.0, 10, 1);
            let mut sampled = vec![0; layers - 1];
            for _ in 0..1600 {
                for count in &mut sampled {
                    f.layer(1);
                    *count += usize::from(f.wants());
                }
                f.layer(1);
            }
            assert!(sampled.iter().all(|n| (70..=130).contains(n)), "{layers} layers: {sampled:?}");
        }
    }
}
