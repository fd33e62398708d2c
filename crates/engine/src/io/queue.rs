//! [`ReadQueue`]: asynchronous reads from checkpoint files into owned buffers.
//!
//! A request owns its buffer until it comes back with the result, so a read in flight can never race with a
//! user of the memory. Requests complete in any order, but are started in the order in which they were submitted.
//!
//! [`open`] gives the best queue that the system allows: `UringQueue` on Linux,
//! [`PreadPool`] elsewhere or where a sandbox refuses io_uring.

use std::io::ErrorKind;
use std::str::FromStr;
use std::sync::Arc;

use super::buffer::{HostBuffer, PAGE_BYTES};
use super::columns::Columns;
use super::file::{CheckpointFile, ReadMode};
use super::pread::PreadPool;
use crate::{Error, Result};

/// A contiguous range of a file and where it goes.
#[derive(Debug, Clone)]
pub struct ReadPart {
    /// The file.
    pub file: Arc<CheckpointFile>,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes to read.
    pub len: usize,
    /// First byte in the buffer.
    pub at: usize,
}

/// Ranges to read into one buffer.
#[derive(Debug)]
pub struct ReadRequest {
    /// Chosen by the caller to tell requests apart.
    pub tag: u64,
    /// Where the bytes go. Reads may fill pages whole, so no two parts may share a page of it.
    pub buffer: HostBuffer,
    /// What to read.
    pub parts: Vec<ReadPart>,
    /// Planes that lie in the buffer by columns once all parts are read, and where they begin: their rows are brought
    /// together before the request comes back.
    pub by_columns: Vec<(usize, Columns)>,
    /// Past the page cache or through it. A part whose place in the buffer is not that of its offset within a page is
    /// always read through it.
    pub mode: ReadMode,
}

/// Brings the rows of planes together that lie in `buffer` by columns; `scratch` gets a copy of each.
///
/// # Errors
/// [`Error::Io`] if they do not lie in it.
pub(super) fn turn_to_rows(
    by_columns: &[(usize, Columns)],
    buffer: &mut [u8],
    scratch: &mut Vec<u8>,
) -> Result<()> {
    for (at, columns) in by_columns {
        let plane = columns.bytes().and_then(|len| buffer.get_mut(*at..at.checked_add(len)?));
        let Some(plane) = plane else {
            let source = std::io::Error::other("a plane does not fit the buffer");
            return Err(Error::Io { action: "transpose what was read to", path: "memory".into(), source });
        };
        columns.turn_to_rows(plane, scratch);
    }
    Ok(())
}

/// A finished request.
#[derive(Debug)]
pub struct ReadDone {
    /// The request's tag.
    pub tag: u64,
    /// The request's buffer; its content is unspecified if the result is an error.
    pub buffer: HostBuffer,
    /// Whether every part was read in full.
    pub result: Result<()>,
}

/// Reads in the background.
///
/// Contract: every submitted request comes back from `wait` or `try_wait` exactly once.
pub trait ReadQueue: Send {
    /// Starts a request; never blocks on the disk.
    fn submit(&mut self, request: ReadRequest);

    /// The next finished request; blocks until there is one. `None` if none is under way.
    fn wait(&mut self) -> Option<ReadDone>;

    /// A finished request, if there is one now.
    fn try_wait(&mut self) -> Option<ReadDone>;
}

/// The implementations of [`ReadQueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// io_uring, Linux only.
    IoUring,
    /// Threads with positioned reads.
    Pread,
}

impl FromStr for QueueKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "io_uring" => Ok(Self::IoUring),
            "pread" => Ok(Self::Pread),
            _ => Err(Error::Option {
                option: "read_queue",
                expected: "io_uring or pread".into(),
                got: text.into(),
            }),
        }
    }
}

impl std::fmt::Display for QueueKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::IoUring => "io_uring",
            Self::Pread => "pread",
        })
    }
}

/// A queue with `depth` reads under way at once: of `kind`, or without one the best that the system allows.
///
/// # Errors
/// If the system refuses what was asked for, or threads.
pub fn open(kind: Option<QueueKind>, depth: usize) -> std::io::Result<(QueueKind, Box<dyn ReadQueue>)> {
    #[cfg(target_os = "linux")]
    if kind != Some(QueueKind::Pread) {
        match super::uring::UringQueue::new(depth) {
            Ok(queue) => return Ok((QueueKind::IoUring, Box::new(queue))),
            Err(error) if kind.is_some() => return Err(error),
            Err(_) => {}
        }
    }
    #[cfg(not(target_os = "linux"))]
    if kind == Some(QueueKind::IoUring) {
        return Err(ErrorKind::Unsupported.into());
    }
    Ok((QueueKind::Pread, Box::new(PreadPool::new(depth.min(MOST_THREADS))?)))
}

/// More reading threads than that gain nothing on any disk.
pub(crate) const MOST_THREADS: usize = 8;

