//! One operation with its weights, and what runs through it.

use moeflux_compute::backend::{KvType, PAGE_TOKENS};
use moeflux_compute::graph::{Graph, GraphBuilder, MatrixSpec, Op, Output, Precision, Value, WeightId};
use moeflux_compute::{DType, Tensor};

use super::errors::{MODES, Mode, modes, published_modes};
use crate::support::random::Random;
use crate::support::weights::weight;

/// One operation with its shapes and parameters.
pub struct Case {
    pub name: String,
    /// What it is a case of: the error table has a row for it.
    pub tested: Op,
    /// The encoding that matters.
    pub dtype: DType,
    pub graph: Graph,
    pub weights: Vec<Tensor>,
    pub experts: Vec<Expert>,
    /// Which tokens of which sequences meet in a batch.
    pub batching: Batching,
    /// What of it runs on devices, which are slow where they are emulated.
    pub on_devices: OnDevices,
    /// Whether it runs in f32 alone: where what is rounded may change a choice, or nothing is.
    pub f32_only: bool,
    /// Whether a token's inputs can be made NaN.
    pub poisoned: bool,
    /// Whether tokens have positions on several axes.
    pub axes: bool,
    /// Whether results leave through the head, whose matrix is the identity, or before it.
    pub head: bool,
}

/// Columns of results up to which they leave through the head: of more, the product would take emulated devices longer than
/// what is tested, and its matrix much memory.
const MOST_LOGITS: usize = 32;

/// The matrices of one expert.
pub struct Expert {
    pub gate: Option<Tensor>,
    pub up: Tensor,
    pub down: Tensor,
}

/// What of a case runs on devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDevices {
    /// All of it, NaNs and another order of threads among it.
    All,
    /// Whole sequences in every mode and pieces of them in the first.
    Results,
    /// The same, but not on emulated devices: shapes of published models, for which a GPU has kernels of its own.
    Hardware,
    Nothing,
}

/// Sequences, and the batches that they are cut into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batching {
    /// Sequences of these lengths.
    Lengths(&'static [usize]),
    /// A sequence of three pages and one of two, whose pages alternate.
    Pair,
    /// Sequences of these lengths that are never cut.
    Whole(&'static [usize]),
}

/// Batches of 1 to 39 rows: more than a tile of them has.
pub const SHORT: Batching = Batching::Lengths(&[26, 9, 3, 1]);
/// Sequences that end before, on and after the boundaries of pages.
pub const LONG: Batching = Batching::Lengths(&[2 * PAGE_TOKENS + 12, PAGE_TOKENS + 1, PAGE_TOKENS, 1]);

/// Sequences of a row and of several blocks of rows or keys, never cut.
pub const WHOLE: Batching = Batching::Whole(&[70, 16, 1, 9]);

/// Batches of (sequence, number of its next tokens), and of how many of their rows one is asked for.
pub struct Schedule {
    pub batches: Vec<Vec<(usize, usize)>>,
    pub stride: usize,
}

impl Batching {
    pub fn lengths(self) -> &'static [usize] {
        match self {
            Self::Lengths(lengths) | Self::Whole(lengths) => lengths,
            Self::Pair => &[2 * PAGE_TOKENS + 5, 70],
        }
    }

    /// Five ways to run the sequences: the first all at once, which is what is compared with the reference, the fourth
    /// in pieces of a few tokens and the last token by token.
    pub fn schedules(self) -> [Schedule; 5] {
        let whole: Vec<(usize, usize)> = self.lengths().iter().copied().enumerate().collect();
        let together = vec![whole.clone()];
        let schedule = |batches, stride| Schedule { batches, stride };
        match self {
            Self::Lengths(_) => [
                schedule(together, 1),
                schedule(whole.iter().map(|part| vec![*part]).collect(), 1),
                schedule(vec![whole.iter().rev().copied().collect()], 2),
                // Of 1, 2, 3, … tokens.
                schedule(self.pieces(|i| i + 1), 3),
                schedule(self.pieces(|_| 1), 4),
            ],
            Self::Whole(_) => [
                schedule(together.clone(), 1),
                schedule(whole.iter().map(|part| vec![*part]).collect(), 1),
                schedule(vec![whole.iter().rev().copied().collect()], 2),
                schedule(whole.chunks(2).map(<[_]>::to_vec).collect(), 1),
                schedule(together, 3),
            ],
            Self::Pair => [
                schedule(together, 1),
                schedule(self.pieces(|_| 7), 1),
                schedule(self.pieces(|_| PAGE_TOKENS + 3), 1),
                schedule(self.pieces(|_| 4), 1),
                schedule(self.pieces(|_| 1), 1),
            ],
        }
    }

    /// All sequences at once in pieces.
    fn pieces(self, next: impl Fn(usize) -> usize) -> Vec<Vec<(usize, usize)>> {
        let mut left = self.lengths().to_vec();
        let mut batches = vec![];
        while left.iter().any(|n| *n > 0) {
            let mut batch = vec![];
            for (sequence, left) in left.iter_mut().enumerate().filter(|(_, n)| **n > 0) {
                let n = next(batches.len() + sequence).min(*left);
                *left -= n;
                batch.push((sequence, n));
            }
            batches.push(batch);
        }
        batches
    }
}

impl Case {
    /// As a case of the first operation of this kind in its graph.
    pub fn of(mut self, kind: &str) -> Self {
        let node = self.graph.nodes().iter().find(|node| node.op.kind() == kind);
        self.tested = node.unwrap_or_else(|| panic!("{}: no {kind}", self.name)).op.clone();
        self
    }

