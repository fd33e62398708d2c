//! Running a case under several schedules, and comparing what backends make of it.

use std::collections::BTreeMap;

use moeflux_compute::Result;
use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, PAGE_TOKENS, Span,
    StateSlots,
};
use moeflux_compute::cpu::{CpuBackend, Simd, SimdLevel};
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::reference::Reference;

use super::case::{Case, Experts, MODES, Mode, POISON, Tested, tolerance};
use crate::support::devices::{CPU, METAL, MakeDevice, devices, is_in_part, is_tested};

/// Hands over experts in one of several orders and groupings.
pub struct Source<'a> {
    pub experts: &'a Experts,
    pub order: usize,
}

impl ExpertSource for Source<'_> {
    fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
        Ok(())
    }

    fn visit(
        &mut self,
        _: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()> {
        assert!(experts.is_sorted_by(|a, b| a < b), "distinct, ascending");
        let mut ids = experts.to_vec();
        if self.order % 2 == 1 {
            ids.reverse();
        }
        let view = |id: &u32| {
            let [gate, up, down] = &self.experts[*id as usize];
            ExpertView { id: *id, gate: Some(gate.view()), up: up.view(), down: down.view() }
        };
        let views: Vec<ExpertView<'_>> = ids.iter().map(view).collect();
        views.chunks([views.len().max(1), 1, 2][self.order % 3]).for_each(visitor);
        Ok(())
    }
}

/// Batches of (sequence, number of its next tokens).
pub type Schedule = Vec<Vec<(usize, usize)>>;

/// Ways to run sequences of these lengths; the first one is what the reference runs.
pub fn schedules(lengths: &[usize]) -> Vec<Schedule> {
    let whole: Vec<(usize, usize)> = lengths.iter().copied().enumerate().collect();
    let together = vec![whole.clone()];
    let alone = whole.iter().map(|part| vec![*part]).collect();
    let reordered = vec![whole.iter().rev().copied().collect()];
    // All sequences at once in pieces of 1, 2, 3, … tokens; then one token of each at a time.
    let pieces = |next: &dyn Fn(usize) -> usize| {
        let mut left = lengths.to_vec();
        let mut schedule = vec![];
        while left.iter().any(|n| *n > 0) {
            let mut batch = vec![];
            for (sequence, left) in left.iter_mut().enumerate().filter(|(_, n)| **n > 0) {
                let n = next(schedule.len() + sequence).min(*left);
                *left -= n;
                batch.push((sequence, n));
            }
            schedule.push(batch);
        }
        schedule
    };
    vec![together, alone, reordered, pieces(&|i| i + 1), pieces(&|_| 1)]
}

/// Results by sequence and position.
pub type Results = BTreeMap<(usize, usize), Vec<f32>>;

/// Runs `case` on `executable`. The token at `poison` is [`POISON`]; every `stride`-th row is asked for.
pub fn run(
    case: &Case,
    executable: &mut dyn Executable,
    schedule: &Schedule,
    poison: Option<(usize, usize)>,
    stride: usize,
) -> Results {
    let token = |sequence: usize, position: usize| match poison {
        Some(at) if at == (sequence, position) => POISON,
        _ => (sequence * 31 + position * 7 + position * position / 3) as u32 % POISON,
    };
    let mut positions = vec![0; case.lengths.len()];
    let mut pages: Vec<Vec<u32>> = vec![vec![]; case.lengths.len()];
    // Pages go to sequences in an order that differs from schedule to schedule.
    let total: usize = case.lengths.iter().map(|n| n.div_ceil(PAGE_TOKENS)).sum();
    let mut free: Vec<u32> = (0..total as u32).collect();
    free.rotate_left(schedule.len() % total);
    executable.reserve_pages(total).unwrap();

    let mut source = Source { experts: &case.experts, order: schedule.len() };
    let mut results = Results::new();
    let mut logits = vec![f32::NAN; 3];
    for batch in schedule {
        let (mut tokens, mut rows) = (vec![], vec![]);
        for (sequence, count) in batch {
            let start = positions[*sequence];
            while pages[*sequence].len() * PAGE_TOKENS < start + count {
                pages[*sequence].push(free.pop().unwrap());
            }
            tokens.extend((start..start + count).map(|position| token(*sequence, position)));
            rows.extend((start..start + count).map(|position| (*sequence, position)));
        }
        let mut at = 0;
        let span = |(sequence, count): &(usize, usize)| {
            at += count;
            Span {
                rows: at - count..at,
                start: positions[*sequence],
                pages: &pages[*sequence],
                slots: StateSlots::default(),
            }
        };
        let spans: Vec<Span<'_>> = batch.iter().map(span).collect();
        let outputs: Vec<u32> = (0..tokens.len() as u32).step_by(stride).collect();
        let inputs = Batch { tokens: &tokens, spans: &spans, outputs: &outputs };
        executable.run(&inputs, &mut source, &mut logits).unwrap();
        let width = case.graph.vocab_size();
        assert_eq!(logits.len(), outputs.len() * width, "{}", case.name);
        for (row, logits) in outputs.iter().zip(logits.chunks_exact(width)) {
            results.insert(rows[*row as usize], logits.to_vec());
        }
        batch.iter().for_each(|(sequence, count)| positions[*sequence] += count);
        source.order += 1;
    }
    results
}

