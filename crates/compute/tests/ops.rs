//! Every operation × encoding × backend against `reference`, and what does not depend on the batch.
//!
//! A [`Case`] is a tiny graph around one operation. Its inputs are embeddings of float tables, so that a token's inputs
//! depend on its id alone; its result leaves through an exact identity matrix. Each case runs under several schedules
//! (whole sequences alone or together, in other orders, in pieces, token by token). One schedule is compared with the
//! reference, the others with it bit for bit.

mod support;

use std::collections::BTreeMap;

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, KvType,
    PAGE_TOKENS, Span, StateSlots,
};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use moeflux_compute::graph::{
    Attention, ExpertSet, ExpertSetId, Graph, GraphBuilder, GroupRank, Groups, MatrixSpec, Precision, Rope,
    RopeStyle, Route, Routing, Score, Value, WeightId,
};
use moeflux_compute::plan::Plan;
use moeflux_compute::reference::Reference;
use moeflux_compute::{DType, Error, Half, Result, Tensor};
use support::{Random, affine, dtypes, weight};

/// Which row of the error table a case belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tested {
    Embed,
    Linear,
    /// A linear layer whose activations are never quantised.
    LinearF32,
    RmsNorm,
    Rope,
    Attention,
    SwiGlu,
    Add,
    Clamp,
    SigmoidGate,
    Slice,
    Route,
    MoeExperts,
    GatherRows,
}

/// Precisions that a case runs with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mode {
    activations: ActivationMode,
    kv_type: KvType,
}

const MODES: [Mode; 2] = [
    Mode { activations: ActivationMode::F32, kv_type: KvType::F32 },
    Mode { activations: ActivationMode::Int8, kv_type: KvType::F16 },
];

/// The error table: largest mean squared difference from the reference over the reference's mean square.
fn tolerance(tested: Tested, dtype: DType, mode: Mode) -> f64 {
    let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let int8 = mode.activations == ActivationMode::Int8 && !plain;
    match tested {
        // Copies, or one rounding that both sides make.
        Tested::Embed | Tested::Add | Tested::Clamp | Tested::Slice | Tested::GatherRows => 0.0,
        // The same f32 operations in the same order, a product more or less.
        Tested::Rope => 1e-14,
        // A sum and some products in f32, each rounding at 6e-8: (1e-6)² leaves room for the longest rows.
        Tested::RmsNorm | Tested::SwiGlu | Tested::SigmoidGate | Tested::Route | Tested::LinearF32 => 1e-12,
        Tested::Linear if !int8 => 1e-12,
        // Steps of max/127 per 32 normal values, whose maximum is about 2.1 σ: (2.1/127)²/12 = 2.3e-5. One output row
        // of a short weight is a sample of few values: up to 2.5 times that.
        Tested::Linear => 6e-5,
        // f32 sums as above, twice, with a softmax between.
        Tested::Attention if mode.kv_type == KvType::F32 => 1e-12,
        // Values round to 11 bits: (2⁻¹¹)²/12 · 4/3 ≈ 3e-8; keys the same, which the softmax amplifies.
        Tested::Attention => 5e-7,
        // Three f32 products in a row.
        Tested::MoeExperts if !int8 => 1e-11,
        // Gate, up and down each add what a linear layer does; an output's error is that of two rounded factors plus
        // one more rounding of their product.
        Tested::MoeExperts => 2e-4,
    }
}

/// One operation with its shapes and parameters.
struct Case {
    name: String,
    tested: Tested,
    dtype: DType,
    graph: Graph,
    weights: Vec<Tensor>,
    experts: Experts,
    /// Tokens of each sequence.
    lengths: &'static [usize],
}

/// gate, up and down of every expert of one layer.
type Experts = Vec<[Tensor; 3]>;

/// Token ids that inputs exist for. The last one's inputs are poisoned: see [`Recorder::input`].
const VOCABULARY: usize = 89;
const POISON: u32 = VOCABULARY as u32 - 1;

/// Lengths that make batches of 1 to 53 rows.
const SHORT: &[usize] = &[40, 9, 3, 1];
/// Lengths that end before, on and after the boundaries of pages.
const LONG: &[usize] = &[2 * PAGE_TOKENS + 12, PAGE_TOKENS + 1, PAGE_TOKENS, 1];

/// A graph being recorded with its weights.
struct Recorder {
    graph: GraphBuilder,
    weights: Vec<Tensor>,
    random: Random,
}

impl Recorder {
    fn new(seed: u64) -> Self {
        Self { graph: GraphBuilder::new(), weights: vec![], random: Random::new(seed) }
    }

