//! [`Decoding`]: from logits to text for one answer: sampling, stop texts, limits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use moeflux_compute::TokenSet;
use moeflux_compute::draw::Draw;

use crate::generation::Finish;
use crate::pictures::tokens::is_picture;
use crate::sampler::{Sampler, SamplerOptions};
use crate::tokenizer::{DecodeStream, Tokenizer};
use crate::{Error, Result};

/// Limits which tokens may come next, as a grammar does.
pub trait Constraint: Send {
    /// Adds the tokens that may come next to `tokens`, which has none.
    ///
    /// # Errors
    /// [`Error::Constraint`] if it cannot tell.
    fn allow(&mut self, tokens: &mut TokenSet) -> Result<()>;

    /// Notes that `token` was chosen; says whether nothing more may follow.
    ///
    /// # Errors
    /// [`Error::Constraint`] if the token was not allowed.
    fn accept(&mut self, token: u32) -> Result<bool>;

    /// Another one that has accepted the same tokens.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// How an answer is generated.
#[derive(Debug, Clone, Default)]
pub struct DecodingOptions {
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// For every token its log-probability and those of so many most likely ones.
    pub logprobs: Option<usize>,
    /// Special tokens that are part of the text, as those are that mark function calls; others have no text.
    pub visible: Vec<u32>,
}

/// A token with its log-probability by the model, before bias, penalties and temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Log-probabilities where one token was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: Logprob,
    /// The most likely ones, the likeliest first.
    pub top: Vec<Logprob>,
}

/// One step of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// Text that is certain by now; a token's text may come later than the token.
    pub text: String,
    /// The token, unless it was the one that ends texts.
    pub token: Option<u32>,
    /// If they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Set when the answer is complete.
    pub finish: Option<Finish>,
}

/// One answer while it is being generated.
pub struct Decoding<'t> {
    tokenizer: &'t Tokenizer,
    options: DecodingOptions,
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint>>,
    text: Option<DecodeStream<'t>>,
    /// Text that may be the beginning of a stop text.
    held: String,
    /// The stop text that was found.
    stopped_by: Option<String>,
    tokens: Vec<u32>,
    /// Scratch, (vocab_size).
    masked: Vec<f32>,
    start: Instant,
    first_token: Duration,
}

impl std::fmt::Debug for Decoding<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decoding({} of {} tokens)", self.tokens.len(), self.options.max_tokens)
    }
}

