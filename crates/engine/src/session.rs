//! [`Session`]: one sequence of tokens on an engine: which pages hold its keys and values, which slot its recurrent
//! state.
//!
//! A recurrent state is never changed in place by an evaluation: it is read from one slot and written to another, and
//! the session takes the new slot when all went well. So a failed evaluation costs nothing to undo, and a checkpoint is
//! another reference to a slot. The price is memory for one more state than is kept.
//!
//! Pages are shared between a session and its forks, whole or in part filled; whoever writes to a shared page first
//! gets a copy.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moeflux_compute::backend::PAGE_TOKENS;

use crate::chain::Chain;
use crate::pictures::tokens::Places;
use crate::speculation::DraftRows;
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

/// Pages, each held by any number of sessions.
#[derive(Debug)]
struct Pages {
    numbers: Numbers,
    /// Sessions that hold each page that ever was in use.
    holders: Vec<u32>,
}

impl Pages {
    fn take(&mut self) -> Option<u32> {
        let page = self.numbers.take()?;
        self.holders.resize(self.numbers.used as usize, 0);
        self.holders[page as usize] = 1;
        Some(page)
    }

    fn free(&self) -> usize {
        (self.numbers.limit - self.numbers.used) as usize + self.numbers.free.len()
    }

    fn share(&mut self, page: u32) {
        self.holders[page as usize] += 1;
    }

    fn release(&mut self, page: u32) {
        self.holders[page as usize] -= 1;
        if self.holders[page as usize] == 0 {
            self.numbers.free.push(page);
        }
    }
}

/// Pages and state slots that no session holds.
#[derive(Debug)]
pub(crate) struct Pool {
    pages: Mutex<Pages>,
    slots: Mutex<Numbers>,
    /// States kept beside a session's present one.
    checkpoints: usize,
}

impl Pool {
    /// A pool of so many pages, and of state slots for a model that has recurrent state.
    pub(crate) fn new(pages: usize, slots: usize, checkpoints: usize) -> Self {
        let pages = Mutex::new(Pages { numbers: Numbers::new(pages), holders: vec![] });
        Self { pages, slots: Mutex::new(Numbers::new(slots)), checkpoints }
    }

    /// Pages that no session holds.
    pub(crate) fn free_pages(&self) -> usize {
        lock(&self.pages).free()
    }

    /// Pages in total.
    pub(crate) fn pages(&self) -> usize {
        lock(&self.pages).numbers.limit as usize
    }
}

/// What must exist for a session to be evaluated further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reserved {
    /// Number of pages.
    pub(crate) pages: usize,
    /// Pages that take the place of shared ones, with [`Session::adopt`] when their content is there.
    pub(crate) own: Vec<OwnPage>,
}

/// A page in place of one that other sessions hold too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnPage {
    /// Which of the session's pages it is to be.
    index: usize,
    /// The shared page, and the new one.
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Whether the session has positions there.
    pub(crate) filled: bool,
}

/// No code that can panic runs under these locks, so a poisoned one still guards a consistent state.
fn lock<T>(numbers: &Mutex<T>) -> MutexGuard<'_, T> {
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
    /// The hidden state of the position before, if tokens are drafted from it.
    hidden: Option<Arc<[f32]>>,
}

/// One sequence of tokens. Dropping it returns its pages and its state.
#[derive(Debug)]
pub struct Session {
    pages: Vec<u32>,
    tokens: Vec<u32>,
    /// Hashes of the blocks of `tokens`, as far as anybody asked for them.
    chain: Chain,
    /// Where there are pictures among them.
    pictures: Places,
    /// State after all tokens; `None` at position 0 and for models without recurrent state.
    state: Option<Arc<Slot>>,
    /// Ascending positions above 0.
    checkpoints: VecDeque<Checkpoint>,
    /// What tokens are drafted from, if they are.
    pub(crate) drafts: DraftRows,
    /// The adapter that its tokens are evaluated with, if any.
    adapter: Option<u32>,
    pool: Arc<Pool>,
}

