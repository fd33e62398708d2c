//! Layers that draft tokens: their logits against a reference, and answers that are the same with and without them, of every family
//! that has such layers.

use std::path::Path;

use moeflux::sampler::SamplerOptions;
use moeflux::scheduler::{Event, Scheduler, SchedulerOptions};
use moeflux::{DecodingOptions, Engine, Error, Options, Outputs, Session, SpecType, TextModel};
use moeflux_compute::backend::{ActivationMode, Backend};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuDevice, GpuOptions, ProcessorShare};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::scheduler::model;
use crate::speculation::{answer, emulator_with, events, greedy, options, sampled};
use crate::support::{self, Golden, is_tried};

/// Fixtures with a layer; the second has routed experts in groups, the third and fourth recurrent state, the last a window.
const NAMES: [&str; 5] =
    ["deepseek_v3_basic", "glm4_moe_groups", "qwen3_next_basic", "qwen3_5_moe_text", "mimo_v2_flash_basic"];

fn fixtures() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures"))
}

/// The golden of a layer: logits of its steps.
fn golden(name: &str) -> Golden {
    Golden::read(&fixtures().join("draft").join(name).join("golden.safetensors"))
}

/// A changed copy of a tensor's bytes, by name.
type Edit<'a> = &'a dyn Fn(&str, &[usize], &[u8]) -> Vec<u8>;

