//! `/api/live`: what the engine is doing, for the page, as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::response::Response;
use moeflux::scheduler::Figures;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Interval, MissedTickBehavior};

use crate::error::Dialect;
use crate::models::Place;
use crate::{Site, openai, sse};

const PERIOD: Duration = Duration::from_millis(400);

/// Differences between two samples of a model.
struct Live {
    site: Arc<Site>,
    /// The model that is looked at; without one that which was asked for last.
    model: Option<usize>,
    interval: Interval,
    before: Option<Sample>,
}

struct Sample {
    /// Of which model.
    model: usize,
    /// Which of the times that it was loaded.
    loads: u64,
    time: Instant,
    figures: Figures,
    counts: Vec<Vec<u64>>,
}

#[derive(Deserialize)]
pub(crate) struct Which {
    model: Option<String>,
}

pub(crate) async fn handle(State(site): State<Arc<Site>>, Query(which): Query<Which>) -> Response {
    let model = match which.model.map(|model| site.find(Some(&model))).transpose() {
        Ok(model) => model,
        Err(error) => return error.response(Dialect::OpenAi),
    };
    let mut interval = tokio::time::interval(PERIOD);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    sse::response(Live { site, model, interval, before: None })
}

impl futures_core::Stream for Live {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        ready!(self.interval.poll_tick(context));
        if !self.site.models.is_open() {
            return Poll::Ready(None);
        }
        let mut data = self.look();
        if let Some(loading) = self.loading() {
            data["loading"] = loading;
        }
        let names: Vec<&str> = self.site.models.names().collect();
        if names.len() > 1 {
            let one =
                |(model, name)| json!({"name": name, "status": openai::models::status(&self.site, model)});
            data["models"] = names.into_iter().enumerate().map(one).collect();
        }
        Poll::Ready(Some(Ok(Bytes::from(format!("data: {data}\n\n")))))
    }
}

impl Live {
    fn look(&mut self) -> Value {
        let models = &self.site.models;
        let Some(model) = self.model.or_else(|| models.latest()) else {
            self.before = None;
            return json!({"waiting": 0, "running": 0});
        };
        let Some(app) = models.loaded(model) else {
            self.before = None;
            return json!({"waiting": 0, "running": 0});
        };
        let loads = models.look(model, |_, loads, _| loads);
        let now = Instant::now();
        let figures = app.scheduler.figures();
        let (layers, counts): (Vec<usize>, Vec<Vec<u64>>) = app.scheduler.expert_use().layers().unzip();
        let description = app.scheduler.description();
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
        match self.before.as_ref().filter(|before| (before.model, before.loads) == (model, loads)) {
            None => {
                let experts: Vec<usize> = counts.iter().map(Vec::len).collect();
                data["model"] = json!({
                    "name": app.name,
                    "backend": description.backend,
                    "context": description.context,
                    "layers": layers,
                    "experts": experts,
                    "reads_pictures": description.reads_pictures,
                    "expert_slots": figures.memory.expert_slots,
                    "all_experts": description.experts,
                });
            }
            Some(Sample { time, figures: old, counts: old_counts, .. }) => {
                let seconds = (now - *time).as_secs_f64().max(1e-3);
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
        self.before = Some(Sample { model, loads, time: now, figures, counts });
        data
    }

    /// The model that is being loaded, if it is one that is looked at, and how far that is.
    fn loading(&self) -> Option<Value> {
        let models = &self.site.models;
        let is_looked_at = |(model, _): &(usize, &str)| self.model.is_none_or(|one| one == *model);
        models.names().enumerate().filter(is_looked_at).find_map(|(model, name)| {
            models.look(model, |place, _, _| match place {
                Place::Loading { loaded, total } => {
                    Some(json!({"name": name, "loaded_bytes": loaded, "total_bytes": total}))
                }
                _ => None,
            })
        })
    }
}
