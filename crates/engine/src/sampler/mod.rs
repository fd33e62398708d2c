//! Choosing the next token from logits.
//!
//! The steps and their order are llama.cpp's: logit bias, then penalties, then top-k, top-p and min-p on the untempered
//! distribution, then temperature, then the draw. (vLLM and transformers apply temperature before truncating; with a
//! high temperature that lets more unlikely tokens through.)
//!
//! The same options, logits and seed give the same tokens on every platform and backend: see [`moeflux_compute::draw`].

pub(crate) mod random;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};

use moeflux_compute::draw::{Adjustment, Draw, MOST_TOKENS, largest};
use random::{Random, entropy};

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

/// Those options that are numbers with a fraction.
pub const SAMPLER_NUMBERS: [&str; 6] =
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];

impl SamplerOptions {
    /// As answers to people are sampled unless they say otherwise.
    pub fn of_chats() -> Self {
        Self { temperature: 0.7, top_p: 0.95, ..Self::default() }
    }

    /// The option of this name, if it is one of [`SAMPLER_NUMBERS`].
    pub fn number_mut(&mut self, name: &str) -> Option<&mut f32> {
        Some(match name {
            "temperature" => &mut self.temperature,
            "top_p" => &mut self.top_p,
            "min_p" => &mut self.min_p,
            "repetition_penalty" => &mut self.repetition_penalty,
            "presence_penalty" => &mut self.presence_penalty,
            "frequency_penalty" => &mut self.frequency_penalty,
            _ => return None,
        })
    }

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
    /// Scratch, (vocab_size): logits with bias and penalties.
    adjusted: Vec<f32>,
}

impl Sampler {
    /// A sampler for logits over `vocab_size` tokens.
    pub fn new(options: SamplerOptions, vocab_size: usize) -> Result<Self> {
        options.validate(vocab_size)?;
        if vocab_size > MOST_TOKENS {
            let expected = format!("a vocabulary of at most {MOST_TOKENS} tokens");
            return Err(Error::Logits { expected, got: vocab_size.to_string() });
        }
        let seed = options.seed.unwrap_or_else(entropy);
        Ok(Self {
            options,
            vocab_size,
            seed,
            random: Random::new(seed),
            recent: VecDeque::new(),
            counts: HashMap::new(),
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
        let draw = self.draw();
        let mut adjusted = std::mem::take(&mut self.adjusted);
        let logits = if draw.adjustments.is_empty() {
            logits
        } else {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            for change in &draw.adjustments {
                let logit = &mut adjusted[change.token as usize];
                *logit = change.of(*logit);
            }
            &adjusted
        };
        let chosen = choose(&draw, logits);
        self.adjusted = adjusted;
        if chosen.is_ok() {
            self.drawn();
        }
        chosen
    }

    /// Another one that has chosen and noted the same tokens.
    pub(crate) fn fork(&self) -> Self {
        let Self { vocab_size, seed, .. } = *self;
        let (options, random) = (self.options.clone(), self.random.clone());
        let (recent, counts) = (self.recent.clone(), self.counts.clone());
        Self { options, vocab_size, seed, random, recent, counts, adjusted: vec![] }
    }

    /// How the next token is to be chosen.
    pub(crate) fn draw(&self) -> Draw {
        let SamplerOptions { temperature, top_k, top_p, min_p, .. } = self.options;
        let mut random = self.random.clone();
        let adjustments = self.adjustments();
        Draw { temperature, top_k, top_p, min_p, random: random.next(), adjustments, allowed: None }
    }

    /// Notes that a token was chosen by [`draw`](Self::draw).
    pub(crate) fn drawn(&mut self) {
        if self.options.temperature > 0.0 {
            self.random.next();
        }
    }

    /// What bias and penalties change, by token.
    fn adjustments(&self) -> Vec<Adjustment> {
        let SamplerOptions { repetition_penalty, presence_penalty, frequency_penalty, .. } = self.options;
        let biases = self.options.logit_bias.iter();
        let biased = |(token, add): (&u32, &f32)| {
            let nothing = Adjustment { token: *token, add: *add, repetition: 1.0, subtract: 0.0 };
            (*token, nothing)
        };
        let mut all: BTreeMap<u32, Adjustment> = biases.map(biased).collect();
        for (&token, &count) in self.counts.iter().filter(|(token, _)| (**token as usize) < self.vocab_size) {
            let nothing = Adjustment { token, add: 0.0, repetition: 1.0, subtract: 0.0 };
            let own = all.entry(token).or_insert(nothing);
            own.repetition = repetition_penalty;
            // A count is at most the window; beyond 2^24 it would be rounded.
            own.subtract = presence_penalty + frequency_penalty * count as f32;
        }
        all.into_values().collect()
    }
}

/// What `draw` chooses of logits that its adjustments are part of.
fn choose(draw: &Draw, logits: &[f32]) -> Result<u32> {
    if largest(logits) == f32::INFINITY {
        let id = logits.iter().position(|logit| *logit == f32::INFINITY).unwrap_or_default();
        return Err(Error::Logits {
            expected: "numbers that bias and penalties keep finite".to_owned(),
            got: format!("infinity for token {id}"),
        });
    }
    draw.choose(logits).ok_or_else(|| Error::Logits {
        expected: "at least one token above negative infinity".to_owned(),
        got: "none after logit bias".to_owned(),
    })
}
