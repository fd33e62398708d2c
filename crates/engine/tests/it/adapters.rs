//! Adapters against PEFT, against themselves in batches and streamed, and what is refused.

use std::path::{Path, PathBuf};

use moeflux::checkpoint::safetensors::{ElementType, TensorSpec, Writer};
use moeflux::{
    AdapterSource, DecodingOptions, Engine, Error, Options, Outputs, Part, Request, Scheduler,
    SchedulerOptions, Session, TextModel,
};
use moeflux_compute::backend::{ActivationMode, Backend};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::{GpuBackend, GpuOptions, ProcessorShare};
use moeflux_compute::reference::Reference;
use safetensors::SafeTensors;

use crate::support::{self, Fixture, Golden, bits, f32_options, gpus};

/// As for logits without adapters.
const RELATIVE_ERROR: f32 = 3e-5;

/// An adapter of a fixture, with PEFT's logits.
struct Adapter {
    folder: PathBuf,
    name: String,
    base: Fixture,
    golden: Golden,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters")
}

impl Adapter {
    fn named(name: &str) -> Self {
        let folder = root().join(name);
        let file = std::fs::read(folder.join("golden.safetensors")).expect("golden");
        let (_, header) = SafeTensors::read_metadata(&file).expect("golden");
        let base = header.metadata().as_ref().and_then(|all| all.get("base")).expect("the model's name");
        let golden = Golden::read(&folder.join("golden.safetensors"));
        Self { folder, name: name.to_owned(), base: Fixture::named(base), golden }
    }

    fn all() -> Vec<Self> {
        let entries = std::fs::read_dir(root()).expect("adapters");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("entry").file_name().into_string().expect("a name")).collect();
        names.sort();
        names.iter().map(|name| Self::named(name)).collect()
    }

    fn source(&self) -> AdapterSource {
        AdapterSource { name: self.name.clone(), folder: self.folder.clone() }
    }

    fn options(&self) -> Options {
        Options { adapters: vec![self.source()], ..f32_options() }
    }

    fn open(&self, backend: &dyn Backend, options: &Options) -> Engine {
        support::open(&self.base.path, backend, options)
    }

    /// A copy of the folder that may be changed.
    fn copy(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary folder");
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            std::fs::copy(self.folder.join(name), folder.path().join(name)).expect("copy");
        }
        folder
    }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(2, None).unwrap()
}

fn logits(engine: &mut Engine, adapter: Option<&str>, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.session_with(adapter).unwrap();
    engine.eval(&mut session, tokens, Outputs::All).unwrap()
}

