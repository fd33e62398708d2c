//! What the log and `/metrics` say of every request: one line when its answer has ended, with an identifier that the
//! client gets too.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use moeflux::scheduler::Usage;

use crate::openai::unique;
use crate::{Site, page};

/// Names a request; taken from the client if it has one, else made here.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same under the name that Anthropic's clients read.
const ANTHROPIC_ID: HeaderName = HeaderName::from_static("request-id");
/// What of a request is not done as asked.
const WARNING: HeaderName = HeaderName::from_static("x-moeflux-warning");
const MAX_ID: usize = 128;
/// What nginx writes for a client that went away before its answer began.
const CLIENT_CLOSED: u16 = 499;
/// Paths that are asked for again and again by machines.
const QUIET: [&str; 5] = ["/health", "/livez", "/readyz", "/metrics", "/api/live"];

/// What is counted while a request is answered.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    prompt_tokens: AtomicUsize,
    cached_tokens: AtomicUsize,
    generated_tokens: AtomicUsize,
    fault: OnceLock<String>,
    warning: OnceLock<String>,
}

impl Tally {
    /// A prompt was queued.
    pub(crate) fn prompt(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    /// A token was generated.
    pub(crate) fn token(&self) {
        self.generated_tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// An answer is complete.
    pub(crate) fn done(&self, usage: &Usage) {
        self.cached_tokens.fetch_add(usage.cached_tokens, Ordering::Relaxed);
    }

    /// The client is to know something; the first warning is kept.
    pub(crate) fn warn(&self, text: String) {
        let _ = self.warning.set(text);
    }

    /// The answer failed after it had begun.
    pub(crate) fn failed(&self, reason: &str) {
        let _ = self.fault.set(reason.to_owned());
    }
}

/// Why a response is an error; travels in its extensions.
#[derive(Debug, Clone)]
pub(crate) struct Fault(pub(crate) String);

/// Requests by path and status.
#[derive(Debug, Default)]
pub(crate) struct Counts(Mutex<BTreeMap<(String, u16), u64>>);

impl Counts {
    fn add(&self, path: &str, status: u16) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((path.to_owned(), status)).or_default() += 1;
    }

    /// Path, status and number of requests.
    pub(crate) fn list(&self) -> Vec<((String, u16), u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(key, count)| (key.clone(), *count)).collect()
    }
}

/// The line of one request, written when it is dropped.
struct Line {
    site: Arc<Site>,
    id: String,
    method: String,
    path: String,
    /// The route, which is one of few.
    route: String,
    begun: Instant,
    tally: Arc<Tally>,
    status: Option<u16>,
    reason: Option<String>,
    /// The whole answer was handed over.
    complete: bool,
}

impl Drop for Line {
    fn drop(&mut self) {
        let status = self.status.unwrap_or(CLIENT_CLOSED);
        self.site.requests.add(&self.route, status);
        let Self { id, method, path, tally, .. } = &*self;
        let reason = tally.fault.get().or(self.reason.as_ref());
        let reason = reason.map(String::as_str).or((!self.complete).then_some("the client went away"));
        let seconds = self.begun.elapsed().as_secs_f64();
        let some = |count: &AtomicUsize| Some(count.load(Ordering::Relaxed)).filter(|count| *count > 0);
        let prompt_tokens = some(&tally.prompt_tokens);
        let cached_tokens = some(&tally.cached_tokens);
        let generated_tokens = some(&tally.generated_tokens);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    id,
                    method,
                    path,
                    status,
                    seconds,
                    prompt_tokens,
                    cached_tokens,
                    generated_tokens,
                    reason,
                    "request"
                )
            };
        }
        if status >= 500 && status != 503 || tally.fault.get().is_some() {
            line!(error);
        } else if status < 400 && (QUIET.contains(&&*self.route) || page::has(&self.route)) {
            line!(debug);
        } else {
            line!(info);
        }
    }
}

/// The client's identifier if it is one that a log can hold.
fn given_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    plain.then(|| id.to_owned())
}

/// Wraps everything else.
pub(crate) async fn layer(State(site): State<Arc<Site>>, mut request: Request, next: Next) -> Response {
    let tally = Arc::new(Tally::default());
    let id = given_id(request.headers()).unwrap_or_else(|| unique("req_"));
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let mut line = Line {
        site,
        id,
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
        route,
        begun: Instant::now(),
        tally: Arc::clone(&tally),
        status: None,
        reason: None,
        complete: false,
    };
    request.extensions_mut().insert(tally);
    let mut response = next.run(request).await;
    line.status = Some(response.status().as_u16());
    line.reason = response.extensions_mut().remove::<Fault>().map(|fault| fault.0);
    if let Some(warning) = line.tally.warning.get().and_then(|text| HeaderValue::from_str(text).ok()) {
        response.headers_mut().insert(WARNING, warning);
    }
    if let Ok(id) = HeaderValue::from_str(&line.id) {
        if line.path.contains("/v1/messages") {
            response.headers_mut().insert(ANTHROPIC_ID, id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response.map(|body| Body::new(Logged { body, line }))
}

/// A body with the line of its request.
struct Logged {
    body: Body,
    line: Line,
}

impl HttpBody for Logged {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.line.complete |= frame.is_none() || self.body.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        // An empty body is never asked for.
        self.line.complete |= self.body.is_end_stream();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_fit_a_line() {
        let long = "x".repeat(MAX_ID + 1);
        for (given, taken) in
            [("abc-123", true), ("", false), ("two words", false), ("tab\t", false), (&long, false)]
        {
            let headers = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_str(given).unwrap())]);
            assert_eq!(given_id(&headers).as_deref(), taken.then_some(given), "{given}");
        }
    }
}
