//! Where weights are: [`StoredWeight`] (encoding, shape and a byte range per plane) and the raw [`TensorEntry`]
//! of a file's directory that it is resolved from.

use std::ops::Range;

use moeflux_compute::DType;

use crate::io::columns::Columns;

/// Bytes of one of the checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// Index in [`Checkpoint::files`](super::Checkpoint::files).
    pub file: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// How they are transposed, if they are not a plane of rows one after the other.
    pub by_columns: Option<Columns>,
}

/// Encoding of a tensor as its file declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encoding {
    /// One that weights can be used in.
    Weight(DType),
    /// Any other, by the name that its format gives it: integers, and encodings without kernels.
    Other(String),
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Weight(dtype) => dtype.fmt(f),
            Self::Other(name) => name.fmt(f),
        }
    }
}

/// One tensor of a file's directory, as stored: a quantised MLX module is three of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// Declared encoding.
    pub encoding: Encoding,
    /// Row-major shape of the stored elements, slowest dimension first.
    pub shape: Vec<usize>,
    /// Where its bytes are. Empty for a ggml type of unknown block size.
    pub range: ByteRange,
}

/// A weight that can be read: its encoding and the byte range of each plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredWeight {
    /// Name in the checkpoint, including `.weight`.
    pub name: String,
    /// Encoding.
    pub dtype: DType,
    /// Row-major logical shape: `[n]`, `[rows, cols]` or `[stack, rows, cols]`.
    pub shape: Vec<usize>,
    /// One range, three for affine encodings (weights, scales, biases), NVFP4 (weights, scales, the matrix's scale) and
    /// integers with zero points (weights, scales, zero points), or two for FP8, other integers and MXFP4 (weights, scales).
    pub planes: Vec<ByteRange>,
}

impl StoredWeight {
    /// Rows of the weight seen as one matrix: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Columns: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes over all planes.
    pub fn bytes(&self) -> u64 {
        self.planes.iter().map(|p| p.len).sum()
    }

    /// Whether a plane is stored by columns, so that rows cannot be read by themselves.
    pub(crate) fn is_by_columns(&self) -> bool {
        self.planes.iter().any(|plane| plane.by_columns.is_some())
    }

    /// The `i`-th matrix of a `[stack, rows, cols]` weight; `None` for other ranks and beyond the stack.
    pub fn stack_element(&self, i: usize) -> Option<Self> {
        let &[stack, rows, cols] = &self.shape[..] else { return None };
        if i >= stack || self.is_by_columns() {
            return None;
        }
        let name = format!("{}[{i}]", self.name);
        Some(Self { name, ..self.part(|_| (stack, i..i + 1), vec![rows, cols]) })
    }

    /// Rows `rows` of a `[rows, cols]` weight; `None` for other ranks, beyond the rows, where blocks that share
    /// scales would be cut, and for planes that are stored by columns.
    pub fn row_range(&self, rows: Range<usize>) -> Option<Self> {
        let &[all, cols] = &self.shape[..] else { return None };
        if rows.start > rows.end || rows.end > all || self.is_by_columns() {
            return None;
        }
        let whole = |plane| {
            let block = self.dtype.block_rows(plane);
            let ends = |row: usize| block == usize::MAX || row.is_multiple_of(block);
            ends(rows.start) && (ends(rows.end) || rows.end == all)
        };
        if !(0..self.planes.len()).all(whole) {
            return None;
        }
        let name = format!("{}[{}..{}]", self.name, rows.start, rows.end);
        let shape = vec![rows.len(), cols];
        let part = |plane| {
            let block = self.dtype.block_rows(plane);
            (all.div_ceil(block), rows.start / block..rows.end.div_ceil(block))
        };
        Some(Self { name, ..self.part(part, shape) })
    }

    /// Of every plane, which of how many equal parts `part` says.
    fn part(&self, part: impl Fn(usize) -> (usize, Range<usize>), shape: Vec<usize>) -> Self {
        let planes = self.planes.iter().enumerate().map(|(index, plane)| {
            let (count, range) = part(index);
            let each = plane.len.checked_div(count as u64).unwrap_or(0);
            let offset = plane.offset + each * range.start as u64;
            ByteRange { offset, len: each * range.len() as u64, ..*plane }
        });
        Self { name: String::new(), dtype: self.dtype, shape, planes: planes.collect() }
    }
}