/// Writes the model with its layer to `folder`, with a tokenizer of a token a byte.
fn write(folder: &Path, name: &str, edit: Edit<'_>) {
    let base = fixtures().join("hf").join(name);
    let config = std::fs::read_to_string(base.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    if name.starts_with("glm4") {
        config["num_nextn_predict_layers"] = json!(1);
    }
    let vocab_size = config["vocab_size"].as_u64().unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layer = fixtures().join("draft").join(name).join("layer.safetensors");
    let stored = std::fs::read_dir(&base).unwrap().map(|entry| entry.unwrap().path());
    let shards = stored.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("model-"));
    let mut paths: Vec<_> = shards.filter(|path| path.extension().unwrap() == "safetensors").collect();
    if paths.is_empty() {
        paths.push(base.join("model.safetensors"));
    }
    paths.push(layer);
    let bytes: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let files: Vec<_> = bytes.iter().map(|bytes| SafeTensors::deserialize(bytes).unwrap()).collect();
    let edited = |name: String, view: safetensors::tensor::TensorView<'_>| {
        (name.clone(), view.dtype(), view.shape().to_vec(), edit(&name, view.shape(), view.data()))
    };
    let all: Vec<_> = files.iter().flat_map(|file| file.tensors()).map(|(n, v)| edited(n, v)).collect();
    let views = all.iter().map(|(name, dtype, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let text = std::fs::read_to_string(fixtures().join("hf/qwen3_moe_tokenizer/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    tokenizer["added_tokens"] = json!([]);
    tokenizer["model"]["merges"] = json!([]);
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.retain(|_, id| id.as_u64().unwrap() < vocab_size);
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

fn with_layer(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), name, &|_, _, bytes| bytes.to_vec());
    folder
}

/// A model whose next token depends on the last one alone, as do the tokens that its layer drafts: nothing else gets through.
fn foreseen() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let name = "deepseek_v3_basic";
    let one = 0x3f80_u16.to_le_bytes();
    write(folder.path(), name, &|tensor, shape, bytes| {
        if tensor.ends_with("o_proj.weight") || tensor.ends_with("down_proj.weight") {
            return vec![0; bytes.len()];
        }
        if tensor.ends_with("eh_proj.weight") {
            let value = |index: usize| if index / shape[1] == index % shape[1] { one } else { [0; 2] };
            return (0..shape[0] * shape[1]).flat_map(value).collect();
        }
        if tensor.ends_with("norm.weight") { one.repeat(shape[0]) } else { bytes.to_vec() }
    });
    folder
}

fn open(folder: &Path, options: &Options) -> Engine {
    open_on(&CpuBackend::new(2, None).unwrap(), folder, options)
}

fn open_on(backend: &dyn Backend, folder: &Path, options: &Options) -> Engine {
    let options = Options { context: Some(128), kv_tokens: Some(1024), ..options.clone() };
    support::open(folder, backend, &options)
}

/// Devices with room for all experts, for few that come from the processor's cache, and for few of those that its memory keeps, of
/// which the processor computes some.
fn devices() -> [GpuOptions; 3] {
    let few = GpuOptions { expert_slots: Some(5), ..GpuOptions::default() };
    let processor = Some(ProcessorShare { threads: 1, part: Some(0.5) });
    [GpuOptions::default(), few, GpuOptions { host_memory: true, processor, ..few }]
}

fn on(device: GpuOptions, folder: &Path, options: &Options) -> TextModel {
    let options = Options { context: Some(128), ..options.clone() };
    TextModel::open(folder, &emulator_with(device), &options, |_, _| ()).unwrap()
}

/// The largest difference, as a part of the largest logit.
fn error(logits: &[f32], right: &[f32]) -> f32 {
    assert_eq!(logits.len(), right.len());
    let most = right.iter().fold(0.0, |most: f32, l| most.max(l.abs()));
    let larger = |most: f32, (a, b): (&f32, &f32)| if (a - b).abs() <= most { most } else { (a - b).abs() };
    logits.iter().zip(right).fold(0.0, larger) / most
}

fn exact(spec_type: SpecType) -> Options {
    Options { activations: ActivationMode::F32, spec_type, ..Options::default() }
}

/// Logits of `steps` steps after all but the last of `tokens`, evaluated in pieces of these lengths and the rest.
fn drafted(engine: &mut Engine, tokens: &[u32], pieces: &[usize], steps: usize) -> (Session, Vec<f32>) {
    let (next, tokens) = tokens.split_last().unwrap();
    let mut session = engine.session();
    let mut rest = tokens;
    for length in pieces {
        let (piece, others) = rest.split_at(*length);
        engine.eval(&mut session, piece, Outputs::Last).unwrap();
        rest = others;
    }
    engine.eval(&mut session, rest, Outputs::Last).unwrap();
    let logits = engine.draft_logits(&mut session, *next, steps).unwrap();
    (session, logits)
}

#[test]
fn logits_of_layers_are_those_of_the_formula() {
    for name in NAMES {
        let (folder, golden) = (with_layer(name), golden(name));
        let steps = golden.logits.len() / golden.vocab_size;
        let mut engine = open(folder.path(), &exact(SpecType::Mtp));
        let (_, logits) = drafted(&mut engine, &golden.tokens, &[], steps);
        let error = error(&logits, &golden.logits);
        println!("{name}: {error:.1e}");
        assert!(error < 2e-5, "{name}: {error}");
        // However tokens come, and with experts from the disk.
        let bits = support::bits(&logits);
        let streamed = Options { expert_cache: Some(1), chunk: Some(7), ..exact(SpecType::Mtp) };
        let lazy = exact(SpecType::Auto);
        for options in [exact(SpecType::Mtp), streamed, lazy] {
            for pieces in [&[1, 1, 1][..], &[20, 1, 17, 30], &[65, 2]] {
                let mut engine = open(folder.path(), &options);
                let (_, logits) = drafted(&mut engine, &golden.tokens, pieces, steps);
                assert!(support::bits(&logits) == bits, "{name} {pieces:?} {options:?}");
            }
        }
        let int8 = Options { activations: ActivationMode::Int8, ..exact(SpecType::Mtp) };
        let (_, logits) = drafted(&mut open(folder.path(), &int8), &golden.tokens, &[], steps);
        assert!(logits.iter().all(|l| l.is_finite()), "{name}");
    }
}

#[test]
fn logits_on_a_gpu_are_those_of_the_formula() {
    for (index, name) in NAMES.into_iter().enumerate() {
        let (folder, golden) = (with_layer(name), golden(name));
        let steps = golden.logits.len() / golden.vocab_size;
        let backend = emulator_with(devices()[index % 3]);
        let spec_type = if index % 2 == 0 { SpecType::Mtp } else { SpecType::Auto };
        let mut engine = open_on(&backend, folder.path(), &exact(spec_type));
        let (_, logits) = drafted(&mut engine, &golden.tokens, &[20, 1, 30], steps);
        let error = error(&logits, &golden.logits);
        println!("{name}: {error:.1e}");
        assert!(error < 5e-5, "{name}: {error}");
    }
}

// The model's own rows have their bits whether or not hidden states are kept, and wherever experts are.
#[test]
fn answers_on_a_gpu_are_those_without_the_layer() {
    let warm = SamplerOptions { temperature: 0.8, seed: Some(5), ..SamplerOptions::default() };
    let kinds = [sampled(16, warm.clone()), DecodingOptions { logprobs: Some(2), ..sampled(8, warm) }];
    let mut sums = [0; 2];
    for (turn, (name, device)) in NAMES[1..4].iter().zip(devices()).enumerate() {
        let folder = with_layer(name);
        let mut plain = on(device, folder.path(), &options(SpecType::Off, 1));
        let mut drafting = on(device, folder.path(), &options(SpecType::Mtp, 3));
        if device.host_memory {
            drafting.engine.warm_up().unwrap();
        }
        for (_, decoding) in kinds.iter().enumerate().filter(|(kind, _)| is_tried(turn + kind, 2)) {
            let (expected, _) = answer(&mut plain, "0123/.-", decoding);
            let (got, [drafted, accepted]) = answer(&mut drafting, "0123/.-", decoding);
            assert_eq!(got, expected, "{name} {device:?} {decoding:?}");
            sums = [sums[0] + drafted, sums[1] + accepted];
        }
    }
    assert!(sums[0] > 50 && sums[1] > 0, "{sums:?}");
}

#[test]
fn what_is_foreseen_on_a_gpu_takes_fewer_steps() {
    let folder = foreseen();
    for device in devices() {
        let (expected, _) =
            answer(&mut on(device, folder.path(), &options(SpecType::Off, 1)), "0123", &greedy(30));
        let mut drafting = on(device, folder.path(), &options(SpecType::Mtp, 4));
        let (got, [drafted, accepted]) = answer(&mut drafting, "0123", &greedy(30));
        assert_eq!((&got, drafted), (&expected, accepted), "{device:?}");
        assert!(29 - accepted <= 29 / 5 + 2, "{accepted} {device:?}");
    }
}

#[test]
fn several_devices_do_not_draft_by_a_layer() {
    let folder = with_layer("deepseek_v3_basic");
    let device = |number| GpuDevice::new("emulator", number, None, || Ok(Box::new(Emulator::new(5)) as _));
    let backend = GpuBackend::of_devices([0, 1].map(device).into(), GpuOptions::default());
    let open = |spec_type| TextModel::open(folder.path(), &backend, &options(spec_type, 4), |_, _| ());
    let error = open(SpecType::Mtp).unwrap_err();
    assert!(matches!(error, Error::Option { option: "spec_type", .. }));
    assert!(error.to_string().contains("several devices"), "{error}");
    let mut auto = open(SpecType::Auto).unwrap();
    assert!(auto.engine.spec_type() == SpecType::Auto && auto.engine.model().draft.is_none());
    answer(&mut auto, "0123", &greedy(3));
}

#[test]
fn answers_are_those_without_the_layer() {
    let warm = SamplerOptions { temperature: 0.8, seed: Some(5), ..SamplerOptions::default() };
    let kinds =
        [greedy(60), greedy(2), sampled(60, warm.clone()), sampled(40, SamplerOptions { top_k: 4, ..warm })];
    let mut sums = [0; 2];
    for name in NAMES {
        let folder = with_layer(name);
        let mut plain = model(folder.path(), &options(SpecType::Off, 1));
        for (draft_max, expert_cache) in [(1, None), (3, Some(2)), (16, None)] {
            let options = Options { expert_cache, ..options(SpecType::Mtp, draft_max) };
            let mut drafting = model(folder.path(), &options);
            for decoding in &kinds {
                let (expected, _) = answer(&mut plain, "0123/.-", decoding);
                let (got, [drafted, accepted]) = answer(&mut drafting, "0123/.-", decoding);
                assert_eq!(got, expected, "{name} {draft_max} {decoding:?}");
                sums = [sums[0] + drafted, sums[1] + accepted];
            }
        }
    }
    assert!(sums[0] > 500 && sums[1] > 0, "{sums:?}");
}

#[test]
fn the_context_ends_answers_as_it_does_without() {
    let folder = foreseen();
    for context in [9, 10, 11, 12, 70] {
        let open = |spec_type| {
            let options = Options { context: Some(context), ..options(spec_type, 4) };
            model(folder.path(), &options)
        };
        let (expected, _) = answer(&mut open(SpecType::Off), "0123", &greedy(400));
        let (got, _) = answer(&mut open(SpecType::Mtp), "0123", &greedy(400));
        assert_eq!(got, expected, "{context}");
    }
}

#[test]
fn what_is_foreseen_takes_fewer_steps() {
    let folder = foreseen();
    let mut plain = model(folder.path(), &options(SpecType::Off, 1));
    let (expected, _) = answer(&mut plain, "0123", &greedy(100));
    for draft_max in [1, 4] {
        let mut drafting = model(folder.path(), &options(SpecType::Mtp, draft_max));
        let (got, [drafted, accepted]) = answer(&mut drafting, "0123", &greedy(100));
        assert_eq!((&got, drafted), (&expected, accepted), "{draft_max}");
        // A step gives all that it verifies and one more.
        let steps = 99 - accepted;
        assert!(steps <= 99 / (draft_max as u64 + 1) + 2, "{steps} {draft_max}");
    }
}

#[test]
fn a_scheduler_drafts_with_the_layer() {
    let folder = foreseen();
    let request = || moeflux::Request {
        prompt: vec![15, 16, 17],
        options: DecodingOptions { logprobs: Some(2), ..greedy(50) },
        ..moeflux::Request::default()
    };
    let (expected, _) = events(folder.path(), SpecType::Off, request());
    let (got, end) = events(folder.path(), SpecType::Mtp, request());
    assert_eq!(format!("{got:?}"), format!("{expected:?}"));
    let usage = end.unwrap().usage;
    assert!(usage.drafted_tokens > 30 && usage.drafted_tokens == usage.accepted_tokens, "{usage:?}");
}

// Hidden states are noted of every sequence of a batch, for the one that is left.
#[test]
fn a_scheduler_drafts_on_a_gpu_after_several_sequences() {
    let folder = foreseen();
    let answers = |spec_type| {
        let options = Options { sequences: 2, ..options(spec_type, 4) };
        let model = on(devices()[1], folder.path(), &options);
        let scheduler = Scheduler::start(model, SchedulerOptions::default()).unwrap();
        let submit = |first: u32, max_tokens| {
            let prompt = vec![first, 16, 17];
            let request =
                moeflux::Request { prompt, options: greedy(max_tokens), ..moeflux::Request::default() };
            scheduler.submit(request).unwrap()
        };
        let handles = [submit(15, 50), submit(20, 12)];
        handles.map(|handle| {
            let mut tokens = vec![];
            let mut end = None;
            for event in handle {
                match event {
                    Event::Piece(piece) => tokens.extend(piece.token),
                    Event::Progress(_) => {}
                    Event::Done(done) => end = Some(done.usage),
                    Event::Failed(error) => panic!("{error}"),
                }
            }
            (tokens, end.unwrap())
        })
    };
    let [expected, got] = [SpecType::Off, SpecType::Mtp].map(answers);
    for ((expected, _), (got, _)) in expected.iter().zip(&got) {
        assert_eq!(got, expected);
    }
    let usage = &got[0].1;
    assert!(usage.drafted_tokens > 10 && usage.drafted_tokens == usage.accepted_tokens, "{usage:?}");
}

#[test]
fn sessions_keep_what_is_drafted_from() {
    let backend = CpuBackend::new(2, None).unwrap();
    for name in ["deepseek_v3_basic", "qwen3_next_basic"] {
        check_sessions(&backend, name, |a, b| support::bits(a) == support::bits(b));
    }
}

// Prompts in other pieces have other bits there.
#[test]
fn sessions_on_a_gpu_keep_what_is_drafted_from() {
    check_sessions(&emulator_with(devices()[1]), "qwen3_next_basic", |a, b| error(a, b) < 1e-4);
}

/// `same` is whether logits are those of the same tokens.
fn check_sessions(backend: &dyn Backend, name: &str, same: fn(&[f32], &[f32]) -> bool) {
    let (folder, golden) = (with_layer(name), golden(name));
    let tokens = &golden.tokens;
    let (next, first) = tokens.split_last().unwrap();
    let mut engine = open_on(backend, folder.path(), &exact(SpecType::Mtp));
    let (mut session, expected) = drafted(&mut engine, tokens, &[40], 2);
    let logits = |engine: &mut Engine, session: &mut Session| engine.draft_logits(session, *next, 2).unwrap();
    assert!(same(&logits(&mut engine, &mut session), &expected), "{name}: twice");

    let path = folder.path().join("saved");
    engine.save(&session, &path, "").unwrap();
    let mut other = open_on(backend, folder.path(), &exact(SpecType::Mtp));
    let mut loaded = other.session();
    other.load(&mut loaded, &path).unwrap();
    assert!(same(&logits(&mut other, &mut loaded), &expected), "{name}: loaded");
    // Files do not depend on what drafts.
    let mut plain = open_on(backend, folder.path(), &exact(SpecType::Off));
    let mut session_of_plain = plain.session();
    plain.load(&mut session_of_plain, &path).unwrap();
    assert_eq!(session_of_plain.tokens(), first);
    plain.save(&session_of_plain, &path, "").unwrap();
    other.load(&mut loaded, &path).unwrap();
    assert_eq!(loaded.tokens(), first);
    other.draft_logits(&mut loaded, *next, 2).unwrap();

    // A fork that goes on otherwise changes nothing of its origin, and drafts as if it had been alone.
    session.checkpoint();
    let mut fork = session.fork(first.len());
    engine.eval(&mut fork, &[1, 2, 3], Outputs::Last).unwrap();
    let forked = engine.draft_logits(&mut fork, 4, 2).unwrap();
    assert!(same(&logits(&mut engine, &mut session), &expected), "{name}: beside a fork");
    let alone = [first, &[1, 2, 3, 4]].concat();
    let (_, alone) = drafted(&mut engine, &alone, &[], 2);
    assert!(same(&forked, &alone), "{name}: a fork");
    // Back to a checkpoint.
    engine.eval(&mut session, &[9, 8, 7], Outputs::Last).unwrap();
    session.restore(first.len()).unwrap();
    assert!(same(&logits(&mut engine, &mut session), &expected), "{name}: restored");
    // Elsewhere one hidden state is gone, and what is drafted is something else, but no error.
    engine.truncate(&mut session, 50).unwrap();
    let cut = engine.draft_logits(&mut session, tokens[50], 2).unwrap();
    assert!(cut.len() == 2 * golden.vocab_size && cut.iter().all(|l| l.is_finite()), "{name}");
}

#[test]
fn a_checkpoint_without_such_a_layer_is_named() {
    let backend = CpuBackend::new(2, None).unwrap();
    let open = |path: &Path, spec_type| {
        Engine::open(path, &backend, &Options { spec_type, ..Options::default() }, |_, _| ())
    };
    for (name, lacks) in [
        ("deepseek_v3_basic", "model.layers.3.eh_proj.weight"),
        ("qwen3_moe_basic", "no layer"),
        ("qwen3_next_basic", "mtp.fc.weight"),
    ] {
        let path = fixtures().join("hf").join(name);
        let error = open(&path, SpecType::Mtp).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Option { option: "spec_type", .. }), "{text}");
        assert!(text.contains(name) && text.contains(lacks), "{text}");
        assert_eq!(open(&path, SpecType::Auto).unwrap().spec_type(), SpecType::Auto);
    }
    // A layer that is there but for a tensor is damage.
    let folder = with_layer("deepseek_v3_basic");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let rest = all.tensors().into_iter().filter(|(name, _)| name != "model.layers.3.hnorm.weight");
    let rest = safetensors::serialize(rest, None).unwrap();
    support::replace(&path, rest);
    for spec_type in [SpecType::Mtp, SpecType::Auto] {
        let error = open(folder.path(), spec_type).unwrap_err();
        assert!(matches!(&error, Error::MissingTensor { tensor, .. } if tensor.contains("hnorm")), "{error}");
    }
    open(folder.path(), SpecType::Off).unwrap();
}

