//! `/metrics`, in Prometheus' text format.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use moeflux::scheduler::{BLOCK_TOKENS, Figures, Histogram};

use crate::Site;
use crate::models::Place;

pub(crate) async fn handle(State(site): State<Arc<Site>>) -> Response {
    let text = render(&site);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Labels of a value, and the value.
type Sample = (String, f64);

/// `name="value"`, with what must be escaped.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

fn write(text: &mut String, kind: &str, name: &str, help: &str, samples: &[Sample]) {
    // Writing to a text does not fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(text, "{name}{{{labels}}} {value}");
    }
}

fn render(site: &Site) -> String {
    let mut text = String::new();
    let http = site.requests.list().into_iter().map(|((path, status), count)| {
        (format!("{},status=\"{status}\"", label("path", &path)), count as f64)
    });
    let http: Vec<Sample> = http.collect();
    write(&mut text, "counter", "moeflux_http_requests_total", "HTTP requests, by path and status.", &http);
    if let Some(bytes) = moeflux::memory::resident() {
        let _ = writeln!(
            text,
            "# HELP moeflux_resident_bytes Resident memory of the process.\n# TYPE moeflux_resident_bytes gauge\n\
             moeflux_resident_bytes {bytes}"
        );
    }
    loads(&mut text, site);
    let models = of(site);
    of_models(&mut text, &models);
    gateway(&mut text, &models);
    text
}

/// What is known of a model.
struct Model {
    name: String,
    /// What it has done, every time that it was loaded.
    done: Figures,
    /// If it is loaded, how it is now, and its key-value pages.
    now: Option<(Figures, usize)>,
}

fn of(site: &Site) -> Vec<Model> {
    let model = |(index, name): (usize, &str)| {
        let (mut done, app) = site.models.account(index);
        let now = app.map(|app| (app.scheduler.figures(), app.scheduler.description().pages));
        now.iter().for_each(|(figures, _)| done.add_counts(figures));
        Model { name: name.to_owned(), done, now }
    };
    names(site).map(model).collect()
}

/// Models by number and name, without adapters, whose requests are those of their model.
fn names(site: &Site) -> impl Iterator<Item = (usize, &str)> {
    site.models.names().enumerate().filter(|(index, _)| !site.models.is_adapter(*index))
}

/// Which models are loaded, and what loading took.
fn loads(text: &mut String, site: &Site) {
    let look = |value: &dyn Fn(&Place, u64, f64) -> f64| -> Vec<Sample> {
        let of = |(index, name): (usize, &str)| {
            let value = site.models.look(index, |place, loads, time| value(place, loads, time.as_secs_f64()));
            (label("model", name), value)
        };
        names(site).map(of).collect()
    };
    let loaded = look(&|place, _, _| f64::from(matches!(place, Place::Ready(_))));
    write(text, "gauge", "moeflux_model_loaded", "Whether the model is loaded.", &loaded);
    let loads = look(&|_, loads, _| loads as f64);
    write(text, "counter", "moeflux_model_loads_total", "Times that the model was loaded on demand.", &loads);
    let seconds = look(&|_, _, seconds| seconds);
    write(text, "counter", "moeflux_model_load_seconds_total", "Time spent on that.", &seconds);
}

