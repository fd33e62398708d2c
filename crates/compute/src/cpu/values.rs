//! Buffers of a graph's values.

use crate::graph::{Graph, Op, Output, Value};

/// Which buffer each value of a graph has. Buffers are used again as soon as the last reader of a value has run, so that memory
/// is a few rows wide, not one row a node.
pub(crate) struct ValueBuffers {
    /// `None` for logits that a linear layer makes, which go straight to the caller's memory.
    of: Vec<Option<usize>>,
    /// In f32.
    widths: Vec<usize>,
}

impl ValueBuffers {
    /// First-fit over values in execution order: a value takes the narrowest free buffer that is wide enough, else
    /// widens the widest free one, else a fresh one. A node's output never shares a buffer with its inputs, and nothing
    /// shares that of `kept`, which is read after the last node.
    pub(crate) fn new(graph: &Graph, kept: Option<Value>) -> Self {
        let mut last_use = vec![0; graph.values];
        for (index, node) in graph.nodes.iter().enumerate() {
            for value in node.op.values() {
                last_use[value.index] = index;
            }
        }

        if let Some(kept) = kept {
            last_use[kept.index] = graph.nodes.len();
        }

        let mut buffer_of = vec![None; graph.values];
        let mut widths: Vec<usize> = vec![];
        let mut free: Vec<usize> = vec![];
        for (index, node) in graph.nodes.iter().enumerate() {
            if let Output::Value(value) = node.out
                && (value != graph.logits || !matches!(node.op, Op::Linear(_)))
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
            let mut ended: Vec<usize> = (node.op.values().into_iter())
                .filter(|v| last_use[v.index] == index)
                .filter_map(|v| buffer_of[v.index])
                .collect();
            ended.sort_unstable();
            ended.dedup();
            free.extend(ended);
        }
        Self { of: buffer_of, widths }
    }

    /// Bytes of values per row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.widths.iter().sum::<usize>() * size_of::<f32>()
    }

    /// Columns of the widest one.
    pub(crate) fn widest(&self) -> usize {
        self.widths.iter().max().copied().unwrap_or(0)
    }
}

/// Values between operations.
pub(crate) struct Values {
    places: ValueBuffers,
    buffers: Vec<Vec<f32>>,
}

impl Values {
    pub(crate) fn new(graph: &Graph, kept: Option<Value>) -> Self {
        let places = ValueBuffers::new(graph, kept);
        Self { buffers: vec![vec![]; places.widths.len()], places }
    }

    fn buffer(&self, value: Value) -> usize {
        self.places.of[value.index].expect("only the logits have no buffer, and nothing reads them")
    }

    /// A value's content, (rows, width), if it has a buffer.
    pub(crate) fn get(&self, value: Value) -> Option<&[f32]> {
        self.places.of.get(value.index).copied().flatten().map(|buffer| &self.buffers[buffer][..])
    }

    /// A value's content: (rows, width).
    pub(crate) fn of(&self, value: Value) -> &[f32] {
        &self.buffers[self.buffer(value)]
    }

    /// Rows that a value has in this batch.
    pub(crate) fn rows(&self, value: Value) -> usize {
        self.of(value).len() / value.width()
    }

    /// A row of a value.
    pub(crate) fn row(&self, value: Value, row: usize) -> &[f32] {
        &self.of(value)[row * value.width()..(row + 1) * value.width()]
    }

    /// Takes the buffer that a value will be written to, resized for `rows` rows.
    pub(crate) fn take(&mut self, value: Value, rows: usize) -> Vec<f32> {
        let index = self.buffer(value);
        let mut buffer = std::mem::take(&mut self.buffers[index]);
        buffer.resize(rows * value.width(), 0.0);
        buffer
    }

    /// Gives back what was taken.
    pub(crate) fn put(&mut self, value: Value, buffer: Vec<f32>) {
        let index = self.buffer(value);
        self.buffers[index] = buffer;
    }
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
    fn live_values_never_share_a_buffer() {
        let graph = two_layers();
        let plan = ValueBuffers::new(&graph, None);
        assert!(plan.widths.len() < graph.values, "buffers are reused");
        for (index, node) in graph.nodes.iter().enumerate() {
            let Output::Value(out) = node.out else { continue };
            let Some(buffer) = plan.of[out.index] else { continue };
            assert!(plan.widths[buffer] >= out.width());
            let used_later =
                |v: &usize| graph.nodes[index..].iter().any(|n| n.op.values().iter().any(|i| i.index == *v));
            for earlier in (0..out.index).filter(used_later) {
                assert_ne!(plan.of[earlier], Some(buffer), "node {index}");
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
        let buffers = ValueBuffers::new(&g.finish(logits), None);
        let buffer = buffers.of[wide.index];
        assert_eq!(buffer, buffers.of[last.index], "the first one is needed no more");
        assert!(buffers.widths[buffer.unwrap()] >= 4);
    }
}