    fn declare(&mut self, tensor: Tensor) -> WeightId {
        let (dtype, rows, cols) = (tensor.dtype(), tensor.rows(), tensor.cols());
        self.weights.push(tensor);
        self.graph.weight("weight", MatrixSpec { dtype, rows, cols })
    }

    fn matrix(&mut self, dtype: DType, rows: usize, cols: usize) -> WeightId {
        let tensor = weight(&mut self.random, dtype, rows, cols);
        self.declare(tensor)
    }

    fn vector(&mut self, len: usize) -> WeightId {
        self.matrix(DType::F32, 1, len)
    }

    /// Values for every token; those of [`POISON`] hold one NaN.
    fn input_of(&mut self, width: usize, mut value: impl FnMut(&mut Random) -> f32) -> Value {
        let mut table: Vec<f32> = (0..VOCABULARY * width).map(|_| value(&mut self.random)).collect();
        // The sign bit set, as x86 makes NaNs, for every other width.
        let nan = if width.is_multiple_of(2) { -f32::NAN } else { f32::NAN };
        table[POISON as usize * width + width / 2] = nan;
        let table = self.declare(Tensor::from_f32(VOCABULARY, width, &table).unwrap());
        self.graph.embed(table)
    }

    /// Normal values for every token.
    fn input(&mut self, width: usize) -> Value {
        self.input_of(width, Random::normal)
    }

    fn case(self, name: String, tested: Tested, dtype: DType, out: Value) -> Case {
        self.moe_case(name, tested, dtype, out, vec![])
    }

    fn moe_case(mut self, name: String, tested: Tested, dtype: DType, out: Value, experts: Experts) -> Case {
        let width = out.width();
        let rows = self.graph.gather_rows(out);
        let mut identity = vec![0.0; width * width];
        (0..width).for_each(|i| identity[i * width + i] = 1.0);
        let identity = self.declare(Tensor::from_f32(width, width, &identity).unwrap());
        let logits = self.graph.linear(rows, identity, None, Precision::F32).unwrap();
        let (graph, weights) = (self.graph.finish(logits), self.weights);
        Case { name: format!("{tested:?} {name}"), tested, dtype, graph, weights, experts, lengths: SHORT }
    }
}

/// Hands over experts in one of several orders and groupings.
struct Source<'a> {
    experts: &'a Experts,
    order: usize,
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
            ExpertView { id: *id, gate: gate.view(), up: up.view(), down: down.view() }
        };
        let views: Vec<ExpertView<'_>> = ids.iter().map(view).collect();
        views.chunks([views.len().max(1), 1, 2][self.order % 3]).for_each(visitor);
        Ok(())
    }
}

/// Batches of (sequence, number of its next tokens).
type Schedule = Vec<Vec<(usize, usize)>>;

