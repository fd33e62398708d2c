//! Sessions: what they hold does not depend on how it came there, comes back from checkpoints and files bit for bit,
//! and survives whatever fails.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::support;
use moeflux::checkpoint::Checkpoint;
use moeflux::io::pread::PreadPool;
use moeflux::io::queue::{ReadDone, ReadQueue, ReadRequest};
use moeflux::{Engine, Error, Options, Outputs, Session, models};
use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, ExpertSource, KvType,
};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::Graph;
use moeflux_compute::reference::Reference;
use moeflux_compute::{Error as ComputeError, Tensor};
use serde_json::{Value, json};

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
    let fixtures = support::all().into_iter().enumerate();
    for (_, fixture) in fixtures.filter(|(turn, _)| support::is_tried(*turn, 2)) {
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
            support::replace(&path, bytes);
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

/// The files of a fixture in a folder of its own, for a test to change.
struct Copy(tempfile::TempDir);

impl Copy {
    fn of(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        Self(folder)
    }

    /// Sets the value at `pointer` in the configuration.
    fn set(&self, pointer: &str, value: Value) {
        let path = self.0.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
        support::replace(&path, config.to_string());
    }

    /// Calls `change` with the bytes of the tensor `name` and with its entry in the header, which keeps its length.
    fn edit(&self, name: &str, change: impl Fn(&mut [u8])) {
        let files = std::fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().path());
        for path in files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
            let mut bytes = std::fs::read(&path).unwrap();
            if let Some(range) = tensor_range(&bytes, name) {
                change(&mut bytes[range]);
                return support::replace(&path, bytes);
            }
        }
        panic!("no tensor {name}");
    }

    fn open(&self, options: &Options) -> Engine {
        let backend = CpuBackend::new(2, None).unwrap();
        Engine::open(self.0.path(), &backend, options, |_, _| ()).unwrap()
    }
}

/// Where the tensor `name` is in a safetensors file.
fn tensor_range(bytes: &[u8], name: &str) -> Option<std::ops::Range<usize>> {
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let at = |end: usize| start + header[name]["data_offsets"][end].as_u64().unwrap() as usize;
    header.get(name).map(|_| at(0)..at(1))
}

