//! [`Sequence`]: a request that has been admitted, or one input of a request for embeddings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::embed::Embedding;
use super::{Event, Progress, Sink, Usage};
use crate::decoding::{Decoding, Piece};
use crate::generation::Finish;
use crate::pictures::Picture;
use crate::session::Session;
use crate::{Error, Result};

/// What becomes of a sequence's tokens.
pub(super) enum Task<'t> {
    Answer(Box<Answering<'t>>),
    Embed(Embedding),
}

/// Which sequences a batch has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Answers,
    Embeddings,
}

/// An answer in the making.
pub(super) struct Answering<'t> {
    pub(super) sink: Sink,
    pub(super) conversation: Option<String>,
    pub(super) decoding: Decoding<'t>,
    pub(super) last_token: Option<Instant>,
    pub(super) warning: Option<String>,
    /// Alive as long as its prompt may have to be evaluated.
    pub(super) _pictures: Vec<Arc<Picture>>,
}

/// What has been admitted.
pub(super) struct Sequence<'t> {
    /// Order of admission.
    pub(super) number: u64,
    pub(super) cancelled: Arc<AtomicBool>,
    pub(super) task: Task<'t>,
    /// Prompt and answer, or an input; those after the session's position have yet to be evaluated.
    pub(super) tokens: Vec<u32>,
    pub(super) session: Session,
    /// Position at which other requests are known to branch off.
    pub(super) branch: Option<usize>,
    pub(super) usage: Usage,
    pub(super) submitted: Instant,
}

impl Sequence<'_> {
    pub(super) fn kind(&self) -> Kind {
        match self.task {
            Task::Answer(_) => Kind::Answers,
            Task::Embed(_) => Kind::Embeddings,
        }
    }

    pub(super) fn pending(&self) -> usize {
        self.tokens.len() - self.session.position()
    }

    /// Pages that it takes until its tokens are evaluated, and that of the next one if there will be one.
    pub(super) fn pages_wanted(&self) -> usize {
        let next = usize::from(self.kind() == Kind::Answers);
        self.session.pages_wanted(self.session.position(), self.tokens.len() + next)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Begins again with an empty session.
    pub(super) fn reset(&mut self, session: Session) {
        (self.session, self.branch) = (session, None);
        if let Task::Embed(embedding) = &mut self.task {
            embedding.pooled = Default::default();
        }
    }

    /// The next step of an answer, by `choose`; none of what is no answer.
    pub(super) fn next(
        &mut self,
        context: usize,
        choose: impl FnOnce(&mut Decoding<'_>) -> Result<Piece>,
    ) -> Result<Option<Piece>> {
        let Task::Answer(answering) = &mut self.task else { return Ok(None) };
        let piece = choose(&mut answering.decoding)?;
        if piece.finish.is_none() && self.session.position() == context {
            answering.decoding.finish(piece, Finish::ContextFull).map(Some)
        } else {
            Ok(Some(piece))
        }
    }

    /// Says how far the prompt is, unless it is read again.
    pub(super) fn tell_progress(&mut self) {
        let (tokens, cached) = (self.usage.prompt_tokens, self.usage.cached_tokens);
        if let Task::Answer(answering) = &mut self.task
            && self.usage.completion_tokens == 0
        {
            let (evaluated, time) = (self.session.position(), self.submitted.elapsed());
            (answering.sink)(Event::Progress(Progress { tokens, cached, evaluated, time }));
        }
    }

    /// Reading a prompt still, or again, which others may begin with too.
    pub(super) fn is_reading(&self) -> bool {
        self.kind() == Kind::Answers && self.pending() > 1
    }

    /// Notes that its client went away; true if that is how its request ends.
    pub(super) fn give_up(&self) -> bool {
        match &self.task {
            Task::Answer(_) => true,
            Task::Embed(embedding) => embedding.give_up(),
        }
    }

    /// Says that it failed; true if that is how its request ends.
    pub(super) fn fail(&mut self, error: Error) -> bool {
        match &mut self.task {
            Task::Answer(answering) => {
                (answering.sink)(Event::Failed(error));
                true
            }
            Task::Embed(embedding) => embedding.fail(error),
        }
    }
}
