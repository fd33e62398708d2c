//! [`Draw`]: choosing a token by its logits, with the same result on every backend.
//!
//! How likely tokens are is reckoned in whole numbers, whose sums do not depend on the order in which they are added. A token
//! is so many *halvings* less likely than the best one, in units of 2⁻²⁴, and its *weight* is 2⁴⁰ halved as often, by a
//! polynomial in whole numbers. Products and differences of floats are single operations that IEEE 754 defines exactly.
//!
//! Tokens are ranked by halvings at temperature 1, then by id.

use std::f64::consts::LOG2_E;
use std::sync::Arc;

use crate::TokenSet;

/// Halvings have so many bits after the point.
const FRACTION_BITS: u32 = 24;
/// More halvings than this are as many: the weight is 0 from 41 on.
const MOST_HALVINGS: f32 = 62.0;
/// The weight of the most likely token has so many bits.
const WEIGHT_BITS: u32 = 40;
/// Halvings are counted in bins of 2²⁰ units first.
const BIN_BITS: u32 = 20;
const BINS: usize = 1024;
/// Tokens with fewer halvings are near the best one, if there are no more than so many.
const NEAR: u32 = 16 << FRACTION_BITS;
const MOST_NEAR: usize = 4096;
/// Logits whose weights are summed apart, so that most of them are looked at once only.
const BLOCK: usize = 512;

/// Tokens of a vocabulary, at most: the sum of their weights has 64 bits.
pub const MOST_TOKENS: usize = 1 << 23;

/// How a token is chosen: the most likely ones are left by `top_k`, of those the ones by `top_p`, of those the ones by
/// `min_p`, all at temperature 1; of what is left one is drawn by its weight at `temperature`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Draw {
    /// Logits are divided by this; 0 chooses the most likely token, of equals that of the lowest id.
    pub temperature: f32,
    /// Only so many tokens are left; 0 leaves all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability are left; 1 or 0 leaves all.
    pub top_p: f32,
    /// Only tokens that are this fraction as likely as the most likely one are left; 0 leaves all.
    pub min_p: f32,
    /// What decides, uniformly distributed.
    pub random: u64,
    /// Changes of logits before all else, at most one a token.
    pub adjustments: Vec<Adjustment>,
    /// The only tokens to choose from; all if there are none.
    pub allowed: Option<Arc<TokenSet>>,
}

/// A change of a token's logit: `add` is added, what is positive then is divided by `repetition` and what is not multiplied
/// by it, then `subtract` is subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: u32,
    /// A bias; negative infinity forbids the token.
    pub add: f32,
    /// The repetition penalty.
    pub repetition: f32,
    /// Presence and frequency penalty.
    pub subtract: f32,
}

impl Adjustment {
    /// The logit that comes of `logit`.
    #[must_use]
    pub fn of(&self, logit: f32) -> f32 {
        let logit = logit + self.add;
        let repeated = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        repeated - self.subtract
    }
}

/// The last token that is left, in their order: those with fewer halvings, and those with as many and no larger id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    halvings: u32,
    id: u32,
}

const ALL: Cut = Cut { halvings: u32::MAX, id: u32::MAX };

impl Draw {
    /// Whether tokens are left out of a vocabulary of `vocab_size`.
    #[must_use]
    pub fn cuts(&self, vocab_size: usize) -> bool {
        self.temperature > 0.0 && (self.cuts_by_rank(vocab_size) || self.min_p > 0.0)
    }

    fn cuts_by_rank(&self, vocab_size: usize) -> bool {
        self.by_count(vocab_size) || self.by_mass()
    }

    pub(crate) fn by_count(&self, vocab_size: usize) -> bool {
        self.top_k > 0 && self.top_k < vocab_size
    }

    pub(crate) fn by_mass(&self) -> bool {
        self.top_p > 0.0 && self.top_p < 1.0
    }

    /// Halvings for each unit by which a logit is below the best one, at this temperature.
    pub(crate) fn scale(&self) -> f32 {
        ((LOG2_E / f64::from(self.temperature)) as f32).clamp(0.0, 1e30)
    }

