//! [`Feed`]: a server's figures as they arrive, on a thread that reconnects when the server goes away.

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::metrics::Metrics;

/// Where events come from.
const LIVE: &str = "/api/live";
/// Delay before reconnecting.
const PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of one event, and of a page of metrics.
const MAX_TEXT: u64 = 16 << 20;

/// What is new.
#[derive(Debug, Clone)]
pub enum Update {
    /// An event of `/api/live`, and `/metrics` at that time.
    Figures { live: Value, metrics: Metrics },
    /// The server cannot be reached, for now.
    Lost(String),
    /// The server is not one that can be watched, or wants another key.
    Refused(String),
}

/// Updates from a server.
pub struct Feed(Receiver<Update>);

impl Feed {
    /// Connects to the server at `url`, which has no slash at its end, to look at `model` or else at that which was asked last.
    pub fn start(url: String, key: Option<String>, model: Option<String>) -> Result<Self> {
        let (sender, receiver) = channel();
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("moeflux/", env!("CARGO_PKG_VERSION")))
            .proxy(None)
            .timeout_connect(Some(Duration::from_secs(5)))
            .timeout_recv_response(Some(Duration::from_secs(10)))
            .build();
        let source = Source { agent: config.into(), url, key, model };
        std::thread::Builder::new()
            .name("feed".into())
            .spawn(move || while source.follow(&sender) {})
            .context("cannot start a thread")?;
        Ok(Self(receiver))
    }

    /// The next update, if it comes within `time`.
    pub fn next(&self, time: Duration) -> Result<Update, RecvTimeoutError> {
        self.0.recv_timeout(time)
    }
}

struct Source {
    agent: Agent,
    url: String,
    key: Option<String>,
    model: Option<String>,
}

impl Source {
    /// Passes on events until the connection ends; false if nothing more is to be expected, or wanted.
    fn follow(&self, sender: &Sender<Update>) -> bool {
        let update = match self.connect() {
            Ok(response) => match self.pass_on(response, sender) {
                Ok(()) => return false,
                Err(reason) => Update::Lost(format!("lost {}: {reason}", self.url)),
            },
            Err(update) => update,
        };
        let go_on = matches!(update, Update::Lost(_));
        if sender.send(update).is_err() {
            return false;
        }
        std::thread::sleep(PAUSE);
        go_on
    }

    fn get(&self, path: &str) -> Result<Response<Body>, String> {
        let mut request = self.agent.get(format!("{}{path}", self.url));
        if let Some(model) = self.model.as_ref().filter(|_| path == LIVE) {
            request = request.query("model", model);
        }
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        request.call().map_err(|error| error.to_string())
    }

    fn connect(&self) -> Result<Response<Body>, Update> {
        let url = &self.url;
        let response = self.get(LIVE).map_err(|reason| {
            Update::Lost(format!("no server at {url}: {reason}; `moeflux serve MODEL` starts one"))
        })?;
        let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or("");
        match response.status() {
            StatusCode::OK if kind.starts_with("text/event-stream") => Ok(response),
            StatusCode::UNAUTHORIZED => Err(Update::Refused(format!(
                "{url}: wrong or missing API key: use --api-key, --api-key-file or MOEFLUX_API_KEY"
            ))),
            StatusCode::NOT_FOUND if self.model.is_some() => {
                let model = self.model.as_deref().unwrap_or_default();
                Err(Update::Refused(format!("{url}: there is no model {model:?}")))
            }
            status if status.is_server_error() => Err(Update::Lost(format!("{url}: {status}"))),
            status => Err(Update::Refused(format!("{url}: expected a moeflux server, got {status} {kind}"))),
        }
    }

    /// Passes on events; an error when they end, nothing when nobody listens any more.
    fn pass_on(&self, response: Response<Body>, sender: &Sender<Update>) -> Result<(), String> {
        let mut lines = BufReader::new(response.into_body().into_reader());
        loop {
            let mut line = String::new();
            match lines.by_ref().take(MAX_TEXT).read_line(&mut line) {
                Ok(0) => return Err("it closed the connection".into()),
                Err(error) => return Err(error.to_string()),
                Ok(_) => {}
            }
            let Some(data) = line.strip_prefix("data: ") else { continue };
            let live = serde_json::from_str(data)
                .map_err(|error| format!("its event is not valid JSON: {error}"))?;
            let mut text = String::new();
            let page =
                self.get("/metrics")?.into_body().into_reader().take(MAX_TEXT).read_to_string(&mut text);
            page.map_err(|error| error.to_string())?;
            if sender.send(Update::Figures { live, metrics: Metrics::parse(&text) }).is_err() {
                return Ok(());
            }
        }
    }
}
