//! Several batches under way on several GPUs: [`Engine::begin`] and [`Engine::end`].
//!
//! With layers in a row over devices, one batch keeps one device busy at a time. Batches of other sequences can be on the other
//! devices meanwhile. Whoever decodes many sequences divides them into as many batches: as soon as one has ended, its sequences'
//! next tokens are a batch again.

use std::sync::Arc;

use moeflux_compute::backend::{Chosen, Overlap};
use moeflux_compute::draw::Draw;

use crate::batch::Part;
use crate::engine::{Engine, Outputs};
use crate::session::Slot;
use crate::{Error, Result};

/// A batch that has begun, to be handed to [`Engine::end`].
#[derive(Debug)]
pub struct Begun {
    /// What its sessions' states will be.
    states: Vec<Option<Arc<Slot>>>,
}

fn tokens(parts: &[Part<'_>]) -> usize {
    parts.iter().map(|part| part.tokens.len()).sum()
}

impl Engine {
    /// How the next tokens of so many sequences should be divided into batches by [`Engine::begin`]; `None` if they should be
    /// evaluated in one after the other. What it says changes with what batches take.
    pub fn overlap(&self, sequences: usize) -> Option<Overlap> {
        let Overlap { batches, rows } = self.executable.overlap(sequences).filter(|_| self.draws_tokens())?;
        Some(Overlap { batches, rows: rows.min(self.chunk()).clamp(1, sequences.max(1)) })
    }

    /// Starts a batch of parts that have one token and want its logits. Until it has been ended, its sessions are as they were
    /// before and must not be used, and nothing is evaluated but other batches by this, of other sequences.
    ///
    /// # Errors
    /// As [`Engine::eval_batch`], and where no more batches can be under way. None is then.
    pub fn begin(&mut self, parts: &mut [Part<'_>]) -> Result<Begun> {
        let single = parts.iter().all(|part| part.tokens.len() == 1 && part.outputs == Some(Outputs::Last));
        let outcome = if single && (1..=self.chunk()).contains(&parts.len()) {
            self.run_parts(parts, |engine, batch, _| {
                engine.counted(0, |executable, experts| executable.begin(batch, experts))
            })
        } else {
            let expected = format!("1 to {} parts of one token that want its logits", self.chunk());
            let got = format!("{} parts of {} tokens", parts.len(), tokens(parts));
            Err(Error::Option { option: "batch", expected, got })
        };
        let states = outcome.inspect_err(|_| self.abandon(parts))?;
        Ok(Begun { states })
    }

    /// Waits for the batch that began first, appends the tokens of its parts to their sessions, and says what the draw of each
    /// chooses among the first `vocab_size` tokens; `draws` as for [`Engine::eval_and_draw`].
    ///
    /// # Errors
    /// As [`Engine::begin`], and if a draw can choose no token; the sessions are as they were before that.
    pub fn end(
        &mut self,
        begun: Begun,
        parts: &mut [Part<'_>],
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
    ) -> Result<Vec<Chosen>> {
        let rows = parts.len();
        let outcome = self.counted(rows, |executable, experts| executable.end(draws, vocab_size, experts));
        let checked = outcome.and_then(|chosen| {
            for (chosen, part) in chosen.iter().zip(&*parts) {
                if let Chosen::Logits(logits) = chosen {
                    self.check_finite(logits, part.session.position())?;
                }
            }
            Ok(chosen)
        });
        let chosen = checked.inspect_err(|_| self.abandon(parts))?;
        self.extend_sessions(parts, begun.states);
        Ok(chosen)
    }

    /// Forgets all batches under way; `parts` are those of one of them, whose sessions become what they were before.
    pub(crate) fn abandon(&mut self, parts: &mut [Part<'_>]) {
        self.executable.abandon();
        parts.iter_mut().for_each(|part| part.session.release_pages());
    }
}
