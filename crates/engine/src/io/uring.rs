//! [`UringQueue`]: reads through io_uring.
//!
//! One thread keeps the disk busy without helpers: reads are handed to the kernel when they are submitted and whenever
//! results are collected. Files and buffers are not registered with the ring: it saves 3 µs of processor time in a read
//! of 864 KiB into huge pages (7 instead of 10, measured), of which a token takes a hundred at most, and registered memory
//! counts as locked, which containers limit.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

use super::buffer::HostBuffer;
use super::columns::Columns;
use super::queue::{ReadDone, ReadPart, ReadQueue, ReadRequest, Transfer, turn_to_rows};
use crate::{Error, Result};

/// The system's limit for one read.
const MOST_BYTES: usize = 1 << 30;

struct Request {
    tag: u64,
    buffer: HostBuffer,
    transfers: Vec<Transfer>,
    by_columns: Vec<(usize, Columns)>,
    /// Transfers that have not ended.
    left: usize,
    result: Result<()>,
}

/// Reads through io_uring.
pub struct UringQueue {
    ring: IoUring,
    depth: usize,
    /// Requests under way, by slot.
    requests: Vec<Option<Request>>,
    free: Vec<usize>,
    /// (slot, transfer) that the kernel has not been given.
    backlog: VecDeque<(usize, usize)>,
    /// Reads that the kernel has.
    in_kernel: usize,
    done: VecDeque<ReadDone>,
    /// A copy of a plane whose rows are brought together.
    scratch: Vec<u8>,
}

impl UringQueue {
    /// A queue that keeps up to `depth` reads in the kernel.
    ///
    /// # Errors
    /// If the kernel does not have io_uring or a sandbox forbids it.
    pub fn new(depth: usize) -> std::io::Result<Self> {
        let depth = depth.clamp(1, 1024);
        let ring = IoUring::new(depth as u32)?;
        // Present since 5.6, as is `opcode::Read`; before that, reading would fail later.
        if !ring.params().is_feature_rw_cur_pos() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        Ok(Self {
            ring,
            depth,
            requests: vec![],
            free: vec![],
            backlog: VecDeque::new(),
            in_kernel: 0,
            done: VecDeque::new(),
            scratch: vec![],
        })
    }

    /// As [`UringQueue::try_enter`], which fails only by a fault of ours.
    fn enter(&mut self, want: usize) {
        self.try_enter(want).expect("the kernel takes a ring that it made");
    }

