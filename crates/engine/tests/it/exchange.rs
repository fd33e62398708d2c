//! A device and a host that together hold more experts than each alone: what comes to one leaves the other.

use std::sync::Arc;

use moeflux::checkpoint::Checkpoint;
use moeflux::error::size;
use moeflux::{Engine, Error, Minima, Options, Outputs, models};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions, ProcessorShare};

use crate::support::faulty::{Fate, Fates, Faulty};
use crate::support::{Fixture, all_are_tried, bits, f32_options, is_tried};

const CONTEXT: usize = 28;
/// Prompts, and single tokens after them.
const STEPS: [std::ops::Range<usize>; 6] = [0..15, 15..16, 16..17, 17..18, 18..26, 26..27];

fn options(memory: Option<u64>) -> Options {
    Options { context: Some(CONTEXT), chunk: Some(20), memory, ..f32_options() }
}

/// A device with so much memory beside the host's.
fn device_of(memory: u64) -> GpuBackend {
    let options = GpuOptions { memory: Some(memory), host_memory: true, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, move || Ok(Box::new(Emulator::new(7).with_memory(memory))))
}

fn open(fixture: &Fixture, memory: u64, host: Option<u64>) -> moeflux::Result<Engine> {
    Engine::open(&fixture.path, &device_of(memory), &options(host), |_, _| ())
}

/// The least that a device and a host must have. Whichever is too small, the error names both.
fn least(fixture: &Fixture) -> (u64, u64) {
    let Err(Error::Budget { minimum: host, device: Some(device), .. }) = open(fixture, 1 << 30, Some(1000))
    else {
        panic!("a host of a thousand bytes");
    };
    let error = open(fixture, 1000, Some(host)).expect_err("a device of a thousand bytes");
    let told = error.to_string();
    assert!(told.contains(&size(device)) && told.contains(&size(host)), "{told}");
    let Error::DeviceBudget { budget: 1000, minimum, host: beside, .. } = error else { panic!("{told}") };
    assert_eq!((minimum, beside), (device, host));
    let checkpoint = Arc::new(Checkpoint::open(&fixture.path).unwrap());
    let model = models::record_for(checkpoint, Some(CONTEXT)).unwrap();
    let minima = Minima::new(&model, &device_of(1000), &options(None)).unwrap();
    assert_eq!(minima, Minima { host, device: Some(device) });
    (device, host)
}

fn tokens() -> Vec<u32> {
    (0..CONTEXT as u32).map(|i| (i * i * 5 + i * 11 + 3) % 47).collect()
}

fn logits(engine: &mut Engine) -> moeflux::Result<Vec<u32>> {
    let (mut session, mut logits) = (engine.session(), vec![]);
    for step in STEPS {
        logits.extend(engine.eval(&mut session, &tokens()[step], Outputs::Last)?);
    }
    Ok(bits(&logits))
}

/// Encodings of several sizes; separate and fused projections; experts of which a device cannot give back the form.
const FIXTURES: [&str; 4] =
    ["gguf/qwen3_moe_mixed", "hf/qwen3_moe_basic", "hf/gpt_oss_mxfp4", "gguf/qwen3_moe_q4_k_m"];

#[test]
fn any_pair_of_budgets_from_the_least_on_gives_the_same_bits() {
    let mut random = 11u64;
    let mut part = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % 130
    };
    for (turn, name) in FIXTURES.into_iter().enumerate() {
        let fixture = Fixture::named(name);
        let (device, host) = least(&fixture);
        assert!(open(&fixture, device - 1, Some(host)).is_err(), "{name}");
        assert!(open(&fixture, device, Some(host - 1)).is_err(), "{name}");
        let mut whole = open(&fixture, 1 << 30, None).unwrap();
        let experts = whole.experts().store().total_bytes();
        let resident = logits(&mut whole).unwrap();
        let pairs = [(0, 0), (100, 0), (0, 100)].into_iter().chain((0..2).map(|_| (part(), part())));
        let pairs = pairs.enumerate().filter(|(number, _)| is_tried(turn + number, 2));
        for (_, (of_device, of_host)) in pairs {
            let (device, host) = (device + experts * of_device / 100, host + experts * of_host / 100);
            let got = open(&fixture, device, Some(host)).and_then(|mut engine| logits(&mut engine));
            let got = got.unwrap_or_else(|error| panic!("{name}, device {device}, host {host}: {error}"));
            assert!(got == resident, "{name}, device {device}, host {host}");
        }
    }
}

/// A device with slots for so many experts and a host with so many more, which reads as `fates` say.
fn with_slots(fixture: &Fixture, device: usize, host: usize) -> (Engine, Fates) {
    let gpu = GpuOptions { expert_slots: Some(device), ..GpuOptions::default() };
    reading(fixture, gpu, Options { expert_cache: Some(host), ..options(None) })
}

