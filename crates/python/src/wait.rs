//! Waiting for the engine without the interpreter's lock, and until Ctrl-C.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use moeflux::Error;
use pyo3::prelude::*;

use crate::error::raise;

/// How often it is looked whether a signal has come.
pub const LOOK: Duration = Duration::from_millis(50);

/// What comes through `receiver`.
///
/// # Errors
/// `ClosedError` if nothing will, and what a signal's handler raises.
pub fn receive<T: Send>(py: Python<'_>, receiver: &mut Receiver<T>) -> PyResult<T> {
    loop {
        // A receiver may move to another thread, but not be shared.
        let waiting = &mut *receiver;
        match py.detach(move || waiting.recv_timeout(LOOK)) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(raise(py, &Error::ShuttingDown)),
        }
    }
}

/// As [`receive`], but leaves signals until later: for what must come back before Python goes on.
pub fn receive_surely<T: Send>(py: Python<'_>, receiver: Receiver<T>) -> PyResult<T> {
    py.detach(move || receiver.recv()).map_err(|_| raise(py, &Error::ShuttingDown))
}