/// One part on its way: which bytes to ask the system for next.
///
/// A read past the page cache begins and ends at page boundaries of the file and of the buffer. If the system refuses
/// it after all, the part is read through the page cache.
#[derive(Debug)]
pub(super) struct Transfer {
    part: ReadPart,
    mode: ReadMode,
    /// Bytes before the part that are read with it.
    lead: usize,
    /// Bytes to read, lead and what follows the part included.
    span: usize,
    /// Bytes of the span that have been read.
    got: usize,
}

/// Bytes to ask the system for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask<'a> {
    pub file: &'a CheckpointFile,
    pub mode: ReadMode,
    pub offset: u64,
    pub at: usize,
    pub len: usize,
}

impl Transfer {
    /// Checks that the part lies in a buffer of `buffer` bytes, which begins at a page.
    pub(super) fn new(part: ReadPart, buffer: usize, mode: ReadMode) -> Result<Self> {
        let fits = part.at.checked_add(part.len).is_some_and(|end| end <= buffer);
        if !fits {
            let source = std::io::Error::other("the range does not fit the buffer");
            return Err(Error::Io { action: "read", path: part.file.path().into(), source });
        }
        let lead = (part.offset % PAGE_BYTES as u64) as usize;
        let span = (lead + part.len).next_multiple_of(PAGE_BYTES);
        let aligned = part.at % PAGE_BYTES == lead && part.at - lead + span <= buffer;
        if mode == ReadMode::Direct && aligned && part.file.reads_directly() {
            return Ok(Self { part, mode, lead, span, got: 0 });
        }
        Ok(Self::buffered(part))
    }

    fn buffered(part: ReadPart) -> Self {
        let span = part.len;
        Self { part, mode: ReadMode::Buffered, lead: 0, span, got: 0 }
    }

