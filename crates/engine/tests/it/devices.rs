//! Layers in a row over several emulated devices, or experts divided over them: the bits are those of one, and so are sessions;
//! what is wrong with a device names it.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::support::cover::{check_each, cover};
use crate::support::{Fixture, bits, f32_options, is_tried, open, sample};
use moeflux::{Begun, Engine, Error, Options, Outputs, Overlap, Part, Session, Split, TokenSet};
use moeflux_compute::Error::{Device, DeviceMemory};
use moeflux_compute::backend::{Backend, Chosen};
use moeflux_compute::draw::Draw;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuDevice, GpuOptions, ProcessorShare};

/// Tokens of a prompt in parts, and single ones after it.
const PARTS: [usize; 5] = [5, 4, 1, 1, 1];
/// The same with a part of more rows than kernels of few rows take.
const LONG_PARTS: [usize; 4] = [9, 1, 1, 1];

fn emulator(options: GpuOptions) -> GpuBackend {
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// So many devices, each with layers.
fn row(count: usize, options: GpuOptions) -> GpuBackend {
    let device = |number| GpuDevice::new("emulator", number, None, || Ok(Box::new(Emulator::new(7))));
    GpuBackend::of_devices((0..count).map(device).collect(), GpuOptions { spread: true, ..options })
}

/// So many devices that divide the experts of every layer.
fn divided(count: usize) -> GpuBackend {
    let device = |number| GpuDevice::new("emulator", number, None, || Ok(Box::new(Emulator::new(7))));
    let options = GpuOptions { split: Split::Experts, ..GpuOptions::default() };
    GpuBackend::of_devices((0..count).map(device).collect(), options)
}

/// Bits of all logits.
fn logits(backend: &GpuBackend, fixture: &Fixture, options: &Options) -> Vec<u32> {
    logits_of(&PARTS, backend, fixture, options)
}

fn logits_of(parts: &[usize], backend: &GpuBackend, fixture: &Fixture, options: &Options) -> Vec<u32> {
    let mut engine = open(&fixture.path, backend, options);
    let (mut session, mut logits) = (engine.session(), vec![]);
    let mut tokens = &fixture.golden().tokens[..];
    for part in parts.iter().copied() {
        let (now, later) = tokens.split_at(part);
        let outputs = if part == 4 { Outputs::All } else { Outputs::Last };
        logits.extend(engine.eval(&mut session, now, outputs).unwrap_or_else(|e| panic!("{e}")));
        tokens = later;
    }
    bits(&logits)
}

fn same(fixture: &Fixture, one: &GpuBackend, several: &GpuBackend, options: &Options) {
    let expected = logits(one, fixture, options);
    let got = logits(several, fixture, options);
    let differ = got.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(differ, None, "{} on {}", fixture.name, several.describe());
}

/// Models that have every operation with each kind of what it takes. Layers are divided whatever they are made of.
#[test]
fn every_operation_has_the_bits_of_one_device() {
    let plain = GpuOptions::default();
    let fixtures = sample().into_iter().filter(|fixture| fixture.kind == "hf");
    check_each(&cover(fixtures, |traits| traits.operations.clone()), |turn, fixture| {
        if !is_tried(turn, 2) {
            return;
        }
        same(fixture, &emulator(plain), &row(3, plain), &Options::default());
    });
}

/// With a shared expert, with biases, weighted at their input, with some that return what they take, and normed;
/// also where one device holds more than another.
#[test]
fn divided_experts_have_the_bits_of_one_device() {
    for (name, counts) in [
        ("gguf/qwen3_moe_q4_k_m", &[2, 3][..]),
        ("gguf/gpt_oss_mxfp4", &[3]),
        ("gguf/deepseek_v3_q8_0", &[2]),
        ("hf/llama4_basic", &[2]),
        ("hf/longcat_flash_zeros", &[3]),
        ("hf/muse_spark_basic", &[2]),
    ] {
        let (fixture, one) = (Fixture::named(name), emulator(GpuOptions::default()));
        let of = |backend: &GpuBackend| logits_of(&LONG_PARTS, backend, &fixture, &Options::default());
        let expected = of(&one);
        for count in counts {
            assert!(of(&divided(*count)) == expected, "{name} on {count}");
        }
    }
}

/// One GPU, and two that divide experts, where there are two.
#[cfg(target_os = "linux")]
fn gpus() -> Option<[GpuBackend; 2]> {
    use moeflux_compute::gpu::cuda::{Cuda, devices};
    let gpu = |number| GpuDevice::new("GPU", number, None, move || Ok(Box::new(Cuda::open(number, None)?)));
    let of = |count| {
        let options = GpuOptions { split: Split::Experts, ..GpuOptions::default() };
        GpuBackend::of_devices((0..count).map(gpu).collect(), options)
    };
    devices().ok().filter(|found| found.len() > 1).map(|_| [of(1), of(2)])
}

#[cfg(not(target_os = "linux"))]
fn gpus() -> Option<[GpuBackend; 2]> {
    None
}

#[test]
fn batches_of_many_sequences_have_the_bits_of_one_device() {
    let all = [("gguf/qwen3_moe_q4_k_m", 9), ("gguf/gpt_oss_mxfp4", 4), ("hf/qwen3_next_basic", 4)];
    for (_, (name, count)) in all.into_iter().enumerate().filter(|(turn, _)| is_tried(*turn, 2)) {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..];
        let options = Options { sequences: count, kv_tokens: Some(64 * count), ..Options::default() };
        for [one, several] in
            [Some([emulator(GpuOptions::default()), divided(2)]), gpus()].into_iter().flatten()
        {
            let expected = together(&mut open(&fixture.path, &one, &options), tokens, count);
            let mut engine = open(&fixture.path, &several, &options);
            assert_eq!(engine.overlap(count), None, "all devices have every batch");
            // Also when all lists are there.
            for _ in 0..if is_tried(count, 9) { 2 } else { 1 } {
                assert!(together(&mut engine, tokens, count) == expected, "{name} on {}", several.describe());
            }
        }
    }
}

