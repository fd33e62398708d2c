//! [`Engine::eval_batch`]: tokens of several sequences in one pass through the model.

use moeflux_compute::backend::{Batch, Candidates, Span, StateSlots};

use crate::engine::{Engine, Outputs};
use crate::session::Session;
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
    fn output_rows(&self) -> usize {
        match self.outputs {
            None => 0,
            Some(Outputs::Last) => self.tokens.len().min(1),
            Some(Outputs::All) => self.tokens.len(),
        }
    }
}

impl Engine {
    /// Whether the backend can tell the most likely tokens without giving all logits: see [`Engine::eval_candidates`].
    pub fn has_candidates(&self) -> bool {
        self.executable.has_candidates()
    }

    /// As [`Engine::eval_batch`] of parts of [`Outputs::Last`] or none; of each part that has an output its candidates among
    /// the first `vocab_size` tokens, found where the logits are. All logits of an output can be had afterwards by
    /// [`Engine::read_logits`].
    ///
    /// # Errors
    /// As [`Engine::eval_batch`], and on a backend that has no candidates.
    pub fn eval_candidates(
        &mut self,
        parts: &mut [Part<'_>],
        vocab_size: usize,
    ) -> Result<Vec<Option<Candidates>>> {
        let mut found = vec![];
        self.append(parts, |engine, batch, parts| {
            let mut all = engine.run_candidates(batch, vocab_size)?.into_iter();
            for part in parts.iter() {
                let own = if part.output_rows() > 0 { all.next() } else { None };
                if own.as_ref().is_some_and(|own| own.maximum.is_nan()) {
                    return Err(engine.not_finite(part.session.position() + part.tokens.len() - 1));
                }
                found.push(own);
            }
            Ok(())
        })?;
        Ok(found)
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
    fn append(
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
            spans.push(Span { rows: start..tokens.len(), start: start_position, pages, slots });
            rows.extend((tokens.len() - part.output_rows()..tokens.len()).map(|row| row as u32));
        }
        run(self, &Batch { tokens: &tokens, spans: &spans, outputs: &rows }, parts)?;
        drop(spans);

        for (part, state) in parts.iter_mut().zip(states) {
            let state = state.or_else(|| part.session.state().cloned());
            part.session.extend(part.tokens, state);
        }
        Ok(())
    }
}
