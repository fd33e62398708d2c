//! Prefix cache: sessions kept after their answers, so that a prompt that shares a prefix with one skips its evaluation.

use std::path::{Path, PathBuf};

use super::folder;
use crate::Result;
use crate::engine::Engine;
use crate::session::Session;

/// Tokens that two sequences have in common at their beginnings.
pub(super) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[derive(Debug)]
struct Kept {
    session: Session,
    /// Key of the conversation, if it is kept on disk.
    conversation: Option<String>,
}

/// Kept sessions, the one that was used longest ago first.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    kept: Vec<Kept>,
    limit: usize,
}

impl Prefixes {
    pub(super) fn new(limit: usize) -> Self {
        Self { kept: vec![], limit }
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Keeps `session`, unless it is empty, in place of those that it continues.
    pub(super) fn keep(&mut self, session: Session, conversation: Option<String>) {
        if session.position() == 0 {
            return;
        }
        self.kept.retain(|old| {
            (session.adapter() != old.session.adapter()
                || !session.tokens().starts_with(old.session.tokens()))
                && (conversation.is_none() || old.conversation != conversation)
        });
        self.kept.push(Kept { session, conversation });
        let extra = self.kept.len().saturating_sub(self.limit);
        self.kept.drain(..extra);
    }

    /// Drops the session that was used longest ago; false if there is none.
    pub(super) fn evict(&mut self) -> bool {
        !self.kept.is_empty() && {
            self.kept.remove(0);
            true
        }
    }

    /// A fork of the session with this adapter that has most of `tokens`, if it has any of them.
    pub(super) fn find(&mut self, tokens: &[u32], adapter: Option<u32>) -> Option<Session> {
        let usable = |kept: &Kept| match kept.session.adapter() == adapter {
            true => kept.session.fork_position(common(kept.session.tokens(), tokens)),
            false => 0,
        };
        let best = (0..self.kept.len()).max_by_key(|index| usable(&self.kept[*index]))?;
        let position = usable(&self.kept[best]);
        if position == 0 {
            return None;
        }
        let kept = self.kept.remove(best);
        let fork = kept.session.fork(position);
        self.kept.push(kept);
        Some(fork)
    }

    /// The longest prefix of `tokens` shared with a cached session with this adapter, whether or not it can branch off there.
    pub(super) fn longest(&self, tokens: &[u32], adapter: Option<u32>) -> usize {
        let same = self.kept.iter().filter(|kept| kept.session.adapter() == adapter);
        same.map(|kept| common(kept.session.tokens(), tokens)).max().unwrap_or(0)
    }

    /// All of them.
    pub(super) fn sessions(&mut self) -> impl Iterator<Item = &mut Session> {
        self.kept.iter_mut().map(|kept| &mut kept.session)
    }

    pub(super) fn has(&self, conversation: &str) -> bool {
        self.kept.iter().any(|kept| kept.conversation.as_deref() == Some(conversation))
    }
}

/// Where a conversation is kept. Its key may be any text, so the name is a hash of it.
pub(super) fn file_of(folder: &Path, conversation: &str) -> PathBuf {
    folder.join(folder::name(conversation))
}

/// Loads a conversation from disk; `None` if it was never saved.
pub(super) fn load(
    engine: &mut Engine,
    folder: &Path,
    conversation: &str,
    adapter: Option<u32>,
) -> Result<Option<Session>> {
    let path = file_of(folder, conversation);
    if !path.exists() {
        return Ok(None);
    }
    let mut session = engine.session_of(adapter);
    let note = engine.load(&mut session, &path)?;
    Ok((note == conversation).then_some(session))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::session::Pool;

    fn session(pool: &Arc<Pool>, tokens: &[u32]) -> Session {
        let mut session = Session::new(Arc::clone(pool));
        session.reserve(0, tokens.len()).unwrap();
        session.extend(tokens, None);
        session
    }

    fn positions(prefixes: &mut Prefixes, all: &[&[u32]]) -> Vec<usize> {
        all.iter().map(|tokens| prefixes.find(tokens, None).map_or(0, |found| found.position())).collect()
    }

    #[test]
    fn the_session_that_was_used_longest_ago_goes_first() {
        let pool = Arc::new(Pool::new(16, 0, 0));
        let (a, b, c): (&[u32], &[u32], &[u32]) = (&[1, 2, 3], &[4, 5], &[6, 7, 8, 9]);
        let mut prefixes = Prefixes::new(2);
        prefixes.keep(session(&pool, a), None);
        prefixes.keep(session(&pool, b), None);
        assert_eq!(prefixes.len(), 2);
        assert_eq!(prefixes.find(&[1, 2, 9], None).unwrap().position(), 2);
        prefixes.keep(session(&pool, c), None);
        assert_eq!(prefixes.len(), 2);
        assert_eq!(positions(&mut prefixes, &[a, b, c]), [3, 0, 4]);
        assert!(prefixes.evict());
        assert_eq!(positions(&mut prefixes, &[a, c]), [0, 4]);
        assert!(prefixes.evict() && !prefixes.evict());
        assert_eq!(pool.free_pages(), 16);
    }

    #[test]
    fn what_an_adapter_made_is_found_by_that_adapter() {
        let pool = Arc::new(Pool::new(16, 0, 0));
        let mut prefixes = Prefixes::new(9);
        for adapter in [None, Some(0), Some(1)] {
            let mut session = Session::with_adapter(Arc::clone(&pool), adapter.map(|number| (number, 7)));
            let tokens: &[u32] = if adapter == Some(1) { &[1, 2, 3] } else { &[1, 2] };
            session.reserve(0, tokens.len()).unwrap();
            session.extend(tokens, None);
            prefixes.keep(session, None);
        }
        assert_eq!(prefixes.len(), 3, "none continues another");
        for (adapter, expected) in [(None, 2), (Some(0), 2), (Some(1), 3), (Some(2), 0)] {
            assert_eq!(prefixes.longest(&[1, 2, 3], adapter), expected);
            let found = prefixes.find(&[1, 2, 3], adapter);
            assert_eq!(found.as_ref().map_or(0, Session::position), expected);
            assert!(found.is_none_or(|found| found.adapter() == adapter));
        }
    }

    #[test]
    fn what_is_continued_is_replaced() {
        let pool = Arc::new(Pool::new(16, 0, 0));
        let mut prefixes = Prefixes::new(9);
        let key = |name: &str| Some(name.to_owned());
        prefixes.keep(session(&pool, &[]), None);
        assert_eq!(prefixes.len(), 0, "nothing is known of an empty one");
        prefixes.keep(session(&pool, &[1, 2]), None);
        prefixes.keep(session(&pool, &[1, 2, 3]), None);
        assert_eq!(prefixes.len(), 1);
        // A conversation has one session, whatever became of its tokens.
        prefixes.keep(session(&pool, &[5, 6]), key("x"));
        prefixes.keep(session(&pool, &[5, 7]), key("y"));
        prefixes.keep(session(&pool, &[5, 8]), key("x"));
        assert_eq!(prefixes.len(), 3);
        assert!(prefixes.has("x") && prefixes.has("y") && !prefixes.has("z"));
        assert_eq!(positions(&mut prefixes, &[&[1, 2, 3], &[5, 7], &[5, 8], &[5, 6]]), [3, 2, 2, 1]);
    }
}
