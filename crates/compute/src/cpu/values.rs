//! Buffers of a graph's values.

use crate::graph::Value;
use crate::plan::Plan;

/// Values between operations, in the buffers that a plan gives them.
pub(crate) struct Values {
    plan: Plan,
    buffers: Vec<Vec<f32>>,
}

impl Values {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { buffers: vec![vec![]; plan.buffer_widths.len()], plan }
    }

    fn buffer(&self, value: Value) -> usize {
        self.plan.buffer_of[value.index].expect("only the logits have no buffer, and nothing reads them")
    }

    /// A value's content: (rows, width).
    pub(crate) fn of(&self, value: Value) -> &[f32] {
        &self.buffers[self.buffer(value)]
    }

    /// Rows that a value has in this batch.
    pub(crate) fn rows(&self, value: Value) -> usize {
        self.of(value).len() / value.width()
    }

    /// A row of a value.
    pub(crate) fn row(&self, value: Value, row: usize) -> &[f32] {
        &self.of(value)[row * value.width()..(row + 1) * value.width()]
    }

    /// Takes the buffer that a value will be written to, resized for `rows` rows.
    pub(crate) fn take(&mut self, value: Value, rows: usize) -> Vec<f32> {
        let index = self.buffer(value);
        let mut buffer = std::mem::take(&mut self.buffers[index]);
        buffer.resize(rows * value.width(), 0.0);
        buffer
    }

    /// Gives back what was taken.
    pub(crate) fn put(&mut self, value: Value, buffer: Vec<f32>) {
        let index = self.buffer(value);
        self.buffers[index] = buffer;
    }
}
