//! Several models in one server: loaded on demand, unloaded for each other, memory divided.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use moeflux::{Compute, Error, OpenOptions, Result, Scheduler, SchedulerOptions};
use moeflux_server::{Limits, ModelSource, ServedModel, Server, ServerOptions};
use serde_json::{Value, json};

use crate::support::{Running, eventually, message};

/// The demo model, of which the first `failing` loads fail.
struct Demo {
    failing: Arc<AtomicUsize>,
}

fn options() -> OpenOptions {
    OpenOptions::new().compute(Compute::Cpu).threads(1).context(512).sequences(4)
}

fn path() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/demo.gguf"))
}

impl ModelSource for Demo {
    fn least_memory(&self) -> Result<u64> {
        options().least_memory(path())
    }

    fn open(&self, memory: u64, later: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Scheduler> {
        if self.failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(Error::Option { option: "test", expected: "luck".into(), got: "none".into() });
        }
        let model = options().memory(memory).memory_later(later).open_with_progress(path(), progress)?;
        Scheduler::start(model, SchedulerOptions::default())
    }
}

fn model(name: &str, pinned: bool) -> ServedModel {
    let source = Box::new(Demo { failing: Arc::default() });
    ServedModel { name: name.into(), aliases: vec![format!("{name}-alias")], pinned, source }
}

/// A server of `models` with `parts` of a thousand of what one needs at least.
fn start(models: Vec<ServedModel>, parts: u64) -> Running {
    let memory = options().least_memory(path()).unwrap() * parts / 1000;
    Running::start(Server::of_models(models, memory, ServerOptions::default()), Limits::default())
}

fn question(model: Option<&str>) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
        "temperature": 0,
        "max_tokens": 24,
    });
    if let Some(model) = model {
        body["model"] = json!(model);
    }
    body
}

fn text(server: &Running, model: &str) -> String {
    let answer = server.ask("/v1/chat/completions", &question(Some(model)));
    assert_eq!(answer["model"], json!(model.trim_end_matches("-alias")));
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// Names and places of all models.
fn places(server: &Running) -> Vec<(String, String)> {
    let models = server.get("/v1/models").json();
    let place = |model: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (text(&model["id"]), text(&model["status"]["value"]))
    };
    models["data"].as_array().unwrap().iter().map(place).collect()
}

fn metric(server: &Running, name: &str) -> f64 {
    let page = server.get("/metrics").text();
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
    line.unwrap_or_else(|| panic!("{name}: {page}")).parse().unwrap()
}

#[test]
fn models_take_turns_where_memory_holds_one() {
    let server = start(vec![model("a", false), model("b", false)], 1500);
    let states = |a: &str, b: &str| vec![("a".to_owned(), a.to_owned()), ("b".to_owned(), b.to_owned())];
    assert_eq!(places(&server), states("unloaded", "unloaded"));
    let expected = text(&server, "a");
    assert!(!expected.is_empty());
    assert_eq!(places(&server), states("loaded", "unloaded"));
    for name in ["b", "a-alias", "b-alias", "b", "a"] {
        assert_eq!(text(&server, name), expected, "{name}");
        let is_a = name.starts_with('a');
        let (a, b) = if is_a { ("loaded", "unloaded") } else { ("unloaded", "loaded") };
        assert_eq!(places(&server), states(a, b), "{name}");
    }
    assert_eq!(metric(&server, "moeflux_model_loads_total{model=\"a\"}"), 3.0);
    assert_eq!(metric(&server, "moeflux_model_loaded{model=\"b\"}"), 0.0);
    // A request that names none means the first.
    let answer = server.ask("/v1/chat/completions", &question(None));
    assert_eq!(answer["model"], "a");
    let unknown = server.post("/v1/chat/completions", &question(Some("c")));
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("this server has \\\"a\\\", \\\"b\\\""), "{}", unknown.text());
    // What is wrong with a request is said before anything is loaded for it.
    let mut wrong = question(Some("b"));
    wrong["grammar"] = json!(7);
    assert_eq!(server.post("/v1/chat/completions", &wrong).status, 400);
    assert_eq!(places(&server), states("loaded", "unloaded"));
}

/// Counters, with their labels, of a page of metrics.
fn counters(page: &str) -> BTreeMap<String, f64> {
    let of_type = |line: &str| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        matches!(kind, "counter" | "histogram").then(|| name.to_owned())
    };
    let names: Vec<String> = page.lines().filter_map(of_type).collect();
    let is_counter = |series: &str| {
        let name = series.split('{').next().unwrap_or(series);
        names.iter().any(|of| {
            name.strip_prefix(of.as_str())
                .is_some_and(|rest| matches!(rest, "" | "_bucket" | "_sum" | "_count"))
        })
    };
    let value = |line: &str| {
        let (series, value) = line.rsplit_once(' ').filter(|(series, _)| is_counter(series))?;
        Some((series.to_owned(), value.parse().unwrap()))
    };
    page.lines().filter(|line| !line.starts_with('#')).filter_map(value).collect()
}

