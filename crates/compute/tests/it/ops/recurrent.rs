//! Operations with recurrent state, and slots of states.

use super::case::{Case, Recorder, VOCABULARY};
use super::checks::{Source, run_batch};
use super::errors::MODES;
use moeflux_compute::Error;
use moeflux_compute::backend::{Backend, Batch, CompileOptions, Executable, Span, StateSlots};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use moeflux_compute::graph::{Decay, DeltaInputs, DeltaRule, HeadPairing, SsmInputs, SsmScan, SsmWeights};
use moeflux_compute::reference::{Reference, kept};

fn conv(channels: usize, kernel: usize) -> Case {
    let mut r = Recorder::new((channels * 10 + kernel) as u64);
    let x = r.input(channels);
    let values = r.random.normals(channels * kernel);
    let weight = r.weight(1, channels * kernel, &values);
    let out = r.graph.causal_conv1d(x, weight, kernel).unwrap();
    r.case(format!("{channels} × {kernel}"), out).in_pairs()
}

fn biased_conv(channels: usize, kernel: usize) -> Case {
    let mut r = Recorder::new((channels * 11 + kernel) as u64);
    let x = r.input(channels);
    let values = r.random.normals(channels * kernel);
    let (weight, bias) = (r.weight(1, channels * kernel, &values), r.vector(channels));
    let out = r.graph.biased_conv1d(x, weight, bias, kernel).unwrap();
    r.case(format!("{channels} × {kernel} with a bias"), out).in_pairs()
}

fn plain_conv(channels: usize, kernel: usize, biased: bool) -> Case {
    let mut r = Recorder::new((channels * 12 + kernel) as u64);
    let x = r.input(channels);
    let values = r.random.normals(channels * kernel);
    let weight = r.weight(1, channels * kernel, &values);
    let bias = biased.then(|| r.vector(channels));
    let out = r.graph.plain_conv1d(x, weight, bias, kernel).unwrap();
    r.case(format!("{channels} × {kernel} without silu, with a bias: {biased}"), out).in_pairs()
}

fn dilated_conv(kernel: usize, dilation: usize) -> Case {
    let mut r = Recorder::new(5);
    let (x, weight) = (r.input(10), r.vector(10 * kernel));
    let out = r.graph.dilated_conv1d(x, weight, kernel, dilation).unwrap();
    r.case(format!("10 × {kernel}, every {dilation}"), out).in_pairs()
}

fn ssm(shape: SsmScan) -> Case {
    let SsmScan { heads, head_dim, groups, state_size, .. } = shape;
    let mut r = Recorder::new((heads * 1000 + groups * 100 + head_dim + state_size) as u64);
    let inputs = SsmInputs {
        x: r.input(heads * head_dim),
        b: r.input(groups * state_size),
        c: r.input(groups * state_size),
        dt: r.input(heads),
    };
    // From states that last to ones that are gone after a few tokens.
    let a: Vec<f32> = (0..heads).map(|h| -0.01 - 0.7 * h as f32).collect();
    let weights = SsmWeights { a: r.weight(1, heads, &a), d: r.vector(heads), dt_bias: r.vector(heads) };
    let out = r.graph.ssm_scan(inputs, weights, shape).unwrap();
    r.case(format!("{shape:?}"), out).in_pairs()
}

/// A channel's numbers decay each on its own.
fn selective(heads: usize, groups: usize, state_size: usize, time_steps: (f32, f32)) -> Case {
    let shape = SsmScan { heads, head_dim: 1, groups, state_size, time_steps };
    let mut r = Recorder::new((heads * 1000 + groups * 100 + state_size) as u64);
    let (x, b, c) = (r.input(heads), r.input(groups * state_size), r.input(groups * state_size));
    let inputs = SsmInputs { x, b, c, dt: r.input(heads) };
    let count = heads * state_size;
    let a: Vec<f32> = (0..count).map(|i| -0.01 - 0.9 * ((i * 7) % count) as f32 / heads as f32).collect();
    let weights = SsmWeights { a: r.weight(1, count, &a), d: r.vector(heads), dt_bias: r.vector(heads) };
    let out = r.graph.ssm_scan(inputs, weights, shape).unwrap();
    r.case(format!("{shape:?}, numbers on their own"), out).in_pairs()
}