/// However experts come to a device.
#[test]
fn streamed_experts_are_those_of_their_layers() {
    let processor = Some(ProcessorShare { threads: 2, part: Some(0.5) });
    let tiered = GpuOptions { expert_slots: Some(4), host_memory: true, processor, ..GpuOptions::default() };
    let exchanging = GpuOptions { expert_slots: Some(5), processor, ..GpuOptions::default() };
    for name in ["gguf/qwen3_moe_q4_k_m", "gguf/deepseek_v3_q8_0", "hf/qwen3_next_basic"] {
        let fixture = Fixture::named(name);
        let few = Options { expert_cache: Some(5), ..Options::default() };
        same(&fixture, &emulator(GpuOptions::default()), &row(2, tiered), &Options::default());
        same(&fixture, &emulator(GpuOptions::default()), &row(2, exchanging), &few);
    }
}

/// Pages and states are in the model's order, however layers are divided.
#[test]
fn sessions_move_between_one_device_and_several() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["hf/qwen3_next_basic", "gguf/gpt_oss_mxfp4", "gguf/deepseek_v3_q8_0"] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..12];
        let [one, several] = [emulator(GpuOptions::default()), row(2, GpuOptions::default())];
        let divided = divided(2);
        let file = folder.path().join("session");
        let options = Options { sequences: 2, kv_tokens: Some(256), ..f32_options() };
        let mut logits = vec![];
        for (first, second) in [(&one, &several), (&several, &divided), (&divided, &one)] {
            let mut engine = open(&fixture.path, first, &options);
            let mut session = engine.session();
            engine.eval(&mut session, &tokens[..9], Outputs::Last).unwrap();
            engine.save(&session, &file, "").unwrap();
            let mut engine = open(&fixture.path, second, &options);
            let mut session = engine.session();
            engine.load(&mut session, &file).unwrap_or_else(|e| panic!("{name}: {e}"));
            let mut fork = session.fork(9);
            logits.push(bits(&engine.eval(&mut session, &tokens[9..], Outputs::All).unwrap()));
            logits.push(bits(&engine.eval(&mut fork, &tokens[9..], Outputs::All).unwrap()));
        }
        assert!(logits.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
    }
}

