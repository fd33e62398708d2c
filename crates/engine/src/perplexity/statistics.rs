//! Means with their uncertainty, and Kullback-Leibler divergence between predictions.

use super::Prediction;

/// A running mean and variance (Welford 1962).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Mean {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Mean {
    /// Takes `value` into account.
    pub fn add(&mut self, value: f64) {
        self.count += 1;
        let delta = value - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (value - self.mean);
    }

    /// Values so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean; 0 of none.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Standard deviation of the mean, as if values were independent; 0 of fewer than two.
    pub fn standard_error(&self) -> f64 {
        match self.count {
            0 | 1 => 0.0,
            n => (self.squares / (n - 1) as f64 / n as f64).sqrt(),
        }
    }
}

/// How far predictions are from those of a base run, token by token.
#[derive(Debug, Clone, Default)]
pub struct Divergence {
    values: Vec<f64>,
    mean: Mean,
    same_top: u64,
}

impl Divergence {
    /// Compares `prediction` with the base run's log probabilities of the same token.
    pub fn add(&mut self, base: &[f32], prediction: Prediction<'_>) {
        let other = prediction.log_probabilities;
        // Σ p · (ln p − ln q); rounding can make it a little negative where p = q.
        let kl: f64 = base
            .iter()
            .zip(other)
            .map(|(p, q)| f64::from(*p).exp() * (f64::from(*p) - f64::from(*q)))
            .filter(|term| term.is_finite())
            .sum();
        self.values.push(kl.max(0.0));
        self.mean.add(kl.max(0.0));
        self.same_top += u64::from(top(base) == top(other));
    }

    /// Mean Kullback-Leibler divergence of the predictions from the base run's, in nats.
    pub fn mean(&self) -> Mean {
        self.mean
    }

    /// The divergence, in nats, that a `fraction` of tokens does not exceed; `None` of no tokens.
    pub fn quantile(&self, fraction: f64) -> Option<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get((fraction * last as f64).round() as usize).copied()
    }

    /// Fraction of tokens where both runs expect the same token most.
    pub fn same_top(&self) -> f64 {
        self.same_top as f64 / self.mean.count().max(1) as f64
    }
}

fn top(row: &[f32]) -> Option<usize> {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means() {
        let mut mean = Mean::default();
        assert_eq!((mean.mean(), mean.standard_error()), (0.0, 0.0));
        [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0].into_iter().for_each(|v| mean.add(v));
        assert_eq!(mean.mean(), 5.0);
        let expected = (32.0f64 / 7.0 / 8.0).sqrt();
        assert!((mean.standard_error() - expected).abs() < 1e-12);
    }

    #[test]
    fn divergence_of_two_coins() {
        let log = |p: f64| [p.ln() as f32, (1.0 - p).ln() as f32];
        let mut divergence = Divergence::default();
        divergence.add(&log(0.5), Prediction { log_probabilities: &log(0.5), token: 0 });
        divergence.add(&log(0.75), Prediction { log_probabilities: &log(0.25), token: 0 });
        let expected = 0.75 * 3f64.ln() - 0.25 * 3f64.ln();
        assert!((divergence.mean().mean() - expected / 2.0).abs() < 1e-6);
        assert!((divergence.quantile(1.0).unwrap() - expected).abs() < 1e-6);
        assert_eq!((divergence.quantile(0.0), divergence.quantile(0.4)), (Some(0.0), Some(0.0)));
        assert_eq!(divergence.quantile(0.6), divergence.quantile(1.0));
        assert_eq!(divergence.same_top(), 0.5);
    }
}