fn relative_error(got: &[f32], golden: &[f32]) -> f32 {
    assert_eq!(got.len(), golden.len());
    let largest = golden.iter().fold(0f32, |m, v| m.max(v.abs()));
    got.iter().zip(golden).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[test]
fn logits_are_those_of_peft() {
    for adapter in Adapter::all() {
        let gpus = gpus(GpuOptions::default());
        let others = gpus.iter().map(|gpu| gpu as &dyn Backend);
        for backend in [&cpu() as &dyn Backend, &Reference].into_iter().chain(others) {
            let mut engine = adapter.open(backend, &adapter.options());
            let got = logits(&mut engine, Some(&adapter.name), &adapter.golden.tokens);
            let error = relative_error(&got, &adapter.golden.logits);
            println!("{} {}: {error:.1e}", adapter.name, backend.describe());
            assert!(error < RELATIVE_ERROR, "{} {}: {error:.1e}", adapter.name, backend.describe());
        }
    }
}

#[test]
fn without_an_adapter_bits_are_those_of_a_model_that_has_none() {
    for adapter in Adapter::all() {
        let tokens = &adapter.golden.tokens;
        let plain = logits(&mut adapter.open(&cpu(), &f32_options()), None, tokens);
        let mut engine = adapter.open(&cpu(), &adapter.options());
        assert_eq!(bits(&plain), bits(&logits(&mut engine, None, tokens)), "{}", adapter.name);
        let with = logits(&mut engine, Some(&adapter.name), tokens);
        assert!(relative_error(&with, &plain) > 0.05, "{}", adapter.name);
    }
}

#[test]
fn streamed_experts_change_no_bit() {
    for name in ["qwen3_moe_everything", "mixtral_experts", "gpt_oss_transposed", "mixtral_gguf"] {
        let adapter = Adapter::named(name);
        let tokens = &adapter.golden.tokens;
        let resident = logits(&mut adapter.open(&cpu(), &adapter.options()), Some(name), tokens);
        for slots in [1, 3] {
            let options = Options { expert_cache: Some(slots), ..adapter.options() };
            let mut engine = adapter.open(&cpu(), &options);
            assert_eq!(
                bits(&resident),
                bits(&logits(&mut engine, Some(name), tokens)),
                "{name}, {slots} slots"
            );
            assert!(engine.take_stats().cache.misses > 0, "{name}");
        }
    }
}

/// A prompt, then single tokens, the third of which is a recording of the second: the same bits wherever experts are.
#[test]
fn streamed_experts_change_no_bit_on_gpus() {
    for (name, base) in [("qwen3_moe_everything", f32_options()), ("mixtral_gguf", Options::default())] {
        let adapter = Adapter::named(name);
        let base = Options { adapters: vec![adapter.source()], ..base };
        let (prompt, rest) = adapter.golden.tokens.split_at(adapter.golden.tokens.len() - 3);
        let run = |backend: &GpuBackend, options: &Options| {
            let mut engine = adapter.open(backend, options);
            let mut session = engine.session_with(Some(name)).unwrap();
            let mut out = engine.eval(&mut session, prompt, Outputs::All).unwrap();
            for token in rest {
                out.extend(engine.eval(&mut session, &[*token], Outputs::All).unwrap());
            }
            bits(&out)
        };
        let all = gpus(GpuOptions::default());
        let resident: Vec<Vec<u32>> = all.iter().map(|gpu| run(gpu, &base)).collect();
        let few = GpuOptions { expert_slots: Some(2), ..GpuOptions::default() };
        let cached = Options { expert_cache: Some(2), ..base.clone() };
        for (gpu, resident) in gpus(few).iter().zip(&resident) {
            assert!(*resident == run(gpu, &cached), "{name}, {}: from the host's cache", gpu.describe());
        }
        // Host memory has all, and the processor would compute some.
        let processor = Some(ProcessorShare { threads: 2, part: Some(0.5) });
        let kept = gpus(GpuOptions { host_memory: true, processor, ..few });
        for (gpu, resident) in kept.iter().zip(&resident) {
            assert!(*resident == run(gpu, &base), "{name}, {}: from host memory", gpu.describe());
        }
    }
}

/// As in a batch of the same rows of an engine without adapters.
#[test]
fn rows_without_an_adapter_keep_their_bits_beside_others_on_gpus() {
    let adapter = Adapter::named("qwen3_moe_everything");
    let tokens = &adapter.golden.tokens[..12];
    let run = |gpu: &GpuBackend, adapters: Vec<AdapterSource>, other: Option<&str>| {
        let options = Options { sequences: 2, kv_tokens: Some(2048), adapters, ..f32_options() };
        let mut engine = adapter.open(gpu, &options);
        let mut sessions = [None, other].map(|name| engine.session_with(name).unwrap());
        let part = |session| Part { session, tokens, outputs: Some(Outputs::All) };
        let mut parts: Vec<Part<'_>> = sessions.iter_mut().map(part).collect();
        engine.eval_batch(&mut parts).unwrap()
    };
    for gpu in gpus(GpuOptions::default()) {
        let plain = run(&gpu, vec![], None);
        let mixed = run(&gpu, vec![adapter.source()], Some(&adapter.name));
        assert_eq!(bits(&mixed[0]), bits(&plain[0]), "{}", gpu.describe());
        let golden = &adapter.golden.logits[..mixed[1].len()];
        assert!(relative_error(&mixed[1], golden) < RELATIVE_ERROR, "{}", gpu.describe());
    }
}

#[test]
fn sequences_of_a_batch_are_as_alone_whatever_adapters_others_have() {
    let (one, other) = (Adapter::named("qwen3_moe_everything"), Adapter::named("qwen3_moe_layer"));
    for activations in [ActivationMode::F32, ActivationMode::Int8] {
        let base = &one.base;
        let sources = vec![one.source(), other.source()];
        let options = Options {
            adapters: sources,
            sequences: 5,
            kv_tokens: Some(2048),
            activations,
            ..Options::default()
        };
        let mut engine = support::open(&base.path, &cpu(), &options);
        let names: Vec<Option<String>> = [None]
            .into_iter()
            .chain(engine.model().adapter_names().map(|name| Some(name.to_owned())))
            .collect();
        let given: Vec<(Option<&str>, Vec<u32>)> = (0..5u32)
            .map(|i| {
                (
                    names[i as usize % names.len()].as_deref(),
                    (0..4 + i * 3).map(|t| (t * 7 + i) % 60).collect(),
                )
            })
            .collect();
        let alone: Vec<Vec<u32>> =
            given.iter().map(|(name, tokens)| bits(&logits(&mut engine, *name, tokens))).collect();
        let mut sessions: Vec<Session> =
            given.iter().map(|(name, _)| engine.session_with(*name).unwrap()).collect();
        // A part of each, then the rest, so that prompts and single tokens meet.
        let cut = |index: usize, tokens: &[u32]| if index.is_multiple_of(2) { 1 } else { tokens.len() - 1 };
        let mut together: Vec<Vec<f32>> = vec![vec![]; given.len()];
        for second in [false, true] {
            let parts = sessions.iter_mut().zip(&given).enumerate().map(|(index, (session, (_, tokens)))| {
                let at = cut(index, tokens);
                let tokens = if second { &tokens[at..] } else { &tokens[..at] };
                Part { session, tokens, outputs: Some(Outputs::All) }
            });
            let mut parts: Vec<Part<'_>> = parts.collect();
            let rows = engine.eval_batch(&mut parts).unwrap();
            together.iter_mut().zip(rows).for_each(|(all, rows)| all.extend(rows));
        }
        for (index, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(*alone, bits(together), "{}, sequence {index}", base.name);
        }
    }
}

#[test]
fn last_rows_alone_have_their_adapters() {
    let adapter = Adapter::named("qwen3_moe_everything");
    let options = Options { sequences: 2, kv_tokens: Some(2048), ..adapter.options() };
    let mut engine = adapter.open(&cpu(), &options);
    let tokens = &adapter.golden.tokens;
    let all = logits(&mut engine, Some(&adapter.name), tokens);
    let plain = logits(&mut engine, None, tokens);
    let width = all.len() / tokens.len();
    let (mut with, mut without) =
        (engine.session_with(Some(&adapter.name)).unwrap(), engine.session_with(None).unwrap());
    let part = |session| Part { session, tokens, outputs: Some(Outputs::Last) };
    let last = engine.eval_batch(&mut [part(&mut without), part(&mut with)]).unwrap();
    assert_eq!(bits(&last[0]), bits(&plain[plain.len() - width..]));
    assert_eq!(bits(&last[1]), bits(&all[all.len() - width..]));
}

#[test]
fn sessions_on_disk_and_forks_know_their_adapter() {
    let adapter = Adapter::named("qwen3_moe_everything");
    let roomy = |adapters| Options { kv_tokens: Some(2048), adapters, ..f32_options() };
    let mut engine = adapter.open(&cpu(), &roomy(vec![adapter.source()]));
    let (first, rest) = adapter.golden.tokens.split_at(9);
    let name = Some(adapter.name.as_str());
    let mut session = engine.session_with(name).unwrap();
    engine.eval(&mut session, first, Outputs::Last).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    engine.save(&session, &path, "").unwrap();
    let mut fork = session.fork(usize::MAX);
    let expected = bits(&engine.eval(&mut session, rest, Outputs::All).unwrap());
    assert_eq!(bits(&engine.eval(&mut fork, rest, Outputs::All).unwrap()), expected);

    let mut plain = engine.session_with(None).unwrap();
    match engine.load(&mut plain, &path) {
        Err(Error::SessionFile { what: "adapter", .. }) => {}
        other => panic!("{other:?}"),
    }
    // In another engine the adapter may have another name and number.
    let sources = ["qwen3_moe_layer", "qwen3_moe_everything"].map(Adapter::named).map(|other| other.source());
    let mut other = adapter.open(&cpu(), &roomy(sources.to_vec()));
    let mut loaded = other.session_with(name).unwrap();
    other.load(&mut loaded, &path).unwrap();
    assert_eq!(bits(&other.eval(&mut loaded, rest, Outputs::All).unwrap()), expected);

    // Sessions without one are those of an engine that has no adapters.
    engine.eval(&mut plain, first, Outputs::Last).unwrap();
    engine.save(&plain, &path, "").unwrap();
    let mut bare = adapter.open(&cpu(), &roomy(vec![]));
    let mut session = bare.session();
    bare.load(&mut session, &path).unwrap();
    assert_eq!(session.tokens(), first);
}

#[test]
fn adapters_count_against_the_budget() {
    let adapter = Adapter::named("mixtral_experts");
    let trunk = |options: &Options| adapter.open(&cpu(), options).budget().needs.trunk;
    let file = std::fs::metadata(adapter.folder.join("adapter_model.safetensors")).unwrap().len();
    let more = trunk(&adapter.options()) - trunk(&f32_options());
    assert!(more > file / 3 && more < 2 * file, "{more} bytes of {file}");
}

/// Writes an adapter file of these tensors, f32.
fn write(folder: &Path, tensors: &[(&str, [usize; 2], f32)]) {
    let path = folder.join("adapter_model.safetensors");
    let spec = |(name, shape, _): &(&str, [usize; 2], f32)| TensorSpec {
        name: format!("base_model.model.{name}"),
        dtype: ElementType::F32,
        shape: shape.to_vec(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let mut writer = Writer::new(std::fs::File::create(&path).unwrap(), &path, &[], &specs).unwrap();
    for (_, [rows, cols], value) in tensors {
        for _ in 0..rows * cols {
            writer.append(&value.to_le_bytes()).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// The error of a model with an adapter whose folder `change` has made wrong.
fn refused(name: &str, change: impl FnOnce(&Path)) -> String {
    let adapter = Adapter::named(name);
    let folder = adapter.copy();
    change(folder.path());
    let source = AdapterSource { name: "bad".into(), folder: folder.path().into() };
    let options = Options { adapters: vec![source], ..f32_options() };
    let error = Engine::open(&adapter.base.path, &cpu(), &options, |_, _| ()).expect_err("refused");
    error.to_string()
}

fn set(folder: &Path, key: &str, value: &str) {
    let path = folder.join("adapter_config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = serde_json::from_str(value).unwrap();
    std::fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn settings_that_are_not_supported_are_refused_by_name() {
    for (key, value) in [
        ("peft_type", "\"IA3\""),
        ("bias", "\"all\""),
        ("use_dora", "true"),
        ("lora_bias", "true"),
        ("modules_to_save", "[\"lm_head\"]"),
        ("layer_replication", "[[0, 2]]"),
        ("trainable_token_indices", "[1]"),
        ("alora_invocation_tokens", "[1]"),
        ("fan_in_fan_out", "true"),
        ("use_qalora", "true"),
        ("init_lora_weights", "\"pissa\""),
        ("something_new", "3"),
        ("r", "0"),
        ("r", "\"8\""),
        ("lora_alpha", "null"),
        ("rank_pattern", "{\"(\": 3}"),
        ("alpha_pattern", "[]"),
        ("use_rslora", "1"),
    ] {
        let error = refused("olmoe_attention", |folder| set(folder, key, value));
        assert!(error.contains("adapter_config.json") && error.contains(key), "{key}: {error}");
    }
}

#[test]
fn files_that_are_not_the_models_are_refused() {
    let (a, b) = ("lora_A.weight", "lora_B.weight");
    let q = "model.layers.0.self_attn.q_proj";
    let check = |tensors: &[(&str, [usize; 2], f32)], expected: &[&str]| {
        let error = refused("olmoe_attention", |folder| write(folder, tensors));
        for part in expected {
            assert!(error.contains(part) && error.contains("adapter_model.safetensors"), "{error}");
        }
    };
    let name = |module: &str, kind: &str| format!("{module}.{kind}");
    let (qa, qb) = (name(q, a), name(q, b));
    // The rank is 4, hidden size 32.
    check(&[(&qa, [4, 32], 0.1)], &["lora_B", "missing"]);
    check(&[(&qb, [32, 4], 0.1)], &["lora_A", "missing"]);
    check(&[(&qa, [3, 32], 0.1), (&qb, [32, 3], 0.1)], &["4 rows", "adapter_config.json", "[3, 32]"]);
    check(&[(&qa, [4, 31], 0.1), (&qb, [32, 4], 0.1)], &["shape [4, 32]", "[4, 31]"]);
    check(&[(&qa, [4, 32], 0.1), (&qb, [33, 4], 0.1)], &["shape [32, 4]", "[33, 4]"]);
    check(&[(&qa, [4, 32], 0.1), (&qb, [32, 4], f32::NAN)], &["lora_B", "finite", "NaN"]);
    check(&[(&qa, [4, 32], f32::INFINITY), (&qb, [32, 4], 0.1)], &["lora_A", "finite", "inf"]);
    check(&[], &["no tensors"]);
    for module in
        ["model.layers.0.self_attn.qq_proj", "model.layers.99.self_attn.q_proj", "model.visual.q_proj"]
    {
        let (a, b) = (name(module, a), name(module, b));
        check(&[(&a, [4, 32], 0.1), (&b, [32, 4], 0.1)], &[module, "linear layer"]);
    }
    for kind in ["lora_embedding_A", "lora_magnitude_vector.weight", "bias", "lora_A.bias"] {
        check(&[(&name(q, kind), [4, 32], 0.1)], &[kind]);
    }
    check(
        &[
            (&name("model.layers.0.mlp.experts", a), [4, 32], 0.1),
            (&name("model.layers.0.mlp.experts", b), [36, 4], 0.1),
        ],
        &["for each of"],
    );

    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        let error = refused("olmoe_attention", |folder| std::fs::remove_file(folder.join(file)).unwrap());
        assert!(error.contains(file) && error.contains("cannot open"), "{error}");
        for content in ["", "{", "[1, 2]", "\u{1}\0\0\0\0\0\0\0{"] {
            let error =
                refused("olmoe_attention", |folder| std::fs::write(folder.join(file), content).unwrap());
            assert!(error.contains(file), "{error}");
        }
    }
    // What is in the way of a matrix's product with latents is no linear layer.
    let (a, b) =
        (name("model.layers.0.self_attn.kv_b_proj", a), name("model.layers.0.self_attn.kv_b_proj", b));
    let error =
        refused("deepseek_v3_latent", |folder| write(folder, &[(&a, [2, 16], 0.1), (&b, [40, 2], 0.1)]));
    assert!(error.contains("kv_b_proj"), "{error}");
}

#[test]
fn names_are_unique_and_known() {
    let adapter = Adapter::named("olmoe_attention");
    let options = Options { adapters: vec![adapter.source(), adapter.source()], ..f32_options() };
    let error = Engine::open(&adapter.base.path, &cpu(), &options, |_, _| ()).expect_err("refused");
    assert!(error.to_string().contains("olmoe_attention"), "{error}");
    let engine = adapter.open(&cpu(), &adapter.options());
    let error = engine.session_with(Some("other")).expect_err("refused").to_string();
    assert!(error.contains("olmoe_attention") && error.contains("other"), "{error}");
}

/// Adapters of a model with a tokenizer, whose every value is the same: of the name's sign.
fn constant(folder: &Path, value: f32) {
    std::fs::copy(root().join("olmoe_attention/adapter_config.json"), folder.join("adapter_config.json"))
        .unwrap();
    let tensors: Vec<(String, [usize; 2], f32)> = (0..2)
        .flat_map(|layer| {
            let module = format!("model.layers.{layer}.self_attn.o_proj");
            [
                (format!("{module}.lora_A.weight"), [4, 48], value),
                (format!("{module}.lora_B.weight"), [32, 4], 0.5),
            ]
        })
        .collect();
    let tensors: Vec<(&str, [usize; 2], f32)> =
        tensors.iter().map(|(name, shape, value)| (name.as_str(), *shape, *value)).collect();
    write(folder, &tensors);
}

#[test]
fn requests_are_answered_with_the_adapter_that_they_name() {
    let (plus, minus) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    constant(plus.path(), 0.4);
    constant(minus.path(), -0.4);
    let source = |name: &str, folder: &Path| AdapterSource { name: name.into(), folder: folder.into() };
    let adapters = vec![source("plus", plus.path()), source("minus", minus.path())];
    let base = Fixture::named("hf/qwen3_moe_tokenizer");
    let options = Options {
        adapters,
        sequences: 3,
        context: Some(256),
        kv_tokens: Some(2048),
        activations: ActivationMode::F32,
        ..Options::default()
    };
    let model = TextModel::open(&base.path, &cpu(), &options, |_, _| ()).unwrap();
    let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
    assert_eq!(scheduler.description().adapters, ["plus", "minus"]);
    let prompt: Vec<u32> = (0..150).map(|i| 20 + i * 7 % 90).collect();
    let ask = |adapter: Option<&str>| {
        let decoding = DecodingOptions { max_tokens: 12, ..DecodingOptions::default() };
        let adapter = adapter.map(str::to_owned);
        let request = Request { prompt: prompt.clone(), options: decoding, adapter, ..Request::default() };
        scheduler.submit(request).unwrap()
    };
    let names = [None, Some("plus"), Some("minus")];
    let alone: Vec<_> = names.iter().map(|name| ask(*name).text().unwrap()).collect();
    // What one has evaluated is of no use to another.
    assert!(alone.iter().all(|(_, done)| done.usage.cached_tokens == 0));
    assert!(alone[0].0 != alone[1].0 && alone[0].0 != alone[2].0 && alone[1].0 != alone[2].0);
    // All at once, and each from what it left in the cache itself.
    let together: Vec<_> = names.iter().map(|name| ask(*name)).collect();
    for (alone, together) in alone.iter().zip(together) {
        let (text, done) = together.text().unwrap();
        assert_eq!(text, alone.0);
        assert!(done.usage.cached_tokens > 100, "{}", done.usage.cached_tokens);
    }
    let unknown = Request { prompt, adapter: Some("other".into()), ..Request::default() };
    let error = scheduler.submit(unknown).expect_err("refused").to_string();
    assert!(error.contains("plus, minus") && error.contains("other"), "{error}");
}
