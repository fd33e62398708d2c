//! Excerpts: graphs of some of a model's layers, which do for each layer exactly what the model does.
//!
//! Layers of a model do the same work in few variants, so running one of each says how long all of them take. A layer
//! takes the residual stream and leaves it: in an excerpt it takes what the layer before it leaves there, whichever that
//! is. Layers are told apart by the names of nodes (`layers.3.mlp`); what has no such name is the embedding or the head,
//! which every excerpt has, with fewer tokens than the model.

use std::collections::HashMap;

use super::*;
use crate::{Error, Result};

/// The number in `layers.3.mlp`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

impl Graph {
    /// Decoder layers, by what they do: numbers of layers that do the same, kinds and numbers ascending.
    ///
    /// # Errors
    /// As [`Graph::excerpt`].
    pub fn layer_kinds(&self) -> Result<Vec<Vec<usize>>> {
        let mut numbers: Vec<usize> = self.nodes.iter().filter_map(|node| layer(&node.name)).collect();
        numbers.dedup();
        let mut kinds: Vec<(Work, Vec<usize>)> = vec![];
        for number in numbers {
            let work = Work::of(&self.excerpt(&[number], 1)?);
            match kinds.iter_mut().find(|(other, _)| *other == work) {
                Some((_, layers)) => layers.push(number),
                None => kinds.push((work, vec![number])),
            }
        }
        Ok(kinds.into_iter().map(|(_, layers)| layers).collect())
    }

    /// The graph of `layers` only, one after the other, with weights, caches and experts of its own for each, however
    /// often one is named. Its embedding and its head have `vocab_size` tokens, or the model's if those are fewer.
    ///
    /// # Errors
    /// [`Error::Excerpt`] if a layer takes more from those before it than the residual stream.
    pub fn excerpt(&self, layers: &[usize], vocab_size: usize) -> Result<Graph> {
        let of_layer =
            |number: Option<usize>| self.nodes.iter().filter(move |n| layer(&n.name) == number).collect();
        let outside: Vec<&Node> = of_layer(None);
        let first = self.nodes.iter().position(|n| layer(&n.name).is_some()).unwrap_or(1);
        let (before, after) = outside.split_at(first.min(outside.len()));
        let mut excerpt = Excerpt::new(self, vocab_size);
        excerpt.append(before)?;
        for number in layers {
            excerpt.weights.clear();
            let nodes: Vec<&Node> = of_layer(Some(*number));
            excerpt.append(&nodes)?;
        }
        excerpt.weights.clear();
        excerpt.append(after)?;
        Ok(excerpt.graph)
    }
}