fn delta(shape: DeltaRule) -> Case {
    let DeltaRule { key_heads, value_heads, key_dim, value_dim, .. } = shape;
    let mut r = Recorder::new((key_heads * 1000 + value_heads * 100 + key_dim + value_dim) as u64);
    let inputs = DeltaInputs {
        q: r.input(key_heads * key_dim),
        k: r.input(key_heads * key_dim),
        v: r.input(value_heads * value_dim),
        a: r.input(value_heads),
        b: r.input(value_heads),
    };
    // From states that last to ones that are gone after a few tokens.
    let decay: Vec<f32> = (0..value_heads).map(|h| -0.01 - 0.7 * h as f32).collect();
    let dt_bias = r.random.normals(value_heads);
    let (decay, dt_bias) = (r.weight(1, value_heads, &decay), r.weight(1, value_heads, &dt_bias));
    let out = r.graph.gated_delta_rule(inputs, decay, dt_bias, shape).unwrap();
    r.case(format!("{shape:?}"), out).in_pairs()
}

pub fn convolutions() -> Vec<Case> {
    let plain = [(1, 1), (7, 2), (48, 4), (530, 4), (33, 5)].map(|(channels, kernel)| conv(channels, kernel));
    let biased = [(7, 2), (530, 4)].map(|(channels, kernel)| biased_conv(channels, kernel));
    let linear = [(7, 3, false), (530, 2, true)];
    let linear = linear.map(|(channels, kernel, biased)| plain_conv(channels, kernel, biased));
    let dilated = [(1, 3), (4, 3), (3, 2), (2, 71)].map(|(kernel, dilation)| dilated_conv(kernel, dilation));
    plain.into_iter().chain(biased).chain(linear).chain(dilated).collect()
}

/// Devices are slow where they are emulated: every third runs on them, both kinds of each among them.
fn some_on_devices(cases: Vec<Case>) -> Vec<Case> {
    let some = |(i, case): (usize, Case)| if i % 3 == 0 { case } else { case.off_devices() };
    cases.into_iter().enumerate().map(some).collect()
}

pub fn state_spaces() -> Vec<Case> {
    let mut cases = vec![];
    for (heads, groups, head_dim, state_size) in
        [(1, 1, 1, 1), (4, 2, 12, 8), (3, 3, 17, 5), (6, 2, 33, 20), (2, 1, 64, 128)]
    {
        for time_steps in [(0.0, f32::INFINITY), (0.3, 0.9)] {
            cases.push(ssm(SsmScan { heads, head_dim, groups, state_size, time_steps }));
        }
    }
    let mut cases = some_on_devices(cases);
    cases.push(ssm(LARGEST));
    let unlimited = (0.0, f32::INFINITY);
    cases.push(selective(1, 1, 2, unlimited));
    cases.push(selective(70, 1, 16, unlimited));
    cases.push(selective(12, 3, 19, (0.3, 0.9)));
    cases.push(selective(2, 1, 256, unlimited));
    cases
}

pub fn delta_rules() -> Vec<Case> {
    let mut cases = vec![];
    for pairing in [HeadPairing::Grouped, HeadPairing::Tiled] {
        for (key_heads, value_heads, key_dim, value_dim) in [
            (1, 1, 1, 1),
            (2, 4, 8, 12),
            (3, 3, 5, 17),
            (1, 2, 128, 70),
            (2, 6, 20, 33),
            (1, 1, 36, 5),
            (1, 1, 200, 9),
        ] {
            let decay = Decay::Softplus;
            cases.push(delta(DeltaRule { key_heads, value_heads, key_dim, value_dim, pairing, decay }));
        }
    }
    some_on_devices(cases)
}