/// Saves a session of `from`, and says which part of it another engine refuses, if it does.
fn refused_part(from: &mut Engine, to: &mut Engine) -> Option<&'static str> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let mut session = from.session();
    from.eval(&mut session, &tokens(0, 20), Outputs::Last).unwrap();
    from.save(&session, &path, "").unwrap();
    let mut loaded = to.session();
    match to.load(&mut loaded, &path) {
        Ok(_) => None,
        Err(Error::SessionFile { what, .. }) => Some(what),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn sessions_of_other_arithmetic_are_refused() {
    let cases = [
        ("qwen3_moe_window", "/rms_norm_eps", json!(0.011)),
        ("qwen3_moe_window", "/rope_parameters/rope_theta", json!(10000.5)),
        ("qwen3_moe_window", "/rope_parameters/factor", json!(2.6)),
        ("qwen3_moe_window", "/sliding_window", json!(17)),
        ("qwen3_moe_window", "/num_experts_per_tok", json!(3)),
        ("qwen3_moe_window", "/norm_topk_prob", json!(false)),
        ("llama4_basic", "/attn_scale", json!(0.31)),
        ("llama4_basic", "/floor_scale", json!(18)),
        ("llama4_basic", "/attention_chunk_size", json!(24)),
        ("llama4_basic", "/no_rope_layers", json!([1, 0, 1, 0])),
        ("gpt_oss_bf16", "/swiglu_limit", json!(1.25)),
        ("gpt_oss_bf16", "/rope_parameters/factor", json!(6.5)),
        ("mixtral_yarn", "/rope_parameters/attention_factor", json!(1.31)),
        ("mixtral_yarn", "/rope_parameters/beta_fast", json!(2.5)),
        ("deepseek_v3_basic", "/routed_scaling_factor", json!(2.25)),
        ("deepseek_v3_basic", "/topk_group", json!(3)),
        ("deepseek_v3_basic", "/rope_scaling/mscale_all_dim", json!(0.8)),
    ];
    for (name, pointer, value) in cases {
        let changed = Copy::of(name);
        let (mut from, mut same) = (open(name), changed.open(&options()));
        assert_eq!(refused_part(&mut from, &mut same), None, "{name}: a copy is the same model");
        changed.set(pointer, value);
        let mut other = changed.open(&options());
        assert_eq!(refused_part(&mut from, &mut other), Some("arithmetic"), "{name}: {pointer}");
    }
}

#[test]
fn sessions_of_other_weights_are_refused() {
    let name = "deepseek_v3_basic";
    // The last byte of a row of the trunk, and of an expert of each layer that has some.
    let tensors = [
        ("lm_head.weight", "weights"),
        ("model.embed_tokens.weight", "weights"),
        ("model.layers.2.mlp.gate.e_score_correction_bias", "weights"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "experts"),
        ("model.layers.1.mlp.experts.5.gate_proj.weight", "experts"),
        ("model.layers.2.mlp.experts.7.down_proj.weight", "experts"),
    ];
    for (tensor, part) in tensors {
        for end in [false, true] {
            let changed = Copy::of(name);
            changed.edit(tensor, |bytes| {
                let at = if end { bytes.len() - 4 } else { 0 };
                bytes[at] ^= 1;
            });
            let mut other = changed.open(&options());
            assert_eq!(refused_part(&mut open(name), &mut other), Some(part), "{tensor} {end}");
        }
    }
}

#[test]
fn sessions_of_other_precision_are_refused() {
    let name = "gpt_oss_mxfp4";
    let with =
        |activations, kv_type| open_with(name, &Options { activations, kv_type: Some(kv_type), ..options() });
    let mut from = with(ActivationMode::F32, KvType::F32);
    let mut int8 = with(ActivationMode::Int8, KvType::F32);
    assert_eq!(refused_part(&mut from, &mut int8), Some("precision"));
    let mut f16 = with(ActivationMode::F32, KvType::F16);
    assert_eq!(refused_part(&mut from, &mut f16), Some("precision"));
}

/// Rotations of dynamic scaling depend on the context, others do not; nor does anything on how experts are kept.
#[test]
fn sessions_go_on_where_the_arithmetic_is_the_same() {
    let with = |name: &str, context, expert_cache| {
        open_with(name, &Options { context: Some(context), expert_cache, ..options() })
    };
    // The first is made for 48 positions and scales its rotations beyond.
    for (name, from, to, part) in [
        ("olmoe_dynamic_long", 64, 500, Some("arithmetic")),
        ("olmoe_basic", 64, 500, None),
        ("mixtral_yarn", 64, 250, None),
    ] {
        let refused = refused_part(&mut with(name, from, None), &mut with(name, to, Some(4)));
        assert_eq!(refused, part, "{name}");
    }
}

#[test]
fn tokens_beyond_the_vocabulary_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let mut engine = open("qwen3_moe_basic");
    let mut session = engine.session();
    eval(&mut engine, &mut session, 0, 70);
    engine.save(&session, &path, "").unwrap();
    let good = std::fs::read(&path).unwrap();
    let tokens = tensor_range(&good, "tokens").unwrap();
    let vocab_size = engine.model().graph.vocab_size() as u32;
    eval(&mut engine, &mut session, 70, 90);
    for (token, accepted) in [(vocab_size - 1, true), (vocab_size, false), (u32::MAX, false)] {
        let mut bytes = good.clone();
        bytes[tokens.end - 4..tokens.end].copy_from_slice(&token.to_le_bytes());
        let content = bytes.len() - 16;
        let checksum = xxhash_rust::xxh3::xxh3_128(&bytes[..content]);
        bytes[content..].copy_from_slice(&checksum.to_le_bytes());
        support::replace(&path, &bytes);
        let outcome = engine.load(&mut engine.session(), &path).map(|_| ());
        match outcome {
            Ok(()) => assert!(accepted, "{token}"),
            Err(Error::SessionFile { what: "tokens", got, .. }) => {
                assert!(!accepted && got == token.to_string(), "{token}: {got}");
            }
            Err(other) => panic!("{token}: {other}"),
        }
    }
    assert_holds_90(&mut engine, &mut session, "refused tokens");
}

/// A CPU whose memory runs out, or whose writes fail, when told to.
#[derive(Clone, Default)]
struct Limits {
    /// Calls until the next one fails, of each kind; none fails without.
    pages: Arc<AtomicUsize>,
    slots: Arc<AtomicUsize>,
    writes: Arc<AtomicUsize>,
}

impl Limits {
    fn count(calls: &AtomicUsize) -> Result<(), ComputeError> {
        let left = calls.load(Ordering::SeqCst);
        if left > 0 {
            calls.store(left - 1, Ordering::SeqCst);
        }
        match left {
            1 => Err(ComputeError::DeviceLost { reason: "no memory is left".into() }),
            _ => Ok(()),
        }
    }
}

struct Limited {
    executable: Box<dyn Executable>,
    limits: Limits,
}

struct LimitedBackend(CpuBackend, Limits);