impl Session {
    #[cfg(test)]
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self::with_adapter(pool, None)
    }

    /// A sequence that is evaluated with the adapter of this number, which is known by a hash.
    pub(crate) fn with_adapter(pool: Arc<Pool>, adapter: Option<(u32, u64)>) -> Self {
        let chain = Chain::of(adapter.map_or(0, |(_, root)| root));
        let (drafts, checkpoints, pictures) = (DraftRows::default(), VecDeque::new(), Places::default());
        let adapter = adapter.map(|(number, _)| number);
        Self {
            pages: vec![],
            tokens: vec![],
            chain,
            pictures,
            state: None,
            checkpoints,
            drafts,
            adapter,
            pool,
        }
    }

    /// Number of the adapter that its tokens are evaluated with, if any.
    pub(crate) fn adapter(&self) -> Option<u32> {
        self.adapter
    }

    /// Tokens evaluated so far.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// The tokens evaluated so far. Where a picture is, they are beyond the vocabulary: see [`Picture::tokens`](crate::Picture).
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where there are pictures among the tokens.
    pub(crate) fn pictures(&self) -> &Places {
        &self.pictures
    }

    /// The tokens evaluated so far, and the hashes of their full blocks.
    pub(crate) fn blocks(&mut self) -> (&[u32], &[u64]) {
        (&self.tokens, self.chain.extend(&self.tokens))
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
            let (state, hidden) = (self.state.clone(), self.drafts.last(position));
            self.checkpoints.push_back(Checkpoint { position, state, hidden });
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
        self.chain.truncate(position);
        self.pictures.cut(position);
        self.checkpoints.retain(|c| c.position <= position);
        self.state = state;
        self.cut_drafts(position);
        self.release_pages();
    }

    /// Takes drafting back to `position`.
    pub(crate) fn cut_drafts(&mut self, position: usize) {
        self.drafts.cut(position);
        let kept = self.checkpoints.iter().find(|c| c.position == position);
        if let Some(hidden) = kept.and_then(|c| c.hidden.as_ref()) {
            self.drafts.restore(position, hidden);
        }
    }

    /// Appends evaluated tokens, after which the recurrent state is `state`.
    pub(crate) fn extend(&mut self, tokens: &[u32], state: Option<Arc<Slot>>) {
        self.pictures.extend(self.tokens.len(), tokens);
        self.tokens.extend_from_slice(tokens);
        self.state = state;
    }

    /// Holds `tokens` instead, whose keys and values are in the pages that the session has.
    pub(crate) fn replace(&mut self, tokens: Vec<u32>, state: Option<Arc<Slot>>) {
        self.checkpoints.clear();
        self.drafts = DraftRows::default();
        self.drafts.restart(tokens.len());
        self.pictures = Places::of(&tokens);
        self.tokens = tokens;
        self.chain = Chain::default();
        self.state = state;
        self.release_pages();
    }

    /// State after all tokens.
    pub(crate) fn state(&self) -> Option<&Arc<Slot>> {
        self.state.as_ref()
    }

    pub(crate) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Takes pages so that positions `from..to` can be written, for this session alone once it has adopted them.
    ///
    /// # Errors
    /// [`Error::ContextFull`] if there are not enough; the session stays as it is.
    pub(crate) fn reserve(&mut self, from: usize, to: usize) -> Result<Reserved> {
        let pool = Arc::clone(&self.pool);
        let mut pages = lock(&pool.pages);
        let (wanted, free) = (self.wanted(&pages, from, to), pages.free());
        let none_left =
            Error::ContextFull { wanted: to, context: pages.numbers.limit as usize * PAGE_TOKENS };
        let mut own = vec![];
        if wanted > free {
            return Err(none_left);
        }
        for index in self.shared(&pages, from, to).collect::<Vec<_>>() {
            let Some(page) = pages.take() else { return Err(none_left) };
            let filled = index * PAGE_TOKENS < self.position();
            own.push(OwnPage { index, from: self.pages[index], to: page, filled });
        }
        while self.pages.len() < to.div_ceil(PAGE_TOKENS) {
            let Some(page) = pages.take() else { return Err(none_left) };
            self.pages.push(page);
        }
        Ok(Reserved { pages: pages.numbers.used as usize, own })
    }

    /// Holds pages that were reserved in place of shared ones.
    pub(crate) fn adopt(&mut self, own: &[OwnPage]) {
        let mut pages = lock(&self.pool.pages);
        for page in own {
            self.pages[page.index] = page.to;
            pages.release(page.from);
        }
    }

    /// Gives back pages that were reserved in place of shared ones and not adopted.
    pub(crate) fn disown(&mut self, own: &[OwnPage]) {
        let mut pages = lock(&self.pool.pages);
        own.iter().for_each(|page| pages.release(page.to));
    }

    /// Pages that [`Session::reserve`] would take.
    pub(crate) fn pages_wanted(&self, from: usize, to: usize) -> usize {
        self.wanted(&lock(&self.pool.pages), from, to)
    }

    fn wanted(&self, pages: &Pages, from: usize, to: usize) -> usize {
        to.div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len()) + self.shared(pages, from, to).count()
    }

    /// Which of the session's pages with positions in `from..to` others hold too.
    fn shared(&self, pages: &Pages, from: usize, to: usize) -> impl Iterator<Item = usize> {
        let range = from / PAGE_TOKENS..to.div_ceil(PAGE_TOKENS).min(self.pages.len());
        range.filter(|index| pages.holders[self.pages[*index] as usize] > 1)
    }

    /// Returns pages beyond the present position.
    pub(crate) fn release_pages(&mut self) {
        let keep = self.position().div_ceil(PAGE_TOKENS);
        if keep < self.pages.len() {
            let mut pages = lock(&self.pool.pages);
            self.pages.drain(keep..).for_each(|page| pages.release(page));
        }
    }

    /// The last position up to `limit` at which [`Session::fork`] can branch off.
    pub fn fork_position(&self, limit: usize) -> usize {
        match &self.state {
            None => self.pictures.whole(limit.min(self.position())),
            Some(_) if limit >= self.position() => self.position(),
            Some(_) => self.nearest(limit).0,
        }
    }

    /// A session with the first tokens of this one, up to [`Session::fork_position`] of `limit`. Nothing is evaluated
    /// or copied: the two share memory until one of them continues.
    pub fn fork(&self, limit: usize) -> Self {
        let position = self.fork_position(limit);
        let state = if position == self.position() { self.state.clone() } else { self.nearest(position).1 };
        let pages = self.pages[..position.div_ceil(PAGE_TOKENS)].to_vec();
        let mut shared = lock(&self.pool.pages);
        pages.iter().for_each(|page| shared.share(*page));
        drop(shared);
        let kept = self.checkpoints.iter().filter(|c| c.position <= position);
        let mut fork = Self {
            pages,
            tokens: self.tokens[..position].to_vec(),
            chain: self.chain.first(position),
            pictures: Places::of(&self.tokens[..position]),
            state,
            checkpoints: kept.cloned().collect(),
            drafts: self.drafts.clone(),
            adapter: self.adapter,
            pool: Arc::clone(&self.pool),
        };
        fork.cut_drafts(position);
        fork
    }

    /// Takes a slot for a new state, dropping the oldest checkpoint that frees one if need be; also returns the number of
    /// slots that must exist.
    ///
    /// # Errors
    /// [`Error::StatesFull`] if nothing that this session could drop frees one; it stays as it is.
    pub(crate) fn take_slot(&mut self) -> Result<(Arc<Slot>, usize)> {
        loop {
            let mut numbers = lock(&self.pool.slots);
            if let Some(number) = numbers.take() {
                let slot = Slot { number, pool: Arc::clone(&self.pool) };
                return Ok((Arc::new(slot), numbers.used as usize));
            }
            let slots = numbers.limit as usize;
            drop(numbers);
            let alone = |c: &Checkpoint| c.state.as_ref().is_some_and(|s| Arc::strong_count(s) == 1);
            let Some(index) = self.checkpoints.iter().position(alone) else {
                return Err(Error::StatesFull { slots });
            };
            // Dropped without the lock, which freeing its slot takes.
            self.checkpoints.remove(index);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cut(0, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slot of the state at `position`, as `nearest` gives it.
    fn slot(session: &Session, position: usize) -> Option<u32> {
        session.nearest(position).1.map(|slot| slot.number())
    }

    #[test]
    fn the_nearest_checkpoint_is_the_last_one_not_beyond() {
        let pool = Arc::new(Pool::new(8, 8, 4));
        let mut session = Session::new(pool);
        let mut slots = vec![];
        for _ in 0..3 {
            session.reserve(session.position(), session.position() + 10).unwrap();
            let (state, _) = session.take_slot().unwrap();
            slots.push(state.number());
            session.extend(&[7; 10], Some(state));
            session.checkpoint();
        }
        assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, 10, 20, 30]);
        session.reserve(30, 35).unwrap();
        let (state, _) = session.take_slot().unwrap();
        let last = Some(state.number());
        session.extend(&[7; 5], Some(state));
        for position in 0..=36 {
            let expected = position.min(30) / 10 * 10;
            assert_eq!(session.nearest(position).0, expected, "{position}");
            let state = expected.checked_sub(10).map(|before| slots[before / 10]);
            assert_eq!(slot(&session, position), state, "{position}");
            // All of it needs no checkpoint.
            let (branch, of_branch) = if position < 35 { (expected, state) } else { (35, last) };
            assert_eq!(session.fork_position(position), branch, "{position}");
            let fork = session.fork(position);
            assert_eq!((fork.position(), fork.state().map(|slot| slot.number())), (branch, of_branch));
            assert_eq!(fork.checkpoints().last(), Some(expected));
        }
    }

    #[test]
    fn cutting_forgets_what_is_beyond() {
        let pool = Arc::new(Pool::new(8, 8, 4));
        let mut session = Session::new(Arc::clone(&pool));
        for end in [PAGE_TOKENS, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1] {
            session.reserve(session.position(), end).unwrap();
            session.extend(&vec![7; end - session.position()], None);
            session.checkpoint();
        }
        assert_eq!(pool.free_pages(), 5);
        session.cut(2 * PAGE_TOKENS, None);
        assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, PAGE_TOKENS, 2 * PAGE_TOKENS]);
        assert_eq!(pool.free_pages(), 6);
        session.cut(2 * PAGE_TOKENS - 1, None);
        assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, PAGE_TOKENS]);
        assert_eq!(pool.free_pages(), 6);
        drop(session);
        assert_eq!(pool.free_pages(), 8);
    }
}
