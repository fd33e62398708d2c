//! Operations on rows alone: embeddings, sums, columns and copies.

use super::builder::check;
use super::{GraphBuilder, Op, Value, WeightId};
use crate::{Error, Result};

/// Rows of `table` picked by token id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedOp {
    /// (vocab_size, hidden_size).
    pub table: WeightId,
}

/// a + b.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddOp {
    /// (rows, width).
    pub a: Value,
    /// (rows, width).
    pub b: Value,
}

/// Limits every element to ±limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampOp {
    /// (rows, width).
    pub x: Value,
    /// Largest magnitude let through.
    pub limit: f32,
}

/// Columns `start..start + len` of each of `groups` equal parts of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SliceOp {
    /// (rows, width).
    pub x: Value,
    /// Parts of a row.
    pub groups: usize,
    /// First column in a part.
    pub start: usize,
    /// Columns of a part.
    pub len: usize,
}

/// Copies of a row side by side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RepeatOp {
    /// (rows, width).
    pub x: Value,
    /// How many.
    pub times: usize,
}

/// Keeps the rows whose logits were asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatherRowsOp {
    /// (tokens, width).
    pub x: Value,
}

impl GraphBuilder {
    /// Token embeddings: (tokens, hidden_size).
    pub fn embed(&mut self, table: WeightId) -> Value {
        let width = self.matrix(table).cols;
        self.push(Op::Embed(EmbedOp { table }), width)
    }

    /// a + b.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        check("add", "width of b", a.width, b.width)?;
        Ok(self.push(Op::Add(AddOp { a, b }), a.width))
    }

    /// x limited to ±|limit|.
    pub fn clamp(&mut self, x: Value, limit: f32) -> Value {
        let limit = limit.abs();
        self.push(Op::Clamp(ClampOp { x, limit }), x.width)
    }

    /// Columns `start..start + len` of each of `groups` equal parts of a row, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal or shorter than that.
    pub fn slice(&mut self, x: Value, groups: usize, start: usize, len: usize) -> Result<Value> {
        check("slice", "width left over by groups", 0, x.width % groups.max(1))?;
        let (part, end) = (x.width / groups.max(1), start.saturating_add(len));
        if len == 0 || end > part {
            return Err(Error::Shape { op: "slice", what: "end of the columns", expected: part, got: end });
        }
        Ok(self.push(Op::Slice(SliceOp { x, groups, start, len }), groups * len))
    }

    /// `times` copies of a row side by side.
    pub fn repeat(&mut self, x: Value, times: usize) -> Value {
        let times = times.max(1);
        self.push(Op::Repeat(RepeatOp { x, times }), x.width * times)
    }

    /// Keeps the rows whose logits were asked for.
    pub fn gather_rows(&mut self, x: Value) -> Value {
        self.push(Op::GatherRows(GatherRowsOp { x }), x.width)
    }
}
