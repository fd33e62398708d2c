//! [`Session`]: one sequence of tokens on an engine: which pages hold its keys and values, which slot its recurrent
//! state.
//!
//! A recurrent state is never changed in place by an evaluation: it is read from one slot and written to another, and
//! the session takes the new slot when all went well. So a failed evaluation costs nothing to undo, and a checkpoint is
//! another reference to a slot. The price is memory for one more state than is kept.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moeflux_compute::backend::PAGE_TOKENS;

use crate::{Error, Result};

/// Numbers below a limit, handed out one at a time.
#[derive(Debug)]
struct Numbers {
    free: Vec<u32>,
    /// Numbers that ever were in use; those from here on are unused.
    used: u32,
    limit: u32,
}

impl Numbers {
    fn new(limit: usize) -> Self {
        Self { free: vec![], used: 0, limit: u32::try_from(limit).unwrap_or(u32::MAX) }
    }

    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            (self.used < self.limit).then(|| {
                self.used += 1;
                self.used - 1
            })
        })
    }
}

/// Pages and state slots that no session holds.
#[derive(Debug)]
pub(crate) struct Pool {
    pages: Mutex<Numbers>,
    slots: Mutex<Numbers>,
    /// States kept beside a session's present one.
    checkpoints: usize,
}

impl Pool {
    /// A pool of so many pages, and of state slots for a model that has recurrent state.
    pub(crate) fn new(pages: usize, slots: usize, checkpoints: usize) -> Self {
        let (pages, slots) = (Mutex::new(Numbers::new(pages)), Mutex::new(Numbers::new(slots)));
        Self { pages, slots, checkpoints }
    }
}

/// No code that can panic runs under these locks, so a poisoned one still guards a consistent state.
fn lock(numbers: &Mutex<Numbers>) -> MutexGuard<'_, Numbers> {
    numbers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A state slot, free again when the last reference to it goes.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u32,
    pool: Arc<Pool>,
}

impl Slot {
    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.pool.slots).free.push(self.number);
    }
}

/// A position to come back to, with the recurrent state there if the model has any.
#[derive(Debug, Clone)]
struct Checkpoint {
    position: usize,
    state: Option<Arc<Slot>>,
}

/// One sequence of tokens. Dropping it returns its pages and its state.
#[derive(Debug)]
pub struct Session {
    pages: Vec<u32>,
    tokens: Vec<u32>,
    /// State after all tokens; `None` at position 0 and for models without recurrent state.
    state: Option<Arc<Slot>>,
    /// Ascending positions above 0.
    checkpoints: VecDeque<Checkpoint>,
    pool: Arc<Pool>,
}

impl Session {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { pages: vec![], tokens: vec![], state: None, checkpoints: VecDeque::new(), pool }
    }

    /// Tokens evaluated so far.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens evaluated so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Keeps the present position, so that [`Session::restore`] can come back to it and
    /// [`Engine::truncate`](crate::Engine::truncate) can start from it. Of more than
    /// [`Options::checkpoints`](crate::Options::checkpoints) the oldest is dropped. Position 0 is always kept.
    pub fn checkpoint(&mut self) {
        let position = self.position();
        if position == 0 || self.pool.checkpoints == 0 {
            return;
        }
        if self.checkpoints.back().is_none_or(|last| last.position != position) {
            if self.checkpoints.len() == self.pool.checkpoints {
                self.checkpoints.pop_front();
            }
            self.checkpoints.push_back(Checkpoint { position, state: self.state.clone() });
        }
    }

    /// Positions that can be restored, ascending.
    pub fn checkpoints(&self) -> impl Iterator<Item = usize> {
        std::iter::once(0).chain(self.checkpoints.iter().map(|c| c.position))
    }

    /// Goes back to a checkpoint; later ones are dropped.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is none at `position`; the session stays as it is.
    pub fn restore(&mut self, position: usize) -> Result<()> {
        if !self.checkpoints().any(|kept| kept == position) {
            let kept = self.checkpoints().map(|p| p.to_string()).collect::<Vec<_>>().join(", ");
            return Err(Error::NoCheckpoint { position, kept });
        }
        let (_, state) = self.nearest(position);
        self.cut(position, state);
        Ok(())
    }

    /// The last checkpoint at or before `position`, and its state.
    pub(crate) fn nearest(&self, position: usize) -> (usize, Option<Arc<Slot>>) {
        let kept = self.checkpoints.iter().rev().find(|c| c.position <= position);
        kept.map_or((0, None), |c| (c.position, c.state.clone()))
    }

    /// Forgets the tokens from `position` on; `state` is the recurrent state there.
    pub(crate) fn cut(&mut self, position: usize, state: Option<Arc<Slot>>) {
        self.tokens.truncate(position);
        self.checkpoints.retain(|c| c.position <= position);
        self.state = state;
        self.release_pages();
    }

    /// Appends evaluated tokens, after which the recurrent state is `state`.
    pub(crate) fn extend(&mut self, tokens: &[u32], state: Option<Arc<Slot>>) {
        self.tokens.extend_from_slice(tokens);
        self.state = state;
    }

    /// State after all tokens.
    pub(crate) fn state(&self) -> Option<&Arc<Slot>> {
        self.state.as_ref()
    }

    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Takes pages for `positions` positions; returns the number of pages that must exist.
    pub(crate) fn reserve(&mut self, positions: usize) -> Result<usize> {
        let pool = Arc::clone(&self.pool);
        let mut numbers = lock(&pool.pages);
        while self.pages.len() < positions.div_ceil(PAGE_TOKENS) {
            let Some(page) = numbers.take() else {
                let context = numbers.limit as usize * PAGE_TOKENS;
                return Err(Error::ContextFull { wanted: positions, context });
            };
            self.pages.push(page);
        }
        Ok(numbers.used as usize)
    }

    /// Returns pages beyond the present position.
    pub(crate) fn release_pages(&mut self) {
        let keep = self.position().div_ceil(PAGE_TOKENS);
        if keep < self.pages.len() {
            lock(&self.pool.pages).free.extend(self.pages.drain(keep..));
        }
    }

    /// Takes a slot for a new state, dropping the oldest checkpoint if need be; also returns the number of slots that
    /// must exist.
    pub(crate) fn take_slot(&mut self) -> Result<(Arc<Slot>, usize)> {
        loop {
            let mut numbers = lock(&self.pool.slots);
            if let Some(number) = numbers.take() {
                let slot = Slot { number, pool: Arc::clone(&self.pool) };
                return Ok((Arc::new(slot), numbers.used as usize));
            }
            let slots = numbers.limit as usize;
            drop(numbers);
            // Dropped without the lock, which freeing its slot takes.
            if self.checkpoints.pop_front().is_none() {
                return Err(Error::StatesFull { slots });
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cut(0, None);
    }
}
