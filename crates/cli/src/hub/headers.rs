//! [`headers`]: what is in a model of the hub, without downloading it.
//!
//! Configuration and index are small, and headers of weights are at the beginning of their files. A temporary folder gets
//! files of the sizes that the hub has, with nothing in them but that, so that whatever opens a checkpoint opens this one.
//! They take no room on disk.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::checkpoint::gguf::Header;
use moeflux::hub::{HubId, RemoteFile};

use super::cache::RepoCache;
use super::remote;
use super::settings::Settings;
use super::transfer::Transfer;

/// Files that are asked for at the same time.
const CONNECTIONS: usize = 8;
/// Bytes that are asked for first: what most headers of safetensors files have, and those of GGUF files without a
/// vocabulary.
const FIRST: u64 = 64 << 10;
/// Bytes of a header, at most.
const MOST: u64 = 128 << 20;

/// A checkpoint that can be looked at.
#[derive(Debug)]
pub struct Headers {
    path: PathBuf,
    /// Removed with this value.
    folder: Option<tempfile::TempDir>,
}

impl Headers {
    /// What to open.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether all of it has been downloaded, and not only its headers.
    pub fn is_complete(&self) -> bool {
        self.folder.is_none()
    }
}

/// The checkpoint that `id` names: the downloaded one if it is complete, else one of headers.
pub fn headers(id: &HubId, settings: &Settings) -> Result<Headers> {
    let cache = RepoCache::new(settings, id);
    if settings.offline {
        let path = cache.find(id)?;
        let path = path
            .with_context(|| format!("{id} is not in {} and the hub is offline", cache.folder().display()))?;
        return Ok(Headers { path, folder: None });
    }
    let transfer = Transfer::new(settings);
    let listing = match remote::fetch(&transfer, id) {
        Ok(listing) => listing,
        Err(error) => match cache.find(id)?.filter(|_| error.is_unreachable()) {
            Some(path) => return Ok(Headers { path, folder: None }),
            None => return Err(error.into()),
        },
    };
    let selection = listing.select(id)?;
    let snapshot = cache.snapshot(&listing.commit);
    let is_there = |file: &RemoteFile| cache.has(file) && snapshot.join(&file.path).exists();
    if selection.files.iter().all(is_there) {
        return Ok(Headers { path: snapshot.join(selection.opens), folder: None });
    }
    let wanted = |file: &&RemoteFile| {
        ["config.json", "hf_quant_config.json", "model.safetensors.index.json"].contains(&file.path.as_str())
            || file.path.ends_with(".safetensors")
            || file.path.ends_with(".gguf")
    };
    let files: Vec<&RemoteFile> = selection.files.iter().filter(wanted).collect();
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    fetch_all(&files, |file| fetch(&transfer, id, &listing.commit, file, folder.path()))?;
    Ok(Headers { path: folder.path().join(selection.opens), folder: Some(folder) })
}

/// Does `one` for every file, a few at a time; the first error ends it.
fn fetch_all(files: &[&RemoteFile], one: impl Fn(&RemoteFile) -> Result<()> + Sync) -> Result<()> {
    let bar = ProgressBar::new(files.len() as u64);
    bar.set_style(ProgressStyle::with_template("reading headers {wide_bar} {pos}/{len}")?);
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(None);
    let work = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = one(file) {
                next.store(files.len(), Ordering::Relaxed);
                failed.lock().expect("no thread panics with the lock").get_or_insert(error);
            }
            bar.inc(1);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..CONNECTIONS.min(files.len()) {
            scope.spawn(work);
        }
    });
    bar.finish_and_clear();
    failed.into_inner().expect("no thread panics with the lock").map_or(Ok(()), Err)
}

/// Makes `file` in `folder`, with its header.
fn fetch(transfer: &Transfer, id: &HubId, commit: &str, file: &RemoteFile, folder: &Path) -> Result<()> {
    let path = folder.join(&file.path);
    let mut bytes = vec![];
    let read_to = |bytes: &mut Vec<u8>, end: u64| -> Result<()> {
        let (from, end) = (bytes.len() as u64, end.min(file.size));
        if end > MOST {
            bail!("{id}: {} has a header of more than {MOST} bytes", file.path);
        }
        bytes.extend(transfer.part(id, commit, file, (from, end))?);
        Ok(())
    };
    if file.path.ends_with(".safetensors") {
        read_to(&mut bytes, FIRST)?;
        // A length in eight bytes, then as much.
        if let Some(length) = bytes.first_chunk::<8>() {
            let end = u64::from_le_bytes(*length).saturating_add(8);
            read_to(&mut bytes, end.max(FIRST))?;
        }
    } else if file.path.ends_with(".gguf") {
        let mut end = FIRST;
        read_to(&mut bytes, end)?;
        // How long it is shows only when it has been read.
        while (bytes.len() as u64) < file.size {
            match Header::read(&bytes[..], file.size, &path) {
                Err(moeflux::Error::Read { .. }) => {
                    end = (4 * end).min(MOST + 1);
                    read_to(&mut bytes, end)?;
                }
                // What is wrong with it is said when it is opened.
                Ok(_) | Err(_) => break,
            }
        }
    } else {
        read_to(&mut bytes, file.size)?;
    }
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        let mut out = OpenOptions::new().write(true).create_new(true).open(&path)?;
        out.write_all(&bytes)?;
        out.set_len(file.size)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