/// What every model has done, and what those that are loaded hold.
fn of_models(text: &mut String, models: &[Model]) {
    let mut counter = |name: &str, help: &str, value: &dyn Fn(&Figures) -> f64| {
        let sample = |model: &Model| (label("model", &model.name), value(&model.done));
        let samples: Vec<Sample> = models.iter().map(sample).collect();
        write(text, "counter", &format!("moeflux_{name}"), help, &samples);
    };
    counter("embeddings_total", "Inputs embedded.", &|f| f.embeddings as f64);
    counter("steps_total", "Batches evaluated.", &|f| f.steps as f64);
    counter("busy_seconds_total", "Time spent evaluating.", &|f| f.busy_seconds);
    counter("preemptions_total", "Requests preempted because memory was short.", &|f| f.preemptions as f64);
    counter("expert_bytes_read_total", "Bytes of experts read.", &|f| f.experts.bytes_read as f64);
    counter("expert_stall_seconds_total", "Time that computing stalled on reads.", &|f| {
        f.experts.stall.as_secs_f64()
    });
    let mut gauge = |name: &str, help: &str, value: &dyn Fn(&Figures, usize) -> f64| {
        write(text, "gauge", &format!("moeflux_{name}"), help, &present(models, "model", value));
    };
    gauge("memory_bytes", "The model's part of the memory budget.", &|f, _| f.memory.budget as f64);
    gauge("expert_slots", "Slots for routed experts.", &|f, _| f.memory.expert_slots as f64);
    gauge("requests_waiting", "Requests in the queue.", &|f, _| f.waiting as f64);
    gauge("requests_running", "Requests being answered.", &|f, _| f.running as f64);
    gauge("kv_pages_used", "Pages in use, including cached sessions.", &|f, _| f.pages_used as f64);
    gauge("kv_pages_running", "Pages of requests being answered.", &|f, _| f.pages_running as f64);
    gauge("kept_sessions", "Sessions cached for reuse.", &|f, _| f.kept_sessions as f64);
    gauge("kv_pages", "Key-value pages.", &|_, pages| pages as f64);
    let mut several =
        |name: &str, help: &str, key: &str, values: &dyn Fn(&Figures) -> [(&'static str, u64); 4]| {
            let samples = models.iter().flat_map(|model| {
                let values = values(&model.done).into_iter().filter(|(value, _)| !value.is_empty());
                let labels = |value| format!("{},{}", label("model", &model.name), label(key, value));
                values.map(|(value, count)| (labels(value), count as f64)).collect::<Vec<_>>()
            });
            write(text, "counter", &format!("moeflux_{name}"), help, &samples.collect::<Vec<_>>());
        };
    several("requests_total", "Requests by outcome.", "outcome", &|f| {
        [("finished", f.finished), ("cancelled", f.cancelled), ("failed", f.failed), ("refused", f.refused)]
    });
    several("tokens_total", "Tokens, by what was done with them.", "kind", &|f| {
        [("prompt", f.prompt_tokens), ("cached", f.cached_tokens), ("generated", f.generated_tokens), ("", 0)]
    });
    several("expert_lookups_total", "Expert requests, by where the expert was.", "tier", &|f| {
        [("device", f.experts.device_hits), ("memory", f.experts.hits), ("disk", f.experts.misses), ("", 0)]
    });
    let mut distribution = |name: &str, help: &str, of: &dyn Fn(&Figures) -> &Histogram| {
        let _ = writeln!(text, "# HELP moeflux_{name} {help}\n# TYPE moeflux_{name} histogram");
        for model in models {
            histogram(text, name, &label("model", &model.name), of(&model.done));
        }
    };
    distribution("batch_sequences", "Sequences per batch.", &|f| &f.batch);
    distribution("time_to_first_token_seconds", "Time from submission to the first token.", &|f| {
        &f.first_token
    });
    distribution("inter_token_seconds", "Time between tokens of an answer.", &|f| &f.between_tokens);
    distribution(
        "request_seconds",
        "Time from submission to the end of an answer, or to the last embedding.",
        &|f| &f.duration,
    );
}

/// What gateways and autoscalers for language models look at, under the names that vLLM gave it.
fn gateway(text: &mut String, models: &[Model]) {
    let mut one = |name: &str, help: &str, value: &dyn Fn(&Figures, usize) -> f64| {
        write(text, "gauge", &format!("vllm:{name}"), help, &present(models, "model_name", value));
    };
    one("num_requests_waiting", "Requests in the queue.", &|f, _| f.waiting as f64);
    one("num_requests_running", "Requests being answered.", &|f, _| f.running as f64);
    let used = "Part of the key-value pages that running requests use; 1 is all.";
    one("kv_cache_usage_perc", used, &|f, pages| f.pages_running as f64 / pages.max(1) as f64);
    let mut counter = |name: &str, help: &str, value: &dyn Fn(&Figures) -> u64| {
        let sample = |model: &Model| (label("model_name", &model.name), value(&model.done) as f64);
        let samples: Vec<Sample> = models.iter().map(sample).collect();
        write(text, "counter", &format!("vllm:spec_decode_{name}_total"), help, &samples);
    };
    counter("num_drafts", "Times that guessed tokens were verified.", &|f| f.drafts);
    counter("num_draft_tokens", "Tokens guessed and verified.", &|f| f.drafted_tokens);
    counter("num_accepted_tokens", "Guessed tokens that were right.", &|f| f.accepted_tokens);
    let pages = |model: &Model| {
        let (_, pages) = model.now.as_ref()?;
        let (size, count) =
            (label("block_size", &BLOCK_TOKENS.to_string()), label("num_gpu_blocks", &pages.to_string()));
        let labels = [label("model_name", &model.name), size, count, label("enable_prefix_caching", "True")];
        Some((labels.join(","), 1.0))
    };
    let pages: Vec<Sample> = models.iter().filter_map(pages).collect();
    write(
        text,
        "gauge",
        "vllm:cache_config_info",
        "Tokens in a key-value page, and pages, as labels.",
        &pages,
    );
}

/// A value of the models that are loaded.
fn present(models: &[Model], key: &str, value: &dyn Fn(&Figures, usize) -> f64) -> Vec<Sample> {
    let sample = |model: &Model| {
        let (figures, pages) = model.now.as_ref()?;
        Some((label(key, &model.name), value(figures, *pages)))
    };
    models.iter().filter_map(sample).collect()
}

fn histogram(text: &mut String, name: &str, labels: &str, histogram: &Histogram) {
    let mut below = 0;
    for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
        below += count;
        let _ = writeln!(text, "moeflux_{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
    }
    let (count, sum) = (histogram.count(), histogram.sum);
    let _ = writeln!(text, "moeflux_{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
    let _ = writeln!(text, "moeflux_{name}_sum{{{labels}}} {sum}\nmoeflux_{name}_count{{{labels}}} {count}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_what_is_below_their_bound() {
        let mut text = String::new();
        let values = Histogram { bounds: &[0.5, 2.0], counts: vec![2, 1, 4], sum: 20.5 };
        histogram(&mut text, "x", &label("model", "a \"b\""), &values);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                r#"moeflux_x_bucket{model="a \"b\"",le="0.5"} 2"#,
                r#"moeflux_x_bucket{model="a \"b\"",le="2"} 3"#,
                r#"moeflux_x_bucket{model="a \"b\"",le="+Inf"} 7"#,
                r#"moeflux_x_sum{model="a \"b\""} 20.5"#,
                r#"moeflux_x_count{model="a \"b\""} 7"#,
            ]
        );
    }
}
