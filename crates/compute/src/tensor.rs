//! Weight matrices: borrowed ([`TensorView`]) and owned ([`Tensor`]), always (rows, cols) row-major with
//! rows = output features and cols = input features.

use std::{fmt, ops::Range, sync::Arc};

use crate::dtype::Zeros;
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

/// A borrowed weight matrix of checked size. Its rows follow each other, or are every second of a stored matrix, or are
/// the columns of a stored matrix of plain floats.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    /// Where the first row lies within its block, for planes whose rows stand for several.
    first_row: usize,
    planes: [&'a [u8]; 3],
    /// Bytes of a row in each plane, if rows are stored as such.
    row_bytes: [usize; 3],
    /// Bytes from a row's first element to the next row's in each plane.
    strides: [usize; 3],
    /// Bytes from an element to the next of its row, if rows are stored as columns.
    transposed: Option<usize>,
}

impl<'a> TensorView<'a> {
    /// Describes `planes` (as many as the encoding has) as a `rows` × `cols` matrix.
    ///
    /// # Errors
    /// [`Error::PlaneSize`] or [`Error::RowLength`] if sizes do not fit.
    pub fn new(dtype: DType, rows: usize, cols: usize, planes: &[&'a [u8]]) -> Result<Self> {
        let mut checked = [&[] as &[u8]; 3];
        let (mut row_bytes, mut strides) = ([0; 3], [0; 3]);
        for (plane, slot) in checked.iter_mut().enumerate().take(dtype.planes()) {
            row_bytes[plane] = dtype.row_bytes(plane, cols)?;
            // One that stands for all rows is where each of them finds it.
            strides[plane] = if dtype.block_rows(plane) == usize::MAX { 0 } else { row_bytes[plane] };
            let expected = dtype.plane_bytes(plane, rows, cols)?;
            let got = planes.get(plane).map_or(0, |p| p.len());
            if got != expected {
                return Err(Error::PlaneSize { dtype, rows, cols, plane, expected, got });
            }
            *slot = planes[plane];
        }
        Ok(Self { dtype, rows, cols, first_row: 0, planes: checked, row_bytes, strides, transposed: None })
    }

    /// The even and the odd rows of a stored matrix of twice `rows` rows.
    ///
    /// # Errors
    /// As [`TensorView::new`], and [`Error::Unsupported`] where zero points of several rows share a word.
    pub fn interleaved(dtype: DType, rows: usize, cols: usize, planes: &[&'a [u8]]) -> Result<[Self; 2]> {
        if let DType::Int { zeros: Zeros::Stored, .. } = dtype {
            return Err(Error::Unsupported { what: "every second row", dtype });
        }
        let both = Self::new(dtype, 2 * rows, cols, planes)?;
        Ok([0, 1].map(|first| both.every_second(rows, both.strides, first)))
    }

    /// The matrix whose rows are the columns of a stored (cols, rows) matrix of plain floats.
    ///
    /// # Errors
    /// As [`TensorView::new`], and [`Error::Unsupported`] for encodings with blocks.
    pub fn transposed(dtype: DType, rows: usize, cols: usize, plane: &'a [u8]) -> Result<Self> {
        if dtype.block_len() != 1 {
            return Err(Error::Unsupported { what: "a transposed matrix", dtype });
        }
        let stored = Self::new(dtype, cols, rows, &[plane])?;
        let element = dtype.block_bytes(0);
        let (row_bytes, strides) = ([0; 3], [element, 0, 0]);
        Ok(Self { rows, cols, row_bytes, strides, transposed: Some(rows * element), ..stored })
    }

    /// The even and the odd rows of the matrix whose rows are the columns of a stored (cols, 2 · rows) one.
    ///
    /// # Errors
    /// As [`TensorView::transposed`].
    pub fn interleaved_transposed(
        dtype: DType,
        rows: usize,
        cols: usize,
        plane: &'a [u8],
    ) -> Result<[Self; 2]> {
        let both = Self::transposed(dtype, 2 * rows, cols, plane)?;
        Ok([0, 1].map(|first| both.every_second(rows, both.strides, first)))
    }

    /// `rows` rows, every second from `first` on; `skip` bytes of each plane lie before the second.
    fn every_second(&self, rows: usize, skip: [usize; 3], first: usize) -> Self {
        let mut planes = self.planes;
        for (plane, skip) in planes.iter_mut().zip(skip) {
            *plane = &plane[(first * skip).min(plane.len())..];
        }
        Self { rows, planes, strides: self.strides.map(|stride| 2 * stride), ..*self }
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

    /// Bytes of `plane` (0 weights, 1 scales, 2 biases or zero points; empty where the encoding lacks it) from the first row on.
    pub fn plane(&self, plane: usize) -> &'a [u8] {
        self.planes[plane]
    }

    /// The row of `plane` that stands for row `row`.
    fn stored_row(&self, plane: usize, row: usize) -> usize {
        match self.dtype.block_rows(plane) {
            1 => row,
            block => (self.first_row + row) / block,
        }
    }

    /// The bytes of row `row` in `plane`; nothing if rows are stored as columns.
    ///
    /// # Panics
    /// If `row` is not below [`TensorView::rows`].
    pub fn row(&self, plane: usize, row: usize) -> &'a [u8] {
        assert!(row < self.rows, "row within the matrix");
        let start = self.stored_row(plane, row) * self.strides[plane];
        &self.planes[plane][start..start + self.row_bytes[plane]]
    }

    /// Which of the rows that its row of `plane` stands for row `row` is.
    pub(crate) fn row_in_block(&self, plane: usize, row: usize) -> usize {
        (self.first_row + row) % self.dtype.block_rows(plane)
    }

    /// Bytes in `plane` from a row's first element to the next row's.
    pub(crate) fn stride(&self, plane: usize) -> usize {
        self.strides[plane]
    }

    /// Whether rows are stored as columns.
    pub(crate) fn is_transposed(&self) -> bool {
        self.transposed.is_some()
    }

    /// The bytes of one element of a matrix of plain floats.
    ///
    /// # Panics
    /// If there is no such element.
    pub(crate) fn element(&self, row: usize, col: usize) -> &'a [u8] {
        assert!(row < self.rows && col < self.cols, "element within the matrix");
        let bytes = self.dtype.block_bytes(0);
        let start = row * self.strides[0] + col * self.transposed.unwrap_or(bytes);
        &self.planes[0][start..start + bytes]
    }

    /// Rows `rows` as a matrix of their own.
    ///
    /// # Panics
    /// If the range does not lie within the matrix.
    pub fn rows_range(&self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "row range within the matrix");
        let mut planes = self.planes;
        for (index, plane) in planes.iter_mut().enumerate() {
            let start = self.stored_row(index, rows.start) * self.strides[index];
            *plane = &plane[start.min(plane.len())..];
        }
        let blocks = [0, 1, 2].map(|plane| self.dtype.block_rows(plane));
        let block = blocks.into_iter().filter(|rows| *rows != usize::MAX).max().unwrap_or(1);
        let first_row = (self.first_row + rows.start) % block;
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
        let slices = &planes[..self.dtype.planes()];
        TensorView::new(self.dtype, self.rows, self.cols, slices).expect("sizes checked when it was made")
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

    /// The bytes of a plane, shared.
    ///
    /// # Panics
    /// If the encoding has no such plane.
    pub fn plane(&self, plane: usize) -> &Bytes {
        &self.planes[plane]
    }

    /// Bytes over all planes.
    pub fn bytes(&self) -> usize {
        self.planes.iter().map(|p| p.as_slice().len()).sum()
    }
}
