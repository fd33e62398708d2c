//! What a scheduler has done: counters and distributions.

use crate::engine::Engine;
use crate::experts::CacheStats;

/// How often values fell below certain bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Upper bounds, ascending; a last bucket holds what is above all of them.
    pub bounds: &'static [f64],
    /// One more than bounds: values in each bucket, not cumulative.
    pub counts: Vec<u64>,
    /// Sum of all values.
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub(super) fn add(&mut self, value: f64) {
        let bucket = self.bounds.iter().position(|bound| value <= *bound).unwrap_or(self.bounds.len());
        self.counts[bucket] += 1;
        self.sum += value;
    }

    /// Adds the values of another with the same bounds.
    fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.sum += other.sum;
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Mean of all values; 0 if there are none.
    pub fn mean(&self) -> f64 {
        self.sum / self.count().max(1) as f64
    }
}

/// An engine's memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Its budget.
    pub budget: u64,
    /// The least and the most that [`Engine::grant`] can make of it.
    pub grants: (u64, u64),
    /// Slots for routed experts.
    pub expert_slots: usize,
}

impl Memory {
    pub(super) fn of(engine: &Engine) -> Self {
        let expert_slots = engine.experts().slots();
        Self { budget: engine.budget().total, grants: engine.grants(), expert_slots }
    }
}

/// What a scheduler has done since it started, and its current state.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// Requests that wait now.
    pub waiting: usize,
    /// Requests being answered now; of those for embeddings each input counts.
    pub running: usize,
    /// Key-value pages in use now, including those of cached sessions.
    pub pages_used: usize,
    /// Of these, pages that requests being answered hold.
    pub pages_running: usize,
    /// Sessions cached for reuse now.
    pub kept_sessions: usize,
    /// Requests answered.
    pub finished: u64,
    /// Requests whose clients went away.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests refused because too many waited.
    pub refused: u64,
    /// Preemptions because memory was short.
    pub preemptions: u64,
    /// Batches evaluated.
    pub steps: u64,
    /// Prompt tokens evaluated.
    pub prompt_tokens: u64,
    /// Prompt tokens that earlier requests had left evaluated.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Times that guessed tokens were verified.
    pub drafts: u64,
    /// Tokens guessed and verified.
    pub drafted_tokens: u64,
    /// Of these, those that were right.
    pub accepted_tokens: u64,
    /// Inputs embedded.
    pub embeddings: u64,
    /// Seconds spent evaluating.
    pub busy_seconds: f64,
    /// The engine's memory now.
    pub memory: Memory,
    /// What the expert cache did.
    pub experts: CacheStats,
    /// Sequences in a batch.
    pub batch: Histogram,
    /// Seconds from submission to the first token.
    pub first_token: Histogram,
    /// Seconds between tokens of an answer.
    pub between_tokens: Histogram,
    /// Seconds from submission to the end of an answer, or to the last embedding.
    pub duration: Histogram,
}

impl Figures {
    /// Adds the counters and distributions of another scheduler, such as an earlier one of the same model. What describes the
    /// present (`waiting`, `running`, pages, sessions, `memory`) stays as it is.
    pub fn add_counts(&mut self, other: &Self) {
        self.finished += other.finished;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
        self.refused += other.refused;
        self.preemptions += other.preemptions;
        self.steps += other.steps;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.drafts += other.drafts;
        self.drafted_tokens += other.drafted_tokens;
        self.accepted_tokens += other.accepted_tokens;
        self.embeddings += other.embeddings;
        self.busy_seconds += other.busy_seconds;
        self.experts += other.experts;
        self.batch.merge(&other.batch);
        self.first_token.merge(&other.first_token);
        self.between_tokens.merge(&other.between_tokens);
        self.duration.merge(&other.duration);
    }
}

impl Default for Figures {
    fn default() -> Self {
        const SECONDS: &[f64] = &[
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
        ];
        const SEQUENCES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
        Self {
            waiting: 0,
            running: 0,
            pages_used: 0,
            pages_running: 0,
            kept_sessions: 0,
            finished: 0,
            cancelled: 0,
            failed: 0,
            refused: 0,
            preemptions: 0,
            steps: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 0,
            drafts: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            embeddings: 0,
            busy_seconds: 0.0,
            memory: Memory::default(),
            experts: CacheStats::default(),
            batch: Histogram::new(SEQUENCES),
            first_token: Histogram::new(SECONDS),
            between_tokens: Histogram::new(SECONDS),
            duration: Histogram::new(SECONDS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fall_into_buckets() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        [0.5, 1.0, 1.5, 9.0].into_iter().for_each(|v| histogram.add(v));
        assert_eq!(histogram.counts, [2, 1, 1]);
        assert_eq!(histogram.mean(), 3.0);
        assert_eq!(Histogram::new(&[]).mean(), 0.0);
    }

    #[test]
    fn counts_add_up_and_the_present_stays() {
        let mut earlier = Figures { finished: 3, busy_seconds: 1.5, running: 2, ..Figures::default() };
        earlier.experts.hits = 7;
        earlier.duration.add(0.2);
        let mut figures = Figures { finished: 1, running: 1, ..Figures::default() };
        figures.duration.add(9.0);
        figures.add_counts(&earlier);
        assert_eq!((figures.finished, figures.busy_seconds, figures.running), (4, 1.5, 1));
        assert_eq!((figures.experts.hits, figures.duration.count(), figures.duration.sum), (7, 2, 9.2));
    }
}
