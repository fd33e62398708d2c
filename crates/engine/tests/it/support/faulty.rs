//! A read queue whose reads fail, come back short or late, as a test wants it.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};

use moeflux::Error;
use moeflux::io::pread::PreadPool;
use moeflux::io::queue::{ReadDone, ReadQueue, ReadRequest};

/// What happens to a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is done, and handed over in its turn.
    Done,
    /// It is done, and handed over only when there is nothing else to hand over.
    Late,
    /// The device fails it.
    Failed,
    /// The file ends early; what came is garbage.
    Short,
}

/// Fates of the reads to come; after these, all are [`Fate::Done`].
#[derive(Debug, Default, Clone)]
pub struct Fates(Arc<Mutex<VecDeque<Fate>>>);

impl Fates {
    pub fn set(&self, fates: impl IntoIterator<Item = Fate>) {
        *self.0.lock().unwrap() = fates.into_iter().collect();
    }

    /// The `n`-th read from now on has this fate.
    pub fn nth(&self, n: usize, fate: Fate) {
        self.set(std::iter::repeat_n(Fate::Done, n).chain([fate]));
    }

    fn next(&self) -> Fate {
        self.0.lock().unwrap().pop_front().unwrap_or(Fate::Done)
    }

    /// Fates that no read has met yet.
    pub fn left(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// A queue whose reads meet their fates. Everything submitted comes back exactly once, as the contract says.
pub struct Faulty {
    inner: PreadPool,
    fates: Fates,
    ready: VecDeque<ReadDone>,
    late: Vec<ReadDone>,
    /// Tags of requests that the inner queue has and that will be late.
    marked: Vec<u64>,
}

impl Faulty {
    pub fn new(fates: &Fates) -> Box<Self> {
        let inner = PreadPool::new(2).expect("threads");
        Box::new(Self { inner, fates: fates.clone(), ready: VecDeque::new(), late: vec![], marked: vec![] })
    }

    /// Puts a read that the inner queue has finished where its fate wants it.
    fn file(&mut self, done: ReadDone) {
        if self.marked.contains(&done.tag) { self.late.push(done) } else { self.ready.push_back(done) }
    }
}

impl ReadQueue for Faulty {
    fn submit(&mut self, mut request: ReadRequest) {
        let part = request.parts.last().expect("a part").clone();
        let path = part.file.path().to_owned();
        let error = match self.fates.next() {
            Fate::Done => return self.inner.submit(request),
            Fate::Late => {
                self.marked.push(request.tag);
                return self.inner.submit(request);
            }
            Fate::Failed => {
                Error::Io { action: "read", path, source: std::io::Error::other("the device is gone") }
            }
            Fate::Short => Error::Read {
                path,
                offset: part.offset,
                wanted: part.len as u64,
                got: 1,
                source: ErrorKind::UnexpectedEof.into(),
            },
        };
        request.buffer.as_mut_slice().fill(0xff);
        self.ready.push_back(ReadDone { tag: request.tag, buffer: request.buffer, result: Err(error) });
    }

    fn wait(&mut self) -> Option<ReadDone> {
        while self.ready.is_empty() {
            match self.inner.wait() {
                Some(done) => self.file(done),
                // Last in, first out.
                None => return self.late.pop(),
            }
        }
        self.ready.pop_front()
    }

    fn try_wait(&mut self) -> Option<ReadDone> {
        while let Some(done) = self.inner.try_wait() {
            self.file(done);
        }
        self.ready.pop_front()
    }
}
