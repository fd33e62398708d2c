//! Cuts a graph into segments and gives its values buffers.
//!
//! A segment ends before a `moe_experts` whose experts are not all resident: there the host must know the
//! router's choice before work can go on. A graph whose experts are all resident is one segment. Buffers are
//! reused as soon as the last reader of a value has run, so scratch memory is a few rows wide, not one row a node.

use std::ops::Range;

use crate::graph::{
    BlockInputs, CompressedInputs, DeltaInputs, ExpertSetId, Graph, IndexInputs, LatentInputs, Op, Output,
    SsmInputs, Value,
};

/// Nodes that run without the host's attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Indices into the graph's nodes.
    pub nodes: Range<usize>,
    /// The experts that its first node waits for, if that is why it starts there.
    pub waits_for: Option<ExpertSetId>,
}

/// How a graph is run: segments and buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// In execution order, covering every node.
    pub segments: Vec<Segment>,
    /// Buffer of each value; `None` for the logits, which go straight to the caller's memory.
    pub buffer_of: Vec<Option<usize>>,
    /// Width of each buffer in f32.
    pub buffer_widths: Vec<usize>,
}

impl Plan {
    /// Plans `graph`; `resident` says whether all experts of a set are in memory for good.
    pub fn new(graph: &Graph, resident: impl Fn(ExpertSetId) -> bool) -> Self {
        let (buffer_of, buffer_widths) = assign_buffers(graph);
        Self { segments: cut(graph, resident), buffer_of, buffer_widths }
    }

    /// Bytes of activations per row.
    pub fn row_bytes(&self) -> usize {
        self.buffer_widths.iter().sum::<usize>() * size_of::<f32>()
    }
}

fn cut(graph: &Graph, resident: impl Fn(ExpertSetId) -> bool) -> Vec<Segment> {
    let mut segments = vec![];
    let (mut start, mut waits_for) = (0, None);
    for (index, node) in graph.nodes.iter().enumerate() {
        if let Op::MoeExperts { experts, .. } = node.op
            && !resident(experts)
        {
            segments.push(Segment { nodes: start..index, waits_for });
            (start, waits_for) = (index, Some(experts));
        }
    }
    segments.push(Segment { nodes: start..graph.nodes.len(), waits_for });
    segments
}

/// Values that a node reads.
pub(crate) fn inputs(op: &Op) -> impl Iterator<Item = Value> {
    let mut more = [None, None, None];
    let three = match *op {
        Op::LatentAttention { inputs: LatentInputs { q_nope, c, rotated, chosen, .. }, .. } => {
            more = [rotated.map(|r| r[0]), rotated.map(|r| r[1]), None];
            [Some(q_nope), Some(c), chosen.map(|chosen| chosen.blocks)]
        }
        Op::ChooseBlocks { inputs: IndexInputs { q, k, weights }, .. } => [Some(q), Some(k), weights],
        Op::Embed { .. } | Op::NGramEmbed { .. } => [None, None, None],
        Op::Linear { x, .. }
        | Op::RmsNorm { x, .. }
        | Op::Rope { x, .. }
        | Op::Clamp { x, .. }
        | Op::MoeExperts { x, .. }
        | Op::Slice { x, .. }
        | Op::CausalConv1d { x, .. }
        | Op::UnitNorm { x, .. }
        | Op::PlacedRope { x, .. }
        | Op::LayerNorm { x, .. }
        | Op::PositionScale { x, .. }
        | Op::GroupedLinear { x, .. }
        | Op::Repeat { x, .. }
        | Op::ScaledSilu { x, .. }
        | Op::SquaredRelu { x }
        | Op::WindowMean { x, .. }
        | Op::GatherRows { x } => [Some(x), None, None],
        Op::Route { logits, .. } | Op::RouteByToken { logits, .. } => [Some(logits), None, None],
        Op::Attention { q, k, v, chosen, .. } => {
            more = [chosen.map(|chosen| chosen.blocks), None, None];
            [Some(q), Some(k), Some(v)]
        }
        Op::SwiGlu { gate, up }
        | Op::LimitedSwiGlu { gate, up, .. }
        | Op::ClampedSwiGlu { gate, up, .. }
        | Op::CappedSwiGlu { gate, up, .. } => [Some(gate), Some(up), None],
        Op::HyperWeights { x, mix, .. } => [Some(x), Some(mix), None],
        Op::HyperCollapse { x, weights, .. } => [Some(x), Some(weights), None],
        Op::HyperExpand { x, block, weights, .. } => [Some(x), Some(block), Some(weights)],
        Op::WindowPool { kv, gate, .. } => [Some(kv), Some(gate), None],
        Op::CompressedAttention { inputs: CompressedInputs { q, kv, entries, index, .. }, .. } => {
            more = index.map_or(more, |index| [Some(index.q), Some(index.k), index.weights]);
            [Some(q), Some(kv), Some(entries)]
        }
        Op::BlockAttention { inputs: BlockInputs { q, k, v, index }, .. } => {
            more = [Some(index.q), Some(index.k), index.weights];
            [Some(q), Some(k), Some(v)]
        }
        Op::SigmoidGate { x, gate } | Op::GatedMean { x, gate, .. } => [Some(x), Some(gate), None],
        Op::StreamAdd { x, block, logits } => [Some(x), Some(block), Some(logits)],
        Op::StreamGate { keys, queries, value } => [Some(keys), Some(queries), Some(value)],
        Op::Add { a, b } => [Some(a), Some(b), None],
        Op::SsmScan { inputs: SsmInputs { x, b, c, dt }, .. } => {
            more = [Some(dt), None, None];
            [Some(x), Some(b), Some(c)]
        }
        Op::GatedDeltaRule { inputs: DeltaInputs { q, k, v, a, b }, .. } => {
            more = [Some(a), Some(b), None];
            [Some(q), Some(k), Some(v)]
        }
    };
    three.into_iter().chain(more).flatten()
}