#[test]
fn counters_never_fall_when_models_leave_and_come_back() {
    let server = start(vec![model("a", false), model("b", false)], 1500);
    let done = AtomicBool::new(false);
    let mut seen = counters(&server.get("/metrics").text());
    let looks = std::thread::scope(|scope| {
        scope.spawn(|| {
            for name in ["a", "b", "a", "b", "a"] {
                text(&server, name);
            }
            done.store(true, Ordering::SeqCst);
        });
        // Also while a model leaves or is loaded.
        let mut looks = 0;
        while !done.load(Ordering::SeqCst) {
            let now = counters(&server.get("/metrics").text());
            for (series, before) in &seen {
                assert!(
                    now.get(series).is_some_and(|now| now >= before),
                    "{series}: {before}, {:?}",
                    now.get(series)
                );
            }
            (seen, looks) = (now, looks + 1);
        }
        looks
    });
    assert!(looks > 5, "{looks}");
    let now = counters(&server.get("/metrics").text());
    for (model, finished) in [("a", 3.0), ("b", 2.0)] {
        let of = |name: &str| now[&format!("moeflux_{name}")];
        assert_eq!(of(&format!("requests_total{{model=\"{model}\",outcome=\"finished\"}}")), finished);
        assert_eq!(of(&format!("request_seconds_count{{model=\"{model}\"}}")), finished);
        assert!(of(&format!("tokens_total{{model=\"{model}\",kind=\"generated\"}}")) >= finished * 10.0);
    }
}

#[test]
fn many_at_once_are_all_answered() {
    for parts in [1500, 2600, 9000] {
        let server = start(vec![model("a", false), model("b", false), model("c", false)], parts);
        let expected = text(&server, "a");
        std::thread::scope(|scope| {
            for client in 0..12 {
                let (server, expected) = (&server, &expected);
                scope.spawn(move || {
                    for round in 0..2 {
                        let name = ["a", "b", "c"][(client + round) % 3];
                        assert_eq!(&text(server, name), expected);
                    }
                });
            }
        });
        let budgets: Vec<f64> = ["a", "b", "c"]
            .iter()
            .filter(|name| metric(&server, &format!("moeflux_model_loaded{{model=\"{name}\"}}")) > 0.0)
            .map(|name| metric(&server, &format!("moeflux_memory_bytes{{model=\"{name}\"}}")))
            .collect();
        let least = options().least_memory(path()).unwrap();
        let held = [(1500, 1..=1), (2600, 1..=2), (9000, 3..=3)].into_iter().find(|(of, _)| *of == parts);
        assert!(held.is_some_and(|(_, held)| held.contains(&budgets.len())), "{parts}: {budgets:?}");
        assert!(budgets.iter().sum::<f64>() <= (least * parts / 1000) as f64, "{budgets:?}");
    }
}

#[test]
fn a_pinned_model_stays_and_errors_say_so() {
    let server = start(vec![model("a", true), model("b", false)], 1500);
    let expected = text(&server, "a");
    let refused = server.post("/v1/chat/completions", &question(Some("b")));
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("pinned"), "{}", refused.text());
    assert_eq!(text(&server, "a"), expected);
    assert_eq!(metric(&server, "moeflux_model_loads_total{model=\"a\"}"), 1.0);
}

#[test]
fn a_load_that_fails_is_one_requests_own() {
    let failing = Arc::new(AtomicUsize::new(1));
    let source = Box::new(Demo { failing });
    let unlucky = ServedModel { name: "b".into(), aliases: vec!["*".into()], pinned: false, source };
    let server = start(vec![model("a", false), unlucky], 9000);
    let expected = text(&server, "a");
    let failed = server.post("/v1/chat/completions", &question(Some("b")));
    assert_eq!(failed.status, 400, "{}", failed.text());
    assert!(failed.text().contains("expected luck, got none"), "{}", failed.text());
    assert_eq!(text(&server, "a"), expected);
    assert_eq!(text(&server, "b"), expected, "the next request tries again");
    let any = server.ask("/v1/chat/completions", &question(Some("whatever")));
    assert_eq!(any["model"], "b", "the wildcard is the second model's");
}