    /// What to read next.
    pub(super) fn ask(&self) -> Ask<'_> {
        // After a short read, a direct one goes on from a page boundary.
        let from = if self.mode == ReadMode::Direct { self.got / PAGE_BYTES * PAGE_BYTES } else { self.got };
        Ask {
            file: &self.part.file,
            mode: self.mode,
            offset: (self.part.offset - self.lead as u64).saturating_add(from as u64),
            at: self.part.at - self.lead + from,
            len: self.span - from,
        }
    }

    /// Files what came of the last [`Transfer::ask`]; true if the part is complete.
    pub(super) fn answer(&mut self, outcome: std::io::Result<usize>) -> Result<bool> {
        let from = self.ask().at + self.lead - self.part.at;
        let failure = match outcome {
            Ok(n) if from + n >= self.lead + self.part.len => return Ok(true),
            Ok(n) if from + n > self.got => {
                self.got = from + n;
                return Ok(false);
            }
            Ok(_) => ErrorKind::UnexpectedEof.into(),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => return Ok(false),
            Err(e) if self.mode == ReadMode::Direct && e.kind() == ErrorKind::InvalidInput => {
                *self = Self::buffered(self.part.clone());
                return Ok(false);
            }
            Err(e) => e,
        };
        Err(Error::Read {
            path: self.part.file.path().into(),
            offset: self.part.offset,
            wanted: self.part.len as u64,
            got: self.got.saturating_sub(self.lead) as u64,
            source: failure,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file_of(bytes: &[u8]) -> (tempfile::NamedTempFile, Arc<CheckpointFile>) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let opened = Arc::new(CheckpointFile::open(file.path()).unwrap());
        (file, opened)
    }

    /// What every queue must do.
    fn contract(queue: &mut dyn ReadQueue, mode: ReadMode) {
        let content: Vec<u8> = (0..100_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let (_keep, file) = file_of(&content);
        assert!(queue.wait().is_none() && queue.try_wait().is_none(), "nothing was submitted");
        // Every other part lies as direct reads need it.
        let place = |offset: usize, page| {
            PAGE_BYTES * page + if offset.is_multiple_of(2) { offset % PAGE_BYTES } else { 3 }
        };
        let part = |offset: usize, len, page| {
            let at = place(offset, page);
            ReadPart { file: file.clone(), offset: offset as u64, len, at }
        };
        let buffer = || HostBuffer::zeroed(8 * PAGE_BYTES).unwrap();
        for tag in 0..50u64 {
            let at = tag as usize * 999;
            let parts = vec![part(at, 500, 0), part(at + 500, 5700, 3)];
            queue.submit(ReadRequest { tag, buffer: buffer(), parts, by_columns: vec![], mode });
        }
        // To the last byte, and beyond; into a buffer that is too small; and nothing at all.
        let ends = content.len() - 10;
        for (tag, parts) in [
            (50, vec![part(ends, 10, 0)]),
            (51, vec![part(ends, 20, 0)]),
            (52, vec![part(0, 50, 1), part(0, 9 * PAGE_BYTES, 0)]),
            (53, vec![]),
        ] {
            queue.submit(ReadRequest { tag, buffer: buffer(), parts, by_columns: vec![], mode });
        }
        let mut seen = vec![];
        while let Some(done) = queue.wait() {
            seen.push(done.tag);
            let got = |offset: usize, len, page| {
                let at = place(offset, page);
                assert_eq!(done.buffer.as_ref()[at..at + len], content[offset..offset + len], "{}", done.tag);
            };
            match done.tag {
                50 => got(ends, 10, 0),
                51 => {
                    let text = done.result.unwrap_err().to_string();
                    assert!(text.contains("20 bytes") && text.contains("after 10"), "{text}");
                    continue;
                }
                52 => {
                    let text = done.result.unwrap_err().to_string();
                    assert!(text.contains("does not fit the buffer"), "{text}");
                    continue;
                }
                53 => {}
                tag => {
                    got(tag as usize * 999, 500, 0);
                    got(tag as usize * 999 + 500, 5700, 3);
                }
            }
            done.result.unwrap();
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..=53).collect::<Vec<_>>());
    }

    /// Every queue that this system has.
    fn queues() -> Vec<Box<dyn ReadQueue>> {
        let mut queues: Vec<Box<dyn ReadQueue>> = vec![];
        for depth in [1, 4, 64] {
            queues.push(open(Some(QueueKind::Pread), depth).unwrap().1);
            queues.extend(open(Some(QueueKind::IoUring), depth).ok().map(|(_, queue)| queue));
        }
        queues
    }

    #[test]
    fn every_queue_keeps_the_contract() {
        for mut queue in queues() {
            for mode in [ReadMode::Direct, ReadMode::Buffered] {
                contract(&mut *queue, mode);
            }
        }
    }

    #[test]
    fn dropping_a_busy_queue_does_not_hang_and_leaves_no_request() {
        let (_keep, file) = file_of(&[1; PAGE_BYTES]);
        for mut queue in queues() {
            for tag in 0..100 {
                let parts = vec![ReadPart { file: file.clone(), offset: 0, len: PAGE_BYTES, at: 0 }];
                let buffer = HostBuffer::zeroed(PAGE_BYTES).unwrap();
                queue.submit(ReadRequest { tag, buffer, parts, by_columns: vec![], mode: ReadMode::Direct });
            }
            drop(queue);
            assert_eq!(Arc::strong_count(&file), 1, "no request is left, hence none is being read");
        }
    }

    #[test]
    fn a_file_that_shrank_is_a_short_read() {
        let (keep, file) = file_of(&[7; 3 * PAGE_BYTES]);
        keep.as_file().set_len(PAGE_BYTES as u64 + 5).unwrap();
        for mut queue in queues() {
            for mode in [ReadMode::Direct, ReadMode::Buffered] {
                let parts = vec![ReadPart { file: file.clone(), offset: 2, len: 2 * PAGE_BYTES, at: 2 }];
                let buffer = HostBuffer::zeroed(4 * PAGE_BYTES).unwrap();
                queue.submit(ReadRequest { tag: 9, buffer, parts, by_columns: vec![], mode });
                let error = queue.wait().unwrap().result.unwrap_err();
                assert!(matches!(error, Error::Read { wanted: 8192, .. }), "{error}");
            }
        }
    }

    /// The answers a part gets, whether it is complete then, and what it asks for next.
    #[test]
    fn transfers_go_on_after_short_reads() {
        let (_keep, file) = file_of(&[0; 4 * PAGE_BYTES]);
        let part = ReadPart { file, offset: 4100, len: 8000, at: 4 };
        let mut buffered = Transfer::new(part.clone(), 16384, ReadMode::Buffered).unwrap();
        assert!(!buffered.answer(Ok(1000)).unwrap());
        assert_eq!((buffered.ask().offset, buffered.ask().at, buffered.ask().len), (5100, 1004, 7000));
        assert!(!buffered.answer(Err(ErrorKind::Interrupted.into())).unwrap());
        assert!(buffered.answer(Ok(7000)).unwrap());

        // Whole pages must have room too.
        let tight = Transfer::new(part.clone(), 8191, ReadMode::Direct).unwrap();
        assert_eq!(tight.mode, ReadMode::Buffered);
        let mut direct = Transfer::new(part, 8192, ReadMode::Direct).unwrap();
        if direct.mode == ReadMode::Direct {
            assert_eq!((direct.ask().offset, direct.ask().at, direct.ask().len), (4096, 0, 8192));
            assert!(!direct.answer(Ok(5000)).unwrap());
            assert_eq!((direct.ask().offset, direct.ask().at, direct.ask().len), (8192, 4096, 4096));
            // Refused: the whole part is read through the page cache.
            assert!(!direct.answer(Err(ErrorKind::InvalidInput.into())).unwrap());
        }
        assert_eq!((direct.ask().offset, direct.ask().at, direct.ask().len), (4100, 4, 8000));
        assert!(direct.answer(Err(std::io::Error::other("gone"))).is_err());
    }
}
