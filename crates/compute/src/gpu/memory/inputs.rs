//! What changes from batch to batch, as kernels read it: one upload a batch.

use std::ops::Range;

use super::low_rank;
use crate::backend::{Batch, Embeddings, PAGE_TOKENS, Span};
use crate::gpu::arguments::{PlaceWords, SequenceWords};
use crate::gpu::device::Words;
use crate::graph::{Graph, Op, Rope, RopeOp};
use crate::{Error, Result};

/// What a batch ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Ending {
    /// The head's product.
    Logits,
    /// What the head would multiply.
    Hidden,
}

/// Counts that a list of dispatches is made for, and how it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) sequences: usize,
    pub(crate) outputs: usize,
    /// Parts that each row's keys are divided into, at most.
    pub(crate) splits: usize,
    /// Rows at the beginning whose keys are divided into half as many: those of a sequence that is [stepwise](Shape::is_stepwise).
    pub(crate) halved: usize,
    pub(crate) given: Given,
    pub(crate) adapted: Adapted,
    /// Whether rows see others after them.
    pub(crate) ahead: bool,
    pub(crate) ending: Ending,
}

/// How many of a batch's rows have an adapter, in graphs with some.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum Adapted {
    #[default]
    NoRow,
    SomeRows,
    AllRows,
}

impl Adapted {
    /// Of a batch; `known` is whether the graph has adapters.
    pub(crate) fn of(batch: &Batch<'_>, known: bool) -> Self {
        let mut spans = batch.spans.iter().map(|span| span.adapter.is_some());
        if !known || !spans.clone().any(|has| has) {
            Self::NoRow
        } else if spans.all(|has| has) {
            Self::AllRows
        } else {
            Self::SomeRows
        }
    }
}

/// Embeddings that come with a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Given {
    pub(crate) rows: usize,
    /// Values of each.
    pub(crate) width: usize,
}

impl Given {
    /// Of those of a batch what a graph that reads `width` values of each needs.
    ///
    /// # Errors
    /// [`Error::Shape`] if rows do not have so many.
    pub(crate) fn of(batch: &Batch<'_>, width: usize) -> Result<Self> {
        let Embeddings { rows, values } = batch.embeddings;
        if rows.is_empty() || width == 0 {
            return Ok(Self::default());
        }
        let (op, got) = ("given_embeddings", values.len() / rows.len());
        if got < width || values.len() % rows.len() != 0 {
            let what = "values of an embedding that comes with the batch";
            return Err(Error::Shape { op, what, expected: width, got });
        }
        Ok(Self { rows: rows.len(), width })
    }

    /// Values of a row that a graph reads: those of its last level and all before.
    pub(crate) fn width(graph: &Graph) -> usize {
        let width = |op: &Op| match op {
            Op::GivenEmbeddings(op) => (op.level + 1) * op.x.width(),
            _ => 0,
        };
        graph.nodes().iter().map(|node| width(&node.op)).max().unwrap_or(0)
    }
}

/// Rows up to which products are made row by row; more are multiplied in tiles. On an H200 tiles are faster from 15 rows on.
pub(crate) const FEW_ROWS: usize = 14;
/// The same where `kernels/cuda/panels.cu` makes the products of more. On an H200 panels are faster from nine rows on.
pub(crate) const FEW_ROWS_BESIDE_PANELS: usize = 8;
/// Rows up to which matrix units multiply bytes, where there are such; more are multiplied as f16.
pub(crate) const BATCH_ROWS: usize = 256;
/// Rows up to which `kernels/cuda/panels.cu` multiplies f16, where that is used; more are multiplied in wider tiles.
pub(crate) const PANEL_ROWS: usize = 512;
/// The same where `kernels/cuda/wide.cu` multiplies more.
pub(crate) const PANEL_ROWS_BESIDE_WIDE: usize = 256;
/// Rows from which kernels of prompts on warp groups may be used.
pub(crate) const WIDE_ROWS: usize = 64;
/// Rows times parts of their keys for which there is room: few rows with many parts, or more rows with fewer.
pub(crate) const ROW_SPLITS: usize = 8 * MOST_SPLITS;
/// Keys in each of the parts that attention of few rows is divided into, and the most parts.
const SPLIT_KEYS: usize = 128;
pub(crate) const MOST_SPLITS: usize = 64;

