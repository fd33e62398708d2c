//! Models that Hugging Face's tools, moeflux among them, have downloaded: which files of their cache a name means.
//!
//! ```text
//! models--org--name/blobs/CHECKSUM                  content
//! models--org--name/snapshots/COMMIT/path/to/file   symbolic link to its content
//! models--org--name/refs/main                       the commit that main was
//! ```
//!
//! Nothing is downloaded here.

mod id;
mod listing;

use std::path::{Path, PathBuf};

pub use id::{HubId, is_checksum, stays_within};
pub use listing::{Listing, RemoteFile, Selection};

use crate::{Error, Result};

/// The folder of one repository in the cache.
#[derive(Debug, Clone)]
pub struct Repository {
    folder: PathBuf,
}

impl Repository {
    /// That of `id`, whether or not it is there.
    pub fn new(cache: &Path, id: &HubId) -> Self {
        Self { folder: cache.join(format!("models--{}", id.repo.replace('/', "--"))) }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder with the files of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The commit that `revision` was when it was last downloaded; a commit is itself.
    pub fn revision(&self, revision: &str) -> Option<String> {
        if is_checksum(revision) && self.snapshot(revision).is_dir() {
            return Some(revision.to_owned());
        }
        let commit = std::fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_checksum(commit))
    }

    /// The checkpoint that `id` names, if it is complete.
    ///
    /// # Errors
    /// [`Error::Io`] if the snapshot cannot be read.
    pub fn find(&self, id: &HubId) -> Result<Option<PathBuf>> {
        let Some(commit) = self.revision(id.revision()) else { return Ok(None) };
        let snapshot = self.snapshot(&commit);
        match Listing::of_folder(&commit, &snapshot)?.select(id) {
            Ok(selection) if selection.is_complete(&snapshot) => Ok(Some(snapshot.join(selection.opens))),
            _ => Ok(None),
        }
    }
}

/// Where the checkpoint that `id` names is in `cache`.
///
/// # Errors
/// [`Error::Hub`] if it is not there, not complete, or `id` means several.
pub fn find(cache: &Path, id: &HubId) -> Result<PathBuf> {
    let repository = Repository::new(cache, id);
    if let Some(path) = repository.find(id)? {
        return Ok(path);
    }
    if let Some(commit) = repository.revision(id.revision()) {
        Listing::of_folder(&commit, &repository.snapshot(&commit))?.select(id)?;
    }
    let reason =
        format!("is not, or not completely, in {}; `moeflux pull {id}` downloads it", cache.display());
    Err(Error::Hub { model: id.to_string(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_complete_is_found() {
        let cache = tempfile::tempdir().unwrap();
        let id = |text: &str| HubId::parse(text).unwrap();
        let reason = |text: &str| find(cache.path(), &id(text)).unwrap_err().to_string();
        assert!(reason("org/name").contains("moeflux pull org/name"), "{}", reason("org/name"));

        let commit = "0123456789012345678901234567890123456789";
        let repository = Repository::new(cache.path(), &id("org/name"));
        let snapshot = repository.snapshot(commit);
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repository.folder().join("refs")).unwrap();
        std::fs::write(repository.folder().join("refs/main"), commit).unwrap();
        for file in ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf"] {
            std::fs::write(snapshot.join(file), b"x").unwrap();
        }
        let found = find(cache.path(), &id("org/name:Q4_K_M")).unwrap();
        assert_eq!(found, snapshot.join("m-Q4_K_M.gguf"));
        assert_eq!(find(cache.path(), &id(&format!("org/name@{commit}:Q4_K_M"))).unwrap(), found);
        assert!(reason("org/name").contains("several models"), "{}", reason("org/name"));
        assert!(reason("org/name:Q8_0").contains("not completely"), "{}", reason("org/name:Q8_0"));
        assert!(reason("org/name:Q2_K").contains("has no Q2_K"), "{}", reason("org/name:Q2_K"));
        assert!(reason("org/name@other").contains("not completely"));
    }
}
