//! Tensors that are parameters by themselves, not weights of a module.

use std::ops::Range;

use moeflux_compute::DType;
use moeflux_compute::graph::WeightId;

use super::outline::Need;
use super::{Form, Recorder, WeightPart, tensor_error};
use crate::checkpoint::{Encoding, StoredWeight};
use crate::{Error, Result};

impl Recorder {
    fn stored_parameter(&mut self, name: &str, shape: [usize; 2]) -> Result<StoredWeight> {
        let tensor = self.resolve(name);
        let stored = self.find_tensor(name, &tensor, &shape, Need::Required)?;
        let stored =
            stored.ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor })?;
        if stored.shape != shape {
            let expected = format!("shape {shape:?}");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        Ok(stored)
    }

    /// A (rows, cols) matrix that is a tensor of its own, without `.weight`.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn parameter(&mut self, name: &str, rows: usize, cols: usize) -> Result<WeightId> {
        let stored = self.stored_parameter(name, [rows, cols])?;
        self.add(stored, WeightPart::Whole, Form::Stored)
    }

    /// A (cols, rows) matrix, `times` below itself, whose columns are the rows of a tensor of its own, without `.weight`; as f32.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn transposed_parameter(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        times: usize,
    ) -> Result<WeightId> {
        let stored = self.stored_parameter(name, [rows, cols])?;
        self.add(stored, WeightPart::Whole, Form::TransposedEach { times })
    }

    /// Matrices (rows, cols), `count` of them, that are one tensor of its own, without `.weight`, as one of all their rows.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn stacked_parameter(&mut self, name: &str, shape: [usize; 3]) -> Result<WeightId> {
        let stored = self.stored_stack(name, shape)?;
        self.add(stored, WeightPart::Whole, Form::Stored)
    }

    /// As [`Recorder::stacked_parameter`], with all rows in this order.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn stacked_rows(
        &mut self,
        name: &str,
        shape: [usize; 3],
        rows: Vec<Range<usize>>,
    ) -> Result<WeightId> {
        let stored = self.stored_stack(name, shape)?;
        self.add(stored, WeightPart::Rows(rows), Form::Stored)
    }

    fn stored_stack(&mut self, name: &str, [count, rows, cols]: [usize; 3]) -> Result<StoredWeight> {
        let tensor = self.resolve(name);
        let stored = self.find_tensor(name, &tensor, &[count, rows, cols], Need::Required)?;
        let mut stored =
            stored.ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor })?;
        if stored.shape != [count, rows, cols] || stored.planes.len() != 1 {
            let expected = format!("plain values of shape [{count}, {rows}, {cols}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        stored.shape = vec![count * rows, cols];
        Ok(stored)
    }

    /// Whether the checkpoint has the tensor `name`, without `.weight`.
    pub fn has_parameter(&self, name: &str) -> bool {
        match &self.outline {
            Some(outline) => outline.has(name),
            None => self.checkpoint.contains(&self.resolve(name)),
        }
    }

    /// A table of integers below `below` of shape (rows, cols), as f32.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn id_table(&mut self, name: &str, [rows, cols]: [usize; 2], below: usize) -> Result<WeightId> {
        let tensor = self.resolve(name);
        if self.outline.is_some() {
            let stored = self.find_tensor(name, &tensor, &[rows, cols], Need::Required)?;
            let missing = || Error::MissingTensor { path: self.checkpoint.path().into(), tensor };
            let stored = stored.ok_or_else(missing)?;
            return self.add(stored, WeightPart::Whole, Form::Stored);
        }
        let Some(entry) = self.checkpoint.entry(&tensor) else {
            return Err(Error::MissingTensor { path: self.checkpoint.path().into(), tensor });
        };
        // Integers are read as words that have the size of an f32, so that they need no encoding of their own.
        let words = match &entry.encoding {
            Encoding::Other(name) if name == "I64" => 2,
            Encoding::Other(name) if name == "I32" => 1,
            _ => 0,
        };
        let stored = StoredWeight {
            name: tensor,
            dtype: DType::F32,
            shape: vec![rows, cols * words],
            planes: vec![entry.range],
        };
        if entry.shape != [rows, cols] || words == 0 {
            let got = format!("{} {:?}", entry.encoding, entry.shape);
            let expected = format!("I32 or I64 of shape [{rows}, {cols}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, got));
        }
        self.add(stored, WeightPart::Whole, Form::Ids { words, below })
    }
}
