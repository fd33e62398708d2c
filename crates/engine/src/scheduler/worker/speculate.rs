//! Verifying guessed tokens of an answer that nothing else is evaluated beside.
//!
//! With several sequences each batch has rows enough to share what is read; guessing is left to where there is one.

use super::Worker;
use crate::decoding::Piece;
use crate::generation::room_to_guess;
use crate::scheduler::sequence::{Sequence, Task};
use crate::{Error, Result};

impl Worker<'_> {
    /// Evaluates the next token of the only sequence together with guesses; `false` if that is not to be done, or failed and left
    /// everything as it was.
    pub(super) fn speculate(&mut self) -> bool {
        let [sequence] = &mut self.running[..] else { return false };
        if sequence.pending() != 1 || sequence.usage.completion_tokens == 0 {
            return false;
        }
        let Sequence { task: Task::Answer(answering), tokens, session, usage, .. } = sequence else {
            return false;
        };
        let Some(next) = tokens.last() else { return false };
        let room = room_to_guess(&answering.decoding, session, self.engine.context());
        self.engine.take_stats();
        let draft = self.engine.draft(session, *next, room);
        let from = session.position();
        let pages = session.pages_wanted(from, from + 1 + draft.len());
        if draft.is_empty() || pages > self.engine.free_pages() {
            return false;
        }
        let mut pieces: Vec<Result<Piece>> = vec![];
        let outcome = self.engine.verify(session, *next, &draft, &mut answering.decoding, &mut pieces);
        if outcome.is_err() && pieces.is_empty() {
            return false;
        }
        let stats = self.engine.take_stats();
        usage.experts.add(&stats.cache, 1.0);
        usage.drafted_tokens += stats.drafted;
        usage.accepted_tokens += stats.accepted;
        self.count(&stats, &[1]);
        for piece in pieces {
            if self.running.is_empty() {
                break;
            }
            match piece {
                Ok(piece) => self.advance(0, piece),
                Err(error) => self.fail(0, error),
            }
        }
        if let (Err(error), false) = (outcome, self.running.is_empty()) {
            self.fail(0, error);
        }
        true
    }

    /// Ends a sequence that failed.
    pub(super) fn fail(&mut self, index: usize, error: Error) {
        let ends = self.running.remove(index).fail(error);
        crate::scheduler::lock(&self.shared.figures).failed += u64::from(ends);
    }
}
