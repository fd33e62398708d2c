//! What adapters add to products, as kernels find it: a list of numbers that says where the matrices of each adapter are.

use std::collections::HashMap;

use super::weights::{ALIGNMENT, DeviceWeight};
use crate::gpu::arguments::UpdateWords;
use crate::gpu::device::{BufferId, Device, Slice, Words};
use crate::gpu::encodings;
use crate::graph::{Graph, LowRank, MoeExpertsOp, Op, StackedLowRank, WeightId};
use crate::{DType, Result};

/// Words of an entry.
const UPDATE_WORDS: usize = 5;
/// Products whose inner values are there at once: those of one input that follow each other, at most.
const INNER_PARTS: usize = 3;

/// The updates of one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Updates {
    /// Where their entries begin, in words: one for each adapter of each projection.
    pub(crate) first: usize,
    /// The largest rank of each projection: of a linear layer the first, of experts gate, up and down; none is zero.
    pub(crate) ranks: [usize; 3],
    /// Whether every adapter of the graph has some.
    pub(crate) complete: bool,
}

impl Updates {
    /// Where the entries of a projection begin.
    pub(crate) fn of(&self, projection: usize, adapters: usize) -> usize {
        self.first + projection * adapters * UPDATE_WORDS
    }
}

/// The updates of all operations of a graph that has adapters, and memory for computing them.
#[derive(Debug)]
pub(crate) struct LowRankUpdates {
    /// u32: entries, and scales.
    pub(crate) words: BufferId,
    /// The buffer of all weights, A and B among them.
    pub(crate) matrices: Slice,
    /// Adapters, one entry each.
    pub(crate) adapters: usize,
    of_node: HashMap<usize, Updates>,
    /// What A makes of rows or pairs, f32.
    pub(crate) inner: BufferId,
    /// (pairs), u32: experts of those that have updates.
    pub(crate) ids: BufferId,
}

/// The weights of all adapters, by index.
pub(super) fn weights(graph: &Graph) -> Vec<bool> {
    let mut all = vec![false; graph.weights().len()];
    for node in graph.nodes() {
        for (a, b) in matrices(&node.op) {
            (all[a.0], all[b.0]) = (true, true);
        }
    }
    all
}

/// A and B of all updates of an operation.
fn matrices(op: &Op) -> Vec<(WeightId, WeightId)> {
    match op {
        Op::Linear(op) => op.low_rank.iter().map(|own| (own.a, own.b)).collect(),
        Op::MoeExperts(op) => {
            let all = op.low_rank.iter().flat_map(|own| own.projections.iter().flatten());
            all.map(|own| (own.a, own.b)).collect()
        }
        _ => vec![],
    }
}

/// Whether kernels read all matrices of an operation's updates.
pub(crate) fn is_plain(graph: &Graph, op: &Op) -> bool {
    let plain =
        |id: WeightId| matches!(graph.weights()[id.0].matrix.dtype, DType::F32 | DType::F16 | DType::BF16);
    matrices(op).into_iter().all(|(a, b)| plain(a) && plain(b))
}

/// Whether an adapter changes routed experts.
pub(crate) fn adapts_experts(graph: &Graph) -> bool {
    graph.nodes().iter().any(|node| matches!(&node.op, Op::MoeExperts(op) if !op.low_rank.is_empty()))
}

/// Adapters that entries are made for: one more than the largest number.
pub(crate) fn adapters(graph: &Graph) -> usize {
    let of = |op: &Op| match op {
        Op::Linear(op) => op.low_rank.iter().map(|own| own.adapter).max(),
        Op::MoeExperts(op) => op.low_rank.iter().map(|own| own.adapter).max(),
        _ => None,
    };
    graph.nodes().iter().filter_map(|node| of(&node.op)).max().map_or(0, |most| most as usize + 1)
}

/// The update of an adapter in one product: its matrices, and the scale of each expert.
type Entry<'a> = (WeightId, WeightId, &'a [f32]);

/// The entries of an operation: of each projection those of all adapters.
fn entries(op: &Op, adapters: usize) -> Vec<Vec<Option<Entry<'_>>>> {
    match op {
        Op::Linear(op) if !op.low_rank.is_empty() => {
            let mut all = vec![None; adapters];
            for LowRank { adapter, a, b, scale } in &op.low_rank {
                all[*adapter as usize] = Some((*a, *b, std::slice::from_ref(scale)));
            }
            vec![all]
        }
        Op::MoeExperts(op) if !op.low_rank.is_empty() => {
            let mut all = vec![vec![None; adapters]; 3];
            for own in &op.low_rank {
                for (all, projection) in all.iter_mut().zip(&own.projections) {
                    let entry =
                        projection.as_ref().map(|StackedLowRank { a, b, scales }| (*a, *b, &scales[..]));
                    all[own.adapter as usize] = entry;
                }
            }
            all
        }
        _ => vec![],
    }
}