/// Two devices of so much memory.
fn limited(memory: [u64; 2], split: Split) -> GpuBackend {
    let device = |(number, memory): (usize, u64)| {
        GpuDevice::new("emulator", number, Some(memory), move || {
            Ok(Box::new(Emulator::new(7).with_memory(memory)) as _)
        })
    };
    let options = GpuOptions { host_memory: true, split, ..GpuOptions::default() };
    GpuBackend::of_devices(memory.into_iter().enumerate().map(device).collect(), options)
}

#[test]
fn errors_name_the_device() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let open = |backend: &GpuBackend| Engine::open(&fixture.path, backend, &f32_options(), |_, _| ());
    let Err(Error::DeviceBudget { device, minimum, .. }) = open(&limited([1000; 2], Split::Layers)) else {
        panic!("a thousand bytes each");
    };
    assert_eq!(device, "GPU 0, emulator");
    assert!(open(&limited([minimum; 2], Split::Layers)).is_ok(), "{minimum}");
    // With half of all experts and everything else on each.
    let Err(Error::DeviceBudget { device, minimum: whole, .. }) =
        open(&limited([minimum; 2], Split::Experts))
    else {
        panic!("{minimum} bytes for half of all experts");
    };
    assert!(device == "GPU 0, emulator" && whole > minimum, "{device}, {whole}");
    assert!(open(&limited([whole - 1; 2], Split::Experts)).is_err(), "{whole}");
    let engine = open(&limited([whole; 2], Split::Experts)).unwrap_or_else(|e| panic!("{whole}: {e}"));
    assert!(engine.backend().contains("experts of every layer over GPUs 0, 1"), "{}", engine.backend());
    // The second has less than it says.
    let small = |number| {
        GpuDevice::new("emulator", number, Some(1 << 30), move || {
            let memory = if number == 1 { 1000 } else { 1 << 30 };
            Ok(Box::new(Emulator::new(7).with_memory(memory)) as _)
        })
    };
    let spread = GpuOptions { spread: true, ..GpuOptions::default() };
    match open(&GpuBackend::of_devices(vec![small(0), small(1)], spread)) {
        Err(Error::Compute(DeviceMemory { device, .. })) => assert_eq!(device, "GPU 1, emulator"),
        other => panic!("{:?}", other.err()),
    }
    // A kernel of the second fails.
    let faulty = |number| {
        GpuDevice::new("emulator", number, None, move || {
            Ok(Box::new(if number == 3 { Emulator::with_fault(7, "early") } else { Emulator::new(7) }) as _)
        })
    };
    let backend = GpuBackend::of_devices(vec![faulty(2), faulty(3)], spread);
    let mut engine = Engine::open(&fixture.path, &backend, &Options::default(), |_, _| ()).unwrap();
    let mut session = engine.session();
    match engine.eval(&mut session, &[5], Outputs::Last) {
        Err(Error::Compute(Device { reason })) => assert!(reason.starts_with("GPU 3: "), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(session.tokens(), [] as [u32; 0]);
}

/// A token of each of these sequences.
fn parts<'a>(sessions: &'a mut [Session], of: &[usize], next: &'a [u32]) -> Vec<Part<'a>> {
    let of = sessions.iter_mut().zip(next.chunks(1)).enumerate().filter(|(index, _)| of.contains(index));
    of.map(|(_, (session, tokens))| Part { session, tokens, outputs: Some(Outputs::Last) }).collect()
}

/// Sessions of some tokens each, and the tokens that come next.
fn begun_sequences(engine: &mut Engine, tokens: &[u32], count: usize) -> (Vec<Session>, Vec<u32>) {
    let sessions = (0..count).map(|index| {
        let mut session = engine.session();
        engine.eval(&mut session, &tokens[..1 + index % 4], Outputs::Last).unwrap();
        session
    });
    (sessions.collect(), (0..count).map(|index| tokens[4 + index % 4]).collect())
}

fn token(chosen: &Chosen) -> u32 {
    match chosen {
        Chosen::Token(token) => *token,
        Chosen::Logits(logits) => panic!("{} logits", logits.len()),
    }
}

/// Gives sequences three more tokens each, in batches of these, as many of which are under way as there may be.
fn overlapped(
    engine: &mut Engine,
    sessions: &mut [Session],
    next: &mut [u32],
    (batches, devices): (&[Vec<usize>], usize),
) {
    let vocab_size = engine.model().graph.vocab_size();
    let mut ahead: VecDeque<(&[usize], Begun)> = VecDeque::new();
    let mut turns = batches.iter().cycle().take(3 * batches.len());
    loop {
        let of = turns.next();
        if let Some(of) = of {
            ahead.push_back((of, engine.begin(&mut parts(sessions, of, next)).unwrap()));
        }
        if of.is_some() && ahead.len() < devices.min(batches.len()) {
            continue;
        }
        let Some((of, begun)) = ahead.pop_front() else { return };
        let draws = || vec![Some(Draw::default()); of.len()];
        let mut ended = parts(sessions, of, next);
        let chosen = engine.end(begun, &mut ended, &mut || draws(), vocab_size).unwrap();
        of.iter().zip(&chosen).for_each(|(index, chosen)| next[*index] = token(chosen));
    }
}

/// Gives sequences three more tokens each, all in one batch: their tokens, and the bits of logits after one of them.
fn together(engine: &mut Engine, tokens: &[u32], count: usize) -> (Vec<Vec<u32>>, Vec<u32>) {
    let vocab_size = engine.model().graph.vocab_size();
    let (mut sessions, mut next) = begun_sequences(engine, tokens, count);
    let of: Vec<usize> = (0..count).collect();
    for _ in 0..3 {
        let mut all = parts(&mut sessions, &of, &next);
        let chosen = engine.eval_and_draw(&mut all, &mut || vec![Some(Draw::default()); count], vocab_size);
        next = chosen.unwrap().into_iter().map(Option::unwrap).collect();
    }
    let made = sessions.iter().map(|session| session.tokens().to_vec()).collect();
    (made, bits(&engine.eval(&mut sessions[2], &[next[2]], Outputs::Last).unwrap()))
}

#[test]
fn batches_under_way_are_those_of_one_after_the_other() {
    let options = Options { sequences: 4, kv_tokens: Some(512), ..Options::default() };
    for (name, counts) in
        [("hf/qwen3_next_basic", &[3][..]), ("gguf/gpt_oss_mxfp4", &[2]), ("gguf/qwen3_moe_q4_k_m", &[2, 3])]
    {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..];
        let mut one = open(&fixture.path, &emulator(GpuOptions::default()), &options);
        assert_eq!(one.overlap(4), None, "one device");
        let (of_one, last) = together(&mut one, tokens, 4);
        for &count in counts {
            let mut engine = open(&fixture.path, &row(count, GpuOptions::default()), &options);
            let Some(Overlap { batches: devices, rows }) = engine.overlap(4) else { panic!("{name}") };
            assert!((2..=count).contains(&devices) && rows == 2, "{name}");
            assert_eq!(engine.overlap(1), None, "{name}");
            // Alike, and of other sizes; more than can be under way, and fewer.
            let ways = [&[vec![0, 2], vec![1, 3]][..], &[vec![3], vec![0, 1], vec![2]]];
            for (_, batches) in ways.into_iter().enumerate().filter(|(way, _)| is_tried(count + way, 2)) {
                let (mut sessions, mut next) = begun_sequences(&mut engine, tokens, 4);
                overlapped(&mut engine, &mut sessions, &mut next, (batches, devices));
                let got: Vec<Vec<u32>> = sessions.iter().map(|session| session.tokens().to_vec()).collect();
                assert_eq!(got, of_one, "{name} on {count}, {batches:?}");
                let after = engine.eval(&mut sessions[2], &[next[2]], Outputs::Last).unwrap();
                assert_eq!(bits(&after), last, "{name} on {count}, {batches:?}");
            }
        }
    }
}

