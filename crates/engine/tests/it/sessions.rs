//! Sessions: what they hold does not depend on how it came there, comes back from checkpoints and files bit for bit,
//! and survives whatever fails.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support;
use moeflux::checkpoint::Checkpoint;
use moeflux::io::pread::PreadPool;
use moeflux::io::queue::{ReadDone, ReadQueue, ReadRequest};
use moeflux::{Engine, Error, Options, Outputs, Session, models};
use moeflux_compute::backend::{ActivationMode, Backend, KvType};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::reference::Reference;

/// Recurrent state with each form of its projections, keys and values, latents, and windows with sinks.
const MODELS: [&str; 5] =
    ["qwen3_next_basic", "qwen3_5_moe_multimodal", "qwen3_moe_basic", "deepseek_v3_basic", "gpt_oss_mxfp4"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf").join(name)
}

fn options() -> Options {
    Options { activations: ActivationMode::F32, context: Some(320), ..Options::default() }
}

fn open_with(name: &str, options: &Options) -> Engine {
    Engine::open(&fixture(name), &CpuBackend::new(2, None).unwrap(), options, |_, _| ()).unwrap()
}

fn open(name: &str) -> Engine {
    open_with(name, &options())
}

/// Tokens `from..to` of a text.
fn tokens(from: usize, to: usize) -> Vec<u32> {
    (from..to).map(|i| ((i * i * 5 + i * 11 + 3) % 61) as u32).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

/// Logits of all tokens `from..to`, appended to `session`.
fn eval(engine: &mut Engine, session: &mut Session, from: usize, to: usize) -> Vec<u32> {
    bits(&engine.eval(session, &tokens(from, to), Outputs::All).unwrap())
}

/// Checks that `session` holds tokens 0..90 by what comes next.
fn assert_holds_90(engine: &mut Engine, session: &mut Session, what: &str) {
    assert_eq!(session.tokens(), tokens(0, 90), "{what}");
    let mut fresh = engine.session();
    eval(engine, &mut fresh, 0, 90);
    let expected = eval(engine, &mut fresh, 90, 93);
    drop(fresh);
    assert_eq!(eval(engine, session, 90, 93), expected, "{what}");
    engine.truncate(session, 90).unwrap();
}

#[test]
fn logits_do_not_depend_on_chunks_or_cache() {
    for name in MODELS {
        let whole = eval_all(name, &options());
        for chunk in [1, 7, 64] {
            assert_eq!(
                eval_all(name, &Options { chunk: Some(chunk), ..options() }),
                whole,
                "{name}: {chunk}"
            );
        }
        let streamed = eval_all(name, &Options { expert_cache: Some(4), chunk: Some(7), ..options() });
        assert_eq!(streamed, whole, "{name}: few slots");
    }
}

fn eval_all(name: &str, options: &Options) -> Vec<u32> {
    let mut engine = open_with(name, options);
    let mut session = engine.session();
    eval(&mut engine, &mut session, 0, 130)
}

#[test]
fn checkpoints_are_restored() {
    for name in MODELS {
        let mut engine = open_with(name, &Options { checkpoints: 3, ..options() });
        let mut session = engine.session();
        session.checkpoint();
        let mut all = vec![];
        for position in [10, 40, 70, 100] {
            let from = session.position();
            all.extend(eval(&mut engine, &mut session, from, position));
            session.checkpoint();
        }
        assert_eq!(
            session.checkpoints().collect::<Vec<_>>(),
            [0, 40, 70, 100],
            "{name}: the oldest is dropped"
        );
        let width = engine.model().graph.vocab_size();

        let error = session.restore(10).unwrap_err();
        assert!(matches!(error, Error::NoCheckpoint { position: 10, .. }), "{error}");
        assert_eq!(session.position(), 100, "{name}: a refusal changes nothing");

        session.restore(40).unwrap();
        assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, 40], "{name}");
        assert_eq!(eval(&mut engine, &mut session, 40, 100), all[40 * width..], "{name}: from 40");
        session.restore(0).unwrap();
        assert_eq!(eval(&mut engine, &mut session, 0, 100), all, "{name}: from the start");
    }
}

