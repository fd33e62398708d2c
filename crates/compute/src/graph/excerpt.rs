//! Excerpts: graphs of some of a model's layers, which do for each layer exactly what the model does.
//!
//! Layers of a model do the same work in few variants, so running one of each says how long all of them take. A layer
//! takes the residual stream and leaves it: in an excerpt it takes what the layer before it leaves there, whichever that
//! is. Layers are told apart by the names of nodes (`layers.3.mlp`); what has no such name is the embedding or the head,
//! which every excerpt has, with fewer tokens than the model.

use std::collections::{BTreeMap, HashMap};

use super::operation::Visitor;
use super::part::layer;
use super::{
    Attention, CacheId, Chosen, CompressedAttention, CompressedCacheId, ExpertLowRank, ExpertSet,
    ExpertSetId, Graph, LatentAttention, LatentCacheId, LowRank, MatrixSpec, NGrams, Node, Op, Output,
    Routing, StateId, Value, WeightId, WeightSpec,
};
use crate::{DType, Error, Result};

impl Graph {
    /// Number of decoder layers.
    pub fn layers(&self) -> usize {
        Parts::of(self).layers.len()
    }

    /// Decoder layers, by what they do: numbers of layers that do the same, kinds and numbers ascending.
    ///
    /// # Errors
    /// As [`Graph::excerpt`].
    pub fn layer_kinds(&self) -> Result<Vec<Vec<usize>>> {
        let parts = Parts::of(self);
        let mut kinds: Vec<(Work, Vec<usize>)> = vec![];
        for number in parts.layers.keys().copied() {
            let work = Work::of(&self.excerpt_of(&parts, &[number], 1)?);
            match kinds.iter_mut().find(|(other, _)| *other == work) {
                Some((_, layers)) => layers.push(number),
                None => kinds.push((work, vec![number])),
            }
        }
        Ok(kinds.into_iter().map(|(_, layers)| layers).collect())
    }

    /// The graph of `layers` only, one after the other, with weights, caches and experts of its own for each, however
    /// often one is named. Its head has `vocab_size` tokens, or the model's if those are fewer, and its embedding as
    /// many, up to 1024.
    ///
    /// # Errors
    /// [`Error::Excerpt`] if a layer takes more from those before it than the residual stream.
    pub fn excerpt(&self, layers: &[usize], vocab_size: usize) -> Result<Graph> {
        self.excerpt_of(&Parts::of(self), layers, vocab_size)
    }

    fn excerpt_of(&self, parts: &Parts<'_>, layers: &[usize], vocab_size: usize) -> Result<Graph> {
        let mut excerpt = Excerpt::new(self, vocab_size);
        excerpt.append(&parts.before)?;
        for number in layers {
            excerpt.weights.clear();
            excerpt.append(parts.layers.get(number).map_or(&[], Vec::as_slice))?;
        }
        excerpt.weights.clear();
        excerpt.append(&parts.after)?;
        Ok(excerpt.graph)
    }
}

/// Tokens of an excerpt's embedding, at most.
const TABLE_ROWS: usize = 1024;

/// A graph's nodes by the layer that they belong to.
struct Parts<'a> {
    /// The embedding.
    before: Vec<&'a Node>,
    layers: BTreeMap<usize, Vec<&'a Node>>,
    /// The head.
    after: Vec<&'a Node>,
}

impl<'a> Parts<'a> {
    fn of(graph: &'a Graph) -> Self {
        let mut parts = Self { before: vec![], layers: BTreeMap::new(), after: vec![] };
        for node in &graph.nodes {
            match layer(&node.name) {
                Some(number) => parts.layers.entry(number).or_default().push(node),
                None if parts.layers.is_empty() => parts.before.push(node),
                None => parts.after.push(node),
            }
        }
        parts
    }
}

/// What a graph does, without names.
#[derive(PartialEq)]
struct Work {
    ops: Vec<Op>,
    weights: Vec<MatrixSpec>,
    caches: Vec<Attention>,
    latent_caches: Vec<LatentAttention>,
    compressed_caches: Vec<CompressedAttention>,
    states: Vec<usize>,
    experts: Vec<(usize, Vec<MatrixSpec>)>,
}

