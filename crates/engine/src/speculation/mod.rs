//! Speculative decoding: tokens are guessed from the sequence's own context ([`ngram`]), evaluated in one pass with the token
//! that is next anyway, and kept as far as the model chooses the same ones.
//!
//! Every row of that pass goes through the same [`Decoding`](crate::decoding::Decoding) as the logits of a single step would, in
//! the same order and with the same random numbers; so sampling, penalties, constraints, stop texts and log-probabilities need
//! no rule of their own, and an answer is the same, token for token, with and without. The price is that no more rows are verified
//! than have the bits of single steps ([`Executable::single_step_rows`]): eight on GPUs. These choose the tokens of all rows where
//! the logits are, as those of single steps.
//!
//! What was evaluated for nothing is undone: keys and values are cut off; of models with recurrent state the state before is
//! taken up again and the tokens that were right are evaluated once more.
//!
//! [`Executable::single_step_rows`]: moeflux_compute::backend::Executable::single_step_rows

mod account;
mod drafter;
mod ngram;
mod rows;

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use account::{DraftAccount, DraftSource};
pub(crate) use drafter::{Drafter, KEPT_HIDDEN};
use moeflux_compute::backend::{Backend, Batch};
use moeflux_compute::draw::Draw;
pub(crate) use rows::DraftRows;

use crate::checkpoint::Checkpoint;
use crate::decoding::{Decoding, Piece};
use crate::engine::{Engine, Outputs};
use crate::models::{self, Model};
use crate::pictures::tokens::is_picture;
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
    /// Always, by the checkpoint's own layer that predicts further tokens (multi-token prediction, "nextn").
    Mtp,
    /// As `Mtp` or `Ngram`, but only where that is measured to be faster, and where checkpoint and backend can; by the layer only where
    /// it takes no room from experts.
    Auto,
}

/// What can be written for a [`SpecType`].
const SPEC_TYPES: [(&str, SpecType); 4] =
    [("off", SpecType::Off), ("ngram", SpecType::Ngram), ("mtp", SpecType::Mtp), ("auto", SpecType::Auto)];

impl SpecType {
    /// Records the model of a checkpoint for sequences of so many positions, with the layer that drafts if one may be used.
    ///
    /// # Errors
    /// As [`models::record`]; [`Error::Option`] if there has to be one and is none.
    pub(crate) fn record(
        self,
        checkpoint: Arc<Checkpoint>,
        backend: &dyn Backend,
        positions: Option<usize>,
    ) -> Result<Model> {
        let refused =
            |expected: String| Error::Option { option: "spec_type", expected, got: self.to_string() };
        if !matches!(self, Self::Mtp | Self::Auto) {
            return models::record_for(checkpoint, positions);
        }
        if let Some(what) = backend.refuses_drafts() {
            return match self {
                Self::Mtp => {
                    Err(refused(format!("off, ngram or auto: a model's own layer drafts not on {what}")))
                }
                _ => models::record_for(checkpoint, positions),
            };
        }
        let model = models::record_with_draft(Arc::clone(&checkpoint), positions)?;
        if let Some(what) = model.draft.as_ref().and_then(|draft| backend.refuses(&draft.graph)) {
            return match self {
                Self::Mtp => {
                    let layer = "of the layer that predicts further tokens";
                    Err(refused(format!("off, ngram or auto: there are no kernels of {what}, {layer}")))
                }
                _ => models::record_for(checkpoint, positions),
            };
        }
        if self == Self::Mtp && model.draft.is_none() {
            let path = model.checkpoint().path().display();
            let lacks = model.no_draft.as_ref().map_or(String::new(), |tensor| format!(" (no {tensor})"));
            let expected =
                format!("off, ngram or auto: {path} has no layer that predicts further tokens{lacks}");
            return Err(refused(expected));
        }
        Ok(model)
    }
}

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
            expected: "off, ngram, mtp or auto".to_owned(),
            got: text.to_owned(),
        })
    }
}

/// Most tokens of a draft.
pub const MOST_DRAFTED: usize = 16;

