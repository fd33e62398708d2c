//! Which blocks prompts can begin with: of cached sessions, and of answers under way. Routers that know them send a prompt to
//! where most of it has been evaluated.
//!
//! A block's hash stands for the whole prefix up to its end, so a session's last full block stands for all of its blocks. A step
//! compares only those last blocks; the price is a table of all blocks, with how many go on from each.
//!
//! Prompts that end inside a block can begin with a part of it: the events say less than the cache has. A model with recurrent
//! state may have to go back to a checkpoint inside a prefix that the events have: there they say more.

use std::collections::HashMap;

use crate::chain::BLOCK_TOKENS;
use crate::session::Session;

/// What has become of the blocks that prompts can begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockEvent {
    /// These can be used from now on, each after the one before it.
    Stored {
        /// The block that the first of them follows; none at the beginning of a sequence.
        parent: Option<u64>,
        /// The blocks' hashes, each of all tokens up to the block's end.
        hashes: Vec<u64>,
        /// Their tokens, [`BLOCK_TOKENS`] each.
        tokens: Vec<u32>,
    },
    /// These cannot be used any longer.
    Removed {
        /// The blocks' hashes; a block comes before the one that it follows.
        hashes: Vec<u64>,
    },
    /// There are none.
    Cleared,
}

/// Gets what a step has changed.
pub type BlockObserver = Box<dyn FnMut(Vec<BlockEvent>) + Send>;

#[derive(Debug)]
struct Block {
    parent: Option<u64>,
    /// Blocks that follow it, and sessions that end with it.
    holders: usize,
}

/// The blocks that the observer knows of.
pub(super) struct Ledger {
    blocks: HashMap<u64, Block>,
    /// The last block of every session that has one.
    last: Vec<u64>,
    observer: BlockObserver,
}

impl Ledger {
    /// There are no blocks yet: whoever knows of some has them from another process.
    pub(super) fn new(mut observer: BlockObserver) -> Self {
        observer(vec![BlockEvent::Cleared]);
        Self { blocks: HashMap::new(), last: vec![], observer }
    }

    /// Tells what has changed, now that there are these sessions.
    pub(super) fn update<'a>(&mut self, sessions: impl Iterator<Item = &'a mut Session>) {
        let mut events = vec![];
        let mut last = Vec::with_capacity(self.last.len());
        for session in sessions {
            let (tokens, hashes) = session.blocks();
            if let Some(end) = hashes.last() {
                events.extend(self.store(tokens, hashes));
                self.hold(*end);
                last.push(*end);
            }
        }
        let mut hashes = vec![];
        for end in std::mem::replace(&mut self.last, last) {
            self.release(end, &mut hashes);
        }
        if !hashes.is_empty() {
            let none_left = self.blocks.is_empty();
            events.push(if none_left { BlockEvent::Cleared } else { BlockEvent::Removed { hashes } });
        }
        if !events.is_empty() {
            (self.observer)(events);
        }
    }

    /// Adds those blocks of a session that are new.
    fn store(&mut self, tokens: &[u32], hashes: &[u64]) -> Option<BlockEvent> {
        let known = hashes.iter().rposition(|hash| self.blocks.contains_key(hash)).map_or(0, |last| last + 1);
        let mut parent = known.checked_sub(1).map(|last| hashes[last]);
        let stored = hashes.get(known..).filter(|new| !new.is_empty()).map(|new| BlockEvent::Stored {
            parent,
            hashes: new.to_vec(),
            tokens: tokens[known * BLOCK_TOKENS..hashes.len() * BLOCK_TOKENS].to_vec(),
        });
        for hash in &hashes[known..] {
            if let Some(parent) = parent {
                self.hold(parent);
            }
            self.blocks.insert(*hash, Block { parent, holders: 0 });
            parent = Some(*hash);
        }
        stored
    }

    fn hold(&mut self, hash: u64) {
        self.blocks.get_mut(&hash).expect("a block is there as long as it is held").holders += 1;
    }

    /// Removes the blocks that nobody holds once `hash` is released, from the last to the first.
    fn release(&mut self, hash: u64, removed: &mut Vec<u64>) {
        let mut next = Some(hash);
        while let Some(hash) = next {
            let block = self.blocks.get_mut(&hash).expect("a block is there as long as it is held");
            block.holders -= 1;
            if block.holders > 0 {
                return;
            }
            next = block.parent;
            self.blocks.remove(&hash);
            removed.push(hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::lock;
    use super::*;
    use crate::session::Pool;

    /// A session of so many blocks of each of these tokens.
    fn session(pool: &Arc<Pool>, parts: &[(u32, usize)]) -> Session {
        let mut session = Session::new(Arc::clone(pool));
        let tokens: Vec<u32> =
            parts.iter().flat_map(|(token, blocks)| vec![*token; blocks * BLOCK_TOKENS]).collect();
        session.reserve(0, tokens.len()).unwrap();
        session.extend(&tokens, None);
        session
    }

    fn hashes(session: &mut Session) -> Vec<u64> {
        session.blocks().1.to_vec()
    }

    #[test]
    fn a_block_is_told_once_and_removed_with_its_last_session() {
        let pool = Arc::new(Pool::new(64, 0, 0));
        let told = Arc::new(Mutex::new(vec![]));
        let theirs = Arc::clone(&told);
        let mut ledger = Ledger::new(Box::new(move |events| lock(&theirs).extend(events)));
        let mut check = |sessions: &mut [Session], expected: &[BlockEvent]| {
            ledger.update(sessions.iter_mut());
            assert_eq!(std::mem::take(&mut *lock(&told)), expected);
        };
        check(&mut [], &[BlockEvent::Cleared]);
        let mut sessions = vec![session(&pool, &[(1, 2), (2, 1)])];
        let a = hashes(&mut sessions[0]);
        let tokens = sessions[0].tokens().to_vec();
        check(&mut sessions, &[BlockEvent::Stored { parent: None, hashes: a.clone(), tokens }]);
        // A part of a block is none, and a fork has what there is.
        sessions[0].reserve(3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS).unwrap();
        sessions[0].extend(&[2; BLOCK_TOKENS - 1], None);
        sessions.push(sessions[0].fork(2 * BLOCK_TOKENS));
        check(&mut sessions, &[]);
        sessions.push(session(&pool, &[(1, 2), (3, 2)]));
        let b = hashes(&mut sessions[2]);
        assert_eq!(a[..2], b[..2]);
        let branch = |hashes: &[u64], token, blocks| BlockEvent::Stored {
            parent: Some(a[1]),
            hashes: hashes.to_vec(),
            tokens: vec![token; blocks * BLOCK_TOKENS],
        };
        check(&mut sessions, &[branch(&b[2..], 3, 2)]);
        // The fork holds what the two have in common.
        sessions.remove(0);
        check(&mut sessions, &[BlockEvent::Removed { hashes: vec![a[2]] }]);
        // What goes and what comes in one step: what they share stays.
        sessions[1] = session(&pool, &[(1, 2), (2, 1)]);
        check(&mut sessions, &[branch(&a[2..], 2, 1), BlockEvent::Removed { hashes: vec![b[3], b[2]] }]);
        check(&mut sessions[..1], &[BlockEvent::Removed { hashes: vec![a[2]] }]);
        check(&mut [], &[BlockEvent::Cleared]);
    }
}
