//! [`PreadPool`]: the portable queue.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::queue::{ReadDone, ReadQueue, ReadRequest, Transfer, turn_to_rows};

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

/// Threads that each read one request at a time with positioned reads.
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
    let mut scratch = vec![];
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
        let done = perform(request, &mut scratch);
        state = shared.lock();
        state.done.push_back(done);
        shared.finished.notify_one();
    }
}

fn perform(mut request: ReadRequest, scratch: &mut Vec<u8>) -> ReadDone {
    let buffer = request.buffer.as_mut_slice();
    let result = request.parts.into_iter().try_for_each(|part| {
        let mut transfer = Transfer::new(part, buffer.len(), request.mode)?;
        loop {
            let ask = transfer.ask();
            let to = &mut buffer[ask.at..ask.at + ask.len];
            let outcome = ask.file.read_at_random(ask.mode, ask.offset, to);
            if transfer.answer(outcome)? {
                return Ok(());
            }
        }
    });
    let result =
        result.and_then(|()| turn_to_rows(&request.by_columns, request.buffer.as_mut_slice(), scratch));
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
