//! [`Engine::eval_batch`]: tokens of several sequences in one pass through the model.

use std::sync::Arc;

use moeflux_compute::backend::{Batch, Span, StateSlots};
use moeflux_compute::draw::Draw;

use crate::engine::{Engine, Outputs};
use crate::pictures::PictureRows;
use crate::session::{Session, Slot};
use crate::speculation::{KEPT_HIDDEN, SpecType};
use crate::{Error, Result};

/// What one sequence adds to a batch.
#[derive(Debug)]
pub struct Part<'a> {
    /// The sequence.
    pub session: &'a mut Session,
    /// Tokens to append.
    pub tokens: &'a [u32],
    /// Logits that are wanted; `None` in the middle of a prompt.
    pub outputs: Option<Outputs>,
}

impl Part<'_> {
    /// How many rows of logits it gets.
    pub(crate) fn output_rows(&self) -> usize {
        match self.outputs {
            None => 0,
            Some(Outputs::Last) => self.tokens.len().min(1),
            Some(Outputs::All) => self.tokens.len(),
        }
    }
}

impl Engine {
    /// Whether the backend chooses tokens where the logits are: see [`Engine::eval_and_draw`].
    pub fn draws_tokens(&self) -> bool {
        self.executable.draws_tokens()
    }

    /// Of so many sequences, how many a batch with a token of each should have, for the most tokens a second: fewer where a GPU's
    /// kernels for a few rows are faster than those for one more, or leave a part of the experts to the processor.
    pub fn decode_rows(&self, sequences: usize) -> usize {
        self.executable.decode_rows(sequences).clamp(1, sequences.max(1))
    }

