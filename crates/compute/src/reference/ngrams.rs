//! The scalar meaning of embeddings of n-grams: see [`NGrams`].

use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp};
use crate::Result;
use crate::backend::Batch;
use crate::graph::{NGramEmbedOp, NGrams, StateId, WeightId};
use crate::quant::dequantize_row;

impl ReferenceOp for NGramEmbedOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        own.ngram_embed(&self.tables, &self.ngrams, self.state, call.batch).map(Outcome::Rows)
    }
}

impl Interpreter {
    fn ngram_embed(
        &mut self,
        tables: &[WeightId],
        ngrams: &NGrams,
        state: StateId,
        batch: &Batch<'_>,
    ) -> Result<Matrix> {
        let mut out = vec![vec![]; batch.tokens.len()];
        for span in batch.spans {
            let before = self.state(state, span);
            let seen = before.iter().take_while(|id| **id > 0.0).map(|id| *id as u32 - 1);
            // Newest first.
            let mut tokens: Vec<u32> = seen.collect();
            for row in span.rows.clone() {
                tokens.insert(0, batch.tokens[row]);
                for mut index in ngrams.rows_of(tokens.iter().copied()).into_iter().map(|row| row as usize) {
                    for table in tables.iter().map(|table| self.weights[table.0].view()) {
                        if index < table.rows() {
                            let mut values = vec![0.0; table.cols()];
                            dequantize_row(table, index, &mut values)?;
                            out[row].extend(values);
                            break;
                        }
                        index -= table.rows();
                    }
                }
            }
            let held = |i: usize| tokens.get(i).map_or(0.0, |token| *token as f32 + 1.0);
            self.states.insert((state.0, span.slots.write), (0..ngrams.held()).map(held).collect());
        }
        Ok(out)
    }
}
