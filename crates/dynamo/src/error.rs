//! Errors in Dynamo's terms.

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use moeflux::Error;

/// An error of the engine: whether the request is wrong, the worker is going away, or something else.
pub(crate) fn of(error: &Error) -> DynamoError {
    let kind = match error {
        Error::Option { .. } | Error::ContextFull { .. } | Error::Constraint { .. } | Error::Token { .. } => {
            BackendError::InvalidArgument
        }
        Error::ShuttingDown => BackendError::EngineShutdown,
        _ => BackendError::Unknown,
    };
    make(kind, error.to_string())
}

/// A request that cannot be served here.
pub(crate) fn unsupported(what: &str) -> DynamoError {
    make(BackendError::InvalidArgument, format!("{what} is not supported by moeflux"))
}

/// The engine is not there.
pub(crate) fn gone() -> DynamoError {
    make(BackendError::EngineShutdown, "the engine has ended".to_owned())
}

/// An error of a kind.
pub(crate) fn make(kind: BackendError, message: String) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message).build()
}
