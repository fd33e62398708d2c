//! [`Visit`]: the engine between two steps, for what is no answer: logits, hidden states, sessions in files.
//!
//! The scheduler's thread owns the engine, so whoever needs it hands in a closure, which runs when the step under way has
//! ended. All answers wait meanwhile: a visit should be short, such as one chunk of a prompt.
//!
//! Sessions that visitors keep take pages from the same pool as answers do. When answers run out of them, cached sessions are
//! evicted; what visitors hold is not.

use std::path::Path;
use std::sync::mpsc;

use super::prefixes::Prefixes;
use super::{Scheduler, lock};
use crate::engine::Engine;
use crate::session::Session;
use crate::{Error, Result};

pub(super) type Visitor = Box<dyn FnOnce(&mut Visit<'_>) + Send>;

/// The engine and the sessions that the scheduler has cached.
#[derive(Debug)]
pub struct Visit<'a> {
    /// The model itself.
    pub engine: &'a mut Engine,
    pub(super) prefixes: &'a mut Prefixes,
}

impl Visit<'_> {
    /// Calls `evaluate`, which appends `tokens` tokens to `session`; cached sessions are evicted if it needs their room.
    ///
    /// # Errors
    /// Those of `evaluate`.
    pub fn with_room<T>(
        &mut self,
        session: &mut Session,
        tokens: usize,
        mut evaluate: impl FnMut(&mut Engine, &mut Session) -> Result<T>,
    ) -> Result<T> {
        let (from, to) = (session.position(), session.position() + tokens);
        if to <= self.engine.context() {
            while session.pages_wanted(from, to) > self.engine.free_pages() && self.prefixes.evict() {}
        }
        loop {
            match evaluate(self.engine, session) {
                Err(Error::StatesFull { .. }) if self.prefixes.evict() => {}
                other => return other,
            }
        }
    }

    /// The session in a file and the note beside it; cached sessions are evicted if it needs their room.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load(&mut self, path: &Path) -> Result<(Session, String)> {
        loop {
            let mut session = self.engine.session();
            match self.engine.load(&mut session, path) {
                Err(Error::ContextFull { .. } | Error::StatesFull { .. }) if self.prefixes.evict() => {}
                loaded => return loaded.map(|note| (session, note)),
            }
        }
    }

    /// A session with as much of `tokens` as a cached one has evaluated; an empty one if none has any.
    pub fn recall(&mut self, tokens: &[u32]) -> Session {
        self.prefixes.find(tokens, self.engine.default_adapter()).unwrap_or_else(|| self.engine.session())
    }

    /// Caches `session`, so that requests which begin with its tokens skip their evaluation.
    pub fn keep(&mut self, session: Session) {
        self.prefixes.keep(session, None);
    }
}

impl Scheduler {
    /// Calls `task` on the engine's thread between two steps. What it returns comes through the receiver, which is disconnected
    /// if the scheduler ends before.
    ///
    /// # Errors
    /// [`Error::ShuttingDown`].
    pub fn visit<T: Send + 'static>(
        &self,
        task: impl FnOnce(&mut Visit<'_>) -> T + Send + 'static,
    ) -> Result<mpsc::Receiver<T>> {
        let (sender, result) = mpsc::sync_channel(1);
        let visitor: Visitor = Box::new(move |visit| {
            // Nobody may be waiting any more.
            let _ = sender.send(task(visit));
        });
        let mut queue = lock(&self.shared.queue);
        if queue.closed {
            return Err(Error::ShuttingDown);
        }
        queue.visitors.push_back(visitor);
        drop(queue);
        self.shared.changed.notify_all();
        Ok(result)
    }
}