impl<'t> Decoding<'t> {
    /// An answer that follows `prompt`.
    ///
    /// # Errors
    /// [`Error::Option`] for sampler options without meaning, [`Error::UnknownToken`] for ids that are none.
    pub fn new(
        tokenizer: &'t Tokenizer,
        prompt: &[u32],
        options: DecodingOptions,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Self> {
        let mut sampler = Sampler::new(options.sampler.clone(), tokenizer.vocab_size())?;
        // Pictures are no text.
        let words: Vec<u32> = prompt.iter().copied().filter(|token| !is_picture(*token)).collect();
        words.iter().for_each(|token| sampler.accept(*token));
        Ok(Self {
            text: Some(tokenizer.decode_stream_after(&words, true)?),
            tokenizer,
            options,
            sampler,
            constraint,
            held: String::new(),
            stopped_by: None,
            tokens: vec![],
            masked: vec![],
            start: Instant::now(),
            first_token: Duration::ZERO,
        })
    }

    /// Chooses a token by `logits`, (at least the tokenizer's vocabulary). Not to be called after a finish.
    ///
    /// # Errors
    /// [`Error::Logits`] if no token can be chosen, or the constraint's.
    pub fn next(&mut self, logits: &[f32]) -> Result<Piece> {
        if self.tokens.len() >= self.options.max_tokens {
            return self.finish(Piece::default(), Finish::MaxTokens);
        }
        // Padding rows of the vocabulary have no text.
        let vocab_size = self.tokenizer.vocab_size();
        let logits = logits.get(..vocab_size).ok_or_else(|| Error::Logits {
            expected: format!("one for each of {vocab_size} tokens"),
            got: logits.len().to_string(),
        })?;
        let token = match &mut self.constraint {
            None => self.sampler.sample(logits)?,
            Some(constraint) => {
                self.masked.clear();
                self.masked.extend_from_slice(logits);
                let mut allowed = TokenSet::none(vocab_size);
                constraint.allow(&mut allowed)?;
                allowed.forbid_others(&mut self.masked);
                self.sampler.sample(&self.masked)?
            }
        };
        let wanted = self.options.logprobs.filter(|_| !self.tokenizer.eos_ids().contains(&token));
        self.take(token, wanted.map(|count| logprobs(logits, token, count)))
    }

    /// Whether the next token can be chosen where the logits are, rather than of all of them here.
    pub(crate) fn is_drawn(&self) -> bool {
        self.options.logprobs.is_none() && self.tokens.len() < self.options.max_tokens
    }

    /// Whether it takes time to tell how the next token is to be chosen.
    pub(crate) fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// How the next token is to be chosen where the logits are; `None` if that is to be done here, where a fault of the
    /// constraint comes up again.
    pub(crate) fn draw(&mut self) -> Option<Draw> {
        if !self.is_drawn() {
            return None;
        }
        draw(&self.sampler, self.constraint.as_mut(), self.tokenizer.vocab_size())
    }

    /// As [`Decoding::draw`], now and after each of the tokens that were guessed, if those up to there are right. `None` too where
    /// the constraint lets nothing follow.
    pub(crate) fn draws(&self, guessed: &[u32]) -> Vec<Option<Draw>> {
        let (mut sampler, vocab_size) = (self.sampler.fork(), self.tokenizer.vocab_size());
        let mut constraint = self.constraint.as_ref().map(|constraint| constraint.fork());
        let mut draws = vec![draw(&sampler, constraint.as_mut(), vocab_size)];
        for token in guessed {
            sampler.drawn();
            sampler.accept(*token);
            if constraint.as_mut().is_some_and(|constraint| !matches!(constraint.accept(*token), Ok(false))) {
                break;
            }
            draws.push(draw(&sampler, constraint.as_mut(), vocab_size));
        }
        draws.resize(guessed.len() + 1, None);
        draws
    }

    /// As [`Decoding::next`], with the token that [`Decoding::draw`] chose.
    pub(crate) fn next_drawn(&mut self, token: u32) -> Result<Piece> {
        self.sampler.drawn();
        self.take(token, None)
    }

    /// Goes on with a token that was chosen.
    fn take(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Result<Piece> {
        if self.tokens.is_empty() {
            self.first_token = self.start.elapsed();
        }
        if self.tokenizer.eos_ids().contains(&token) {
            return self.finish(Piece::default(), Finish::EndOfText);
        }
        self.tokens.push(token);
        self.sampler.accept(token);
        let complete = match &mut self.constraint {
            None => false,
            Some(constraint) => constraint.accept(token)?,
        };
        let text = self.text_of(token)?;
        let (text, stopped) = self.release(&text);
        let piece = Piece { text, token: Some(token), logprobs, finish: None };
        if stopped {
            return Ok(Piece { finish: Some(Finish::Stopped), ..piece });
        }
        if complete {
            return self.finish(piece, Finish::EndOfText);
        }
        if self.tokens.len() >= self.options.max_tokens {
            self.finish(piece, Finish::MaxTokens)
        } else {
            Ok(piece)
        }
    }

    /// The text that `token` completes.
    fn text_of(&mut self, token: u32) -> Result<String> {
        if !self.options.visible.contains(&token) {
            return self.text.as_mut().map_or(Ok(String::new()), |stream| stream.push(token));
        }
        let mut text = self.text.take().map_or(Ok(String::new()), DecodeStream::finish)?;
        text.push_str(&self.tokenizer.id_to_token(token).unwrap_or_default());
        self.text = Some(self.tokenizer.decode_stream_after(&[token], true)?);
        Ok(text)
    }

    /// Ends the answer from outside; what was held back comes out.
    ///
    /// # Errors
    /// If the last tokens cannot be decoded.
    pub fn finish(&mut self, piece: Piece, finish: Finish) -> Result<Piece> {
        let tail = self.text.take().map_or(Ok(String::new()), DecodeStream::finish)?;
        let (more, stopped) = self.release(&tail);
        let mut text = piece.text + &more;
        let finish = if stopped { Finish::Stopped } else { finish };
        if !stopped {
            text.push_str(&std::mem::take(&mut self.held));
        }
        Ok(Piece { text, finish: Some(finish), ..piece })
    }

    /// Adds `text` to what is held, and gives out what cannot belong to a stop text; says whether one was found.
    fn release(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let found = self.options.stop.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len()))) {
            self.stopped_by = Some(stop.clone());
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.options.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// Tokens that can be chosen.
    pub(crate) fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// Tokens that the answer may still get.
    pub(crate) fn tokens_left(&self) -> usize {
        self.options.max_tokens.saturating_sub(self.tokens.len())
    }

    /// Tokens generated, without the one that ends texts.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The stop text that ended the answer.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stopped_by.as_deref()
    }

    /// From the beginning to the first token.
    pub fn first_token(&self) -> Duration {
        self.first_token
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.sampler.seed()
    }
}

/// How a token is to be chosen of `vocab_size`; `None` if the constraint cannot tell.
fn draw(sampler: &Sampler, constraint: Option<&mut Box<dyn Constraint>>, vocab_size: usize) -> Option<Draw> {
    let mut draw = sampler.draw();
    if let Some(constraint) = constraint {
        let mut allowed = TokenSet::none(vocab_size);
        constraint.allow(&mut allowed).ok()?;
        draw.allowed = Some(Arc::new(allowed));
    }
    Some(draw)
}

/// Length of the longest end of `text` that is a beginning of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest).rev().find(|len| text.as_bytes().ends_with(&stop.as_bytes()[..*len])).unwrap_or(0)
}

fn logprobs(logits: &[f32], token: u32, count: usize) -> TokenLogprobs {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
    let normaliser = best + sum.ln() as f32;
    let of = |token: u32| Logprob { token, logprob: logits[token as usize] - normaliser };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let rank = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(ids.len());
    if count < ids.len() {
        ids.select_nth_unstable_by(count, rank);
        ids.truncate(count);
    }
    ids.sort_unstable_by(rank);
    TokenLogprobs { chosen: of(token), top: ids.into_iter().map(of).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps() {
        for (text, stop, expected) in [
            ("ab", "abc", 2),
            ("xab", "abc", 2),
            ("abc", "abc", 0),
            ("", "abc", 0),
            ("aa", "aaa", 2),
            ("é", "é!", 2),
        ] {
            assert_eq!(overlap(text, stop), expected, "{text:?} {stop:?}");
        }
    }

    #[test]
    fn probabilities_sum_to_one() {
        let found = logprobs(&[1.0, 3.0, 2.0, -50.0], 2, 3);
        assert_eq!(found.top.iter().map(|l| l.token).collect::<Vec<_>>(), [1, 2, 0]);
        let sum: f32 = found.top.iter().map(|l| l.logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(found.chosen, found.top[1]);
    }
}