/// What an engine can draft with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Means {
    /// How many rows of a sequence have the bits of single steps.
    pub(crate) rows: usize,
    /// Whether the checkpoint has a layer that drafts.
    pub(crate) layer: bool,
}

/// What of an engine guesses tokens.
#[derive(Debug)]
pub(crate) struct Speculator {
    kind: SpecType,
    draft_max: usize,
    /// Whether there is a layer that drafts.
    layer: bool,
    account: DraftAccount,
    /// A draft that is not verified but compared with what single steps choose: acceptance is measured without a cost.
    watched: Option<Watched>,
    /// Where the draft that is being verified is from.
    source: DraftSource,
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

/// What a verification's rows came to.
enum Rows {
    /// (rows, vocab_size).
    Logits(Vec<f32>),
    /// The token that was chosen where the logits are, where one was.
    Drawn(Vec<Option<u32>>),
}

/// What one of them came to.
enum Row<'a> {
    Logits(Cow<'a, [f32]>),
    Drawn(u32),
}

/// What is to be verified.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// These tokens, maybe none.
    Tokens(Vec<u32>),
    /// So many tokens that the layer is to draft, or these if it cannot.
    Layer(usize, Vec<u32>),
}

impl Speculator {
    /// For an engine with these means.
    ///
    /// # Errors
    /// [`Error::Option`] if tokens cannot be guessed as asked for.
    pub(crate) fn new(kind: SpecType, draft_max: usize, means: Means) -> Result<Self> {
        if draft_max == 0 || draft_max > MOST_DRAFTED {
            return Err(Error::Option {
                option: "draft_max",
                expected: format!("a number from 1 to {MOST_DRAFTED}"),
                got: draft_max.to_string(),
            });
        }
        let refused = |expected: &str| Error::Option {
            option: "spec_type",
            expected: expected.to_owned(),
            got: kind.to_string(),
        };
        let verifies = means.rows > 1;
        if matches!(kind, SpecType::Ngram | SpecType::Mtp) && !verifies {
            return Err(refused("off: on this backend several rows do not have the bits of single steps"));
        }
        if kind == SpecType::Mtp && !means.layer {
            return Err(refused("off, ngram or auto: the model has no layer that predicts further tokens"));
        }
        let kind = if verifies { kind } else { SpecType::Off };
        // One row is that of the token that comes anyway.
        let draft_max = draft_max.min(means.rows.saturating_sub(1));
        let (account, source) = (DraftAccount::default(), DraftSource::Layer);
        Ok(Self { kind, draft_max, layer: means.layer, account, watched: None, source })
    }

    /// What to verify after `next`, at most `most` tokens, where so many positions before the last one have not entered the layer that drafts.
    fn plan(&mut self, history: &[u32], next: u32, most: usize, entering: usize) -> Plan {
        let most = most.min(self.draft_max);
        if self.kind == SpecType::Off || most == 0 {
            return Plan::Tokens(vec![]);
        }
        if self.kind == SpecType::Mtp {
            return Plan::Layer(most, vec![]);
        }
        self.watch(history.len(), next);
        let (matched, mut tokens) = ngram::draft(history, next, self.draft_max).unwrap_or_default();
        // No model writes a picture.
        tokens.truncate(tokens.iter().position(|token| is_picture(*token)).unwrap_or(tokens.len()));
        let most_matched = tokens.len().min(most);
        if self.kind == SpecType::Ngram {
            tokens.truncate(most_matched);
            self.source = DraftSource::Match(matched);
            return Plan::Tokens(tokens);
        }
        let of_layer = if self.layer { self.account.count(DraftSource::Layer, most, entering) } else { None };
        let of_match = self.account.count(DraftSource::Match(matched), most_matched, 0);
        self.source = DraftSource::Match(matched);
        let layer = of_layer.filter(|layer| of_match.is_none_or(|matched| layer.faster > matched.faster));
        if of_match.is_none() || layer.is_some() {
            self.start_to_watch(history.len() + 1, matched, &tokens);
        } else {
            self.watched = None;
        }
        tokens.truncate(of_match.map_or(0, |worth| worth.drafted));
        match layer {
            Some(worth) => Plan::Layer(worth.drafted, tokens),
            None => Plan::Tokens(tokens),
        }
    }

