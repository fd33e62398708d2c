//! [`CheckpointFile`]: an open file of known length, read at explicit offsets from any thread.
//!
//! Positioned reads share one handle without a lock and without a seek position. The length is taken once,
//! at open: every byte range is checked against it before anything is read, and a file that shrinks later
//! shows up as a short read with its offset, never as zeroes.

use std::{
    fs::File,
    io::{ErrorKind, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// An open checkpoint file.
#[derive(Debug)]
pub struct CheckpointFile {
    path: PathBuf,
    length: u64,
    handle: File,
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
        Ok(Self { path: path.to_owned(), length, handle })
    }

    /// Where it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes it had when opened.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The open handle, for read queues that submit their own reads.
    pub fn handle(&self) -> &File {
        &self.handle
    }

    /// Fills `out` with the bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::Read`] if the file ends early or the system fails the read.
    pub fn read_exact_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut got = 0;
        while got < out.len() {
            let failure = match self.handle.read_at(&mut out[got..], offset.saturating_add(got as u64)) {
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
        let n = self.file.handle.read_at(out, self.position)?;
        self.position += n as u64;
        Ok(n)
    }
}
