//! [`Pace`]: how many tokens of prompts go into a step beside answers, by what steps took.
//!
//! Let a step of generating sequences take d seconds, and n tokens of prompts add c(n). Answers wait for the whole step, so n
//! is the largest with c(n) ≤ d: the time between tokens at most doubles while a prompt is read. But part of c(n) does not
//! depend on n, most of it where experts are read for the step: with few tokens a step the prompt would take far longer, and
//! keep answers waiting for longer in all. So n is at least the smallest for which a token costs, c(n) / n, at most twice what
//! it costs at best.

use std::time::Duration;

/// Tokens of prompts while nothing is known.
const AT_FIRST: usize = 128;
/// The fewest that are considered.
const FEWEST: usize = 16;
/// Powers of two that are told apart.
const SIZES: usize = 24;
/// What a measurement counts beside those before.
const NEW: f64 = 0.2;
/// Steps after which a size that was not met any more is forgotten: caches were cold, contexts were short.
const FORGOTTEN: u64 = 2000;

/// A mean that forgets.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    tokens: f64,
    seconds: f64,
    /// The step that was counted last; none if it is 0.
    step: u64,
}

impl Mean {
    fn add(&mut self, tokens: usize, seconds: f64, step: u64) {
        let new = if self.step == 0 { 1.0 } else { NEW };
        self.tokens += new * (tokens as f64 - self.tokens);
        self.seconds += new * (seconds - self.seconds);
        self.step = step;
    }

    fn is_known(&self, step: u64) -> bool {
        self.step > 0 && step < self.step + FORGOTTEN
    }
}

/// What steps took.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Steps that only generate, by the logarithm of their sequences.
    plain: [Mean; SIZES],
    /// What tokens of prompts add, by the logarithm of their number.
    added: [Mean; SIZES],
    step: u64,
}

fn size_of(tokens: usize) -> usize {
    (tokens.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Pace {
    /// A step of so many `generating` sequences and so many tokens of prompts took this long.
    pub(super) fn add(&mut self, generating: usize, prompt: usize, took: Duration) {
        self.step += 1;
        let seconds = took.as_secs_f64();
        if prompt == 0 {
            self.plain[size_of(generating)].add(generating, seconds, self.step);
        } else if let Some(plain) = self.plain(generating) {
            self.added[size_of(prompt)].add(prompt, (seconds - plain).max(0.0), self.step);
        }
    }

    /// Tokens of prompts for a step of so many `generating` sequences, at most `chunk`.
    pub(super) fn tokens(&self, generating: usize, chunk: usize) -> usize {
        let known: Vec<Mean> = self.added.into_iter().filter(|mean| mean.is_known(self.step)).collect();
        let best = known.iter().map(|mean| mean.seconds / mean.tokens).fold(f64::INFINITY, f64::min);
        let Some(plain) = self.plain(generating).filter(|_| best.is_finite()) else {
            return AT_FIRST.min(chunk);
        };
        let sizes = || (0..).map(|i| FEWEST << i).take_while(|n| *n < chunk).chain([chunk]);
        let quick = sizes().filter(|n| added(&known, *n) <= plain).last().unwrap_or(0);
        let thrifty = sizes().find(|n| added(&known, *n) / *n as f64 <= 2.0 * best).unwrap_or(chunk);
        quick.max(thrifty).max(1)
    }

    /// Seconds of a step that only generates; of the next number of sequences that is known, if this one is not.
    fn plain(&self, generating: usize) -> Option<f64> {
        if generating == 0 {
            return Some(0.0);
        }
        let size = size_of(generating);
        let known = self.plain.iter().enumerate().filter(|(_, mean)| mean.is_known(self.step));
        known.min_by_key(|(other, _)| other.abs_diff(size)).map(|(_, mean)| mean.seconds)
    }
}

/// Seconds that `tokens` of prompts add, between what is `known` of fewer and of more; of less than the fewest, and of more
/// than the most, in proportion.
fn added(known: &[Mean], tokens: usize) -> f64 {
    let tokens = tokens as f64;
    let mut below = Mean::default();
    for mean in known {
        if mean.tokens >= tokens {
            let part = (tokens - below.tokens) / (mean.tokens - below.tokens).max(1e-9);
            return below.seconds + part * (mean.seconds - below.seconds);
        }
        below = *mean;
    }
    below.seconds * tokens / below.tokens.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = 512;

    /// What prompts get in the end on a machine where a step takes `decode` milliseconds, and prompts `fixed` and `token` each.
    fn settled(decode: f64, fixed: f64, token: f64) -> usize {
        let mut pace = Pace::default();
        let step = |pace: &mut Pace, generating: usize, prompt: usize| {
            let more = if prompt > 0 { fixed + token * prompt as f64 } else { 0.0 };
            let seconds = (if generating > 0 { decode } else { 0.0 } + more) / 1e3;
            pace.add(generating, prompt, Duration::from_secs_f64(seconds));
        };
        // A prompt alone, its answer, and prompts beside that.
        step(&mut pace, 0, CHUNK);
        for _ in 0..200 {
            step(&mut pace, 4, 0);
            let prompt = pace.tokens(4, CHUNK);
            step(&mut pace, 4, prompt);
        }
        pace.tokens(4, CHUNK)
    }

    #[test]
    fn nothing_is_known_at_first() {
        assert_eq!(Pace::default().tokens(4, CHUNK), AT_FIRST);
        assert_eq!(Pace::default().tokens(4, 20), 20);
        let mut pace = Pace::default();
        pace.add(4, 0, Duration::from_millis(3));
        assert_eq!(pace.tokens(4, CHUNK), AT_FIRST);
    }

    #[test]
    fn a_prompt_takes_as_long_as_the_answers_beside_it() {
        // As on a GPU with 32 answers: 12 ms a step, and 54 µs a token.
        assert_eq!(settled(12.0, 0.0, 0.054), 128);
        assert_eq!(settled(12.0, 0.0, 0.02), CHUNK);
        // As on a laptop.
        assert_eq!(settled(20.0, 0.0, 1.2), 16);
        assert_eq!(settled(20.0, 10.0, 0.3), 32);
    }

    #[test]
    fn what_does_not_depend_on_its_tokens_is_spread_over_many() {
        // Experts are read from disk for every step.
        assert_eq!(settled(100.0, 1500.0, 10.0), 128);
        assert_eq!(settled(100.0, 100_000.0, 1.0), 256);
        // A single token is not slower than it is at best.
        assert!(settled(100.0, 0.0, 10.0) == 16);
    }

    #[test]
    fn a_small_chunk_is_all_there_is() {
        let mut pace = Pace::default();
        pace.add(1, 0, Duration::from_millis(10));
        pace.add(1, 8, Duration::from_millis(50));
        assert_eq!(pace.tokens(1, 8), 8);
        assert_eq!(pace.tokens(1, 1), 1);
    }

    #[test]
    fn what_was_slow_once_is_tried_again() {
        let mut pace = Pace::default();
        pace.add(4, 0, Duration::from_millis(10));
        pace.add(0, CHUNK, Duration::from_millis(512));
        // Sixteen tokens found cold caches.
        pace.add(4, 16, Duration::from_millis(400));
        assert!(pace.tokens(4, CHUNK) > 16);
        (0..FORGOTTEN).for_each(|_| pace.add(4, 0, Duration::from_millis(10)));
        pace.add(0, CHUNK, Duration::from_millis(512));
        assert_eq!(pace.tokens(4, CHUNK), 16);
    }
}