    /// Watches what a match says of the tokens from `start` on, unless something is watched.
    fn start_to_watch(&mut self, start: usize, matched: usize, tokens: &[u32]) {
        if self.watched.is_none() && !tokens.is_empty() {
            self.watched = Some(Watched { matched, tokens: tokens.to_vec(), start, right: 0 });
        }
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
            let source = DraftSource::Match(watched.matched);
            self.account.compared(source, watched.right, !is_right);
            self.watched = None;
        }
    }
}

impl Engine {
    /// When tokens are guessed: what was asked for, or [`SpecType::Off`] where the backend cannot.
    pub fn spec_type(&self) -> SpecType {
        self.speculator.kind
    }

    /// Whether a layer of the model can draft: with [`SpecType::Auto`] only where it takes no room from experts.
    pub fn has_draft_layer(&self) -> bool {
        self.drafter.is_some()
    }

    /// Tokens that may follow those of `session` and `next`, at most `most`, and are worth verifying; often none.
    pub(crate) fn draft(&mut self, session: &mut Session, next: u32, most: usize) -> Vec<u32> {
        let most = most.min(self.chunk().saturating_sub(1));
        let entering = session.drafts.missing(session.position()).len().saturating_sub(1);
        let (count, otherwise) = match self.speculator.plan(session.tokens(), next, most, entering) {
            Plan::Tokens(tokens) => return tokens,
            Plan::Layer(count, otherwise) => (count, otherwise),
        };
        let start = Instant::now();
        // What cannot be drafted is no reason to fail.
        let (drafted, entered) = self.draft_by_layer(session, next, count).unwrap_or_default();
        self.speculator.account.entered(entering, entered.as_secs_f64());
        let drafting = start.elapsed().saturating_sub(entered);
        let ready = self.drafter.as_ref().is_none_or(Drafter::was_ready);
        self.speculator.account.drafted(drafted.len(), drafting.as_secs_f64(), ready);
        if drafted.is_empty() {
            session.release_pages();
            return otherwise;
        }
        self.speculator.source = DraftSource::Layer;
        drafted
    }

    /// Notes what a step took that evaluated one token of one sequence, and was the last batch.
    pub(crate) fn note_single_step(&mut self, time: Duration) {
        if self.executable.was_ready() {
            self.speculator.account.single(time.as_secs_f64());
        }
    }

    /// Makes ready what verifications and the layer that drafts need, which takes a GPU some time the first times, with room for all of
    /// the context.
    ///
    /// # Errors
    /// As [`Engine::eval`], and if a device has no room for the context.
    pub(crate) fn warm_up_verifications(&mut self) -> Result<()> {
        if self.spec_type() == SpecType::Off {
            return Ok(());
        }
        let (vocab_size, pages) = (self.model().graph.vocab_size(), self.pages());
        if let Some(drafter) = &mut self.drafter {
            drafter.executable.reserve_pages(pages)?;
            drafter.take_experts(&mut self.experts)?;
        }
        let draft_max = self.speculator.draft_max;
        let most = (1 + draft_max).min(self.chunk()).min(self.context());
        let least = if self.drafter.is_some() { 1 } else { 2 };
        for rows in (least..=most).flat_map(|rows| [rows; 2]) {
            let mut session = self.session();
            self.eval_with(&mut session, &vec![0; rows], Outputs::All, |engine, batch, _| {
                let draws = &mut || vec![Some(Draw::default()); rows];
                engine.run_and_draw(batch, draws, vocab_size).map(|_| ())
            })?;
            let room = (self.context() + 1 - rows).min(draft_max).min(2);
            self.draft_by_layer(&mut session, 0, room)?;
        }
        Ok(())
    }

