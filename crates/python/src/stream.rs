//! [`Stream`]: an answer as it comes, for threads and for event loops.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use moeflux::scheduler::{Done, Event, Ticket};
use moeflux::{Error, Finish, Passage, ReasoningSplit};
use moeflux_server::{AnswerPart, AnswerReader};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;

use crate::answer::{Answer, Piece};
use crate::awaiting::Wake;
use crate::error::raise;
use crate::host::Host;
use crate::inbox::{Inbox, lock};
use crate::wait::LOOK;

/// Is told how an answer ended: with the error, if it failed.
pub type AtEnd = Box<dyn FnOnce(&Answer, Option<&Error>) + Send>;

/// How an answer ended.
#[derive(Debug)]
enum Ended {
    /// By itself, or because the caller said so.
    Well,
    /// With an error.
    Badly(Error),
}

/// Takes an answer to messages apart.
pub enum Reader {
    /// Reasoning, and what is said.
    Reasoning(ReasoningSplit),
    /// Calls of functions, too.
    Functions(AnswerReader),
}

impl Reader {
    fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        match self {
            Self::Reasoning(split) => passages(|out| split.push(text, out)),
            Self::Functions(reader) => reader.push(text),
        }
    }

    fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        match self {
            Self::Reasoning(split) => passages(|out| split.finish(out)),
            Self::Functions(reader) => reader.finish(cut),
        }
    }
}

fn passages(fill: impl FnOnce(&mut Vec<Passage>)) -> Vec<AnswerPart> {
    let mut passages = vec![];
    fill(&mut passages);
    let part = |passage| match passage {
        Passage::Text(text) => AnswerPart::Text(text),
        Passage::Reasoning(text) => AnswerPart::Reasoning(text),
    };
    passages.into_iter().map(part).collect()
}

/// What has come of an answer.
struct Progress {
    /// `None` for text that is continued.
    reader: Option<Reader>,
    /// Pieces that nobody has asked for yet.
    ready: VecDeque<Piece>,
    answer: Answer,
    done: Option<Done>,
    ended: Option<Ended>,
    at_end: Option<AtEnd>,
}

impl Progress {
    fn add(&mut self, event: Event) {
        match event {
            Event::Progress(_) => {}
            Event::Piece(piece) => {
                self.answer.push_token(piece.token, piece.logprobs);
                self.add_text(piece.text);
            }
            Event::Done(done) => {
                self.done = Some(done);
                self.end(Ended::Well);
            }
            Event::Failed(error) => self.end(Ended::Badly(error)),
        }
    }

    fn add_text(&mut self, text: String) {
        let parts = match &mut self.reader {
            Some(reader) => reader.push(&text),
            None if text.is_empty() => vec![],
            None => vec![AnswerPart::Text(text)],
        };
        self.add_parts(parts);
    }

    fn add_parts(&mut self, parts: Vec<AnswerPart>) {
        self.ready.extend(parts.into_iter().filter_map(|part| self.answer.push(part)));
    }

    fn end(&mut self, ended: Ended) {
        if self.ended.is_some() {
            return;
        }
        if let Some(mut reader) = self.reader.take() {
            let finish = self.done.as_ref().map(|done| done.finish);
            let cut = !matches!(finish, Some(Finish::EndOfText | Finish::Stopped));
            let rest = reader.finish(cut);
            self.add_parts(rest);
        }
        self.answer.end(self.done.take());
        if let Some(at_end) = self.at_end.take() {
            let error = match &ended {
                Ended::Well => None,
                Ended::Badly(error) => Some(error),
            };
            at_end(&self.answer, error);
        }
        self.ended = Some(ended);
    }
}

/// An answer on its way; dropping it cancels the request.
pub struct Core {
    inbox: Arc<Inbox>,
    /// `None` once the caller has stopped the answer.
    ticket: Mutex<Option<Ticket>>,
    progress: Mutex<Progress>,
    /// The model lives as long as its answers are waited for.
    _host: Arc<Host>,
}

