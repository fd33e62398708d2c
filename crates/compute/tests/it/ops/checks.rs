//! Running a case under several schedules, and comparing what backends make of it.

use std::collections::BTreeMap;

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Embeddings, Executable, ExpertSource, ExpertView,
    PAGE_TOKENS, Span, StateSlots,
};
use moeflux_compute::cpu::{CpuBackend, Simd, SimdLevel};
use moeflux_compute::graph::{ExpertSetId, GivenEmbeddingsOp, InputRowsOp, Op};
use moeflux_compute::reference::Reference;
use moeflux_compute::{Result, Tensor};

use super::adapters::of_sequence;
use super::case::{Case, Expert, OnDevices, POISON, Schedule};
use super::errors::{Bound, MODES, Mode, TF32_PAIR, allowed};
use crate::support::devices::{CPU, CUDA, METAL, MakeDevice, devices, is_in_part, is_tested, is_tried};

/// Hands over experts in one of several orders and groupings.
pub struct Source<'a> {
    pub experts: &'a [Expert],
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
            let Expert { gate, up, down } = &self.experts[*id as usize];
            ExpertView { id: *id, gate: gate.as_ref().map(Tensor::view), up: up.view(), down: down.view() }
        };
        let views: Vec<ExpertView<'_>> = ids.iter().map(view).collect();
        views.chunks([views.len().max(1), 1, 2][self.order % 3]).for_each(visitor);
        Ok(())
    }
}

/// Results by sequence and position.
pub type Results = BTreeMap<(usize, usize), Vec<f32>>;

/// Runs `case` on `executable`. The token at `poison` is [`POISON`]; every `stride`-th row is asked for. States of every
/// second sequence go from slot to slot, those of the others stay in place.
pub fn run(
    case: &Case,
    executable: &mut dyn Executable,
    schedule: &Schedule,
    poison: Option<(usize, usize)>,
) -> Results {
    try_run(case, executable, schedule, poison).unwrap()
}

/// The same, which a device may fail to do.
pub fn try_run(
    case: &Case,
    executable: &mut dyn Executable,
    Schedule { batches, stride }: &Schedule,
    poison: Option<(usize, usize)>,
) -> Result<Results> {
    let lengths = case.batching.lengths();
    let token = |sequence: usize, position: usize| match poison {
        Some(at) if at == (sequence, position) => POISON,
        _ => (sequence * 31 + position * 7 + position * position / 3) as u32 % POISON,
    };
    let (mut positions, mut turns) = (vec![0; lengths.len()], vec![0; lengths.len()]);
    let mut pages: Vec<Vec<u32>> = vec![vec![]; lengths.len()];
    // Pages go to sequences in an order that differs from schedule to schedule.
    let total: usize = lengths.iter().map(|n| n.div_ceil(PAGE_TOKENS)).sum();
    let mut free: Vec<u32> = (0..total as u32).collect();
    free.rotate_left(batches.len() % total);
    executable.reserve_pages(total).unwrap();
    executable.reserve_slots(2 * lengths.len()).unwrap();

    let mut source = Source { experts: &case.experts, order: batches.len() };
    let mut results = Results::new();
    let mut logits = vec![f32::NAN; 3];
    for batch in batches {
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
                slots: slots(*sequence, turns[*sequence]),
                adapter: of_sequence(*sequence),
            }
        };
        let spans: Vec<Span<'_>> = batch.iter().map(span).collect();
        let outputs: Vec<u32> = (0..tokens.len() as u32).step_by(*stride).collect();
        let input_rows = input_rows(case, &tokens);
        let (given, values) = embeddings(case, &tokens);
        let axes: Vec<[u32; 3]> =
            if case.axes { rows.iter().map(|(_, p)| axes(*p)).collect() } else { vec![] };
        let ahead = case.graph.caches().iter().any(|shape| shape.ahead);
        let sees: Vec<u32> = if ahead { spans.iter().flat_map(sees).collect() } else { vec![] };
        let inputs = Batch {
            tokens: &tokens,
            spans: &spans,
            outputs: &outputs,
            rows: &input_rows,
            embeddings: Embeddings { rows: &given, values: &values },
            positions: &axes,
            sees: &sees,
        };
        let width = case.width();
        run_batch(case, executable, &inputs, &mut source, &mut logits)?;
        assert_eq!(logits.len(), outputs.len() * width, "{}", case.name);
        for (row, logits) in outputs.iter().zip(logits.chunks_exact(width)) {
            results.insert(rows[*row as usize], logits.to_vec());
        }
        for (sequence, count) in batch {
            positions[*sequence] += count;
            turns[*sequence] += 1;
        }
        source.order += 1;
    }
    Ok(results)
}

