//! Speculative decoding: tokens are guessed from the sequence's own context ([`ngram`]), evaluated in one pass with the token
//! that is next anyway, and kept as far as the model chooses the same ones.
//!
//! Every row of that pass goes through the same [`Decoding`](crate::decoding::Decoding) as the logits of a single step would, in
//! the same order and with the same random numbers; so sampling, penalties, constraints, stop texts and log-probabilities need
//! no rule of their own, and an answer is the same, token for token, with and without. The price is that only backends whose rows
//! have the bits of single steps can speculate ([`Executable::batch_invariant`]): the CPU, not GPUs.
//!
//! What was evaluated for nothing is undone: keys and values are cut off; of models with recurrent state the state before is
//! taken up again and the tokens that were right are evaluated once more.
//!
//! [`Executable::batch_invariant`]: moeflux_compute::backend::Executable::batch_invariant

mod account;
mod ngram;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use account::DraftAccount;
use moeflux_compute::backend::Batch;

use crate::engine::{Engine, Outputs};
use crate::session::{Session, Slot};
use crate::{Error, Result};

/// When tokens are guessed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SpecType {
    /// Never.
    #[default]
    Off,
    /// Whenever the context has a match for its last tokens.
    Ngram,
    /// As `Ngram`, but only where it is measured to be faster, and where the backend can.
    Auto,
}

/// What can be written for a [`SpecType`].
const SPEC_TYPES: [(&str, SpecType); 3] =
    [("off", SpecType::Off), ("ngram", SpecType::Ngram), ("auto", SpecType::Auto)];

impl fmt::Display for SpecType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = SPEC_TYPES.iter().find(|(_, kind)| kind == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

impl FromStr for SpecType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = SPEC_TYPES.iter().find(|(name, _)| *name == text);
        known.map(|(_, kind)| *kind).ok_or_else(|| Error::Option {
            option: "spec_type",
            expected: "off, ngram or auto".to_owned(),
            got: text.to_owned(),
        })
    }
}

/// Most tokens of a draft.
pub const MOST_DRAFTED: usize = 16;

/// What of an engine guesses tokens.
#[derive(Debug)]
pub(crate) struct Speculator {
    kind: SpecType,
    draft_max: usize,
    account: DraftAccount,
    /// A draft that is not verified but compared with what single steps choose: acceptance is measured without a cost.
    watched: Option<Watched>,
    /// Matched length of the draft that is being verified.
    matched: usize,
}

#[derive(Debug)]
struct Watched {
    matched: usize,
    tokens: Vec<u32>,
    /// Position of the first of them.
    start: usize,
    /// How many were right so far.
    right: usize,
}

impl Speculator {
    /// For an engine whose batches have the bits of single steps, or not.
    ///
    /// # Errors
    /// [`Error::Option`] if tokens cannot be guessed as asked for.
    pub(crate) fn new(kind: SpecType, draft_max: usize, batch_invariant: bool) -> Result<Self> {
        if draft_max == 0 || draft_max > MOST_DRAFTED {
            return Err(Error::Option {
                option: "draft_max",
                expected: format!("a number from 1 to {MOST_DRAFTED}"),
                got: draft_max.to_string(),
            });
        }
        if kind == SpecType::Ngram && !batch_invariant {
            return Err(Error::Option {
                option: "spec_type",
                expected: "auto or off: on this backend several rows do not have the bits of single steps"
                    .to_owned(),
                got: kind.to_string(),
            });
        }
        let kind = if batch_invariant { kind } else { SpecType::Off };
        Ok(Self { kind, draft_max, account: DraftAccount::default(), watched: None, matched: 0 })
    }

    /// Tokens to verify after `next`, at most `most`.
    fn draft(&mut self, history: &[u32], next: u32, most: usize) -> Vec<u32> {
        if self.kind == SpecType::Off {
            return vec![];
        }
        self.watch(history.len(), next);
        let Some((matched, mut tokens)) = ngram::draft(history, next, self.draft_max) else { return vec![] };
        let count = match self.kind {
            SpecType::Ngram => tokens.len().min(most),
            _ => self.account.count(matched, tokens.len().min(most)),
        };
        if count > 0 {
            self.watched = None;
            self.matched = matched;
        } else if self.watched.is_none() && self.kind == SpecType::Auto {
            let start = history.len() + 1;
            self.watched = Some(Watched { matched, tokens: tokens.clone(), start, right: 0 });
        }
        tokens.truncate(count);
        tokens
    }

    /// Compares the token at `position` with the draft that is watched.
    fn watch(&mut self, position: usize, token: u32) {
        let Some(watched) = &mut self.watched else { return };
        if watched.start + watched.right != position {
            self.watched = None;
            return;
        }
        let is_right = watched.tokens[watched.right] == token;
        watched.right += usize::from(is_right);
        if !is_right || watched.right == watched.tokens.len() {
            self.account.compared(watched.matched, watched.right, !is_right);
            self.watched = None;
        }
    }
}

impl Engine {
    /// When tokens are guessed: what was asked for, or [`SpecType::Off`] where the backend cannot.
    pub fn spec_type(&self) -> SpecType {
        self.speculator.kind
    }