    /// `top_p` in units of 2⁻³².
    pub(crate) fn top_p_units(&self) -> u64 {
        if self.by_mass() { (f64::from(self.top_p) * (1u64 << 32) as f64) as u64 } else { 1 << 32 }
    }

    /// The most halvings that `min_p` leaves.
    pub(crate) fn most_halvings(&self) -> u32 {
        let least = (f64::from(self.min_p) * (1u64 << WEIGHT_BITS) as f64).ceil() as u64;
        // Weights fall with halvings. That of no halvings is a little below one.
        let (mut kept, mut cut) = (0, (MOST_HALVINGS as u32 + 1) << FRACTION_BITS);
        while cut - kept > 1 {
            let middle = kept + (cut - kept) / 2;
            if weight(middle) >= least { kept = middle } else { cut = middle }
        }
        kept
    }

    /// The token that is chosen by `logits`, (vocab_size), which adjustments and forbidden tokens are part of; none is NaN or infinite, but for
    /// negative infinity, which forbids a token. `None` if there is none to choose, or if there are more than
    /// [`MOST_TOKENS`] logits.
    #[must_use]
    pub fn choose(&self, logits: &[f32]) -> Option<u32> {
        let best = largest(logits);
        if best == f32::NEG_INFINITY || logits.len() > MOST_TOKENS {
            return None;
        }
        if self.temperature == 0.0 {
            return logits.iter().position(|logit| *logit == best).map(|id| id as u32);
        }
        let scale = self.scale();
        let cuts = self.cuts(logits.len());
        if cuts && let Some(mut left) = self.left_of_near(logits, best) {
            left.sort_unstable_by_key(|(_, id)| *id);
            let tokens =
                left.iter().map(|(_, id)| (weight(halvings(logits[*id as usize], best, scale)), *id));
            return pick(self.random, tokens);
        }
        let cut = if cuts { self.cut(logits, best) } else { ALL };
        let blocks = || (0..).step_by(BLOCK).zip(logits.chunks(BLOCK));
        let mut sums = vec![];
        if cut == ALL {
            sums.extend(blocks().map(|(_, block)| mass(block, best, scale)));
        } else {
            sums.extend(blocks().map(|(first, block)| left_mass(block, first, best, scale, cut)));
        }
        let mut drawn = high_product(self.random, sums.iter().sum());
        for ((first, block), sum) in blocks().zip(&sums) {
            if drawn < *sum {
                let weights = (first..).zip(block);
                return at(drawn, weights.map(|(id, logit)| (left_weight(*logit, id, best, scale, cut), id)));
            }
            drawn -= sum;
        }
        None
    }

    /// The weights of all tokens, (vocab_size): their shares of the sum are the probabilities with which [`Draw::choose`] takes
    /// them at a temperature above 0. Those that are left out have none.
    #[must_use]
    pub fn weights(&self, logits: &[f32]) -> Vec<u64> {
        let best = largest(logits);
        let cut = if self.cuts(logits.len()) { self.cut(logits, best) } else { ALL };
        (0..).zip(logits).map(|(id, logit)| left_weight(*logit, id, best, self.scale(), cut)).collect()
    }

    /// Halvings and ids of the tokens that are left, if those near the best one tell.
    fn left_of_near(&self, logits: &[f32], best: f32) -> Option<Vec<(u32, u32)>> {
        let mut near = near_tokens(logits, best)?;
        let mut told = false;
        if self.by_count(logits.len()) {
            if self.top_k > near.len() {
                return None;
            }
            near.truncate(self.top_k);
            told = true;
        }
        if self.by_mass() {
            let total = if told {
                near.iter().map(|(halvings, _)| weight(*halvings)).sum()
            } else {
                logits.chunks(BLOCK).map(|block| mass(block, best, LOG2_E as f32)).sum()
            };
            let wanted = part_of(total, self.top_p_units()).max(1);
            let mut sum = 0;
            let last = near.iter().position(|(halvings, _)| {
                sum += weight(*halvings);
                sum >= wanted
            });
            near.truncate(last? + 1);
            told = true;
        }
        let most = if self.min_p > 0.0 { self.most_halvings() } else { u32::MAX };
        near.truncate(near.partition_point(|(halvings, _)| *halvings <= most));
        (told || most < NEAR).then_some(near)
    }