#[test]
fn truncation_leaves_what_was_there_before() {
    for name in MODELS {
        let mut engine = open(name);
        let mut session = engine.session();
        let all = eval(&mut engine, &mut session, 0, 60);
        let width = engine.model().graph.vocab_size();
        // No checkpoint; one exactly there; one before; one just behind.
        for (checkpoint, position) in [(0, 33), (20, 20), (20, 47), (20, 19)] {
            session.restore(0).unwrap();
            eval(&mut engine, &mut session, 0, checkpoint);
            session.checkpoint();
            eval(&mut engine, &mut session, checkpoint, 60);
            engine.truncate(&mut session, position).unwrap();
            assert_eq!(session.tokens(), tokens(0, position), "{name}");
            let rest = eval(&mut engine, &mut session, position, 60);
            assert_eq!(rest, all[position * width..], "{name}: {checkpoint}, {position}");
        }
        engine.truncate(&mut session, 1000).unwrap();
        assert_eq!(session.position(), 60, "{name}: truncation never adds");
    }
}

#[test]
fn sessions_do_not_see_each_other() {
    for name in MODELS {
        let mut engine = open_with(name, &Options { chunk: Some(16), ..options() });
        let (mut a, mut b) = (engine.session(), engine.session());
        let whole = eval(&mut engine, &mut a, 0, 60);
        drop(a);
        let mut a = engine.session();
        let first = eval(&mut engine, &mut a, 0, 30);
        engine.eval(&mut b, &tokens(50, 75), Outputs::Last).unwrap();
        let second = eval(&mut engine, &mut a, 30, 60);
        assert_eq!([first, second].concat(), whole, "{name}");
    }
}

#[test]
fn keys_and_values_have_room_for_the_context_at_least() {
    let options = Options { context: Some(200), kv_tokens: Some(64), ..options() };
    let mut engine = open_with("qwen3_moe_basic", &options);
    let mut session = engine.session();
    eval(&mut engine, &mut session, 0, 200);
}

#[test]
fn too_many_states_are_refused() {
    let mut engine = open_with("qwen3_next_basic", &Options { checkpoints: 0, ..options() });
    let (mut a, mut b) = (engine.session(), engine.session());
    eval(&mut engine, &mut a, 0, 5);
    // The second state is needed to go on with the first session.
    eval(&mut engine, &mut b, 0, 5);
    let error = engine.eval(&mut a, &tokens(5, 6), Outputs::Last).unwrap_err();
    assert!(matches!(error, Error::StatesFull { slots: 2 }), "{error}");
    assert_eq!(a.position(), 5);
    drop(b);
    eval(&mut engine, &mut a, 5, 6);
}

/// Fails reads while told to, by asking for bytes behind the end of the file.
struct Failing {
    queue: PreadPool,
    fail: Arc<AtomicBool>,
}

impl ReadQueue for Failing {
    fn submit(&mut self, mut request: ReadRequest) {
        if self.fail.load(Ordering::SeqCst) {
            for part in &mut request.parts {
                part.offset += 1 << 40;
            }
        }
        self.queue.submit(request);
    }

    fn wait(&mut self) -> Option<ReadDone> {
        self.queue.wait()
    }

    fn try_wait(&mut self) -> Option<ReadDone> {
        self.queue.try_wait()
    }
}

#[test]
fn a_failed_evaluation_changes_nothing() {
    for name in MODELS {
        let fail = Arc::new(AtomicBool::new(false));
        let queue = Failing { queue: PreadPool::new(2).unwrap(), fail: Arc::clone(&fail) };
        let model = models::record(Arc::new(Checkpoint::open(&fixture(name)).unwrap())).unwrap();
        let options = Options { expert_cache: Some(4), chunk: Some(8), ..options() };
        let backend = CpuBackend::new(2, None).unwrap();
        let mut engine = Engine::new(model, &backend, &options, Box::new(queue), |_, _| ()).unwrap();
        let mut session = engine.session();
        eval(&mut engine, &mut session, 0, 90);

        let refused = |engine: &mut Engine, session: &mut Session, tokens: &[u32]| {
            let error = engine.eval(session, tokens, Outputs::Last).unwrap_err();
            assert_holds_90(engine, session, &format!("{name}: {error}"));
        };
        refused(&mut engine, &mut session, &[3, 4, 1_000_000]);
        refused(&mut engine, &mut session, &tokens(0, 300));
        fail.store(true, Ordering::SeqCst);
        let error = engine.eval(&mut session, &tokens(90, 130), Outputs::Last).unwrap_err();
        fail.store(false, Ordering::SeqCst);
        assert_holds_90(&mut engine, &mut session, &format!("{name}: {error}"));
        fail.store(true, Ordering::SeqCst);
        let truncated = engine.truncate(&mut session, 50);
        fail.store(false, Ordering::SeqCst);
        if truncated.is_err() {
            assert_holds_90(&mut engine, &mut session, &format!("{name}: failed truncation"));
        } else {
            assert_eq!(session.position(), 50, "{name}: nothing to read");
        }
    }
}

