//! What machines ask: is it there, is it ready, how busy is it, how far is my prompt.

use crate::support::start_with;
use moeflux::{Options, SchedulerOptions};
use moeflux_server::{Limits, ServerOptions};
use serde_json::{Value, json};

#[test]
fn probes_and_gauges() {
    let serving =
        ServerOptions { api_keys: vec!["other".into(), "secret".into()], ..ServerOptions::default() };
    let options = Options { sequences: 2, context: Some(256), ..Options::default() };
    let server = start_with(&options, SchedulerOptions::default(), serving, Limits::default());
    // Probes have no key.
    for path in ["/livez", "/readyz", "/health"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let metrics = server.send("GET", "/metrics", &[("x-api-key", "secret")], b"").text();
    for line in [
        "vllm:num_requests_waiting{model_name=\"demo\"} 0",
        "vllm:num_requests_running{model_name=\"demo\"} 0",
        "vllm:kv_cache_usage_perc{model_name=\"demo\"} 0",
        "vllm:spec_decode_num_drafts_total{model_name=\"demo\"} 0",
        "vllm:spec_decode_num_draft_tokens_total{model_name=\"demo\"} 0",
        "vllm:spec_decode_num_accepted_tokens_total{model_name=\"demo\"} 0",
        "# TYPE vllm:cache_config_info gauge",
        &format!(
            "vllm:cache_config_info{{model_name=\"demo\",block_size=\"64\",num_gpu_blocks=\"{}\",enable_prefix_caching=\"True\"}} 1",
            server.scheduler.description().pages
        ),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    server.scheduler.drain();
    assert_eq!(server.get("/readyz").status, 503);
}

#[test]
fn routers_learn_what_a_worker_is() {
    let options = Options { sequences: 2, context: Some(256), ..Options::default() };
    let server =
        start_with(&options, SchedulerOptions::default(), ServerOptions::default(), Limits::default());
    let pages = server.scheduler.description().pages;
    for path in ["/get_server_info", "/server_info?config_format=json"] {
        let info = server.get(path).json();
        assert_eq!((&info["served_model_name"], &info["max_running_requests"]), (&json!("demo"), &json!(2)));
        assert_eq!(info["max_total_tokens"], json!(64 * pages));
        let vllm = &info["vllm_config"];
        assert_eq!(vllm["model_config"], json!({"model": "demo", "max_model_len": 256}));
        assert_eq!(
            (&vllm["cache_config"]["block_size"], &vllm["cache_config"]["num_gpu_blocks"]),
            (&json!(64), &json!(pages))
        );
    }
    for path in ["/get_model_info", "/model_info"] {
        let info = server.get(path).json();
        assert_eq!((&info["model_path"], &info["is_generation"]), (&json!("demo"), &json!(true)));
        assert!(info.get("tokenizer_path").is_none(), "{info}");
    }
}

#[test]
fn streams_say_how_far_the_prompt_is() {
    let options = Options { sequences: 2, context: Some(2048), chunk: Some(64), ..Options::default() };
    let server =
        start_with(&options, SchedulerOptions::default(), ServerOptions::default(), Limits::default());
    let long = "one two three four five six seven ".repeat(60);
    let mut request =
        json!({"messages": [{"role": "user", "content": long}], "max_tokens": 2, "stream": true});
    let plain = server.post("/v1/chat/completions", &request).text();
    assert!(plain.lines().filter(|line| line.starts_with(": prompt ")).count() > 3, "{plain}");
    request["return_progress"] = json!(true);
    request["messages"][0]["content"] = json!(long.replace("one", "ten"));
    let events = server.post("/v1/chat/completions", &request).events();
    let progress: Vec<&Value> = events
        .iter()
        .map(|event| &event["prompt_progress"])
        .filter(|progress| progress.is_object())
        .collect();
    let done: Vec<u64> = progress.iter().filter_map(|progress| progress["processed"].as_u64()).collect();
    let total = progress[0]["total"].as_u64().unwrap();
    assert!(
        done.len() > 3 && done.is_sorted() && done.iter().all(|done| *done < total),
        "{done:?} of {total}"
    );
    for (path, body) in [
        (
            "/v1/messages",
            json!({"model": "demo", "max_tokens": 2, "stream": true, "messages": [{"role": "user", "content": long.replace("one", "two")}]}),
        ),
        (
            "/v1/responses",
            json!({"max_output_tokens": 2, "stream": true, "input": long.replace("one", "six")}),
        ),
        ("/v1/completions", json!({"max_tokens": 2, "stream": true, "prompt": long.replace("one", "you")})),
    ] {
        let text = server.post(path, &body).text();
        assert!(text.contains("\n: prompt ") || text.starts_with(": prompt "), "{path}: {text}");
    }
}
