//! How routed experts lie in slots of device and host memory.

use super::held::Held;
use super::low_rank::adapts_experts;
use super::weights::placed;
use crate::Result;
use crate::gpu::arguments::{Format, PartConstants};
use crate::graph::{ExpertSet, ExpertSetId, Graph, MatrixSpec, Op, RouteOp};

/// One of an expert's matrices, and where it lies in its slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertMatrix {
    pub(crate) matrix: MatrixSpec,
    pub(crate) part: PartConstants,
}

impl ExpertMatrix {
    /// Bytes from the start of the slot.
    pub(crate) fn start(&self) -> usize {
        self.part.offsets[0]
    }

    fn new(matrix: MatrixSpec, start: usize) -> Result<(Self, usize)> {
        let (bytes, offsets) = placed(matrix)?;
        let offsets = offsets.map(|offset| start + offset);
        let part = PartConstants { format: Format::new(matrix)?, offsets, rows: matrix.rows };
        Ok((Self { matrix, part }, start + bytes))
    }
}

/// Most experts that a token chooses.
pub(crate) fn most_chosen(graph: &Graph) -> usize {
    let chosen = graph.nodes().iter().map(|node| match &node.op {
        Op::Route(RouteOp { route, .. }) => route.top_k,
        _ => 1,
    });
    chosen.max().unwrap_or(1)
}

/// Bytes of the largest slot.
pub(crate) fn largest_bytes(graph: &Graph) -> Result<u64> {
    Ok(layouts(graph)?.iter().map(|layout| layout.bytes).max().unwrap_or(0) as u64)
}

/// Bytes of the slots that a token's experts need at once.
pub(crate) fn least_bytes(graph: &Graph) -> Result<u64> {
    Ok(largest_bytes(graph)? * most_chosen(graph) as u64)
}

/// How an expert of a set lies in its slot.
#[derive(Debug)]
pub(crate) struct ExpertLayout {
    /// gate, up, down; up in place of a gate that experts do not have.
    pub(crate) parts: [ExpertMatrix; 3],
    pub(crate) gated: bool,
    /// Of the slot.
    pub(crate) bytes: usize,
}

impl ExpertLayout {
    fn new(set: &ExpertSet) -> Result<Self> {
        let gate = set.gate.map(|gate| ExpertMatrix::new(gate, 0)).transpose()?;
        let (up, end) = ExpertMatrix::new(set.up, gate.map_or(0, |(_, end)| end))?;
        let (down, bytes) = ExpertMatrix::new(set.down, end)?;
        let parts = [gate.map_or(up, |(gate, _)| gate), up, down];
        Ok(Self { parts, gated: gate.is_some(), bytes })
    }
}

pub(crate) fn layouts(graph: &Graph) -> Result<Vec<ExpertLayout>> {
    graph.expert_sets().iter().map(ExpertLayout::new).collect()
}

/// Whether the device may give slots by itself to experts that host memory keeps: it knows of none that are nowhere, as
/// those of rows that an adapter does not change are to kernels for others.
pub(crate) fn device_keeps_experts(graph: &Graph) -> bool {
    let identities = (0..graph.expert_sets().len()).any(|set| graph.identities(ExpertSetId(set)) > 0);
    !identities && !adapts_experts(graph)
}

/// Bytes of all experts of a graph in the form of slots.
pub(crate) fn all_bytes(graph: &Graph) -> Result<u64> {
    held_bytes(graph, Held::ALL)
}

/// The same of those that a device holds.
pub(crate) fn held_bytes(graph: &Graph, held: Held) -> Result<u64> {
    let sets = layouts(graph)?.into_iter().zip(graph.expert_sets());
    Ok(sets.map(|(layout, set)| layout.bytes as u64 * held.count(set.experts) as u64).sum())
}
