//! Parts: consecutive layers of a graph as graphs of their own, for devices that have some layers each.
//!
//! A graph can be cut where a layer ends. What is alive there, the residual stream and maybe more, crosses the cut: it is
//! what the earlier part yields and the later one begins with. Values keep their indices in all parts; weights, choices of
//! routers, caches, states and experts are numbered anew, so that a part has memory for its own only. A weight that several parts read is in
//! each of them.

use std::collections::HashMap;
use std::ops::Range;

use super::operation::Visitor;
use super::{
    CacheId, CompressedCacheId, ExpertSetId, Graph, LatentCacheId, Op, Output, Routing, StateId, Value,
    WeightId,
};

/// Values that a part of a graph begins with, and those that it yields; neither for a whole graph.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ends {
    pub(crate) inputs: Vec<Value>,
    pub(crate) outputs: Vec<Value>,
}

/// Some consecutive layers of a graph.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// The numbers of its first layer and its last, if it has any.
    pub(crate) layers: Option<[usize; 2]>,
    /// Of its nodes only. Without the head its logits have no columns.
    pub(crate) graph: Graph,
    pub(crate) ends: Ends,
    /// Numbers in the whole graph, by those in the part.
    pub(crate) weights: Vec<usize>,
    pub(crate) caches: Vec<usize>,
    pub(crate) latent_caches: Vec<usize>,
    pub(crate) compressed_caches: Vec<usize>,
    pub(crate) states: Vec<usize>,
    pub(crate) expert_sets: Vec<ExpertSetId>,
}

/// The number in `layers.3.mlp`.
pub(super) fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

impl Graph {
    /// Where it can be cut, by the number of nodes before: where a layer begins that is not the first one, as long as all
    /// tokens have rows, and neither a router's choice nor what a norm makes is read beyond: kernels may make those where they
    /// are read.
    pub(crate) fn cuts(&self) -> Vec<usize> {
        let mut reads = Reads { values: vec![0; self.values], routings: vec![0; self.routings], node: 0 };
        for (index, node) in self.nodes.iter().enumerate() {
            reads.node = index;
            node.op.clone().visit(&mut reads);
        }
        let (mut cuts, mut last, mut whole_until) = (vec![], None, 0);
        for (index, node) in self.nodes.iter().enumerate() {
            if matches!(node.op, Op::GatherRows(_)) {
                break;
            }
            if let Some(number) = layer(&node.name) {
                if last.is_some_and(|last| last != number) && whole_until < index {
                    cuts.push(index);
                }
                last = Some(number);
            }
            whole_until = whole_until.max(match (&node.op, node.out) {
                (_, Output::Routing(routing)) => reads.routings[routing.index],
                (Op::RmsNorm(_), Output::Value(value)) => reads.values[value.index],
                _ => 0,
            });
        }
        cuts
    }

    /// What is alive before node `at`, by index.
    fn alive(&self, at: usize) -> Vec<Value> {
        if at == 0 || at == self.nodes.len() {
            return vec![];
        }
        let (before, after) = self.nodes.split_at(at);
        let read: Vec<Value> = after.iter().flat_map(|node| node.op.values()).collect();
        let made = before.iter().filter_map(|node| match node.out {
            Output::Value(value) => Some(value),
            Output::Routing(_) => None,
        });
        let mut alive: Vec<Value> = made.filter(|value| read.contains(value)).collect();
        alive.sort_unstable_by_key(|value| value.index);
        alive
    }

    /// The part of some of its nodes, from one of [`Graph::cuts`] or the beginning to another or the end.
    pub(crate) fn part(&self, nodes: Range<usize>) -> Part {
        let ends = Ends { inputs: self.alive(nodes.start), outputs: self.alive(nodes.end) };
        Part { ends, ..self.part_without_ends(nodes) }
    }

    /// The same, without what crosses the cuts: what such a part has.
    pub(crate) fn part_without_ends(&self, nodes: Range<usize>) -> Part {
        let mut numbers = Numbers::default();
        let mut graph = Graph { nodes: self.nodes[nodes.clone()].to_vec(), ..self.without_memory() };
        for node in &mut graph.nodes {
            node.op.visit(&mut numbers);
            if let Output::Routing(routing) = &mut node.out {
                numbers.routing(routing);
            }
        }
        if nodes.end < self.nodes.len() {
            graph.logits = Value { index: graph.values, width: 0 };
            graph.values += 1;
        }
        let Numbers { weights, routings, caches, latent_caches, compressed_caches, states, expert_sets } =
            numbers;
        graph.routings = routings.old.len();
        graph.weights = weights.of(&self.weights);
        graph.caches = caches.of(&self.caches);
        graph.latent_caches = latent_caches.of(&self.latent_caches);
        graph.compressed_caches = compressed_caches.of(&self.compressed_caches);
        graph.states = states.of(&self.states);
        graph.expert_sets = expert_sets.of(&self.expert_sets);
        let mut layers = graph.nodes.iter().filter_map(|node| layer(&node.name));
        let first = layers.next();
        let layers = first.map(|first| [first, layers.next_back().unwrap_or(first)]);
        Part {
            layers,
            graph,
            ends: Ends::default(),
            weights: weights.old,
            caches: caches.old,
            latent_caches: latent_caches.old,
            compressed_caches: compressed_caches.old,
            states: states.old,
            expert_sets: expert_sets.old.into_iter().map(ExpertSetId).collect(),
        }
    }