    fn cut(&self, logits: &[f32], best: f32) -> Cut {
        let mut cut = ALL;
        if self.cuts_by_rank(logits.len()) {
            let bins = Bins::of(logits, best);
            let mut total = bins.mass.iter().sum();
            if self.by_count(logits.len()) {
                (cut, total) = bins.find(logits, best, |counts, _| counts >= self.top_k as u64);
            }
            if self.by_mass() {
                let wanted = part_of(total, self.top_p_units()).max(1);
                (cut, _) = bins.find(logits, best, |_, mass| mass >= wanted);
            }
        }
        let most = if self.min_p > 0.0 { self.most_halvings() } else { u32::MAX };
        if most < cut.halvings { Cut { halvings: most, id: u32::MAX } } else { cut }
    }
}

/// Halvings and ids of the tokens that have fewer than [`NEAR`], in their order; `None` if they are many.
fn near_tokens(logits: &[f32], best: f32) -> Option<Vec<(u32, u32)>> {
    // A little lower than needed.
    let bound = best - (NEAR >> FRACTION_BITS) as f32;
    let mut near = vec![];
    for (first, block) in (0..).step_by(64).zip(logits.chunks(64)) {
        if block.iter().fold(false, |any, logit| any | (*logit > bound)) {
            let all = (first..).zip(block).map(|(id, logit)| (halvings(*logit, best, LOG2_E as f32), id));
            near.extend(all.filter(|(halvings, _)| *halvings < NEAR));
            if near.len() > MOST_NEAR {
                return None;
            }
        }
    }
    near.sort_unstable();
    Some(near)
}

/// The token that `random` falls on among tokens with these weights, in the order of ids.
fn pick(random: u64, tokens: impl Iterator<Item = (u64, u32)> + Clone) -> Option<u32> {
    let total = tokens.clone().map(|(weight, _)| weight).sum();
    at(high_product(random, total), tokens)
}

/// The first token with which the sum of weights is above `drawn`.
fn at(mut drawn: u64, mut tokens: impl Iterator<Item = (u64, u32)>) -> Option<u32> {
    let found = tokens.find(|(weight, _)| {
        let here = drawn < *weight;
        drawn = drawn.wrapping_sub(*weight);
        here
    });
    found.map(|(_, id)| id)
}

/// Tokens by halvings at temperature 1.
struct Bins {
    counts: Vec<u32>,
    mass: Vec<u64>,
}

impl Bins {
    fn of(logits: &[f32], best: f32) -> Self {
        let mut bins = Self { counts: vec![0; BINS], mass: vec![0; BINS] };
        let mut halvings = [0; BLOCK];
        let mut weights = [0; BLOCK];
        for block in logits.chunks(BLOCK) {
            weigh(block, best, &mut halvings, &mut weights);
            for (halvings, weight) in halvings.iter().zip(&weights).take(block.len()) {
                let bin = (halvings >> BIN_BITS) as usize % BINS;
                bins.counts[bin] += 1;
                bins.mass[bin] += weight;
            }
        }
        bins
    }

    /// The first token in their order for which it is true of how many come up to it, and of their weights' sum; and that
    /// sum. The last one if it is true of none.
    fn find(&self, logits: &[f32], best: f32, enough: impl Fn(u64, u64) -> bool) -> (Cut, u64) {
        let (mut count, mut mass) = (0, 0);
        for (bin, (own_count, own_mass)) in self.counts.iter().zip(&self.mass).enumerate() {
            if !enough(count + u64::from(*own_count), mass + own_mass) {
                count += u64::from(*own_count);
                mass += own_mass;
                continue;
            }
            for (halvings, id) in tokens_of(logits, best, bin as u32) {
                count += 1;
                mass += weight(halvings);
                if enough(count, mass) {
                    return (Cut { halvings, id }, mass);
                }
            }
        }
        (ALL, mass)
    }
}

