//! What every interface answers, streamed and whole.

use crate::support::start;
use moeflux::sampler::SamplerOptions;
use moeflux::{DecodingOptions, Options};
use serde_json::{Value, json};

const QUESTION: &str = "Tell me a short story about a fox.";

fn chat(more: Value) -> Value {
    merge(
        json!({"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}),
        more,
    )
}

fn merge(mut base: Value, more: Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

/// What `generate`, which `moeflux run` uses, says.
fn alone(seed: u64, temperature: f32) -> String {
    let mut model = crate::support::model(&Options { context: Some(512), ..Options::default() });
    let prompt = model.encode_chat(&[json!({"role": "user", "content": QUESTION})]).unwrap();
    let sampler = SamplerOptions { temperature, seed: Some(seed), top_p: 0.95, ..SamplerOptions::default() };
    let options = DecodingOptions { sampler, max_tokens: 40, ..DecodingOptions::default() };
    let (mut text, mut session) = (String::new(), model.engine.session());
    let add = |piece: &str| {
        text.push_str(piece);
        true
    };
    model.generate(&mut session, &prompt, options, add).unwrap();
    text
}

#[test]
fn every_interface_says_what_run_says() {
    let server = start();
    for (seed, temperature) in [(1, 0.0), (7, 1.0), (8, 1.0)] {
        let expected = alone(seed, temperature);
        assert!(expected.len() > 40, "{expected}");
        let sampling = json!({"seed": seed, "temperature": temperature, "top_p": 0.95});
        let whole = server.ask("/v1/chat/completions", &chat(sampling.clone()));
        assert_eq!(whole["choices"][0]["message"]["content"], expected);

        let stream =
            merge(sampling.clone(), json!({"stream": true, "stream_options": {"include_usage": true}}));
        let answer = server.post("/v1/chat/completions", &chat(stream));
        assert!(answer.headers.contains("content-type: text/event-stream"), "{}", answer.headers);
        assert!(answer.text().ends_with("data: [DONE]\n\n"));
        let events = answer.events();
        let said: String =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(said, expected);
        assert!(events.len() > 10, "as it comes, not at the end");
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let usage = &events.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
        assert!(usage["moeflux"]["expert_hits"].as_u64().unwrap() > 0, "{usage}");
        assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{usage}");

        let request = chat(sampling.clone());
        let messages = server.ask("/v1/messages", &request);
        assert_eq!(messages["content"][0]["text"], expected);
        let events = server.post("/v1/messages", &merge(request, json!({"stream": true}))).events();
        let said: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
        assert_eq!(said, expected);

        let request = merge(sampling, json!({"model": "demo", "input": QUESTION, "max_output_tokens": 40}));
        let response = server.ask("/v1/responses", &request);
        assert_eq!(response["output"][0]["content"][0]["text"], expected);
        let events = server.post("/v1/responses", &merge(request, json!({"stream": true}))).events();
        let said: String = events.iter().filter_map(|e| e["delta"].as_str()).collect();
        assert_eq!(said, expected);
    }
}

#[test]
fn events_come_in_the_order_that_clients_expect() {
    let server = start();
    let kinds = |path: &str, request: Value| -> Vec<String> {
        let events = server.post(path, &merge(request, json!({"stream": true}))).events();
        let mut kinds: Vec<String> = events.iter().map(|e| e["type"].as_str().unwrap().to_owned()).collect();
        kinds.dedup();
        kinds
    };
    assert_eq!(
        kinds("/v1/messages", chat(json!({"temperature": 0}))),
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let events = server.post("/v1/messages", &chat(json!({"stream": true}))).events();
    let count = server.ask("/v1/messages/count_tokens", &chat(json!({})));
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], count["input_tokens"], "known from the start");
    assert_eq!(
        kinds("/v1/responses", json!({"input": "What is 17 + 25?", "temperature": 0})),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
}

#[test]
fn answers_end_for_a_reason() {
    let server = start();
    let reason = |more: Value| {
        let whole = server.ask("/v1/chat/completions", &chat(merge(json!({"temperature": 0}), more.clone())));
        let request = merge(json!({"temperature": 0}), more);
        let message = server.ask("/v1/messages", &chat(request));
        let text = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        (text, whole["choices"][0]["finish_reason"].clone(), message["stop_reason"].clone())
    };
    let (text, openai, anthropic) = reason(json!({}));
    assert_eq!((openai, anthropic), (json!("length"), json!("max_tokens")));
    let word = text.split(' ').nth(4).unwrap();
    let (cut, openai, anthropic) = reason(json!({"stop": word, "stop_sequences": [word]}));
    assert_eq!((openai, anthropic), (json!("stop"), json!("stop_sequence")));
    assert_eq!(cut, text[..text.find(word).unwrap()]);
    let short = json!([{"role": "user", "content": "What is 17 + 25?"}]);
    let (text, openai, anthropic) = reason(json!({"messages": short}));
    assert_eq!((&*text, openai, anthropic), ("17 + 25 = 42", json!("stop"), json!("end_turn")));
}

#[test]
fn several_answers_and_their_probabilities() {
    let server = start();
    let request = chat(json!({
        "n": 3, "temperature": 1, "seed": 5, "logprobs": true, "top_logprobs": 4, "max_tokens": 12
    }));
    let whole = server.ask("/v1/chat/completions", &request);
    let choices = whole["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert!(choices[0]["message"] != choices[1]["message"] || choices[1]["message"] != choices[2]["message"]);
    for choice in choices {
        let content = choice["logprobs"]["content"].as_array().unwrap();
        let text: String = content.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert_eq!(text, choice["message"]["content"].as_str().unwrap());
        for entry in content {
            let top: Vec<f64> = entry["top_logprobs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|e| e["logprob"].as_f64().unwrap())
                .collect();
            assert!(top.len() == 4 && top.is_sorted_by(|a, b| a >= b), "{entry}");
            assert!(entry["logprob"].as_f64().unwrap() <= top[0]);
        }
    }
    // The same request gives the same answers.
    assert_eq!(server.ask("/v1/chat/completions", &request)["choices"], whole["choices"]);

    let request = json!({"prompt": ["Once upon", "1, 2,"], "max_tokens": 5, "logprobs": 2, "temperature": 0});
    let whole = server.ask("/v1/completions", &request);
    assert_eq!(whole["choices"].as_array().unwrap().len(), 2);
    assert_eq!(whole["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 5);
    let alone = |prompt: &str| {
        let request = json!({"prompt": prompt, "max_tokens": 1});
        server.ask("/v1/completions", &request)["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let both = alone("Once upon") + alone("1, 2,");
    assert_eq!(whole["usage"]["prompt_tokens"], both);
    let events = server.post("/v1/completions", &merge(request, json!({"stream": true}))).events();
    let text = |index: u64| -> String {
        let own = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index);
        own.filter_map(|c| c["text"].as_str()).collect()
    };
    assert_eq!(
        (json!(text(0)), json!(text(1))),
        (whole["choices"][0]["text"].clone(), whole["choices"][1]["text"].clone())
    );
}

/// Completions by prompt and answer: prompts count once each, offsets are characters.
#[test]
fn several_completions_of_several_prompts() {
    let server = start();
    let prompt_tokens =
        |request: Value| server.ask("/v1/completions", &request)["usage"]["prompt_tokens"].as_u64().unwrap();
    let alone = |prompt: &str| prompt_tokens(json!({"prompt": prompt, "max_tokens": 1}));
    let both = prompt_tokens(json!({"prompt": ["Once upon", "1, 2,"], "n": 2, "max_tokens": 1}));
    assert_eq!(both, alone("Once upon") + alone("1, 2,"));

    let tokenizer = server.scheduler.tokenizer();
    let accented = tokenizer.encode("é", moeflux::tokenizer::AddSpecial::No).unwrap();
    let bias = json!({ accented[0].to_string(): 100 });
    let request =
        json!({"prompt": "1, 2,", "max_tokens": 3, "temperature": 0, "logprobs": 1, "logit_bias": bias});
    let whole = server.ask("/v1/completions", &request);
    let logprobs = &whole["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let first = tokens[0].as_str().unwrap();
    assert!(tokens.iter().all(|token| token == first) && !first.is_ascii(), "{tokens:?}");
    let chars = first.chars().count();
    assert_eq!(logprobs["text_offset"], json!([0, chars, 2 * chars]));
}

#[test]
fn as_many_answers_as_allowed_of_which_one_continues_a_conversation() {
    let server = start();
    let request = |n: usize, max_tokens: usize| {
        let more = json!({"n": n, "max_tokens": max_tokens, "temperature": 1, "prompt_cache_key": "key"});
        server.post("/v1/chat/completions", &chat(merge(json!({"seed": 3}), more)))
    };
    assert_eq!((request(16, 1).status, request(17, 1).status), (200, 400));
    let answers = request(2, 12).json();
    let content = |index: usize| &answers["choices"][index]["message"]["content"];
    assert_ne!(content(0), content(1));
    while !server.scheduler.is_idle() {
        std::thread::yield_now();
    }
    // A conversation has one session. The other answer's is kept too, as nothing else replaces it.
    let kept = server.scheduler.figures().kept_sessions;
    assert!(kept >= 2, "{kept}");
}

/// Nothing may be chosen: the answer fails once it has begun.
#[test]
fn a_stream_that_fails_ends_with_the_error() {
    let server = start();
    let bias: serde_json::Map<String, Value> =
        (0..server.scheduler.tokenizer().vocab_size()).map(|id| (id.to_string(), json!(-100))).collect();
    let request = chat(json!({"stream": true, "logit_bias": bias}));
    let answer = server.post("/v1/chat/completions", &request);
    assert_eq!(answer.status, 200);
    assert!(answer.events().last().unwrap()["error"].is_object(), "{}", answer.text());
    assert!(!answer.text().contains("[DONE]"), "{}", answer.text());
}

#[test]
fn bias_forbids_and_penalties_change() {
    let server = start();
    let tokens = server.scheduler.tokenizer().encode("Once", moeflux::tokenizer::AddSpecial::No).unwrap();
    let bias = json!({ tokens[0].to_string(): -100 });
    let text = |more: Value| {
        let whole = server.ask("/v1/chat/completions", &chat(merge(json!({"temperature": 0}), more)));
        whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let plain = text(json!({}));
    assert!(plain.starts_with("Once"), "{plain}");
    assert!(!text(json!({"logit_bias": bias})).starts_with("Once"));
    assert_ne!(text(json!({"frequency_penalty": 2})), plain);
}

#[test]
fn the_rest_of_the_paths() {
    let server = start();
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "demo");
    assert_eq!(server.get("/v1/models/demo").json()["context_length"], 512);
    let count = server.ask(
        "/v1/messages/count_tokens",
        &json!({"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}),
    );
    assert!(count["input_tokens"].as_u64().unwrap() > 3);
    assert_eq!(server.get("/health").json()["status"], "ok");
    server.ask("/v1/chat/completions", &chat(json!({})));
    // The answer is sent before its memory is counted as free.
    while !server.scheduler.is_idle() {
        std::thread::yield_now();
    }
    let metrics = server.get("/metrics").text();
    for name in [
        "requests_total{model=\"demo\",outcome=\"finished\"} 1",
        "tokens_total",
        "request_seconds_count{model=\"demo\"} 1",
        "kv_pages_running{model=\"demo\"} 0",
    ] {
        assert!(metrics.contains(&format!("moeflux_{name}")), "{name}: {metrics}");
    }
    // The page, and all that its scripts import.
    let mut paths = vec!["/".to_owned(), "/page.css".to_owned(), "/main.js".to_owned()];
    for at in 0.. {
        let Some(path) = paths.get(at).cloned() else { break };
        let page = server.get(&path);
        assert!(page.status == 200 && page.headers.contains("content-security-policy"), "{path}");
        for line in page.text().lines().filter(|line| line.starts_with("import ")) {
            let named =
                line.split('"').nth(1).and_then(|name| name.strip_prefix('.')).expect("a file beside it");
            if !paths.iter().any(|known| known == named) {
                paths.push(named.to_owned());
            }
        }
    }
    assert!(paths.contains(&"/vendor/markdown-it.js".to_owned()) && paths.len() > 10, "{paths:?}");
    // What a browser has already is not sent again.
    let page = server.get("/main.js");
    let tag = page
        .headers
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .unwrap_or_else(|| panic!("{}", page.headers));
    let again = server.send("GET", "/main.js", &[("If-None-Match", tag)], b"");
    assert_eq!((again.status, again.body.len()), (304, 0), "{}", again.headers);
    let other = server.send("GET", "/page.css", &[("If-None-Match", tag)], b"");
    assert_eq!(other.status, 200);
    let description = server.get("/openapi.json").json();
    let paths: Vec<&String> = description["paths"].as_object().unwrap().keys().collect();
    for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/models"] {
        assert!(paths.iter().any(|known| *known == path), "{path}");
    }
}

#[test]
fn the_live_view_moves() {
    let server = start();
    let mut stream = server.connect();
    use std::io::{BufRead, BufReader, Write};
    stream.write_all(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok).filter_map(|line| {
        line.strip_prefix("data: ").map(|data| serde_json::from_str::<Value>(data).unwrap())
    });
    let first = lines.next().unwrap();
    assert_eq!(first["model"]["layers"].as_array().unwrap().len(), 7);
    server.ask("/v1/chat/completions", &chat(json!({})));
    let used = lines.take(20).find(|data| data["heat"].as_array().unwrap().iter().all(Value::is_array));
    let used = used.expect("experts were used");
    assert_eq!(used["heat"][0].as_array().unwrap().len(), 16);
}

#[test]
fn requests_have_names_and_are_counted() {
    let server = start();
    let own = server.send("GET", "/v1/models", &[("X-Request-Id", "mine-1")], b"");
    assert!(own.headers.contains("x-request-id: mine-1"), "{}", own.headers);
    let made = server.send("GET", "/v1/models", &[("X-Request-Id", "two words")], b"");
    assert!(made.headers.contains("x-request-id: req_"), "{}", made.headers);
    let message = server.post("/v1/messages", &json!({}));
    assert!(message.headers.contains("\nrequest-id: req_"), "{}", message.headers);
    let metrics = server.get("/metrics").text();
    for line in [
        "moeflux_http_requests_total{path=\"/v1/models\",status=\"200\"} 2",
        "moeflux_http_requests_total{path=\"/v1/messages\",status=\"400\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
}
