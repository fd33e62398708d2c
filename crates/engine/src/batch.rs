//! [`Engine::eval_batch`]: tokens of several sequences in one pass through the model.

use moeflux_compute::backend::{Batch, Span, StateSlots};

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
    /// Appends the tokens of every part to its session, in one batch; returns each part's logits, (outputs,
    /// vocab_size), row-major. An expert that several of them need is loaded once. On the CPU the logits of a part do
    /// not depend on the others.
    ///
    /// After an error all sessions are as they were before the call.
    ///
    /// # Errors
    /// As [`Engine::eval`]; [`Error::Option`] if there are more tokens than [`Engine::chunk`].
    pub fn eval_batch(&mut self, parts: &mut [Part<'_>]) -> Result<Vec<Vec<f32>>> {
        let total: usize = parts.iter().map(|part| part.tokens.len()).sum();
        if total > self.chunk() {
            let expected = format!("at most {} tokens in a batch", self.chunk());
            return Err(Error::Option { option: "chunk", expected, got: total.to_string() });
        }
        let result = self.eval_parts(parts);
        if result.is_err() {
            parts.iter_mut().for_each(|part| part.session.release_pages());
        }
        result
    }

    fn eval_parts(&mut self, parts: &mut [Part<'_>]) -> Result<Vec<Vec<f32>>> {
        let recurrent = !self.model().graph.states().is_empty();
        let mut states = vec![];
        for part in parts.iter_mut() {
            let from = part.session.position();
            self.check_tokens(from, part.tokens)?;
            self.reserve(part.session, from, from + part.tokens.len())?;
            let slot = match recurrent && !part.tokens.is_empty() {
                true => Some(self.take_slot(part.session)?),
                false => None,
            };
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
        let mut logits = std::mem::take(&mut self.logits);
        match tokens.is_empty() {
            true => logits.clear(),
            false => self.run(&Batch { tokens: &tokens, spans: &spans, outputs: &rows }, &mut logits)?,
        }
        drop(spans);

        let vocab_size = self.model().graph.vocab_size();
        let mut rest = &logits[..];
        let mut split = vec![];
        for part in parts.iter() {
            let (own, others) = rest.split_at(part.output_rows() * vocab_size);
            let first = part.session.position() + part.tokens.len() - part.output_rows();
            self.check_finite(own, first)?;
            split.push(own.to_vec());
            rest = others;
        }
        self.logits = logits;
        for (part, state) in parts.iter_mut().zip(states) {
            let state = state.or_else(|| part.session.state().cloned());
            part.session.extend(part.tokens, state);
        }
        Ok(split)
    }
}
