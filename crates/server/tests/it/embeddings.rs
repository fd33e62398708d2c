//! Embeddings, of OpenAI's and of Ollama's interface.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::support::{Server, start};
use serde_json::{Value, json};

const OPENAI: &str = "/v1/embeddings";

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// The embeddings of an answer to `body`, in order.
fn ask(server: &Server, body: &Value) -> Vec<Vec<f32>> {
    let answer = server.ask(OPENAI, body);
    let data = answer["data"].as_array().unwrap();
    for (index, item) in data.iter().enumerate() {
        assert_eq!((&item["index"], &item["object"]), (&json!(index), &json!("embedding")));
    }
    data.iter().map(|item| floats(&item["embedding"])).collect()
}

fn from_base64(text: &str) -> Vec<f32> {
    let digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u32> = text.bytes().filter_map(|c| digits.find(char::from(c))).map(|v| v as u32).collect();
    let group = |group: &[u32]| {
        let all = group.iter().fold(0, |all, digit| all << 6 | digit) << (6 * (4 - group.len()));
        (0..group.len() * 6 / 8).map(|i| (all >> (16 - 8 * i)) as u8).collect::<Vec<u8>>()
    };
    let bytes: Vec<u8> = bits.chunks(4).flat_map(group).collect();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn one_embedding_however_it_is_asked_for() {
    let server = start();
    let width = server.scheduler.description().hidden_size;
    let texts = ["Tell me a short story about a fox.", "What is 17 + 25?", "x"];
    let ids: Vec<Vec<u32>> = texts.iter().map(|text| server.scheduler.encode(text).unwrap()).collect();
    let whole = server.ask(OPENAI, &json!({"model": "demo", "input": texts, "user": "somebody"}));
    let count: usize = ids.iter().map(Vec::len).sum();
    assert_eq!(whole["usage"], json!({"prompt_tokens": count, "total_tokens": count}));
    assert_eq!((&whole["object"], &whole["model"]), (&json!("list"), &json!("demo")));
    let together = ask(&server, &json!({"input": texts}));
    assert_eq!(together.len(), 3);
    for embedding in &together {
        let length: f64 = embedding.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        assert!(embedding.len() == width && (length - 1.0).abs() < 1e-5, "{length}");
    }
    assert_eq!(ask(&server, &json!({"input": ids})), together);
    for ((text, ids), right) in texts.iter().zip(&ids).zip(&together) {
        let right = std::slice::from_ref(right);
        assert_eq!(ask(&server, &json!({"input": text, "dimensions": width})), right);
        assert_eq!(
            ask(&server, &json!({"input": ids, "encoding_format": "float", "pooling": "last"})),
            right
        );
        let coded = server.ask(OPENAI, &json!({"input": text, "encoding_format": "base64"}));
        assert_eq!(from_base64(coded["data"][0]["embedding"].as_str().unwrap()), right[0]);
    }
    let mean = ask(&server, &json!({"input": texts, "pooling": "mean"}));
    assert!(mean[0] != together[0] && mean[1] != together[1], "of several tokens");
    // The answer is sent before the request is counted.
    while !server.scheduler.is_idle() {
        std::thread::yield_now();
    }
    let metrics = server.get("/metrics").text();
    for line in [
        "moeflux_embeddings_total{model=\"demo\"} 21",
        "moeflux_http_requests_total{path=\"/v1/embeddings\",status=\"200\"} 13",
        "moeflux_requests_total{model=\"demo\",outcome=\"finished\"} 13",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let description = server.get("/openapi.json").json();
    for path in [OPENAI, "/api/embed", "/api/embeddings"] {
        assert!(description["paths"][path]["post"].is_object(), "{path}");
    }
}

#[test]
fn ollamas_form() {
    let server = start();
    let texts = ["What is 17 + 25?", "x"];
    let right = ask(&server, &json!({"input": texts}));
    let tokens: usize = texts.iter().map(|text| server.scheduler.encode(text).unwrap().len()).sum();
    let whole =
        server.ask("/api/embed", &json!({"model": "demo:latest", "input": texts, "keep_alive": "5m"}));
    let got: Vec<Vec<f32>> = whole["embeddings"].as_array().unwrap().iter().map(floats).collect();
    assert_eq!((got, &whole["model"]), (right.clone(), &json!("demo:latest")));
    assert_eq!((&whole["prompt_eval_count"], &whole["load_duration"]), (&json!(tokens), &json!(0)));
    assert!(whole["total_duration"].as_u64() > Some(0), "{whole}");
    let one = server.ask("/api/embed", &json!({"model": "demo", "input": texts[0]}));
    assert_eq!(floats(&one["embeddings"][0]), right[0]);
    let old = server.ask("/api/embeddings", &json!({"model": "demo", "prompt": texts[0]}));
    assert_eq!(floats(&old["embedding"]), right[0]);
    // By which clients load a model.
    for input in [json!([]), json!(""), json!(null)] {
        assert_eq!(
            server.ask("/api/embed", &json!({"model": "demo", "input": input}))["embeddings"],
            json!([])
        );
    }
    assert_eq!(server.ask("/api/embeddings", &json!({"model": "demo"}))["embedding"], json!([]));
    for (path, body, status) in [
        ("/api/embed", json!({"input": "x"}), 400),
        ("/api/embed", json!({"model": "other", "input": "x"}), 404),
        ("/api/embed", json!({"model": "demo", "input": ["x", ""]}), 400),
        ("/api/embed", json!({"model": "demo", "input": 5}), 400),
        ("/api/embed", json!({"model": "demo", "input": "x", "dimensions": 3}), 400),
        ("/api/embed", json!({"model": "demo", "input": "word ".repeat(3000), "truncate": true}), 400),
        ("/api/embeddings", json!({"model": "demo", "prompt": ["x"]}), 400),
    ] {
        let answer = server.post(path, &body);
        assert!(answer.status == status && answer.json()["error"].is_string(), "{path}: {}", answer.text());
    }
}

#[test]
fn bad_input_is_named() {
    let server = start();
    let width = server.scheduler.description().hidden_size;
    for (body, param) in [
        (json!({}), None),
        (json!({"input": 5}), Some("input")),
        (json!({"input": []}), Some("input")),
        (json!({"input": ""}), Some("input")),
        (json!({"input": ["x", ""]}), Some("input")),
        (json!({"input": [[1], []]}), Some("input")),
        (json!({"input": ["x", 1]}), Some("input")),
        (json!({"input": [1, -1]}), Some("input")),
        (json!({"input": [1, 99_999_999]}), Some("input")),
        (json!({"input": vec!["x"; 2049]}), Some("input")),
        (json!({"input": vec![vec![1; 500]; 700]}), Some("input")),
        (json!({"input": vec![1; 513]}), Some("input")),
        (json!({"input": "word ".repeat(3000)}), Some("input")),
        (json!({"input": "x", "dimensions": width - 1}), Some("dimensions")),
        (json!({"input": "x", "dimensions": 0}), Some("dimensions")),
        (json!({"input": "x", "encoding_format": "int8"}), Some("encoding_format")),
        (json!({"input": "x", "pooling": "cls"}), Some("pooling")),
        (json!({"input": "x", "truncate_prompt_tokens": 5}), Some("truncate_prompt_tokens")),
    ] {
        let answer = server.post(OPENAI, &body);
        let (error, shown) = (&answer.json()["error"], body.to_string().chars().take(80).collect::<String>());
        assert_eq!(answer.status, 400, "{shown}: {error}");
        assert!(error["param"].as_str() == param && error["message"].is_string(), "{shown}: {error}");
    }
    let long = server.post(OPENAI, &json!({"input": vec![1; 513]})).json();
    assert_eq!(long["error"]["code"], "context_length_exceeded");
    assert_eq!(server.post(OPENAI, &json!({"input": "x", "model": "other"})).status, 404);
    assert_eq!(ask(&server, &json!({"input": vec![1; 512]})).len(), 1, "as many as the context has");
}

#[test]
fn clients_that_go_away_take_their_embeddings_along() {
    let server = start();
    let body = json!({"input": vec![vec![1; 500]; 300]}).to_string();
    let mut stream = server.connect();
    let head = "POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let eventually = |what: &str, check: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !check() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    eventually("running", &|| server.scheduler.figures().running > 0);
    drop(stream);
    eventually("idle", &|| server.scheduler.is_idle());
    let figures = server.scheduler.figures();
    assert_eq!((figures.cancelled, figures.finished, figures.pages_running), (1, 0, 0), "{figures:?}");
    assert!(figures.embeddings < 300, "{figures:?}");
}
