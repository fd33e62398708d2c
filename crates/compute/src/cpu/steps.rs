//! What the profile calls a step, and the least it does.

use std::ops::Range;

use super::attention::KvCache;
use super::route::Choice;
use crate::Result;
use crate::backend::Batch;
use crate::graph::{ExpertSet, Graph, LinearOp, MatrixSpec, Op, Value, WeightId};
use crate::profile::Work;

/// Name of the step of `nodes`: an operation, or the linear layers that run together.
pub(super) fn name(graph: &Graph, nodes: Range<usize>) -> String {
    let linear = |index: usize| match graph.nodes[index].op {
        Op::Linear(LinearOp { weight, .. }) => Some(short(graph, weight)),
        _ => None,
    };
    if let Some(names) = nodes.clone().map(linear).collect::<Option<Vec<_>>>() {
        return names.join(" + ");
    }
    graph.nodes[nodes.start].op.label().to_owned()
}

/// The last part of a weight's name: `q_proj` of `model.layers.3.self_attn.q_proj.weight`.
fn short(graph: &Graph, weight: WeightId) -> String {
    let name = graph.weights()[weight.0].name.trim_end_matches(".weight");
    name.rsplit('.').next().unwrap_or(name).to_owned()
}

/// Work of linear layers `nodes` on `rows` rows.
pub(super) fn linear(graph: &Graph, nodes: Range<usize>, rows: impl Fn(Value) -> usize) -> Result<Work> {
    let mut work = Work::default();
    for node in &graph.nodes[nodes] {
        if let Op::Linear(LinearOp { x, weight, .. }) = node.op {
            let product = product(graph.weights()[weight.0].matrix, 1, rows(x))?;
            work.bytes += product.bytes;
            work.flops += product.flops;
        }
    }
    Ok(work)
}

/// Work of the chosen experts: gate and up projections, then down projections.
pub(super) fn experts(set: &ExpertSet, choice: &Choice) -> Result<[Work; 2]> {
    let experts = choice.distinct(set.experts).len();
    let pairs = choice.ids.iter().filter(|id| (**id as usize) < set.experts).count();
    let gate = set.gate.map(|gate| product(gate, experts, pairs)).transpose()?.unwrap_or_default();
    let up = product(set.up, experts, pairs)?;
    let both = Work { bytes: gate.bytes + up.bytes, flops: gate.flops + up.flops };
    Ok([both, product(set.down, experts, pairs)?])
}

/// Work of attention.
pub(super) fn attention(cache: &KvCache, batch: &Batch<'_>) -> Work {
    let mut work = Work::default();
    for span in batch.spans {
        let of_span = cache.work(span.start, span.rows.len());
        work.bytes += of_span.bytes;
        work.flops += of_span.flops;
    }
    work
}

/// Work of reading `matrices` matrices and multiplying `rows` rows with one of them each.
fn product(matrix: MatrixSpec, matrices: usize, rows: usize) -> Result<Work> {
    let bytes = matrix.dtype.matrix_bytes(matrix.rows, matrix.cols)? * matrices;
    Ok(Work { bytes: bytes as u64, flops: (2 * matrix.rows * matrix.cols * rows) as u64 })
}