#[test]
fn the_layer_is_in_the_budget() {
    let folder = with_layer("deepseek_v3_basic");
    let least = |spec_type| {
        let options = Options { spec_type, memory: Some(1), context: Some(128), ..Options::default() };
        let backend = CpuBackend::new(2, None).unwrap();
        match TextModel::open(folder.path(), &backend, &options, |_, _| ()) {
            Err(Error::Budget { minimum, .. }) => minimum,
            other => panic!("{other:?}"),
        }
    };
    let (off, auto, mtp) = (least(SpecType::Off), least(SpecType::Auto), least(SpecType::Mtp));
    assert!(off < mtp && auto == off, "{off} {auto} {mtp}");
    // Unless it is asked for, it takes nothing that experts could have.
    let open = |spec_type, memory| {
        model(folder.path(), &Options { memory, context: Some(128), ..options(spec_type, 4) })
    };
    let (expected, _) = answer(&mut open(SpecType::Off, None), "0123", &greedy(20));
    for (spec_type, memory, drafts) in
        [(SpecType::Mtp, Some(mtp), true), (SpecType::Auto, Some(mtp), false), (SpecType::Auto, None, true)]
    {
        let mut model = open(spec_type, memory);
        let (got, _) = answer(&mut model, "0123", &greedy(20));
        assert_eq!((&got, model.engine.has_draft_layer()), (&expected, drafts), "{spec_type}, {memory:?}");
    }
}