/// Bytes of the list, of inner values and of chosen experts, in batches of up to `rows` rows; none without adapters.
pub(super) fn bytes(graph: &Graph, rows: usize) -> [usize; 3] {
    let (adapters, mut words, mut inner, mut ids) = (adapters(graph), 0, 0, 0);
    let rank = |entries: &[Option<Entry<'_>>]| {
        let ranks = entries.iter().flatten().map(|(_, b, _)| graph.weights()[b.0].matrix.cols);
        ranks.max().unwrap_or(0)
    };
    for node in graph.nodes() {
        let entries = entries(&node.op, adapters);
        words += entries.iter().map(|of| of.len() * UPDATE_WORDS).sum::<usize>();
        words += entries.iter().flatten().flatten().map(|(_, _, scales)| scales.len()).sum::<usize>();
        let ranks: Vec<usize> = entries.iter().map(|of| rank(of)).collect();
        match &node.op {
            Op::MoeExperts(MoeExpertsOp { routing, .. }) if !ranks.is_empty() => {
                let pairs = rows.saturating_mul(routing.top_k());
                inner = inner.max(pairs.saturating_mul((ranks[0] + ranks[1]).max(ranks[2])));
                ids = ids.max(pairs);
            }
            _ => inner = inner.max(rows.saturating_mul(INNER_PARTS * ranks.first().copied().unwrap_or(0))),
        }
    }
    [words, inner, ids].map(|count| count.saturating_mul(4))
}

impl LowRankUpdates {
    /// Gives the device the list; nothing for a graph without adapters.
    pub(super) fn new(
        device: &mut dyn Device,
        graph: &Graph,
        weights: &[DeviceWeight],
        rows: usize,
    ) -> Result<Option<Self>> {
        let adapters = adapters(graph);
        if adapters == 0 {
            return Ok(None);
        }
        let (mut list, mut scales, mut of_node) = (vec![], vec![], HashMap::new());
        let all = |node: usize| entries(&graph.nodes()[node].op, adapters);
        let entry_words: usize =
            (0..graph.nodes().len()).flat_map(all).map(|of| of.len() * UPDATE_WORDS).sum();
        let unit = |id: WeightId| weights[id.0].planes[0].offset / ALIGNMENT;
        let code = |id: WeightId| encodings::kind(weights[id.0].matrix.dtype);
        let mut matrices = None;
        for node in 0..graph.nodes().len() {
            let projections = all(node);
            if projections.is_empty() {
                continue;
            }
            let (first, mut ranks) = (list.len() / 4, [0; 3]);
            let complete = (0..adapters).all(|own| projections.iter().any(|of| of[own].is_some()));
            for (of, most) in projections.iter().zip(&mut ranks) {
                for entry in of {
                    let mut words = UpdateWords::default();
                    if let Some((a, b, of_experts)) = *entry {
                        let rank = weights[b.0].matrix.cols;
                        (*most, matrices) = (rank.max(*most), Some(weights[a.0].planes[0].buffer));
                        let kinds = code(a)? | code(b)? << 8;
                        let scales_at = entry_words + scales.len();
                        words = UpdateWords { a: unit(a), b: unit(b), rank, kinds, scales: scales_at };
                        scales.extend_from_slice(of_experts);
                    }
                    words.append(&mut list);
                }
            }
            of_node.insert(node, Updates { first, ranks, complete });
        }
        debug_assert_eq!(list.len(), 4 * entry_words);
        scales.iter().for_each(|scale| scale.append(&mut list));
        let [_, inner, ids] = bytes(graph, rows);
        let words = device.alloc(list.len())?;
        device.upload(words.into(), &list)?;
        let matrices = matrices.expect("a graph with adapters has some updates").into();
        let (inner, ids) = (device.alloc(inner.max(4))?, device.alloc(ids.max(4))?);
        Ok(Some(Self { words, matrices, adapters, of_node, inner, ids }))
    }

    /// What is added to the operation of a node.
    pub(crate) fn of(&self, node: usize) -> Option<Updates> {
        self.of_node.get(&node).copied()
    }
}