#[test]
fn one_batch_more_than_devices_is_refused_and_leaves_sessions_as_they_were() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let options = Options { sequences: 4, kv_tokens: Some(512), chunk: Some(4), ..Options::default() };
    let mut engine = open(&fixture.path, &row(2, GpuOptions::default()), &options);
    let (mut sessions, next) = begun_sequences(&mut engine, &fixture.golden().tokens, 4);
    let before: Vec<Vec<u32>> = sessions.iter().map(|session| session.tokens().to_vec()).collect();
    let [first, _second] = [0, 1].map(|of| engine.begin(&mut parts(&mut sessions, &[of], &next)).unwrap());
    // What evaluates at once is refused, and a third.
    let error = engine.eval(&mut sessions[3], &[1], Outputs::Last).unwrap_err().to_string();
    assert!(error.contains("another batch is under way"), "{error}");
    let error = engine.begin(&mut parts(&mut sessions, &[2], &next)).unwrap_err().to_string();
    assert!(error.contains("every device has a batch under way"), "{error}");
    let mut only = parts(&mut sessions, &[0], &next);
    let error = engine.end(first, &mut only, &mut || vec![None], 10).unwrap_err().to_string();
    assert!(error.contains("no batch is under way"), "{error}");
    let error = engine.begin(&mut []).unwrap_err().to_string();
    assert!(error.contains("1 to 4 parts of one token"), "{error}");
    assert!(sessions.iter().zip(&before).all(|(session, before)| session.tokens() == before));
    engine.eval(&mut sessions[3], &[1], Outputs::Last).unwrap();
}