impl Work {
    fn of(graph: &Graph) -> Self {
        Self {
            ops: graph.nodes.iter().map(|node| node.op.clone()).collect(),
            weights: graph.weights.iter().map(|weight| weight.matrix).collect(),
            caches: graph.caches.clone(),
            latent_caches: graph.latent_caches.clone(),
            compressed_caches: graph.compressed_caches.clone(),
            states: graph.states.clone(),
            experts: graph.expert_sets.iter().map(|s| (s.experts, s.matrices().collect())).collect(),
        }
    }
}

/// A graph that is being copied.
struct Excerpt<'a> {
    from: &'a Graph,
    vocab_size: usize,
    graph: Graph,
    /// Of the part that is being copied, by the index in the whole graph.
    values: HashMap<usize, Value>,
    weights: HashMap<usize, WeightId>,
    routings: HashMap<usize, Routing>,
    /// What the last part left.
    residual: Option<Value>,
    /// Index in the whole graph of what stands for that in the part that is being copied, once it has been used.
    stream: Option<usize>,
    /// Whether the operation that is being copied is the product that makes the logits.
    in_head: bool,
    /// Whether it reads what the excerpt does not have.
    failed: bool,
}

impl<'a> Excerpt<'a> {
    fn new(from: &'a Graph, vocab_size: usize) -> Self {
        let vocab_size = vocab_size.min(from.logits.width).max(1);
        let graph = Graph {
            nodes: vec![],
            weights: vec![],
            ropes: from.ropes.clone(),
            caches: vec![],
            states: vec![],
            latent_caches: vec![],
            compressed_caches: vec![],
            expert_sets: vec![],
            values: 0,
            routings: 0,
            logits: Value { index: 0, width: vocab_size },
        };
        let (values, weights, routings) = Default::default();
        let (residual, stream, in_head, failed) = Default::default();
        Self { from, vocab_size, graph, values, weights, routings, residual, stream, in_head, failed }
    }

    /// Copies nodes that belong together.
    fn append(&mut self, nodes: &[&Node]) -> Result<()> {
        self.values.clear();
        self.stream = None;
        for node in nodes {
            let mut op = node.op.clone();
            self.in_head = self.is_head(node);
            op.visit(self);
            if self.failed {
                return Err(Error::Excerpt);
            }
            let out = match node.out {
                Output::Value(value) => {
                    let width = if self.in_head { self.vocab_size } else { value.width };
                    let copy = Value { index: self.graph.values, width };
                    self.graph.values += 1;
                    self.values.insert(value.index, copy);
                    if value == self.from.logits {
                        self.graph.logits = copy;
                    }
                    Output::Value(copy)
                }
                Output::Routing(routing) => {
                    let copy = Routing { index: self.graph.routings, ..routing };
                    self.graph.routings += 1;
                    self.routings.insert(routing.index, copy);
                    Output::Routing(copy)
                }
            };
            self.graph.nodes.push(Node { name: node.name.clone(), op, out });
        }
        if let Some(Node { out: Output::Value(last), .. }) = nodes.last() {
            self.residual = self.values.get(&last.index).copied();
        }
        Ok(())
    }

    /// Whether a node is the product that makes the logits.
    fn is_head(&self, node: &Node) -> bool {
        node.out == Output::Value(self.from.logits) && matches!(node.op, Op::Linear(_))
    }

    /// The copy of a value, or the residual stream for the only one from before this part.
    fn copy_of(&mut self, value: Value) -> Option<Value> {
        if let Some(copy) = self.values.get(&value.index) {
            return Some(*copy);
        }
        let is_stream = *self.stream.get_or_insert(value.index) == value.index;
        self.residual.filter(|residual| is_stream && residual.width == value.width)
    }