    /// Gives the kernel what it may have of the backlog, and waits until `want` reads have completed.
    fn try_enter(&mut self, want: usize) -> std::io::Result<()> {
        let mut pushed = 0;
        while self.in_kernel < self.depth
            && let Some((slot, index)) = self.backlog.pop_front()
        {
            let request = self.requests[slot].as_mut().expect("a transfer belongs to a request under way");
            let ask = request.transfers[index].ask();
            let file = ask.file.handle(ask.mode).expect("what is made was not submitted");
            // SAFETY: `Transfer::new` has checked that what is asked for lies in the buffer.
            let to = unsafe { request.buffer.as_mut_ptr().add(ask.at) };
            let len = ask.len.min(MOST_BYTES) as u32;
            let read = opcode::Read::new(types::Fd(file.as_raw_fd()), to, len)
                .offset(ask.offset)
                .build()
                .user_data((slot as u64) << 32 | index as u64);
            // SAFETY: buffer and file belong to the request, which stays in `requests`, its memory untouched, until
            // the read has completed (`drop` waits too); parts do not share pages, so no two reads overlap.
            let fits = unsafe { self.ring.submission().push(&read) };
            fits.expect("the ring has an entry for every read in the kernel");
            self.in_kernel += 1;
            pushed += 1;
        }
        if pushed == 0 && want == 0 {
            return Ok(());
        }
        // Interrupted or short of memory: what was pushed is still there.
        let again = [Errno::INTR, Errno::AGAIN, Errno::BUSY].map(Errno::raw_os_error);
        while let Err(error) = self.ring.submit_and_wait(want) {
            if !error.raw_os_error().is_some_and(|code| again.contains(&code)) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Files completed reads.
    fn reap(&mut self) {
        let completed: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (id, code) in completed {
            let (slot, index) = ((id >> 32) as usize, id as u32 as usize);
            self.in_kernel -= 1;
            let outcome = usize::try_from(code).map_err(|_| std::io::Error::from_raw_os_error(-code));
            let request = self.requests[slot].as_mut().expect("a completion belongs to a request under way");
            match request.transfers[index].answer(outcome) {
                Ok(true) => self.end(slot, Ok(())),
                Ok(false) => self.backlog.push_front((slot, index)),
                Err(error) => self.end(slot, Err(error)),
            }
        }
    }

    /// One transfer of the request in `slot` has ended.
    fn end(&mut self, slot: usize, result: Result<()>) {
        let request = self.requests[slot].as_mut().expect("a transfer belongs to a request under way");
        request.left -= 1;
        if request.result.is_ok() {
            request.result = result;
        }
        if request.left == 0
            && let Some(Request { tag, mut buffer, result, by_columns, .. }) = self.requests[slot].take()
        {
            let result =
                result.and_then(|()| turn_to_rows(&by_columns, buffer.as_mut_slice(), &mut self.scratch));
            self.free.push(slot);
            self.done.push_back(ReadDone { tag, buffer, result });
        }
    }
}

impl ReadQueue for UringQueue {
    fn submit(&mut self, request: ReadRequest) {
        let ReadRequest { tag, buffer, parts, by_columns, mode } = request;
        let size = buffer.as_ref().len();
        let transfer = |part: ReadPart| match part.file.is_made() {
            false => Transfer::new(part, size, mode),
            true => {
                let source = std::io::Error::other("bytes that are made are not read through io_uring");
                Err(Error::Io { action: "read", path: part.file.path().into(), source })
            }
        };
        let transfers: Vec<Transfer> = match parts.into_iter().map(transfer).collect() {
            Ok(transfers) => transfers,
            Err(error) => return self.done.push_back(ReadDone { tag, buffer, result: Err(error) }),
        };
        if transfers.is_empty() {
            return self.done.push_back(ReadDone { tag, buffer, result: Ok(()) });
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() - 1
        });
        let left = transfers.len();
        self.backlog.extend((0..left).map(|index| (slot, index)));
        self.requests[slot] = Some(Request { tag, buffer, transfers, by_columns, left, result: Ok(()) });
        self.enter(0);
    }

    fn wait(&mut self) -> Option<ReadDone> {
        loop {
            if let Some(done) = self.try_wait() {
                return Some(done);
            }
            if self.in_kernel == 0 {
                return None;
            }
            self.enter(1);
        }
    }

    fn try_wait(&mut self) -> Option<ReadDone> {
        self.reap();
        self.enter(0);
        self.done.pop_front()
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        // The kernel writes to buffers until their reads have completed.
        self.backlog.clear();
        while self.in_kernel > 0 {
            if self.try_enter(1).is_err() {
                // Nobody can say when the reads end, so their memory is given up. Without a panic, which would end the
                // process if another one had led here.
                std::mem::forget(std::mem::take(&mut self.requests));
                return;
            }
            self.reap();
            self.backlog.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::mem::ManuallyDrop;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::io::buffer::PAGE_BYTES;
    use crate::io::file::{CheckpointFile, ReadMode};

    /// Buffers go back to the system when a queue is dropped: the kernel must be done with them.
    #[test]
    fn dropping_the_queue_waits_for_the_kernel() {
        let Ok(mut queue) = UringQueue::new(2) else { return };
        let (reader, mut writer) = std::io::pipe().unwrap();
        let file = Arc::new(CheckpointFile::of_pipe(File::from(OwnedFd::from(reader))));
        // The last one is not the kernel's yet.
        for tag in 0..3 {
            let parts = vec![ReadPart { file: Arc::clone(&file), offset: 0, len: 4, at: 0 }];
            let buffer = HostBuffer::zeroed(PAGE_BYTES).unwrap();
            queue.submit(ReadRequest { tag, buffer, parts, by_columns: vec![], mode: ReadMode::Buffered });
        }
        let dropped = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&dropped);
        let thread = thread::spawn(move || {
            drop(queue);
            seen.store(true, Ordering::SeqCst);
        });
        for _ in 0..2 {
            thread::sleep(Duration::from_millis(30));
            assert!(!dropped.load(Ordering::SeqCst), "the kernel still reads");
            writer.write_all(b"four").unwrap();
        }
        thread.join().unwrap();
    }

    /// A queue with reads under way whose ring the kernel no longer takes for one.
    fn broken() -> Option<UringQueue> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(PAGE_BYTES as u64).unwrap();
        let file = Arc::new(CheckpointFile::open(file.path()).unwrap());
        // Where a sandbox forbids io_uring there is nothing to test.
        let mut queue = UringQueue::new(4).ok()?;
        for tag in 0..3 {
            let parts = vec![ReadPart { file: Arc::clone(&file), offset: 0, len: PAGE_BYTES, at: 0 }];
            let buffer = HostBuffer::zeroed(PAGE_BYTES).unwrap();
            queue.submit(ReadRequest { tag, buffer, parts, by_columns: vec![], mode: ReadMode::Buffered });
        }
        assert!(queue.in_kernel > 0);
        // SAFETY: the descriptor is the ring's and stays its own: it is replaced, not closed.
        let mut ring = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(queue.ring.as_raw_fd()) });
        rustix::io::dup2(File::open("/dev/null").unwrap(), &mut ring).unwrap();
        Some(queue)
    }

    #[test]
    fn dropping_a_queue_never_panics() {
        drop(broken());
        let queue = broken();
        let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _queue = queue;
            std::panic::panic_any(7);
        }));
        assert_eq!(payload.unwrap_err().downcast_ref(), Some(&7));
    }
}
