//! Logits of tiny random models against transformers' float32 on the same (dequantised) weights, for every fixture
//! and instruction set.

use crate::support::{self, Fixture, Golden, all, f32_options, is_tried, logits, open};
use moeflux::{Engine, Options, Outputs};
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::matmul::accepts_q8;
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::graph::Op;
use moeflux_compute::reference::Reference;

/// Largest difference of a logit in f32 mode, relative to the largest logit. Two ways of summing in f32 differ by some
/// 1e-7 a layer, which comes to 1e-6 to 2e-6 here. A wrong epsilon, frequency or window shows from 1e-3 on.
/// Recurrences and long products reach 1.2e-5; a wrong default epsilon would show as 6e-5.
const RELATIVE_ERROR: f32 = 3e-5;
/// The same of Kimi-K3, whose layers amplify rounding: between processors, whose vectors sum in other orders, its logits are 2e-5
/// to 4e-5 from the golden ones, as mlx-lm's in f32 are from its own in f64.
const RELATIVE_ERROR_AMPLIFIED: f32 = 1e-4;
/// Largest mean KL divergence in f32 mode, in nats: about half the squared error of a logit, (3e-5)² at most.
const MEAN_KL: f64 = 1e-9;
/// Largest mean KL divergence with cached keys and values in f16 and nothing else rounded.
const MEAN_KL_F16_CACHE: f64 = 5e-6;
/// The same where attention chooses tokens, and rounded keys decide between two of nearly equal score.
const MEAN_KL_CHOICE: f64 = 1e-3;
/// The same with activations in int8. Logits move by some per cent, and now and then a router's choice between two nearly
/// equal experts flips, which moves them by far more: where it does so for the peer too, twice its divergence counts.
const MEAN_KL_INT8: f64 = 5e-3;

/// Largest difference relative to the largest golden logit.
fn relative_error(got: &[f32], golden: &[f32]) -> f32 {
    assert_eq!(got.len(), golden.len());
    let largest = golden.iter().fold(0f32, |m, v| m.max(v.abs()));
    let difference = got.iter().zip(golden).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(got.iter().all(|v| v.is_finite()));
    difference / largest
}

/// log softmax in f64.
fn log_probabilities(logits: &[f32]) -> impl Iterator<Item = f64> {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|l| (f64::from(*l) - max).exp()).sum();
    logits.iter().map(move |l| f64::from(*l) - max - sum.ln())
}

/// Mean over positions of Σ p · (ln p − ln q), p being the golden.
fn mean_kl(got: &[f32], golden: &Golden) -> f64 {
    let rows = golden.logits.chunks_exact(golden.vocab_size).zip(got.chunks_exact(golden.vocab_size));
    let kl = |(p, q): (&[f32], &[f32])| -> f64 {
        log_probabilities(p).zip(log_probabilities(q)).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    rows.map(kl).sum::<f64>() / golden.tokens.len() as f64
}

/// Logits of `tokens` in steps of `count`, asking for all rows.
fn stepwise(engine: &mut Engine, tokens: &[u32], count: usize) -> Vec<f32> {
    let mut session = engine.session();
    tokens.chunks(count).flat_map(|t| engine.eval(&mut session, t, Outputs::All).unwrap()).collect()
}

fn check_f32(fixture: &Fixture, golden: &Golden, got: &[f32], how: &str) {
    let (error, kl) = (relative_error(got, &golden.logits), mean_kl(got, golden));
    println!("{} {how}: relative error {error:.1e}, mean KL {kl:.1e}", fixture.name);
    let amplifies = fixture.name.contains("kimi_k3");
    let most = if amplifies { RELATIVE_ERROR_AMPLIFIED } else { RELATIVE_ERROR };
    assert!(error < most, "{} {how}: relative error {error:.1e}", fixture.name);
    assert!(kl < MEAN_KL, "{} {how}: mean KL {kl:.1e}", fixture.name);
}

#[test]
fn reference_agrees_with_transformers() {
    for fixture in all() {
        let golden = fixture.golden();
        let got = logits(&mut open(&fixture.path, &Reference, &f32_options()), &golden.tokens);
        check_f32(&fixture, &golden, &got, "reference");
    }
}

#[test]
fn every_instruction_set_agrees_with_transformers() {
    for (number, level) in SimdLevel::available().into_iter().enumerate() {
        let backend = CpuBackend::new(2, Some(level)).unwrap();
        for (turn, fixture) in all().into_iter().enumerate() {
            let golden = fixture.golden();
            let mut engine = open(&fixture.path, &backend, &f32_options());
            let whole = logits(&mut engine, &golden.tokens);
            check_f32(&fixture, &golden, &whole, &backend.describe());
            // Not only as close: a token's logits do not depend on the batch it comes in. Each fixture by one of three ways, at one
            // of the levels.
            if !is_tried(turn / 3 + number, 3) {
                continue;
            }
            let (got, way) = match (turn + number) % 3 {
                0 => (stepwise(&mut engine, &golden.tokens, 1), "by 1"),
                1 => (stepwise(&mut engine, &golden.tokens, 7), "by 7"),
                _ => {
                    let options = Options { chunk: Some(7), ..f32_options() };
                    (logits(&mut open(&fixture.path, &backend, &options), &golden.tokens), "in chunks of 7")
                }
            };
            assert_eq!(support::bits(&got), support::bits(&whole), "{} {way}", fixture.name);
        }
    }
}

#[test]
fn last_logits_are_those_of_the_last_position() {
    let backend = CpuBackend::new(2, None).unwrap();
    for (_, fixture) in all().into_iter().enumerate().filter(|(turn, _)| is_tried(*turn, 2)) {
        let golden = fixture.golden();
        let options = Options { chunk: Some(16), ..f32_options() };
        let mut engine = open(&fixture.path, &backend, &options);
        let all = logits(&mut engine, &golden.tokens);
        let mut session = engine.session();
        let last = engine.eval(&mut session, &golden.tokens, Outputs::Last).unwrap();
        let expected = &all[all.len() - golden.vocab_size..];
        assert_eq!(support::bits(&last), support::bits(expected), "{}", fixture.name);
    }
}

/// The default precision: quantised checkpoints, which have a peer, compute with int8 activations. The highest level runs all, others some.
#[test]
fn fast_activations_are_close() {
    for (number, level) in SimdLevel::available().into_iter().rev().enumerate() {
        let backend = CpuBackend::new(2, Some(level)).unwrap();
        println!("{}", backend.describe());
        let fixtures = all().into_iter().enumerate();
        for (_, fixture) in fixtures.filter(|(turn, _)| number == 0 || is_tried(turn + number, 3)) {
            let golden = fixture.golden();
            let mut engine = open(&fixture.path, &backend, &Options::default());
            let got = logits(&mut engine, &golden.tokens);
            let kl = mean_kl(&got, &golden);
            let graph = &engine.model().graph;
            let experts = graph.expert_sets()[0].up.dtype;
            let chooses = graph.nodes().iter().any(|node| matches!(node.op, Op::ChooseBlocks(_)));
            let largest = match golden.peer_kl {
                Some(peer) => MEAN_KL_INT8.max(2.0 * peer),
                None if accepts_q8(experts, 256) => MEAN_KL_INT8,
                None if chooses => MEAN_KL_CHOICE,
                None => MEAN_KL_F16_CACHE,
            };
            assert!(kl < largest, "{}: mean KL {kl:.1e}", fixture.name);
            let peer = golden.peer_kl.map_or("none".into(), |kl| format!("{kl:.1e}"));
            println!("{}: mean KL {kl:.1e}, peer {peer}", fixture.name);
        }
    }
}