/// Halvings and ids of a bin's tokens, in their order.
fn tokens_of(logits: &[f32], best: f32, bin: u32) -> Vec<(u32, u32)> {
    let all = (0..).zip(logits).map(|(id, logit)| (halvings(*logit, best, LOG2_E as f32), id));
    let mut own: Vec<(u32, u32)> = all.filter(|(halvings, _)| halvings >> BIN_BITS == bin).collect();
    own.sort_unstable();
    own
}

/// The largest of `values`.
#[must_use]
pub fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = if *value > *lane { *value } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

#[inline]
fn halvings(logit: f32, best: f32, scale: f32) -> u32 {
    let exact = (best - logit) * scale;
    let bounded = if exact < MOST_HALVINGS { exact } else { MOST_HALVINGS };
    let units = bounded.max(0.0) * (1 << FRACTION_BITS) as f32;
    // SAFETY: from 0 to 62 · 2²⁴, which is below 2³¹; NaN fails the comparison.
    unsafe { units.to_int_unchecked::<i32>() as u32 }
}

/// (ln 2)ᵏ / k! in units of 2⁻³², for k = 1 to 9: 2ᶻ - 1 is the sum over k of these times zᵏ.
const SERIES: [u32; 9] =
    [2_977_044_471, 1_031_764_991, 238_388_331, 41_309_549, 5_726_719, 661_576, 65_509, 5_676, 437];

/// 2⁴⁰ halved so often, below by up to 2⁻²⁷ of it.
#[inline]
fn weight(halvings: u32) -> u64 {
    // 2⁻ᶠ is 2¹⁻ᶠ / 2: a sum of positive terms.
    let z = u64::from(!(halvings << (32 - FRACTION_BITS)));
    let sum = SERIES.iter().rev().fold(0, |sum, term| ((sum * z) >> 32) + u64::from(*term));
    (((1 << 32) | ((sum * z) >> 32)) << (WEIGHT_BITS - 33)) >> (halvings >> FRACTION_BITS)
}

#[inline]
fn left_weight(logit: f32, id: u32, best: f32, scale: f32, cut: Cut) -> u64 {
    let rank = halvings(logit, best, LOG2_E as f32);
    let left = rank < cut.halvings || rank == cut.halvings && id <= cut.id;
    if left { weight(halvings(logit, best, scale)) } else { 0 }
}

/// `value` times so many units of 2⁻³², rounded up.
fn part_of(value: u64, units: u64) -> u64 {
    ((u128::from(value) * u128::from(units) + u128::from(u32::MAX)) >> 32) as u64
}

