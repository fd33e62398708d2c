//! [`CheckpointFile`]: an open file of known length, read at explicit offsets from any thread.
//!
//! Positioned reads share one handle without a lock and without a seek position. The length is taken once,
//! at open: every byte range is checked against it before anything is read, and a file that shrinks later
//! shows up as a short read with its offset, never as zeroes.
//!
//! Experts are read at random places, in one of two ways ([`ReadMode`]), each through a handle of its own that is
//! opened when it is first needed.
//!
//! A file may also be one that was never written: its bytes are made when they are read ([`MadeBytes`]).

use std::{
    fmt::Debug,
    fs::File,
    io::{ErrorKind, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::OnceLock,
};

use crate::{Error, Result};

/// How experts are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// Past the page cache, from the device into the slot.
    Direct,
    /// Through the page cache, without reading ahead.
    Buffered,
}

impl FromStr for ReadMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "direct" => Ok(Self::Direct),
            "buffered" => Ok(Self::Buffered),
            _ => Err(Error::Option {
                option: "read_mode",
                expected: "direct or buffered".into(),
                got: text.into(),
            }),
        }
    }
}

impl std::fmt::Display for ReadMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Buffered => "buffered",
        })
    }
}

/// What is compared of two checkpoints that are to be the same, divided by their files, and of each file at least: bytes
/// at the beginning, pieces of the rest. Bytes of a piece.
const COMPARED_BEGINNING: [u64; 2] = [32 << 20, 1 << 20];
const COMPARED_SAMPLES: [u64; 2] = [256, 4];
const COMPARED_PIECE: usize = 64 << 10;

/// Bytes of a file that is on no disk.
pub trait MadeBytes: Debug + Send + Sync {
    /// Fills `out` with the bytes at `offset`: the same ones every time, from any thread. All of them are within the file.
    ///
    /// # Errors
    /// If they cannot be made.
    fn make(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()>;
}

/// An open checkpoint file.
#[derive(Debug)]
pub struct CheckpointFile {
    path: PathBuf,
    length: u64,
    content: Content,
}

/// Where a file's bytes are from.
#[derive(Debug)]
enum Content {
    Disk {
        handle: File,
        /// For direct reads; `None` if the system has none for this file.
        direct: OnceLock<Option<File>>,
        /// For reads at random places through the page cache; `None` if it could not be opened.
        random: OnceLock<Option<File>>,
    },
    Made(Box<dyn MadeBytes>),
}

impl CheckpointFile {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened; [`Error::Malformed`] if it is not a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { action: "open", path: path.to_owned(), source };
        // Checked before opening: opening a FIFO would wait for a writer.
        let kind = std::fs::metadata(path).map_err(io)?.file_type();
        if !kind.is_file() {
            return Err(Error::Malformed {
                path: path.to_owned(),
                what: "file type".into(),
                expected: "a regular file".into(),
                got: if kind.is_dir() { "a folder" } else { "a special file" }.into(),
            });
        }
        let handle = File::open(path).map_err(io)?;
        let length = handle.metadata().map_err(io)?.len();
        let content = Content::Disk { handle, direct: OnceLock::new(), random: OnceLock::new() };
        Ok(Self { path: path.to_owned(), length, content })
    }

    /// A file of `length` bytes that are made when they are read; errors call it `name`.
    pub fn made(name: &Path, length: u64, bytes: Box<dyn MadeBytes>) -> Self {
        Self { path: name.to_owned(), length, content: Content::Made(bytes) }
    }

    /// A pipe, whose reads last as long as a test wants.
    #[cfg(test)]
    pub(super) fn of_pipe(handle: File) -> Self {
        let content = Content::Disk { handle, direct: OnceLock::from(None), random: OnceLock::from(None) };
        Self { path: "a pipe".into(), length: u64::MAX, content }
    }

    /// Compares lengths, the beginning, where names and shapes are, and samples of the rest; less of each of many `files`.
    ///
    /// # Errors
    /// [`Error::Malformed`] if this file differs from `other`; [`Error::Read`] if one cannot be read.
    pub(crate) fn expect_like(&self, other: &Self, files: usize) -> Result<()> {
        let differs = |what: &str, expected: String, got: String| {
            Err(Error::Malformed { path: self.path.clone(), what: what.into(), expected, got })
        };
        if self.length != other.length {
            let expected = format!("{} bytes as {} has", other.length, other.path.display());
            return differs("length", expected, format!("{} bytes", self.length));
        }
        let of_each = |[all, least]: [u64; 2]| (all / files.max(1) as u64).max(least);
        let (beginning, count) = (self.length.min(of_each(COMPARED_BEGINNING)), of_each(COMPARED_SAMPLES));
        let samples = (0..count).map(|part| (self.length - beginning) / count * part);
        let pieces = (0..beginning).step_by(COMPARED_PIECE).chain(samples.map(|offset| beginning + offset));
        let (mut own, mut others) = (vec![0; COMPARED_PIECE], vec![0; COMPARED_PIECE]);
        for offset in pieces {
            let len = usize::try_from(self.length - offset).unwrap_or(usize::MAX).min(COMPARED_PIECE);
            self.read_exact_at(offset, &mut own[..len])?;
            other.read_exact_at(offset, &mut others[..len])?;
            if own[..len] != others[..len] {
                let expected = format!("the bytes of {}", other.path.display());
                return differs("content", expected, format!("others from byte {offset} on"));
            }
        }
        Ok(())
    }