    /// As [`Engine::eval_batch`] of parts of [`Outputs::Last`] or none; of each part that has an output the token that its draw
    /// chooses among the first `vocab_size`, where the logits are. `None` for parts without an output or a draw, and where no token
    /// can be chosen. The logits of an output can be had afterwards by [`Engine::read_logits`].
    ///
    /// `draws` has a draw or none for each part. It is called at most once, while a GPU computes, so that what may come next can be
    /// determined meanwhile.
    ///
    /// # Errors
    /// As [`Engine::eval_batch`], and on a backend that does not draw.
    pub fn eval_and_draw(
        &mut self,
        parts: &mut [Part<'_>],
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
    ) -> Result<Vec<Option<u32>>> {
        let mut chosen = vec![];
        self.append(parts, |engine, batch, parts| {
            let has_output: Vec<bool> = parts.iter().map(|part| part.output_rows() > 0).collect();
            let mut drawn = vec![];
            let mut of_outputs = || {
                let all = draws().into_iter().chain(std::iter::repeat(None));
                let wanted: Vec<Option<Draw>> =
                    all.zip(&has_output).filter(|(_, has)| **has).map(|(draw, _)| draw).collect();
                drawn = wanted.iter().map(Option::is_some).collect();
                wanted
            };
            let tokens = engine.run_and_draw(batch, &mut of_outputs, vocab_size)?;
            let mut outputs = tokens.into_iter().zip(drawn).enumerate();
            for (part, has_output) in parts.iter().zip(has_output) {
                let own = if has_output { outputs.next() } else { None };
                chosen.push(own.as_ref().and_then(|(_, (token, _))| *token));
                if let Some((output, (None, true))) = own {
                    let logits = engine.read_logits(output)?;
                    engine.check_finite(&logits, part.session.position() + part.tokens.len() - 1)?;
                }
            }
            Ok(())
        })?;
        Ok(chosen)
    }

    /// Appends the tokens of every part to its session, in one batch; returns each part's logits, (outputs,
    /// vocab_size), row-major. An expert that several of them need is loaded once. On the CPU the logits of a part do
    /// not depend on the others.
    ///
    /// After an error all sessions are as they were before the call.
    ///
    /// # Errors
    /// As [`Engine::eval`]; [`Error::Option`] if there are more tokens than [`Engine::chunk`].
    pub fn eval_batch(&mut self, parts: &mut [Part<'_>]) -> Result<Vec<Vec<f32>>> {
        let mut split = vec![];
        self.append(parts, |engine, batch, parts| {
            let mut logits = std::mem::take(&mut engine.logits);
            if batch.tokens.is_empty() {
                logits.clear()
            } else {
                engine.run(batch, &mut logits)?
            }
            let vocab_size = engine.model().graph.vocab_size();
            let mut rest = &logits[..];
            for part in parts.iter() {
                let (own, others) = rest.split_at(part.output_rows() * vocab_size);
                let first = part.session.position() + part.tokens.len() - part.output_rows();
                engine.check_finite(own, first)?;
                split.push(own.to_vec());
                rest = others;
            }
            engine.logits = logits;
            Ok(())
        })?;
        Ok(split)
    }

    /// Runs the batch of all parts by `run`, and appends their tokens to their sessions.
    pub(crate) fn append(
        &mut self,
        parts: &mut [Part<'_>],
        run: impl FnOnce(&mut Self, &Batch<'_>, &[Part<'_>]) -> Result<()>,
    ) -> Result<()> {
        let total: usize = parts.iter().map(|part| part.tokens.len()).sum();
        if total > self.chunk() {
            let expected = format!("at most {} tokens in a batch", self.chunk());
            return Err(Error::Option { option: "chunk", expected, got: total.to_string() });
        }
        let result = self.append_parts(parts, run);
        if result.is_err() {
            parts.iter_mut().for_each(|part| part.session.release_pages());
        }
        result
    }

    fn append_parts(
        &mut self,
        parts: &mut [Part<'_>],
        run: impl FnOnce(&mut Self, &Batch<'_>, &[Part<'_>]) -> Result<()>,
    ) -> Result<()> {
        let states = self.run_parts(parts, run)?;
        self.extend_sessions(parts, states);
        Ok(())
    }

    /// Runs the batch of all parts by `run`; returns the recurrent states that their sessions have after it.
    pub(crate) fn run_parts(
        &mut self,
        parts: &mut [Part<'_>],
        run: impl FnOnce(&mut Self, &Batch<'_>, &[Part<'_>]) -> Result<()>,
    ) -> Result<Vec<Option<Arc<Slot>>>> {
        let recurrent = !self.model().graph.states().is_empty();
        let mut states = vec![];
        for part in parts.iter_mut() {
            let from = part.session.position();
            self.check_tokens(from, part.tokens)?;
            self.reserve(part.session, from, from + part.tokens.len())?;
            let slot =
                if recurrent && !part.tokens.is_empty() { Some(self.take_slot(part.session)?) } else { None };
            states.push(slot);
        }

        let (mut tokens, mut spans, mut rows) = (vec![], vec![], vec![]);
        for (part, state) in parts.iter().zip(&states).filter(|(part, _)| !part.tokens.is_empty()) {
            let slots = state.as_ref().map_or_else(StateSlots::default, |new| {
                let read = part.session.state().map_or(new.number(), |slot| slot.number());
                StateSlots { read, write: new.number() }
            });
            let start = tokens.len();
            tokens.extend_from_slice(part.tokens);
            let (start_position, pages) = (part.session.position(), part.session.pages());
            let adapter = part.session.adapter();
            spans.push(Span { rows: start..tokens.len(), start: start_position, pages, slots, adapter });
            rows.extend((tokens.len() - part.output_rows()..tokens.len()).map(|row| row as u32));
        }
        let mut pictures = PictureRows::default();
        if PictureRows::needed(parts.iter().map(|part| (&*part.session, part.tokens))) {
            let mut row = 0;
            for part in parts.iter() {
                let at = (&*part.session, part.session.position());
                self.add_picture_rows(at, (&[], part.tokens), row, &mut pictures)?;
                row += part.tokens.len();
            }
        }
        let (embeddings, positions) = (pictures.embeddings(), pictures.positions());
        let batch = Batch {
            tokens: pictures.tokens(&tokens),
            spans: &spans,
            outputs: &rows,
            embeddings,
            positions,
            sees: pictures.sees(),
            rows: &[],
        };
        run(self, &batch, parts)?;
        Ok(states)
    }

    /// Appends the tokens of every part to its session, whose state is then the given one.
    pub(crate) fn extend_sessions(&mut self, parts: &mut [Part<'_>], states: Vec<Option<Arc<Slot>>>) {
        self.note_hidden(parts);
        for (part, state) in parts.iter_mut().zip(states) {
            let state = state.or_else(|| part.session.state().cloned());
            part.session.extend(part.tokens, state);
            self.enter_known(part.session, (0, &[]));
        }
    }

    /// Gives sessions the hidden states of the last batch, if tokens are drafted from them.
    fn note_hidden(&mut self, parts: &mut [Part<'_>]) {
        if self.drafter.is_none() {
            return;
        }
        if parts.iter().any(|part| self.unseen(part.tokens) > 0) {
            let mut row = 0;
            for part in parts {
                let position = part.session.position();
                self.note_rows(part.session, (position, part.tokens), row);
                row += part.tokens.len();
            }
            return;
        }
        let rows: usize = parts.iter().map(|part| part.tokens.len()).sum();
        let mut rest = self.executable.every_hidden(0..rows).unwrap_or_default();
        let width = rest.len().checked_div(rows).unwrap_or(0);
        for part in parts {
            let (own, others) = rest.split_at(part.tokens.len() * width);
            part.session.drafts.push(part.session.position(), part.tokens, own);
            rest = others;
        }
    }

    /// Gives a session the hidden states of tokens of the last batch from its row `row` on, if tokens are drafted from them. What
    /// cannot be drafted from is no reason to fail.
    pub(crate) fn note_rows(
        &mut self,
        session: &mut Session,
        (position, tokens): (usize, &[u32]),
        row: usize,
    ) {
        if self.drafter.is_some() {
            let unseen = self.unseen(tokens);
            let hidden = self.executable.every_hidden(row + unseen..row + tokens.len()).unwrap_or_default();
            session.drafts.push(position + unseen, &tokens[unseen..], hidden);
        }
    }

    /// How many of a batch's tokens of a sequence the layer that drafts will not see, where it is not always to.
    fn unseen(&self, tokens: &[u32]) -> usize {
        let always = self.spec_type() == SpecType::Mtp;
        if always { 0 } else { tokens.len().saturating_sub(KEPT_HIDDEN) }
    }
}