#[test]
fn the_layer_is_in_the_budget_of_a_gpu() {
    let folder = with_layer("glm4_moe_groups");
    let open = |spec_type, memory| {
        let options = Options { context: Some(128), chunk: Some(16), ..options(spec_type, 4) };
        let device = GpuOptions { memory: Some(memory), host_memory: true, ..GpuOptions::default() };
        TextModel::open(folder.path(), &emulator_with(device), &options, |_, _| ())
    };
    let least = |spec_type| match open(spec_type, 1) {
        Err(Error::DeviceBudget { minimum, .. }) => minimum,
        other => panic!("{other:?}"),
    };
    let (off, mtp) = (least(SpecType::Off), least(SpecType::Mtp));
    assert!(off < mtp, "{off} {mtp}");
    // Unless it is asked for, it has what all experts of the model leave, or nothing.
    assert!(least(SpecType::Auto) < mtp);
    let (expected, _) = answer(&mut open(SpecType::Off, off).unwrap(), "0123", &greedy(12));
    for (spec_type, memory, drafts) in [
        (SpecType::Mtp, mtp, true),
        (SpecType::Auto, least(SpecType::Auto), false),
        (SpecType::Auto, mtp, false),
        (SpecType::Auto, 64 << 20, true),
    ] {
        let mut model = open(spec_type, memory).unwrap();
        let (got, _) = answer(&mut model, "0123", &greedy(12));
        assert_eq!((&got, model.engine.has_draft_layer()), (&expected, drafts), "{spec_type}, {memory}");
    }
}
