//! [`Wake`]: between an answer and a future of an event loop.

use std::sync::{Arc, Mutex};

use pyo3::prelude::*;

use crate::inbox::{Waiter, lock};
use crate::stream::Core;

/// Gives a future what it waits for; called in its event loop when something has come.
#[pyclass(frozen, module = "moeflux")]
pub struct Wake {
    core: Arc<Core>,
    event_loop: Py<PyAny>,
    future: Py<PyAny>,
    /// Whether the future is the whole answer, not the next piece.
    whole: bool,
    /// Number of the waiter in the inbox.
    waiter: Mutex<Option<u64>>,
}

impl Wake {
    /// A future of the running event loop: the whole answer, or the next piece.
    pub fn future<'py>(py: Python<'py>, core: &Arc<Core>, whole: bool) -> PyResult<Bound<'py, PyAny>> {
        let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
        let future = event_loop.call_method0("create_future")?;
        let wake = Self {
            core: Arc::clone(core),
            event_loop: event_loop.unbind(),
            future: future.clone().unbind(),
            whole,
            waiter: Mutex::new(None),
        };
        let wake = Bound::new(py, wake)?;
        Self::__call__(&wake)?;
        if !future.call_method0("done")?.is_truthy()? {
            future.call_method1("add_done_callback", (wake.getattr("settled")?,))?;
        }
        Ok(future)
    }
}

#[pymethods]
impl Wake {
    fn __call__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, wake) = (slf.py(), slf.get());
        let future = wake.future.bind(py);
        if future.call_method0("done")?.is_truthy()? {
            return Ok(());
        }
        loop {
            match wake.core.poll(py, wake.whole) {
                Some(Ok(value)) => return future.call_method1("set_result", (value,)).map(drop),
                Some(Err(error)) => return future.call_method1("set_exception", (error,)).map(drop),
                None => {}
            }
            let callback = slf.clone().into_any().unbind();
            let waiter = Waiter { event_loop: wake.event_loop.clone_ref(py), callback };
            let number = wake.core.inbox().wait_with(waiter);
            *lock(&wake.waiter) = number;
            if number.is_some() {
                return Ok(());
            }
        }
    }

    /// Called when the future is done: nobody waits any more if it was cancelled, and nobody wants the answer if it was that.
    fn settled(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        if future.call_method0("cancelled")?.is_truthy()? {
            let waiter = lock(&self.waiter).take();
            waiter.into_iter().for_each(|number| self.core.inbox().forget(number));
            if self.whole {
                self.core.stop();
            }
        }
        Ok(())
    }
}
