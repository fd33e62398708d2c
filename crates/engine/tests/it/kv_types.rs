//! Keys and values as 8-bit integers: every family works or is refused by name, streamed as resident, on the processor as on
//! an emulated GPU; and sessions with them.

use crate::support::{Fixture, all, bits, f32_options, open};
use moeflux::{Engine, Error, Options, Outputs};
use moeflux_compute::backend::{Backend, KvType};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};

/// Tokens of a prompt, and those after it one at a time.
const PROMPT: usize = 15;
const SINGLE: usize = 3;

fn cpu() -> CpuBackend {
    CpuBackend::new(2, None).unwrap()
}

fn emulator(expert_slots: Option<usize>) -> GpuBackend {
    let options = GpuOptions { expert_slots, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

fn q8() -> Options {
    Options { kv_type: Some(KvType::Q8_0), ..f32_options() }
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut session = engine.session();
    let (prompt, rest) = tokens.split_at(tokens.len() - SINGLE);
    let mut out = engine.eval(&mut session, prompt, Outputs::All).unwrap();
    for token in rest {
        out.extend(engine.eval(&mut session, &[*token], Outputs::All).unwrap());
    }
    out
}

/// Largest difference over the largest value.
fn distance(got: &[f32], right: &[f32]) -> f32 {
    assert!(got.len() == right.len() && got.iter().all(|v| v.is_finite()));
    let largest = right.iter().fold(0f32, |m, v| m.max(v.abs()));
    got.iter().zip(right).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

/// Root of the mean squared difference, over that of the mean square.
fn mean_distance(got: &[f32], right: &[f32]) -> f64 {
    assert!(got.len() == right.len() && got.iter().all(|v| v.is_finite()));
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let differences = squares(&mut got.iter().zip(right).map(|(a, b)| a - b));
    (differences / squares(&mut right.iter().copied())).sqrt()
}

fn few() -> Options {
    Options { expert_cache: Some(2), ..q8() }
}

#[test]
fn every_family_takes_integers_or_says_what_does_not_fit() {
    let (mut taken, mut refused) = (0, 0);
    for fixture in all() {
        let golden = fixture.golden();
        let tokens = &golden.tokens[..PROMPT + SINGLE];
        match Engine::open(&fixture.path, &cpu(), &Options { context: Some(64), ..q8() }, |_, _| ()) {
            Ok(mut engine) => {
                taken += 1;
                let got = logits(&mut engine, tokens);
                let right = &golden.logits[..tokens.len() * golden.vocab_size];
                let off = mean_distance(&got, right);
                println!("{}: {off:.1e}", fixture.name);
                // Where a router is undecided, others are chosen; what is read wrongly is off by more than its size.
                assert!(off < 0.1, "{}: {off:.1e}", fixture.name);
            }
            Err(Error::Compute(moeflux_compute::Error::KvBlocks { what, size, .. })) => {
                refused += 1;
                assert!(what.ends_with("head_dim") || what == "kv_lora_rank", "{}: {what}", fixture.name);
                assert!(size % 32 != 0, "{}: {what} {size}", fixture.name);
            }
            Err(other) => panic!("{}: {other}", fixture.name),
        }
    }
    assert!(taken >= 5 && refused >= 5, "{taken} {refused}");
}

#[test]
fn a_head_that_is_not_of_whole_blocks_is_refused_by_name_everywhere() {
    let path = Fixture::named("hf/qwen3_moe_basic").path;
    for backend in [&cpu() as &dyn Backend, &emulator(None)] {
        let refused = Engine::open(&path, backend, &q8(), |_, _| ());
        let error = refused.expect_err("heads that are not a multiple of 32").to_string();
        assert!(error.contains("q8_0") && error.contains("head_dim is"), "{error}");
    }
}

/// Grouped queries with recurrent layers and without, and with windows.
const MODELS: [&str; 3] = ["mlx/qwen3_moe_4bit_dense", "mlx/qwen3_next_4bit", "mlx/step3p5_4bit"];

#[test]
fn integers_are_the_same_streamed_and_on_a_device() {
    for name in MODELS {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..PROMPT + SINGLE];
        let resident = logits(&mut open(&fixture.path, &cpu(), &q8()), tokens);
        let streamed = logits(&mut open(&fixture.path, &cpu(), &few()), tokens);
        assert_eq!(bits(&streamed), bits(&resident), "{name}");
        let one = CpuBackend::new(1, None).unwrap();
        assert_eq!(bits(&logits(&mut open(&fixture.path, &one, &q8()), tokens)), bits(&resident), "{name}");

        let device = logits(&mut open(&fixture.path, &emulator(None), &q8()), tokens);
        let off = distance(&device, &resident);
        println!("{name}: emulator and processor differ by {off:.1e}");
        // An element at the middle between two steps may fall to either side.
        assert!(off < 1e-2, "{name}: {off:.1e}");
        let streamed = logits(&mut open(&fixture.path, &emulator(Some(2)), &few()), tokens);
        assert_eq!(bits(&streamed), bits(&device), "{name}");
        let metal =
            GpuBackend::new("metal", GpuOptions::default(), || Ok(Box::new(Emulator::new(7).metal())));
        let off = distance(&logits(&mut open(&fixture.path, &metal, &q8()), tokens), &resident);
        assert!(off < 1e-2, "{name} on Metal: {off:.1e}");
    }
}

#[test]
fn sessions_with_integers_go_on_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    for name in MODELS {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..PROMPT + SINGLE];
        let (before, after) = tokens.split_at(PROMPT);
        for backend in [&cpu() as &dyn Backend, &emulator(None)] {
            let mut engine = open(&fixture.path, backend, &q8());
            let mut session = engine.session();
            engine.eval(&mut session, before, Outputs::Last).unwrap();
            engine.save(&session, &path, "").unwrap();
            let expected = engine.eval(&mut session, after, Outputs::All).unwrap();

            let mut engine = open(&fixture.path, backend, &q8());
            let mut session = engine.session();
            engine.load(&mut session, &path).unwrap();
            let got = engine.eval(&mut session, after, Outputs::All).unwrap();
            assert_eq!(bits(&got), bits(&expected), "{name}");

            for other in [KvType::F16, KvType::F32] {
                let options = Options { kv_type: Some(other), ..q8() };
                let mut engine = open(&fixture.path, backend, &options);
                let mut session = engine.session();
                match engine.load(&mut session, &path) {
                    Err(Error::SessionFile { what: "precision", .. }) => {}
                    unexpected => panic!("{name} {other}: {unexpected:?}"),
                }
                assert!(session.tokens().is_empty(), "{name} {other}");
            }
        }
    }
}