    /// A graph like this one that has nothing.
    fn without_memory(&self) -> Graph {
        Graph {
            nodes: vec![],
            weights: vec![],
            ropes: self.ropes.clone(),
            caches: vec![],
            states: vec![],
            latent_caches: vec![],
            compressed_caches: vec![],
            expert_sets: vec![],
            values: self.values,
            routings: self.routings,
            logits: self.logits,
        }
    }
}

/// Finds out where everything is read last, by the number of the node.
struct Reads {
    values: Vec<usize>,
    routings: Vec<usize>,
    node: usize,
}

impl Visitor for Reads {
    fn value(&mut self, value: &mut Value) {
        self.values[value.index] = self.node;
    }

    fn routing(&mut self, routing: &mut Routing) {
        self.routings[routing.index] = self.node;
    }
}

/// New numbers of one kind, in the order in which they are met.
#[derive(Default)]
struct Renumbered {
    new: HashMap<usize, usize>,
    old: Vec<usize>,
}

impl Renumbered {
    fn exchange(&mut self, number: &mut usize) {
        *number = *self.new.entry(*number).or_insert_with(|| {
            self.old.push(*number);
            self.old.len() - 1
        });
    }

    /// Of what the whole graph has, that of the part.
    fn of<T: Clone>(&self, all: &[T]) -> Vec<T> {
        self.old.iter().map(|old| all[*old].clone()).collect()
    }
}

/// Exchanges what operations refer to for the part's own.
#[derive(Default)]
struct Numbers {
    weights: Renumbered,
    routings: Renumbered,
    caches: Renumbered,
    latent_caches: Renumbered,
    compressed_caches: Renumbered,
    states: Renumbered,
    expert_sets: Renumbered,
}

impl Visitor for Numbers {
    fn weight(&mut self, id: &mut WeightId) {
        self.weights.exchange(&mut id.0);
    }

    fn routing(&mut self, routing: &mut Routing) {
        self.routings.exchange(&mut routing.index);
    }

    fn state(&mut self, id: &mut StateId) {
        self.states.exchange(&mut id.0);
    }

    fn cache(&mut self, id: &mut CacheId) {
        self.caches.exchange(&mut id.0);
    }

    fn latent_cache(&mut self, id: &mut LatentCacheId) {
        self.latent_caches.exchange(&mut id.0);
    }

    fn compressed_cache(&mut self, id: &mut CompressedCacheId) {
        self.compressed_caches.exchange(&mut id.0);
    }

    fn experts(&mut self, id: &mut ExpertSetId) {
        self.expert_sets.exchange(&mut id.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::graph::{GraphBuilder, MatrixSpec, Precision};

    /// Three layers that add to a stream; the last also reads what the first made.
    #[test]
    fn what_is_alive_crosses_and_the_rest_is_the_parts_own() {
        let mut g = GraphBuilder::new();
        let square = MatrixSpec { dtype: DType::F32, rows: 32, cols: 32 };
        let table = g.weight("table", MatrixSpec { dtype: DType::F32, rows: 50, cols: 32 });
        let mut stream = g.embed(table);
        let mut kept = None;
        for layer in 0..3 {
            g.scope(format!("layers.{layer}.mlp"));
            let weight = g.weight(format!("w{layer}"), square);
            let made = g.linear(stream, weight, None, Precision::F32).unwrap();
            stream = g.add(stream, made).unwrap();
            if layer == 2 {
                stream = g.add(stream, kept.unwrap()).unwrap();
            }
            kept.get_or_insert(made);
        }
        g.scope("head");
        let rows = g.gather_rows(stream);
        let logits = g.linear(rows, table, None, Precision::F32).unwrap();
        let graph = g.finish(logits);
        let cuts = graph.cuts();
        assert_eq!(cuts, [3, 5]);
        let ends = [0, 3, 5, graph.nodes().len()];
        let parts: Vec<Part> = ends.windows(2).map(|pair| graph.part(pair[0]..pair[1])).collect();
        assert_eq!(parts.iter().map(|part| part.layers).collect::<Vec<_>>(), [0, 1, 2].map(|n| Some([n, n])));
        for pair in parts.windows(2) {
            assert_eq!(pair[0].ends.outputs, pair[1].ends.inputs);
            assert_eq!(pair[0].ends.outputs.len(), 2, "the stream and what is kept");
            assert_eq!(pair[0].graph.vocab_size(), 0);
        }
        assert_eq!((parts[0].ends.inputs.len(), parts[2].ends.outputs.len()), (0, 0));
        assert_eq!(parts[2].graph.vocab_size(), 50);
        // The table is in the first part and in the last.
        let weights = parts.iter().map(|part| part.weights.clone());
        assert_eq!(weights.collect::<Vec<_>>(), [vec![0, 1], vec![2], vec![3, 0]]);
    }
}