#[test]
fn a_saved_session_goes_on_in_another_engine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let cpu = CpuBackend::new(2, None).unwrap();
    for name in MODELS {
        for (backend, kv_type) in
            [(&cpu as &dyn Backend, KvType::F32), (&cpu, KvType::F16), (&Reference, KvType::F32)]
        {
            let options = Options { kv_type: Some(kv_type), ..options() };
            let open = || Engine::open(&fixture(name), backend, &options, |_, _| ()).unwrap();
            let mut engine = open();
            let mut session = engine.session();
            eval(&mut engine, &mut session, 0, 70);
            engine.save(&session, &path, "a note: \"quoted\"\n").unwrap();
            let expected = eval(&mut engine, &mut session, 70, 75);

            let mut engine = open();
            let mut session = engine.session();
            eval(&mut engine, &mut session, 20, 130);
            assert_eq!(engine.load(&mut session, &path).unwrap(), "a note: \"quoted\"\n");
            assert_eq!(session.tokens(), tokens(0, 70));
            assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, 70]);
            assert_eq!(eval(&mut engine, &mut session, 70, 75), expected, "{name} {kv_type:?}");
        }
        // Nothing at all can be saved too.
        let mut engine = open(name);
        let mut session = engine.session();
        engine.save(&session, &path, "").unwrap();
        eval(&mut engine, &mut session, 0, 9);
        engine.load(&mut session, &path).unwrap();
        assert_eq!(session.position(), 0);
        eval(&mut engine, &mut session, 0, 90);
        assert_holds_90(&mut engine, &mut session, name);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the file");
}

#[test]
fn sessions_of_every_fixture_go_on_in_another_engine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let backend = CpuBackend::new(2, None).unwrap();
    for fixture in support::all() {
        let tokens = fixture.golden().tokens;
        // With keys and values as `run` has them, and past the first page if there are as many tokens.
        let (kept, rest) = tokens.split_at(tokens.len() - 3);
        let open = || support::open(&fixture.path, &backend, &Options::default());
        let (mut engine, mut other) = (open(), open());
        let mut session = engine.session();
        engine.eval(&mut session, kept, Outputs::Last).unwrap();
        engine.save(&session, &path, "").unwrap();
        let mut loaded = other.session();
        other.load(&mut loaded, &path).unwrap();
        assert_eq!(loaded.tokens(), kept);
        let expected = engine.eval(&mut session, rest, Outputs::All).unwrap();
        let got = other.eval(&mut loaded, rest, Outputs::All).unwrap();
        assert_eq!(bits(&got), bits(&expected), "{}", fixture.name);
    }
}

#[test]
fn damaged_and_foreign_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    for name in MODELS {
        let mut engine = open(name);
        let mut session = engine.session();
        eval(&mut engine, &mut session, 0, 70);
        engine.save(&session, &path, "note").unwrap();
        let good = std::fs::read(&path).unwrap();
        eval(&mut engine, &mut session, 70, 90);
        let mut refused = |engine: &mut Engine, bytes: &[u8], what: &str| {
            std::fs::write(&path, bytes).unwrap();
            let error = engine.load(&mut session, &path).unwrap_err();
            assert!(error.to_string().contains("saved"), "{name}: {what}: {error} names the file");
            assert_holds_90(engine, &mut session, &format!("{name}: {what}: {error}"));
        };
        // Every region: length, header, tokens, pages, state, checksum.
        for at in (0..good.len()).step_by(good.len() / 40).chain([good.len() - 1]) {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            refused(&mut engine, &bytes, &format!("bit flipped at {at} of {}", good.len()));
        }
        for len in [0, 7, 8, 100, good.len() / 2, good.len() - 1] {
            refused(&mut engine, &good[..len], &format!("cut to {len}"));
        }
        refused(&mut engine, &[&good[..], b"more"].concat(), "longer");
        let weights = std::fs::read(fixture(name).join("golden.safetensors")).unwrap();
        refused(&mut engine, &weights, "another safetensors file");

        for other in MODELS.iter().filter(|other| **other != name) {
            let mut stranger = open(other);
            let mut held = stranger.session();
            eval(&mut stranger, &mut held, 0, 30);
            stranger.save(&held, &path, "").unwrap();
            refused(&mut engine, &std::fs::read(&path).unwrap(), other);
        }
        // The same model with other keys and values.
        let mut stranger = open_with(name, &Options { kv_type: Some(KvType::F16), ..options() });
        let mut held = stranger.session();
        eval(&mut stranger, &mut held, 0, 30);
        stranger.save(&held, &path, "").unwrap();
        refused(&mut engine, &std::fs::read(&path).unwrap(), "keys and values in f16");
    }
}