pub fn compile(case: &Case, backend: &dyn Backend, mode: Mode) -> Box<dyn Executable> {
    let Mode { activations, kv_type } = mode;
    let max_rows = case.lengths.iter().sum();
    let options = CompileOptions { activations, kv_type, max_rows, ..CompileOptions::default() };
    backend.compile(&case.graph, case.weights.clone(), options).unwrap()
}

/// Mean squared difference over the mean square of what is right.
pub fn nmse(got: &Results, right: &Results) -> f64 {
    assert!(got.keys().eq(right.keys()));
    let pairs = || got.values().flatten().zip(right.values().flatten());
    let error: f64 = pairs().map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let size: f64 = pairs().map(|(_, b)| f64::from(*b).powi(2)).sum();
    assert!(size > 0.0, "the reference computes something");
    error / size
}

/// Panics at the first result that is not that of `expected`, bit for bit; `got` may have fewer.
pub fn assert_same_bits(got: &Results, expected: &Results, what: &str) {
    for (key, got) in got {
        for (column, (got, expected)) in got.iter().zip(&expected[key]).enumerate() {
            let same = got.to_bits() == expected.to_bits();
            assert!(same, "{what}: (sequence, position) {key:?}, column {column}: {got} is not {expected}");
        }
    }
}

/// The backends of one instruction set.
pub struct Level {
    pub one: CpuBackend,
    /// More threads than the machine may have cores.
    pub several: CpuBackend,
}

fn level(simd: Simd) -> Level {
    Level { one: CpuBackend::with_simd(1, simd), several: CpuBackend::with_simd(3, simd) }
}

/// Every instruction set of this machine.
pub fn backends() -> Vec<Level> {
    let tested = SimdLevel::available().into_iter().filter(|_| is_tested(CPU));
    tested.map(|name| level(Simd::new(name).unwrap())).collect()
}

/// Modes that make a difference to an operation.
pub fn modes(tested: Tested) -> &'static [Mode] {
    match tested {
        Tested::Linear | Tested::LinearF32 | Tested::Attention | Tested::MoeExperts => &MODES,
        _ => &MODES[1..],
    }
}

