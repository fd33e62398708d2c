//! Hidden states: the head's product with them is the logits, in every family, and they are the same however they are had.

use crate::support::cover::{check_each, cover};
use crate::support::{Fixture, all, bits, f32_options, is_tried, open, sample};
use moeflux::{Engine, Error, Options, Outputs, Pooling};
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use moeflux_compute::graph::{LinearOp, Op};
use moeflux_compute::quant::dequantize;

const TOKENS: usize = 20;
/// f32 sums in another order, of products that transformers made, or this program.
const RELATIVE_ERROR: f32 = 5e-5;

fn cpu() -> CpuBackend {
    CpuBackend::new(2, None).unwrap()
}

fn emulator(options: GpuOptions) -> GpuBackend {
    GpuBackend::new("emulator", options, || Ok(Box::new(Emulator::new(7))))
}

fn hidden(engine: &mut Engine, tokens: &[u32], outputs: Outputs) -> Vec<f32> {
    let mut session = engine.session();
    engine.eval_hidden(&mut session, tokens, outputs).unwrap_or_else(|e| panic!("{e}"))
}

/// The head's product with `rows` of hidden states, by the weights as the checkpoint has them.
fn head(engine: &Engine, rows: &[f32]) -> Vec<f32> {
    let model = engine.model();
    let Some(&Op::Linear(LinearOp { weight, bias, cap, .. })) =
        model.graph.nodes().last().map(|node| &node.op)
    else {
        panic!("no head");
    };
    let weights = model.load(|_| ()).unwrap();
    let of = |index: usize| dequantize(weights[index].view()).unwrap();
    let matrix = of(weight.index());
    let bias = bias.map_or(vec![0.0; model.graph.vocab_size()], |bias| of(bias.index()));
    let product = |x: &[f32], (row, bias): (&[f32], &f32)| {
        let sum: f64 = x.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let logit = sum + f64::from(*bias);
        cap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh()) as f32
    };
    let width = engine.hidden_size();
    let logits =
        |x| matrix.chunks_exact(width).zip(&bias).map(move |row| product(x, row)).collect::<Vec<_>>();
    rows.chunks_exact(width).flat_map(logits).collect()
}

fn check_logits(got: &[f32], right: &[f32], what: &str) {
    let largest = right.iter().fold(0f32, |m, v| m.max(v.abs()));
    let error = got.iter().zip(right).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
    assert!(got.len() == right.len() && error < RELATIVE_ERROR, "{what}: {error:.1e}");
}

#[test]
fn the_heads_product_is_the_logits() {
    for fixture in all() {
        let tokens = &fixture.golden().tokens[..TOKENS];
        let mut engine = open(&fixture.path, &cpu(), &f32_options());
        let rows = hidden(&mut engine, tokens, Outputs::All);
        assert_eq!(rows.len(), TOKENS * engine.hidden_size(), "{}", fixture.name);
        let mut session = engine.session();
        let logits = engine.eval(&mut session, tokens, Outputs::All).unwrap();
        check_logits(&head(&engine, &rows), &logits, &fixture.name);
        drop(session);
        let last = hidden(&mut engine, tokens, Outputs::Last);
        assert_eq!(bits(&last), bits(&rows[rows.len() - last.len()..]), "{}", fixture.name);
    }
}

/// With all experts on the device and two of them; prompts of many rows and of few, whose kernels leave norms to products.
#[test]
fn an_emulated_device_gives_the_same() {
    let streamed = GpuOptions { expert_slots: Some(2), ..GpuOptions::default() };
    let tiered = GpuOptions { host_memory: true, ..streamed };
    // What is left out here is the same part of all models.
    let fixtures = sample().into_iter().filter(|fixture| fixture.kind == "hf");
    check_each(&cover(fixtures, |traits| traits.operations.clone()), |turn, fixture| {
        let golden = fixture.golden();
        let ways = [(3, &streamed), (10, &tiered)].into_iter().enumerate();
        for (_, (count, other)) in ways.filter(|(way, _)| is_tried(turn + way, 2)) {
            let tokens = &golden.tokens[..count];
            let mut engine = open(&fixture.path, &emulator(GpuOptions::default()), &f32_options());
            let rows = hidden(&mut engine, tokens, Outputs::All);
            let right = &golden.logits[..count * golden.vocab_size];
            check_logits(&head(&engine, &rows), right, &format!("{}, {count} tokens", fixture.name));
            let mut engine = open(&fixture.path, &emulator(*other), &f32_options());
            let got = hidden(&mut engine, tokens, Outputs::All);
            assert_eq!(bits(&got), bits(&rows), "{}, {count} tokens", fixture.name);
        }
    });
}