/// Ways to run sequences of these lengths; the first one is what the reference runs.
fn schedules(lengths: &[usize]) -> Vec<Schedule> {
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
type Results = BTreeMap<(usize, usize), Vec<f32>>;

/// Runs `case` on `executable`. The token at `poison` is [`POISON`]; every `stride`-th row is asked for.
fn run(
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

fn compile(case: &Case, backend: &dyn Backend, mode: Mode) -> Box<dyn Executable> {
    let Mode { activations, kv_type } = mode;
    let max_rows = case.lengths.iter().sum();
    let options = CompileOptions { activations, kv_type, max_rows, ..CompileOptions::default() };
    let plan = Plan::new(&case.graph, |_| true);
    backend.compile(&case.graph, plan, case.weights.clone(), options).unwrap()
}

/// Mean squared difference over the mean square of what is right.
fn nmse(got: &Results, right: &Results) -> f64 {
    assert!(got.keys().eq(right.keys()));
    let pairs = || got.values().flatten().zip(right.values().flatten());
    let error: f64 = pairs().map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let size: f64 = pairs().map(|(_, b)| f64::from(*b).powi(2)).sum();
    assert!(size > 0.0, "the reference computes something");
    error / size
}

/// Panics at the first result that is not that of `expected`, bit for bit; `got` may have fewer.
fn assert_same_bits(got: &Results, expected: &Results, what: &str) {
    for (key, got) in got {
        for (column, (got, expected)) in got.iter().zip(&expected[key]).enumerate() {
            let same = got.to_bits() == expected.to_bits();
            assert!(same, "{what}: (sequence, position) {key:?}, column {column}: {got} is not {expected}");
        }
    }
}

/// The backends of one instruction set.
struct Level {
    one: CpuBackend,
    /// More threads than the machine may have cores.
    several: CpuBackend,
}

/// Every instruction set of this machine.
fn backends() -> Vec<Level> {
    let backend = |level, threads| CpuBackend::new(threads, Some(level)).unwrap();
    let level = |level| Level { one: backend(level, 1), several: backend(level, 3) };
    SimdLevel::available().into_iter().map(level).collect()
}

/// Modes that make a difference to an operation.
fn modes(tested: Tested) -> &'static [Mode] {
    match tested {
        Tested::Linear | Tested::LinearF32 | Tested::Attention | Tested::MoeExperts => &MODES,
        _ => &MODES[1..],
    }
}

/// The one check: every case on every backend in every mode, under every schedule.
fn check(cases: impl IntoIterator<Item = Case>) {
    let (backends, devices) = (backends(), devices());
    // Largest error seen by operation and tolerance, for whoever tunes the table.
    let mut largest: BTreeMap<String, f64> = BTreeMap::new();
    for case in cases {
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

/// Makes a backend on a device; what is left to chance follows from the seed.
type MakeDevice = fn(u64) -> GpuBackend;

/// The emulated device with the text that Metal gets.
const METAL: &str = "the emulator with Metal's text";

/// The emulated device with both texts of the kernels, and a GPU where there is one.
fn devices() -> Vec<(&'static str, MakeDevice)> {
    let emulated: MakeDevice =
        |seed| GpuBackend::new("emulator", GpuOptions::default(), move || Ok(Box::new(Emulator::new(seed))));
    let metal: MakeDevice = |seed| {
        GpuBackend::new("metal", GpuOptions::default(), move || Ok(Box::new(Emulator::new(seed).metal())))
    };
    let mut all = vec![("the emulator", emulated), (METAL, metal)];
    #[cfg(target_os = "linux")]
    if moeflux_compute::gpu::cuda::devices().is_ok() {
        all.push(("CUDA", |_| {
            let open = || Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, None)?) as _);
            GpuBackend::new("cuda", GpuOptions::default(), open)
        }));
    }
    all
}