/// Logits that are wanted are those of the batch, not of what follows it; and a draw that no token is left for is an error.
#[test]
fn a_batch_ends_with_its_own_logits() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let options = Options { sequences: 4, kv_tokens: Some(512), ..Options::default() };
    let mut engine = open(&fixture.path, &row(2, GpuOptions::default()), &options);
    let vocab_size = engine.model().graph.vocab_size();
    let (mut sessions, next) = begun_sequences(&mut engine, &fixture.golden().tokens, 4);
    let expected: Vec<u32> = {
        let mut fork = sessions[1].fork(sessions[1].position());
        bits(&engine.eval(&mut fork, &next[1..2], Outputs::Last).unwrap())
    };
    let [first, second] =
        [[0, 1], [2, 3]].map(|of| engine.begin(&mut parts(&mut sessions, &of, &next)).unwrap());
    let mut both = parts(&mut sessions, &[0, 1], &next);
    let chosen = engine.end(first, &mut both, &mut || vec![Some(Draw::default()), None], vocab_size).unwrap();
    match &chosen[..] {
        [Chosen::Token(_), Chosen::Logits(logits)] => assert_eq!(bits(logits), expected),
        other => panic!("{other:?}"),
    }
    let none = Draw { allowed: Some(Arc::new(TokenSet::none(vocab_size))), ..Draw::default() };
    let mut both = parts(&mut sessions, &[2, 3], &next);
    let error = engine.end(second, &mut both, &mut || vec![Some(none.clone()); 2], vocab_size).unwrap_err();
    assert!(error.to_string().contains("no token can be chosen"), "{error}");
    assert_eq!([sessions[0].position(), sessions[2].position()], [2, 3]);
    engine.eval(&mut sessions[2], &next[2..3], Outputs::Last).unwrap();
}