/// The results of one batch.
pub fn run_batch(
    case: &Case,
    executable: &mut dyn Executable,
    batch: &Batch<'_>,
    source: &mut Source<'_>,
    results: &mut Vec<f32>,
) -> Result<()> {
    if case.head {
        return executable.run(batch, source, results);
    }
    results.clear();
    executable.run_hidden(batch, source, &mut |rows| results.extend_from_slice(rows))
}

/// (tokens, width): what the graph's input of rows gets, if it has one.
fn input_rows(case: &Case, tokens: &[u32]) -> Vec<f32> {
    let width = case.graph.nodes().iter().find_map(|node| match node.op {
        Op::InputRows(InputRowsOp { width }) => Some(width),
        _ => None,
    });
    let value = |token: u32, column: usize| ((token as usize * 37 + column * 11) % 101) as f32 / 8.0 - 6.0;
    let row = |token: &u32| (0..width.unwrap_or(0)).map(|column| value(*token, column)).collect::<Vec<_>>();
    tokens.iter().flat_map(row).collect()
}

/// Rows of a span see each other by fives, but for the first.
fn sees<'a>(span: &'a Span<'_>) -> impl Iterator<Item = u32> + use<'a> {
    let last = span.start + span.rows.len() - 1;
    (span.start..=last).map(move |p| (if p == 0 { 0 } else { (p / 5 * 5 + 4).min(last) }) as u32)
}

/// Positions of a token on three axes.
fn axes(position: usize) -> [u32; 3] {
    [position, position / 2 + 1, 3 * position % 50].map(|p| p as u32)
}

/// Embeddings in place of those of every third token, of two levels, if the graph adds some.
fn embeddings(case: &Case, tokens: &[u32]) -> (Vec<u32>, Vec<f32>) {
    let width = case.graph.nodes().iter().find_map(|node| match node.op {
        Op::GivenEmbeddings(GivenEmbeddingsOp { x, .. }) => Some(x.width()),
        _ => None,
    });
    let Some(width) = width else { return (vec![], vec![]) };
    let rows: Vec<u32> =
        (0..tokens.len() as u32).filter(|row| tokens[*row as usize].is_multiple_of(3)).collect();
    let value = |token: u32, column: usize| ((token as usize * 37 + column * 11) % 101) as f32 / 8.0 - 6.0;
    let row =
        |row: &u32| (0..2 * width).map(|column| value(tokens[*row as usize], column)).collect::<Vec<_>>();
    let values = rows.iter().flat_map(row).collect();
    (rows, values)
}

/// Slots of a sequence's batch of this number.
fn slots(sequence: usize, turn: u32) -> StateSlots {
    let first = 2 * sequence as u32;
    match sequence % 2 {
        0 => StateSlots { read: first + (turn + 1) % 2, write: first + turn % 2 },
        _ => StateSlots { read: first, write: first },
    }
}

/// Runs `case` as [`run`] does, with every row asked for and no NaN.
pub fn run_all(case: &Case, executable: &mut dyn Executable, schedule: &Schedule) -> Results {
    let all = Schedule { batches: schedule.batches.clone(), stride: 1 };
    run(case, executable, &all, None)
}

pub fn compile(case: &Case, backend: &dyn Backend, mode: Mode) -> Box<dyn Executable> {
    let Mode { activations, kv_type } = mode;
    let max_rows = case.batching.lengths().iter().sum();
    let options = CompileOptions { activations, kv_type, max_rows, ..CompileOptions::default() };
    backend.compile(&case.graph, case.weights.clone(), options).unwrap()
}