/// Decays of each channel, and decays with a bound.
pub fn delta_rules_by_channel() -> Vec<Case> {
    let mut cases = vec![];
    for (key_heads, value_heads, key_dim, value_dim) in
        [(1, 1, 2, 1), (2, 4, 12, 9), (3, 3, 16, 32), (1, 2, 5, 70), (1, 2, 100, 40), (1, 1, 300, 5)]
    {
        let mut r = Recorder::new(5);
        let [q, k] = [(); 2].map(|()| r.input(key_heads * key_dim));
        let (v, b) = (r.input(value_heads * value_dim), r.input(value_heads));
        let a = r.input(value_heads * key_dim);
        let values: Vec<f32> = r.random.normals(value_heads).iter().map(|v| -v.exp()).collect();
        let (decay, dt_bias) = (r.weight(1, value_heads, &values), r.vector(value_heads * key_dim));
        let (pairing, bound) = (HeadPairing::Grouped, Decay::Softplus);
        let shape = DeltaRule { key_heads, value_heads, key_dim, value_dim, pairing, decay: bound };
        let inputs = DeltaInputs { q, k, v, a, b };
        let out = r.graph.gated_delta_rule(inputs, decay, dt_bias, shape).unwrap();
        cases.push(r.case(format!("by channel, {shape:?}"), out).in_pairs());
    }
    cases.extend([false, true].map(bounded));
    cases
}

fn bounded(by_channel: bool) -> Case {
    let (heads, key_dim, value_dim) = (3, 6, 9);
    let mut r = Recorder::new(5);
    let [q, k, v, b] = [18, 18, 27, 3].map(|width| r.input(width));
    let each = if by_channel { key_dim } else { 1 };
    let a = r.input(heads * each);
    let (decay, dt_bias) = (r.weight(1, 3, &[-0.1, -1.0, -3.0]), r.vector(heads * each));
    let shape = DeltaRule {
        key_heads: heads,
        value_heads: heads,
        key_dim,
        value_dim,
        pairing: HeadPairing::Grouped,
        decay: Decay::Bounded(-2.0),
    };
    let inputs = DeltaInputs { q, k, v, a, b };
    let out = r.graph.gated_delta_rule(inputs, decay, dt_bias, shape).unwrap();
    r.case(format!("bounded, by channel: {by_channel}"), out).in_pairs()
}

#[test]
fn what_is_kept_has_a_bound() {
    // From nothing lost to the bound.
    assert!((kept(Decay::Bounded(-2.0), -1.0, -50.0) - 1.0).abs() < 1e-12);
    assert!((kept(Decay::Bounded(-2.0), -1.0, 50.0) - (-2f64).exp()).abs() < 1e-12);
    assert!((kept(Decay::Bounded(-2.0), -1.0, 0.0) - (-1f64).exp()).abs() < 1e-12);
}

/// With states as large as devices take.
const LARGEST: SsmScan =
    SsmScan { heads: 1, head_dim: 1, groups: 1, state_size: 256, time_steps: (0.0, 1.0) };

fn cases() -> impl Iterator<Item = Case> {
    convolutions().into_iter().chain(state_spaces()).chain(delta_rules())
}

fn compile(case: &Case, backend: &dyn Backend) -> Box<dyn Executable> {
    let mut executable = super::checks::compile(case, backend, MODES[0]);
    executable.reserve_slots(6).unwrap();
    executable
}

/// Tokens of a sequence; sequences differ.
fn tokens(sequence: usize, count: usize) -> Vec<u32> {
    (0..count).map(|i| ((sequence * 29 + i * i * 7 + i * 3) % VOCABULARY) as u32).collect()
}

/// Runs spans (sequence, start, tokens, slots) as one batch.
fn run(
    case: &Case,
    executable: &mut dyn Executable,
    spans: &[(usize, usize, usize, StateSlots)],
) -> Vec<f32> {
    let (mut ids, mut batch_spans) = (vec![], vec![]);
    for (sequence, start, count, slots) in spans {
        let rows = ids.len()..ids.len() + count;
        ids.extend(&tokens(*sequence, start + count)[*start..]);
        batch_spans.push(Span { rows, start: *start, pages: &[], slots: *slots, adapter: None });
    }
    let outputs: Vec<u32> = (0..ids.len() as u32).collect();
    let mut out = vec![];
    let batch = Batch { tokens: &ids, spans: &batch_spans, outputs: &outputs, ..Batch::default() };
    run_batch(case, executable, &batch, &mut Source { experts: &case.experts, order: 0 }, &mut out).unwrap();
    out
}