/// Results on a device are as close as the table says however sequences are cut into batches, do not depend on the
/// order in which threads run, and keep NaNs where they belong. Returns the largest error.
fn check_device(
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
fn check_poison(
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

/// Row lengths for an encoding: one block, and several that are no multiple of 256.
fn columns(dtype: DType) -> [usize; 2] {
    match dtype.block_len() {
        1 => [5, 83],
        n => [n, 3 * n],
    }
}

#[test]
fn embed() {
    let case = |dtype: DType| {
        let mut r = Recorder::new(1);
        let width = columns(dtype)[1];
        let table = r.matrix(dtype, VOCABULARY, width);
        let x = r.graph.embed(table);
        // The table has no NaN: another input brings it in.
        let zeros = r.input_of(width, |_| 0.0);
        let out = r.graph.add(x, zeros).unwrap();
        r.case(format!("{dtype} {width}"), Tested::Embed, dtype, out)
    };
    check(dtypes().into_iter().map(case));
}

/// Recorder and value of a linear layer on normal inputs.
fn linear_case(dtype: DType, rows: usize, cols: usize, bias: bool, precision: Precision) -> Case {
    let mut r = Recorder::new(rows as u64 * 1000 + cols as u64);
    let x = r.input(cols);
    let weight = r.matrix(dtype, rows, cols);
    let bias = bias.then(|| r.vector(rows));
    let out = r.graph.linear(x, weight, bias, precision).unwrap();
    let tested = if precision == Precision::F32 { Tested::LinearF32 } else { Tested::Linear };
    r.case(format!("{dtype} {rows}×{cols}, bias {bias:?}"), tested, dtype, out)
}

#[test]
fn linear() {
    check(dtypes().into_iter().flat_map(|dtype| {
        let [short, long] = columns(dtype);
        [
            linear_case(dtype, 1, long, true, Precision::Fast),
            linear_case(dtype, 67, short, false, Precision::Fast),
            linear_case(dtype, 33, long, true, Precision::F32),
        ]
    }));
}

#[test]
fn linear_layers_that_share_an_input() {
    let mut r = Recorder::new(4);
    let x = r.input(96);
    // All before the first addition: layers that follow each other run as one.
    let dtypes = [DType::Q8_0, DType::F32, DType::Q4_0, affine(4, 32, Half::F16)];
    let layers = dtypes.map(|dtype| {
        let (weight, bias) = (r.matrix(dtype, 45, 96), r.vector(45));
        r.graph.linear(x, weight, Some(bias), Precision::Fast).unwrap()
    });
    let out = layers.into_iter().reduce(|sum, layer| r.graph.add(sum, layer).unwrap()).unwrap();
    check([r.case("shared input".into(), Tested::Linear, DType::Q8_0, out)]);
}

#[test]
fn rms_norm() {
    let case = |(width, groups, eps): (usize, usize, f32)| {
        let mut r = Recorder::new(5);
        let x = r.input(width);
        let weight = r.vector(width / groups);
        let out = r.graph.rms_norm(x, weight, groups, eps).unwrap();
        r.case(format!("{width} in {groups}, eps {eps}"), Tested::RmsNorm, DType::F32, out)
    };
    let shapes = [(1, 1, 1e-6), (7, 1, 0.5), (64, 4, 1e-5), (60, 5, 1e-6), (300, 1, 1e-6), (96, 96, 1e-2)];
    check(shapes.into_iter().map(case));
}

#[test]
fn rms_norm_of_tiny_and_huge_rows() {
    for scale in [1e-18, 1e17] {
        let mut r = Recorder::new(6);
        let x = r.input_of(48, |random| random.normal() * scale);
        let weight = r.vector(48);
        let out = r.graph.rms_norm(x, weight, 1, 1e-6).unwrap();
        check([r.case(format!("scale {scale}"), Tested::RmsNorm, DType::F32, out)]);
    }
}

#[test]
fn rope() {
    let case = |(style, heads, head_dim, pairs): (RopeStyle, usize, usize, usize)| {
        let mut r = Recorder::new(7);
        let x = r.input(heads * head_dim);
        let inv_freq = (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect();
        let rotation = r.graph.rotation(Rope { style, inv_freq, magnitude: 1.25 });
        let out = r.graph.rope(x, heads, rotation).unwrap();
        let name = format!("{style:?}, {heads} heads of {head_dim}, {pairs} pairs");
        Case { lengths: LONG, ..r.case(name, Tested::Rope, DType::F32, out) }
    };
    let shapes = [
        (RopeStyle::HalfSplit, 3, 16, 8),
        (RopeStyle::HalfSplit, 1, 20, 5),
        (RopeStyle::HalfSplit, 2, 9, 4),
        (RopeStyle::Interleaved, 3, 16, 8),
        (RopeStyle::Interleaved, 2, 20, 6),
        (RopeStyle::Interleaved, 1, 2, 1),
    ];
    check(shapes.into_iter().map(case));
}

#[test]
fn attention() {
    let case = |(heads, kv_heads, head_dim, window): (usize, usize, usize, Option<usize>)| {
        let mut r = Recorder::new(8);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|n| r.input(n * head_dim));
        // Larger than 1/√d, so that some keys matter much more than others.
        let scale = 1.7 / (head_dim as f32).sqrt();
        let shape = Attention { heads, kv_heads, head_dim, scale, window };
        let out = r.graph.attention(q, k, v, shape).unwrap();
        let name = format!("{heads}/{kv_heads} heads of {head_dim}, window {window:?}");
        Case { lengths: LONG, ..r.case(name, Tested::Attention, DType::F32, out) }
    };
    let shapes = [
        (1, 1, 1, None),
        (4, 2, 12, None),
        (6, 1, 20, None),
        (3, 3, 16, None),
        (2, 1, 128, None),
        (4, 2, 12, Some(1)),
        (4, 2, 12, Some(13)),
        (2, 2, 8, Some(PAGE_TOKENS)),
        (2, 1, 8, Some(PAGE_TOKENS + 1)),
        (2, 1, 8, Some(100_000)),
    ];
    check(shapes.into_iter().map(case));
}

#[test]
fn two_attention_layers_keep_their_own_keys() {
    let mut r = Recorder::new(9);
    let shape = Attention { heads: 2, kv_heads: 1, head_dim: 8, scale: 0.3, window: None };
    let [q, k, v] = [16, 8, 8].map(|width| r.input(width));
    let first = r.graph.attention(q, k, v, shape).unwrap();
    let [k, v] = [8, 8].map(|width| r.input(width));
    let out = r.graph.attention(first, k, v, shape).unwrap();
    check([Case { lengths: LONG, ..r.case("two layers".into(), Tested::Attention, DType::F32, out) }]);
}

#[test]
fn elementwise() {
    let case = |(tested, width): (Tested, usize)| {
        let mut r = Recorder::new(10);
        let (a, b) = (r.input_of(width, |random| random.normal() * 6.0), r.input(width));
        let out = match tested {
            Tested::SwiGlu => r.graph.swiglu(a, b).unwrap(),
            Tested::Add => r.graph.add(a, b).unwrap(),
            Tested::Clamp => r.graph.clamp(a, 1.5),
            Tested::SigmoidGate => r.graph.sigmoid_gate(b, a).unwrap(),
            _ => a,
        };
        r.case(format!("{width}"), tested, DType::F32, out)
    };
    let all = [Tested::SwiGlu, Tested::Add, Tested::Clamp, Tested::SigmoidGate, Tested::GatherRows];
    check(all.into_iter().flat_map(|tested| [1, 37, 500].map(|width| case((tested, width)))));
}

#[test]
fn one_sigmoid_gate_for_a_row() {
    let mut r = Recorder::new(14);
    let (x, gate) = (r.input(37), r.input(1));
    let out = r.graph.sigmoid_gate(x, gate).unwrap();
    check([r.case("37 by one gate".into(), Tested::SigmoidGate, DType::F32, out)]);
}

#[test]
fn slice() {
    let case = |(width, groups, start, len): (usize, usize, usize, usize)| {
        let mut r = Recorder::new(15);
        let x = r.input(width);
        // The poisoned column may lie outside the slice.
        let zeros = r.input_of(groups * len, |_| 0.0);
        let part = r.graph.slice(x, groups, start, len).unwrap();
        assert_eq!(part.width(), groups * len);
        let out = r.graph.add(part, zeros).unwrap();
        let name = format!("{start}..+{len} of each of {groups} in {width}");
        r.case(name, Tested::Slice, DType::F32, out)
    };
    let shapes =
        [(24, 1, 0, 24), (24, 4, 0, 3), (24, 4, 3, 3), (21, 3, 5, 2), (17, 1, 16, 1), (500, 2, 10, 200)];
    check(shapes.into_iter().map(case));
}

/// Experts that ignore their weights' input but for column 0, which is 1: expert e yields a constant in column e, so
/// that their sum shows the router's weights by expert.
fn revealing_experts(count: usize) -> Experts {
    let first = |value: f32| {
        let row: Vec<f32> = (0..count).map(|column| if column == 0 { value } else { 0.0 }).collect();
        Tensor::from_f32(1, count, &row).unwrap()
    };
    let unit = |e: usize| (0..count).map(|row| if row == e { 1.0 } else { 0.0 }).collect::<Vec<f32>>();
    (0..count).map(|e| [first(3.0), first(0.4), Tensor::from_f32(count, 1, &unit(e)).unwrap()]).collect()
}

fn expert_set(experts: &Experts) -> ExpertSet {
    let spec = |t: &Tensor| MatrixSpec { dtype: t.dtype(), rows: t.rows(), cols: t.cols() };
    let [gate, up, down] = &experts[0];
    ExpertSet { layer: 0, experts: experts.len(), gate: spec(gate), up: spec(up), down: spec(down) }
}

/// A router on logits from `logit`, whose choices show in the result.
fn route_case(route: Route, name: &str, logit: impl FnMut(&mut Random) -> f32) -> Case {
    biased_route_case(route, false, name, logit)
}

fn biased_route_case(route: Route, bias: bool, name: &str, logit: impl FnMut(&mut Random) -> f32) -> Case {
    let mut r = Recorder::new(11);
    let logits = r.input_of(route.experts, logit);
    let bias = bias.then(|| r.vector(route.experts));
    let ones: Vec<f32> =
        (0..VOCABULARY).flat_map(|_| (0..route.experts).map(|c| f32::from(c == 0))).collect();
    let ones = r.declare(Tensor::from_f32(VOCABULARY, route.experts, &ones).unwrap());
    let x = r.graph.embed(ones);
    let routing = r.graph.route(logits, bias, route).unwrap();
    assert_eq!(routing.top_k(), route.top_k);
    let experts = revealing_experts(route.experts);
    let set = r.graph.expert_set(expert_set(&experts)).unwrap();
    let out = r.graph.moe_experts(x, routing, set).unwrap();
    r.moe_case(format!("{name}: {route:?}"), Tested::Route, DType::F32, out, experts)
}

#[test]
fn route() {
    let route = |(experts, top_k)| Route::softmax(experts, top_k, top_k % 2 == 1);
    for shape in [(1, 1), (2, 1), (5, 2), (7, 3), (8, 8), (40, 6), (130, 9)] {
        check([route_case(route(shape), "normal", Random::normal)]);
    }
    for shape in [(5, 2), (12, 5)] {
        check([
            // Ties, which the lower id wins.
            route_case(route(shape), "few levels", |random| random.below(3) as f32),
            // Where a softmax without its maximum taken off overflows.
            route_case(route(shape), "large", |random| 200.0 + 30.0 * random.normal()),
        ]);
    }
}

#[test]
fn route_by_other_scores() {
    let base = Route { scale: 2.5, ..Route::softmax(24, 5, true) };
    let groups = |count, keep, rank| Some(Groups { count, keep, rank });
    for score in [Score::Softmax, Score::Sigmoid, Score::SoftmaxOfChosen] {
        for (bias, renormalize) in [(false, true), (true, false), (true, true)] {
            check([biased_route_case(Route { score, renormalize, ..base }, bias, "normal", Random::normal)]);
        }
    }
    for groups in [
        groups(1, 1, GroupRank::Best),
        groups(4, 1, GroupRank::BestTwo),
        groups(4, 2, GroupRank::Best),
        groups(8, 4, GroupRank::BestTwo),
        groups(24, 5, GroupRank::BestTwo),
    ] {
        for bias in [false, true] {
            let route = Route { groups, score: Score::Sigmoid, ..base };
            check([biased_route_case(route, bias, "normal", Random::normal)]);
        }
    }
    // Biases that push scores below zero, where a mask of zeros would choose what is masked.
    let route = Route { groups: groups(4, 2, GroupRank::BestTwo), score: Score::Sigmoid, ..base };
    check([biased_route_case(route, true, "far below zero", |random| random.normal() - 9.0)]);
}

/// Experts of random weights; the result of a router on random logits.
fn moe_case(count: usize, top_k: usize, dtypes: [DType; 3], hidden: usize, inner: usize) -> Case {
    let mut r = Recorder::new(12);
    let x = r.input(hidden);
    let logits = r.input(count);
    let routing = r.graph.route(logits, None, Route::softmax(count, top_k, top_k.is_multiple_of(2))).unwrap();
    let [gate, up, down] = dtypes;
    let mut expert = || {
        let random = &mut r.random;
        [
            weight(random, gate, inner, hidden),
            weight(random, up, inner, hidden),
            weight(random, down, hidden, inner),
        ]
    };
    let experts: Experts = (0..count).map(|_| expert()).collect();
    let set = r.graph.expert_set(expert_set(&experts)).unwrap();
    let out = r.graph.moe_experts(x, routing, set).unwrap();
    let name = format!("{count} top {top_k}, {gate} {up} {down}, {hidden} × {inner}");
    let plain = |d: &DType| matches!(d, DType::F32 | DType::F16 | DType::BF16);
    let dtype = dtypes.into_iter().find(|d| !plain(d)).unwrap_or(DType::F32);
    r.moe_case(name, Tested::MoeExperts, dtype, out, experts)
}

#[test]
fn moe_experts_of_every_encoding() {
    check(dtypes().into_iter().map(|dtype| {
        let [short, long] = match dtype.block_len() {
            1 => [20, 33],
            32 => [96, 64],
            n => [n, n],
        };
        moe_case(4, 2, [dtype; 3], long, short)
    }));
}

#[test]
fn moe_experts_of_many_shapes() {
    use DType::{BF16, F16, F32, Q4_K, Q5_0, Q6_K, Q8_0};
    check([
        moe_case(1, 1, [F32; 3], 1, 1),
        moe_case(3, 3, [F32, F16, BF16], 17, 5),
        moe_case(40, 6, [F32; 3], 24, 12),
        // A projection that takes int8 beside one that does not, either way round.
        moe_case(5, 2, [Q8_0, F16, Q5_0], 32, 96),
        moe_case(5, 1, [F32, Q8_0, F32], 64, 50),
        moe_case(5, 3, [F32, F32, Q8_0], 50, 64),
        moe_case(3, 2, [Q4_K, Q6_K, Q8_0], 256, 32),
        moe_case(
            3,
            1,
            [affine(4, 64, Half::BF16), affine(8, 32, Half::F16), affine(3, 32, Half::BF16)],
            192,
            160,
        ),
    ]);
}

#[test]
fn a_router_logit_that_is_not_finite_is_not_lost() {
    for renormalize in [false, true] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let score = if renormalize { Score::Sigmoid } else { Score::Softmax };
            let route = Route { score, ..Route::softmax(6, 2, renormalize) };
            let mut n = 0;
            // Expert 2's logit is bad for every third token, and far below the others for all.
            let logit = |random: &mut Random| {
                n += 1;
                let (token, expert) = ((n - 1) / 6, (n - 1) % 6);
                match expert {
                    2 if token % 3 == 0 => bad,
                    2 => -50.0,
                    _ => random.normal(),
                }
            };
            let case = route_case(route, "bad logit", logit);
            let schedule = &schedules(SHORT)[0];
            let reference = run(&case, &mut *compile(&case, &Reference, MODES[0]), schedule, None, 1);
            let lost = |rows: &Results| rows.values().filter(|row| row.iter().all(|v| v.is_nan())).count();
            let expected = lost(&reference);
            assert!(expected > 0 && expected < reference.len(), "{bad}: some tokens are bad, some are not");
            for backend in backends() {
                let got = run(&case, &mut *compile(&case, &backend.one, MODES[1]), schedule, None, 1);
                for (key, row) in &got {
                    let bad_row = reference[key].iter().all(|v| v.is_nan());
                    assert_eq!(row.iter().any(|v| v.is_nan()), bad_row, "{bad}, {route:?}, {key:?}: {row:?}");
                }
            }
        }
    }
}

