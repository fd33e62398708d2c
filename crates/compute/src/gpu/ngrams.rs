//! Embeddings of n-grams: what their kernels are told, and lowering to them.
//!
//! Where all parts of a table lie in one buffer and have one encoding, a dispatch finds each row's part; else each part has a dispatch,
//! which leaves the rows of others alone.

use std::collections::HashMap;

use super::arguments::{NGramConstants, NGramStateConstants, TablePart};
use super::device::{BufferId, Device, Slice, Words};
use super::lower::{Launch, Lowering, THREADS};
use super::weights::{ALIGNMENT, DeviceWeight};
use crate::Result;
use crate::graph::{Graph, NGramEmbedOp, NGrams, Op, StateId, Value};

/// Words of a part in the list that kernels read.
const PART_WORDS: usize = 5;

/// The numbers of one operation in device memory, and its parts.
#[derive(Debug, Clone)]
pub(crate) struct NGramTable {
    buffer: BufferId,
    /// Bytes from the start to the list of parts.
    list: usize,
    parts: Vec<DeviceWeight>,
    /// Whether a dispatch can find all parts.
    together: bool,
}

/// The numbers of all embeddings of n-grams of a graph.
pub(crate) fn upload(
    device: &mut dyn Device,
    graph: &Graph,
    weights: &[DeviceWeight],
) -> Result<HashMap<StateId, NGramTable>> {
    let mut all = HashMap::new();
    for node in graph.nodes() {
        let Op::NGramEmbed(NGramEmbedOp { tables, ngrams, state }) = &node.op else { continue };
        let parts: Vec<DeviceWeight> = tables.iter().map(|table| weights[table.0]).collect();
        let first = &parts[0];
        let together = parts.iter().all(|part| {
            part.format == first.format && part.planes.iter().all(|p| p.buffer == first.planes[0].buffer)
        });
        let mut bytes = numbers(ngrams);
        let list = bytes.len();
        let mut rows = 0u64;
        for part in &parts {
            let planes = part.planes.map(|plane| if together { plane.offset / ALIGNMENT } else { 0 });
            TablePart { rows_before: halves(rows), planes }.append(&mut bytes);
            rows += part.matrix.rows as u64;
        }
        // Where the last one ends.
        TablePart { rows_before: halves(rows), planes: [0; 3] }.append(&mut bytes);
        let buffer = device.alloc(bytes.len())?;
        device.upload(buffer.into(), &bytes)?;
        all.insert(*state, NGramTable { buffer, list, parts, together });
    }
    Ok(all)
}

/// The lower and the upper half.
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Multipliers, rows of each head, and rows of the heads before it.
fn numbers(ngrams: &NGrams) -> Vec<u8> {
    let before = ngrams.head_rows.iter().scan(0u64, |sum, rows| {
        let first = *sum;
        *sum += rows;
        Some(first)
    });
    let all = ngrams.multipliers.iter().chain(&ngrams.head_rows).copied().chain(before);
    all.flat_map(u64::to_le_bytes).collect()
}

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
            let list = numbers.at(table.list + i * PART_WORDS * 4);
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