/// The same with activations of eight bits, where the processor computes half of what is at hand.
fn sharing(fixture: &Fixture, device: usize, host: usize) -> (Engine, Fates) {
    let processor = Some(ProcessorShare { threads: 2, part: Some(0.5) });
    let gpu = GpuOptions { expert_slots: Some(device), processor, ..GpuOptions::default() };
    let activations = Options::default().activations;
    reading(fixture, gpu, Options { expert_cache: Some(host), activations, ..options(None) })
}

fn reading(fixture: &Fixture, gpu: GpuOptions, options: Options) -> (Engine, Fates) {
    let backend = GpuBackend::new("emulator", gpu, || Ok(Box::new(Emulator::new(7))));
    let model =
        models::record_for(Arc::new(Checkpoint::open(&fixture.path).unwrap()), options.context).unwrap();
    let fates = Fates::default();
    (Engine::new(model, &backend, &options, Faulty::new(&fates), |_, _| ()).unwrap(), fates)
}

/// A device with slots for half of the experts and a host with slots for the rest and those of one layer: those that come
/// are still there when those that leave arrive.
fn half_and_half(fixture: &Fixture) -> (Engine, Fates) {
    let model = models::record(Arc::new(Checkpoint::open(&fixture.path).unwrap())).unwrap();
    let sets = model.graph.expert_sets();
    let experts: usize = sets.iter().map(|set| set.experts).sum();
    let most = sets.iter().map(|set| set.experts).max().unwrap_or(0);
    with_slots(fixture, experts / 2, experts - experts / 2 + most)
}

#[test]
fn what_both_can_hold_is_read_once() {
    for name in ["hf/qwen3_moe_basic", "gguf/qwen3_moe_q4_k_m"] {
        let fixture = Fixture::named(name);
        let (mut whole, _) = with_slots(&fixture, 1000, 2);
        let expected = logits(&mut whole).unwrap();
        let (mut engine, _) = half_and_half(&fixture);
        engine.fill_experts().unwrap();
        let all = engine.experts().store().total_bytes();
        assert_eq!(engine.take_stats().cache.bytes_read, all, "{name}");
        assert!(logits(&mut engine).unwrap() == expected, "{name}");
        let counts = engine.device_counts().unwrap();
        assert_eq!(engine.take_stats().cache.bytes_read, 0, "{name}, {counts:?}");
        assert!(counts.fetched > 0 && counts.fetched < counts.experts, "{name}, {counts:?}");
    }
}

/// Engines that `open` gives, with one of these reads failing, coming short or coming late: how many evaluations failed, and
/// how many experts the processor computed. The next evaluation gives what the first of a resident model does.
fn failing(open: impl Fn(usize, usize) -> (Engine, Fates), reads: &[usize]) -> (usize, u64) {
    let expected = logits(&mut open(1000, 2).0).unwrap();
    let (mut failures, mut computed) = (0, 0);
    for (turn, fate) in [Fate::Failed, Fate::Short, Fate::Late].into_iter().enumerate() {
        for (_, read) in reads.iter().enumerate().filter(|(number, _)| is_tried(turn + number, 2)) {
            let (mut engine, fates) = open(6, 6);
            fates.nth(*read, fate);
            match logits(&mut engine) {
                Ok(logits) => assert!(logits == expected, "{fate:?} of {read}"),
                Err(error) => {
                    assert!(error.to_string().contains("expert "), "{error}");
                    failures += 1;
                    assert!(logits(&mut engine).unwrap() == expected, "after {fate:?} of {read}");
                }
            }
            computed += engine.device_counts().unwrap().computed;
        }
    }
    (failures, computed)
}

/// An error ends its evaluation; what had been moved until then is where the next one looks for it.
#[test]
fn a_read_that_fails_leaves_device_and_host_in_order() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let (failures, computed) =
        failing(|device, host| with_slots(&fixture, device, host), &[0, 1, 2, 6, 11, 17]);
    let expected = if all_are_tried() { 12 } else { 6 };
    assert_eq!((failures, computed), (expected, 0), "all that failed or came short were noticed");
}

/// The same where the processor has part: what is on its desk is not taken for the next batch's.
#[test]
fn a_read_that_fails_leaves_the_processors_desk_in_order() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let (failures, computed) = failing(|device, host| sharing(&fixture, device, host), &[0, 2, 9, 14, 20]);
    assert!(failures >= 3 && computed > 0, "{failures} failures, {computed} computed");
}

/// What failed to come is not on the device: slots that are empty are filled with it as with any other.
#[test]
fn what_failed_to_come_fills_empty_slots() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let expected = logits(&mut with_slots(&fixture, 1000, 2).0).unwrap();
    for read in [0, 3] {
        let (mut engine, fates) = half_and_half(&fixture);
        fates.nth(read, Fate::Failed);
        assert!(logits(&mut engine).is_err(), "read {read}");
        engine.fill_experts().unwrap();
        engine.take_stats();
        assert!(logits(&mut engine).unwrap() == expected, "after read {read}");
        let cache = engine.take_stats().cache;
        assert_eq!(cache.bytes_read, 0, "after read {read}: {cache:?}");
    }
}
