//! Errors of the engine as Python's exceptions, in the same words.

use moeflux::Error;
use moeflux_compute::Error as ComputeError;
use pyo3::import_exception;
use pyo3::prelude::*;

/// The exceptions, which Python code defines.
pub mod classes {
    use super::import_exception;

    import_exception!(moeflux._errors, BudgetError);
    import_exception!(moeflux._errors, CheckpointError);
    import_exception!(moeflux._errors, ClosedError);
    import_exception!(moeflux._errors, ConstraintError);
    import_exception!(moeflux._errors, ContextFullError);
    import_exception!(moeflux._errors, Error);
    import_exception!(moeflux._errors, FileError);
    import_exception!(moeflux._errors, MissingFileError);
    import_exception!(moeflux._errors, OptionError);
    import_exception!(moeflux._errors, QueueFullError);
}

/// The exception that says what `error` does.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let (raised, attribute) = match error {
        Error::Io { source, .. } | Error::Read { source, .. } => {
            let raised = match source.kind() {
                std::io::ErrorKind::NotFound => classes::MissingFileError::new_err(text),
                _ => classes::FileError::new_err(text),
            };
            (raised, source.raw_os_error().map(|number| ("errno", i64::from(number))))
        }
        Error::Malformed { .. }
        | Error::Config { .. }
        | Error::Model { .. }
        | Error::Tensor { .. }
        | Error::MissingTensor { .. }
        | Error::UnsupportedArchitecture { .. }
        | Error::UnsupportedQuantization { .. }
        | Error::Tokenizer { .. }
        | Error::ChatTemplate { .. }
        | Error::SessionFile { .. }
        | Error::NotFinite { .. } => (classes::CheckpointError::new_err(text), None),
        Error::Budget { minimum, .. } => {
            let minimum = i64::try_from(*minimum).unwrap_or(i64::MAX);
            (classes::BudgetError::new_err(text), Some(("minimum", minimum)))
        }
        Error::Compute(ComputeError::DeviceMemory { .. }) => (classes::BudgetError::new_err(text), None),
        Error::Option { .. } | Error::Token { .. } | Error::UnknownToken { .. } => {
            (classes::OptionError::new_err(text), None)
        }
        Error::ContextFull { .. } | Error::StatesFull { .. } => {
            (classes::ContextFullError::new_err(text), None)
        }
        Error::Constraint { .. } => (classes::ConstraintError::new_err(text), None),
        Error::QueueFull { .. } => (classes::QueueFullError::new_err(text), None),
        Error::ShuttingDown => (classes::ClosedError::new_err(text), None),
        _ => (classes::Error::new_err(text), None),
    };
    if let Some((name, value)) = attribute
        && let Err(error) = raised.value(py).setattr(name, value)
    {
        return error;
    }
    raised
}

/// Results of the engine as those of functions of Python.
pub trait OrRaise<T> {
    /// The same with the engine's error as an exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for moeflux::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, &error))
    }
}

/// The exception for an option that the engine does not get to see.
pub fn option(name: &'static str, expected: &str, got: &str) -> Error {
    Error::Option { option: name, expected: expected.to_owned(), got: got.to_owned() }
}
