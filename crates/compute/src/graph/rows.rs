//! Operations on rows alone: embeddings, sums, columns and copies.

use super::builder::check;
use super::operation::{Operation, Refers, Visitor, refers};
use super::{GraphBuilder, Value, WeightId};
use crate::{Error, Result};

/// Rows of `table` picked by token id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbedOp {
    /// (vocab_size, hidden_size).
    pub table: WeightId,
}

impl Refers for EmbedOp {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        visitor.embeddings(&mut self.table);
    }
}

impl Operation for EmbedOp {
    const NAME: &'static str = "embed";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        Ok(graph.matrix(self.table).cols)
    }
}

/// a + b.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AddOp {
    /// (rows, width).
    pub a: Value,
    /// (rows, width).
    pub b: Value,
}

refers!(AddOp { a, b });

impl Operation for AddOp {
    const NAME: &'static str = "add";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        check(Self::NAME, "width of b", self.a.width, self.b.width)?;
        Ok(self.a.width)
    }
}

/// Limits every element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampOp {
    /// (rows, width).
    pub x: Value,
    /// Least and largest value.
    pub limits: [f32; 2],
}

refers!(ClampOp { x, limits });

impl Operation for ClampOp {
    const NAME: &'static str = "clamp";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

/// (x − mean) · scale, column by column.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StandardizeOp {
    /// (rows, width).
    pub x: Value,
    /// (width), f32.
    pub mean: WeightId,
    /// (width), f32.
    pub scale: WeightId,
}

refers!(StandardizeOp { x, mean, scale });

impl Operation for StandardizeOp {
    const NAME: &'static str = "standardize";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        graph.vector(Self::NAME, "mean", self.mean, self.x.width)?;
        graph.vector(Self::NAME, "scale", self.scale, self.x.width)?;
        Ok(self.x.width)
    }
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

refers!(SliceOp { x, groups, start, len });

impl Operation for SliceOp {
    const NAME: &'static str = "slice";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let Self { x, groups, start, len } = *self;
        let op = Self::NAME;
        check(op, "width left over by groups", 0, x.width % groups.max(1))?;
        let (part, end) = (x.width / groups.max(1), start.saturating_add(len));
        if len == 0 || end > part {
            return Err(Error::Shape { op, what: "end of the columns", expected: part, got: end });
        }
        Ok(groups * len)
    }
}

/// Copies of a row side by side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RepeatOp {
    /// (rows, width).
    pub x: Value,
    /// How many.
    pub times: usize,
}

refers!(RepeatOp { x, times });

impl Operation for RepeatOp {
    const NAME: &'static str = "repeat";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width * self.times)
    }
}

/// Rows that come with the batch: what another graph computed for its tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InputRowsOp {
    /// Columns of [`Batch::rows`](crate::backend::Batch::rows).
    pub width: usize,
}

refers!(InputRowsOp { width });

impl Operation for InputRowsOp {
    const NAME: &'static str = "input_rows";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.width)
    }
}

/// x with what comes with the batch at rows whose embeddings do: at level 0 in place of x, at others added to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GivenEmbeddingsOp {
    /// (tokens, width).
    pub x: Value,
    /// Which of the parts of [`Embeddings::values`](crate::backend::Embeddings::values).
    pub level: usize,
}

refers!(GivenEmbeddingsOp { x, level });

impl Operation for GivenEmbeddingsOp {
    const NAME: &'static str = "given_embeddings";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

/// In place of each row the block of rows of its span that it is in, side by side; zeros where the last block is short.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockRowsOp {
    /// (tokens, width).
    pub x: Value,
    /// Rows of a block.
    pub rows: usize,
}

refers!(BlockRowsOp { x, rows });

impl Operation for BlockRowsOp {
    const NAME: &'static str = "block_rows";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width * self.rows)
    }
}

/// Rows of a and b side by side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JoinOp {
    /// (rows, width of a).
    pub a: Value,
    /// (rows, width of b).
    pub b: Value,
}

refers!(JoinOp { a, b });

impl Operation for JoinOp {
    const NAME: &'static str = "join";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.a.width + self.b.width)
    }
}

