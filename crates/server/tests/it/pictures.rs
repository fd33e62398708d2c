//! Pictures in messages.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use moeflux::{Options, Scheduler, SchedulerOptions, TextModel};
use moeflux_compute::cpu::CpuBackend;
use moeflux_server::{Limits, ServerOptions};
use serde_json::{Value, json};

use crate::support::{Running, start};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/pictures").join(name)
}

fn base64(name: &str) -> String {
    STANDARD.encode(std::fs::read(fixture(name)).unwrap())
}

/// A server of a tiny random model that reads pictures.
fn seeing() -> Running {
    let options = Options { sequences: 2, picture_pixels: Some(1 << 16), ..Options::default() };
    let model =
        TextModel::open(&fixture("qwen3_vl_moe"), &CpuBackend::new(2, None).unwrap(), &options, |_, _| ())
            .unwrap();
    let scheduler = Arc::new(Scheduler::start(model, SchedulerOptions::default()).unwrap());
    let served = moeflux_server::Server::new(scheduler, ServerOptions::default());
    Running::start(served, Limits::default())
}

fn openai(url: &str) -> Value {
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let text = json!({"type": "text", "text": "What is it?"});
    json!({"messages": [{"role": "user", "content": [image, text]}], "max_tokens": 6, "temperature": 0})
}

#[test]
fn both_interfaces_show_pictures_to_the_model() {
    let server = seeing();
    let data = |name: &str| format!("data:image/png;base64,{}", base64(name));
    let ask = |name: &str| server.ask("/v1/chat/completions", &openai(&data(name)));
    let said = |answer: &Value| answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let first = ask("kept.png");
    // 5 by 4 blocks, and words.
    let tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 20, "{first}");
    let other = ask("large.png");
    assert!(cached(&other) < 20, "only what comes before the picture is the same: {other}");
    let again = ask("kept.png");
    assert_eq!((said(&again), cached(&again)), (said(&first), tokens - 1));
    assert_ne!(said(&other), said(&first));

    let source = json!({"type": "base64", "media_type": "image/png", "data": base64("kept.png")});
    let content = json!([{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]);
    let messages = json!([{"role": "user", "content": content}]);
    let request = json!({"model": "moeflux", "messages": messages, "max_tokens": 6, "temperature": 0});
    let answer = server.ask("/v1/messages", &request);
    assert_eq!(answer["content"][0]["text"], said(&first), "{answer}");
    let counted = server.ask("/v1/messages/count_tokens", &request);
    assert_eq!(counted["input_tokens"], tokens);
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let server = seeing();
    let refused = |server: &Running, request: &Value, expected: &str| {
        let answer = server.post("/v1/chat/completions", request);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains(expected), "{}", answer.text());
    };
    refused(&server, &openai("https://example.com/a.png"), "not fetched from elsewhere");
    refused(&server, &openai("data:image/png;base64,@@@@"), "base64");
    refused(&server, &openai("data:image/png;base64,AAAA"), "expected a PNG, JPEG, WebP or GIF file");
    let half = base64("large.png");
    refused(&server, &openai(&format!("data:image/png;base64,{}", &half[..half.len() / 8 * 4])), "picture");
    let system = json!({"messages": [{"role": "system", "content": openai("data:;base64,AAAA")["messages"][0]["content"]}]});
    refused(&server, &system, "only text");
    // Ids of pictures are no tokens.
    let raw = json!({"prompt": [5, 6, 3_221_225_472_u32, 7], "max_tokens": 2});
    let answer = server.post("/v1/completions", &raw);
    assert_eq!(answer.status, 400, "{}", answer.text());
    // A model without eyes.
    let server = start();
    let url = format!("data:image/png;base64,{}", base64("kept.png"));
    refused(&server, &openai(&url), "this server reads no pictures");
}
