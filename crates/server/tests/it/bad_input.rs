//! Bad input gets the right status in the shape of its interface, and the server goes on.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::support::{Answer, Server, eventually, message, start, start_with};
use moeflux::{Options, SchedulerOptions};
use moeflux_server::{Limits, ServerOptions};
use serde_json::{Value, json};

fn check_shape(path: &str, answer: &Answer) {
    let body = answer.json();
    let message = body["error"]["message"].as_str();
    assert!(message.is_some_and(|m| !m.is_empty()), "{path}: {body}");
    assert!(body["error"]["type"].is_string(), "{path}: {body}");
    if path.starts_with("/v1/messages") {
        assert_eq!(body["type"], "error", "{path}: {body}");
    }
}

fn works(server: &Server) {
    let request = json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3});
    server.ask("/v1/chat/completions", &request);
}

#[test]
fn wrong_requests() {
    let server = start();
    let user = json!([{"role": "user", "content": "Hello!"}]);
    let chat = "/v1/chat/completions";
    let messages = "/v1/messages";
    let long = "word ".repeat(3000);
    let cases: Vec<(&str, Value, u16)> = vec![
        (chat, json!({}), 400),
        (chat, json!([]), 400),
        (chat, json!({"messages": []}), 400),
        (chat, json!({"messages": "hello"}), 400),
        (chat, json!({"messages": [5]}), 400),
        (chat, json!({"messages": [{"role": "user", "content": 5}]}), 400),
        (chat, json!({"messages": [{"role": "wizard", "content": "x"}]}), 400),
        (
            chat,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
            400,
        ),
        (chat, json!({"messages": user, "model": "gpt-4"}), 404),
        (chat, json!({"messages": user, "temperature": "hot"}), 400),
        (chat, json!({"messages": user, "temperature": -1}), 400),
        (chat, json!({"messages": user, "temperature": 1e30}), 400),
        (chat, json!({"messages": user, "top_p": 0}), 400),
        (chat, json!({"messages": user, "max_tokens": -5}), 400),
        (chat, json!({"messages": user, "max_tokens": 0}), 400),
        (chat, json!({"messages": user, "n": 0}), 400),
        (chat, json!({"messages": user, "n": 1_000_000}), 400),
        (chat, json!({"messages": user, "stop": [""]}), 400),
        (chat, json!({"messages": user, "stop": 7}), 400),
        (chat, json!({"messages": user, "stop": vec!["x"; 100]}), 400),
        (chat, json!({"messages": user, "logprobs": true, "top_logprobs": 9999}), 400),
        (chat, json!({"messages": user, "logit_bias": {"x": 1}}), 400),
        (chat, json!({"messages": user, "logit_bias": {"99999999": 1}}), 400),
        (chat, json!({"messages": user, "logit_bias": {"1": 1e9}}), 400),
        (chat, json!({"messages": user, "seed": 1.5}), 400),
        (chat, json!({"messages": user, "response_format": {"type": "poem"}}), 400),
        (chat, json!({"messages": user, "response_format": {"type": "json_schema"}}), 400),
        (
            chat,
            json!({"messages": user, "response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
            400,
        ),
        (
            chat,
            json!({"messages": user, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}),
            400,
        ),
        (
            chat,
            json!({"messages": user, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}}),
            400,
        ),
        (
            chat,
            json!({"messages": user, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "("}}}}),
            400,
        ),
        (chat, json!({"messages": user, "tool_choice": "required"}), 400),
        (chat, json!({"messages": user, "tools": [5]}), 400),
        (chat, json!({"messages": user, "tools": [{"type": "function", "function": {"name": "a b"}}]}), 400),
        (chat, json!({"messages": [{"role": "user", "content": long}]}), 400),
        ("/v1/completions", json!({}), 400),
        ("/v1/completions", json!({"prompt": {}}), 400),
        ("/v1/completions", json!({"prompt": []}), 400),
        ("/v1/completions", json!({"prompt": ""}), 400),
        ("/v1/completions", json!({"prompt": [1, 99_999_999]}), 400),
        ("/v1/completions", json!({"prompt": "x", "echo": true, "logprobs": 1}), 400),
        ("/v1/completions", json!({"prompt": "x", "best_of": 2, "stream": true}), 400),
        ("/v1/completions", json!({"prompt": "x", "best_of": 2, "n": 3}), 400),
        ("/v1/completions", json!({"prompt": "x", "n": 0}), 400),
        ("/v1/completions", json!({"prompt": "x", "suffix": "y"}), 400),
        ("/v1/responses", json!({"input": 5}), 400),
        ("/v1/responses", json!({"input": []}), 400),
        ("/v1/responses", json!({"input": "x", "previous_response_id": "r"}), 400),
        (messages, json!({"model": "demo", "messages": user}), 400),
        (messages, json!({"messages": user, "max_tokens": 5}), 400),
        (messages, json!({"model": "other", "messages": user, "max_tokens": 5}), 404),
        (
            messages,
            json!({"model": "demo", "messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}),
            400,
        ),
        (
            messages,
            json!({"model": "demo", "messages": user, "max_tokens": 5, "tool_choice": {"type": "any"}}),
            400,
        ),
        ("/v1/embeddings", json!({"input": ""}), 400),
        ("/v1/images/generations", json!({"prompt": "x"}), 404),
    ];
    for (path, body, status) in cases {
        let answer = server.post(path, &body);
        let shown: String = body.to_string().chars().take(200).collect();
        assert_eq!(answer.status, status, "{path} {shown}: {}", answer.text());
        check_shape(path, &answer);
    }
    works(&server);
}

