//! [`Transfer`]: HTTP, and files that come in several ranges at once.
//!
//! Ranges are fetched by a few connections in turn and written in order, so that an incomplete file is always a prefix
//! of the complete one, and resuming needs nothing but its length. The checksum is taken while
//! writing; a prefix that is there already is read again for it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use anyhow::Result;
use moeflux::hub::{HubId, RemoteFile};
use rustix::fs::{FlockOperation, flock};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

use super::cache::RepoCache;
use super::error::HubError;
use super::progress::Progress;
use super::settings::Settings;

/// Ranges of a file that are fetched at once.
const CONNECTIONS: u64 = 8;
/// Bytes of a range; up to two for every connection are in memory.
const RANGE: u64 = 8 << 20;
/// Bytes that are counted at once when they arrive.
const PIECE: u64 = 64 << 10;
/// How often a request that got no proper answer is sent.
const TRIES: u32 = 5;
/// Waiting before the second try; doubles with every further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Most bytes of a listing.
const MAX_TEXT: u64 = 64 << 20;

/// A connection to the hub.
#[derive(Debug)]
pub struct Transfer {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// Git's object id of a small file, or SHA-256 of a large one.
enum Checksum {
    Sha1(Sha1),
    Sha256(Sha256),
}

impl Checksum {
    fn of(file: &RemoteFile) -> Self {
        if file.checksum.len() == 64 {
            return Self::Sha256(Sha256::new());
        }
        Self::Sha1(Sha1::new_with_prefix(format!("blob {}\0", file.size)))
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha1(hash) => hash.update(bytes),
            Self::Sha256(hash) => hash.update(bytes),
        }
    }

    fn hexadecimal(self) -> String {
        let digest = match self {
            Self::Sha1(hash) => hash.finalize().to_vec(),
            Self::Sha256(hash) => hash.finalize().to_vec(),
        };
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Transfer {
    pub fn new(settings: &Settings) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("moeflux/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .build();
        Self { agent: config.into(), endpoint: settings.endpoint.clone(), token: settings.token.clone() }
    }

    /// Where the files of `id` are listed.
    pub fn listing_url(&self, id: &HubId) -> String {
        format!("{}/api/models/{}/revision/{}?blobs=true", self.endpoint, id.repo, escape(id.revision()))
    }

    /// The text at `url`; errors call it `what`.
    pub fn text(&self, url: &str, what: &str) -> Result<String, HubError> {
        let bytes = self.retry(|| {
            let mut response = self.get(url, what, None)?;
            let mut bytes = vec![];
            let read = response.read_to_end(&mut bytes);
            read.map_err(|error| unreachable(url, error))?;
            Ok(bytes)
        })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Bytes `from..to` of `file` of `id` at `commit`.
    pub fn part(
        &self,
        id: &HubId,
        commit: &str,
        file: &RemoteFile,
        (from, to): (u64, u64),
    ) -> Result<Vec<u8>, HubError> {
        if from >= to {
            return Ok(vec![]);
        }
        let url = self.file_url(id, commit, file);
        self.retry(|| self.range(&url, file, (from, to), &Progress::Hidden))
    }

    fn file_url(&self, id: &HubId, commit: &str, file: &RemoteFile) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.endpoint, id.repo, escape(&file.path))
    }

    /// Brings `files` of `id` at `commit` into the cache.
    pub fn fetch(&self, id: &HubId, commit: &str, files: &[&RemoteFile], cache: &RepoCache) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let total = files.iter().map(|file| file.size).sum();
        let there = files.iter().map(|file| cache.partial(file)).sum();
        let progress = Progress::new(id.to_string(), files.len(), total, there)?;
        for file in files {
            progress.file(&file.path);
            let url = self.file_url(id, commit, file);
            self.file(&url, file, cache, &progress)?;
        }
        progress.finish();
        Ok(())
    }

    fn file(
        &self,
        url: &str,
        file: &RemoteFile,
        cache: &RepoCache,
        progress: &Progress,
    ) -> Result<(), HubError> {
        let path = cache.incomplete(file);
        let write_error = |source| HubError::Write { path: path.clone(), source };
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut out = open.map_err(write_error)?;
        flock(&out, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| HubError::Busy { path: path.clone() })?;
        let mut checksum = Checksum::of(file);
        let there = resume(&mut out, file, &mut checksum).map_err(write_error)?;
        self.ranges(url, file, there, progress, |bytes| {
            out.write_all(bytes).map_err(write_error)?;
            checksum.update(bytes);
            Ok(())
        })?;
        let got = checksum.hexadecimal();
        if got != file.checksum {
            std::fs::remove_file(&path).map_err(write_error)?;
            let (path, expected) = (file.path.clone(), file.checksum.clone());
            return Err(HubError::Content { path, what: "checksum", expected, got });
        }
        out.sync_all().map_err(write_error)?;
        std::fs::rename(&path, cache.blob(file)).map_err(write_error)
    }

