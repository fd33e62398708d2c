//! HTTP over a [`Scheduler`]: the OpenAI, Anthropic and Ollama APIs, Prometheus metrics and a web page.
//!
//! [`router`] gives an axum [`Router`] that can be nested in another program; [`serve`] runs it with time limits and a
//! graceful shutdown. Requests go to the scheduler's thread through a bounded queue; when a client disconnects, its
//! request is cancelled within one step.
//!
//! Not here: TLS (put a proxy in front), embeddings, images, state between requests other than cached prefixes.

mod answer;
mod anthropic;
mod body;
mod error;
mod fields;
mod grammar;
mod guard;
mod intake;
mod keys;
mod live;
mod log;
mod markup;
mod metrics;
mod ollama;
mod openai;
mod page;
mod prompt;
mod schema;
mod serve;
mod sse;
mod stall;
mod tokens;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use moeflux::Scheduler;

use error::{ApiError, Dialect};
use grammar::Grammars;
use intake::Intake;
use markup::Markup;
pub use serve::{Limits, serve};

/// The OpenAPI description of this server.
const OPENAPI: &str = include_str!("../openapi.json");

/// How a server behaves.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Name under which clients know the model.
    pub model: String,
    /// Further names that are accepted; `*` is any.
    pub aliases: Vec<String>,
    /// Keys of which clients must send one, as a bearer token or in `x-api-key`; without any, nobody needs one.
    pub api_keys: Vec<String>,
    /// Origins whose pages may call this server; `*` is any.
    pub cors: Vec<String>,
    /// Refuse requests whose `Host` is not this machine, so that a page which renames itself cannot reach a server that
    /// has no key.
    pub local_only: bool,
    /// Maximum size of a request in bytes.
    pub max_body: usize,
    /// Bytes that requests may take together from their arrival until their tokens are queued; what finds no room waits,
    /// as long as a request may take to arrive.
    pub request_memory: usize,
    /// Most time that a request may take to arrive.
    pub body_timeout: Duration,
    /// Maximum tokens in an answer if the request does not say.
    pub max_tokens: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            model: "moeflux".into(),
            aliases: vec![],
            api_keys: vec![],
            cors: vec![],
            local_only: false,
            max_body: 8 << 20,
            request_memory: 64 << 20,
            body_timeout: Duration::from_secs(30),
            max_tokens: 1024,
        }
    }
}

/// What handlers share.
struct App {
    scheduler: Arc<Scheduler>,
    options: ServerOptions,
    grammars: Grammars,
    markup: Markup,
    intake: Intake,
    requests: log::Counts,
    /// When the server was made, in seconds since 1970.
    created: u64,
}

/// The server's routes over `scheduler`.
pub fn router(scheduler: Arc<Scheduler>, options: ServerOptions) -> Router {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let created = now.map_or(0, |since| since.as_secs());
    let grammars = Grammars::new(Arc::clone(&scheduler));
    let markup = Markup::of(&scheduler);
    let intake = Intake::new(options.request_memory);
    let requests = log::Counts::default();
    let app = Arc::new(App { scheduler, options, grammars, markup, intake, requests, created });
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/responses", post(openai::responses::handle))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{model}", get(openai::models::one))
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/tags", get(ollama::tags))
        .route("/api/show", post(ollama::show))
        .route("/api/ps", get(ollama::running))
        .route("/api/version", get(ollama::version))
        .route("/api/pull", post(ollama::unsupported))
        .route("/metrics", get(metrics::handle))
        .route("/api/live", get(live::handle))
        .route("/health", get(health))
        .route("/livez", get(live_probe))
        .route("/readyz", get(health))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/openapi.json", get(openapi))
        .merge(page::routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), guard::guard))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), log::layer))
        // Bodies are read with a limit of their own, which answers in the client's dialect.
        .layer(DefaultBodyLimit::disable())
        .with_state(app)
}

async fn health(axum::extract::State(app): axum::extract::State<Arc<App>>) -> Response {
    let (status, text) = if app.scheduler.is_open() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down")
    };
    (status, axum::Json(serde_json::json!({ "status": text }))).into_response()
}

/// Whether the engine is there at all, as it is while the server shuts down.
async fn live_probe(axum::extract::State(app): axum::extract::State<Arc<App>>) -> Response {
    let (status, text) = if app.scheduler.is_alive() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine has stopped")
    };
    (status, axum::Json(serde_json::json!({ "status": text }))).into_response()
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], OPENAPI).into_response()
}

async fn unknown_path(uri: axum::http::Uri) -> Response {
    let message = format!("unknown path {:?}", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, message).response(Dialect::of(uri.path()))
}

async fn wrong_method(uri: axum::http::Uri, method: axum::http::Method) -> Response {
    let message = format!("{method} is not allowed for {:?}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).response(Dialect::of(uri.path()))
}