/// The upper 64 bits of the product.
fn high_product(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// Declares functions with loops that become vector instructions, compiled for AVX2 and AVX-512 too and chosen when they are
/// called.
macro_rules! for_vectors {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {$(
        $(#[$doc])*
        fn $name($($argument: $type),*) $(-> $out)? {
            #[inline(always)]
            fn common($($argument: $type),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) $(-> $out)? {
                common($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $out)? {
                common($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx512dq") && std::arch::is_x86_feature_detected!("avx512vl") {
                // SAFETY: the processor has AVX-512.
                return unsafe { avx512($($argument),*) };
            }

            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has AVX2.
                return unsafe { avx2($($argument),*) };
            }
            common($($argument),*)
        }
    )*};
}

for_vectors! {
    /// The sum of a block's weights.
    fn mass(logits: &[f32], best: f32, scale: f32) -> u64 {
        logits.iter().map(|logit| weight(halvings(*logit, best, scale))).sum()
    }

    /// Of those that are left; ids begin with `first`.
    fn left_mass(logits: &[f32], first: u32, best: f32, scale: f32, cut: Cut) -> u64 {
        (first..).zip(logits).map(|(id, logit)| left_weight(*logit, id, best, scale, cut)).sum()
    }

    /// Halvings and weights of a block at temperature 1.
    fn weigh(logits: &[f32], best: f32, to: &mut [u32; BLOCK], weights: &mut [u64; BLOCK]) {
        for ((logit, to), weight_to) in logits.iter().zip(to).zip(weights) {
            *to = halvings(*logit, best, LOG2_E as f32);
            *weight_to = weight(*to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_series_is_that_of_a_power_of_two() {
        let mut term = (1u64 << 32) as f64;
        for (k, own) in (1..).zip(SERIES) {
            term *= std::f64::consts::LN_2 / f64::from(k);
            assert!((term - f64::from(own) - 0.5).abs() <= 0.501, "{k}: {own}, {term}");
        }
    }

    #[test]
    fn weights_are_powers_of_two_and_fall() {
        let mut before = u64::MAX;
        for halvings in (0..41 << FRACTION_BITS).step_by(4973) {
            let exact = 40.0 - f64::from(halvings) / f64::from(1 << FRACTION_BITS);
            let own = weight(halvings);
            let error = (own as f64 - exact.exp2()).abs();
            assert!(error <= 1.0 + 1e-8 * exact.exp2(), "{halvings}: {own}, not {}", exact.exp2());
            assert!(own <= before);
            before = own;
        }
        for halvings in [1, 7, 40].map(|n| n << FRACTION_BITS) {
            assert!(weight(halvings - 1) >= weight(halvings) && weight(halvings) >= weight(halvings + 1));
        }
        assert_eq!(weight(62 << FRACTION_BITS), 0);
        assert_eq!(halvings(f32::NEG_INFINITY, 3.0, 1.0), 62 << FRACTION_BITS);
    }

    #[test]
    fn the_least_probability_is_a_number_of_halvings() {
        for (min_p, expected) in [(0.5, 1.0), (0.25, 2.0), (0.2, 2.321_928), (1e-6, 19.931_57)] {
            let found =
                f64::from(Draw { min_p, ..Draw::default() }.most_halvings()) / f64::from(1 << FRACTION_BITS);
            assert!((found - expected).abs() < 1e-4, "{min_p}: {found}");
        }
        // The most likely token is always left.
        assert_eq!(Draw { min_p: 1.0, ..Draw::default() }.most_halvings(), 0);
    }

    #[test]
    fn random_numbers_go_through_the_tokens() {
        let logits = [0.0, 1.0, f32::NEG_INFINITY, 1.0, -60.0];
        let draw = |part: f64, how: &Draw| {
            let random = (part * 2.0f64.powi(64)) as u64;
            Draw { random, ..how.clone() }.choose(&logits)
        };
        let plain = Draw { temperature: 1.0, ..Draw::default() };
        // e⁰ of e⁰ + 2e.
        for (part, token) in [(0.0, 0), (0.155, 0), (0.156, 1), (0.577, 1), (0.578, 3), (0.999_999, 3)] {
            assert_eq!(draw(part, &plain), Some(token), "{part}");
        }
        let one = Draw { top_k: 1, ..plain.clone() };
        let two = Draw { top_p: 0.5, ..plain.clone() };
        let likely = Draw { min_p: 0.5, ..plain.clone() };
        let greedy = Draw { temperature: 0.0, ..plain };
        for (part, how, token) in
            [(0.99, &one, 1), (0.49, &two, 1), (0.51, &two, 3), (0.01, &likely, 1), (0.99, &greedy, 1)]
        {
            assert_eq!(draw(part, how), Some(token), "{how:?}");
        }
        assert_eq!(Draw::default().choose(&[f32::NEG_INFINITY; 3]), None);
        // No temperature is undefined behaviour.
        for temperature in [-1.0, -0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE] {
            let _ = Draw { temperature, top_p: 0.5, ..Draw::default() }.choose(&logits);
        }
    }
}