fn slots(read: u32, write: u32) -> StateSlots {
    StateSlots { read, write }
}

fn backends() -> Vec<CpuBackend> {
    let backend = |level| CpuBackend::new(3, Some(level)).unwrap();
    SimdLevel::available().into_iter().map(backend).collect()
}

/// Before they are opened.
#[test]
fn states_too_large_for_a_device_are_refused_by_name() {
    let case = ssm(SsmScan { state_size: 257, ..LARGEST });
    let unopened = || Err(Error::Device { reason: "opened".into() });
    let backend = GpuBackend::new("none", GpuOptions::default(), unopened);
    let options = CompileOptions::default();
    assert_eq!(backend.scratch_bytes(&case.graph, options), 0);
    let refused = backend.compile(&case.graph, case.weights, options).err().expect("refused");
    assert!(matches!(&refused, Error::Device { reason } if reason.contains("use the CPU")), "{refused}");
}

#[test]
fn results_do_not_depend_on_batches() {
    for case in cases() {
        let name = &case.name;
        for backend in backends() {
            let what = format!("{name} on {}", backend.describe());
            let width = case.width();
            let mut executable = compile(&case, &backend);
            let whole = run(&case, &mut *executable, &[(0, 0, 20, slots(0, 0))]);
            let other = run(&case, &mut *executable, &[(1, 0, 9, slots(1, 1))]);
            // Two sequences together; a dirty slot counts as zeros at position 0.
            let both = run(&case, &mut *executable, &[(1, 0, 9, slots(0, 0)), (0, 0, 20, slots(1, 1))]);
            assert_eq!(both, [other, whole.clone()].concat(), "{what}: together");
            // In pieces shorter and longer than a kernel, in place and from slot to slot.
            let mut pieces = run(&case, &mut *executable, &[(0, 0, 1, slots(4, 2))]);
            pieces.extend(run(&case, &mut *executable, &[(0, 1, 1, slots(2, 3))]));
            pieces.extend(run(&case, &mut *executable, &[(0, 2, 7, slots(3, 3))]));
            pieces.extend(run(&case, &mut *executable, &[(0, 9, 11, slots(3, 5))]));
            assert_eq!(pieces, whole, "{what}: in pieces");
            // A slot that was only read is as it was.
            let again = run(&case, &mut *executable, &[(0, 9, 11, slots(3, 4))]);
            assert_eq!(again, whole[9 * width..], "{what}: from a slot read before");
        }
    }
}

#[test]
fn slots_can_be_carried_elsewhere() {
    for case in cases() {
        let name = &case.name;
        let cpu = CpuBackend::new(1, None).unwrap();
        for backend in [&cpu as &dyn Backend, &Reference] {
            let mut first = compile(&case, backend);
            let whole = run(&case, &mut *first, &[(0, 0, 20, slots(0, 0))]);
            run(&case, &mut *first, &[(0, 0, 12, slots(0, 1))]);
            let mut bytes = vec![];
            first.read_slot(1, &mut bytes).unwrap();
            assert_eq!(bytes.len(), first.slot_bytes(), "{name}");
            let mut second = compile(&case, backend);
            second.write_slot(2, &bytes).unwrap();
            let rest = run(&case, &mut *second, &[(0, 12, 8, slots(2, 2))]);
            assert_eq!(rest, whole[12 * case.width()..], "{name} on {}", backend.describe());
            bytes.push(0);
            let error = second.write_slot(2, &bytes).unwrap_err();
            assert!(matches!(error, Error::Shape { op: "state slot", .. }), "{error}");
        }
    }
}