/// The one check: every case on every backend in every mode, under every schedule.
pub fn check(cases: impl IntoIterator<Item = Case>) {
    let (backends, devices) = (backends(), devices());
    // Largest error seen by operation and tolerance, for whoever tunes the table.
    let mut largest: BTreeMap<String, f64> = BTreeMap::new();
    for case in cases.into_iter().filter(|_| is_in_part()) {
        let schedules = schedules(case.lengths);
        let right = run(&case, &mut *compile(&case, &Reference, MODES[0]), &schedules[0], None, 1);
        for mode in modes(case.tested) {
            let tolerance = tolerance(case.tested, case.dtype, *mode);
            for level in &backends {
                let what = format!("{} on {}, {mode:?}", case.name, level.one.describe());
                let mut executable = compile(&case, &level.one, *mode);
                let first = run(&case, &mut *executable, &schedules[0], None, 1);
                let error = nmse(&first, &right);
                assert!(error <= tolerance, "{what}: {error:.1e} > {tolerance:.1e}");
                let seen =
                    largest.entry(format!("{:?}, tolerance {tolerance:.0e}", case.tested)).or_default();
                *seen = seen.max(error);
                for (index, schedule) in schedules.iter().enumerate().skip(1) {
                    // Not all rows are asked for.
                    let got = run(&case, &mut *executable, schedule, None, index);
                    assert_same_bits(&got, &first, &format!("{what}, schedule {index}"));
                }
                check_poison(&case, &mut *executable, &schedules, &first, &what);
                let mut executable = compile(&case, &level.several, *mode);
                for index in [0, 3] {
                    let got = run(&case, &mut *executable, &schedules[index], None, 1);
                    assert_same_bits(&got, &first, &format!("{what}, several threads, schedule {index}"));
                }
            }
            for (name, device) in &devices {
                let error = check_device(&case, *mode, (name, device), &right, tolerance);
                let seen = largest.entry(format!("{:?} on {name}, tolerance {tolerance:.0e}", case.tested));
                let seen = seen.or_default();
                *seen = seen.max(error);
            }
        }
    }
    largest.iter().for_each(|(key, error)| println!("{key}: largest {error:.1e}"));
}

/// Results on a device are as close as the table says however sequences are cut into batches, do not depend on the
/// order in which threads run, and keep NaNs where they belong. Returns the largest error.
pub fn check_device(
    case: &Case,
    mode: Mode,
    (name, device): (&str, &MakeDevice),
    right: &Results,
    tolerance: f64,
) -> f64 {
    let what = format!("{} on {name}, {mode:?}", case.name);
    let schedules = schedules(case.lengths);
    let mut executable = compile(case, &device(1), mode);
    let mut check = |schedule| {
        let got = run(case, &mut *executable, schedule, None, 1);
        let error = nmse(&got, right);
        assert!(error <= tolerance, "{what}: {error:.1e} > {tolerance:.1e}");
        (got, error)
    };
    let (first, error) = check(&schedules[0]);
    let largest = error.max(check(&schedules[3]).1);
    // Of the same kernels by another compiler, what does not depend on that is not asked again.
    if name != METAL {
        let again = run(case, &mut *compile(case, &device(2), mode), &schedules[0], None, 1);
        assert_same_bits(&again, &first, &format!("{what}, threads in another order"));
    }
    if name != METAL || mode.activations == ActivationMode::F32 {
        check_poison(case, &mut *executable, &schedules[..1], &first, &what);
    }
    largest
}

/// A NaN among a token's inputs makes its result NaN and that of every row that reads it, and no other's; a run after
/// it knows nothing of it.
pub fn check_poison(
    case: &Case,
    executable: &mut dyn Executable,
    schedules: &[Schedule],
    clean: &Results,
    what: &str,
) {
    let poisoned = (1, case.lengths[1] / 2);
    let poison = Some(poisoned);
    let mut reference = compile(case, &Reference, MODES[0]);
    let expected = run(case, &mut *reference, &schedules[0], poison, 1);
    let got = run(case, executable, &schedules[0], poison, 1);
    let is_nan = |row: &Vec<f32>| row.iter().any(|v| v.is_nan());
    assert!(is_nan(&expected[&poisoned]), "{what}: the reference gives NaN");
    for (key, row) in &got {
        if is_nan(&expected[key]) {
            assert!(is_nan(row), "{what}: NaN is lost at {key:?}");
        } else {
            let row = Results::from([(*key, row.clone())]);
            assert_same_bits(&row, clean, &format!("{what}, beside a NaN"));
        }
    }
    let after = run(case, executable, &schedules[schedules.len().min(2) - 1], None, 1);
    assert_same_bits(&after, clean, &format!("{what}, after a NaN"));
}
