//! Attention over a window of recent tokens and over one entry for each window of older ones (DeepSeek-V4, 2026).
//!
//! Tokens are pooled into entries by [`GraphBuilder::window_pool`], whose result is a row for the last token of each
//! window; what follows (a norm, a rotation) is computed for all rows, and
//! [`GraphBuilder::compressed_attention`] keeps those that matter.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{CompressedCacheId, GraphBuilder, StateId, Value, WeightId};
use crate::backend::PAGE_TOKENS;
use crate::{Error, Result};

/// Pooling of tokens by windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowPool {
    /// Tokens of a window.
    pub window: usize,
    /// Whether the window before takes part with channels of its own: tokens have `width` channels for the window
    /// after theirs, then `width` for their own.
    pub overlap: bool,
    /// Channels of an entry.
    pub width: usize,
}

impl WindowPool {
    /// Channels of a token.
    pub fn channels(&self) -> usize {
        if self.overlap { 2 * self.width } else { self.width }
    }

    /// Tokens before the last one that an entry depends on.
    pub fn held(&self) -> usize {
        if self.overlap { 2 * self.window - 1 } else { self.window - 1 }
    }

    /// Whether the token at `position` ends a window.
    pub fn ends(&self, position: usize) -> bool {
        (position + 1).is_multiple_of(self.window)
    }
}

/// Choice of entries by the index of a lightning indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryIndex {
    /// Query heads.
    pub heads: usize,
    /// Channels of a head and of an entry's key.
    pub head_dim: usize,
    /// Entries that a query sees, at most.
    pub top_k: usize,
}

/// What is kept of a token, and what an entry is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenForm {
    /// One key that is the value too for all query heads. Entries are such keys themselves.
    Shared,
    /// Keys and values of heads; query head h reads head h / (heads / kv_heads). Entries only say by their key for the
    /// index which windows' tokens are seen.
    Grouped {
        /// Key and value heads.
        kv_heads: usize,
    },
    /// Nothing: other attention keeps tokens. Entries only have a key for the index, which chooses for it.
    Elsewhere,
}

/// Shape of a compressed attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompressedAttention {
    /// What is kept of a token.
    pub form: TokenForm,
    /// Query heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on q·k before softmax.
    pub scale: f32,
    /// A token is visible iff query position − its position < window; of grouped tokens, those of seen entries and those
    /// that no entry stands for yet.
    pub window: usize,
    /// Tokens that an entry stands for; an entry is visible from the last one on.
    pub stride: usize,
    /// Which entries are seen, of more than that; all when absent.
    pub index: Option<EntryIndex>,
}

impl CompressedAttention {
    /// Entries that end in one page, at most.
    pub fn page_entries(&self) -> usize {
        PAGE_TOKENS.div_ceil(self.stride)
    }

    /// Channels that are kept of a token: its key and value, or its keys, then its values.
    pub(crate) fn token_width(&self) -> usize {
        match self.form {
            TokenForm::Shared => self.head_dim,
            TokenForm::Grouped { kv_heads } => 2 * kv_heads * self.head_dim,
            TokenForm::Elsewhere => 0,
        }
    }

    /// Channels that are kept of an entry before its key for the index.
    pub(crate) fn entry_key(&self) -> usize {
        match self.form {
            TokenForm::Shared => self.head_dim,
            TokenForm::Grouped { .. } | TokenForm::Elsewhere => 0,
        }
    }

    /// Channels that are kept of an entry: itself, then its key for the index.
    pub(crate) fn entry_width(&self) -> usize {
        self.entry_key() + self.index.map_or(0, |index| index.head_dim)
    }

    /// Elements of a page: its tokens, then its entries.
    pub fn page_elements(&self) -> usize {
        PAGE_TOKENS * self.token_width() + self.page_entries() * self.entry_width()
    }

    /// Entries that the query at `position` may see: those before this one.
    pub fn entries(&self, position: usize) -> usize {
        (position + 1) / self.stride
    }

    /// The page of a sequence that has `entry`, and its place among the page's entries.
    pub fn place(&self, entry: usize) -> (usize, usize) {
        let page = ((entry + 1) * self.stride - 1) / PAGE_TOKENS;
        (page, entry - page * PAGE_TOKENS / self.stride)
    }
}

