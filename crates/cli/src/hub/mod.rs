//! Models of the Hugging Face hub: `org/name`, `org/name:Q4_K_M`, `org/name:FILE`, `org/name@REVISION`.
//!
//! Files go to the cache that Hugging Face's own tools use (blobs by checksum, snapshots by commit), so that whatever
//! one of them has downloaded, the others find. Transfer is ours rather than a hub client's because a model of 400 GB
//! needs what those leave out: several ranges of one file at once, resuming after an interruption, and a checksum of
//! every byte before a file counts as there.

mod cache;
mod error;
mod headers;
mod inventory;
mod progress;
mod remote;
mod settings;
mod transfer;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use moeflux::error::size;
pub use moeflux::hub::HubId;

pub use headers::{Headers, headers};
pub use inventory::{list, remove};
pub use settings::Settings;

use cache::RepoCache;
use transfer::Transfer;

/// Where the checkpoint that `id` names is in the cache, after downloading what was not there; with a GGUF file also what
/// reads `pictures`, if wanted and there.
pub fn pull(id: &HubId, settings: &Settings, pictures: bool) -> Result<PathBuf> {
    let cache = RepoCache::new(settings, id);
    if settings.offline {
        let cached = cache.find(id)?;
        return cached
            .with_context(|| format!("{id} is not in {} and the hub is offline", cache.folder().display()));
    }
    let transfer = Transfer::new(settings);
    let listing = match remote::fetch(&transfer, id) {
        Ok(listing) => listing,
        // What is complete here need not wait for the network to come back.
        Err(error) if error.is_unreachable() => match cache.find(id)? {
            Some(path) => {
                eprintln!("{error}; using what is in {}", cache.folder().display());
                return Ok(path);
            }
            None => return Err(error.into()),
        },
        Err(error) => return Err(error.into()),
    };
    let selection = listing.select(id)?;
    let projector = selection.projector.iter().filter(|_| pictures);
    let files = || selection.files.iter().chain(projector.clone());
    let missing: Vec<_> = files().filter(|file| !cache.has(file)).collect();
    let bytes = missing.iter().map(|file| file.size - cache.partial(file)).sum();
    if let Some(free) = cache.free_space()?.filter(|free| *free < bytes) {
        let folder = cache.folder().display();
        bail!("{id} needs {} more on disk, and {folder} has {} free", size(bytes), size(free));
    }
    transfer.fetch(id, &listing.commit, &missing, &cache)?;
    for file in files() {
        cache.link(&listing.commit, file)?;
    }
    cache.set_revision(id.revision(), &listing.commit)?;
    Ok(cache.snapshot(&listing.commit).join(&selection.opens))
}
