//! What adapters add to products: see [`crate::graph::LowRank`].
//!
//! Rows are grouped by adapter, and a group's rows go through A and B together; activations stay f32. A product's bits do
//! not depend on how many rows it has, so neither do an answer's on the adapters of others.

use super::activations::{Activations, Q8Rows};
use super::linear::{CpuContext, LinearJob, linear};
use super::matmul::{OutRows, Tokens, matmul_rows};
use super::shared::SharedMut;
use crate::backend::Batch;
use crate::graph::{ExpertLowRank, Graph, LowRank, Op};
use crate::{Tensor, TensorView};

/// The adapters of a batch's rows.
#[derive(Debug, Default)]
pub(super) struct RowAdapters {
    /// Of all tokens; empty if none has one.
    of_tokens: Vec<Option<u32>>,
    /// Of the outputs.
    of_outputs: Vec<Option<u32>>,
}

impl RowAdapters {
    /// Takes those of `batch`.
    pub(super) fn set(&mut self, batch: &Batch<'_>) {
        self.of_tokens = batch.adapters(batch.tokens.len()).unwrap_or_default();
        self.of_outputs = batch.adapters(batch.outputs.len()).unwrap_or_default();
    }

    /// Whether no row has one.
    pub(super) fn is_empty(&self) -> bool {
        self.of_tokens.is_empty()
    }

    /// Those of a value of `rows` rows.
    pub(super) fn of_rows(&self, rows: usize) -> &[Option<u32>] {
        if rows == self.of_tokens.len() { &self.of_tokens } else { &self.of_outputs }
    }
}

/// Adds to `out` (rows, out features) what the adapters `of_rows` make of x (rows, in features).
pub(super) fn add(
    context: &CpuContext,
    (low_rank, weights): (&[LowRank], &[Tensor]),
    of_rows: &[Option<u32>],
    x: &[f32],
    out: &mut [f32],
) {
    for LowRank { adapter, a, b, scale } in low_rank {
        let rows: Vec<usize> = (0..of_rows.len()).filter(|row| of_rows[*row] == Some(*adapter)).collect();
        if rows.is_empty() {
            continue;
        }
        let (a, b) = (&weights[a.0], &weights[b.0]);
        let cols = a.cols();
        let gathered: Vec<f32>;
        let x = if rows.len() == of_rows.len() {
            x
        } else {
            gathered = rows.iter().flat_map(|row| &x[row * cols..(row + 1) * cols]).copied().collect();
            &gathered
        };
        let mut inner = product(context, a, x, rows.len());
        inner.iter_mut().for_each(|v| *v *= scale);
        let delta = product(context, b, &inner, rows.len());
        for (row, delta) in rows.iter().zip(delta.chunks_exact(b.rows())) {
            let out = &mut out[row * b.rows()..(row + 1) * b.rows()];
            out.iter_mut().zip(delta).for_each(|(o, d)| *o += d);
        }
    }
}

/// x (rows, columns of the weight) · weightᵀ.
fn product(context: &CpuContext, weight: &Tensor, x: &[f32], rows: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * weight.rows()];
    let job = LinearJob { weight, bias: None, q8: false, out: SharedMut::new(&mut out) };
    linear(context, &[job], x, &Q8Rows::default(), rows);
    out
}

/// What the adapters of a layer's experts are.
pub(crate) struct ExpertAdapters<'a> {
    /// Of the batch's rows.
    pub(super) of_rows: &'a [Option<u32>],
    pub(super) low_rank: &'a [ExpertLowRank],
    pub(super) weights: &'a [Tensor],
}

/// What an adapter adds to a projection of one expert.
pub(super) struct ExpertDelta<'a> {
    /// (r, in).
    a: TensorView<'a>,
    /// (out, r).
    b: TensorView<'a>,
    scale: f32,
}

impl<'a> ExpertAdapters<'a> {
    /// The largest rank.
    pub(super) fn rank(&self) -> usize {
        let all = self.low_rank.iter().flat_map(|own| own.projections.iter().flatten());
        all.map(|own| self.weights[own.b.0].cols()).max().unwrap_or(0)
    }

    /// What is added to projection `which` of `expert` for row `row`.
    pub(super) fn delta(&self, which: usize, expert: u32, row: u32) -> Option<ExpertDelta<'a>> {
        let adapter = self.of_rows[row as usize]?;
        let own = self.low_rank.iter().find(|own| own.adapter == adapter)?;
        let own = own.projections[which].as_ref()?;
        let (expert, experts) = (expert as usize, own.scales.len());
        let of = |weight: &'a Tensor| {
            let rows = weight.rows() / experts;
            weight.view().rows_range(expert * rows..(expert + 1) * rows)
        };
        let (a, b) = (of(&self.weights[own.a.0]), of(&self.weights[own.b.0]));
        Some(ExpertDelta { a, b, scale: own.scales[expert] })
    }
}

impl ExpertDelta<'_> {
    /// scale · a · x into the first of `out`.
    pub(super) fn reduce(&self, context: &CpuContext, x: &[f32], out: &mut [f32]) {
        let rank = self.a.rows();
        one_row(context, self.a, x, &mut out[..rank]);
        out[..rank].iter_mut().for_each(|v| *v *= self.scale);
    }

    /// Adds rows `start`, `start` + 1, … of b · `inner` to `out`.
    pub(super) fn add(&self, context: &CpuContext, inner: &[f32], start: usize, out: &mut [f32]) {
        let b = self.b.rows_range(start..start + out.len());
        let mut delta = vec![0.0; out.len()];
        one_row(context, b, &inner[..b.cols()], &mut delta);
        out.iter_mut().zip(&delta).for_each(|(o, d)| *o += d);
    }
}

/// weight · x, within a task.
fn one_row(context: &CpuContext, weight: TensorView<'_>, x: &[f32], out: &mut [f32]) {
    let input = Activations::F32 { rows: x, cols: weight.cols() };
    let (rows, width) = (0..weight.rows(), out.len());
    // SAFETY: exactly this row, exclusively borrowed.
    let out = unsafe { OutRows::new(out.as_mut_ptr(), width, 1, width) };
    let product = matmul_rows(context.simd, weight, rows, input, Tokens::Range(0..1), out);
    product.expect("the graph's widths agree");
}

/// Bytes of scratch that adapters take for a batch of `rows` rows.
pub(crate) fn scratch_bytes(graph: &Graph, top_k: usize, rows: usize) -> usize {
    let cols = |id: crate::graph::WeightId| graph.weights()[id.0].matrix;
    let of_op = |op: &Op| match op {
        Op::Linear(op) => {
            let of_one = |own: &LowRank| cols(own.a).cols + cols(own.b).cols + cols(own.b).rows;
            op.low_rank.iter().map(of_one).max().unwrap_or(0)
        }
        Op::MoeExperts(op) => {
            let all = op.low_rank.iter().flat_map(|own| own.projections.iter().flatten());
            3 * top_k * all.map(|own| cols(own.b).cols).max().unwrap_or(0)
        }
        _ => 0,
    };
    let values = graph.nodes().iter().map(|node| of_op(&node.op)).max().unwrap_or(0);
    (values * size_of::<f32>()).saturating_mul(rows)
}
