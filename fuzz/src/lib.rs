//! What is fuzzed besides headers: traces, sessions, chat templates and configurations. Each function takes any bytes, and
//! is right if it returns.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use moeflux::Placement;
use moeflux::chat_template::ChatTemplate;
use moeflux::experts::replay::{guesses, replay, replay_optimum};
use moeflux::experts::trace::Trace;
use moeflux::experts::{PolicyKind, SlotPlan};
use moeflux::models::assumed;
use moeflux::{Engine, Error, Options, Outputs};
use moeflux_compute::cpu::CpuBackend;
use serde_json::{Map, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// A file of `bytes` of its own for every process.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().expect("a folder for inputs"));
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).expect("an input is written");
    path
}

/// The error says which file it is about.
fn check_error(error: &Error, path: &Path) {
    let name = path.file_name().expect("a name").to_string_lossy();
    assert!(error.to_string().contains(&*name), "{error} names {name}");
}

/// A trace file whose last eight bytes are made right, replayed if it is one.
pub fn trace(data: &[u8]) {
    let content = &data[..data.len().saturating_sub(8)];
    let path = file("input.trace", &[content, &xxh3_64(content).to_le_bytes()].concat());
    let (header, requests) = match Trace::read(&path) {
        Ok(read) => read,
        Err(error) => return check_error(&error, &path),
    };
    guesses(&header.sets, &requests);
    for memory in [0, 1 << 20, 1 << 40] {
        if let Ok(plan) = SlotPlan::within(&header.sets, memory, header.top_k) {
            replay(&header.sets, &requests, &plan, PolicyKind::default(), 0);
            replay_optimum(&header.sets, &requests, &plan, 0);
        }
    }
}

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/engine/tests/fixtures/hf").join(name)
}

fn open() -> Engine {
    let backend = CpuBackend::new(1, None).expect("a processor");
    let options = Options { context: Some(192), memory: Some(64 << 20), ..Options::default() };
    Engine::open(&model("qwen3_next_basic"), &backend, &options, |_, _| ()).expect("a fixture")
}

/// A session file to start from.
pub fn saved_session() -> Vec<u8> {
    let mut engine = open();
    let mut session = engine.session();
    engine.eval(&mut session, &[3; 80], Outputs::Last).expect("tokens");
    let path = file("first.session", &[]);
    engine.save(&session, &path, "note").expect("a file");
    std::fs::read(path).expect("what was saved")
}

/// A session file whose checksum is made right, loaded and continued if it is one; if not, the session before goes on.
pub fn session(data: &[u8]) {
    static ENGINE: OnceLock<Mutex<Engine>> = OnceLock::new();
    let content = &data[..data.len().saturating_sub(16)];
    let path = file("input.session", &[content, &xxh3_128(content).to_le_bytes()].concat());
    let mut engine = ENGINE.get_or_init(|| Mutex::new(open())).lock().unwrap_or_else(PoisonError::into_inner);
    let mut session = engine.session();
    engine.eval(&mut session, &[5, 6, 7], Outputs::Last).expect("tokens");
    match engine.load(&mut session, &path) {
        // What a file's pages hold may be no number.
        Ok(_) => drop(engine.eval(&mut session, &[1], Outputs::Last)),
        Err(error) => {
            check_error(&error, &path);
            assert_eq!(session.tokens(), [5, 6, 7]);
            engine.eval(&mut session, &[1], Outputs::Last).expect("a session that was not touched");
        }
    }
}

static HOOK: Once = Once::new();

/// The source file of the last panic.
static PANICKED_IN: Mutex<Option<String>> = Mutex::new(None);

/// A chat template, rendered for a few messages.
pub fn template(data: &[u8]) {
    let source = String::from_utf8_lossy(data);
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is <b>1 + 1</b>?\n"},
        {"role": "assistant", "content": null, "reasoning_content": "sum", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [1.5, null, "x"]}}}]},
        {"role": "tool", "content": "2"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]);
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let file = panic.location().map(|place| place.file().to_owned());
            *PANICKED_IN.lock().unwrap_or_else(PoisonError::into_inner) = file;
            before(panic);
        }));
    });
    let path = Path::new("input.jinja");
    let template = match ChatTemplate::new(path, &source) {
        Ok(template) => template,
        Err(error) => return check_error(&error, path),
    };
    for tools in [None, Some(&tools)] {
        if let Err(error) = template.render_at(0, &messages, tools, true, &Map::new()) {
            check_error(&error, path);
            // A panic of the library that renders is told as an error; there are to be none of ours.
            let own = PANICKED_IN.lock().unwrap_or_else(PoisonError::into_inner).take();
            assert!(own.is_none_or(|file| file.contains("minijinja")), "{error}");
        }
    }
}

/// A `config.json` of a model that there is nothing else of: described, and memory divided for it.
pub fn config(data: &[u8]) {
    let path = file("config.json", data);
    let (model, _) = match assumed::describe(&path, None) {
        Ok(described) => described,
        Err(error) => {
            // What the file says of a tensor is told of its folder.
            return check_error(&error, path.parent().expect("a folder"));
        }
    };
    let backend = CpuBackend::new(1, None).expect("a processor");
    for memory in [64 << 20, 1 << 45] {
        let options = Options { memory: Some(memory), ..Options::default() };
        // Too little memory is no fault of the file.
        let _ = Placement::new(&model, &backend, &options);
    }
}
