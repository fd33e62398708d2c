//! Choosing the next token from logits.
//!
//! The steps and their order are llama.cpp's: logit bias, then penalties, then top-k, top-p and min-p on the untempered
//! distribution, then temperature, then the draw. (vLLM and transformers apply temperature before truncating; with a
//! high temperature that lets more unlikely tokens through.)
//!
//! The same options, logits and seed give the same tokens on every platform: the random numbers and the exponential
//! are computed here from operations that IEEE 754 defines exactly, and ties go to the lowest id.

pub(crate) mod random;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, VecDeque};

use moeflux_compute::backend::Candidates;
use random::{Random, entropy, exp};

use crate::{Error, Result};

/// How the next token is chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerOptions {
    /// Logits are divided by this; 0 chooses the most likely token.
    pub temperature: f32,
    /// Only so many of the most likely tokens are left; 0 leaves all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability are left; 1 leaves all.
    pub top_p: f32,
    /// Only tokens that are this fraction as likely as the most likely one are left; 0 leaves all.
    pub min_p: f32,
    /// Positive logits of recent tokens are divided by this, negative ones multiplied; 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of recent tokens.
    pub presence_penalty: f32,
    /// Subtracted from the logits of recent tokens, for each time they occur.
    pub frequency_penalty: f32,
    /// Tokens that count as recent for the penalties, prompt included.
    pub penalty_window: usize,
    /// Added to the logits of these tokens; negative infinity forbids one.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Makes the choice repeatable; without it every sampler draws its own.
    pub seed: Option<u64>,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 64,
            logit_bias: BTreeMap::new(),
            seed: None,
        }
    }
}

impl SamplerOptions {
    /// Refuses values without meaning, for a vocabulary of `vocab_size` tokens.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        let check = |option, value: f32, ok: bool, expected: &str| {
            if ok {
                Ok(())
            } else {
                Err(Error::Option { option, expected: expected.to_owned(), got: value.to_string() })
            }
        };
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        check("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "a number from 0")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "a number above 0 and up to 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1")?;
        check(
            "repetition_penalty",
            repetition_penalty,
            repetition_penalty.is_finite() && repetition_penalty > 0.0,
            "a number above 0",
        )?;
        check("presence_penalty", self.presence_penalty, self.presence_penalty.is_finite(), "a number")?;
        check("frequency_penalty", self.frequency_penalty, self.frequency_penalty.is_finite(), "a number")?;
        for (&token, &bias) in &self.logit_bias {
            check("logit_bias", bias, bias < f32::INFINITY, "a number or negative infinity")?;
            if token as usize >= vocab_size {
                return Err(Error::Option {
                    option: "logit_bias",
                    expected: format!("token ids below {vocab_size}"),
                    got: token.to_string(),
                });
            }
        }
        Ok(())
    }
}

/// A token that may be chosen.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
}

impl Candidate {
    /// The more likely first, then the lower id.
    fn rank(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// Chooses the tokens of one sequence.
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    vocab_size: usize,
    seed: u64,
    random: Random,
    /// The last tokens, at most `penalty_window`.
    recent: VecDeque<u32>,
    /// How often each of `recent` occurs.
    counts: HashMap<u32, u32>,
    /// Scratch, (vocab_size).
    candidates: Vec<Candidate>,
    /// Scratch, (vocab_size), f64: likelihoods of `candidates`, or of all tokens.
    weights: Vec<f64>,
    /// Scratch, (vocab_size): logits with bias and penalties.
    adjusted: Vec<f32>,
}

impl Sampler {
    /// A sampler for logits over `vocab_size` tokens.
    pub fn new(options: SamplerOptions, vocab_size: usize) -> Result<Self> {
        options.validate(vocab_size)?;
        let seed = options.seed.unwrap_or_else(entropy);
        Ok(Self {
            options,
            vocab_size,
            seed,
            random: Random::new(seed),
            recent: VecDeque::new(),
            counts: HashMap::new(),
            candidates: Vec::new(),
            weights: Vec::new(),
            adjusted: Vec::new(),
        })
    }

    /// The seed in use, which repeats the choices when given as an option.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Notes that `token`, of the prompt or sampled, is now part of the sequence, for penalties.
    pub fn accept(&mut self, token: u32) {
        let options = &self.options;
        let penalises = options.repetition_penalty != 1.0
            || options.presence_penalty != 0.0
            || options.frequency_penalty != 0.0;
        if !penalises || options.penalty_window == 0 {
            return;
        }
        if self.recent.len() == options.penalty_window
            && let Some(oldest) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.recent.push_back(token);
        *self.counts.entry(token).or_default() += 1;
    }