#[test]
fn bodies_that_are_no_json() {
    let server = start();
    let json_type = ("Content-Type", "application/json");
    let deep = "[".repeat(200_000);
    let bodies: [&[u8]; 7] = [
        b"",
        b"{",
        b"{\"messages\": }",
        b"\xff\xfe\x00",
        b"null",
        deep.as_bytes(),
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}",
    ];
    for body in bodies {
        for path in ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"] {
            let answer = server.send("POST", path, &[json_type], body);
            assert_eq!(answer.status, 400, "{path}: {}", answer.text());
            check_shape(path, &answer);
        }
    }
    let good = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
    // `curl -d` names no type of its own; what a page may send to other origins without asking is refused.
    let form = "application/x-www-form-urlencoded";
    let (origin, site) = (Some(("Origin", "https://x.example")), Some(("Sec-Fetch-Site", "cross-site")));
    for (kind, by_page, status) in [
        ("text/plain", None, 415),
        (form, None, 200),
        ("", None, 200),
        (form, origin, 415),
        ("", origin, 415),
        (form, site, 415),
    ] {
        let headers: Vec<_> = [("Content-Type", kind)].into_iter().chain(by_page).collect();
        let answer = server.send("POST", "/v1/chat/completions", &headers, good.as_bytes());
        assert_eq!(answer.status, status, "{kind} {by_page:?}");
    }
    works(&server);
}

#[test]
fn paths_and_methods() {
    let server = start();
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "/page.css/../../Cargo.toml", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/%ff", 400),
        ("GET", "/v1", 404),
        ("OPTIONS", "/v1/chat/completions", 405),
    ] {
        let answer = server.send(method, path, &[], b"");
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
    }
    // No HTTP at all.
    for bytes in [&b"\x16\x03\x01\x02\x00"[..], b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", &[0; 4096]] {
        let mut stream = server.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
    works(&server);
}

fn guarded(serving: ServerOptions, limits: Limits) -> Server {
    let options = Options { sequences: 2, context: Some(256), ..Options::default() };
    start_with(&options, SchedulerOptions { queue: 2, ..SchedulerOptions::default() }, serving, limits)
}

