//! Numbers of embeddings of n-grams in device memory: multipliers, heads, and where the parts of a table are.

use std::collections::HashMap;

use super::weights::{ALIGNMENT, DeviceWeight};
use crate::Result;
use crate::gpu::arguments::TablePart;
use crate::gpu::device::{BufferId, Device, Words};
use crate::graph::{Graph, NGramEmbedOp, NGrams, Op, StateId};

/// Bytes of a part in the list that kernels read.
pub(crate) const PART_BYTES: usize = 20;

/// The numbers of one operation in device memory, and its parts.
#[derive(Debug, Clone)]
pub(crate) struct NGramTable {
    pub(crate) buffer: BufferId,
    /// Bytes from the start to the list of parts.
    pub(crate) list: usize,
    pub(crate) parts: Vec<DeviceWeight>,
    /// Whether a dispatch can find all parts.
    pub(crate) together: bool,
}

/// The numbers of all embeddings of n-grams of a graph.
pub(super) fn upload(
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

/// Bytes of the numbers of an embedding of n-grams from so many tables: of each, and where the last one ends, its rows and
/// the places of three planes.
pub(super) fn bytes(ngrams: &NGrams, tables: usize) -> usize {
    numbers(ngrams).len() + (tables + 1) * PART_BYTES
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
