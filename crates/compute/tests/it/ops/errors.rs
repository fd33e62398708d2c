//! The error table: how far each operation may be from the reference.

use std::fmt;

use moeflux_compute::DType;
use moeflux_compute::backend::{ActivationMode, KvType};
use moeflux_compute::graph::{Op, Precision};

/// Precisions that a case runs with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    pub activations: ActivationMode,
    pub kv_type: KvType,
}

pub const MODES: [Mode; 2] = [WITH_Q8[0], WITH_Q8[1]];

/// Where keys and values may be integers too.
const WITH_Q8: [Mode; 3] = [
    Mode { activations: ActivationMode::F32, kv_type: KvType::F32 },
    Mode { activations: ActivationMode::Int8, kv_type: KvType::F16 },
    Mode { activations: ActivationMode::Int8, kv_type: KvType::Q8_0 },
];

/// Those of operations with pages whose weights multiply f32.
const PAGES: [Mode; 3] =
    [MODES[0], Mode { kv_type: KvType::F16, ..MODES[0] }, Mode { kv_type: KvType::Q8_0, ..MODES[0] }];

/// Modes of operations with pages and shapes of published models, for which GPUs have kernels that take matrix units: activations
/// of eight bits ask for those.
pub fn published_modes(op: &Op, blocks: bool) -> &'static [Mode] {
    match op {
        Op::LatentAttention(_) | Op::CompressedAttention(_) => &WITH_Q8[..if blocks { 3 } else { 2 }],
        _ => modes(op, blocks),
    }
}

/// Modes that make a difference to an operation; `blocks` is whether the graph's pages consist of whole blocks.
pub fn modes(op: &Op, blocks: bool) -> &'static [Mode] {
    match op {
        Op::Linear(_) | Op::GroupedLinear(_) | Op::MoeExperts(_) => &MODES,
        Op::Attention(_) => &WITH_Q8[..if blocks { 3 } else { 2 }],
        Op::LatentAttention(_)
        | Op::WindowPool(_)
        | Op::WindowMean(_)
        | Op::CompressedAttention(_)
        | Op::BlockAttention(_)
        | Op::ChooseBlocks(_) => &PAGES[..if blocks { 3 } else { 2 }],
        _ => &MODES[1..],
    }
}

/// How far results may be from the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Mean squared difference over the reference's mean square.
    pub mean_square: f64,
    /// Largest difference over the reference's largest value.
    pub largest: f64,
}

impl Bound {
    /// The larger of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            mean_square: self.mean_square.max(other.mean_square),
            largest: self.largest.max(other.largest),
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({:.1e}, {:.1e})", self.mean_square, self.largest)
    }
}

const fn bound(mean_square: f64, largest: f64) -> Bound {
    Bound { mean_square, largest }
}

/// Copies, or one rounding that both sides make.
const EXACT: Bound = bound(0.0, 0.0);
/// The same f32 operations in the same order, a product more or less.
const ROUNDED: Bound = bound(1e-14, 1e-6);
/// A product in f32 as CUDA's matrix units make it of many rows: of two parts of 11 bits each.
pub const TF32_PAIR: Bound = bound(1e-14, 2.5e-7);
/// Sums of up to some hundred terms and some products in f32, each rounding at 6e-8: (1e-6)² leaves room for the longest
/// rows.
const SUMS: Bound = bound(1e-12, 5e-6);

/// The row of an operation.
pub fn allowed(op: &Op, dtype: DType, mode: Mode) -> Bound {
    let plain = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let int8 = mode.activations == ActivationMode::Int8 && !plain;
    let (f16, q8) = (mode.kv_type == KvType::F16, mode.kv_type == KvType::Q8_0);
    match op {
        Op::Embed(_)
        | Op::Add(_)
        | Op::Clamp(_)
        | Op::RoundBlocks(_)
        | Op::Slice(_)
        | Op::Standardize(_)
        | Op::Repeat(_)
        | Op::InputRows(_)
        | Op::GivenEmbeddings(_)
        | Op::Join(_)
        | Op::BlockRows(_)
        | Op::GatherRows(_)
        | Op::ChooseBlocks(_) => EXACT,
        Op::Rope(_) => ROUNDED,
        // Steps of max/127 per 32 normal values, whose maximum is about 2.1 σ: (2.1/127)²/12 = 2.3e-5. One output row
        // of a short weight is a sample of few values: up to 2.5 times that.
        Op::Linear(linear) if int8 && linear.precision == Precision::Fast => bound(6e-5, 3e-2),
        // An error that grows with the terms that follow each other.
        Op::Linear(linear) if linear.x.width() > 8192 => bound(2e-11, 1e-5),
        // On GPUs activations and weights of many rows round to 11 bits.
        Op::GroupedLinear(_) if mode.activations == ActivationMode::Int8 && dtype != DType::F32 => {
            bound(3e-7, 3e-3)
        }
        Op::Linear(_) | Op::GroupedLinear(_) => SUMS,
        Op::RmsNorm(_) | Op::LayerNorm(_) => SUMS,
        Op::Activate(_)
        | Op::Gelu(_)
        | Op::ScaledSilu(_)
        | Op::Gate(_)
        | Op::PositionScale(_)
        | Op::HeadScale(_) => SUMS,
        // Values round to 11 bits: (2⁻¹¹)²/12 · 4/3 ≈ 3e-8; keys the same, which the softmax amplifies.
        Op::Attention(_) if f16 => bound(5e-7, 4e-3),
        // Steps of max/127 per 32 values, as of int8 activations; keys the same, which the softmax amplifies.
        Op::Attention(_) | Op::LatentAttention(_) if q8 => bound(4e-4, 5e-2),
        Op::CompressedAttention(_) | Op::BlockAttention(_) if q8 => bound(4e-4, 5e-2),
        // Latents do too.
        Op::LatentAttention(_) if f16 => bound(5e-7, 3e-3),
        // And entries.
        Op::CompressedAttention(_) | Op::BlockAttention(_) if f16 => bound(5e-7, 4e-3),
        // Sums, twice, with a softmax between.
        Op::Attention(_) | Op::CompressedAttention(_) | Op::BlockAttention(_) => SUMS,
        Op::BidirectionalAttention(_) => SUMS,
        Op::LatentAttention(_) => bound(1e-12, 3e-6),
        Op::WindowPool(_) | Op::WindowMean(_) => SUMS,
        Op::Route(_) | Op::TopSoftmax(_) => SUMS,
        // Gate, up and down each add what a linear layer does; an output's error is that of two rounded factors plus
        // one more rounding of their product.
        Op::MoeExperts(_) if int8 => bound(2e-4, 6e-2),
        // Three f32 products in a row.
        Op::MoeExperts(_) => bound(1e-11, 5e-6),
        Op::CausalConv1d(_) | Op::GatedDeltaRule(_) | Op::SsmScan(_) => SUMS,
        Op::NGramEmbed(_) => EXACT,
        Op::HyperWeights(_) | Op::HyperCollapse(_) | Op::HyperExpand(_) => SUMS,
        Op::GatedMean(_) | Op::StreamAdd(_) | Op::StreamGate(_) | Op::SoftmaxMix(_) => SUMS,
    }
}