impl Core {
    /// An answer whose events come through `inbox`.
    pub fn new(
        host: Arc<Host>,
        inbox: Arc<Inbox>,
        ticket: Ticket,
        reader: Option<Reader>,
        at_end: Option<AtEnd>,
    ) -> Arc<Self> {
        let (ready, answer) = (VecDeque::new(), Answer::default());
        let progress = Progress { reader, ready, answer, done: None, ended: None, at_end };
        let (ticket, progress) = (Mutex::new(Some(ticket)), Mutex::new(progress));
        Arc::new(Self { inbox, ticket, progress, _host: host })
    }

    /// Where its events arrive.
    pub fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Gives the answer up within one step; what was said until then is the answer.
    pub fn stop(&self) {
        drop(lock(&self.ticket).take());
    }

    /// What has come by now.
    fn progress(&self) -> MutexGuard<'_, Progress> {
        let mut progress = lock(&self.progress);
        let (events, closed) = self.inbox.take();
        events.into_iter().for_each(|event| progress.add(event));
        if closed {
            let stopped = lock(&self.ticket).is_none();
            progress.end(if stopped { Ended::Well } else { Ended::Badly(Error::ShuttingDown) });
        }
        progress
    }

    /// The next piece, `Some(None)` after the last; `None` if that is not known yet.
    fn next(&self, py: Python<'_>) -> Option<PyResult<Option<Piece>>> {
        let mut progress = self.progress();
        if let Some(piece) = progress.ready.pop_front() {
            return Some(Ok(Some(piece)));
        }
        progress.ended.as_ref().map(|ended| match ended {
            Ended::Well => Ok(None),
            Ended::Badly(error) => Err(raise(py, error)),
        })
    }

    /// The whole answer; `None` if it is not there yet.
    fn whole(&self, py: Python<'_>) -> Option<PyResult<Answer>> {
        let progress = self.progress();
        progress.ended.as_ref().map(|ended| match ended {
            Ended::Well => Ok(progress.answer.clone()),
            Ended::Badly(error) => Err(raise(py, error)),
        })
    }

    /// The whole answer or the next piece, as an event loop's future takes it; `None` if it is not there yet.
    pub fn poll(&self, py: Python<'_>, whole: bool) -> Option<PyResult<Py<PyAny>>> {
        if whole {
            return Some(self.whole(py)?.and_then(|answer| Ok(Py::new(py, answer)?.into_any())));
        }
        Some(self.next(py)?.and_then(|piece| match piece {
            Some(piece) => Ok(Py::new(py, piece)?.into_any()),
            None => Err(PyStopAsyncIteration::new_err(())),
        }))
    }

    /// What `ask` gives once it gives something. Ctrl-C ends the answer, too.
    fn wait<T>(&self, py: Python<'_>, ask: impl Fn(&Self) -> Option<PyResult<T>>) -> PyResult<T> {
        loop {
            if let Some(result) = ask(self) {
                return result;
            }
            let mut arrived = false;
            while !arrived {
                arrived = py.detach(|| self.inbox.wait(LOOK));
                py.check_signals().inspect_err(|_| self.stop())?;
            }
        }
    }

    /// Waits for the whole answer.
    pub fn answer(&self, py: Python<'_>) -> PyResult<Answer> {
        self.wait(py, |core| core.whole(py))
    }
}

/// What was said until now remains: whoever is told of the end is told that it was stopped.
impl Drop for Core {
    fn drop(&mut self) {
        self.stop();
        let mut progress = self.progress();
        progress.end(Ended::Well);
    }
}

/// An answer as it comes: iterate over it, also asynchronously, or wait for the whole: `answer()` blocks, `await` does not.
/// When it is dropped, the answer ends there.
#[pyclass(frozen, module = "moeflux")]
pub struct Stream(pub Arc<Core>);

#[pymethods]
impl Stream {
    /// Waits for the whole answer.
    fn answer(&self, py: Python<'_>) -> PyResult<Answer> {
        self.0.answer(py)
    }

    /// Ends the answer here. What was said until then is the answer.
    fn stop(&self) {
        self.0.stop();
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        self.0.wait(py, |core| core.next(py))
    }

    fn __aiter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __anext__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Wake::future(py, &self.0, false)
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Wake::future(py, &self.0, true)?.call_method0("__await__")
    }
}