    /// Appends `next` and `draft` to `session` in one pass, and lets `decoding` choose a token after each of them, as long as that
    /// is the one drafted and the answer goes on; what it makes of each, or why it cannot, is added to `pieces`. The session then
    /// holds the tokens after which one was chosen.
    ///
    /// # Errors
    /// As [`Engine::eval`]; the session is as it was before the call, unless there are pieces.
    pub(crate) fn verify(
        &mut self,
        session: &mut Session,
        next: u32,
        draft: &[u32],
        decoding: &mut Decoding<'_>,
        pieces: &mut Vec<Result<Piece>>,
    ) -> Result<()> {
        let (from, state) = (session.position(), session.state().cloned());
        let mut tokens = vec![next];
        tokens.extend_from_slice(draft);
        let start = Instant::now();
        let rows = match self.eval_rows(session, &tokens, decoding) {
            Ok(rows) => rows,
            // What is wrong with a token that may not come is no error.
            Err(_) => {
                tokens.truncate(1);
                self.eval_rows(session, &tokens, decoding)?
            }
        };
        let (mut time, ready) = (start.elapsed(), self.executable.was_ready());
        let drafted = tokens.len() - 1;

        let (mut kept, mut differs) = (0, false);
        for row in 0..tokens.len() {
            let expected = draft.get(row).filter(|_| row < drafted);
            let piece = match self.row_of(&rows, row, from + row) {
                Ok(Row::Logits(logits)) => decoding.next(&logits),
                Ok(Row::Drawn(token)) => decoding.next_drawn(token),
                // As after a step that failed.
                Err(error) => {
                    pieces.push(Err(error));
                    break;
                }
            };
            kept = row + 1;
            let token =
                piece.as_ref().ok().filter(|piece| piece.finish.is_none()).and_then(|piece| piece.token);
            pieces.push(piece);
            if token.is_none() || token.as_ref() != expected {
                differs = token.is_some() && expected.is_some();
                break;
            }
        }

        let start = Instant::now();
        let wrong = tokens.len() - kept;
        if wrong > 0 {
            self.keep(session, (from, state), &tokens[..kept])?;
            self.stats.tokens -= wrong as u64;
        }
        time += start.elapsed();
        self.stats.drafted += drafted as u64;
        let right = kept.saturating_sub(1);
        self.stats.accepted += right as u64;
        if drafted > 0 {
            let source = self.speculator.source;
            self.speculator.account.compared(source, right, differs);
            self.speculator.account.verified(drafted, kept, time.as_secs_f64(), ready);
        }
        Ok(())
    }

    /// Appends `tokens` to `session` in one pass: the logits after each, or what is chosen by them where they are if those that
    /// follow the first come.
    fn eval_rows(&mut self, session: &mut Session, tokens: &[u32], decoding: &Decoding<'_>) -> Result<Rows> {
        if !self.draws_tokens() || !decoding.is_drawn() {
            return Ok(Rows::Logits(self.eval(session, tokens, Outputs::All)?));
        }
        let mut drawn = vec![];
        self.eval_with(session, tokens, Outputs::All, |engine, batch, _| {
            let draws = &mut || decoding.draws(&tokens[1..]);
            drawn = engine.run_and_draw(batch, draws, decoding.vocab_size())?;
            Ok(())
        })?;
        Ok(Rows::Drawn(drawn))
    }

