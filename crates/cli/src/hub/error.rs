//! [`HubError`]: what can go wrong when talking to the hub.

use std::path::PathBuf;

/// Why a request to the hub failed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// No response, or an incomplete one, after several attempts.
    #[error("cannot reach {url}: {reason}")]
    Unreachable { url: String, reason: String },
    /// The hub requires authentication.
    #[error(
        "{what}: the hub refuses access ({status}); if it is private or gated, ask for access on its page, then set \
         HF_TOKEN or run `hf auth login`"
    )]
    Unauthorized { what: String, status: u16 },
    /// Not found.
    #[error("{what} is not on the hub; private repositories need a token in HF_TOKEN")]
    NotFound { what: String },
    /// Any other answer that is not a success.
    #[error("{url}: the hub answers {status}")]
    Refused { url: String, status: u16 },
    /// A response that cannot be parsed.
    #[error("{url}: {what}: expected {expected}, got {got}")]
    Malformed { url: String, what: &'static str, expected: String, got: String },
    /// The file does not match the hub's checksum or size; the download is deleted.
    #[error("{path}: {what}: expected {expected}, got {got}; the download was deleted")]
    Content { path: String, what: &'static str, expected: String, got: String },
    /// The file cannot be written.
    #[error("cannot write {}: {source}; the partial file is kept and the next attempt resumes it", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// Another process is downloading it.
    #[error("{} is being downloaded by another process", path.display())]
    Busy { path: PathBuf },
}

impl HubError {
    /// Whether a copy that is here already may be used instead.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}
