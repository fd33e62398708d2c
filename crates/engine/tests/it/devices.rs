//! Layers in a row over several emulated devices: the bits are those of one, and so are sessions; what is wrong with a device
//! names it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::support::{Fixture, bits, f32_options, open, sample};
use moeflux::{Engine, Error, Options, Outputs};
use moeflux_compute::Error::{Device, DeviceMemory};
use moeflux_compute::backend::Backend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuDevice, GpuOptions, ProcessorShare};

/// Tokens of a prompt in parts, and single ones after it.
const PARTS: [usize; 5] = [5, 4, 1, 1, 1];

fn emulator(options: GpuOptions) -> GpuBackend {
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// So many devices, each with layers.
fn row(count: usize, options: GpuOptions) -> GpuBackend {
    let device = |number| GpuDevice::new("emulator", number, None, || Ok(Box::new(Emulator::new(7))));
    GpuBackend::of_devices((0..count).map(device).collect(), GpuOptions { spread: true, ..options })
}

/// Bits of all logits.
fn logits(backend: &GpuBackend, fixture: &Fixture, options: &Options) -> Vec<u32> {
    let mut engine = open(&fixture.path, backend, options);
    let (mut session, mut logits) = (engine.session(), vec![]);
    let mut tokens = &fixture.golden().tokens[..];
    for part in PARTS {
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

#[test]
fn every_family_has_the_bits_of_one_device() {
    let mut fixtures = sample();
    // Layers are divided whatever their weights are encoded as.
    fixtures.retain(|fixture| fixture.kind == "hf");
    let next = AtomicUsize::new(0);
    let take = || fixtures.get(next.fetch_add(1, Ordering::Relaxed));
    let plain = GpuOptions::default();
    let check = |fixture: &Fixture| same(fixture, &emulator(plain), &row(3, plain), &Options::default());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| std::iter::from_fn(take).for_each(check));
        }
    });
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
        let file = folder.path().join("session");
        let options = Options { sequences: 2, kv_tokens: Some(256), ..f32_options() };
        let mut logits = vec![];
        for (first, second) in [(&one, &several), (&several, &one)] {
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
fn limited(memory: [u64; 2]) -> GpuBackend {
    let device = |(number, memory): (usize, u64)| {
        GpuDevice::new("emulator", number, Some(memory), move || {
            Ok(Box::new(Emulator::new(7).with_memory(memory)) as _)
        })
    };
    let options = GpuOptions { host_memory: true, ..GpuOptions::default() };
    GpuBackend::of_devices(memory.into_iter().enumerate().map(device).collect(), options)
}

#[test]
fn errors_name_the_device() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let open = |backend: &GpuBackend| Engine::open(&fixture.path, backend, &f32_options(), |_, _| ());
    let Err(Error::DeviceBudget { device, minimum, .. }) = open(&limited([1000; 2])) else {
        panic!("a thousand bytes each");
    };
    assert_eq!(device, "GPU 0, emulator");
    assert!(open(&limited([minimum; 2])).is_ok(), "{minimum}");
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
