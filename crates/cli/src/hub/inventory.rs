//! What the shared cache holds, and removing it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use moeflux::hub::{HubId, Listing};

use super::cache::RepoCache;
use super::settings::Settings;

/// A model in the cache.
#[derive(Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// As commands name it: `org/name`, `org/name:FILE`, with `@REVISION` if that is not `main`.
    pub name: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Whether all its files are there.
    pub complete: bool,
    /// What is opened.
    pub path: PathBuf,
}

/// All models in the cache that commands can open, by name.
pub fn list(settings: &Settings) -> Result<Vec<CachedModel>> {
    let mut models = vec![];
    for name in names(&settings.cache)? {
        let Some(repo) = name.strip_prefix("models--").map(|name| name.replacen("--", "/", 1)) else {
            continue;
        };
        let Some(id) = HubId::parse(&repo) else { continue };
        let cache = RepoCache::new(settings, &id);
        for (revision, commit) in revisions(&cache)? {
            let shown = if revision == "main" { repo.clone() } else { format!("{repo}@{revision}") };
            let snapshot = cache.snapshot(&commit);
            for (choice, selection) in Listing::of_folder(&commit, &snapshot)?.models() {
                models.push(CachedModel {
                    name: choice.map_or_else(|| shown.clone(), |choice| format!("{shown}:{choice}")),
                    bytes: selection.files.iter().map(|file| file.size).sum(),
                    complete: selection.is_complete(&snapshot),
                    path: snapshot.join(&selection.opens),
                });
            }
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Removes a model's files from the cache, but what other revisions or models share; returns the bytes that are free now.
pub fn remove(settings: &Settings, id: &HubId) -> Result<u64> {
    let cache = RepoCache::new(settings, id);
    let missing = || format!("{id} is not in {}", settings.cache.display());
    let commit = cache.revision(id.revision()).with_context(missing)?;
    let snapshot = cache.snapshot(&commit);
    let selection = Listing::of_folder(&commit, &snapshot)?.select(id)?;
    let mut blobs = BTreeSet::new();
    let mut freed = 0;
    for file in &selection.files {
        let link = snapshot.join(&file.path);
        if link.is_symlink() {
            blobs.extend(fs::canonicalize(&link));
        } else {
            freed += file.size;
        }
        fs::remove_file(&link).with_context(|| format!("cannot remove {}", link.display()))?;
    }
    // Small files stay as long as something can be opened with them.
    if Listing::of_folder(&commit, &snapshot)?.models().is_empty() {
        blobs.extend(targets(&snapshot)?);
        for (revision, _) in revisions(&cache)?.into_iter().filter(|(_, own)| *own == commit) {
            cache.forget_revision(&revision)?;
        }
        fs::remove_dir_all(&snapshot).with_context(|| format!("cannot remove {}", snapshot.display()))?;
    }
    let used = targets(&cache.folder().join("snapshots"))?;
    // A link that leads out of the cache is no content of it.
    let contents = cache.folder().join("blobs");
    let inside = fs::canonicalize(&contents).unwrap_or_else(|_| contents.clone());
    for blob in blobs.difference(&used).filter(|blob| blob.starts_with(&inside)) {
        freed += fs::metadata(blob).map_or(0, |found| found.len());
        fs::remove_file(blob).with_context(|| format!("cannot remove {}", blob.display()))?;
    }
    // Downloads that were interrupted stay.
    if used.is_empty() && names(&contents)?.is_empty() {
        let folder = cache.folder();
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(freed)
}

/// Branches and tags with their commits.
fn revisions(cache: &RepoCache) -> Result<Vec<(String, String)>> {
    let mut found = vec![];
    let mut folders = vec![String::new()];
    let refs = cache.folder().join("refs");
    while let Some(folder) = folders.pop() {
        for name in names(&refs.join(&folder))? {
            let name = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if refs.join(&name).is_dir() {
                folders.push(name);
            } else if let Some(commit) =
                cache.revision(&name).filter(|commit| cache.snapshot(commit).is_dir())
            {
                found.push((name, commit));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The contents that links in `folder` and its folders lead to.
fn targets(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for name in names(folder)? {
        let path = folder.join(name);
        if path.is_symlink() || path.is_file() {
            found.extend(fs::canonicalize(&path));
        } else {
            found.extend(targets(&path)?);
        }
    }
    Ok(found)
}

/// Names of a folder's entries; of one that is not there none.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}
