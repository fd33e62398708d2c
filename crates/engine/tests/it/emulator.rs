//! Fixtures through the whole engine on an emulated GPU: logits agree with the goldens, with both texts of the kernels,
//! and are bit for bit the same whether all experts are on the device or two of them.

use std::collections::HashSet;

use crate::support::cover::{Traits, check_each, cover};
use crate::support::{Fixture, all, all_are_tried, bits, f32_options, is_tried, open};
use moeflux::checkpoint::Format;
use moeflux::synth::{Encoding, Plan, Recipe, Shape};
use moeflux::{Engine, Error, Options, Outputs};
use moeflux_compute::DType;
use moeflux_compute::backend::Backend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions, ProcessorShare};
use moeflux_compute::graph::MatrixSpec;

/// Tokens of a prompt: more than are evaluated row by row.
const PROMPT: usize = 10;
/// Tokens after it, one at a time: the second of a shape is recorded, and the third is the recording once more.
const SINGLE: usize = 3;
/// Models whose attention sees some tokens only: their prompts have more than those.
const CHOOSING: &[&str] = &["_dsa_", "v32_sparse", "glm5_next", "hy_v4", "minimax_m3", "dots3_note"];
const LONG_PROMPT: usize = 36;
/// As between the reference and transformers: f32 sums in another order.
const RELATIVE_ERROR: f32 = 5e-5;

