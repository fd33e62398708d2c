//! What takes activations of eight bits: products and routed experts of few rows, and of batches of more.

use super::context::{DeferredNorm, Lowering};
use crate::DType;
use crate::backend::ActivationMode;
use crate::gpu::arguments::NormConstants;
use crate::gpu::device::Slice;
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::memory::SCALED_COLUMNS;
use crate::graph::{ExpertSetId, Value};

/// `MOST_COLUMNS` of `kernels/activations.h`.
pub(super) const MOST_COLUMNS: usize = 8192;

/// The end of the kernels' names for an encoding that is multiplied with activations of eight bits.
pub(super) fn encoding(dtype: DType) -> Option<&'static str> {
    kernel_name(dtype, FastPath::Bytes)
}

impl From<Option<DeferredNorm>> for NormConstants {
    fn from(norm: Option<DeferredNorm>) -> Self {
        Self { has_norm: norm.is_some(), eps: norm.map_or(0.0, |norm| norm.eps) }
    }
}

impl Lowering<'_> {
    /// Whether products of a width may take activations of eight bits.
    pub(super) fn takes_bytes(&self, dtype: DType, cols: usize) -> Option<&'static str> {
        let bytes = (self.is_few() || self.is_batch()) && self.memory.activations == ActivationMode::Int8;
        encoding(dtype).filter(|_| bytes && cols.is_multiple_of(SCALED_COLUMNS) && cols <= MOST_COLUMNS)
    }

    /// The ends of the kernels' names for a set's gate and down, if they suit it.
    pub(super) fn few_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        let [gate, up, down] = self.memory.experts.parts(set);
        let fits = up.matrix.dtype == gate.matrix.dtype && gate.matrix.rows.is_multiple_of(SCALED_COLUMNS);
        let first = self.takes_bytes(gate.matrix.dtype, gate.matrix.cols).filter(|_| fits)?;
        // Its activations stay in device memory: any width will do.
        let second = self.takes_bytes(down.matrix.dtype, SCALED_COLUMNS)?;
        Some([first, second])
    }

    /// What a kernel reads for `x`, with the norm that it makes itself.
    pub(super) fn entering(&self, x: Value) -> (Slice, Option<DeferredNorm>) {
        match self.norms.get(&x) {
            Some(norm) => (self.value(norm.x), Some(*norm)),
            None => (self.value(x), None),
        }
    }
}
