//! [`Host`]: a model on its thread, as long as anything of Python refers to it.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use moeflux::scheduler::{Event, Visit};
use moeflux::{Constraint, Error, ReasoningForm, ReasoningSplit, Request, Scheduler};
use moeflux_server::{Constraints, Made};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::convert::{Encoded, Prompt};
use crate::error::{OrRaise, raise};
use crate::inbox::{Inbox, Wakers};
use crate::options::GenerateOptions;
use crate::stream::{AtEnd, Core, Reader};
use crate::wait::receive_surely;

/// A model that takes requests.
pub struct Served {
    /// It has the thread.
    pub scheduler: Arc<Scheduler>,
    /// Forms of its answers.
    pub constraints: Constraints,
}

/// A model, open or closed.
pub struct Host {
    served: RwLock<Option<Arc<Served>>>,
    wakers: Wakers,
    /// The process that opened it: threads do not survive a fork.
    process: u32,
}

impl Host {
    /// A model on a thread.
    pub fn new(scheduler: Scheduler) -> Arc<Self> {
        let scheduler = Arc::new(scheduler);
        let constraints = Constraints::new(Arc::clone(&scheduler));
        let served = RwLock::new(Some(Arc::new(Served { scheduler, constraints })));
        Arc::new(Self { served, wakers: Wakers::default(), process: std::process::id() })
    }

    /// The model.
    ///
    /// # Errors
    /// `ClosedError` after [`Host::close`]; `RuntimeError` in another process than the one that opened it.
    pub fn served(&self, py: Python<'_>) -> PyResult<Arc<Served>> {
        if std::process::id() != self.process {
            return Err(PyRuntimeError::new_err(
                "a model does not survive a fork: open it in the process that uses it",
            ));
        }
        let served = self.served.read().unwrap_or_else(PoisonError::into_inner);
        served.clone().ok_or_else(|| raise(py, &Error::ShuttingDown))
    }

    /// Gives up all requests, and returns when memory is free again.
    pub fn close(&self) {
        let served = self.served.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(served) = served.filter(|_| std::process::id() == self.process) else { return };
        served.scheduler.abandon();
        // Requests may hold the scheduler, which must not be dropped, and so waited for, on its own thread.
        while served.scheduler.is_alive() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether [`Host::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.served.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Calls `task` on the engine's thread and waits for its result.
    pub fn visit<T: Send + 'static>(
        &self,
        py: Python<'_>,
        task: impl FnOnce(&mut Visit<'_>) -> T + Send + 'static,
    ) -> PyResult<T> {
        let receiver = self.served(py)?.scheduler.visit(task).or_raise(py)?;
        receive_surely(py, receiver)
    }

    /// Tokens of a prompt.
    pub fn encode(&self, py: Python<'_>, prompt: &Prompt, options: &GenerateOptions) -> PyResult<Encoded> {
        let served = self.served(py)?;
        py.detach(|| prompt.encode(&served, options)).or_raise(py)
    }

    /// Queues a request.
    pub fn submit(
        self: &Arc<Self>,
        py: Python<'_>,
        prompt: Encoded,
        options: &GenerateOptions,
        at_end: Option<AtEnd>,
    ) -> PyResult<Arc<Core>> {
        let served = self.served(py)?;
        let chat = prompt.chat.as_deref();
        let warn = |made: Made| -> PyResult<Box<dyn Constraint>> {
            if let Some(text) = made.warning {
                py.import("warnings")?.call_method1("warn", (text,))?;
            }
            Ok(made.constraint)
        };
        let (constraints, form) = (&served.constraints, options.form.as_ref());
        let mut decoding = options.decoding.clone();
        let (constraint, reader) = match (chat, &options.functions) {
            (Some(chat), Some(functions)) => {
                let answer = py.detach(|| constraints.answer(chat, functions, form)).or_raise(py)?;
                decoding.visible = answer.visible;
                (Some(warn(answer.made)?), Some(Reader::Functions(answer.reader)))
            }
            _ => {
                let make = |form| py.detach(|| constraints.make(form, chat)).or_raise(py);
                let made = form.map(make).transpose()?.map(warn).transpose()?;
                let form = ReasoningForm::of(served.scheduler.template());
                let split = chat.map(|chat| {
                    decoding.visible = form.visible(served.scheduler.tokenizer());
                    let begun = form.begun_by(chat);
                    Reader::Reasoning(ReasoningSplit::new(form, begun))
                });
                (made, split)
            }
        };
        let adapter = options.adapter.clone();
        let request =
            Request { prompt: prompt.tokens, options: decoding, constraint, adapter, ..Request::default() };
        let inbox = Inbox::new(self.wakers.clone());
        let sink: Box<dyn FnMut(Event) + Send> = Box::new(inbox.sink());
        let ticket = served.scheduler.submit_to(request, sink).or_raise(py)?;
        Ok(Core::new(Arc::clone(self), inbox, ticket, reader, at_end))
    }
}

/// Others may run while the engine's thread ends.
impl Drop for Host {
    fn drop(&mut self) {
        if !self.is_closed() && Python::try_attach(|py| py.detach(|| self.close())).is_none() {
            self.close();
        }
    }
}
