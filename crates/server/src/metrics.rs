//! `/metrics`, in Prometheus' text format.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use moeflux::scheduler::{Figures, Histogram};

use crate::App;

pub(crate) async fn handle(State(app): State<Arc<App>>) -> Response {
    let text = render(&app);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

fn render(app: &App) -> String {
    let (f, description) = (app.scheduler.figures(), app.scheduler.description());
    let mut text = String::new();
    let mut one = |kind: &str, name: &str, help: &str, values: &[(&str, f64)]| {
        // Writing to a text does not fail.
        let _ = writeln!(text, "# HELP moeflux_{name} {help}\n# TYPE moeflux_{name} {kind}");
        for (label, value) in values {
            let _ = writeln!(text, "moeflux_{name}{label} {value}");
        }
    };
    let requests = [
        ("{outcome=\"finished\"}", f.finished as f64),
        ("{outcome=\"cancelled\"}", f.cancelled as f64),
        ("{outcome=\"failed\"}", f.failed as f64),
        ("{outcome=\"refused\"}", f.refused as f64),
    ];
    one("counter", "requests_total", "Requests by outcome.", &requests);
    let tokens = [
        ("{kind=\"prompt\"}", f.prompt_tokens as f64),
        ("{kind=\"cached\"}", f.cached_tokens as f64),
        ("{kind=\"generated\"}", f.generated_tokens as f64),
    ];
    one("counter", "tokens_total", "Tokens, by what was done with them.", &tokens);
    let http: Vec<(String, f64)> = app
        .requests
        .list()
        .into_iter()
        .map(|((path, status), count)| (format!("{{path=\"{path}\",status=\"{status}\"}}"), count as f64))
        .collect();
    let http: Vec<(&str, f64)> = http.iter().map(|(label, count)| (&**label, *count)).collect();
    one("counter", "http_requests_total", "HTTP requests, by path and status.", &http);
    one("counter", "steps_total", "Batches evaluated.", &[("", f.steps as f64)]);
    one("counter", "busy_seconds_total", "Time spent evaluating.", &[("", f.busy_seconds)]);
    one(
        "counter",
        "preemptions_total",
        "Requests preempted because memory was short.",
        &[("", f.preemptions as f64)],
    );
    let lookups = [
        ("{tier=\"device\"}", f.experts.device_hits as f64),
        ("{tier=\"memory\"}", f.experts.hits as f64),
        ("{tier=\"disk\"}", f.experts.misses as f64),
    ];
    one("counter", "expert_lookups_total", "Expert requests, by where the expert was.", &lookups);
    one("counter", "expert_bytes_read_total", "Bytes of experts read.", &[("", f.experts.bytes_read as f64)]);
    one(
        "counter",
        "expert_stall_seconds_total",
        "Time that computing stalled on reads.",
        &[("", f.experts.stall.as_secs_f64())],
    );
    one("gauge", "requests_waiting", "Requests in the queue.", &[("", f.waiting as f64)]);
    one("gauge", "requests_running", "Requests being answered.", &[("", f.running as f64)]);
    one("gauge", "kv_pages", "Key-value pages.", &[("", description.pages as f64)]);
    one("gauge", "kv_pages_used", "Pages in use, including cached sessions.", &[("", f.pages_used as f64)]);
    one("gauge", "kv_pages_running", "Pages of requests being answered.", &[("", f.pages_running as f64)]);
    one("gauge", "kept_sessions", "Sessions cached for reuse.", &[("", f.kept_sessions as f64)]);
    if let Some(bytes) = moeflux::memory::resident() {
        one("gauge", "resident_bytes", "Resident memory of the process.", &[("", bytes as f64)]);
    }
    gateway(&mut text, app, &f, description.pages);
    histogram(&mut text, "batch_sequences", "Sequences per batch.", &f.batch);
    histogram(
        &mut text,
        "time_to_first_token_seconds",
        "Time from submission to the first token.",
        &f.first_token,
    );
    histogram(&mut text, "inter_token_seconds", "Time between tokens of an answer.", &f.between_tokens);
    histogram(&mut text, "request_seconds", "Time from submission to the end of an answer.", &f.duration);
    text
}

/// What gateways and autoscalers for language models look at, under the names that vLLM gave it.
fn gateway(text: &mut String, app: &App, figures: &Figures, pages: usize) {
    let model = app.options.model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let used = figures.pages_running as f64 / pages.max(1) as f64;
    for (name, help, value) in [
        ("num_requests_waiting", "Requests in the queue.", figures.waiting as f64),
        ("num_requests_running", "Requests being answered.", figures.running as f64),
        ("kv_cache_usage_perc", "Part of the key-value pages that running requests use; 1 is all.", used),
    ] {
        let _ = writeln!(text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} gauge");
        let _ = writeln!(text, "vllm:{name}{{model_name=\"{model}\"}} {value}");
    }
}

fn histogram(text: &mut String, name: &str, help: &str, histogram: &Histogram) {
    let _ = writeln!(text, "# HELP moeflux_{name} {help}\n# TYPE moeflux_{name} histogram");
    let mut below = 0;
    for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
        below += count;
        let _ = writeln!(text, "moeflux_{name}_bucket{{le=\"{bound}\"}} {below}");
    }
    let _ = writeln!(text, "moeflux_{name}_bucket{{le=\"+Inf\"}} {}", histogram.count());
    let _ =
        writeln!(text, "moeflux_{name}_sum {}\nmoeflux_{name}_count {}", histogram.sum, histogram.count());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_what_is_below_their_bound() {
        let mut text = String::new();
        let values = Histogram { bounds: &[0.5, 2.0], counts: vec![2, 1, 4], sum: 20.5 };
        histogram(&mut text, "x", "Help.", &values);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "# HELP moeflux_x Help.",
                "# TYPE moeflux_x histogram",
                "moeflux_x_bucket{le=\"0.5\"} 2",
                "moeflux_x_bucket{le=\"2\"} 3",
                "moeflux_x_bucket{le=\"+Inf\"} 7",
                "moeflux_x_sum 20.5",
                "moeflux_x_count 7",
            ]
        );
    }
}
