//! `/api/live`: what the engine is doing, for the page, as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use axum::response::Response;
use moeflux::scheduler::Figures;
use serde_json::{Value, json};
use tokio::time::{Interval, MissedTickBehavior};

use crate::{App, sse};

const PERIOD: Duration = Duration::from_millis(400);

/// Differences between two samples.
struct Live {
    app: Arc<App>,
    interval: Interval,
    before: Option<(Instant, Figures, Vec<Vec<u64>>)>,
}

pub(crate) async fn handle(State(app): State<Arc<App>>) -> Response {
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    sse::response(Live { app, interval, before: None })
}

impl futures_core::Stream for Live {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        ready!(self.interval.poll_tick(context));
        if !self.app.scheduler.is_open() {
            return Poll::Ready(None);
        }
        let data = self.look();
        Poll::Ready(Some(Ok(Bytes::from(format!("data: {data}\n\n")))))
    }
}

impl Live {
    fn look(&mut self) -> Value {
        let now = Instant::now();
        let figures = self.app.scheduler.figures();
        let (layers, counts): (Vec<usize>, Vec<Vec<u64>>) = self.app.scheduler.expert_use().layers().unzip();
        let description = self.app.scheduler.description();
        let mut data = json!({
            "waiting": figures.waiting,
            "running": figures.running,
            "sequences": description.sequences,
            "kv_pages": description.pages,
            "kv_pages_used": figures.pages_used,
            "generated_tokens": figures.generated_tokens,
            "prompt_tokens": figures.prompt_tokens,
            "hit_rate": figures.experts.hit_rate(),
        });
        match &self.before {
            None => {
                let experts: Vec<usize> = counts.iter().map(Vec::len).collect();
                data["model"] = json!({
                    "name": self.app.options.model,
                    "backend": description.backend,
                    "context": description.context,
                    "layers": layers,
                    "experts": experts,
                    "expert_slots": description.expert_slots,
                    "all_experts": description.experts,
                });
            }
            Some((then, old, old_counts)) => {
                let seconds = (now - *then).as_secs_f64().max(1e-3);
                let rate = |new: u64, old: u64| (new - old) as f64 / seconds;
                let (hits, misses) =
                    (figures.experts.hits - old.experts.hits, figures.experts.misses - old.experts.misses);
                data["tokens_per_second"] = json!(rate(figures.generated_tokens, old.generated_tokens));
                data["prompt_tokens_per_second"] = json!(rate(figures.prompt_tokens, old.prompt_tokens));
                data["read_bytes_per_second"] =
                    json!(rate(figures.experts.bytes_read, old.experts.bytes_read));
                data["hits"] = json!(hits);
                data["misses"] = json!(misses);
                // Of every layer how often each expert was needed since the last look; layers at rest are left out.
                let heat: Vec<Value> = counts
                    .iter()
                    .zip(old_counts)
                    .map(|(new, old)| {
                        let used: Vec<u64> = new.iter().zip(old).map(|(new, old)| new - old).collect();
                        if used.iter().any(|n| *n > 0) { json!(used) } else { Value::Null }
                    })
                    .collect();
                data["heat"] = json!(heat);
            }
        }
        self.before = Some((now, figures, counts));
        data
    }
}
