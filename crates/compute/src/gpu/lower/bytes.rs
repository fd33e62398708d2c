//! What takes activations of eight bits: products and routed experts of few rows, and of batches of more.

use super::context::{DeferredNorm, Lowering};
use crate::DType;
use crate::backend::ActivationMode;
use crate::gpu::arguments::NormConstants;
use crate::gpu::device::Slice;
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::memory::{DeviceWeight, Memory, SCALED_COLUMNS};
use crate::graph::{ExpertSetId, Value};

/// `MOST_COLUMNS` of `kernels/activations.h`: of what experts take, and of what groups of a batch have of eight tokens.
pub(super) const MOST_COLUMNS: usize = 8192;
/// `MOST_LINEAR_COLUMNS` of `kernels/few_rows.h`.
const MOST_LINEAR_COLUMNS: usize = 24576;

/// The end of the kernels' names for an encoding that is multiplied with activations of eight bits.
pub(super) fn encoding(dtype: DType) -> Option<&'static str> {
    kernel_name(dtype, FastPath::Bytes)
}

impl From<Option<DeferredNorm>> for NormConstants {
    fn from(norm: Option<DeferredNorm>) -> Self {
        Self { has_norm: norm.is_some(), eps: norm.map_or(0.0, |norm| norm.eps) }
    }
}

impl Memory {
    /// Whether kernels for few rows find all weights: by where they begin in one buffer, in which those that a device uses
    /// where they are do not lie. No product is made with those that are far.
    pub(super) fn finds_weights(&self) -> bool {
        self.weights.iter().all(|weight: &DeviceWeight| weight.common || weight.far)
    }

    /// The end of the kernels' names for products of a width, at most `most`, whose activations have eight bits, if they may.
    fn takes_bytes(&self, dtype: DType, cols: usize, most: usize) -> Option<&'static str> {
        let fits = cols.is_multiple_of(SCALED_COLUMNS) && cols <= most;
        encoding(dtype).filter(|_| fits && self.activations == ActivationMode::Int8)
    }

    /// The ends of the kernels' names for a set's gate and down, if they suit it.
    fn few_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        let [gate, up, down] = self.experts.parts(set);
        let fits = up.matrix.dtype == gate.matrix.dtype && gate.matrix.rows.is_multiple_of(SCALED_COLUMNS);
        let first = self.takes_bytes(gate.matrix.dtype, gate.matrix.cols, MOST_COLUMNS).filter(|_| fits)?;
        // Its activations stay in device memory: any width will do.
        let second = self.takes_bytes(down.matrix.dtype, SCALED_COLUMNS, MOST_COLUMNS)?;
        Some([first, second])
    }

    /// Whether routed experts of few rows take activations of eight bits.
    pub(in crate::gpu) fn experts_take_bytes(&self, set: ExpertSetId) -> bool {
        self.finds_weights() && self.few_encodings(set).is_some()
    }
}

impl Lowering<'_> {
    /// The end of the kernels' names for linear layers whose activations have eight bits, if a batch of so many rows takes such.
    pub(super) fn takes_bytes(&self, dtype: DType, cols: usize) -> Option<&'static str> {
        let takes = self.is_few() || self.is_batch();
        self.memory.takes_bytes(dtype, cols, MOST_LINEAR_COLUMNS).filter(|_| takes)
    }

    /// As [`Memory::few_encodings`], if a batch of so many rows takes such products.
    pub(super) fn few_encodings(&self, set: ExpertSetId) -> Option<[&'static str; 2]> {
        self.memory.few_encodings(set).filter(|_| self.is_few() || self.is_batch())
    }

    /// What a kernel reads for `x`, with the norm that it makes itself.
    pub(super) fn entering(&self, x: Value) -> (Slice, Option<DeferredNorm>) {
        match self.norms.get(&x) {
            Some(norm) => (self.value(norm.x), Some(*norm)),
            None => (self.value(x), None),
        }
    }
}
