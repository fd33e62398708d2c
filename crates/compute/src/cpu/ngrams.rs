//! Embeddings of n-grams: see [`crate::graph::NGrams`].

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::slots::{Slots, SpanState};
use crate::backend::Batch;
use crate::graph::{NGramEmbedOp, NGrams};
use crate::quant::dequantize_row;
use crate::{Result, Tensor};

impl CpuOp for NGramEmbedOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let tables: Vec<&Tensor> = self.tables.iter().map(|table| &cpu.weights[table.0]).collect();
            ngram_embed(&tables, &self.ngrams, &mut cpu.states[self.state.0], call.batch, out)
        })
    }
}

/// Rows of `tables` for all tokens of the batch: `out` is (rows, heads · width).
pub(crate) fn ngram_embed(
    tables: &[&Tensor],
    ngrams: &NGrams,
    slots: &mut Slots,
    batch: &Batch<'_>,
    out: &mut [f32],
) -> Result<()> {
    let Some(width) = tables.first().map(|table| table.cols()) else { return Ok(()) };
    let row_width = ngrams.head_rows.len() * width;
    for span in batch.spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let past = if fresh { vec![0.0; new.len()] } else { old.unwrap_or(new).to_vec() };
        let tokens = &batch.tokens[span.rows.clone()];
        // Tokens up to the `count`th of the batch, newest first.
        let before = |count: usize| {
            let held = past.iter().take_while(|id| **id > 0.0).map(|id| *id as u32 - 1);
            tokens[..count].iter().rev().copied().chain(held)
        };
        for (i, row) in span.rows.clone().enumerate() {
            let out = out[row * row_width..(row + 1) * row_width].chunks_exact_mut(width);
            for (mut index, out) in ngrams.rows_of(before(i + 1)).into_iter().zip(out) {
                for table in tables {
                    if index < table.rows() as u64 {
                        dequantize_row(table.view(), index as usize, out)?;
                        break;
                    }
                    index -= table.rows() as u64;
                }
            }
        }
        let mut seen = before(tokens.len());
        new.iter_mut().for_each(|held| *held = seen.next().map_or(0.0, |token| token as f32 + 1.0));
    }
    Ok(())
}