#[test]
fn a_failing_source_of_experts_fails_the_run_and_nothing_else() {
    struct Failing<'a>(Source<'a>);
    impl ExpertSource for Failing<'_> {
        fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
            Ok(())
        }

        fn visit(
            &mut self,
            set: ExpertSetId,
            experts: &[u32],
            visitor: &mut dyn FnMut(&[ExpertView<'_>]),
        ) -> Result<()> {
            // Some experts come before the failure.
            self.0.visit(set, &experts[..1], visitor)?;
            Err(Error::Expert { layer: 0, expert: experts[1] as usize, reason: "lost".into() })
        }
    }
    let case = moe_case(5, 2, [DType::Q8_0; 3], 64, 32);
    for backend in backends() {
        let mut executable = compile(&case, &backend.several, MODES[1]);
        let schedule = &schedules(SHORT)[0];
        let before = run(&case, &mut *executable, schedule, None, 1);
        let tokens: Vec<u32> = (0..20).collect();
        let spans = [Span { rows: 0..20, start: 0, pages: &[0], slots: StateSlots::default() }];
        let batch = Batch { tokens: &tokens, spans: &spans, outputs: &[19] };
        let mut source = Failing(Source { experts: &case.experts, order: 0 });
        let error = executable.run(&batch, &mut source, &mut vec![]).unwrap_err();
        assert!(matches!(&error, Error::Expert { reason, .. } if reason == "lost"), "{error}");
        assert_same_bits(&run(&case, &mut *executable, schedule, None, 1), &before, "after a failure");
    }
}

