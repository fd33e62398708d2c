//! From an interface's inputs to embeddings.

use std::sync::Arc;

use axum::http::StatusCode;
use moeflux::scheduler::EmbedRequest;
use serde::Deserialize;
use tokio::sync::mpsc;

use crate::App;
use crate::error::ApiError;
use crate::intake::Room;

/// Most inputs of a request, as OpenAI has it.
const MAX_INPUTS: usize = 2048;
/// Most tokens of all inputs together, as OpenAI has it; a single one may fill the context.
const MAX_TOKENS: usize = 300_000;

/// How hidden states become an embedding, as requests name it.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pooling {
    #[default]
    Last,
    Mean,
}

/// One text.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// What is wanted.
#[derive(Debug)]
pub(crate) struct Embed {
    /// The field that inputs come in.
    pub(crate) param: &'static str,
    pub(crate) inputs: Vec<Input>,
    pub(crate) pooling: Pooling,
    /// How wide embeddings are to be.
    pub(crate) dimensions: Option<usize>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Embedded {
    /// One an input, (hidden_size).
    pub(crate) embeddings: Vec<Vec<f32>>,
    /// Tokens of all inputs.
    pub(crate) tokens: usize,
}

impl Embed {
    /// Encodes, queues and waits; gives up what is left when it is dropped.
    pub(crate) async fn run(self, app: &Arc<App>, room: Room) -> Result<Embedded, ApiError> {
        let (theirs, param) = (Arc::clone(app), self.param);
        let tally = Arc::clone(&room.tally);
        let prepare = move || {
            let _room = room;
            self.prepare(&theirs)
        };
        let request = tokio::task::spawn_blocking(prepare).await.unwrap_or_else(|_| {
            let message = "the request could not be prepared";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message))
        })?;
        let tokens = request.inputs.iter().map(Vec::len).sum();
        let mut embeddings = vec![vec![]; request.inputs.len()];
        let (sender, mut results) = mpsc::unbounded_channel();
        let give = move |input, result| drop(sender.send((input, result)));
        let _ticket = app.scheduler.embed_to(request, give).map_err(|error| named(error, param))?;
        tally.prompt(tokens);
        for _ in 0..embeddings.len() {
            let (input, result) = results.recv().await.ok_or(moeflux::Error::ShuttingDown)?;
            embeddings[input] = result?;
        }
        Ok(Embedded { embeddings, tokens })
    }

    fn prepare(self, app: &App) -> Result<EmbedRequest, ApiError> {
        let Self { param, inputs, pooling, dimensions } = self;
        if let Some(adapter) = &app.adapter {
            let message = format!("expected a model, got the adapter {adapter:?}, which has no embeddings");
            return Err(ApiError::invalid("model", message));
        }
        let description = app.scheduler.description();
        let width = description.hidden_size;
        if let Some(wanted) = dimensions.filter(|wanted| *wanted != width) {
            let message =
                format!("expected {width}: this model's embeddings cannot be cut off, got {wanted}");
            return Err(ApiError::invalid("dimensions", message));
        }
        if inputs.is_empty() || inputs.len() > MAX_INPUTS {
            let message = format!("expected 1 to {MAX_INPUTS} inputs, got {}", inputs.len());
            return Err(ApiError::invalid(param, message));
        }
        let most = MAX_TOKENS.max(description.context);
        let mut total = 0;
        let mut encoded = vec![];
        for input in inputs {
            let tokens = match input {
                Input::Text(text) if text.is_empty() => vec![],
                Input::Text(text) => app.scheduler.encode(&text).map_err(|error| named(error, param))?,
                Input::Tokens(tokens) => tokens,
            };
            if tokens.is_empty() {
                return Err(ApiError::invalid(param, "expected no empty input"));
            }
            total += tokens.len();
            if total > most {
                return Err(ApiError::invalid(param, format!("expected at most {most} tokens together")));
            }
            encoded.push(tokens);
        }
        let pooling = match pooling {
            Pooling::Last => moeflux::Pooling::Last,
            Pooling::Mean => moeflux::Pooling::Mean,
        };
        Ok(EmbedRequest { inputs: encoded, pooling })
    }
}

/// The error, which is the field's if the request is at fault.
fn named(error: moeflux::Error, param: &str) -> ApiError {
    let error = ApiError::from(error);
    let own = error.status == StatusCode::BAD_REQUEST;
    ApiError { param: own.then(|| param.to_owned()), ..error }
}
