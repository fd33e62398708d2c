//! What several kernels are told: matrices, activations, norms, and where rows of a batch belong.

use crate::graph::Activation;

arguments! {
    ["weights.h" Format, "cuda/matrices.h" Format, "cuda/exact.cu" Format]
    /// A matrix (rows, cols) without its bytes.
    Format {
        /// The code of the encoding, with its parameters: see `kernels/weights.h`.
        kind: u32,
        cols: usize,
        /// Bytes from a row to the next in each plane.
        strides: [usize; 3],
    }

    ["experts.h" Part, "cuda/matrices.h" Part]
    /// Where one of an expert's matrices lies in its slot.
    PartConstants { format: Format, offsets: [usize; 3], rows: usize }

    ["activate.h" Activation]
    /// What is done to the outputs of gate and up projections.
    ActivationConstants { kind: u32, alpha: f32, limit: f32 }

    ["activations.h" NormConstants, "cuda/blocks.h" NormConstants]
    /// A norm that a kernel makes of what it reads; none by default.
    NormConstants { has_norm: bool, eps: f32 }

    ["cache.h" Place, "cuda/flash_attention.cu" Place, "cuda/warpgroup_softmax.h" Place]
    /// Where a row's token is, in a list in device memory.
    PlaceWords { position: usize, first_page: usize }

    ["sequences.h" Sequence]
    /// A sequence of a batch, in a list in device memory.
    SequenceWords { first_row: usize, rows: usize, start: usize, read: u32, write: u32 }
}

impl From<Activation> for ActivationConstants {
    fn from(activation: Activation) -> Self {
        let (kind, alpha, limit) = match activation {
            Activation::SwiGlu => (0, 0.0, 0.0),
            Activation::ClampedSwiGlu { alpha, limit } => (1, alpha, limit),
            Activation::LimitedSwiGlu { limit } => (2, 0.0, limit),
            Activation::CappedSwiGlu { limit } => (3, 0.0, limit),
            Activation::SquaredRelu => (4, 0.0, 0.0),
            Activation::GeGlu => (5, 0.0, 0.0),
            Activation::Bilinear => (6, 0.0, 0.0),
            Activation::SituGlu { beta, linear_beta: Some(limit) } => (7, beta, limit),
            Activation::SituGlu { beta, linear_beta: None } => (8, beta, 0.0),
        };
        Self { kind, alpha, limit }
    }
}
