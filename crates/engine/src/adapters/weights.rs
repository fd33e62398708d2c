//! How the weights that a graph has of an adapter are made from the matrices of its file: rows of one, or those of all experts
//! one after the other.

use std::ops::Range;

use moeflux_compute::graph::MatrixSpec;
use moeflux_compute::{Bytes, DType, Tensor};

use super::file::{AdapterFile, Matrix};
use crate::Result;

/// Rows of a matrix in the file, from `start` on every `step`-th, `len` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stride {
    pub(crate) start: usize,
    pub(crate) step: usize,
    pub(crate) len: usize,
}

impl Stride {
    fn get(self, index: usize) -> usize {
        self.start + index * self.step
    }
}

/// A weight of the graph.
#[derive(Debug)]
pub(crate) enum AdapterWeight {
    /// Rows of a matrix, in this order.
    Rows { matrix: Matrix, rows: Vec<Range<usize>> },
    /// Rows of the matrices of all experts, each made up to (rows, cols) by zeros; zeros where an expert has none.
    Experts { matrices: Vec<Option<Matrix>>, dtype: DType, rows: usize, cols: usize },
    /// B of all experts, (experts · out, r), whose columns the file has by rank, then by expert.
    ByRank { matrix: Matrix, experts: usize, rows: Stride },
    /// A of all experts, (experts · r, in), in place of a transposed B.
    TransposedB { matrix: Matrix, experts: usize },
    /// B of all experts, (experts · out, r), in place of a transposed A.
    TransposedA { matrix: Matrix, experts: usize, rows: Stride },
}

impl AdapterWeight {
    /// Encoding and shape.
    pub(crate) fn spec(&self) -> MatrixSpec {
        match self {
            Self::Rows { matrix, rows } => {
                MatrixSpec { dtype: matrix.dtype, rows: rows.iter().map(Range::len).sum(), cols: matrix.cols }
            }
            Self::Experts { matrices, dtype, rows, cols } => {
                MatrixSpec { dtype: *dtype, rows: matrices.len() * rows, cols: *cols }
            }
            Self::ByRank { matrix, experts, rows } => {
                MatrixSpec { dtype: matrix.dtype, rows: experts * rows.len, cols: matrix.cols / experts }
            }
            Self::TransposedB { matrix, .. } => {
                MatrixSpec { dtype: matrix.dtype, rows: matrix.cols, cols: matrix.rows }
            }
            Self::TransposedA { matrix, experts, rows } => {
                MatrixSpec { dtype: matrix.dtype, rows: experts * rows.len, cols: matrix.rows / experts }
            }
        }
    }

    /// Its name in errors and profiles.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Rows { matrix, .. }
            | Self::ByRank { matrix, .. }
            | Self::TransposedB { matrix, .. }
            | Self::TransposedA { matrix, .. } => &matrix.name,
            Self::Experts { matrices, .. } => {
                matrices.iter().flatten().next().map_or("", |matrix| matrix.name.as_str())
            }
        }
    }

    /// Reads it.
    ///
    /// # Errors
    /// As [`AdapterFile::read`].
    pub(crate) fn load(&self, file: &AdapterFile) -> Result<Tensor> {
        let spec = self.spec();
        let size = spec.bytes()? / (spec.rows * spec.cols).max(1);
        let mut out = Vec::with_capacity(spec.rows * spec.cols * size);
        match self {
            Self::Rows { matrix, rows } => {
                let tensor = file.read(matrix)?;
                if rows.len() == 1 && rows[0] == (0..matrix.rows) {
                    return Ok(tensor);
                }
                let row_bytes = matrix.cols * size;
                for rows in rows {
                    out.extend_from_slice(
                        &tensor.view().plane(0)[rows.start * row_bytes..rows.end * row_bytes],
                    );
                }
            }
            Self::Experts { matrices, rows, cols, .. } => {
                for matrix in matrices {
                    let end = out.len() + rows * cols * size;
                    if let Some(matrix) = matrix {
                        let tensor = file.read(matrix)?;
                        for row in tensor.view().plane(0).chunks_exact(matrix.cols * size) {
                            out.extend_from_slice(row);
                            out.resize(out.len() + (cols - matrix.cols) * size, 0);
                        }
                    }
                    out.resize(end, 0);
                }
            }
            Self::ByRank { matrix, experts, rows } => {
                let at = |expert, row, col| (rows.get(row), col * experts + expert);
                gather(file, matrix, (*experts, rows.len, spec.cols), at, &mut out)?;
            }
            Self::TransposedB { matrix, experts } => {
                let at = |expert, row, col| (col, row * experts + expert);
                gather(file, matrix, (*experts, spec.rows / experts, spec.cols), at, &mut out)?;
            }
            Self::TransposedA { matrix, experts, rows } => {
                let at = |expert, row, col| (expert * spec.cols + col, rows.get(row));
                gather(file, matrix, (*experts, rows.len, spec.cols), at, &mut out)?;
            }
        }
        Ok(Tensor::new(spec.dtype, spec.rows, spec.cols, vec![Bytes::new(out)])?)
    }
}

/// Appends the elements of (experts, rows, cols) that `at` says the places of in `matrix`.
fn gather(
    file: &AdapterFile,
    matrix: &Matrix,
    (experts, rows, cols): (usize, usize, usize),
    at: impl Fn(usize, usize, usize) -> (usize, usize),
    out: &mut Vec<u8>,
) -> Result<()> {
    let tensor = file.read(matrix)?;
    let bytes = tensor.view().plane(0);
    let size = bytes.len() / (matrix.rows * matrix.cols);
    for expert in 0..experts {
        for row in 0..rows {
            for col in 0..cols {
                let (row, col) = at(expert, row, col);
                let start = (row * matrix.cols + col) * size;
                out.extend_from_slice(&bytes[start..start + size]);
            }
        }
    }
    Ok(())
}