    /// What a token is chosen by after row `row` of the last evaluation, whose position is the given one.
    fn row_of<'a>(&mut self, rows: &'a Rows, row: usize, position: usize) -> Result<Row<'a>> {
        match rows {
            Rows::Logits(all) => {
                let vocab_size = self.model().graph.vocab_size();
                Ok(Row::Logits(all[row * vocab_size..][..vocab_size].into()))
            }
            Rows::Drawn(tokens) => match tokens[row] {
                Some(token) => Ok(Row::Drawn(token)),
                None => {
                    let logits = self.read_logits(row)?;
                    self.check_finite(&logits, position)?;
                    Ok(Row::Logits(logits.into()))
                }
            },
        }
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
        assert!("eagle".parse::<SpecType>().is_err());
    }

    const ALL: Means = Means { rows: usize::MAX, layer: true };

    fn tokens(plan: Plan) -> Vec<u32> {
        match plan {
            Plan::Tokens(tokens) => tokens,
            Plan::Layer(..) => panic!("{plan:?}"),
        }
    }

    #[test]
    fn without_the_bits_of_single_steps_nothing_is_guessed() {
        let none = Means { rows: 1, ..ALL };
        for kind in [SpecType::Ngram, SpecType::Mtp] {
            assert!(Speculator::new(kind, 4, none).is_err());
        }
        let mut speculator = Speculator::new(SpecType::Auto, 4, none).unwrap();
        assert_eq!(speculator.kind, SpecType::Off);
        assert!(tokens(speculator.plan(&[1, 2, 3, 4, 1, 2], 3, 9, 0)).is_empty());
        for draft_max in [0, MOST_DRAFTED + 1] {
            assert!(Speculator::new(SpecType::Off, draft_max, ALL).is_err());
        }
        assert!(Speculator::new(SpecType::Mtp, 4, Means { layer: false, ..ALL }).is_err());
    }

    #[test]
    fn drafts_are_no_longer_than_there_is_room() {
        let mut speculator = Speculator::new(SpecType::Ngram, 4, ALL).unwrap();
        let mut by_layer = Speculator::new(SpecType::Mtp, 4, ALL).unwrap();
        let history = [1, 2, 3, 4, 5, 6, 7, 1, 2];
        for most in 0..6 {
            assert_eq!(tokens(speculator.plan(&history, 3, most, 0)), [4, 5, 6, 7][..most.min(4)]);
            let expected = if most == 0 { Plan::Tokens(vec![]) } else { Plan::Layer(most.min(4), vec![]) };
            assert_eq!(by_layer.plan(&history, 3, most, 0), expected);
        }
    }

    #[test]
    fn drafts_that_would_have_been_right_are_noticed_without_verifying() {
        let mut speculator = Speculator::new(SpecType::Auto, 4, Means { layer: false, ..ALL }).unwrap();
        speculator.account.single(1.0);
        speculator.account.verified(4, 1, 40.0, true);
        let text: Vec<u32> = (0..200).map(|i| i % 7).collect();
        let before = speculator.account.expected(DraftSource::Match(12), 4);
        for position in 20..200 {
            assert!(
                tokens(speculator.plan(&text[..position], text[position], 9, 0)).is_empty(),
                "{position}"
            );
        }
        let after = speculator.account.expected(DraftSource::Match(12), 4);
        assert!(before < 4.0 && after > 4.8, "{before} {after}");
    }

    #[test]
    fn what_is_measured_to_gain_more_is_verified() {
        let speculator = || {
            let mut speculator = Speculator::new(SpecType::Auto, 4, ALL).unwrap();
            for _ in 0..200 {
                speculator.account.single(1.0);
            }
            (1..=4).for_each(|count| {
                speculator.account.verified(count, count + 1, 1.0 + 0.2 * count as f64, true)
            });
            speculator
        };
        let text: Vec<u32> = (0..60).map(|i| i % 7).collect();
        let (next, history) = text.split_last().unwrap();
        let compared = |speculator: &mut Speculator, source, right| {
            (0..100).for_each(|_| speculator.account.compared(source, right, right < 4));
        };
        let mut by_match = speculator();
        compared(&mut by_match, DraftSource::Match(12), 4);
        compared(&mut by_match, DraftSource::Layer, 1);
        assert_eq!(tokens(by_match.plan(history, *next, 9, 0)).len(), 4);
        let mut by_layer = speculator();
        compared(&mut by_layer, DraftSource::Match(12), 0);
        compared(&mut by_layer, DraftSource::Layer, 4);
        by_layer.account.drafted(4, 0.2, true);
        assert!(matches!(by_layer.plan(history, *next, 9, 0), Plan::Layer(4, _)));
        // What drafting itself costs counts.
        (0..100).for_each(|_| by_layer.account.drafted(4, 6.0, true));
        assert!(tokens(by_layer.plan(history, *next, 9, 0)).is_empty());
    }
}
