//! [`ReadQueue`]: asynchronous reads from checkpoint files into owned buffers.
//!
//! A request owns its buffer until it comes back with the result, so a read in flight can never race with a
//! user of the memory. Requests complete in any order.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::buffer::HostBuffer;
use super::file::CheckpointFile;
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
    /// Where the bytes go.
    pub buffer: HostBuffer,
    /// What to read.
    pub parts: Vec<ReadPart>,
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

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    todo: VecDeque<ReadRequest>,
    done: VecDeque<ReadDone>,
    closed: bool,
}

impl Shared {
    /// No code that can panic runs under this lock, so a poisoned lock still guards a consistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The portable queue: threads that each read one request at a time with positioned reads.
pub struct PreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    under_way: usize,
}

impl PreadPool {
    /// A pool of `threads` reading threads, which is also the number of requests that the disk sees at once.
    ///
    /// # Errors
    /// If the system refuses threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let mut pool = Self { shared: Arc::default(), threads: vec![], under_way: 0 };
        for i in 0..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("read-{i}"));
            pool.threads.push(builder.spawn(move || serve(&shared))?);
        }
        Ok(pool)
    }
}

fn serve(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if state.closed {
            return;
        }
        let Some(request) = state.todo.pop_front() else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        let done = perform(request);
        state = shared.lock();
        state.done.push_back(done);
        shared.finished.notify_one();
    }
}

fn perform(mut request: ReadRequest) -> ReadDone {
    let buffer = request.buffer.as_mut_slice();
    let mut read = |part: &ReadPart| {
        let end = part.at.checked_add(part.len).filter(|end| *end <= buffer.len());
        let Some(end) = end else {
            let got = std::io::Error::other("the range does not fit the buffer");
            return Err(Error::Io { action: "read", path: part.file.path().into(), source: got });
        };
        part.file.read_exact_at(part.offset, &mut buffer[part.at..end])
    };
    let result = request.parts.iter().try_for_each(&mut read);
    ReadDone { tag: request.tag, buffer: request.buffer, result }
}

impl ReadQueue for PreadPool {
    fn submit(&mut self, request: ReadRequest) {
        self.under_way += 1;
        self.shared.lock().todo.push_back(request);
        self.shared.work.notify_one();
    }

    fn wait(&mut self) -> Option<ReadDone> {
        if self.under_way == 0 {
            return None;
        }
        let mut state = self.shared.lock();
        loop {
            if let Some(done) = state.done.pop_front() {
                self.under_way -= 1;
                return Some(done);
            }
            state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn try_wait(&mut self) -> Option<ReadDone> {
        let done = self.shared.lock().done.pop_front()?;
        self.under_way -= 1;
        Some(done)
    }
}

impl Drop for PreadPool {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reading thread that panicked has printed its message; there is nothing to add while dropping.
            let _ = thread.join();
        }
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
    fn contract(queue: &mut dyn ReadQueue) {
        let content: Vec<u8> = (0..100_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let (_keep, file) = file_of(&content);
        assert!(queue.wait().is_none() && queue.try_wait().is_none(), "nothing was submitted");
        let part = |offset: usize, len, at| ReadPart { file: file.clone(), offset: offset as u64, len, at };
        for tag in 0..50u64 {
            let at = tag as usize * 1000;
            let parts = vec![part(at, 500, 0), part(at + 500, 700, 2000)];
            queue.submit(ReadRequest { tag, buffer: HostBuffer::zeroed(4096).unwrap(), parts });
        }
        queue.submit(ReadRequest {
            tag: 50,
            buffer: HostBuffer::zeroed(4096).unwrap(),
            parts: vec![part(content.len() - 10, 20, 0)],
        });
        let mut seen = vec![];
        while let Some(done) = queue.wait() {
            seen.push(done.tag);
            let at = done.tag as usize * 1000;
            let Ok(()) = done.result else {
                let text = done.result.unwrap_err().to_string();
                assert!(done.tag == 50 && text.contains("20") && text.contains("10"), "{text}");
                continue;
            };
            assert_eq!(done.buffer.as_ref()[..500], content[at..at + 500]);
            assert_eq!(done.buffer.as_ref()[2000..2700], content[at + 500..at + 1200]);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..=50).collect::<Vec<_>>());
    }

    #[test]
    fn pread_pool_keeps_the_contract() {
        for threads in [1, 4] {
            contract(&mut PreadPool::new(threads).unwrap());
        }
    }

    #[test]
    fn dropping_a_busy_pool_does_not_hang() {
        let (_keep, file) = file_of(&[1; 4096]);
        let mut pool = PreadPool::new(2).unwrap();
        for tag in 0..100 {
            let parts = vec![ReadPart { file: file.clone(), offset: 0, len: 4096, at: 0 }];
            pool.submit(ReadRequest { tag, buffer: HostBuffer::zeroed(4096).unwrap(), parts });
        }
    }
}
