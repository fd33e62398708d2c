//! Hidden states: what the head multiplies, of outputs and of all rows.

use super::operation;
use super::{GatherRowsOp, Graph, InputRowsOp, LinearOp, Node, Op, Output, Value};

impl Graph {
    /// What the head multiplies: (outputs, hidden_size), the last layer's rows after the final norm, with whatever scale the model
    /// has there. `None` if the graph does not end with the linear layer that makes the logits.
    pub fn hidden(&self) -> Option<Value> {
        match self.nodes.last() {
            Some(Node { op: Op::Linear(LinearOp { x, .. }), out: Output::Value(out), .. })
                if *out == self.logits =>
            {
                Some(*x)
            }
            _ => None,
        }
    }

    /// The same computation, but for what [`Graph::hidden`] then gives of every row of a batch, not only of its outputs: what
    /// stands between the choice of rows and the head, which is of rows each on its own, comes before that choice. Also that
    /// value. `None` if no choice of rows or no head is there.
    pub(crate) fn with_every_hidden(&self) -> Option<(Self, Value)> {
        let hidden = self.hidden()?;
        let gather = self.nodes.iter().position(|node| matches!(node.op, Op::GatherRows(_)))?;
        let (Op::GatherRows(GatherRowsOp { x }), Output::Value(rows)) =
            (self.nodes[gather].op.clone(), self.nodes[gather].out)
        else {
            return None;
        };
        let mut graph = self.clone();
        graph.nodes.remove(gather);
        let mut head = graph.nodes.pop()?;
        graph.nodes[gather..].iter_mut().for_each(|node| node.op.visit(&mut Exchange { from: rows, to: x }));
        let all = if hidden == rows { x } else { hidden };
        // The value of the chosen rows is free, as nothing else reads it now.
        let chosen = Value { index: rows.index, width: all.width };
        let op = GatherRowsOp { x: all }.into();
        graph.nodes.push(Node { name: head.name.clone(), op, out: Output::Value(chosen) });
        head.op.visit(&mut Exchange { from: hidden, to: chosen });
        graph.nodes.push(head);
        Some((graph, all))
    }

    /// The same computation with the same nodes, and beside them what [`Graph::hidden`] would be of every row of a batch: before the
    /// choice of rows, copies of what stands between that and the head. Also that value. `None` as for
    /// [`Graph::with_every_hidden`].
    pub(crate) fn with_hidden_beside(&self) -> Option<(Self, Value)> {
        let hidden = self.hidden()?;
        let gather = self.nodes.iter().position(|node| matches!(node.op, Op::GatherRows(_)))?;
        let (Op::GatherRows(GatherRowsOp { x }), Output::Value(rows)) =
            (self.nodes[gather].op.clone(), self.nodes[gather].out)
        else {
            return None;
        };
        let mut graph = self.clone();
        let (mut copies, mut of_all) = (vec![], vec![Exchange { from: rows, to: x }]);
        for node in &self.nodes[gather + 1..self.nodes.len() - 1] {
            let (false, Output::Value(out)) = (matches!(node.op, Op::GatherRows(_)), node.out) else {
                return None;
            };
            let mut copy = node.clone();
            of_all.iter_mut().for_each(|exchange| copy.op.visit(exchange));
            let own = Value { index: graph.values, width: out.width };
            graph.values += 1;
            of_all.push(Exchange { from: out, to: own });
            copies.push(Node { out: Output::Value(own), ..copy });
        }
        let all = of_all.iter().find(|exchange| exchange.from == hidden)?.to;
        graph.nodes.splice(gather..gather, copies);
        Some((graph, all))
    }

    /// Values that come with a batch, (tokens, width): those of [`GraphBuilder::input_rows`](super::GraphBuilder::input_rows).
    pub(crate) fn input_rows(&self) -> impl Iterator<Item = Value> {
        self.nodes.iter().filter_map(|node| match (&node.op, node.out) {
            (Op::InputRows(InputRowsOp { .. }), Output::Value(value)) => Some(value),
            _ => None,
        })
    }
}

/// Puts a value in the place of another.
struct Exchange {
    from: Value,
    to: Value,
}

impl operation::Visitor for Exchange {
    fn value(&mut self, value: &mut Value) {
        if *value == self.from {
            *value = self.to;
        }
    }
}