#[test]
fn keys_hosts_and_origins() {
    let server = guarded(
        ServerOptions {
            api_keys: vec!["other".into(), "secret".into()],
            cors: vec!["https://good.example".into()],
            ..ServerOptions::default()
        },
        Limits::default(),
    );
    for (headers, status) in [
        (&[][..], 401),
        (&[("Authorization", "Bearer wrong")], 401),
        (&[("Authorization", "secret")], 401),
        (&[("Authorization", "Bearer secret")], 200),
        (&[("x-api-key", "secret")], 200),
        (&[("x-api-key", "other")], 200),
        (&[("x-api-key", "secret2")], 401),
    ] {
        for path in ["/v1/models", "/metrics"] {
            let answer = server.send("GET", path, headers, b"");
            assert_eq!(answer.status, status, "{path} {headers:?}");
        }
        assert_eq!(server.send("GET", "/health", headers, b"").status, 200);
        let unknown = server.send("POST", "/v1/messages", headers, b"").status;
        assert_eq!(unknown, if status == 200 { 400 } else { 401 });
    }
    // As the browser asks for OpenAI's own client.
    let asked = "authorization,content-type,x-stainless-arch,x-stainless-os,x-stainless-retry-count";
    let headers = [("Origin", "https://good.example"), ("Access-Control-Request-Headers", asked)];
    let answer = server.send("OPTIONS", "/v1/chat/completions", &headers, b"");
    assert!(answer.headers.contains(&format!("access-control-allow-headers: {asked}")), "{}", answer.headers);
    for (origin, allowed) in [("https://good.example", true), ("https://bad.example", false)] {
        let headers = [("Origin", origin), ("Access-Control-Request-Method", "POST")];
        let answer = server.send("OPTIONS", "/v1/chat/completions", &headers, b"");
        assert_eq!(answer.status == 204, allowed, "{origin}: {}", answer.status);
        assert_eq!(answer.headers.contains("access-control-allow-origin"), allowed, "{origin}");
    }
    let local = guarded(ServerOptions { local_only: true, ..ServerOptions::default() }, Limits::default());
    works(&local);
    let mut stream = local.connect();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n").unwrap();
    assert_eq!(Answer::read(&mut stream).status, 403);
}

#[test]
fn slow_and_huge_requests() {
    let server = guarded(
        ServerOptions {
            max_body: 10_000,
            body_timeout: Duration::from_millis(300),
            ..ServerOptions::default()
        },
        Limits { header_timeout: Duration::from_millis(300), ..Limits::default() },
    );
    let json_type = ("Content-Type", "application/json");
    let answer = server.send("POST", "/v1/chat/completions", &[json_type], &vec![b' '; 100_000]);
    assert_eq!(answer.status, 413);
    let answer = server.send("POST", "/v1/messages", &[json_type], &vec![b' '; 100_000]);
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (413, Some("request_too_large")));
    // Headers count for nobody's memory, so they are short. A client that goes on sending may miss the answer.
    let long = ("X-Long", "x".repeat(400_000));
    let mut stream = server.connect();
    let _ = stream.write_all(&message("GET", "/livez", &[(long.0, &long.1)], b""));
    let mut said = [0; 12];
    let refused = stream.read_exact(&mut said).is_err() || said == *b"HTTP/1.1 431";
    assert!(refused, "{}", String::from_utf8_lossy(&said));
    let cookie = ("Cookie", "x".repeat(20_000));
    assert_eq!(server.send("GET", "/livez", &[(cookie.0, &cookie.1)], b"").status, 200);
    // Headers that never end, then a body that never comes.
    let start = Instant::now();
    let mut stream = server.connect();
    stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    let mut rest = vec![];
    let _ = stream.read_to_end(&mut rest);
    let mut stream = server.connect();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{";
    stream.write_all(head.as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut stream).status, 408);
    assert!(start.elapsed() < Duration::from_secs(20));
    works(&server);
}

/// A request whose answer does not end by itself.
fn endless() -> Value {
    json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 100_000, "stream": true,
           "temperature": 1, "logit_bias": {"0": -100, "1": -100, "2": -100, "3": -100}})
}

