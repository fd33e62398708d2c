//! [`Segments`]: a file that is written piece by piece, so that writing can resume after an interruption.
//!
//! A journal beside the file holds the checksum of each segment that has reached the disk. Written again, a segment whose
//! checksum is the journal's is skipped; from the first that differs on, everything is written.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a segment.
pub(super) const SEGMENT: usize = 32 << 20;

/// A file written in segments that are skipped if the journal says that they are there.
pub(super) struct Segments {
    file: File,
    journal: File,
    /// Checksums of the segments that are on the disk.
    there: Vec<u64>,
    /// Segments ended so far.
    ended: usize,
    segment: Vec<u8>,
    size: usize,
    /// Bytes of the file.
    length: u64,
}

impl Segments {
    /// Goes on with `file` from what `journal` says of it, in segments of `size` bytes.
    pub(super) fn open(file: &Path, journal: &Path, size: usize) -> std::io::Result<Self> {
        let open =
            |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let (file, mut journal) = (open(file)?, open(journal)?);
        let mut bytes = vec![];
        journal.read_to_end(&mut bytes)?;
        let mut there: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
        // The journal is written after its segment; without one of them it says nothing.
        let length = file.metadata()?.len() as usize;
        there.truncate(length / size);
        Ok(Self { file, journal, there, ended: 0, segment: Vec::with_capacity(size), size, length: 0 })
    }

    /// Makes sure that the segment is on the disk.
    fn end_segment(&mut self) -> std::io::Result<()> {
        if self.segment.is_empty() {
            return Ok(());
        }
        let sum = xxh3_64(&self.segment);
        if self.there.get(self.ended) != Some(&sum) {
            self.there.truncate(self.ended);
            self.file.seek(SeekFrom::Start((self.ended * self.size) as u64))?;
            self.file.write_all(&self.segment)?;
            self.file.sync_data()?;
            self.journal.set_len(8 * self.ended as u64)?;
            self.journal.seek(SeekFrom::End(0))?;
            self.journal.write_all(&sum.to_le_bytes())?;
            self.journal.sync_data()?;
            self.there.push(sum);
        }
        self.ended += 1;
        self.length += self.segment.len() as u64;
        self.segment.clear();
        Ok(())
    }

    /// Ends the file and says whether it holds what was written.
    pub(super) fn verify(mut self) -> std::io::Result<bool> {
        self.end_segment()?;
        self.there.truncate(self.ended);
        // An earlier copy with other options may have been longer.
        self.file.set_len(self.length)?;
        self.file.sync_all()?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed)?;
        self.file.seek(SeekFrom::Start(0))?;
        for sum in &self.there {
            self.segment.clear();
            (&mut self.file).take(self.size as u64).read_to_end(&mut self.segment)?;
            if xxh3_64(&self.segment) != *sum {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Write for Segments {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let len = bytes.len().min(self.size - self.segment.len());
        self.segment.extend_from_slice(&bytes[..len]);
        if self.segment.len() == self.size {
            self.end_segment()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
