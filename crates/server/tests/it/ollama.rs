//! Ollama's API.

use crate::support::{Answer, start};
use serde_json::{Value, json};

fn lines(answer: &Answer) -> Vec<Value> {
    answer.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn chats_and_completions() {
    let server = start();
    let question = json!([{"role": "user", "content": "What is 17 + 25?"}]);
    let request =
        json!({"model": "demo:latest", "messages": question, "options": {"temperature": 0}, "stream": false});
    let whole = server.ask("/api/chat", &request);
    assert_eq!((&whole["message"]["content"], &whole["done"]), (&json!("17 + 25 = 42"), &json!(true)));
    assert_eq!(whole["done_reason"], "stop");
    assert!(whole["eval_count"].as_u64() > Some(2) && whole["total_duration"].as_u64() > Some(0), "{whole}");
    let streamed = server
        .post("/api/chat", &json!({"model": "demo", "messages": question, "options": {"temperature": 0}}));
    assert!(streamed.headers.contains("application/x-ndjson"), "{}", streamed.headers);
    let events = lines(&streamed);
    let said: String = events.iter().filter_map(|event| event["message"]["content"].as_str()).collect();
    assert_eq!(said, "17 + 25 = 42");
    let (last, before) = events.split_last().unwrap();
    assert!(before.iter().all(|event| event["done"] == false) && last["done"] == true, "{events:?}");

    let request = json!({"model": "demo", "prompt": "What is 17 + 25?", "options": {"temperature": 0}, "stream": false});
    assert_eq!(server.ask("/api/generate", &request)["response"], "17 + 25 = 42");
    let raw = json!({"model": "demo", "prompt": "Once upon a", "raw": true,
        "options": {"num_predict": 3, "temperature": 0}});
    let events = lines(&server.post("/api/generate", &raw));
    assert_eq!(events.last().unwrap()["done_reason"], "length");
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
        "additionalProperties": false});
    let request = json!({"model": "demo", "messages": question, "format": schema, "stream": false});
    let text = server.ask("/api/chat", &request)["message"]["content"].as_str().unwrap().to_owned();
    assert!(serde_json::from_str::<Value>(&text).unwrap()["n"].is_i64(), "{text}");
    assert_eq!(server.ask("/api/generate", &json!({"model": "demo"}))["done_reason"], "load");
}

#[test]
fn functions_models_and_faults() {
    let server = start();
    let tool = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}});
    let called = json!([
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]},
        {"role": "tool", "tool_name": "now", "content": "noon"},
    ]);
    let request = json!({"model": "demo", "messages": called, "tools": [tool], "stream": false, "options": {"num_predict": 9}});
    server.ask("/api/chat", &request);
    assert_eq!(server.get("/api/tags").json()["models"][0]["model"], "demo");
    assert_eq!(server.get("/api/ps").json()["models"][0]["context_length"], 512);
    assert!(server.get("/api/version").json()["version"].is_string());
    let shown = server.ask("/api/show", &json!({"model": "demo"}));
    assert_eq!(
        (&shown["capabilities"][1], &shown["model_info"]["moeflux.context_length"]),
        (&json!("tools"), &json!(512))
    );
    for (path, body, status) in [
        ("/api/chat", json!({"model": "other", "messages": called}), 404),
        ("/api/chat", json!({"messages": called}), 400),
        (
            "/api/chat",
            json!({"model": "demo", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
            400,
        ),
        ("/api/chat", json!({"model": "demo", "messages": called, "options": {"mirostat": 1}}), 400),
        ("/api/generate", json!({"model": "demo", "prompt": "x", "suffix": "y"}), 400),
        ("/api/generate", json!({"model": "demo", "prompt": "x", "format": 5}), 400),
        ("/api/show", json!({"model": "other"}), 404),
        ("/api/pull", json!({"model": "other"}), 501),
    ] {
        let answer = server.post(path, &body);
        assert!(
            answer.status == status && answer.json()["error"].is_string(),
            "{path} {body}: {}",
            answer.text()
        );
    }
}