/// First-fit over values in execution order: a value takes the narrowest free buffer that is wide enough, else
/// widens the widest free one, else a fresh one. A node's output never shares a buffer with its inputs.
fn assign_buffers(graph: &Graph) -> (Vec<Option<usize>>, Vec<usize>) {
    let mut last_use = vec![0; graph.values];
    for (index, node) in graph.nodes.iter().enumerate() {
        for value in inputs(&node.op) {
            last_use[value.index] = index;
        }
    }

    let mut buffer_of = vec![None; graph.values];
    let mut widths: Vec<usize> = vec![];
    let mut free: Vec<usize> = vec![];
    for (index, node) in graph.nodes.iter().enumerate() {
        if let Output::Value(value) = node.out
            && value != graph.logits
        {
            let fits = |b: &&usize| widths[**b] >= value.width();
            let best = free.iter().filter(fits).min_by_key(|b| widths[**b]);
            let chosen = best.or_else(|| free.iter().max_by_key(|b| widths[**b])).copied();
            let buffer = chosen.unwrap_or_else(|| {
                widths.push(0);
                widths.len() - 1
            });
            free.retain(|b| *b != buffer);
            widths[buffer] = widths[buffer].max(value.width());
            buffer_of[value.index] = Some(buffer);
        }
        let mut ended: Vec<usize> = inputs(&node.op)
            .filter(|v| last_use[v.index] == index)
            .filter_map(|v| buffer_of[v.index])
            .collect();
        ended.sort_unstable();
        ended.dedup();
        free.extend(ended);
    }
    (buffer_of, widths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::graph::{ExpertSet, GraphBuilder, MatrixSpec, Precision, Route};

    /// Two MoE layers of width 4.
    fn two_layers() -> Graph {
        let mut g = GraphBuilder::new();
        let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
        let mut weight = |rows, cols| g.weight("w", matrix(rows, cols));
        let (table, router, head) = (weight(8, 4), weight(2, 4), weight(8, 4));
        let mut x = g.embed(table);
        for layer in 0..2 {
            let set = ExpertSet {
                layer,
                experts: 2,
                gate: Some(matrix(6, 4)),
                up: matrix(6, 4),
                down: matrix(4, 6),
            };
            let set = g.expert_set(set).unwrap();
            let logits = g.linear(x, router, None, Precision::F32).unwrap();
            let routing = g.route(logits, None, Route::softmax(2, 1, true)).unwrap();
            let moe = g.moe_experts(x, routing, set).unwrap();
            x = g.add(x, moe).unwrap();
        }
        let rows = g.gather_rows(x);
        let logits = g.linear(rows, head, None, Precision::Fast).unwrap();
        g.finish(logits)
    }

    #[test]
    fn resident_graph_is_one_segment() {
        let graph = two_layers();
        let plan = Plan::new(&graph, |_| true);
        assert_eq!(plan.segments, [Segment { nodes: 0..graph.nodes.len(), waits_for: None }]);
    }

    #[test]
    fn cuts_only_where_experts_are_not_resident() {
        let graph = two_layers();
        let plan = Plan::new(&graph, |set| set == ExpertSetId(0));
        assert_eq!(plan.segments.len(), 2);
        assert_eq!(plan.segments[1].waits_for, Some(ExpertSetId(1)));
        assert!(matches!(graph.nodes[plan.segments[1].nodes.start].op, Op::MoeExperts { .. }));
        assert_eq!(plan.segments[0].nodes.end, plan.segments[1].nodes.start);
    }

    #[test]
    fn live_values_never_share_a_buffer() {
        let graph = two_layers();
        let plan = Plan::new(&graph, |_| true);
        assert!(plan.buffer_widths.len() < graph.values, "buffers are reused");
        for (index, node) in graph.nodes.iter().enumerate() {
            let Output::Value(out) = node.out else { continue };
            let Some(buffer) = plan.buffer_of[out.index] else { continue };
            assert!(plan.buffer_widths[buffer] >= out.width());
            let used_later =
                |v: &usize| graph.nodes[index..].iter().any(|n| inputs(&n.op).any(|i| i.index == *v));
            for earlier in (0..out.index).filter(used_later) {
                assert_ne!(plan.buffer_of[earlier], Some(buffer), "node {index}");
            }
        }
    }

    #[test]
    fn a_narrow_value_leaves_its_buffer_wide() {
        let mut g = GraphBuilder::new();
        let mut weight = |rows, cols| g.weight("w", MatrixSpec { dtype: DType::F32, rows, cols });
        let (table, square, narrow, head) = (weight(8, 4), weight(4, 4), weight(2, 4), weight(8, 2));
        let wide = g.embed(table);
        let next = g.linear(wide, square, None, Precision::F32).unwrap();
        let last = g.linear(next, narrow, None, Precision::F32).unwrap();
        let rows = g.gather_rows(last);
        let logits = g.linear(rows, head, None, Precision::Fast).unwrap();
        let graph = g.finish(logits);
        let plan = Plan::new(&graph, |_| true);
        let buffer = plan.buffer_of[wide.index];
        assert_eq!(buffer, plan.buffer_of[last.index], "the first one is needed no more");
        assert!(plan.buffer_widths[buffer.unwrap()] >= 4);
    }
}