fn open(server: &Server, body: &Value) -> std::net::TcpStream {
    let mut stream = server.connect();
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

#[test]
fn clients_that_go_away_take_their_requests_along() {
    let server = guarded(ServerOptions::default(), Limits::default());
    let eos = server.scheduler.tokenizer().eos_ids().to_vec();
    let mut request = endless();
    for id in eos {
        request["logit_bias"][id.to_string()] = json!(-100);
    }
    let whole =
        json!({"messages": request["messages"], "max_tokens": 100_000, "logit_bias": request["logit_bias"]});
    for (count, body) in [(1, &request), (2, &whole)] {
        let stream = open(&server, body);
        eventually("running", || server.scheduler.figures().running == 1);
        drop(stream);
        eventually("cancelled", || {
            let figures = server.scheduler.figures();
            figures.running == 0 && figures.cancelled + figures.finished == count
        });
    }
    assert!(server.scheduler.figures().cancelled >= 1);
    assert_eq!(server.scheduler.figures().pages_running, 0);
    works(&server);
}

#[test]
fn full_queues_say_when_to_come_back() {
    let server = guarded(ServerOptions::default(), Limits::default());
    let running: Vec<_> = (0..2).map(|_| open(&server, &endless())).collect();
    eventually("running", || server.scheduler.figures().running == 2);
    let waiting: Vec<_> = (0..2).map(|_| open(&server, &endless())).collect();
    eventually("waiting", || {
        server.scheduler.figures().waiting == 2 || server.scheduler.figures().finished > 0
    });
    if server.scheduler.figures().waiting == 2 {
        let answer = server.post("/v1/chat/completions", &endless());
        assert_eq!(answer.status, 429, "{}", answer.text());
        assert!(answer.headers.contains("retry-after: "), "{}", answer.headers);
        check_shape("/v1/chat/completions", &answer);
    }
    drop((running, waiting));
    eventually("settled", || server.scheduler.is_idle());
}

#[test]
fn answers_of_a_request_wait_as_one() {
    let options = Options { sequences: 2, context: Some(256), ..Options::default() };
    let scheduling = SchedulerOptions { queue: 3, ..SchedulerOptions::default() };
    let server = start_with(&options, scheduling, ServerOptions::default(), Limits::default());
    let user = json!([{"role": "user", "content": "Tell me a story."}]);
    let many = json!({"messages": user, "n": 16, "max_tokens": 4, "seed": 1});
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}});
    let formed = json!({"messages": user, "n": 16, "max_tokens": 9, "response_format": format});
    let few = json!({"messages": user, "max_tokens": 4});
    let ask = |request| server.post("/v1/chat/completions", request).json();
    let asked = std::thread::scope(|scope| {
        let ask = |request| scope.spawn(move || ask(request));
        [ask(&many), ask(&formed), ask(&few)].map(|asked| asked.join().unwrap())
    });
    for (answer, count) in asked.iter().zip([16, 16, 1]) {
        assert_eq!(answer["choices"].as_array().unwrap_or(&vec![]).len(), count, "{answer}");
    }
    for choice in asked[1]["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(["\"a\"", "\"b\""].contains(&text), "{text}");
    }
    let prompts: Vec<String> = (0..16).map(|n| format!("Number {n}")).collect();
    let answer = server.post("/v1/completions", &json!({"prompt": prompts, "n": 5, "max_tokens": 2})).json();
    assert_eq!(answer["choices"].as_array().unwrap_or(&vec![]).len(), 80, "{answer}");
}

#[test]
fn a_server_that_ends_lets_answers_end() {
    let mut server = guarded(ServerOptions::default(), Limits::default());
    let request = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 30, "stream": true});
    let mut stream = open(&server, &request);
    eventually("running", || server.scheduler.figures().running == 1);
    server.scheduler.drain();
    server.begin_stop();
    for _ in 0..2 {
        assert_eq!(server.post("/v1/chat/completions", &request).status, 503);
        assert_eq!(server.get("/health").status, 503);
    }
    assert!(server.stop(), "in time");
    let answer = Answer::read(&mut stream);
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());

    let mut hasty =
        guarded(ServerOptions::default(), Limits { drain: Duration::from_millis(1), ..Limits::default() });
    let mut stream = open(&hasty, &endless());
    eventually("running", || hasty.scheduler.figures().running == 1);
    assert!(!hasty.stop(), "not in time");
    let answer = Answer::read(&mut stream);
    let last = answer.events().pop().unwrap();
    assert!(last["error"]["message"].is_string(), "{last}");
}