/// Stands for the adapter of a row that has none.
const NO_ADAPTER: u32 = u32::MAX;

/// Rows of one sequence that are each computed as if they were alone, at most.
pub(crate) const STEPWISE_ROWS: usize = 8;

/// Rows that follow each other and whose keys are divided into equally many parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Band {
    pub(crate) rows: Range<usize>,
    pub(crate) splits: usize,
}

/// Parts that so many keys of a row are divided into, where rows are few.
fn splits_of(keys: usize) -> usize {
    keys.div_ceil(SPLIT_KEYS).next_power_of_two().clamp(2, MOST_SPLITS)
}

impl Shape {
    pub(crate) fn of(batch: &Batch<'_>, ending: Ending) -> Self {
        let rows = batch.tokens.len();
        let longest = batch.spans.iter().map(|s| s.start + s.rows.len()).max().unwrap_or(0);
        let splits = splits_of(longest);
        let halved = match batch.spans {
            [span] if rows <= STEPWISE_ROWS => {
                (0..rows).filter(|row| splits_of(span.start + row + 1) < splits).count()
            }
            _ => 0,
        };
        let splits = match rows {
            0..=FEW_ROWS => splits,
            // Each row is the newest of a sequence.
            _ if rows == batch.spans.len() && rows <= BATCH_ROWS => {
                splits.min(ROW_SPLITS / rows.next_power_of_two())
            }
            _ => 1,
        };
        Self {
            rows,
            sequences: batch.spans.len(),
            outputs: batch.outputs.len(),
            splits,
            halved,
            given: Given::default(),
            adapted: Adapted::NoRow,
            ahead: false,
            ending,
        }
    }

    /// Whether the batch is a few rows of one sequence. Each of them then has the bits that it has in a batch of its own: its
    /// keys are divided into parts by their own number.
    pub(crate) fn is_stepwise(&self) -> bool {
        self.sequences == 1 && (2..=STEPWISE_ROWS).contains(&self.rows)
    }

    /// All rows, by the number of parts that their keys are divided into.
    pub(crate) fn bands(&self) -> impl Iterator<Item = Band> + use<> {
        let &Self { rows, halved, splits, .. } = self;
        let bands = [(0..halved, splits / 2), (halved..rows, splits)];
        bands.into_iter().map(|(rows, splits)| Band { rows, splits }).filter(|band| !band.rows.is_empty())
    }
}

/// Angles that rows are rotated by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Index of the rotation in the graph.
    pub(crate) rope: usize,
    /// Positions count from the start of the window of so many tokens that they are in.
    pub(crate) stride: usize,
}

/// Angles that a graph needs: those of its rotations, then others.
pub(crate) fn turns(graph: &Graph) -> Vec<Turn> {
    let mut all: Vec<Turn> = (0..graph.ropes.len()).map(|rope| Turn { rope, stride: 1 }).collect();
    for node in graph.nodes() {
        if let Op::Rope(RopeOp { rope, place, .. }) = node.op {
            let turn = Turn { rope, stride: place.stride.max(1) };
            if !all.contains(&turn) {
                all.push(turn);
            }
        }
    }
    all
}

/// Where the parts of the upload begin.
#[derive(Debug, Clone)]
pub(crate) struct InputLayout {
    /// (rows), u32.
    pub(crate) tokens: usize,
    /// (rows, 2), u32: position, index of the sequence's first page.
    pub(crate) places: usize,
    /// (rows), u32: sequence.
    pub(crate) owners: usize,
    /// (outputs), u32.
    pub(crate) outputs: usize,
    /// (sequences, 5), u32: first row, rows, start, slot read, slot written.
    pub(crate) sequences: usize,
    /// Of each turn (rows, pairs, 2), f32: cosine, sine. Of many rows the device makes them, behind what is uploaded.
    pub(crate) angles: Vec<usize>,
    /// What it makes them from, if it does.
    pub(crate) turned: Option<TurnedInputs>,
    /// (given rows), u32: those whose embeddings come with the batch.
    pub(crate) given_rows: usize,
    /// (given rows, their width), f32.
    pub(crate) given: usize,
    /// (rows), u32: adapters, or [`NO_ADAPTER`]; nothing if no row has one.
    pub(crate) adapters: usize,
    /// (outputs), u32: the same.
    pub(crate) output_adapters: usize,
    /// (rows), u32: the last position that each row sees; nothing if that is its own everywhere.
    pub(crate) sees: usize,
    /// Bytes that are uploaded, and with what the device makes.
    uploaded: usize,
    bytes: usize,
}