/// What is run without the head leaves no trace in what is run with it, recorded or not.
#[test]
fn a_device_goes_from_one_to_the_other() {
    for name in ["hf/qwen3_moe_basic", "hf/qwen3_next_basic"] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..3];
        let mut engine = open(&fixture.path, &emulator(GpuOptions::default()), &f32_options());
        let (mut states, mut logits) = (vec![], vec![]);
        for _ in 0..4 {
            states.push(bits(&hidden(&mut engine, tokens, Outputs::All)));
            let mut session = engine.session();
            logits.push(bits(&engine.eval(&mut session, tokens, Outputs::All).unwrap()));
        }
        assert!(
            states.iter().all(|other| *other == states[0]) && logits.iter().all(|other| *other == logits[0])
        );
    }
}

/// Eight-bit activations on a device: kernels of few rows quantise what a norm makes, which here stays as it is.
#[test]
fn activations_of_eight_bits_change_little() {
    let fixture = Fixture::named("gguf/qwen3_moe_q8_0");
    let tokens = &fixture.golden().tokens[..TOKENS];
    let of = |backend: &dyn Backend, options: &Options, count: usize| {
        hidden(&mut open(&fixture.path, backend, options), &tokens[..count], Outputs::Last)
    };
    for count in [1, 3, TOKENS] {
        let exact = of(&cpu(), &f32_options(), count);
        for backend in [&cpu() as &dyn Backend, &emulator(GpuOptions::default())] {
            let fast = of(backend, &Options::default(), count);
            let [ab, aa, bb] = [(&exact, &fast), (&exact, &exact), (&fast, &fast)]
                .map(|(a, b)| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>());
            assert!(ab / (aa * bb).sqrt() > 0.995, "{count} tokens, {}", backend.describe());
        }
    }
}

#[test]
fn neither_chunks_nor_threads_nor_slots_change_a_bit() {
    for name in ["hf/qwen3_moe_basic", "hf/qwen3_next_basic", "gguf/qwen3_moe_q8_0"] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..TOKENS];
        for pooling in [Pooling::Last, Pooling::Mean] {
            let of = |threads: usize, options: &Options| {
                let backend = CpuBackend::new(threads, None).unwrap();
                open(&fixture.path, &backend, options).embed(tokens, pooling).unwrap()
            };
            let right = of(2, &Options::default());
            let length: f64 = right.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            assert!((length - 1.0).abs() < 1e-6, "{name}: {length}");
            for (threads, chunk, expert_cache) in [(1, None, None), (2, Some(7), None), (2, Some(1), Some(1))]
            {
                let got = of(threads, &Options { chunk, expert_cache, ..Options::default() });
                assert_eq!(bits(&got), bits(&right), "{name}, {pooling:?}, {chunk:?}");
            }
        }
    }
}

#[test]
fn sessions_go_on_after_hidden_states_and_stay_after_errors() {
    for name in ["hf/qwen3_moe_basic", "hf/qwen3_next_basic"] {
        let fixture = Fixture::named(name);
        let tokens = &fixture.golden().tokens[..TOKENS];
        let mut engine = open(&fixture.path, &cpu(), &f32_options());
        let mut session = engine.session();
        let right = engine.eval(&mut session, tokens, Outputs::Last).unwrap();
        let mut session = engine.session();
        engine.eval_hidden(&mut session, &tokens[..9], Outputs::Last).unwrap();
        let refused = engine.eval_hidden(&mut session, &[u32::MAX], Outputs::All).unwrap_err();
        assert!(matches!(refused, Error::Token { .. }), "{refused}");
        let much = vec![0; engine.context()];
        let refused = engine.eval_hidden(&mut session, &much, Outputs::All).unwrap_err();
        assert!(matches!(refused, Error::ContextFull { .. }), "{refused}");
        assert!(engine.eval_hidden(&mut session, &[], Outputs::All).unwrap().is_empty());
        let refused = engine.embed(&[], Pooling::Mean).unwrap_err();
        assert!(matches!(refused, Error::Option { option: "input", .. }), "{refused}");
        assert_eq!(session.position(), 9);
        let got = engine.eval(&mut session, &tokens[9..], Outputs::Last).unwrap();
        assert_eq!(bits(&got), bits(&right), "{name}");
    }
}