/// Floats of few bits with a scale for each block, to which what they hold is rounded: DeepSeek-V4.1's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockFloat {
    /// e4m3, with powers of two as scales: the least by which the largest of a block is at most 448, and that of 1e-4.
    E4m3,
    /// e2m1, with powers of two as scales: the least by which the largest of a block is at most 6.
    E2m1,
    /// e2m1, with the largest of a block divided by 6 as scales, which are rounded to e4m3.
    E2m1ByE4m3,
}

/// Rounds blocks. See [`round_blocks`](super::GraphBuilder::round_blocks).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundBlocksOp {
    /// (rows, width).
    pub x: Value,
    /// Columns of a block.
    pub block: usize,
    /// What they are rounded to.
    pub form: BlockFloat,
}

refers!(RoundBlocksOp { x, block, form });

impl Operation for RoundBlocksOp {
    const NAME: &'static str = "round_blocks";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        check(Self::NAME, "columns left over by blocks", 0, self.x.width % self.block.max(1))?;
        Ok(self.x.width)
    }
}

/// Keeps the rows whose logits were asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatherRowsOp {
    /// (tokens, width).
    pub x: Value,
}

refers!(GatherRowsOp { x });

impl Operation for GatherRowsOp {
    const NAME: &'static str = "gather_rows";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        Ok(self.x.width)
    }
}

impl GraphBuilder {
    /// Token embeddings: (tokens, hidden_size).
    pub fn embed(&mut self, table: WeightId) -> Value {
        self.record(EmbedOp { table }).expect("any input fits")
    }

    /// Rows of `width` columns that come with the batch.
    pub fn input_rows(&mut self, width: usize) -> Value {
        self.record(InputRowsOp { width }).expect("any input fits")
    }

    /// x with the part `level` of the embeddings that come with the batch at their rows: in place of x at level 0, else added
    /// to it.
    pub fn given_embeddings(&mut self, x: Value, level: usize) -> Value {
        self.record(GivenEmbeddingsOp { x, level }).expect("any input fits")
    }

    /// In place of each row the block of `rows` rows of its span that it is in: (tokens, rows · width).
    pub fn block_rows(&mut self, x: Value, rows: usize) -> Value {
        self.record(BlockRowsOp { x, rows: rows.max(1) }).expect("any input fits")
    }

    /// Rows of a and b side by side: (rows, width of a + width of b).
    pub fn join(&mut self, a: Value, b: Value) -> Value {
        self.record(JoinOp { a, b }).expect("any input fits")
    }

    /// a + b.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.record(AddOp { a, b })
    }

    /// x rounded to floats of few bits, with a scale for each `block` of columns (as DeepSeek-V4.1 keeps what it attends to,
    /// mlx-lm's `deepseek_v41.py`).
    ///
    /// # Errors
    /// [`Error::Shape`] if blocks are not equal parts of a row.
    pub fn round_blocks(&mut self, x: Value, block: usize, form: BlockFloat) -> Result<Value> {
        self.record(RoundBlocksOp { x, block: block.max(1), form })
    }

    /// x limited to ±|limit|.
    pub fn clamp(&mut self, x: Value, limit: f32) -> Value {
        self.clamp_between(x, [-limit.abs(), limit.abs()])
    }

    /// x limited to values from one number to another that is not below it.
    pub fn clamp_between(&mut self, x: Value, limits: [f32; 2]) -> Value {
        self.record(ClampOp { x, limits }).expect("any input fits")
    }

    /// (x − mean) · scale, column by column.
    ///
    /// # Errors
    /// [`Error::Shape`] if vectors are not as wide as x; [`Error::Unsupported`] if they are not f32.
    pub fn standardize(&mut self, x: Value, mean: WeightId, scale: WeightId) -> Result<Value> {
        self.record(StandardizeOp { x, mean, scale })
    }

    /// Columns `start..start + len` of each of `groups` equal parts of a row, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal or shorter than that.
    pub fn slice(&mut self, x: Value, groups: usize, start: usize, len: usize) -> Result<Value> {
        self.record(SliceOp { x, groups, start, len })
    }

    /// `times` copies of a row side by side.
    pub fn repeat(&mut self, x: Value, times: usize) -> Value {
        self.record(RepeatOp { x, times: times.max(1) }).expect("any input fits")
    }

    /// Keeps the rows whose logits were asked for.
    pub fn gather_rows(&mut self, x: Value) -> Value {
        self.record(GatherRowsOp { x }).expect("any input fits")
    }
}
