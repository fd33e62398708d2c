//! One operation with its weights, and how far a backend may be from the reference.

use moeflux_compute::backend::{ActivationMode, KvType, PAGE_TOKENS};
use moeflux_compute::graph::{Graph, GraphBuilder, MatrixSpec, Precision, Value, WeightId};
use moeflux_compute::{DType, Tensor};

use crate::support::random::Random;
use crate::support::weights::weight;

/// Which row of the error table a case belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tested {
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
pub struct Mode {
    pub activations: ActivationMode,
    pub kv_type: KvType,
}

pub const MODES: [Mode; 2] = [
    Mode { activations: ActivationMode::F32, kv_type: KvType::F32 },
    Mode { activations: ActivationMode::Int8, kv_type: KvType::F16 },
];

/// The error table: largest mean squared difference from the reference over the reference's mean square.
pub fn tolerance(tested: Tested, dtype: DType, mode: Mode) -> f64 {
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
pub struct Case {
    pub name: String,
    pub tested: Tested,
    pub dtype: DType,
    pub graph: Graph,
    pub weights: Vec<Tensor>,
    pub experts: Experts,
    /// Tokens of each sequence.
    pub lengths: &'static [usize],
}

/// gate, up and down of every expert of one layer.
pub type Experts = Vec<[Tensor; 3]>;

/// Token ids that inputs exist for. The last one's inputs are poisoned: see [`Recorder::input`].
pub const VOCABULARY: usize = 89;
pub const POISON: u32 = VOCABULARY as u32 - 1;

/// Lengths that make batches of 1 to 53 rows.
pub const SHORT: &[usize] = &[40, 9, 3, 1];
/// Lengths that end before, on and after the boundaries of pages.
pub const LONG: &[usize] = &[2 * PAGE_TOKENS + 12, PAGE_TOKENS + 1, PAGE_TOKENS, 1];

/// A graph being recorded with its weights.
pub struct Recorder {
    pub graph: GraphBuilder,
    pub weights: Vec<Tensor>,
    pub random: Random,
}

impl Recorder {
    pub fn new(seed: u64) -> Self {
        Self { graph: GraphBuilder::new(), weights: vec![], random: Random::new(seed) }
    }

    pub fn declare(&mut self, tensor: Tensor) -> WeightId {
        let (dtype, rows, cols) = (tensor.dtype(), tensor.rows(), tensor.cols());
        self.weights.push(tensor);
        self.graph.weight("weight", MatrixSpec { dtype, rows, cols })
    }

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
        let table = self.declare(Tensor::from_f32(VOCABULARY, width, &table).unwrap());
        self.graph.embed(table)
    }

    /// Normal values for every token.
    pub fn input(&mut self, width: usize) -> Value {
        self.input_of(width, Random::normal)
    }

    pub fn case(self, name: String, tested: Tested, dtype: DType, out: Value) -> Case {
        self.moe_case(name, tested, dtype, out, vec![])
    }

    pub fn moe_case(
        mut self,
        name: String,
        tested: Tested,
        dtype: DType,
        out: Value,
        experts: Experts,
    ) -> Case {
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
