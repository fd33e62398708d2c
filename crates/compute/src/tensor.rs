//! Weight matrices: borrowed ([`TensorView`]) and owned ([`Tensor`]), always (rows, cols) row-major with
//! rows = output features and cols = input features.

use std::{fmt, ops::Range, sync::Arc};

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
            let expected = dtype.row_bytes(plane, cols)?.saturating_mul(rows);
            let got = planes.get(plane).map_or(0, |p| p.len());
            if got != expected {
                return Err(Error::PlaneSize { dtype, rows, cols, plane, expected, got });
            }
            *slot = planes[plane];
        }
        Ok(Self { dtype, rows, cols, planes: checked })
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

    /// The bytes of row `row` in `plane`.
    ///
    /// # Panics
    /// If `row` is not below [`TensorView::rows`].
    pub fn row(&self, plane: usize, row: usize) -> &'a [u8] {
        let bytes = self.planes[plane].len() / self.rows;
        &self.planes[plane][row * bytes..(row + 1) * bytes]
    }

    /// Rows `rows` as a matrix of their own.
    ///
    /// # Panics
    /// If the range does not lie within the matrix.
    pub fn rows_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "row range within the matrix");
        let planes = self.planes.map(|p| {
            let bytes = p.len().checked_div(self.rows).unwrap_or(0);
            &p[rows.start * bytes..rows.end * bytes]
        });
        Self { rows: rows.len(), planes, ..*self }
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
        TensorView { dtype: self.dtype, rows: self.rows, cols: self.cols, planes }
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
