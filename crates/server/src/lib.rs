//! HTTP over a [`Scheduler`]: the OpenAI, Anthropic and Ollama APIs, Prometheus metrics and a web page.
//!
//! [`router`] gives an axum [`Router`] that can be nested in another program; [`serve`] runs it on a [`Listener`] (TCP,
//! TLS, a unix socket) with time limits and a graceful shutdown. A [`Server`] may have several models, which are loaded when
//! they are asked for and divide memory. Requests go to the scheduler's thread through a bounded queue; when a client
//! disconnects, its request is cancelled within one step.
//!
//! Not here: HTTP/2, images, state between requests other than cached prefixes.

mod answer;
mod anthropic;
mod body;
mod constraints;
mod division;
mod embeddings;
mod error;
mod fields;
mod functions;
mod grammar;
mod guard;
mod intake;
mod keys;
mod kv_events;
mod listener;
mod live;
mod log;
mod markup;
mod metrics;
mod models;
mod ollama;
mod openai;
mod page;
mod pictures;
mod prompt;
mod schema;
mod serve;
mod sse;
mod stall;
mod tls;
mod tokens;
mod worker_info;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use moeflux::Scheduler;

pub use constraints::{AnswerForm, Constraints, Made};
use error::{ApiError, Dialect};
pub use functions::{AnswerPart, AnswerReader, FunctionAnswer, Functions};
use grammar::Grammars;
use intake::Intake;
pub use kv_events::{KvEvents, KvEventsError, KvEventsFormat, KvEventsOptions, KvPublisher};
pub use listener::{ListenError, Listener};
use markup::Markup;
use models::Models;
pub use models::{ModelSource, ServedModel};
pub use serve::{Limits, serve};
pub use tls::Tls;

/// The OpenAPI description of this server.
const OPENAPI: &str = include_str!("../openapi.json");

/// How a server behaves.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Name under which clients know the model, where there is one.
    pub model: String,
    /// Further names of it that are accepted; `*` is any.
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

/// One or several models and what their requests share. Clones are the same server.
#[derive(Clone)]
pub struct Server(Arc<Site>);

/// What handlers share.
struct Site {
    models: Arc<Models>,
    options: Arc<ServerOptions>,
    intake: Intake,
    requests: log::Counts,
    /// When the server was made, in seconds since 1970.
    created: u64,
}

/// A loaded model.
struct App {
    scheduler: Arc<Scheduler>,
    name: String,
    /// The adapter that answers are made with.
    adapter: Option<String>,
    grammars: Arc<Grammars>,
    markup: Arc<Markup>,
    options: Arc<ServerOptions>,
}

impl App {
    fn new(scheduler: Arc<Scheduler>, name: String, options: Arc<ServerOptions>) -> Self {
        let grammars = Arc::new(Grammars::new(Arc::clone(&scheduler)));
        let markup = Arc::new(Markup::of(&scheduler));
        Self { scheduler, name, adapter: None, grammars, markup, options }
    }

    /// The same model with one of its adapters.
    fn with_adapter(&self, adapter: &str) -> Self {
        Self {
            scheduler: Arc::clone(&self.scheduler),
            name: adapter.to_owned(),
            adapter: Some(adapter.to_owned()),
            grammars: Arc::clone(&self.grammars),
            markup: Arc::clone(&self.markup),
            options: Arc::clone(&self.options),
        }
    }
}

impl Site {
    /// The number of the model that a request means.
    fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        self.models.find(name)
    }

    /// That model, loaded if need be.
    async fn get(&self, model: usize) -> Result<Arc<App>, ApiError> {
        self.models.get(model).await
    }

    /// Both at once.
    async fn model(&self, name: Option<&str>) -> Result<Arc<App>, ApiError> {
        self.get(self.find(name)?).await
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.models.names()).finish()
    }
}

impl Server {
    /// A server of one model, which is there already and stays.
    pub fn new(scheduler: Arc<Scheduler>, options: ServerOptions) -> Self {
        let options = Arc::new(options);
        Self::over(Models::one(scheduler, Arc::clone(&options)), options)
    }

    /// A server of models that are loaded when they are asked for and divide `memory` bytes. A request that names none means
    /// the first; `model` and `aliases` of the options do not count.
    pub fn of_models(models: Vec<ServedModel>, memory: u64, options: ServerOptions) -> Self {
        let options = Arc::new(options);
        Self::over(Models::of(models, memory, Arc::clone(&options)), options)
    }

    fn over(models: Models, options: Arc<ServerOptions>) -> Self {
        let intake = Intake::new(options.request_memory);
        let requests = log::Counts::default();
        Self(Arc::new(Site { models: Arc::new(models), options, intake, requests, created: openai::now() }))
    }

    /// Names of its models.
    pub fn names(&self) -> Vec<&str> {
        self.0.models.names().collect()
    }

    /// Loads a model, as a request for it does.
    ///
    /// # Errors
    /// Why it cannot be loaded, or that there is no such model.
    pub async fn load(&self, name: &str) -> Result<(), String> {
        self.0.model(Some(name)).await.map(drop).map_err(|error| error.message)
    }

    /// Takes no more requests; those that have been taken are answered.
    pub fn drain(&self) {
        self.0.models.drain();
    }

    /// Gives up every request at the next step, and takes no more.
    pub fn abandon(&self) {
        self.0.models.abandon();
    }

    /// Its routes.
    pub fn router(&self) -> Router {
        routes(Arc::clone(&self.0))
    }
}

/// The routes of a server of one model.
pub fn router(scheduler: Arc<Scheduler>, options: ServerOptions) -> Router {
    Server::new(scheduler, options).router()
}

fn routes(site: Arc<Site>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/embeddings", post(openai::embeddings::handle))
        .route("/v1/responses", post(openai::responses::handle))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{model}", get(openai::models::one))
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::embeddings))
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
        .route("/get_model_info", get(worker_info::model))
        .route("/model_info", get(worker_info::model))
        .route("/get_server_info", get(worker_info::server))
        .route("/server_info", get(worker_info::server))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/openapi.json", get(openapi))
        .merge(page::routes())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&site), guard::guard))
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&site), log::layer))
        // Bodies are read with a limit of their own, which answers in the client's dialect.
        .layer(DefaultBodyLimit::disable())
        .with_state(site)
}

async fn health(axum::extract::State(site): axum::extract::State<Arc<Site>>) -> Response {
    let (status, text) = if site.models.is_open() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down")
    };
    (status, axum::Json(serde_json::json!({ "status": text }))).into_response()
}

/// Whether the engine is there at all, as it is while the server shuts down.
async fn live_probe(axum::extract::State(site): axum::extract::State<Arc<Site>>) -> Response {
    let (status, text) = if site.models.all_loaded().iter().all(|app| app.scheduler.is_alive()) {
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
