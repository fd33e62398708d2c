//! Error responses, in the shape that each API prescribes.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::log::Fault;

/// Whose shapes a path speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Dialect {
    /// The dialect of a path.
    pub(crate) fn of(path: &str) -> Self {
        if path.starts_with("/v1/messages") {
            Self::Anthropic
        } else if path.starts_with("/api/") {
            Self::Ollama
        } else {
            Self::OpenAi
        }
    }
}

/// An error with the status that it has in HTTP.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// A short name for programs.
    pub(crate) code: Option<&'static str>,
    pub(crate) retry_after: Option<Duration>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: `param` is not what it should be.
    pub(crate) fn invalid(param: &str, message: impl std::fmt::Display) -> Self {
        let param_text = Some(param.to_owned());
        Self { param: param_text, ..Self::new(StatusCode::BAD_REQUEST, format!("{param}: {message}")) }
    }

    fn kind(&self, dialect: Dialect) -> &'static str {
        match (dialect, self.status.as_u16()) {
            (_, 401) => "authentication_error",
            (_, 403) => "permission_error",
            (Dialect::Anthropic, 404) => "not_found_error",
            (Dialect::Anthropic, 413) => "request_too_large",
            (_, 429) => "rate_limit_error",
            (Dialect::Anthropic, 503) => "overloaded_error",
            (Dialect::OpenAi, 503) => "service_unavailable_error",
            (Dialect::Anthropic, 500..) => "api_error",
            (Dialect::OpenAi, 500..) => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body.
    pub(crate) fn json(&self, dialect: Dialect) -> Value {
        let Self { message, param, code, .. } = self;
        let kind = self.kind(dialect);
        match dialect {
            Dialect::OpenAi => {
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Dialect::Ollama => json!({"error": message}),
            Dialect::Anthropic => json!({"type": "error", "error": {"type": kind, "message": message}}),
        }
    }

    pub(crate) fn response(&self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.json(dialect))).into_response();
        response.extensions_mut().insert(Fault(self.message.clone()));
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs_f64().ceil() as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<moeflux::Error> for ApiError {
    fn from(error: moeflux::Error) -> Self {
        use moeflux::Error as E;
        let message = error.to_string();
        match error {
            E::QueueFull { retry_after, .. } => Self {
                retry_after: Some(retry_after),
                code: Some("queue_full"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            },
            E::ShuttingDown => Self {
                retry_after: Some(Duration::from_secs(5)),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            },
            E::Budget { .. } => {
                Self { code: Some("out_of_memory"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
            }
            E::ContextFull { .. } => Self {
                code: Some("context_length_exceeded"),
                param: Some("messages".into()),
                ..Self::new(StatusCode::BAD_REQUEST, message)
            },
            E::Option { option, .. } => {
                Self { param: Some(option.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
            }
            // Templates refuse conversations that their models were not trained on.
            E::ChatTemplate { reason, .. } => Self::invalid("messages", reason),
            E::Tokenizer { reason, .. } => Self::invalid("prompt", reason),
            E::UnknownToken { token, vocab_size, .. } => Self::invalid(
                "prompt",
                format!("expected token ids below {vocab_size} that are in use, got {token}"),
            ),
            E::PicturesFull { .. } => Self {
                retry_after: Some(Duration::from_secs(5)),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            },
            E::Picture { .. } => Self::invalid("messages", message),
            E::Token { .. } | E::Logits { .. } => Self::new(StatusCode::BAD_REQUEST, message),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}
