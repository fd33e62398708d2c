//! The one error type of this crate.

use crate::DType;
use crate::graph::MatrixSpec;

/// What can go wrong when describing tensors, building graphs or running them.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A plane of a weight does not have the size that its dtype and shape imply.
    #[error(
        "{dtype} weight of {rows} rows × {cols} columns: plane {plane} has {got} bytes, expected {expected}"
    )]
    PlaneSize {
        /// Encoding of the weight.
        dtype: DType,
        /// Rows (output features).
        rows: usize,
        /// Columns (input features).
        cols: usize,
        /// Which plane: 0 weights, 1 scales, 2 biases.
        plane: usize,
        /// Bytes that dtype and shape imply.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The number of columns does not fit the dtype's block length, or the size overflows.
    #[error("{dtype} cannot store rows of {cols} columns: {reason}")]
    RowLength {
        /// Encoding of the weight.
        dtype: DType,
        /// Columns (input features).
        cols: usize,
        /// What does not fit.
        reason: &'static str,
    },
    /// This crate does not support the operation for the dtype.
    #[error("{what} is not supported for {dtype}")]
    Unsupported {
        /// The requested operation.
        what: &'static str,
        /// The requested encoding.
        dtype: DType,
    },
    /// A value that is not finite, or too large for the encoding it should be quantised to.
    #[error("{dtype} cannot hold {value:e} (row {row}, column {col})")]
    Unrepresentable {
        /// The target encoding.
        dtype: DType,
        /// Row of the value.
        row: usize,
        /// Column of the value.
        col: usize,
        /// The value.
        value: f32,
    },
    /// Widths or shapes of two operands do not agree.
    #[error("{op}: {what}: expected {expected}, got {got}")]
    Shape {
        /// Operation that was being recorded or run.
        op: &'static str,
        /// Which size disagrees.
        what: &'static str,
        /// The size that fits.
        expected: usize,
        /// The size given.
        got: usize,
    },
    /// A weight given to a backend is not the one that the graph declares.
    #[error("weight {name}: expected {expected:?}, got {got:?}")]
    Weight {
        /// Name of the weight in the model.
        name: String,
        /// What the graph declares.
        expected: MatrixSpec,
        /// What was given, if anything.
        got: Option<MatrixSpec>,
    },
    /// An expert's weights could not be read; the reason names file and offset.
    #[error("expert {expert} of layer {layer}: {reason}")]
    Expert {
        /// Decoder layer.
        layer: usize,
        /// Expert within the layer.
        expert: usize,
        /// Why they could not be read.
        reason: String,
    },
    /// The requested instruction set does not exist, or this machine lacks it.
    #[error("SIMD level {got:?} is not available; this machine has {available}")]
    SimdLevel {
        /// The requested level.
        got: String,
        /// Names of the available levels, separated by commas.
        available: String,
    },
    /// Keys and values of this model cannot be stored as asked for.
    #[error(
        "keys and values as {kv_type} come in blocks of {block}, and this model's {what} is {size}; use f16"
    )]
    KvBlocks {
        /// What they should be stored as.
        kv_type: crate::backend::KvType,
        /// What is not a multiple of the block.
        what: &'static str,
        /// Its size.
        size: usize,
        /// Elements of a block.
        block: usize,
    },
    /// A device has not enough memory, or may not use enough of it.
    #[error("{device}: needs {wanted} bytes of device memory; {free} available")]
    DeviceMemory {
        /// Name of the device.
        device: String,
        /// Bytes needed: for one buffer, or for the whole model when it is opened.
        wanted: u64,
        /// Bytes available.
        free: u64,
    },
    /// There is no device, or none that can be used.
    #[error("no usable GPU: {reason}")]
    NoDevice {
        /// What is missing.
        reason: String,
    },
    /// A device stopped responding; everything in its memory is lost.
    #[error("the GPU was lost: {reason}")]
    DeviceLost {
        /// The driver's message.
        reason: String,
    },
    /// A device failed, or lacks something; the reason says what.
    #[error("{reason}")]
    Device {
        /// What went wrong.
        reason: String,
    },
    /// Hidden states are wanted of a graph that does not end with a head.
    #[error("the graph does not end with the linear layer that makes the logits")]
    NoHead,
    /// A graph's layers cannot be run on their own.
    #[error("a layer takes more from the layers before it than the residual stream")]
    Excerpt,
}