#[test]
fn shapes_are_checked() {
    let shape = DeltaRule {
        key_heads: 2,
        value_heads: 4,
        key_dim: 3,
        value_dim: 5,
        pairing: HeadPairing::Grouped,
        decay: Decay::Softplus,
    };
    let check = |change: &dyn Fn(&mut [usize; 7], &mut DeltaRule), what: &str| {
        let (mut widths, mut shape) = ([6, 6, 20, 4, 4, 4, 4], shape);
        change(&mut widths, &mut shape);
        let mut r = Recorder::new(1);
        let [q, k, v, a, b] = [0, 1, 2, 3, 4].map(|i| r.input(widths[i]));
        let vectors = [5, 6].map(|i| r.weight(1, widths[i], &vec![0.0; widths[i]]));
        let result = r.graph.gated_delta_rule(DeltaInputs { q, k, v, a, b }, vectors[0], vectors[1], shape);
        match what {
            "" => assert!(result.is_ok()),
            _ => {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(what), "{error}");
            }
        }
    };
    check(&|_, _| (), "");
    check(&|w, _| w[0] = 5, "width of q");
    check(&|w, _| w[1] = 7, "width of k");
    check(&|w, _| w[2] = 10, "width of v");
    check(&|w, _| w[3] = 2, "width of a");
    check(&|w, _| w[4] = 2, "width of b");
    check(&|w, _| w[5] = 3, "length of the decay");
    check(&|w, _| w[6] = 3, "length of dt_bias");
    check(&|_, s| s.key_heads = 3, "left over by key heads");
    check(&|_, s| s.key_dim = 0, "heads and their widths");

    let mut r = Recorder::new(1);
    let x = r.input(6);
    let weight = r.weight(1, 18, &[0.0; 18]);
    assert!(r.graph.causal_conv1d(x, weight, 3).is_ok());
    assert!(r.graph.causal_conv1d(x, weight, 4).unwrap_err().to_string().contains("elements of the weight"));
    assert!(r.graph.causal_conv1d(x, weight, 0).unwrap_err().to_string().contains("kernel"));

    let bias = r.weight(1, 5, &[0.0; 5]);
    assert!(
        r.graph.biased_conv1d(x, weight, bias, 3).unwrap_err().to_string().contains("length of the bias")
    );
}

#[test]
fn shapes_of_state_space_models_are_checked() {
    let shape = SsmScan { heads: 4, head_dim: 5, groups: 2, state_size: 3, time_steps: (0.0, 1.0) };
    let check = |change: &dyn Fn(&mut [usize; 7], &mut SsmScan), what: &str| {
        let (mut widths, mut shape) = ([20, 6, 6, 4, 4, 4, 4], shape);
        change(&mut widths, &mut shape);
        let mut r = Recorder::new(1);
        let [x, b, c, dt] = [0, 1, 2, 3].map(|i| r.input(widths[i]));
        let [a, d, dt_bias] = [4, 5, 6].map(|i| r.weight(1, widths[i], &vec![0.0; widths[i]]));
        let inputs = SsmInputs { x, b, c, dt };
        match (r.graph.ssm_scan(inputs, SsmWeights { a, d, dt_bias }, shape), what) {
            (result, "") => assert!(result.is_ok()),
            (result, what) => {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(what), "{error}");
            }
        }
    };
    check(&|_, _| (), "");
    check(&|w, _| w[0] = 19, "width of x");
    check(&|w, _| w[1] = 7, "width of b");
    check(&|w, _| w[2] = 4, "width of c");
    check(&|w, _| w[3] = 2, "width of dt");
    check(&|w, _| w[4] = 3, "length of a");
    check(&|w, _| w[4] = 12, "length of a");
    let one_channel = |widths: &mut [usize; 7], shape: &mut SsmScan, decays| {
        (widths[0], shape.head_dim, widths[4]) = (4, 1, decays);
    };
    check(&|w, s| one_channel(w, s, 4), "");
    check(&|w, s| one_channel(w, s, 12), "");
    check(&|w, s| one_channel(w, s, 8), "length of a");
    check(&|w, _| w[5] = 3, "length of d");
    check(&|w, _| w[6] = 3, "length of dt_bias");
    check(&|_, s| s.groups = 3, "left over by groups");
    check(&|_, s| s.state_size = 0, "heads and their widths");
    check(&|_, s| s.time_steps = (1.0, 0.0), "limits of time steps");
    check(&|_, s| s.time_steps = (f32::NAN, 1.0), "limits of time steps");
}
