//! The engine's vectors as NumPy arrays, without copying.

use numpy::{Element, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

/// An array of rows of `width` values.
pub fn rows<T: Element>(py: Python<'_>, values: Vec<T>, width: usize) -> PyResult<Bound<'_, PyArray2<T>>> {
    let count = values.len() / width.max(1);
    PyArray1::from_vec(py, values).reshape([count, width])
}