#[test]
fn every_interface_knows_all_models() {
    let mut server = start(vec![model("a", false), model("b", false)], 9000);
    let tags = server.get("/api/tags").json();
    assert_eq!(tags["models"][1]["name"], "b");
    assert_eq!(server.get("/api/ps").json()["models"].as_array().unwrap().len(), 0);
    let body = json!({"model": "b:latest", "messages": [{"role": "user", "content": "Hi"}], "stream": false});
    assert_eq!(server.ask("/api/chat", &body)["done"], true);
    assert_eq!(server.get("/api/ps").json()["models"][0]["name"], "b");
    let counted = server.ask("/tokenize", &json!({"model": "a", "prompt": "Hello"}));
    assert!(counted["count"].as_u64().unwrap() > 0);
    assert_eq!(server.get("/v1/models/b").json()["status"]["value"], "loaded");
    assert_eq!(server.get("/api/live?model=c").status, 404);
    assert_eq!(server.get("/health").status, 200);
    server.begin_stop();
    assert!(server.stop());
}

/// The demo model, half of which is there until something is sent or the sender dropped.
struct Halted(Mutex<mpsc::Receiver<()>>);

impl ModelSource for Halted {
    fn least_memory(&self) -> Result<u64> {
        options().least_memory(path())
    }

    fn open(&self, memory: u64, later: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Scheduler> {
        progress(50, 100);
        let _ = self.0.lock().unwrap().recv();
        Demo { failing: Arc::default() }.open(memory, later, progress)
    }
}

fn halted(name: &str) -> (mpsc::Sender<()>, ServedModel) {
    let (go, wait) = mpsc::channel();
    let source = Box::new(Halted(Mutex::new(wait)));
    (go, ServedModel { name: name.into(), aliases: vec![], pinned: false, source })
}

#[test]
fn a_model_that_is_loaded_is_seen_beside_the_others() {
    let (go, halted) = halted("b");
    let server = start(vec![model("a", false), halted], 20_000);
    assert_eq!(server.post("/v1/chat/completions", &question(Some("a"))).status, 200);
    let mut stream = server.connect();
    stream.write_all(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(std::result::Result::ok);
    let mut until = |seen: &dyn Fn(&Value) -> bool| {
        let data = lines.by_ref().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok());
        data.take(30).find(seen).unwrap_or(Value::Null)
    };
    assert_eq!(until(&|event| event["model"].is_object())["model"]["name"], "a");
    let (loading, loaded) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.post("/v1/chat/completions", &question(Some("b"))).status);
        let loading = until(&|event| event["loading"].is_object());
        go.send(()).unwrap();
        assert_eq!(asked.join().unwrap(), 200);
        (loading, until(&|event| event["model"]["name"] == "b"))
    });
    assert_eq!(loading["loading"], json!({"name": "b", "loaded_bytes": 50, "total_bytes": 100}));
    assert!(loading["hit_rate"].is_number(), "the other goes on: {loading}");
    let status = |name: &str| json!({"name": name, "status": {"value": "loaded"}});
    assert_eq!((&loading["models"][0], &loaded["models"][1]), (&status("a"), &status("b")));
    assert!(loaded["loading"].is_null(), "{loaded}");
}

#[test]
fn no_model_starves_whoever_asks_most() {
    let server = start(vec![model("a", false), model("b", false), model("c", false)], 1500);
    let expected = text(&server, "c");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for client in 0..12 {
            let (server, over, expected) = (&server, &over, &expected);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    assert_eq!(&text(server, ["a", "b"][client % 2]), expected);
                }
            });
        }
        for _ in 0..3 {
            eventually("another model is loaded", || places(&server)[2].1 == "unloaded");
            assert_eq!(text(&server, "c"), expected);
        }
        over.store(true, Ordering::SeqCst);
    });
    assert!(metric(&server, "moeflux_model_loads_total{model=\"c\"}") >= 4.0);
}

#[test]
fn who_goes_away_while_a_model_is_loaded_is_not_answered() {
    let (go, halted) = halted("b");
    let server = start(vec![model("a", true), halted], 20_000);
    let expected = text(&server, "a");
    std::thread::scope(|scope| {
        // The models that are there go on.
        let go = { go };
        let headers = [("Content-Type", "application/json")];
        let body = question(Some("b")).to_string();
        let message = message("POST", "/v1/chat/completions", &headers, body.as_bytes());
        let gone: Vec<_> = (0..4)
            .map(|_| {
                let mut stream = server.connect();
                stream.write_all(&message).unwrap();
                stream
            })
            .collect();
        eventually("loading", || places(&server)[1].1 == "loading");
        let stays = scope.spawn(|| text(&server, "b"));
        assert_eq!(text(&server, "a"), expected);
        drop(gone);
        // They are noticed to have gone before the model is there.
        std::thread::sleep(Duration::from_millis(200));
        go.send(()).unwrap();
        assert_eq!(stays.join().unwrap(), expected);
    });
    let of =
        |outcome| metric(&server, &format!("moeflux_requests_total{{model=\"b\",outcome=\"{outcome}\"}}"));
    assert_eq!((of("finished"), of("cancelled")), (1.0, 0.0));
}