fn emulator(expert_slots: Option<usize>) -> GpuBackend {
    let options = GpuOptions { expert_slots, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// A device with so many experts of each layer; the host has all.
fn tiered(slots: usize) -> GpuBackend {
    let options = GpuOptions { expert_slots: Some(slots), host_memory: true, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// The same, where the processor computes a part of the experts that are missing.
fn shared(slots: usize, part: Option<f32>) -> GpuBackend {
    let processor = Some(ProcessorShare { threads: 2, part });
    let options =
        GpuOptions { expert_slots: Some(slots), host_memory: true, processor, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// A device with so many experts in all; the others are in the host's cache, and the processor computes a part of those.
fn exchanging(slots: usize, part: Option<f32>) -> GpuBackend {
    let processor = Some(ProcessorShare { threads: 2, part });
    let options = GpuOptions { expert_slots: Some(slots), processor, ..GpuOptions::default() };
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

/// The device with the kernels' Metal text.
fn metal() -> GpuBackend {
    GpuBackend::new("metal", GpuOptions::default(), || Ok(Box::new(Emulator::new(7).metal())))
}

/// Logits of a prompt, then of single tokens.
fn logits(engine: &mut Engine, [prompt, rest]: [&[u32]; 2]) -> Vec<f32> {
    let mut session = engine.session();
    let mut out = engine.eval(&mut session, prompt, Outputs::All).unwrap_or_else(|e| panic!("{e}"));
    for token in rest {
        out.extend(engine.eval(&mut session, &[*token], Outputs::All).unwrap_or_else(|e| panic!("{e}")));
    }
    out
}

/// Agrees with the golden, if asked for by Metal's text too; and that streamed experts make no difference, in one of several ways.
fn check(turn: usize, fixture: &Fixture, [by_metal, streams]: [bool; 2]) {
    let golden = fixture.golden();
    let chooses = CHOOSING.iter().any(|part| fixture.name.contains(part));
    let prompt = if chooses { LONG_PROMPT } else { PROMPT };
    let tokens = |single: usize| [&golden.tokens[..prompt], &golden.tokens[prompt..prompt + single]];
    let right = &golden.logits[..(prompt + SINGLE) * golden.vocab_size];
    let largest = right.iter().fold(0f32, |m, v| m.max(v.abs()));
    let agrees = |backend: &GpuBackend, single: usize| {
        let got = logits(&mut open(&fixture.path, backend, &f32_options()), tokens(single));
        let right = &right[..(prompt + single) * golden.vocab_size];
        assert_eq!(got.len(), right.len());
        let error = got.iter().zip(right).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        println!("{}, {}: relative error {error:.1e}", fixture.name, backend.describe());
        assert!(got.iter().all(|v| v.is_finite()) && error < RELATIVE_ERROR, "{}: {error:.1e}", fixture.name);
        got
    };
    if by_metal && is_tried(turn, 2) {
        // What is recorded is the same list of dispatches, whatever the text.
        agrees(&metal(), 1);
    }
    let got = agrees(&emulator(None), SINGLE);
    let tokens = tokens(SINGLE);
    if !streams {
        return;
    }
    // The host brings experts two at a time, or the device does.
    if is_tried(turn, 3) {
        let few = Options { expert_cache: Some(2), ..f32_options() };
        same_bits(fixture, tokens, (&emulator(Some(2)), &few), &got);
    }
    let ways = [shared(4, Some(0.5)), tiered(4)].into_iter().enumerate();
    let ways: Vec<_> = ways.filter(|(way, _)| is_tried(turn + 2 - way, 3)).map(|(_, way)| way).collect();
    if ways.is_empty() {
        return;
    }
    // With activations of eight bits, where the encoding has them: plain floats' experts are the same kernels.
    let fast = Options::default();
    let mut engine = open(&fixture.path, &emulator(None), &fast);
    let sets = engine.model().graph.expert_sets();
    let is_float = |matrix: MatrixSpec| matches!(matrix.dtype, DType::F32 | DType::F16 | DType::BF16);
    let are_floats = sets.iter().all(|set| set.matrices().all(is_float));
    if are_floats {
        return same_bits(fixture, tokens, (&tiered(2), &f32_options()), &got);
    }
    let got_fast = logits(&mut engine, tokens);
    assert!(got_fast.iter().all(|v| v.is_finite()), "{}", fixture.name);
    // Four are enough for a token of most models, so that the device decides; with fewer the host does.
    for backend in ways {
        same_bits(fixture, tokens, (&backend, &fast), &got_fast);
    }
}

/// Logits are `resident` when few experts are on the device.
fn same_bits(
    fixture: &Fixture,
    tokens: [&[u32]; 2],
    (backend, options): (&GpuBackend, &Options),
    resident: &[f32],
) {
    let streamed = logits(&mut open(&fixture.path, backend, options), tokens);
    let differ = bits(&streamed).iter().zip(bits(resident)).position(|(a, b)| *a != b);
    assert_eq!(
        differ, None,
        "{}, {:?}, {:?} experts",
        fixture.name, options.activations, options.expert_cache
    );
}

/// Logits of single tokens, each after the others.
fn one_by_one(backend: &GpuBackend, options: &Options, fixture: &Fixture, tokens: &[u32]) -> Vec<f32> {
    let mut engine = open(&fixture.path, backend, options);
    let mut session = engine.session();
    let mut logits = |token: &u32| engine.eval(&mut session, &[*token], Outputs::Last);
    tokens.iter().flat_map(|token| logits(token).unwrap_or_else(|e| panic!("{e}"))).collect()
}

/// The device gives slots by how often experts were chosen, and here it has no more than a token needs, after a history in
/// which most choices fell on a few: one that is needed now may be the least worthy, and must stay.
#[test]
fn what_a_token_needs_stays_whatever_it_is_worth() {
    for (name, slots, options) in
        [("hf/qwen3_moe_basic", 2, f32_options()), ("gguf/qwen3_moe_q8_0", 2, Options::default())]
    {
        let fixture = Fixture::named(name);
        let common = fixture.golden().tokens[0];
        let often = std::iter::repeat_n(common, 8);
        let tokens: Vec<u32> = often.chain(fixture.golden().tokens[..8].iter().copied()).collect();
        let resident = one_by_one(&emulator(None), &options, &fixture, &tokens);
        let streamed = one_by_one(&tiered(slots), &options, &fixture, &tokens);
        let differ = bits(&streamed).iter().zip(bits(&resident)).position(|(a, b)| *a != b);
        assert_eq!(differ, None, "{name}, {:?}", options.activations);
    }
}

/// Sessions grow beyond a page, and others come with states of their own: what was there moves along. In between, prompts
/// and single tokens take turns at the tiers.
#[test]
fn pools_that_grow_keep_what_they_hold() {
    for (name, backend) in [("hf/qwen3_next_basic", emulator(None)), ("gguf/qwen3_moe_q8_0", tiered(2))] {
        let fixture = Fixture::named(name);
        let tokens: Vec<u32> = (0..80).map(|i| (i * i * 5 + i * 11 + 3) % 61).collect();
        let steps = [0..1, 1..2, 2..50, 50..51, 51..52, 52..62, 62..66, 66..67, 67..80];
        let run = |backend: &GpuBackend, others: bool| {
            let mut engine =
                open(&fixture.path, backend, &Options { context: Some(128), sequences: 3, ..f32_options() });
            let (mut session, mut rest) = (engine.session(), vec![]);
            let mut logits = vec![];
            for step in &steps {
                let part = &tokens[step.clone()];
                logits
                    .extend(engine.eval(&mut session, part, Outputs::Last).unwrap_or_else(|e| panic!("{e}")));
                if others && rest.len() < 2 {
                    let mut other = engine.session();
                    engine.eval(&mut other, &tokens[40..43], Outputs::Last).unwrap_or_else(|e| panic!("{e}"));
                    rest.push(other);
                }
            }
            bits(&logits)
        };
        let expected = run(&emulator(None), false);
        assert!(run(&backend, true) == expected, "{name}");
    }
}

/// Whoever computes an expert, its bits are the same: of every encoding that the processor takes, for one token and several.
#[test]
fn nobody_can_tell_who_computed_an_expert() {
    for (name, parts) in [
        ("gguf/qwen3_moe_q4_k_m", &[Some(0.6), Some(1.0), None][..]),
        ("gguf/qwen3_moe_q8_0", &[Some(1.0)]),
        ("gguf/mixtral_q8_0", &[None]),
        ("gguf/gpt_oss_mxfp4", &[Some(0.6), None]),
        ("gguf/deepseek_v3_q8_0", &[Some(0.6)]),
        ("gguf/deepseek_v4_mxfp4", &[Some(1.0)]),
        ("hf/muse_spark_int4", &[Some(0.6)]),
    ] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..14];
        let run = |backend: &GpuBackend, expert_cache: Option<usize>| {
            let mut engine = open(&fixture.path, backend, &Options { expert_cache, ..Options::default() });
            let mut session = engine.session();
            let mut logits = vec![];
            for batch in [1, 1, 1, 2, 1, 8] {
                let first = session.tokens().len();
                let batch = &tokens[first..first + batch];
                logits
                    .extend(engine.eval(&mut session, batch, Outputs::All).unwrap_or_else(|e| panic!("{e}")));
            }
            let counts = engine.device_counts().expect("a device");
            (bits(&logits), counts.computed)
        };
        let (expected, _) = run(&emulator(None), None);
        for (n, &part) in parts.iter().enumerate() {
            let mut all = [0; 2];
            // Host memory has all experts; or it reads some, and the device has room for those of a token or of several.
            let placements = [(2, None), (4, None), (5, Some(4)), (10, Some(5))];
            let of = if n == 0 && name.contains("qwen3") { 1 } else { 2 };
            let placements = placements.into_iter().enumerate().filter(|(i, _)| is_tried(*i, of));
            for (_, (slots, cached)) in placements {
                let backend = if cached.is_some() { exchanging(slots, part) } else { shared(slots, part) };
                let (got, computed) = run(&backend, cached);
                let differ = got.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(differ, None, "{name}, {part:?}, {slots}: {computed} by the processor");
                all[usize::from(cached.is_some())] += computed;
            }
            let some = all.map(|computed| computed > 0);
            assert!(part.is_none() || some == [true; 2], "{name}, {part:?}: {all:?}");
        }
    }
}

/// The same of encodings whose codes have several forms, and of floats.
#[test]
fn nobody_can_tell_who_computed_an_expert_of_any_encoding() {
    for (turn, &encoding) in Encoding::ALL.iter().enumerate() {
        let shape = Shape::by_name("tiny").expect("a shape");
        let recipe = Recipe { layers: 1, shape, encoding, seed: 7, router_skew: 0.0 };
        let folder = tempfile::tempdir().expect("a folder");
        let is_file = encoding.format() == Format::Gguf;
        let path = if is_file { folder.path().join("model.gguf") } else { folder.path().to_owned() };
        Plan::new(recipe).expect("a plan").write(&path, 2, &mut |_| true).expect("a checkpoint");
        let run = |backend: &GpuBackend, expert_cache: Option<usize>| {
            let mut engine = open(&path, backend, &Options { expert_cache, ..Options::default() });
            let mut session = engine.session();
            let mut logits = engine.eval(&mut session, &[5], Outputs::All).unwrap_or_else(|e| panic!("{e}"));
            logits.extend(engine.eval(&mut session, &[9, 2], Outputs::All).unwrap_or_else(|e| panic!("{e}")));
            (bits(&logits), engine.device_counts().expect("a device").computed)
        };
        let (expected, _) = run(&emulator(None), None);
        let ways =
            [(shared(2, Some(1.0)), None), (exchanging(6, Some(1.0)), Some(6))].into_iter().enumerate();
        for (_, (backend, cached)) in ways.filter(|(way, _)| is_tried(turn + way, 2)) {
            let (got, computed) = run(&backend, cached);
            assert!(computed > 0, "{encoding:?}, {cached:?}");
            assert!(got == expected, "{encoding:?}, {cached:?}: {computed} by the processor");
        }
    }
}

/// What the next layer is foreseen to choose comes ahead, rightly or wrongly, and changes no bit: of one row and two for products of
/// whole numbers, of two for those of floats.
#[test]
fn what_is_foreseen_changes_speed_alone() {
    let fixture = Fixture::named("gguf/mixtral_q8_0");
    let tokens: Vec<u32> = (0..30).map(|i| (i * i * 5 + i * 11 + 3) % 61).collect();
    // Rows at once, and slots for experts.
    let of_bytes: &[(usize, &[usize])] = &[(1, &[2, 4]), (2, &[4])];
    for (options, placements) in [(Options::default(), of_bytes), (f32_options(), &of_bytes[1..])] {
        let run = |backend: &GpuBackend, rows: usize| {
            let mut engine = open(&fixture.path, backend, &Options { expert_cache: None, ..options.clone() });
            let mut session = engine.session();
            let logits = tokens.chunks(rows).flat_map(|part| {
                engine.eval(&mut session, part, Outputs::All).unwrap_or_else(|e| panic!("{e}"))
            });
            let logits: Vec<f32> = logits.collect();
            (bits(&logits), engine.device_counts().expect("a device"))
        };
        let each = placements.iter().map(|(rows, slots)| (*rows, *slots, run(&emulator(None), *rows).0));
        let each = each
            .flat_map(|(rows, all, expected)| all.iter().map(move |slots| (rows, *slots, expected.clone())));
        for (rows, slots, expected) in each {
            // As long as the bus is idle come four experts, or a kilobyte of one.
            let slow = GpuOptions { expert_slots: Some(slots), host_memory: true, ..GpuOptions::default() };
            let slow =
                GpuBackend::new("emulator", slow, || Ok(Box::new(Emulator::new(7).with_bus(32_000_000))));
            let backends = [tiered(slots), shared(slots, Some(0.5)), slow].into_iter().enumerate();
            for (_, backend) in backends.filter(|(i, _)| is_tried(rows + slots + i, 2)) {
                let (got, counts) = run(&backend, rows);
                assert!(got == expected, "{rows} rows, {slots} slots: {counts:?}");
                let both = counts.useful > 0 && counts.useful < counts.ahead;
                assert!(both, "some are right and some wrong: {rows} rows, {slots} slots: {counts:?}");
                assert!(counts.useful <= counts.fetched, "{counts:?}");
            }
        }
    }
}

#[test]
fn what_experts_cost_a_device_is_counted() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let mut engine = open(&fixture.path, &tiered(2), &Options { expert_cache: None, ..f32_options() });
    let sets: usize = engine.model().graph.expert_sets().len();
    let tokens = &fixture.golden().tokens[..8];
    let mut session = engine.session();
    for token in tokens {
        engine.eval(&mut session, &[*token], Outputs::Last).unwrap_or_else(|e| panic!("{e}"));
    }
    let counts = engine.device_counts().expect("a device");
    let chosen = counts.experts as usize;
    assert!(chosen > 0 && chosen.is_multiple_of(sets * tokens.len()), "{counts:?}");
    assert!(0 < counts.fetched && counts.fetched <= counts.experts, "{counts:?}");
    let mut resident = open(&fixture.path, &emulator(None), &f32_options());
    let mut session = resident.session();
    resident.eval(&mut session, tokens, Outputs::Last).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(resident.device_counts().map(|counts| (counts.experts, counts.fetched)), Some((0, 0)));
}

/// Experts that the device holds are not read again, however few of them host memory has room for.
#[test]
fn what_the_device_holds_is_not_read() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let options = Options { expert_cache: Some(2), ..f32_options() };
    let mut resident = open(&fixture.path, &emulator(None), &f32_options());
    let experts: usize = resident.model().graph.expert_sets().iter().map(|set| set.experts).sum();
    let mut engine = open(&fixture.path, &emulator(Some(experts - 1)), &options);
    let uses = |engine: &Engine| engine.expert_use().layers().flat_map(|(_, counts)| counts).sum::<u64>();
    let eval = |engine: &mut Engine| {
        let mut session = engine.session();
        bits(&engine.eval(&mut session, &[5], Outputs::Last).unwrap_or_else(|e| panic!("{e}")))
    };
    let expected = eval(&mut resident);
    assert_eq!(eval(&mut engine), expected);
    let (read, of_one) = (engine.take_stats().cache.bytes_read, uses(&engine));
    assert!(read > 0 && of_one > 0);
    for _ in 0..3 {
        assert_eq!(eval(&mut engine), expected);
    }
    assert_eq!(engine.take_stats().cache.bytes_read, 0);
    assert_eq!(uses(&engine), 4 * of_one, "an expert is used wherever it is");
}

#[test]
fn a_budget_that_is_too_small_is_told_what_would_do() {
    let fixture = Fixture::named("gguf/qwen3_moe_q4_k_m");
    let backend = |memory| {
        let options = GpuOptions { memory: Some(memory), ..GpuOptions::default() };
        GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
    };
    let open = |memory| Engine::open(&fixture.path, &backend(memory), &f32_options(), |_, _| ());
    let error = open(1000).expect_err("a thousand bytes").to_string();
    let wanted = error.split("needs ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
    let wanted: u64 = wanted.unwrap_or_else(|| panic!("{error}"));
    assert!(open(wanted).is_ok(), "{error}");
    assert!(open(wanted - 1).is_err(), "{error}");
}

/// Experts get what other buffers leave; a sequence that grows must find what it needs.
#[test]
fn every_budget_from_the_least_on_works() {
    const POSITIONS: usize = 66;
    let cases = [
        ("gguf/qwen3_moe_mixed", false),
        ("gguf/qwen3_moe_mixed", true),
        ("hf/qwen3_next_basic", false),
        ("hf/qwen4_exp_fp8", true),
        ("gguf/glm_dsa_bf16", false),
    ];
    for (turn, (name, host_memory)) in cases.into_iter().enumerate() {
        let fixture = Fixture::named(name);
        let backend = |memory| {
            let options = GpuOptions { memory: Some(memory), host_memory, ..GpuOptions::default() };
            let device = move || Ok(Box::new(Emulator::new(7).with_memory(memory)) as _);
            GpuBackend::new("emulator", options, device)
        };
        let options = Options { context: Some(POSITIONS), chunk: Some(POSITIONS - 1), ..f32_options() };
        let open = |memory| Engine::open(&fixture.path, &backend(memory), &options, |_, _| ());
        let wanted = match open(1000) {
            Err(Error::DeviceBudget { minimum, .. }) if host_memory => minimum,
            Err(Error::Compute(moeflux_compute::Error::DeviceMemory { wanted, .. })) if !host_memory => {
                wanted
            }
            other => panic!("{name}: a thousand bytes: {:?}", other.err()),
        };
        // Beside more than the least of host memory, tables of embeddings may stay there.
        assert!(host_memory || open(wanted - 1).is_err(), "{name}, {wanted}");
        let experts = open(1 << 30).expect("a gibibyte").model().experts.total_bytes();
        for (_, part) in [0, 5].into_iter().enumerate().filter(|(i, _)| is_tried(turn + i, 2)) {
            let memory = wanted + experts * part / 10;
            let run = || {
                let mut engine = open(memory)?;
                let mut session = engine.session();
                engine.eval(&mut session, &[1; POSITIONS - 1], Outputs::Last)?;
                engine.eval(&mut session, &[2], Outputs::Last)
            };
            run().unwrap_or_else(|error| {
                panic!("{name}, {memory} of at least {wanted}, {host_memory}: {error}")
            });
        }
    }
}

/// Every operation with each kind of what it takes, some by Metal's text, and everything that experts of every encoding compute,
/// streamed also. Families are compared with their goldens, and streamed, on the processor;
/// single operations in every encoding with their reference by both texts.
#[test]
fn every_operation_on_an_emulated_device() {
    // Products of every encoding are compared as operations, too.
    let every_encoding = all_are_tried();
    let fixtures = cover(all(), |traits| {
        let encoded = if every_encoding { &traits.encoded } else { &traits.experts };
        [&traits.operations[..], encoded].concat()
    });
    let names = |wanted: fn(&Traits) -> Vec<String>| -> HashSet<String> {
        cover(fixtures.clone(), wanted).into_iter().map(|fixture| fixture.name).collect()
    };
    let (by_metal, streamed) =
        (names(|traits| traits.operations.clone()), names(|traits| traits.experts.clone()));
    check_each(&fixtures, |turn, fixture| {
        check(turn, fixture, [&by_metal, &streamed].map(|names| names.contains(&fixture.name)));
    });
}

#[test]
fn routers_choices_that_a_backend_does_not_tell_are_refused_and_the_session_stays() {
    let fixture = Fixture::named("hf/qwen3_moe_basic");
    let mut engine = open(&fixture.path, &emulator(None), &f32_options());
    let mut session = engine.session();
    engine.eval(&mut session, &[5, 6], Outputs::Last).unwrap();
    let error = engine.eval_with_routing(&mut session, &[7], Outputs::Last).unwrap_err();
    assert!(error.to_string().contains("what routers choose"), "{error}");
    assert_eq!(session.tokens(), [5, 6]);
}