    /// Gives the bytes of `file` from `start` on to `write`, in order.
    fn ranges(
        &self,
        url: &str,
        file: &RemoteFile,
        start: u64,
        progress: &Progress,
        mut write: impl FnMut(&[u8]) -> Result<(), HubError>,
    ) -> Result<(), HubError> {
        let count = (file.size - start).div_ceil(RANGE);
        std::thread::scope(|scope| {
            let connections: Vec<_> = (0..CONNECTIONS.min(count))
                .map(|first| {
                    let (sender, receiver) = sync_channel(0);
                    scope.spawn(move || {
                        for index in (first..count).step_by(CONNECTIONS as usize) {
                            let from = start + index * RANGE;
                            let to = (from + RANGE).min(file.size);
                            let bytes = self.retry(|| self.range(url, file, (from, to), progress));
                            let failed = bytes.is_err();
                            // Nobody receives after an error elsewhere.
                            if sender.send(bytes).is_err() || failed {
                                return;
                            }
                        }
                    });
                    receiver
                })
                .collect();
            for receiver in (0..count).map(|index| &connections[(index % CONNECTIONS) as usize]) {
                write(&receiver.recv().expect("a connection sends each of its ranges or an error")?)?;
            }
            Ok(())
        })
    }

    /// Bytes `from..to` of a file.
    fn range(
        &self,
        url: &str,
        file: &RemoteFile,
        (from, to): (u64, u64),
        progress: &Progress,
    ) -> Result<Vec<u8>, HubError> {
        let mut response = self.get(url, &file.path, Some((from, to)))?;
        let mut bytes = Vec::with_capacity((to - from) as usize);
        let mut arriving = progress.request();
        loop {
            let piece = response.by_ref().take(PIECE).read_to_end(&mut bytes);
            match piece.map_err(|error| unreachable(url, error))? {
                0 => break,
                count => arriving.add(count as u64),
            }
        }
        if bytes.len() as u64 != to - from {
            let reason = format!("expected {} bytes from {from} on, got {}", to - from, bytes.len());
            return Err(HubError::Unreachable { url: url.to_owned(), reason });
        }
        arriving.keep();
        Ok(bytes)
    }

    /// The body at `url`, or its bytes `range`.
    fn get(&self, url: &str, what: &str, range: Option<(u64, u64)>) -> Result<impl Read + use<>, HubError> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some((from, to)) = range {
            request = request.header("range", format!("bytes={from}-{}", to - 1));
        }
        let response = request.call().map_err(|error| unreachable(url, error))?;
        let status = response.status().as_u16();
        let body = |limit| Ok(response.into_body().into_reader().take(limit));
        match (status, range) {
            // One more byte than asked for would be a fault too.
            (206, Some((from, to))) => body(to - from + 1),
            (200, None) => body(MAX_TEXT),
            // Without ranges, whoever asks for the beginning gets everything.
            (200, Some((0, to))) => body(to),
            (401 | 403, _) => Err(HubError::Unauthorized { what: what.to_owned(), status }),
            (404, _) => Err(HubError::NotFound { what: what.to_owned() }),
            (429 | 500..=599, _) => Err(unreachable(url, format!("the answer is {status}"))),
            _ => Err(HubError::Refused { url: url.to_owned(), status }),
        }
    }

    /// Tries again what failed for want of a proper answer.
    fn retry<T>(&self, request: impl Fn() -> Result<T, HubError>) -> Result<T, HubError> {
        let mut wait = FIRST_WAIT;
        for _ in 1..TRIES {
            match request() {
                Err(error) if error.is_unreachable() => std::thread::sleep(wait),
                outcome => return outcome,
            }
            wait *= 2;
        }
        request()
    }
}

fn unreachable(url: &str, reason: impl ToString) -> HubError {
    HubError::Unreachable { url: url.to_owned(), reason: reason.to_string() }
}

/// Takes what is there of `file` into account and leaves `out` at its end; returns the bytes. More than there should
/// be is thrown away.
fn resume(out: &mut File, file: &RemoteFile, checksum: &mut Checksum) -> std::io::Result<u64> {
    let length = out.metadata()?.len();
    if length > file.size {
        out.set_len(0)?;
        return Ok(0);
    }
    out.seek(SeekFrom::Start(0))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match out.read(&mut buffer)? {
            0 => return Ok(length),
            count => checksum.update(&buffer[..count]),
        }
    }
}

/// Percent-encodes everything but unreserved characters and `/`.
fn escape(path: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    path.bytes().map(|b| if keep(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
