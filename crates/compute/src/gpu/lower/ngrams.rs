//! Lowering of embeddings of n-grams to the kernels of `kernels/ngrams.h`.
//!
//! Where all parts of a table lie in one buffer and have one encoding, a dispatch finds each row's part; else each part has a dispatch,
//! which leaves the rows of others alone.

use super::context::{Launch, Lowering, THREADS};
use crate::gpu::arguments::{NGramConstants, NGramStateConstants};
use crate::gpu::device::Slice;
use crate::gpu::memory::PART_BYTES;
use crate::graph::{NGrams, StateId, Value};

impl Lowering<'_> {
    pub(super) fn ngram_embed(&mut self, ngrams: &NGrams, state: StateId, out: Value) {
        let table = &self.memory.ngrams[&state];
        let numbers = Slice::from(table.buffer);
        let (heads, held) = (ngrams.head_rows.len(), ngrams.held());
        let (tokens, sequences) = (self.input(self.layout.tokens), self.input(self.layout.sequences));
        let kept = self.memory.state.states[state.0].slice();
        let (owners, to) = (self.input(self.layout.owners), self.value(out));
        let each = if table.together { table.parts.len() } else { 1 };
        for (i, parts) in table.parts.chunks(each).enumerate() {
            let whole = |plane: Slice| if table.together { plane.buffer.into() } else { plane };
            let [a, b, c] = parts[0].planes.map(whole);
            let list = numbers.at(table.list + i * PART_BYTES);
            let buffers = [a, b, c, numbers, list, tokens, kept, sequences, owners, to];
            let constants = &NGramConstants {
                table: parts[0].format,
                tokens: ngrams.multipliers.len(),
                heads,
                end: ngrams.end,
                parts: parts.len(),
            };
            let launch = Launch { unit: "ngrams", kernel: "ngram_embed", buffers: &buffers, constants };
            let dispatch = launch.over([heads, self.rows, 1], 32);
            self.run.push(dispatch);
        }
        let buffers = [tokens, sequences, kept];
        let constants = &NGramStateConstants { sequences: self.shape.sequences, held };
        let launch = Launch { unit: "ngrams", kernel: "ngram_state", buffers: &buffers, constants };
        let dispatch = launch.over([self.shape.sequences.div_ceil(THREADS as usize), 1, 1], THREADS);
        self.run.push(dispatch);
    }
}