    /// With this encoding in the error table.
    pub fn in_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// With sequences in which states and many pages show.
    pub fn in_pairs(self) -> Self {
        Self { batching: Batching::Pair, on_devices: OnDevices::Results, ..self }
    }

    /// On the processor, and on devices that are not emulated.
    pub fn on_hardware(self) -> Self {
        Self { on_devices: OnDevices::Hardware, ..self }
    }

    /// On the processor alone.
    pub fn off_devices(self) -> Self {
        Self { on_devices: OnDevices::Nothing, ..self }
    }

    /// In f32 alone.
    pub fn in_f32(self) -> Self {
        Self { f32_only: true, ..self }
    }

    /// Without NaNs among its inputs: where it has none, where they decide what an index chooses, and where
    /// they show in other rows alone.
    pub fn without_poison(self) -> Self {
        Self { poisoned: false, ..self }
    }

    /// Columns of its results.
    pub fn width(&self) -> usize {
        if self.head { self.graph.vocab_size() } else { self.graph.hidden().expect("a head").width() }
    }

    pub fn modes(&self) -> &'static [Mode] {
        let blocks = KvType::Q8_0.check(&self.graph).is_ok();
        match self.on_devices {
            _ if self.f32_only => &MODES[..1],
            OnDevices::Hardware => published_modes(&self.tested, blocks),
            _ => modes(&self.tested, blocks),
        }
    }

    /// The mode with pages in f16, of eight-bit activations where there are several; else the only one.
    pub fn mode_of_steps(&self) -> Mode {
        let modes = self.modes();
        let in_f16 = modes.iter().rev().find(|mode| mode.kv_type == KvType::F16);
        *in_f16.unwrap_or(&modes[0])
    }
}

/// Token ids that inputs exist for. The last one's inputs are poisoned: see [`Recorder::input`].
pub const VOCABULARY: usize = 89;
pub const POISON: u32 = VOCABULARY as u32 - 1;

/// A graph being recorded with its weights.
pub struct Recorder {
    pub graph: GraphBuilder,
    pub weights: Vec<Tensor>,
    pub experts: Vec<Expert>,
    pub random: Random,
}

impl Recorder {
    pub fn new(seed: u64) -> Self {
        Self { graph: GraphBuilder::new(), weights: vec![], experts: vec![], random: Random::new(seed) }
    }

    pub fn declare(&mut self, tensor: Tensor) -> WeightId {
        let (dtype, rows, cols) = (tensor.dtype(), tensor.rows(), tensor.cols());
        self.weights.push(tensor);
        self.graph.weight("weight", MatrixSpec { dtype, rows, cols })
    }

    /// A float weight of these values.
    pub fn weight(&mut self, rows: usize, cols: usize, values: &[f32]) -> WeightId {
        self.declare(Tensor::from_f32(rows, cols, values).unwrap())
    }

    /// A weight of normal values.
    pub fn matrix(&mut self, dtype: DType, rows: usize, cols: usize) -> WeightId {
        let tensor = weight(&mut self.random, dtype, rows, cols);
        self.declare(tensor)
    }

    pub fn vector(&mut self, len: usize) -> WeightId {
        self.matrix(DType::F32, 1, len)
    }

    /// Values for every token; those of [`POISON`] hold one NaN.
    pub fn input_of(&mut self, width: usize, mut value: impl FnMut(&mut Random) -> f32) -> Value {
        let mut table: Vec<f32> = (0..VOCABULARY * width).map(|_| value(&mut self.random)).collect();
        // The sign bit set, as x86 makes NaNs, for every other width.
        let nan = if width.is_multiple_of(2) { -f32::NAN } else { f32::NAN };
        table[POISON as usize * width + width / 2] = nan;
        let table = self.weight(VOCABULARY, width, &table);
        self.graph.embed(table)
    }

    /// Normal values for every token.
    pub fn input(&mut self, width: usize) -> Value {
        self.input_of(width, Random::normal)
    }

    /// The case whose results are `out`; unless it says otherwise, of the operation that yields it.
    pub fn case(mut self, name: impl Into<String>, out: Value) -> Case {
        let rows = self.graph.gather_rows(out);
        self.case_with(name, out, rows)
    }

    /// The same where `out` has the rows that are asked for and no others.
    pub fn case_of_outputs(self, name: impl Into<String>, out: Value) -> Case {
        self.case_with(name, out, out)
    }

    fn case_with(mut self, name: impl Into<String>, out: Value, rows: Value) -> Case {
        let width = out.width();
        let head = width <= MOST_LOGITS;
        // What no result leaves through is small.
        let columns = if head { width } else { 1 };
        let mut identity = vec![0.0; columns * width];
        (0..columns).for_each(|i| identity[i * width + i] = 1.0);
        let identity = self.weight(columns, width, &identity);
        let logits = self.graph.linear(rows, identity, None, Precision::F32).unwrap();
        let graph = self.graph.finish(logits);
        let node = graph.nodes().iter().find(|node| node.out == Output::Value(out));
        Case {
            name: name.into(),
            tested: node.expect("the graph has what its builder gave").op.clone(),
            dtype: DType::F32,
            graph,
            weights: self.weights,
            experts: self.experts,
            batching: SHORT,
            on_devices: OnDevices::All,
            f32_only: false,
            poisoned: true,
            axes: false,
            head,
        }
    }
}