/// What the index compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexInputs {
    /// (tokens, heads · head_dim), rotated.
    pub q: Value,
    /// (tokens, head_dim): keys of entries, in the rows of the tokens that end them.
    pub k: Value,
    /// (tokens, heads): weights of heads; all the same when absent.
    pub weights: Option<Value>,
}

/// What an attention over chosen windows reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInputs {
    /// (tokens, heads · head_dim), rotated.
    pub q: Value,
    /// (tokens, kv_heads · head_dim), rotated.
    pub k: Value,
    /// (tokens, kv_heads · head_dim).
    pub v: Value,
    /// For the choice of windows.
    pub index: IndexInputs,
}

/// What a compressed attention reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedInputs {
    /// (tokens, heads · head_dim), rotated.
    pub q: Value,
    /// (tokens, head_dim): key and value of each token, rotated.
    pub kv: Value,
    /// (tokens, head_dim): entries, in the rows of the tokens that end them.
    pub entries: Value,
    /// For the choice of entries.
    pub index: Option<IndexInputs>,
    /// (heads), f32: a logit of each head that joins its softmax and whose probability is dropped.
    pub sinks: WeightId,
}

/// Pools the tokens of each window. See [`window_pool`](super::GraphBuilder::window_pool).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowPoolOp {
    /// (tokens, channels).
    pub kv: Value,
    /// (tokens, channels).
    pub gate: Value,
    /// (window · channels), f32.
    pub bias: WeightId,
    /// Windows and channels.
    pub shape: WindowPool,
    /// kv and gate of the tokens before, oldest first: (held, 2 · channels).
    pub state: StateId,
}

refers!(WindowPoolOp { kv, gate, bias, shape, state });

impl Operation for WindowPoolOp {
    const NAME: &'static str = "window_pool";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, shape) = (Self::NAME, self.shape);
        if shape.window == 0 {
            return Err(Error::Shape { op, what: "window", expected: 1, got: 0 });
        }
        let channels = shape.channels();
        check(op, "width of kv", channels, self.kv.width)?;
        check(op, "width of the gate", channels, self.gate.width)?;
        graph.vector(op, "elements of the bias", self.bias, shape.window.saturating_mul(channels))?;
        Ok(shape.width)
    }
}

/// Mean of the tokens of each window. See [`window_mean`](super::GraphBuilder::window_mean).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowMeanOp {
    /// (tokens, width).
    pub x: Value,
    /// Tokens of a window.
    pub window: usize,
    /// The tokens before, oldest first: (window − 1, width).
    pub state: StateId,
}

refers!(WindowMeanOp { x, window, state });

impl Operation for WindowMeanOp {
    const NAME: &'static str = "window_mean";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        if self.window == 0 {
            return Err(Error::Shape { op: Self::NAME, what: "window", expected: 1, got: 0 });
        }
        Ok(self.x.width)
    }
}

/// Attention over recent tokens and over entries. See
/// [`compressed_attention`](super::GraphBuilder::compressed_attention).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompressedAttentionOp {
    /// What is read.
    pub inputs: CompressedInputs,
    /// Where tokens and entries live.
    pub cache: CompressedCacheId,
}

refers!(CompressedAttentionOp { inputs, cache });

impl Operation for CompressedAttentionOp {
    const NAME: &'static str = "compressed_attention";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, inputs, shape) = (Self::NAME, self.inputs, graph.compressed_caches[self.cache.0]);
        if shape.window == 0 || shape.stride == 0 {
            return Err(Error::Shape { op, what: "window and stride", expected: 1, got: 0 });
        }
        if shape.form != TokenForm::Shared {
            return Err(Error::Shape { op, what: "key heads", expected: 1, got: 0 });
        }
        check(op, "width of q", shape.heads * shape.head_dim, inputs.q.width)?;
        check(op, "width of kv", shape.head_dim, inputs.kv.width)?;
        check(op, "width of entries", shape.head_dim, inputs.entries.width)?;
        check(op, "inputs of the index", shape.index.iter().len(), inputs.index.iter().len())?;
        if let (Some(index), Some(inputs)) = (shape.index, inputs.index) {
            inputs.check(op, index)?;
        }
        graph.vector(op, "sinks", inputs.sinks, shape.heads)?;
        Ok(inputs.q.width)
    }
}