/// How far `got` is from what is right.
pub fn difference(got: &Results, right: &Results) -> Bound {
    assert!(got.keys().eq(right.keys()));
    let values = |results: &Results| results.values().flatten().map(|v| f64::from(*v)).collect::<Vec<_>>();
    let (got, right) = (values(got), values(right));
    let differences = || got.iter().zip(&right).map(|(a, b)| (a - b).abs());
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        values.fold(0.0, |most: f64, v| if v > most || v.is_nan() { v } else { most })
    };
    let size: f64 = right.iter().map(|v| v.powi(2)).sum();
    assert!(size > 0.0, "the reference computes something");
    Bound {
        mean_square: differences().map(|v| v.powi(2)).sum::<f64>() / size,
        largest: largest(&mut differences()) / largest(&mut right.iter().map(|v| v.abs())),
    }
}

/// Panics at results that are not within the bound.
pub fn check_close(got: &Results, right: &Results, bound: Bound, what: &str) -> Bound {
    let found = difference(got, right);
    let close = found.mean_square <= bound.mean_square && found.largest <= bound.largest;
    assert!(close, "{what}: {found} is not within {bound}");
    found
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

/// A case with what the reference makes of it.
struct Expected<'a> {
    case: &'a Case,
    /// Which of a list of cases it is.
    number: usize,
    schedules: [Schedule; 5],
    right: Results,
    /// With a NaN in the second sequence.
    poisoned: Option<(usize, usize)>,
    right_poisoned: Results,
}

impl<'a> Expected<'a> {
    fn new(number: usize, case: &'a Case) -> Self {
        let schedules = case.batching.schedules();
        let mut reference = compile(case, &Reference, MODES[0]);
        let right = run_all(case, &mut *reference, &schedules[0]);
        let pieces = run_all(case, &mut *reference, &schedules[3]);
        assert_same_bits(&pieces, &right, &format!("{}: the reference in pieces", case.name));
        let poisoned = case.poisoned.then(|| (1, case.batching.lengths()[1] / 2));
        let right_poisoned = match poisoned {
            Some(at) => run(case, &mut *reference, &schedules[0], Some(at)),
            None => Results::new(),
        };
        assert!(poisoned.is_none_or(|at| is_nan(&right_poisoned[&at])), "{}: no NaN", case.name);
        Self { case, number, schedules, right, poisoned, right_poisoned }
    }

    /// Results of an instruction set are as close as the table says, and bit for bit the same under every schedule and
    /// with every number of threads.
    fn check_level(&self, level: &Level, mode: Mode, bound: Bound) -> Bound {
        let case = self.case;
        let what = format!("{} {} on {}, {mode:?}", case.tested.kind(), case.name, level.one.describe());
        let mut executable = compile(case, &level.one, mode);
        let first = run(case, &mut *executable, &self.schedules[0], None);
        let found = check_close(&first, &self.right, bound, &what);
        for (index, schedule) in self.schedules.iter().enumerate().skip(1) {
            let got = run(case, &mut *executable, schedule, None);
            assert_same_bits(&got, &first, &format!("{what}, schedule {index}"));
        }
        self.check_poison(&mut *executable, &self.schedules[1], &first, &what);
        let mut executable = compile(case, &level.several, mode);
        for index in [0, 3] {
            let got = run_all(case, &mut *executable, &self.schedules[index]);
            assert_same_bits(&got, &first, &format!("{what}, several threads, schedule {index}"));
        }
        found
    }

    /// Results on a device are as close as the table says however sequences are cut into batches, do not depend on the
    /// order in which threads run, and keep NaNs where they belong.
    fn check_device(&self, mode: Mode, (name, device): (&str, &MakeDevice), bound: Bound) -> Bound {
        let case = self.case;
        let what = format!("{} {} on {name}, {mode:?}", case.tested.kind(), case.name);
        // Every case ends with a product in f32.
        let bound = if name == CUDA { bound.max(TF32_PAIR) } else { bound };
        let mut executable = compile(case, &device(1), mode);
        let first = run(case, &mut *executable, &self.schedules[0], None);
        let mut found = check_close(&first, &self.right, bound, &what);
        let all = case.on_devices == OnDevices::All;
        let of_all = all && (name == CUDA || is_tried(self.number, 2));
        if of_all || name != METAL && mode == case.modes()[0] {
            let pieces = run_all(case, &mut *executable, &self.schedules[3]);
            found = found.max(check_close(&pieces, &self.right, bound, &what));
        }
        // Of the same kernels by another compiler, what does not depend on that is not asked again.
        if all && name != METAL && is_tried(self.number, if name == CUDA { 1 } else { 2 }) {
            let what = format!("{what}, threads in another order");
            let mut again = compile(case, &device(2), mode);
            if self.poisoned.is_none() {
                assert_same_bits(&run(case, &mut *again, &self.schedules[0], None), &first, &what);
            }
            self.check_poison(&mut *again, &self.schedules[0], &first, &what);
        } else if all && mode.activations == ActivationMode::F32 {
            self.check_poison(&mut *executable, &self.schedules[0], &first, &what);
        }
        found
    }