impl Backend for LimitedBackend {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
        self.0.scratch_bytes(graph, options)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>, ComputeError> {
        let executable = self.0.compile(graph, weights, options)?;
        Ok(Box::new(Limited { executable, limits: self.1.clone() }))
    }
}

impl Executable for Limited {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<(), ComputeError> {
        self.executable.run(batch, experts, logits)
    }

    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<(), ComputeError> {
        self.executable.run_hidden(batch, experts, visit)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<(), ComputeError> {
        Limits::count(&self.limits.pages)?;
        self.executable.reserve_pages(pages)
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<(), ComputeError> {
        Limits::count(&self.limits.slots)?;
        self.executable.reserve_slots(slots)
    }

    fn page_bytes(&self) -> usize {
        self.executable.page_bytes()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<(), ComputeError> {
        self.executable.read_page(page, out)
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<(), ComputeError> {
        Limits::count(&self.limits.writes)?;
        self.executable.write_page(page, bytes)
    }

    fn slot_bytes(&self) -> usize {
        self.executable.slot_bytes()
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<(), ComputeError> {
        self.executable.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<(), ComputeError> {
        Limits::count(&self.limits.writes)?;
        self.executable.write_slot(slot, bytes)
    }
}

#[test]
fn a_failed_load_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    for name in ["qwen3_next_basic", "qwen3_moe_basic"] {
        let limits = Limits::default();
        let backend = LimitedBackend(CpuBackend::new(2, None).unwrap(), limits.clone());
        let mut engine = Engine::open(&fixture(name), &backend, &options(), |_, _| ()).unwrap();
        let mut other = engine.session();
        engine.eval(&mut other, &tokens(7, 150), Outputs::Last).unwrap();
        engine.save(&other, &path, "").unwrap();
        drop(other);

        let mut session = engine.session();
        eval(&mut engine, &mut session, 0, 90);
        session.checkpoint();
        let slots = engine.model().graph.states().is_empty();
        // The second write finds the first one done.
        let calls = [(&limits.pages, 1), (&limits.slots, 1), (&limits.writes, 1), (&limits.writes, 2)];
        for (calls, at) in
            calls.into_iter().filter(|(calls, _)| !(slots && Arc::ptr_eq(calls, &limits.slots)))
        {
            calls.store(at, Ordering::SeqCst);
            let error = engine.load(&mut session, &path).unwrap_err();
            assert_eq!(calls.load(Ordering::SeqCst), 0, "{name}");
            assert!(error.to_string().contains("no memory is left"), "{error}");
            assert_holds_90(&mut engine, &mut session, &format!("{name}: {error}"));
        }
        engine.load(&mut session, &path).unwrap();
        assert_eq!(session.tokens(), tokens(7, 150));
    }
}

/// A session that shares pages and cannot have its own has the shared ones still.
#[test]
fn a_failed_copy_of_shared_pages_changes_nothing() {
    let limits = Limits::default();
    let backend = LimitedBackend(CpuBackend::new(2, None).unwrap(), limits.clone());
    let options = Options { sequences: 2, ..options() };
    let mut engine = Engine::open(&fixture("qwen3_moe_basic"), &backend, &options, |_, _| ()).unwrap();
    let mut first = engine.session();
    eval(&mut engine, &mut first, 0, 90);
    let mut second = first.fork(90);
    for calls in [&limits.pages, &limits.writes] {
        calls.store(1, Ordering::SeqCst);
        engine.eval(&mut second, &tokens(90, 95), Outputs::Last).unwrap_err();
        assert_eq!(calls.load(Ordering::SeqCst), 0);
    }
    assert_holds_90(&mut engine, &mut second, "the fork");
    assert_holds_90(&mut engine, &mut first, "the original");
}

/// Checkpoints whose states other sessions hold too free nothing, so they are not given up for nothing.
#[test]
fn a_refused_state_leaves_checkpoints() {
    let options = Options { checkpoints: 1, ..options() };
    let mut engine = open_with("qwen3_next_basic", &options);
    let mut session = engine.session();
    eval(&mut engine, &mut session, 0, 5);
    session.checkpoint();
    let _fork = session.fork(5);
    let mut others = vec![];
    let error = loop {
        let mut other = engine.session();
        match engine.eval(&mut other, &tokens(0, 5), Outputs::Last) {
            Ok(_) => others.push(other),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::StatesFull { .. }), "{error}");
    engine.eval(&mut session, &tokens(5, 6), Outputs::Last).unwrap_err();
    assert_eq!(session.checkpoints().collect::<Vec<_>>(), [0, 5]);
}