/// Attention over the tokens of chosen windows. See [`block_attention`](super::GraphBuilder::block_attention).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockAttentionOp {
    /// What is read.
    pub inputs: BlockInputs,
    /// Where tokens and keys of windows live.
    pub cache: CompressedCacheId,
}

refers!(BlockAttentionOp { inputs, cache });

impl Operation for BlockAttentionOp {
    const NAME: &'static str = "block_attention";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, inputs, shape) = (Self::NAME, self.inputs, graph.compressed_caches[self.cache.0]);
        let (TokenForm::Grouped { kv_heads }, Some(index)) = (shape.form, shape.index) else {
            return Err(Error::Shape { op, what: "an index of grouped tokens", expected: 1, got: 0 });
        };
        if shape.stride == 0 || index.top_k == 0 {
            return Err(Error::Shape { op, what: "stride and windows", expected: 1, got: 0 });
        }
        check(op, "query heads left over by kv heads", 0, shape.heads % kv_heads.max(1))?;
        check(op, "width of q", shape.heads * shape.head_dim, inputs.q.width)?;
        check(op, "width of k", kv_heads * shape.head_dim, inputs.k.width)?;
        check(op, "width of v", kv_heads * shape.head_dim, inputs.v.width)?;
        inputs.index.check(op, index)?;
        Ok(inputs.q.width)
    }
}

refers!(IndexInputs { q, k, weights });
refers!(BlockInputs { q, k, v, index });
refers!(CompressedInputs { q, kv, entries, index, sinks });

impl IndexInputs {
    /// Checks widths.
    pub(super) fn check(&self, op: &'static str, index: EntryIndex) -> Result<()> {
        check(op, "width of the index's q", index.heads.saturating_mul(index.head_dim), self.q.width)?;
        check(op, "width of the index's k", index.head_dim, self.k.width)?;
        let weights = self.weights.map_or(index.heads, |weights| weights.width);
        check(op, "weights of the index", index.heads, weights)
    }
}

impl GraphBuilder {
    /// For the last token of each window Σ p ⊙ kv over its tokens (with an overlap, also those of the window before),
    /// where p is the softmax over them of gate + bias in each channel; zeros for other tokens. `bias` holds
    /// (window, channels) values.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn window_pool(
        &mut self,
        kv: Value,
        gate: Value,
        bias: WeightId,
        shape: WindowPool,
    ) -> Result<Value> {
        let op = WindowPoolOp { kv, gate, bias, shape, state: self.next_state() };
        let width = op.width(self)?;
        self.state(shape.held().checked_mul(2 * shape.channels()), WindowPoolOp::NAME)?;
        Ok(self.push(op, width))
    }

    /// Appends tokens and entries to a new cache, then attends over both: (tokens, heads · head_dim). Of entries, those
    /// with the largest Σ over heads of weight · relu(q·k), if there is an index (ties: the earlier one).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn compressed_attention(
        &mut self,
        inputs: CompressedInputs,
        shape: CompressedAttention,
    ) -> Result<Value> {
        self.compressed_caches.push(shape);
        let cache = CompressedCacheId(self.compressed_caches.len() - 1);
        self.record(CompressedAttentionOp { inputs, cache })
    }

    /// For the last token of each window of so many the mean of its tokens; zeros for other tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] if windows are empty.
    pub fn window_mean(&mut self, x: Value, window: usize) -> Result<Value> {
        let op = WindowMeanOp { x, window, state: self.next_state() };
        let width = op.width(self)?;
        self.state((window - 1).checked_mul(x.width), WindowMeanOp::NAME)?;
        Ok(self.push(op, width))
    }

    /// Appends tokens and keys of windows to a new cache, then attends over the tokens of the windows with the largest
    /// Σ over heads of weight · relu(q·k) and over those of the unfinished one: (tokens, heads · head_dim). `k` of the
    /// index counts in the rows of tokens that end a window (Qwen sparse attention, transformers'
    /// `modeling_qwen4_exp.py`).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit.
    pub fn block_attention(&mut self, inputs: BlockInputs, shape: CompressedAttention) -> Result<Value> {
        self.compressed_caches.push(shape);
        let cache = CompressedCacheId(self.compressed_caches.len() - 1);
        self.record(BlockAttentionOp { inputs, cache })
    }
}
