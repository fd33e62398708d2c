//! Choice of the tokens that attention sees, by an indexer of its own (DeepSeek Sparse Attention, DeepSeek-V3.2, 2025).
//!
//! Tokens are chosen in blocks of consecutive ones; a block of one token is the usual case. The choice is a value of the
//! graph, so that several layers can share one.

use super::builder::check;
use super::operation::{Operation, refers};
use super::{
    CompressedAttention, CompressedCacheId, EntryIndex, GraphBuilder, IndexInputs, TokenForm, Value,
};
use crate::{Error, Result};

/// What makes a block worth seeing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockScore {
    /// Σ over heads of weight · relu(q·k), with one key a block, in the row of the token that ends it; blocks that are not
    /// complete cannot be chosen. All heads of the attention see the same.
    Sum,
    /// The largest q·k of the block's tokens up to the query, for each head of the index by itself; each is the choice of
    /// an equal part of the attention's heads (MiniMax-M3). The query's block and those before it are chosen whatever their
    /// score, `local` of them.
    BestToken {
        /// Blocks up to the query's that are always chosen.
        local: usize,
    },
}

/// How blocks of tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockChoice {
    /// Heads of the index, and how many blocks they choose.
    pub index: EntryIndex,
    /// Tokens of a block.
    pub block: usize,
    /// What is chosen by.
    pub score: BlockScore,
}

impl BlockChoice {
    /// Choices of a query.
    pub fn groups(&self) -> usize {
        match self.score {
            BlockScore::Sum => 1,
            BlockScore::BestToken { .. } => self.index.heads,
        }
    }

    /// Tokens that have one key.
    pub fn stride(&self) -> usize {
        match self.score {
            BlockScore::Sum => self.block,
            BlockScore::BestToken { .. } => 1,
        }
    }

    /// Blocks that the query at `position` may choose from.
    pub(crate) fn choosable(&self, position: usize) -> usize {
        match self.score {
            BlockScore::Sum => (position + 1) / self.block,
            BlockScore::BestToken { .. } => position / self.block + 1,
        }
    }

    /// What is kept of a sequence: keys.
    fn cache(&self) -> CompressedAttention {
        CompressedAttention {
            form: TokenForm::Elsewhere,
            heads: 0,
            head_dim: 0,
            scale: 0.0,
            window: 0,
            stride: self.stride(),
            index: Some(self.index),
        }
    }
}

/// Tokens that attention sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// (tokens, groups · top_k), from [`GraphBuilder::choose_blocks`].
    pub blocks: Value,
    /// Choices of a query, each for an equal part of its heads.
    pub groups: usize,
    /// Tokens of a block.
    pub block: usize,
    /// Whether a query also sees the tokens of a block that is not complete at its position.
    pub tail: bool,
}

/// Blocks of tokens for attention to see. See [`choose_blocks`](super::GraphBuilder::choose_blocks).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChooseBlocksOp {
    /// What is compared.
    pub inputs: IndexInputs,
    /// How.
    pub choice: BlockChoice,
    /// Where keys live.
    pub cache: CompressedCacheId,
}

refers!(ChooseBlocksOp { inputs, choice, cache });

impl Operation for ChooseBlocksOp {
    const NAME: &'static str = "choose_blocks";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { inputs, choice, .. }) = (Self::NAME, *self);
        let index = choice.index;
        if choice.block == 0 || index.top_k == 0 || index.heads == 0 {
            return Err(Error::Shape { op, what: "tokens, blocks and heads", expected: 1, got: 0 });
        }
        if let BlockScore::BestToken { local } = choice.score {
            check(op, "weights of heads that choose on their own", 0, inputs.weights.iter().len())?;
            if local > index.top_k {
                let (expected, got) = (index.top_k, local);
                return Err(Error::Shape { op, what: "blocks that are always chosen", expected, got });
            }
        }
        inputs.check(op, index)?;
        Ok(choice.groups().saturating_mul(index.top_k))
    }
}

impl GraphBuilder {
    /// Appends keys to a new cache, then chooses blocks for each query: the best `top_k`, or as many as there are (ties:
    /// the earlier one). In each of [`BlockChoice::groups`] equal parts of a row, `top_k` columns of block numbers in
    /// ascending order, then −1.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths do not fit, or more blocks are always chosen than are chosen.
    pub fn choose_blocks(&mut self, inputs: IndexInputs, choice: BlockChoice) -> Result<Value> {
        self.compressed_caches.push(choice.cache());
        let cache = CompressedCacheId(self.compressed_caches.len() - 1);
        self.record(ChooseBlocksOp { inputs, choice, cache })
    }
}

/// Checks that a choice fits `heads` query heads.
pub(super) fn check_chosen(op: &'static str, chosen: Option<Chosen>, heads: usize) -> Result<()> {
    let Some(Chosen { blocks, groups, block, .. }) = chosen else { return Ok(()) };
    if block == 0 || groups == 0 {
        return Err(Error::Shape { op, what: "tokens of a block", expected: 1, got: 0 });
    }
    check(op, "heads left over by choices", 0, heads % groups)?;
    check(op, "columns left over by choices", 0, blocks.width % groups)
}