/// Where a device finds what it makes angles from.
#[derive(Debug, Clone)]
pub(crate) struct TurnedInputs {
    /// (rows, 3), u32: positions on three axes.
    pub(crate) positions: usize,
    /// Of each turn (pairs, 2), u32: the bits of its frequency, and its axis.
    pub(crate) pairs: Vec<usize>,
}

impl InputLayout {
    /// For batches of `shape`, of which the device makes the angles if there are `many` rows.
    pub(crate) fn new(shape: &Shape, ropes: &[Rope], turns: &[Turn], many: bool) -> Self {
        let adapted = shape.adapted != Adapted::NoRow;
        let mut end = 0;
        let mut part = |words: usize| {
            let start = end;
            end += (words * 4).next_multiple_of(16);
            start
        };
        let pairs = |turn: &Turn| ropes[turn.rope].inv_freq.len();
        let mut layout = Self {
            tokens: part(shape.rows),
            places: part(2 * shape.rows),
            owners: part(shape.rows),
            outputs: part(shape.outputs),
            sequences: part(5 * shape.sequences),
            angles: vec![],
            turned: None,
            given_rows: part(shape.given.rows),
            given: part(shape.given.rows * shape.given.width),
            adapters: part(if adapted { shape.rows } else { 0 }),
            output_adapters: part(if adapted { shape.outputs } else { 0 }),
            sees: part(if shape.ahead { shape.rows } else { 0 }),
            uploaded: 0,
            bytes: 0,
        };
        if many {
            let positions = part(3 * shape.rows);
            let pairs = turns.iter().map(|turn| part(2 * pairs(turn))).collect();
            layout.turned = Some(TurnedInputs { positions, pairs });
            layout.uploaded = part(0);
        }
        layout.angles = turns.iter().map(|turn| part(2 * pairs(turn) * shape.rows)).collect();
        layout.bytes = part(0);
        if !many {
            layout.uploaded = layout.bytes;
        }
        layout
    }

    /// The most bytes that batches of up to `rows` rows need.
    pub(crate) fn most_bytes(rows: usize, graph: &Graph, turns: &[Turn]) -> usize {
        let given = Given { rows, width: Given::width(graph) };
        let (splits, halved, ending) = (1, 0, Ending::Logits);
        let adapted = if low_rank::adapters(graph) > 0 { Adapted::SomeRows } else { Adapted::NoRow };
        let ahead = looks_ahead(graph);
        let (sequences, outputs) = (rows, rows);
        let shape = Shape { rows, sequences, outputs, splits, halved, given, adapted, ahead, ending };
        Self::new(&shape, &graph.ropes, turns, true).bytes
    }

