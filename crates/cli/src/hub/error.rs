//! [`HubError`]: what can go wrong between here and the hub.

use std::path::PathBuf;

/// Why something could not be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No answer, or one that broke off, after several tries.
    #[error("cannot reach {url}: {reason}")]
    Unreachable { url: String, reason: String },
    /// The hub wants to know who asks.
    #[error(
        "{what}: the hub refuses access ({status}); if it is private or gated, ask for access on its page, then set \
         HF_TOKEN or run `hf auth login`"
    )]
    Unauthorized { what: String, status: u16 },
    /// There is no such thing.
    #[error("{what} is not on the hub; private repositories need a token in HF_TOKEN")]
    NotFound { what: String },
    /// Any other answer that is not a success.
    #[error("{url}: the hub answers {status}")]
    Refused { url: String, status: u16 },
    /// An answer that cannot be understood.
    #[error("{url}: {what}: expected {expected}, got {got}")]
    Malformed { url: String, what: &'static str, expected: String, got: String },
    /// The file is not what the hub said it is; what came is deleted.
    #[error("{path}: {what}: the hub said {expected}, got {got}; what came is deleted")]
    Content { path: String, what: &'static str, expected: String, got: String },
    /// The file cannot be written.
    #[error("cannot write {}: {source}; what is there is kept, and the next try goes on from it", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// Another process is at it.
    #[error("{} is being downloaded by another process", path.display())]
    Busy { path: PathBuf },
}

impl HubError {
    /// Whether a copy that is here already may be used instead.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}