    /// The copy of a weight; of one with a row a token, as many rows as there are tokens here.
    fn copy_weight(&mut self, id: WeightId, by_token: bool) -> WeightId {
        if let Some(copy) = self.weights.get(&id.0) {
            return *copy;
        }
        let WeightSpec { name, mut matrix } = self.from.weights[id.0].clone();
        match (by_token, matrix.rows) {
            (true, 1) => matrix.cols = self.vocab_size,
            (true, _) => matrix.rows = self.vocab_size,
            (false, _) => {}
        }
        let copy = WeightId(self.graph.weights.len());
        self.graph.weights.push(WeightSpec { name, matrix });
        self.weights.insert(id.0, copy);
        copy
    }
}

/// Exchanges what operations refer to for its copies.
impl Visitor for Excerpt<'_> {
    fn value(&mut self, value: &mut Value) {
        match self.copy_of(*value) {
            Some(copy) => *value = copy,
            None => self.failed = true,
        }
    }

    /// Without a choice of an earlier layer, everything is seen, which takes no less.
    fn chosen(&mut self, chosen: &mut Option<Chosen>) {
        *chosen = chosen.and_then(|chosen| {
            self.values.get(&chosen.blocks.index).map(|blocks| Chosen { blocks: *blocks, ..chosen })
        });
    }

    fn routing(&mut self, routing: &mut Routing) {
        match self.routings.get(&routing.index) {
            Some(copy) => *routing = *copy,
            None => self.failed = true,
        }
    }

    fn weight(&mut self, id: &mut WeightId) {
        *id = self.copy_weight(*id, self.in_head);
    }

    fn token_table(&mut self, table: &mut WeightId) {
        *table = self.copy_weight(*table, true);
    }

    /// Reading a row costs nothing, so neither encodings need be kept nor all rows; a table of its own also where the head has it.
    fn embeddings(&mut self, table: &mut WeightId) {
        self.token_table(table);
        let matrix = &mut self.graph.weights[table.0].matrix;
        (matrix.rows, matrix.dtype) = (matrix.rows.min(TABLE_ROWS), DType::F32);
    }

    /// Reading rows costs nothing here either, so one small table stands for all.
    fn ngram_tables(&mut self, tables: &mut Vec<WeightId>, ngrams: &mut NGrams) {
        ngrams.head_rows.iter_mut().for_each(|rows| *rows = self.vocab_size as u64);
        let table = self.copy_weight(tables[0], false);
        let matrix = &mut self.graph.weights[table.0].matrix;
        (matrix.rows, matrix.dtype) = (ngrams.rows() as usize, DType::F32);
        *tables = vec![table];
    }

    /// Adapters are left out: what they add takes little beside the products.
    fn low_rank(&mut self, all: &mut Vec<LowRank>) {
        all.clear();
    }

    fn expert_low_rank(&mut self, all: &mut Vec<ExpertLowRank>) {
        all.clear();
    }

    fn state(&mut self, id: &mut StateId) {
        self.graph.states.push(self.from.states[id.0]);
        *id = StateId(self.graph.states.len() - 1);
    }

    fn cache(&mut self, id: &mut CacheId) {
        self.graph.caches.push(self.from.caches[id.0]);
        *id = CacheId(self.graph.caches.len() - 1);
    }

    fn latent_cache(&mut self, id: &mut LatentCacheId) {
        self.graph.latent_caches.push(self.from.latent_caches[id.0]);
        *id = LatentCacheId(self.graph.latent_caches.len() - 1);
    }

    fn compressed_cache(&mut self, id: &mut CompressedCacheId) {
        self.graph.compressed_caches.push(self.from.compressed_caches[id.0]);
        *id = CompressedCacheId(self.graph.compressed_caches.len() - 1);
    }

    fn experts(&mut self, id: &mut ExpertSetId) {
        let set = self.from.expert_sets[id.0];
        self.graph.expert_sets.push(ExpertSet { layer: self.graph.expert_sets.len(), ..set });
        *id = ExpertSetId(self.graph.expert_sets.len() - 1);
    }
}