    /// The upload for `batch`.
    pub(crate) fn pack(&self, batch: &Batch<'_>, shape: &Shape, ropes: &[Rope], turns: &[Turn]) -> Vec<u8> {
        let given = shape.given;
        let mut out = Vec::with_capacity(self.uploaded);
        let pad = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(16), 0);
        batch.tokens.iter().for_each(|token| token.append(&mut out));
        pad(&mut out);
        let mut first_page = 0;
        for span in batch.spans {
            for i in 0..span.rows.len() {
                PlaceWords { position: span.start + i, first_page }.append(&mut out);
            }
            first_page += span.pages.len();
        }
        pad(&mut out);
        for (index, span) in batch.spans.iter().enumerate() {
            span.rows.clone().for_each(|_| index.append(&mut out));
        }
        pad(&mut out);
        batch.outputs.iter().for_each(|row| row.append(&mut out));
        pad(&mut out);
        for span in batch.spans {
            let (first_row, rows, start) = (span.rows.start, span.rows.len(), span.start);
            let (read, write) = (span.slots.read, span.slots.write);
            SequenceWords { first_row, rows, start, read, write }.append(&mut out);
        }
        pad(&mut out);
        let Embeddings { rows, values } = batch.embeddings;
        if let Some(width) = values.len().checked_div(given.rows) {
            rows.iter().for_each(|row| row.append(&mut out));
            pad(&mut out);
            let rows = values.chunks_exact(width);
            rows.flat_map(|row| &row[..given.width]).for_each(|value| value.append(&mut out));
            pad(&mut out);
        }
        if shape.adapted != Adapted::NoRow {
            let of_rows: Vec<u32> = batch
                .spans
                .iter()
                .flat_map(|span| span.rows.clone().map(|_| span.adapter.unwrap_or(NO_ADAPTER)))
                .collect();
            of_rows.iter().for_each(|adapter| adapter.append(&mut out));
            pad(&mut out);
            batch.outputs.iter().for_each(|row| of_rows[*row as usize].append(&mut out));
            pad(&mut out);
        }
        if shape.ahead {
            for span in batch.spans {
                span.rows.clone().for_each(|row| batch.sees(span, row).append(&mut out));
            }
            pad(&mut out);
        }
        if self.turned.is_some() {
            batch.rope_positions().flatten().for_each(|position| position.append(&mut out));
            pad(&mut out);
            for turn in turns {
                let rope = &ropes[turn.rope];
                for (pair, frequency) in rope.inv_freq.iter().enumerate() {
                    frequency.append(&mut out);
                    rope.axis(pair).append(&mut out);
                }
                pad(&mut out);
            }
        } else {
            for turn in turns {
                let rope = &ropes[turn.rope];
                for position in batch.rope_positions() {
                    let position = position.map(|position| position - position % turn.stride);
                    rope.angles(position).for_each(|(cosine, sine)| [cosine, sine].append(&mut out));
                }
                pad(&mut out);
            }
        }
        debug_assert_eq!(out.len(), self.uploaded);
        out
    }
}

/// Whether a graph has attention that looks ahead.
fn looks_ahead(graph: &Graph) -> bool {
    graph.caches().iter().any(|cache| cache.ahead)
}

/// Whether rows of a batch see others after them in `graph`.
///
/// # Errors
/// [`Error::Shape`] if they see further than the rows of their spans go.
pub(crate) fn sees_ahead(batch: &Batch<'_>, graph: &Graph) -> Result<bool> {
    if !looks_ahead(graph) {
        return Ok(false);
    }
    batch.check_sees()?;
    let further = |span: &Span<'_>| {
        let own = span.start..;
        span.rows.clone().zip(own).any(|(row, own)| batch.sees(span, row) > own)
    };
    Ok(batch.spans.iter().any(further))
}

/// Page numbers of all sequences, one after the other.
pub(crate) fn page_numbers(batch: &Batch<'_>) -> Vec<u8> {
    let mut out = vec![];
    for span in batch.spans {
        let needed = (span.start + span.rows.len()).div_ceil(PAGE_TOKENS);
        // Graphs that keep nothing have none.
        debug_assert!(span.pages.is_empty() || span.pages.len() >= needed, "pages cover the batch");
        span.pages.iter().for_each(|page| page.append(&mut out));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_of_a_sequence_are_divided_as_each_is_alone() {
        let of = |start: usize, rows: usize| {
            let tokens = vec![0; rows];
            let spans = [Span { rows: 0..rows, start, ..Span::default() }];
            Shape::of(&Batch { tokens: &tokens, spans: &spans, ..Batch::default() }, Ending::Logits)
        };
        for start in [0, 60, 250, 255, 256, 505, 1020, 4090, 8185, 20_000] {
            for rows in 2..=STEPWISE_ROWS {
                let shape = of(start, rows);
                assert!(shape.is_stepwise());
                let bands: Vec<Band> = shape.bands().collect();
                let alone = (0..rows).map(|row| of(start + row, 1).splits);
                let got = bands.iter().flat_map(|band| band.rows.clone().map(|_| band.splits));
                assert!(got.eq(alone), "{start} {rows}: {bands:?}");
            }
            let more = of(start, STEPWISE_ROWS + 1);
            assert!(!more.is_stepwise() && more.bands().count() == 1);
        }
        assert!(!of(9, 1).is_stepwise());
    }
}