    /// Tokens that may follow `history` and `next`, at most `most`, and are worth verifying; often none.
    pub(crate) fn draft(&mut self, history: &[u32], next: u32, most: usize) -> Vec<u32> {
        let most = most.min(self.chunk().saturating_sub(1));
        self.speculator.draft(history, next, most)
    }

    /// Notes what a step took that evaluated one token of one sequence.
    pub(crate) fn note_single_step(&mut self, time: Duration) {
        self.speculator.account.single(time.as_secs_f64());
    }

    /// Appends `next` and `draft` to `session` in one pass, and gives `choose` the logits after each of them, (vocab_size), as long
    /// as the token it chooses is the one drafted; it returns `None` at the end of an answer. The session then holds the tokens
    /// after which `choose` was called.
    ///
    /// # Errors
    /// As [`Engine::eval`]; the session is as it was before the call. Those of `choose`; the session then holds the tokens after
    /// which it was called.
    pub(crate) fn verify(
        &mut self,
        session: &mut Session,
        next: u32,
        draft: &[u32],
        mut choose: impl FnMut(&[f32]) -> Result<Option<u32>>,
    ) -> Result<()> {
        let (from, state) = (session.position(), session.state().cloned());
        let mut tokens = vec![next];
        tokens.extend_from_slice(draft);
        let start = Instant::now();
        let logits = match self.eval(session, &tokens, Outputs::All) {
            Ok(logits) => logits,
            // What is wrong with a token that may not come is no error.
            Err(_) => {
                tokens.truncate(1);
                self.eval(session, &tokens, Outputs::Last)?
            }
        };
        let mut time = start.elapsed();
        let drafted = tokens.len() - 1;

        let (mut kept, mut differs, mut outcome) = (0, false, Ok(()));
        for (row, logits) in logits.chunks_exact(self.model().graph.vocab_size()).enumerate() {
            kept = row + 1;
            let expected = draft.get(row).filter(|_| row < drafted);
            match choose(logits) {
                Ok(Some(token)) if expected == Some(&token) => continue,
                Ok(Some(_)) => differs = expected.is_some(),
                Ok(None) => {}
                Err(error) => outcome = Err(error),
            }
            break;
        }

        let start = Instant::now();
        let wrong = tokens.len() - kept;
        if wrong > 0 {
            self.keep(session, (from, state), &tokens[..kept])?;
            self.stats.tokens -= wrong as u64;
        }
        time += start.elapsed();
        self.stats.drafted += drafted as u64;
        self.stats.accepted += kept as u64 - 1;
        if drafted > 0 {
            let matched = self.speculator.matched;
            self.speculator.account.compared(matched, kept - 1, differs);
            self.speculator.account.verified(drafted, kept, time.as_secs_f64());
        }
        outcome
    }

    /// Of the last tokens of `session`, evaluated after a position with a recurrent state, keeps the first ones.
    fn keep(
        &mut self,
        session: &mut Session,
        (from, state): (usize, Option<Arc<Slot>>),
        tokens: &[u32],
    ) -> Result<()> {
        if self.model().graph.states().is_empty() {
            session.cut(from + tokens.len(), None);
            return Ok(());
        }
        session.cut(from, state.clone());
        let run =
            |engine: &mut Self, batch: &Batch<'_>, first| engine.append_logits(batch, first, &mut vec![]);
        let state = self.eval_from(session, (from, state), tokens, None, run)?;
        session.extend(tokens, state);
        // They have been counted.
        self.stats.tokens -= tokens.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for (name, kind) in SPEC_TYPES {
            assert_eq!((kind.to_string(), name.parse::<SpecType>().unwrap()), (name.to_owned(), kind));
        }
        assert!("mtp".parse::<SpecType>().is_err());
    }

    #[test]
    fn without_the_bits_of_single_steps_nothing_is_guessed() {
        assert!(Speculator::new(SpecType::Ngram, 4, false).is_err());
        let mut speculator = Speculator::new(SpecType::Auto, 4, false).unwrap();
        assert_eq!(speculator.kind, SpecType::Off);
        assert!(speculator.draft(&[1, 2, 3, 4, 1, 2], 3, 9).is_empty());
        for draft_max in [0, MOST_DRAFTED + 1] {
            assert!(Speculator::new(SpecType::Off, draft_max, true).is_err());
        }
    }

    #[test]
    fn drafts_are_no_longer_than_there_is_room() {
        let mut speculator = Speculator::new(SpecType::Ngram, 4, true).unwrap();
        let history = [1, 2, 3, 4, 5, 6, 7, 1, 2];
        for most in 0..6 {
            assert_eq!(speculator.draft(&history, 3, most), [4, 5, 6, 7][..most.min(4)]);
        }
    }

    #[test]
    fn drafts_that_would_have_been_right_are_noticed_without_verifying() {
        let mut speculator = Speculator::new(SpecType::Auto, 4, true).unwrap();
        speculator.account.single(1.0);
        speculator.account.verified(4, 1, 40.0);
        let text: Vec<u32> = (0..200).map(|i| i % 7).collect();
        let before = speculator.account.expected(12, 4);
        for position in 20..200 {
            assert!(speculator.draft(&text[..position], text[position], 9).is_empty(), "{position}");
        }
        let after = speculator.account.expected(12, 4);
        assert!(before < 4.0 && after > 4.8, "{before} {after}");
    }
}