    /// Chooses from `logits`, (vocab_size), f32. The choice is not yet part of the sequence: see
    /// [`accept`](Self::accept).
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        if logits.len() != self.vocab_size {
            return Err(Error::Logits {
                expected: format!("{} values, one per token", self.vocab_size),
                got: format!("{} values", logits.len()),
            });
        }
        // Nothing but loops over all logits that become vector instructions, unless something is found.
        if logits.iter().fold(false, |bad, logit| bad | logit.is_nan() | (*logit == f32::INFINITY)) {
            let bad = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
            let id = bad.unwrap_or_default();
            return Err(Error::Logits {
                expected: "numbers or negative infinity".to_owned(),
                got: format!("{} for token {id}", logits[id]),
            });
        }
        if self.options.logit_bias.is_empty() && self.counts.is_empty() {
            return self.choose(logits);
        }
        let mut adjusted = std::mem::take(&mut self.adjusted);
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        self.bias_and_penalise(&mut adjusted);
        let chosen = self.choose(&adjusted);
        self.adjusted = adjusted;
        chosen
    }

    /// The choice that [`sample`](Self::sample) would make of all logits, by the candidates alone; `None` if those do not
    /// tell, and then nothing has changed.
    pub(crate) fn sample_candidates(&mut self, found: &Candidates) -> Option<u32> {
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        if !self.options.logit_bias.is_empty() || !self.counts.is_empty() || found.tokens.is_empty() {
            return None;
        }
        let best = found.maximum;
        if temperature == 0.0 {
            return found.tokens.iter().filter(|(_, logit)| *logit == best).map(|(id, _)| *id).min();
        }
        // All others are below; each step leaves what it would leave of all tokens, or is not told by the candidates.
        let all = found.tokens.len() >= self.vocab_size;
        let mut complete = all;
        self.candidates.clear();
        self.candidates.extend(found.tokens.iter().map(|&(id, logit)| Candidate { logit, id }));
        self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        if top_k > 0 && top_k < self.vocab_size {
            if top_k > self.candidates.len() {
                return None;
            }
            self.candidates.sort_unstable_by(Candidate::rank);
            self.candidates.truncate(top_k);
            complete = true;
        }
        if top_p < 1.0 {
            weigh(&self.candidates, best, 1.0, &mut self.weights);
            let total = if complete { self.weights.iter().sum() } else { f64::from(found.total) };
            if !complete {
                // The sum of all is known to about this part: what ends nearer to the bound is not told.
                const UNSURE: f64 = 1e-5;
                self.candidates.sort_unstable_by(Candidate::rank);
                let mut sum = 0.0;
                let end = self.candidates.iter().position(|candidate| {
                    sum += weight(candidate.logit, best, 1.0) / total;
                    sum >= f64::from(top_p) - UNSURE
                })?;
                if sum < f64::from(top_p) + UNSURE {
                    return None;
                }
                self.candidates.truncate(end + 1);
                complete = true;
            } else {
                keep_top_p(&mut self.candidates, best, f64::from(top_p), total);
            }
        }
        if min_p > 0.0 {
            let may = |logit: f32| weight(logit, best, 1.0) >= f64::from(min_p);
            if !complete && may(found.least) {
                return None;
            }
            self.candidates.retain(|candidate| may(candidate.logit));
            complete = true;
        }
        if !complete {
            return None;
        }
        weigh(&self.candidates, best, f64::from(temperature), &mut self.weights);
        let index = self.draw(|_| true);
        Some(self.candidates[index].id)
    }

