//! [`RepoCache`]: writing to the folder of one repository in the shared cache.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use moeflux::hub::{HubId, RemoteFile, Repository};
use rustix::fs::statvfs;

use super::settings::Settings;

/// A repository's folder.
#[derive(Debug)]
pub struct RepoCache {
    repository: Repository,
}

impl RepoCache {
    pub fn new(settings: &Settings, id: &HubId) -> Self {
        Self { repository: Repository::new(&settings.cache, id) }
    }

    pub fn folder(&self) -> &Path {
        self.repository.folder()
    }

    /// The checkpoint that `id` names, if it is complete.
    pub fn find(&self, id: &HubId) -> moeflux::Result<Option<PathBuf>> {
        self.repository.find(id)
    }

    /// Where the content of `file` is or will be.
    pub fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.folder().join("blobs").join(&file.checksum)
    }

    /// Where it is while it is incomplete: always a whole number of bytes from its start.
    pub fn incomplete(&self, file: &RemoteFile) -> PathBuf {
        self.folder().join("blobs").join(format!("{}.incomplete", file.checksum))
    }

    /// Whether the content of `file` is complete.
    pub fn has(&self, file: &RemoteFile) -> bool {
        fs::metadata(self.blob(file)).is_ok_and(|found| found.len() == file.size)
    }

    /// Bytes of `file` that an interrupted download left; more than there should be are none.
    pub fn partial(&self, file: &RemoteFile) -> u64 {
        let found = fs::metadata(self.incomplete(file)).map_or(0, |found| found.len());
        if found > file.size { 0 } else { found }
    }

    /// Bytes that can be written where the cache is; `None` if the system does not say.
    pub fn free_space(&self) -> Result<Option<u64>> {
        let blobs = self.folder().join("blobs");
        fs::create_dir_all(&blobs).with_context(|| format!("cannot create {}", blobs.display()))?;
        Ok(statvfs(&blobs).ok().map(|space| space.f_bavail.saturating_mul(space.f_frsize)))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository.snapshot(commit)
    }

    /// Makes the content of `file` appear under its name in the snapshot of `commit`.
    pub fn link(&self, commit: &str, file: &RemoteFile) -> Result<()> {
        let path = self.snapshot(commit).join(&file.path);
        let make = || -> std::io::Result<()> {
            fs::create_dir_all(path.parent().unwrap_or(self.folder()))?;
            // The link is relative, so that a cache can be moved: out of the file's folders, the commit's, snapshots.
            let up = "../".repeat(file.path.split('/').count() + 1);
            let target = PathBuf::from(format!("{up}blobs/{}", file.checksum));
            if fs::read_link(&path).is_ok_and(|found| found == target) {
                return Ok(());
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
                _ => symlink(target, &path),
            }
        };
        make().with_context(|| format!("cannot create {}", path.display()))
    }

    /// The commit that `revision` was when it was last downloaded; a commit is itself.
    pub fn revision(&self, revision: &str) -> Option<String> {
        self.repository.revision(revision)
    }

    /// Forgets which commit `revision` was.
    pub fn forget_revision(&self, revision: &str) -> Result<()> {
        let path = self.folder().join("refs").join(revision);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// Notes which commit `revision` is.
    pub fn set_revision(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        let write = || {
            fs::create_dir_all(path.parent().unwrap_or(self.folder()))?;
            moeflux::io::atomic_file::write(&path, commit.as_bytes())
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}
