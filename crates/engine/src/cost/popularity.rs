//! [`Popularity`]: how evenly routers choose, and so how often a chosen expert is in memory.

/// How often the experts of a layer are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Popularity {
    /// Uniform routing: the worst case for a cache.
    Uniform,
    /// Skewed routing: the expert of rank r is drawn r^−s times as often as the first, without repetition within a
    /// token, and the most popular ones are in memory.
    Skewed(f64),
    /// This share of a recorded trace's requests was in memory.
    Measured(f64),
}

impl Popularity {
    /// Probability that a token chooses each of `experts`, most popular first; they sum up to `top_k`.
    fn chosen(self, experts: usize, top_k: usize) -> Vec<f64> {
        let (experts, top_k) = (experts.max(1), top_k.min(experts.max(1)) as f64);
        let Self::Skewed(exponent) = self else { return vec![top_k / experts as f64; experts] };
        let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-exponent)).collect();
        // Drawing without repetition is a race of exponential clocks that ends when k have rung: by then the clock of rate
        // w has rung with probability 1 − exp(−w·t).
        let at = |t: f64| weights.iter().map(move |w| 1.0 - (-w * t).exp());
        let (mut low, mut high) = (0.0, 1.0);
        while at(high).sum::<f64>() < top_k - 1e-9 && high < 1e12 {
            high *= 2.0;
        }
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if at(middle).sum::<f64>() < top_k { low = middle } else { high = middle }
        }
        at(high).collect()
    }

    /// Share of a token's `top_k` experts that are in memory when `slots` of `experts` are, 0..=1.
    pub fn hit_rate(self, slots: f64, experts: usize, top_k: usize) -> f64 {
        if slots >= experts as f64 {
            return 1.0;
        }
        match self {
            Self::Uniform => slots / experts as f64,
            Self::Skewed(_) => 1.0 - missing(&self.chosen(experts, top_k), slots) / top_k.max(1) as f64,
            Self::Measured(share) => share,
        }
    }

    /// Distinct experts that `rows` tokens choose and of those the ones that are not in memory when `slots` are.
    pub fn distinct(self, slots: f64, experts: usize, top_k: usize, rows: usize) -> (f64, f64) {
        let any = |p: &f64| 1.0 - (1.0 - p).powf(rows as f64);
        let chosen: Vec<f64> = self.chosen(experts, top_k).iter().map(any).collect();
        let all = chosen.iter().sum();
        match self {
            _ if slots >= experts as f64 => (all, 0.0),
            Self::Measured(share) => (all, all * (1.0 - share)),
            Self::Uniform | Self::Skewed(_) => (all, missing(&chosen, slots)),
        }
    }
}

/// The sum of what comes after the first `slots`, of which the last may be a part of one.
fn missing(of: &[f64], slots: f64) -> f64 {
    of.iter().enumerate().map(|(i, p)| p * (i as f64 + 1.0 - slots).clamp(0.0, 1.0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-6 * expected.abs().max(1.0), "{got}, expected {expected}");
    }

    #[test]
    fn known_shares() {
        near(Popularity::Uniform.hit_rate(32.0, 128, 8), 0.25);
        near(Popularity::Measured(0.6).hit_rate(32.0, 128, 8), 0.6);
        // One of two by weights 1 and 1/2: 1 − exp(−t) + 1 − exp(−t/2) = 1, so with x = exp(−t/2): x² + x = 1.
        let x = (5f64.sqrt() - 1.0) / 2.0;
        near(Popularity::Skewed(1.0).hit_rate(1.0, 2, 1), 1.0 - x * x);
        near(Popularity::Skewed(1.0).hit_rate(0.5, 2, 1), 0.5 * (1.0 - x * x));
        near(Popularity::Skewed(0.0).hit_rate(32.0, 128, 8), 0.25);
        for popularity in [Popularity::Uniform, Popularity::Skewed(0.8), Popularity::Measured(0.1)] {
            near(popularity.hit_rate(128.0, 128, 8), 1.0);
            near(popularity.distinct(128.0, 128, 8, 512).1, 0.0);
        }
        assert!(Popularity::Skewed(0.8).hit_rate(32.0, 128, 8) > 0.5);
    }

    #[test]
    fn a_prompt_needs_each_expert_once() {
        // Four of two experts a token: with two tokens 1 − (1/2)² of each.
        let (all, missing) = Popularity::Uniform.distinct(1.0, 4, 2, 2);
        near(all, 3.0);
        near(missing, 2.25);
        near(Popularity::Measured(0.75).distinct(1.0, 4, 2, 2).1, 0.75);
        let (all, _) = Popularity::Skewed(0.8).distinct(0.0, 128, 8, 1);
        near(all, 8.0);
        // A layer whose every expert is chosen.
        near(Popularity::Skewed(0.8).distinct(1.0, 2, 2, 1).1, 1.0);
    }
}
