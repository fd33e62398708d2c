//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use moeflux::scheduler::Progress;
use serde_json::{Value, json};
use tokio::time::{Interval, MissedTickBehavior};

use crate::answer::{Answers, Update};

/// Silence after which a sign of life is sent, so that nobody on the way hangs up.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Turns updates into events of one interface.
pub(crate) trait Render: Send + Unpin + 'static {
    /// Called once, before anything else.
    fn begin(&mut self, _: &mut Events) {}

    /// An update of answer `index`; after a failure no more come.
    fn update(&mut self, index: usize, update: Update, events: &mut Events);

    /// Called after the last answer, unless one failed.
    fn end(&mut self, _: &mut Events) {}

    /// A sign of life.
    fn ping(&self, events: &mut Events) {
        events.raw(": waiting\n\n");
    }
}

/// Events that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct Events(VecDeque<Bytes>);

impl Events {
    /// `data: …`
    pub(crate) fn data(&mut self, data: &Value) {
        self.raw(&format!("data: {data}\n\n"));
    }

    /// `event: …`, with its type also in the data.
    pub(crate) fn named(&mut self, data: &Value) {
        let name = data.get("type").and_then(Value::as_str).unwrap_or("message");
        self.raw(&format!("event: {name}\ndata: {data}\n\n"));
    }

    pub(crate) fn raw(&mut self, text: &str) {
        self.0.push_back(Bytes::copy_from_slice(text.as_bytes()));
    }
}

/// How far a prompt is, in words for clients.
pub(crate) trait Tell {
    /// An event that clients pass over.
    fn comment(&self) -> String;

    /// In llama.cpp's words, in which `processed` includes what was cached.
    fn json(&self) -> Value;
}

impl Tell for Progress {
    fn comment(&self) -> String {
        format!(": prompt {} of {}\n\n", self.evaluated, self.tokens)
    }

    fn json(&self) -> Value {
        json!({
            "total": self.tokens,
            "cache": self.cached,
            "processed": self.evaluated,
            "time_ms": self.time.as_millis() as u64,
        })
    }
}

/// The body of a streamed answer. When the client goes away it is dropped, and the answers with it.
struct EventStream<R> {
    answers: Answers,
    render: R,
    events: Events,
    ended: bool,
    keep_alive: Interval,
}

impl<R: Render> futures_core::Stream for EventStream<R> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(bytes) = this.events.0.pop_front() {
                this.keep_alive.reset();
                return Poll::Ready(Some(Ok(bytes)));
            }
            if this.ended {
                return Poll::Ready(None);
            }
            match this.answers.poll(context) {
                Poll::Ready(Some((index, update))) => {
                    this.ended = matches!(update, Update::Failed(_));
                    this.render.update(index, update, &mut this.events);
                }
                Poll::Ready(None) => {
                    this.ended = true;
                    this.render.end(&mut this.events);
                }
                Poll::Pending => match this.keep_alive.poll_tick(context) {
                    Poll::Ready(_) => this.render.ping(&mut this.events),
                    Poll::Pending => return Poll::Pending,
                },
            }
        }
    }
}

/// A response that streams `answers`.
pub(crate) fn stream(answers: Answers, mut render: impl Render) -> Response {
    let mut events = Events::default();
    render.begin(&mut events);
    let mut keep_alive = tokio::time::interval(KEEP_ALIVE);
    keep_alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
    keep_alive.reset();
    response(EventStream { answers, render, events, ended: false, keep_alive })
}

/// A response of server-sent events.
pub(crate) fn response(
    stream: impl futures_core::Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    let mut response = Body::from_stream(stream).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect responses are told not to.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
