//! Embeddings of n-grams: rows of big tables that the last tokens choose by hashing.
//!
//! Source: transformers' `modeling_qwen4_exp.py`.

use super::operation::{Operation, Refers, Visitor};
use super::{GraphBuilder, StateId, Value, WeightId};
use crate::{Error, Result};

/// How the last tokens of a sequence become rows of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NGrams {
    /// Of the newest token first, then of those before it: as many as an n-gram has tokens at most.
    pub multipliers: Vec<u64>,
    /// Rows of each head, one head's after the other's; heads of the shortest n-grams first, as many for each length
    /// from two on.
    pub head_rows: Vec<u64>,
    /// The token that stands for what is before a sequence; n-grams do not reach past it either.
    pub end: u32,
}

impl NGrams {
    /// Tokens before the newest one that rows depend on.
    pub fn held(&self) -> usize {
        self.multipliers.len().saturating_sub(1)
    }

    /// Rows of all heads.
    pub fn rows(&self) -> u64 {
        self.head_rows.iter().sum()
    }

    /// The row of each head for `tokens`, newest first, as many as there are multipliers at most: each length's hash is
    /// the exclusive or of tokens times multipliers, and a head's row its remainder.
    pub fn rows_of(&self, tokens: impl IntoIterator<Item = u32>) -> Vec<u64> {
        let mut tokens = tokens.into_iter();
        let lengths = self.held().max(1);
        let each = self.head_rows.len() / lengths;
        let product = |token: u32, factor: &u64| u64::from(token).wrapping_mul(*factor);
        let mut hash = self.multipliers.first().map_or(0, |m| product(tokens.next().unwrap_or(self.end), m));
        let (mut ended, mut first, mut rows) = (false, 0, vec![]);
        for (multiplier, heads) in self.multipliers.iter().skip(1).zip(self.head_rows.chunks(each.max(1))) {
            let token = tokens.next().filter(|token| !ended && *token != self.end);
            ended |= token.is_none();
            hash ^= product(token.unwrap_or(self.end), multiplier);
            for head in heads {
                rows.push(first + hash % head.max(&1));
                first += head;
            }
        }
        rows
    }
}

/// Rows of a table in parts that the last tokens choose. See [`ngram_embed`](super::GraphBuilder::ngram_embed).
#[derive(Debug, Clone, PartialEq)]
pub struct NGramEmbedOp {
    /// (rows, width) each.
    pub tables: Vec<WeightId>,
    /// How tokens become rows.
    pub ngrams: NGrams,
    /// The tokens before, newest first, plus one each; 0 where there are none.
    pub state: StateId,
}

impl Refers for NGramEmbedOp {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        visitor.ngram_tables(&mut self.tables, &mut self.ngrams);
        visitor.state(&mut self.state);
    }
}

impl Operation for NGramEmbedOp {
    const NAME: &'static str = "ngram_embed";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let shape = |what, expected, got| Error::Shape { op: Self::NAME, what, expected, got };
        let Some(first) = self.tables.first() else { return Err(shape("tables", 1, 0)) };
        let width = graph.matrix(*first).cols;
        if let Some(other) = self.tables.iter().find(|table| graph.matrix(**table).cols != width) {
            return Err(shape("width of a table", width, graph.matrix(*other).cols));
        }
        let (lengths, heads) = (self.ngrams.held(), self.ngrams.head_rows.len());
        if lengths == 0 || heads == 0 || heads % lengths != 0 || self.ngrams.head_rows.contains(&0) {
            return Err(shape("heads", lengths.max(1), heads));
        }
        let rows: usize = self.tables.iter().map(|table| graph.matrix(*table).rows).sum();
        if self.ngrams.rows() > rows as u64 {
            return Err(shape("rows of the tables", self.ngrams.rows() as usize, rows));
        }
        Ok(heads * width)
    }
}

impl GraphBuilder {
    /// The rows that [`NGrams::rows_of`] names, side by side: (tokens, heads · width). `tables` are parts of one table,
    /// each of so many rows of the same width.
    ///
    /// # Errors
    /// [`Error::Shape`] if the tables have too few rows or other widths, or heads do not fit the n-grams.
    pub fn ngram_embed(&mut self, tables: Vec<WeightId>, ngrams: NGrams) -> Result<Value> {
        let held = ngrams.held();
        let op = NGramEmbedOp { tables, ngrams, state: self.next_state() };
        let width = op.width(self)?;
        self.state(Some(held), NGramEmbedOp::NAME)?;
        Ok(self.push(op, width))
    }
}

#[cfg(test)]
mod tests {
    use super::NGrams;

    #[test]
    fn rows_depend_on_tokens_back_to_the_last_end() {
        let ngrams = NGrams { multipliers: vec![3, 5, 7], head_rows: vec![11, 13, 17, 19], end: 2 };
        let row =
            |hash: u64, longer: u64| vec![hash % 11, 11 + hash % 13, 24 + longer % 17, 41 + longer % 19];
        assert_eq!(ngrams.rows_of([9, 8, 6]), row(27 ^ 40, 27 ^ 40 ^ 42));
        // Nothing before the sequence, or before an end, is seen.
        assert_eq!(ngrams.rows_of([9, 8]), row(27 ^ 40, 27 ^ 40 ^ 14));
        assert_eq!(ngrams.rows_of([9, 2, 6]), row(27 ^ 10, 27 ^ 10 ^ 14));
        assert_eq!(ngrams.rows_of([2, 8, 6]), row(6 ^ 40, 6 ^ 40 ^ 42));
        assert_eq!((ngrams.rows(), ngrams.held()), (60, 2));
    }
}