    /// Chooses from logits that bias and penalties are part of.
    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let best = largest(logits);
        if best == f32::NEG_INFINITY {
            return Err(Error::Logits {
                expected: "at least one token above negative infinity".to_owned(),
                got: "none after logit bias".to_owned(),
            });
        }
        let id_of_best = || logits.iter().position(|logit| *logit == best).unwrap_or_default() as u32;
        if best == f32::INFINITY {
            return Err(Error::Logits {
                expected: "numbers that bias and penalties keep finite".to_owned(),
                got: format!("infinity for token {}", id_of_best()),
            });
        }
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        if temperature == 0.0 {
            return Ok(id_of_best());
        }
        let temperature = f64::from(temperature);
        if (top_k == 0 || top_k >= logits.len()) && top_p >= 1.0 && min_p <= 0.0 {
            self.weights.clear();
            self.weights.extend(logits.iter().map(|logit| weight(*logit, best, temperature)));
            return Ok(self.draw(|index| logits[index] > f32::NEG_INFINITY) as u32);
        }
        self.candidates.clear();
        let candidates = (0..).zip(logits).map(|(id, &logit)| Candidate { logit, id });
        self.candidates.extend(candidates.filter(|candidate| candidate.logit > f32::NEG_INFINITY));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, Candidate::rank);
            self.candidates.truncate(top_k);
            self.candidates.sort_unstable_by(Candidate::rank);
        }
        if top_p < 1.0 {
            weigh(&self.candidates, best, 1.0, &mut self.weights);
            let total = self.weights.iter().sum();
            keep_top_p(&mut self.candidates, best, f64::from(top_p), total);
        }
        if min_p > 0.0 {
            // Most fall to a bound that leaves room for how platforms round a logarithm.
            let bound = best + min_p.ln() * 1.001 - 0.001;
            let min_p = f64::from(min_p);
            self.candidates
                .retain(|candidate| candidate.logit >= bound && weight(candidate.logit, best, 1.0) >= min_p);
        }
        weigh(&self.candidates, best, temperature, &mut self.weights);
        let index = self.draw(|_| true);
        Ok(self.candidates[index].id)
    }

    fn bias_and_penalise(&self, logits: &mut [f32]) {
        for (&id, &bias) in &self.options.logit_bias {
            logits[id as usize] += bias;
        }
        for (&id, &count) in &self.counts {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 {
                *logit / self.options.repetition_penalty
            } else {
                *logit * self.options.repetition_penalty
            };
            // A count is at most the window; beyond 2^24 it would be rounded.
            *logit -= self.options.presence_penalty + self.options.frequency_penalty * count as f32;
        }
    }

    /// Draws an index by `weights`; `may` says of one whether it can be chosen.
    fn draw(&mut self, may: impl Fn(usize) -> bool) -> usize {
        /// Weights that are summed apart, so that most of them are looked at once only.
        const BLOCK: usize = 64;
        let sums = self.weights.chunks(BLOCK).map(sum_of);
        let mut left = self.random.next_unit() * sums.clone().sum::<f64>();
        let mut chosen = 0;
        for (block, (sum, weights)) in sums.zip(self.weights.chunks(BLOCK)).enumerate() {
            if left >= sum && (block + 1) * BLOCK < self.weights.len() {
                left -= sum;
                continue;
            }
            for (index, weight) in (block * BLOCK..).zip(weights) {
                if may(index) {
                    chosen = index;
                    left -= weight;
                    if left < 0.0 {
                        return index;
                    }
                }
            }
        }
        // Rounding may leave a little beyond the last one.
        if may(chosen) {
            chosen
        } else {
            (0..self.weights.len()).rev().find(|index| may(*index)).unwrap_or_default()
        }
    }
}

/// The largest of `values`.
fn largest(values: &[f32]) -> f32 {
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

/// The sum of `values`, in eight parts.
fn sum_of(values: &[f64]) -> f64 {
    let mut lanes = [0.0; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value);
    }
    lanes.iter().sum::<f64>() + rest
}

/// The likelihood of a token relative to that of logit `best`.
fn weight(logit: f32, best: f32, temperature: f64) -> f64 {
    exp((f64::from(logit) - f64::from(best)) / temperature)
}

/// The likelihoods of all candidates.
fn weigh(candidates: &[Candidate], best: f32, temperature: f64, weights: &mut Vec<f64>) {
    weights.clear();
    weights.extend(candidates.iter().map(|candidate| weight(candidate.logit, best, temperature)));
}

/// Leaves the most likely candidates up to the one with which their probability reaches `top_p`, sorted.
/// `total` is the sum of their likelihoods.
fn keep_top_p(candidates: &mut Vec<Candidate>, best: f32, top_p: f64, total: f64) {
    let mut sum = 0.0;
    let mut sorted = 0;
    // Few candidates are needed as a rule: sort more and more of them.
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let step = (sorted + 128).min(rest.len());
        if step < rest.len() {
            rest.select_nth_unstable_by(step, Candidate::rank);
        }
        rest[..step].sort_unstable_by(Candidate::rank);
        for index in sorted..sorted + step {
            sum += weight(candidates[index].logit, best, 1.0) / total;
            if sum >= top_p {
                candidates.truncate(index + 1);
                return;
            }
        }
        sorted += step;
    }
}
