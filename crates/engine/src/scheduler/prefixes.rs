//! Prefix cache: sessions kept after their answers, so that a prompt that shares a prefix with one skips its evaluation.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

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
            !session.tokens().starts_with(old.session.tokens())
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

    /// A fork of the session that has most of `tokens`, if it has any of them.
    pub(super) fn find(&mut self, tokens: &[u32]) -> Option<Session> {
        let usable = |kept: &Kept| kept.session.fork_position(common(kept.session.tokens(), tokens));
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

    /// The longest prefix of `tokens` shared with a cached session, whether or not it can branch off there.
    pub(super) fn longest(&self, tokens: &[u32]) -> usize {
        self.kept.iter().map(|kept| common(kept.session.tokens(), tokens)).max().unwrap_or(0)
    }

    pub(super) fn has(&self, conversation: &str) -> bool {
        self.kept.iter().any(|kept| kept.conversation.as_deref() == Some(conversation))
    }
}

/// Where a conversation is kept. Its key may be any text, so the name is a hash of it.
pub(super) fn file_of(folder: &Path, conversation: &str) -> PathBuf {
    folder.join(format!("{:032x}.session", xxh3_128(conversation.as_bytes())))
}

/// Loads a conversation from disk; `None` if it was never saved.
pub(super) fn load(engine: &mut Engine, folder: &Path, conversation: &str) -> Result<Option<Session>> {
    let path = file_of(folder, conversation);
    if !path.exists() {
        return Ok(None);
    }
    let mut session = engine.session();
    let note = engine.load(&mut session, &path)?;
    Ok((note == conversation).then_some(session))
}
