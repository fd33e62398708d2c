//! Weight matrices: borrowed ([`TensorView`]) and owned ([`Tensor`]), always (rows, cols) row-major with
//! rows = output features and cols = input features.

use std::{fmt, ops::Range, sync::Arc};

use crate::dtype::FP8_BLOCK;
use crate::{DType, Error, Result};

/// A range of shared, immutable host memory; cloning shares it.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All of `owner`.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let range = 0..owner.as_ref().len();
        Self { owner: Arc::new(owner), range }
    }

    /// The sub-range `range` of these bytes; `None` if it does not lie within them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: Arc::clone(&self.owner), range: start..start + range.len() })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}

/// A borrowed weight matrix of checked size.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    /// Where the first row lies within its block, for planes whose rows stand for several.
    first_row: usize,
    planes: [&'a [u8]; 3],
}

impl<'a> TensorView<'a> {
    /// Describes `planes` (one, or three for affine: weights, scales, biases) as a `rows` × `cols` matrix.
    ///
    /// # Errors
    /// [`Error::PlaneSize`] or [`Error::RowLength`] if sizes do not fit.
    pub fn new(dtype: DType, rows: usize, cols: usize, planes: &[&'a [u8]]) -> Result<Self> {
        let mut checked = [&[] as &[u8]; 3];
        for (plane, slot) in checked.iter_mut().enumerate().take(dtype.planes()) {
            let expected = dtype.plane_bytes(plane, rows, cols)?;
            let got = planes.get(plane).map_or(0, |p| p.len());
            if got != expected {
                return Err(Error::PlaneSize { dtype, rows, cols, plane, expected, got });
            }
            *slot = planes[plane];
        }
        Ok(Self { dtype, rows, cols, first_row: 0, planes: checked })
    }

    /// Encoding.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of `plane` (0 weights, 1 scales, 2 biases; empty where the encoding lacks it).
    pub fn plane(&self, plane: usize) -> &'a [u8] {
        self.planes[plane]
    }

    /// The rows of `plane` that stand for rows `rows`, and the bytes of one.
    fn plane_rows(&self, plane: usize, rows: Range<usize>) -> (Range<usize>, usize) {
        let block = self.dtype.block_rows(plane);
        let before = if block == 1 { 0 } else { self.first_row };
        let stored = (before + self.rows).div_ceil(block);
        let bytes = self.planes[plane].len().checked_div(stored).unwrap_or(0);
        ((before + rows.start) / block..(before + rows.end).div_ceil(block), bytes)
    }

    /// The bytes of row `row` in `plane`.
    ///
    /// # Panics
    /// If `row` is not below [`TensorView::rows`].
    pub fn row(&self, plane: usize, row: usize) -> &'a [u8] {
        assert!(row < self.rows, "row within the matrix");
        let (rows, bytes) = self.plane_rows(plane, row..row + 1);
        &self.planes[plane][rows.start * bytes..rows.end * bytes]
    }

    /// Rows `rows` as a matrix of their own.
    ///
    /// # Panics
    /// If the range does not lie within the matrix.
    pub fn rows_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "row range within the matrix");
        let planes = [0, 1, 2].map(|plane| {
            let (stored, bytes) = self.plane_rows(plane, rows.clone());
            &self.planes[plane][stored.start * bytes..stored.end * bytes]
        });
        let first_row = (self.first_row + rows.start) % FP8_BLOCK;
        Self { rows: rows.len(), first_row, planes, ..*self }
    }
}

/// An owned (shared, immutable) weight matrix of checked size.
#[derive(Debug, Clone)]
pub struct Tensor {
    dtype: DType,
    rows: usize,
    cols: usize,
    planes: Vec<Bytes>,
}

impl Tensor {
    /// Describes `planes` as a `rows` × `cols` matrix; see [`TensorView::new`].
    ///
    /// # Errors
    /// [`Error::PlaneSize`] or [`Error::RowLength`] if sizes do not fit.
    pub fn new(dtype: DType, rows: usize, cols: usize, planes: Vec<Bytes>) -> Result<Self> {
        let slices: Vec<&[u8]> = planes.iter().map(Bytes::as_slice).collect();
        TensorView::new(dtype, rows, cols, &slices)?;
        Ok(Self { dtype, rows, cols, planes })
    }

    /// An f32 matrix of these values.
    ///
    /// # Errors
    /// [`Error::PlaneSize`] if there are not rows · cols values.
    pub fn from_f32(rows: usize, cols: usize, values: &[f32]) -> Result<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(DType::F32, rows, cols, vec![Bytes::new(bytes)])
    }

    /// Borrows it.
    pub fn view(&self) -> TensorView<'_> {
        let mut planes = [&[] as &[u8]; 3];
        for (slot, plane) in planes.iter_mut().zip(&self.planes) {
            *slot = plane.as_slice();
        }
        TensorView { dtype: self.dtype, rows: self.rows, cols: self.cols, first_row: 0, planes }
    }

    /// Encoding.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes over all planes.
    pub fn bytes(&self) -> usize {
        self.planes.iter().map(|p| p.as_slice().len()).sum()
    }
}