    /// Where it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes it had when opened.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether its bytes are made, so that nothing is read from a disk.
    pub fn is_made(&self) -> bool {
        matches!(self.content, Content::Made(_))
    }

    /// A handle for reads at random places; `None` if the system has none of that kind for this file.
    fn own_handle(&self, mode: ReadMode) -> Option<&File> {
        let Content::Disk { handle, direct, random } = &self.content else { return None };
        match mode {
            ReadMode::Direct => direct.get_or_init(|| reopen::direct(handle, &self.path).ok()).as_ref(),
            ReadMode::Buffered => random.get_or_init(|| reopen::random(handle, &self.path).ok()).as_ref(),
        }
    }

    /// Whether the system reads it past the page cache.
    pub(super) fn reads_directly(&self) -> bool {
        self.own_handle(ReadMode::Direct).is_some()
    }

    /// A handle for reads at random places: of that kind, if there is one; `None` if bytes are made.
    pub(super) fn handle(&self, mode: ReadMode) -> Option<&File> {
        match &self.content {
            Content::Disk { handle, .. } => self.own_handle(mode).or(Some(handle)),
            Content::Made(_) => None,
        }
    }

    /// Reads at a random place what there is, at most `out`; returns its bytes.
    pub(super) fn read_at_random(
        &self,
        mode: ReadMode,
        offset: u64,
        out: &mut [u8],
    ) -> std::io::Result<usize> {
        match self.handle(mode) {
            Some(handle) => handle.read_at(out, offset),
            None => self.read_at(offset, out),
        }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<usize> {
        match &self.content {
            Content::Disk { handle, .. } => handle.read_at(out, offset),
            Content::Made(bytes) => {
                let left = usize::try_from(self.length.saturating_sub(offset)).unwrap_or(usize::MAX);
                let count = out.len().min(left);
                bytes.make(offset, &mut out[..count])?;
                Ok(count)
            }
        }
    }

    /// Fills `out` with the bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::Read`] if the file ends early or the system fails the read.
    pub(crate) fn read_exact_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut got = 0;
        while got < out.len() {
            let failure = match self.read_at(offset.saturating_add(got as u64), &mut out[got..]) {
                Ok(0) => ErrorKind::UnexpectedEof.into(),
                Ok(n) => {
                    got += n;
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => e,
            };
            let (wanted, got) = (out.len() as u64, got as u64);
            return Err(Error::Read { path: self.path.clone(), offset, wanted, got, source: failure });
        }
        Ok(())
    }

    /// A sequential reader from the start of the file, with a read position of its own.
    pub fn reader(&self) -> impl Read + '_ {
        Sequential { file: self, position: 0 }
    }
}

struct Sequential<'a> {
    file: &'a CheckpointFile,
    position: u64,
}

impl Read for Sequential<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let n = self.file.read_at(self.position, out)?;
        self.position += n as u64;
        Ok(n)
    }
}

/// The same file under another handle, whose settings are its own; on Linux even if it was renamed or removed.
#[cfg(target_os = "linux")]
mod reopen {
    use std::fs::{File, OpenOptions};
    use std::io::Result;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use rustix::fs::{Advice, OFlags, fadvise};

    fn open(handle: &File, flags: OFlags) -> Result<File> {
        let path = format!("/proc/self/fd/{}", handle.as_raw_fd());
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
    }

    pub(super) fn direct(handle: &File, _: &Path) -> Result<File> {
        open(handle, OFlags::DIRECT)
    }

    /// Without advice, the system reads as much again beside every expert.
    pub(super) fn random(handle: &File, _: &Path) -> Result<File> {
        let file = open(handle, OFlags::empty())?;
        fadvise(&file, 0, None, Advice::Random)?;
        Ok(file)
    }
}

#[cfg(target_vendor = "apple")]
mod reopen {
    use std::fs::File;
    use std::io::{Error, Result};
    use std::os::fd::AsRawFd;
    use std::path::Path;

    use rustix::fs::fcntl_nocache;

    pub(super) fn direct(_: &File, path: &Path) -> Result<File> {
        let file = File::open(path)?;
        fcntl_nocache(&file, true)?;
        Ok(file)
    }

    /// Without this, the system reads more beside every expert.
    #[allow(unsafe_code)]
    pub(super) fn random(_: &File, path: &Path) -> Result<File> {
        let file = File::open(path)?;
        // SAFETY: a setting of a descriptor that is open; no memory is passed.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDAHEAD, 0) } {
            -1 => Err(Error::last_os_error()),
            _ => Ok(file),
        }
    }
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
mod reopen {
    use std::fs::File;
    use std::io::{ErrorKind, Result};
    use std::path::Path;

    pub(super) fn direct(_: &File, _: &Path) -> Result<File> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn random(handle: &File, _: &Path) -> Result<File> {
        handle.try_clone()
    }
}