/// What a graph does, without names.
#[derive(PartialEq)]
struct Work {
    ops: Vec<Op>,
    weights: Vec<MatrixSpec>,
    caches: Vec<super::Attention>,
    latent_caches: Vec<super::LatentAttention>,
    compressed_caches: Vec<super::CompressedAttention>,
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
        Self { from, vocab_size, graph, values, weights, routings, residual: None, stream: None }
    }

    /// Copies nodes that belong together.
    fn append(&mut self, nodes: &[&Node]) -> Result<()> {
        self.values.clear();
        self.stream = None;
        for node in nodes {
            let op = self.op(node)?;
            let out = match node.out {
                Output::Value(value) => {
                    let width = if self.is_head(node) { self.vocab_size } else { value.width };
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
    fn value(&mut self, value: Value) -> Result<Value> {
        if let Some(copy) = self.values.get(&value.index) {
            return Ok(*copy);
        }
        let is_stream = *self.stream.get_or_insert(value.index) == value.index;
        self.residual.filter(|residual| is_stream && residual.width == value.width).ok_or(Error::Excerpt)
    }

    /// The copy of a weight; of one with a row a token, as many rows as there are tokens here.
    fn weight(&mut self, id: WeightId, by_token: bool) -> WeightId {
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

    fn cache(&mut self, id: CacheId) -> CacheId {
        self.graph.caches.push(self.from.caches[id.0]);
        CacheId(self.graph.caches.len() - 1)
    }

    fn latent_cache(&mut self, id: LatentCacheId) -> LatentCacheId {
        self.graph.latent_caches.push(self.from.latent_caches[id.0]);
        LatentCacheId(self.graph.latent_caches.len() - 1)
    }

    fn compressed_cache(&mut self, id: CompressedCacheId) -> CompressedCacheId {
        self.graph.compressed_caches.push(self.from.compressed_caches[id.0]);
        CompressedCacheId(self.graph.compressed_caches.len() - 1)
    }

    fn state(&mut self, id: StateId) -> StateId {
        self.graph.states.push(self.from.states[id.0]);
        StateId(self.graph.states.len() - 1)
    }

    fn experts(&mut self, id: ExpertSetId) -> ExpertSetId {
        let set = self.from.expert_sets[id.0];
        self.graph.expert_sets.push(super::ExpertSet { layer: self.graph.expert_sets.len(), ..set });
        ExpertSetId(self.graph.expert_sets.len() - 1)
    }

    /// A choice of this part. Without that of an earlier layer, everything is seen, which takes no less.
    fn chosen(&self, chosen: Option<Chosen>) -> Option<Chosen> {
        let chosen = chosen?;
        self.values.get(&chosen.blocks.index).map(|blocks| Chosen { blocks: *blocks, ..chosen })
    }

    fn index(&mut self, IndexInputs { q, k, weights }: IndexInputs) -> Result<IndexInputs> {
        Ok(IndexInputs {
            q: self.value(q)?,
            k: self.value(k)?,
            weights: weights.map(|weights| self.value(weights)).transpose()?,
        })
    }

    fn op(&mut self, node: &Node) -> Result<Op> {
        let head = self.is_head(node);
        Ok(match node.op.clone() {
            // Reading a row costs nothing, so encodings need not be kept; a table of its own also where the head has it.
            Op::Embed(EmbedOp { table }) => {
                let table = self.weight(table, true);
                self.graph.weights[table.0].matrix.dtype = crate::DType::F32;
                Op::Embed(EmbedOp { table })
            }
            Op::Linear(LinearOp { x, weight, bias, precision }) => Op::Linear(LinearOp {
                x: self.value(x)?,
                weight: self.weight(weight, head),
                bias: bias.map(|bias| self.weight(bias, head)),
                precision,
            }),
            Op::Attention(AttentionOp { q, k, v, cache, sinks, chosen }) => Op::Attention(AttentionOp {
                q: self.value(q)?,
                k: self.value(k)?,
                v: self.value(v)?,
                cache: self.cache(cache),
                sinks: sinks.map(|sinks| self.weight(sinks, false)),
                chosen: self.chosen(chosen),
            }),
            Op::LatentAttention(LatentAttentionOp { inputs, weights, cache }) => {
                Op::LatentAttention(LatentAttentionOp {
                    inputs: LatentInputs {
                        q_nope: self.value(inputs.q_nope)?,
                        c: self.value(inputs.c)?,
                        rotated: match inputs.rotated {
                            Some([q, k]) => Some([self.value(q)?, self.value(k)?]),
                            None => None,
                        },
                        sinks: inputs.sinks.map(|sinks| self.weight(sinks, false)),
                        chosen: self.chosen(inputs.chosen),
                    },
                    weights: match weights {
                        LatentWeights::Joint(id) => LatentWeights::Joint(self.weight(id, false)),
                        LatentWeights::Split { k, v } => {
                            LatentWeights::Split { k: self.weight(k, false), v: self.weight(v, false) }
                        }
                    },
                    cache: self.latent_cache(cache),
                })
            }
            Op::Activate(ActivateOp { activation, gate, up }) => Op::Activate(ActivateOp {
                activation,
                gate: gate.map(|gate| self.value(gate)).transpose()?,
                up: self.value(up)?,
            }),
            Op::RmsNorm(RmsNormOp { x, weight, groups, eps }) => Op::RmsNorm(RmsNormOp {
                x: self.value(x)?,
                weight: weight.map(|weight| self.weight(weight, false)),
                groups,
                eps,
            }),
            Op::Rope(RopeOp { x, heads, rope, place }) => {
                Op::Rope(RopeOp { x: self.value(x)?, heads, rope, place })
            }
            Op::Route(RouteOp { logits, by, route }) => Op::Route(RouteOp {
                logits: self.value(logits)?,
                by: match by {
                    RouteBy::Scores { bias } => {
                        RouteBy::Scores { bias: bias.map(|bias| self.weight(bias, false)) }
                    }
                    RouteBy::Tokens { table } => RouteBy::Tokens { table: self.weight(table, true) },
                },
                route,
            }),
            Op::Add(AddOp { a, b }) => Op::Add(AddOp { a: self.value(a)?, b: self.value(b)? }),
            Op::Clamp(ClampOp { x, limit }) => Op::Clamp(ClampOp { x: self.value(x)?, limit }),
            Op::MoeExperts(MoeExpertsOp { x, routing, experts, mlp }) => {
                let biases = mlp.biases.map(|biases| ExpertBiases {
                    gate: self.weight(biases.gate, false),
                    up: self.weight(biases.up, false),
                    down: self.weight(biases.down, false),
                });
                Op::MoeExperts(MoeExpertsOp {
                    x: self.value(x)?,
                    routing: *self.routings.get(&routing.index).ok_or(Error::Excerpt)?,
                    experts: self.experts(experts),
                    mlp: ExpertMlp { biases, ..mlp },
                })
            }
            Op::SigmoidGate(SigmoidGateOp { x, gate }) => {
                Op::SigmoidGate(SigmoidGateOp { x: self.value(x)?, gate: self.value(gate)? })
            }
            Op::Slice(SliceOp { x, groups, start, len }) => {
                Op::Slice(SliceOp { x: self.value(x)?, groups, start, len })
            }
            Op::CausalConv1d(CausalConv1dOp { x, weight, bias, kernel, dilation, state }) => {
                Op::CausalConv1d(CausalConv1dOp {
                    x: self.value(x)?,
                    weight: self.weight(weight, false),
                    bias: bias.map(|bias| self.weight(bias, false)),
                    kernel,
                    dilation,
                    state: self.state(state),
                })
            }
            Op::GatedDeltaRule(GatedDeltaRuleOp {
                inputs: DeltaInputs { q, k, v, a, b },
                decay,
                dt_bias,
                shape,
                state,
            }) => {
                let [q, k, v, a, b] =
                    [self.value(q)?, self.value(k)?, self.value(v)?, self.value(a)?, self.value(b)?];
                Op::GatedDeltaRule(GatedDeltaRuleOp {
                    inputs: DeltaInputs { q, k, v, a, b },
                    decay: self.weight(decay, false),
                    dt_bias: self.weight(dt_bias, false),
                    shape,
                    state: self.state(state),
                })
            }
            Op::SsmScan(SsmScanOp { inputs: SsmInputs { x, b, c, dt }, weights, shape, state }) => {
                Op::SsmScan(SsmScanOp {
                    inputs: SsmInputs {
                        x: self.value(x)?,
                        b: self.value(b)?,
                        c: self.value(c)?,
                        dt: self.value(dt)?,
                    },
                    weights: SsmWeights {
                        a: self.weight(weights.a, false),
                        d: self.weight(weights.d, false),
                        dt_bias: self.weight(weights.dt_bias, false),
                    },
                    shape,
                    state: self.state(state),
                })
            }
            Op::PositionScale(PositionScaleOp { x, scale }) => {
                Op::PositionScale(PositionScaleOp { x: self.value(x)?, scale })
            }
            Op::GroupedLinear(GroupedLinearOp { x, weight, groups }) => Op::GroupedLinear(GroupedLinearOp {
                x: self.value(x)?,
                weight: self.weight(weight, false),
                groups,
            }),
            Op::Repeat(RepeatOp { x, times }) => Op::Repeat(RepeatOp { x: self.value(x)?, times }),
            Op::HyperWeights(HyperWeightsOp { x, mix, base, factors, shape }) => {
                Op::HyperWeights(HyperWeightsOp {
                    x: self.value(x)?,
                    mix: self.value(mix)?,
                    base: self.weight(base, false),
                    factors: self.weight(factors, false),
                    shape,
                })
            }
            Op::HyperCollapse(HyperCollapseOp { x, weights, streams }) => {
                Op::HyperCollapse(HyperCollapseOp {
                    x: self.value(x)?,
                    weights: self.value(weights)?,
                    streams,
                })
            }
            Op::HyperExpand(HyperExpandOp { x, block, weights, streams }) => Op::HyperExpand(HyperExpandOp {
                x: self.value(x)?,
                block: self.value(block)?,
                weights: self.value(weights)?,
                streams,
            }),
            Op::WindowPool(WindowPoolOp { kv, gate, bias, shape, state }) => Op::WindowPool(WindowPoolOp {
                kv: self.value(kv)?,
                gate: self.value(gate)?,
                bias: self.weight(bias, false),
                shape,
                state: self.state(state),
            }),
            Op::CompressedAttention(CompressedAttentionOp { inputs, cache }) => {
                Op::CompressedAttention(CompressedAttentionOp {
                    inputs: CompressedInputs {
                        q: self.value(inputs.q)?,
                        kv: self.value(inputs.kv)?,
                        entries: self.value(inputs.entries)?,
                        index: inputs.index.map(|index| self.index(index)).transpose()?,
                        sinks: self.weight(inputs.sinks, false),
                    },
                    cache: self.compressed_cache(cache),
                })
            }
            // Reading rows costs nothing here either, so one small table stands for all.
            Op::NGramEmbed(NGramEmbedOp { tables, mut ngrams, state }) => {
                ngrams.head_rows.iter_mut().for_each(|rows| *rows = self.vocab_size as u64);
                let table = self.weight(tables[0], false);
                let matrix = &mut self.graph.weights[table.0].matrix;
                (matrix.rows, matrix.dtype) = (ngrams.rows() as usize, crate::DType::F32);
                Op::NGramEmbed(NGramEmbedOp { tables: vec![table], ngrams, state: self.state(state) })
            }
            Op::ScaledSilu(ScaledSiluOp { x, factor }) => {
                Op::ScaledSilu(ScaledSiluOp { x: self.value(x)?, factor })
            }
            Op::GatedMean(GatedMeanOp { x, gate, streams }) => {
                Op::GatedMean(GatedMeanOp { x: self.value(x)?, gate: self.value(gate)?, streams })
            }
            Op::StreamAdd(StreamAddOp { x, block, logits }) => Op::StreamAdd(StreamAddOp {
                x: self.value(x)?,
                block: self.value(block)?,
                logits: self.value(logits)?,
            }),
            Op::StreamGate(StreamGateOp { keys, queries, value }) => Op::StreamGate(StreamGateOp {
                keys: self.value(keys)?,
                queries: self.value(queries)?,
                value: self.value(value)?,
            }),
            Op::WindowMean(WindowMeanOp { x, window, state }) => {
                Op::WindowMean(WindowMeanOp { x: self.value(x)?, window, state: self.state(state) })
            }
            Op::BlockAttention(BlockAttentionOp { inputs: BlockInputs { q, k, v, index }, cache }) => {
                Op::BlockAttention(BlockAttentionOp {
                    inputs: BlockInputs {
                        q: self.value(q)?,
                        k: self.value(k)?,
                        v: self.value(v)?,
                        index: self.index(index)?,
                    },
                    cache: self.compressed_cache(cache),
                })
            }
            Op::ChooseBlocks(ChooseBlocksOp { inputs, choice, cache }) => Op::ChooseBlocks(ChooseBlocksOp {
                inputs: self.index(inputs)?,
                choice,
                cache: self.compressed_cache(cache),
            }),
            Op::LayerNorm(LayerNormOp { x, weight, bias, eps }) => Op::LayerNorm(LayerNormOp {
                x: self.value(x)?,
                weight: self.weight(weight, false),
                bias: self.weight(bias, false),
                eps,
            }),
            Op::GatherRows(GatherRowsOp { x }) => Op::GatherRows(GatherRowsOp { x: self.value(x)? }),
        })
    }
}