    /// A NaN among a token's inputs makes its result NaN and that of every row that reads it, and no other's; a run
    /// after it knows nothing of it.
    fn check_poison(&self, executable: &mut dyn Executable, after: &Schedule, clean: &Results, what: &str) {
        if self.poisoned.is_none() {
            return;
        }
        let got = run(self.case, executable, &self.schedules[0], self.poisoned);
        for (key, row) in &got {
            if is_nan(&self.right_poisoned[key]) {
                assert!(is_nan(row), "{what}: NaN is lost at {key:?}");
            } else {
                let row = Results::from([(*key, row.clone())]);
                assert_same_bits(&row, clean, &format!("{what}, beside a NaN"));
            }
        }
        let after = run(self.case, executable, after, None);
        assert_same_bits(&after, clean, &format!("{what}, after a NaN"));
    }
}

fn is_nan(row: &[f32]) -> bool {
    row.iter().any(|v| v.is_nan())
}

/// The one check: every case on every backend in every mode, under every schedule; by Metal's text of the kernels a third
/// of the cases, but all where that alone is tested; on emulated devices in one of the modes.
pub fn check(cases: impl IntoIterator<Item = Case>) {
    let (backends, devices) = (backends(), devices());
    // Largest error seen by operation and bound, for whoever tunes the table.
    let mut seen: BTreeMap<String, Bound> = BTreeMap::new();
    let mut see = |what: &str, case: &Case, bound: Bound, found: Bound| {
        let key = format!("{} {what}, bound {bound}", case.tested.kind());
        let most = seen.entry(key).or_insert(found);
        *most = most.max(found);
    };
    let has_gpu = devices.iter().any(|(name, _)| *name == CUDA);
    for (number, case) in cases.into_iter().filter(|_| is_in_part()).enumerate() {
        let for_gpus = case.on_devices == OnDevices::Hardware;
        // Where there are none, some of what is for their sake is enough for the processor.
        if for_gpus && !has_gpu && !is_tried(number, 8) {
            continue;
        }
        let expected = Expected::new(number, &case);
        // A third of the cases, the first among them, in a sequence without a period, which kinds of cases would fall in with.
        let by_metal = is_tried(number.count_ones() as usize, 3) || !is_tested(CPU);
        let modes = case.modes();
        for (turn, mode) in modes.iter().copied().enumerate() {
            let bound = allowed(&case.tested, case.dtype, mode);
            // Nor need it run on every instruction set.
            let skipped = if for_gpus { backends.len().saturating_sub(1) } else { 0 };
            for level in &backends[skipped..] {
                see(CPU, &case, bound, expected.check_level(level, mode, bound));
            }
            // Emulated devices take turns at the modes.
            let in_mode = is_tried(number + turn, modes.len());
            let devices = devices.iter().filter(|(name, _)| *name == CUDA || in_mode);
            let devices = devices.filter(|(name, _)| by_metal || *name != METAL);
            let devices = devices.filter(|(name, _)| match case.on_devices {
                OnDevices::All | OnDevices::Results => true,
                OnDevices::Hardware => *name == CUDA,
                OnDevices::Nothing => false,
            });
            for (name, device) in devices {
                see(name, &case, bound, expected.check_device(mode, (name, device), bound));
            }
        }
    }
    seen.iter().for_each(|(what, found)| println!("{what}: largest {found}"));
}