#[test]
fn weights_that_are_not_the_declared_ones_are_refused() {
    let case = linear_case(DType::Q8_0, 3, 32, true, Precision::Fast);
    let check = |weights: Vec<Tensor>, expected: &str| {
        for backend in [&Reference as &dyn Backend, &backends()[0].one] {
            let plan = Plan::new(&case.graph, |_| true);
            let outcome = backend.compile(&case.graph, plan, weights.clone(), CompileOptions::default());
            let error = outcome.err().expect("refused").to_string();
            assert!(error.contains("weight weight") && error.contains(expected), "{error}");
        }
    };
    let mut random = Random::new(13);
    check(case.weights[..2].to_vec(), "got None");
    for (dtype, rows, cols) in [(DType::Q4_0, 3, 32), (DType::Q8_0, 2, 32), (DType::Q8_0, 3, 64)] {
        let mut weights = case.weights.clone();
        weights[1] = weight(&mut random, dtype, rows, cols);
        check(weights, "expected MatrixSpec { dtype: Q8_0, rows: 3, cols: 32 }, got Some(");
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_while_recording() {
    fn refused<T>(expected: &str, record: impl FnOnce(&mut GraphBuilder, Value, Value) -> Result<T>) {
        let mut g = GraphBuilder::new();
        let [six, eight] = [6, 8].map(|cols| {
            let table = g.weight("table", MatrixSpec { dtype: DType::F32, rows: 4, cols });
            g.embed(table)
        });
        let error = record(&mut g, six, eight).err().expect(expected).to_string();
        assert!(error.contains(expected), "{error} lacks {expected}");
    }
    fn vector(g: &mut GraphBuilder, dtype: DType, len: usize) -> WeightId {
        g.weight("vector", MatrixSpec { dtype, rows: 1, cols: len })
    }
    fn routing(g: &mut GraphBuilder, logits: Value, experts: usize, top_k: usize) -> Result<Routing> {
        g.route(logits, None, Route::softmax(experts, top_k, false))
    }
    let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
    let set = |gate, up, down| ExpertSet { layer: 0, experts: 2, gate, up, down };
    let attention =
        |heads, kv_heads, head_dim| Attention { heads, kv_heads, head_dim, scale: 1.0, window: None };

    refused("linear: columns of the weight: expected 6, got 5", |g, six, _| {
        let weight = g.weight("w", matrix(3, 5));
        g.linear(six, weight, None, Precision::Fast)
    });
    refused("linear: length of the bias: expected 3, got 4", |g, six, _| {
        let (weight, bias) = (g.weight("w", matrix(3, 6)), vector(g, DType::F32, 4));
        g.linear(six, weight, Some(bias), Precision::Fast)
    });
    refused("linear is not supported for F16", |g, six, _| {
        let (weight, bias) = (g.weight("w", matrix(3, 6)), vector(g, DType::F16, 3));
        g.linear(six, weight, Some(bias), Precision::Fast)
    });
    refused("rms_norm: width left over by groups: expected 0, got 2", |g, six, _| {
        let weight = vector(g, DType::F32, 1);
        g.rms_norm(six, weight, 4, 1e-6)
    });
    refused("rms_norm: length of the weight: expected 3, got 6", |g, six, _| {
        let weight = vector(g, DType::F32, 6);
        g.rms_norm(six, weight, 2, 1e-6)
    });
    refused("rms_norm: length of the weight: expected 6, got 1", |g, six, _| {
        let weight = vector(g, DType::F32, 1);
        g.rms_norm(six, weight, 0, 1e-6)
    });
    let pairs = |n| Rope { style: RopeStyle::HalfSplit, inv_freq: vec![1.0; n], magnitude: 1.0 };
    refused("rope: width left over by heads: expected 0, got 2", |g, six, _| {
        let rotation = g.rotation(pairs(1));
        g.rope(six, 4, rotation)
    });
    refused("rope: rotary width: expected 3, got 4", |g, six, _| {
        let rotation = g.rotation(pairs(2));
        g.rope(six, 2, rotation)
    });
    refused("attention: query heads left over by kv heads", |g, six, eight| {
        g.attention(six, eight, eight, attention(3, 2, 2))
    });
    refused("attention: width of q: expected 8, got 6", |g, six, eight| {
        g.attention(six, eight, eight, attention(4, 4, 2))
    });
    refused("attention: width of k: expected 8, got 6", |g, six, eight| {
        g.attention(eight, six, eight, attention(4, 4, 2))
    });
    refused("attention: width of v: expected 8, got 6", |g, six, eight| {
        g.attention(eight, eight, six, attention(4, 4, 2))
    });
    refused("swiglu: width of up: expected 6, got 8", |g, six, eight| g.swiglu(six, eight));
    refused("add: width of b: expected 8, got 6", |g, six, eight| g.add(eight, six));
    refused("route: logits: expected 5, got 6", |g, six, _| routing(g, six, 5, 1));
    refused("route: top_k: expected 6, got 7", |g, six, _| routing(g, six, 6, 7));
    refused("route: top_k: expected 6, got 0", |g, six, _| routing(g, six, 6, 0));
    let grouped = |top_k, count, keep| Route {
        groups: Some(Groups { count, keep, rank: GroupRank::Best }),
        ..Route::softmax(6, top_k, true)
    };
    refused("route: experts left over by groups", |g, six, _| g.route(six, None, grouped(1, 4, 1)));
    refused("route: groups kept: expected 3, got 4", |g, six, _| g.route(six, None, grouped(1, 3, 4)));
    refused("route: groups kept: expected 3, got 0", |g, six, _| g.route(six, None, grouped(1, 3, 0)));
    refused("route: groups kept: expected 0, got 1", |g, six, _| g.route(six, None, grouped(1, 0, 1)));
    refused("route: top_k: expected 4, got 5", |g, six, _| g.route(six, None, grouped(5, 3, 2)));
    refused("route: length of the bias: expected 6, got 5", |g, six, _| {
        let bias = vector(g, DType::F32, 5);
        g.route(six, Some(bias), Route::softmax(6, 1, true))
    });
    refused("sigmoid_gate: width of the gate: expected 6, got 8", |g, six, eight| g.sigmoid_gate(six, eight));
    refused("slice: width left over by groups", |g, six, _| g.slice(six, 4, 0, 1));
    refused("slice: end of the columns: expected 3, got 4", |g, six, _| g.slice(six, 2, 1, 3));
    refused("slice: end of the columns", |g, six, _| g.slice(six, 2, usize::MAX, 2));
    refused("slice: end of the columns: expected 3, got 1", |g, six, _| g.slice(six, 2, 1, 0));
    refused("expert set: rows of up", |g, _, _| g.expert_set(set(matrix(5, 8), matrix(4, 8), matrix(8, 5))));
    refused("expert set: columns of up", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 7), matrix(8, 5)))
    });
    refused("expert set: columns of down", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 6)))
    });
    refused("expert set: rows of down", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(6, 5)))
    });
    refused("moe_experts: columns of gate: expected 6, got 8", |g, six, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let routing = routing(g, eight, 8, 2)?;
        g.moe_experts(six, routing, experts)
    });
}
