//! What a model computes: language-model level operations recorded once through [`GraphBuilder`].
//!
//! A value is a matrix of f32 with one row a token (or one row an *output*, after [`GraphBuilder::gather_rows`])
//! and a width that is known when the graph is built. The number of rows is known only when a batch runs, so
//! one graph serves decode and prefill. Weights are declared by name, [`crate::DType`] and shape; their bytes are
//! given to the backend when it compiles the graph, so a model can be recorded, sized and planned from its
//! configuration alone. Routed experts are not even weights of the graph: an [`ExpertSet`] says what they look
//! like, and an [`crate::backend::ExpertSource`] hands them over while the graph runs. That is what makes
//! streaming a matter of placement.
//!
//! Shape errors are caught while recording, so that a backend can rely on every width in a finished graph.

use crate::{DType, Error, Result, Tensor};

mod recurrent;

pub use recurrent::{DeltaInputs, DeltaRule, HeadPairing, StateId};

/// A value in a graph: f32 (rows, width).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value {
    pub(crate) index: usize,
    width: usize,
}

impl Value {
    /// Number of columns.
    pub fn width(self) -> usize {
        self.width
    }
}

/// What a router chose: for each token `top_k` expert ids and their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Routing {
    pub(crate) index: usize,
    top_k: usize,
}

impl Routing {
    /// Experts per token.
    pub fn top_k(self) -> usize {
        self.top_k
    }
}

/// A resident weight of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightId(pub(crate) usize);

/// Key-value storage of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheId(pub usize);

/// Latent storage of one multi-head latent attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LatentCacheId(pub usize);

/// The routed experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertSetId(pub usize);

/// How pairs of channels are formed for rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Channel i rotates with channel i + rotary_dim / 2 (GPT-NeoX, Hugging Face default).
    HalfSplit,
    /// Channel 2i rotates with channel 2i + 1 (original RoFormer).
    Interleaved,
}

/// Rotary position embedding (Su et al., RoFormer, 2021) of the first `2 · inv_freq.len()` channels of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Which channels form a pair.
    pub style: RopeStyle,
    /// Radians per position for each pair.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN's attention factor; 1 without scaling).
    pub magnitude: f32,
}

/// Shape of a causal grouped-query attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head h reads head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on q·k before softmax.
    pub scale: f32,
    /// A key is visible iff query position − key position < window; everything before when absent.
    pub window: Option<usize>,
}

/// Shape of a causal multi-head latent attention (DeepSeek-V2, 2024). All heads share one latent c and one rotated
/// key k_rope a token; head h has the key \[W_k(h)·c | k_rope\] and the value W_v(h)·c.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentAttention {
    /// Query heads.
    pub heads: usize,
    /// Channels of a head that carry no position (`qk_nope_head_dim`).
    pub nope: usize,
    /// Channels of a head that are rotated (`qk_rope_head_dim`).
    pub rope: usize,
    /// Channels of the latent (`kv_lora_rank`).
    pub rank: usize,
    /// Channels of a head's value (`v_head_dim`).
    pub value: usize,
    /// Factor on q·k before softmax.
    pub scale: f32,
}

/// Where W_k and W_v of all heads are, in the forms that checkpoints have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatentWeights {
    /// (heads · (nope + value), rank): each head's W_k, then its W_v (`kv_b_proj`).
    Joint(WeightId),
    /// Apart, W_k transposed, so that it maps a query into the latent space.
    Split {
        /// (heads · rank, nope): each head's W_kᵀ.
        k: WeightId,
        /// (heads · value, rank): each head's W_v.
        v: WeightId,
    },
}

/// What a router's logits are turned into before experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts (Switch Transformer, Mixtral, Qwen).
    Softmax,
    /// Sigmoid of each (DeepSeek-V3).
    Sigmoid,
    /// Experts are chosen by logits; weights are the softmax over the chosen (gpt-oss).
    SoftmaxOfChosen,
}

/// How a group of experts is ranked among groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupRank {
    /// By its best expert (DeepSeek-V2).
    Best,
    /// By the sum of its two best experts (DeepSeek-V3).
    BestTwo,
}

/// Experts are first limited to those of the best groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of equal groups (`n_group`).
    pub count: usize,
    /// Groups that stay (`topk_group`).
    pub keep: usize,
    /// How groups are ranked.
    pub rank: GroupRank,
}

/// How router logits become expert weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// Experts in the layer.
    pub experts: usize,
    /// Experts per token (`num_experts_per_tok`).
    pub top_k: usize,
    /// What logits are turned into.
    pub score: Score,
    /// Limit to the best groups.
    pub groups: Option<Groups>,
    /// Divide the chosen weights by their sum (`norm_topk_prob`).
    pub renormalize: bool,
    /// Factor on the weights at the end (`routed_scaling_factor`).
    pub scale: f32,
}

impl Route {
    /// Softmax over all experts, without groups or factor.
    pub fn softmax(experts: usize, top_k: usize, renormalize: bool) -> Self {
        Self { experts, top_k, score: Score::Softmax, groups: None, renormalize, scale: 1.0 }
    }
}

/// Encoding and shape of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Encoding.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl MatrixSpec {
    /// An f32 vector: norm weights, biases.
    pub fn vector(len: usize) -> Self {
        Self { dtype: DType::F32, rows: 1, cols: len }
    }

    /// Bytes over all planes.
    ///
    /// # Errors
    /// [`Error::RowLength`] if the encoding cannot store such rows.
    pub fn bytes(&self) -> Result<usize> {
        self.dtype.matrix_bytes(self.rows, self.cols)
    }
}

/// How activations enter a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// As [`crate::backend::ActivationMode`] says.
    Fast,
    /// Never quantised: routers, whose choice of experts must not hang on rounding.
    F32,
}

/// A weight of the graph, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSpec {
    /// Name in the model, for errors.
    pub name: String,
    /// Encoding and shape.
    pub matrix: MatrixSpec,
}

/// What every expert of one layer looks like: down(silu(gate·x) ⊙ (up·x)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSet {
    /// Decoder layer.
    pub layer: usize,
    /// Experts in the layer.
    pub experts: usize,
    /// Gate projection (moe_intermediate_size, hidden_size).
    pub gate: MatrixSpec,
    /// Up projection (moe_intermediate_size, hidden_size).
    pub up: MatrixSpec,
    /// Down projection (hidden_size, moe_intermediate_size).
    pub down: MatrixSpec,
}

/// What an expert does to the outputs of its gate and up projections.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Activation {
    /// silu(gate) ⊙ up.
    #[default]
    SwiGlu,
    /// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit (gpt-oss).
    ClampedSwiGlu {
        /// Factor within the sigmoid.
        alpha: f32,
        /// Limit of gate and up.
        limit: f32,
    },
}

/// Biases of the projections of all experts of a layer, f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertBiases {
    /// (experts · moe_intermediate_size).
    pub gate: WeightId,
    /// (experts · moe_intermediate_size).
    pub up: WeightId,
    /// (experts · hidden_size).
    pub down: WeightId,
}

/// What experts compute besides their three products.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertMlp {
    /// Between gate, up and down.
    pub activation: Activation,
    /// Added to the products.
    pub biases: Option<ExpertBiases>,
}

/// One recorded operation. Inputs are named; the output is [`Node::out`] or, for a route, its routing.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// Rows of `table` picked by token id.
    Embed {
        /// (vocab_size, hidden_size).
        table: WeightId,
    },
    /// x · weightᵀ + bias.
    Linear {
        /// (rows, in).
        x: Value,
        /// (out, in).
        weight: WeightId,
        /// (out), f32.
        bias: Option<WeightId>,
        /// How x enters.
        precision: Precision,
    },
    /// Root-mean-square norm (Zhang & Sennrich 2019) of each of `groups` equal parts of a row.
    RmsNorm {
        /// (rows, width).
        x: Value,
        /// (width / groups), f32.
        weight: WeightId,
        /// Parts that are normalised on their own: 1 for a whole row, the head count for per-head norms.
        groups: usize,
        /// Added to the mean square.
        eps: f32,
    },
    /// Rotary position embedding of every head of a row.
    Rope {
        /// (rows, heads · head_dim).
        x: Value,
        /// Heads in a row.
        heads: usize,
        /// Index of the rotation in the graph.
        rope: usize,
    },
    /// Appends k and v to the cache, then causal attention over it.
    Attention {
        /// (tokens, heads · head_dim).
        q: Value,
        /// (tokens, kv_heads · head_dim).
        k: Value,
        /// (tokens, kv_heads · head_dim).
        v: Value,
        /// Where keys and values live.
        cache: CacheId,
        /// (heads), f32: a logit of each head that joins its softmax and whose probability is dropped.
        sinks: Option<WeightId>,
    },
    /// Appends c and k_rope to the cache, then causal multi-head latent attention over it.
    LatentAttention {
        /// (tokens, heads · nope).
        q_nope: Value,
        /// (tokens, heads · rope), rotated.
        q_rope: Value,
        /// (tokens, rank).
        c: Value,
        /// (tokens, rope), rotated.
        k_rope: Value,
        /// W_k and W_v.
        weights: LatentWeights,
        /// Where latents and rotated keys live.
        cache: LatentCacheId,
    },
    /// silu(gate) ⊙ up (Shazeer 2020).
    SwiGlu {
        /// (rows, width).
        gate: Value,
        /// (rows, width).
        up: Value,
    },
    /// a + b.
    Add {
        /// (rows, width).
        a: Value,
        /// (rows, width).
        b: Value,
    },
    /// Limits every element to ±limit.
    Clamp {
        /// (rows, width).
        x: Value,
        /// Largest magnitude let through.
        limit: f32,
    },
    /// Scores, then the `top_k` largest of score + bias (ties: the lower id first), weighted by their scores.
    /// If a logit is not finite, the weights are NaN.
    Route {
        /// (tokens, experts).
        logits: Value,
        /// (experts), f32: added to scores for choosing only (`e_score_correction_bias`).
        bias: Option<WeightId>,
        /// How.
        route: Route,
    },
    /// Σ over the chosen experts, in the router's order, of weight · expert(x).
    MoeExperts {
        /// (tokens, hidden_size).
        x: Value,
        /// Which experts, with what weight.
        routing: Routing,
        /// The layer's experts.
        experts: ExpertSetId,
        /// What they compute.
        mlp: ExpertMlp,
    },
    /// x ⊙ sigmoid(gate).
    SigmoidGate {
        /// (rows, width).
        x: Value,
        /// (rows, width), or (rows, 1) for one gate a row.
        gate: Value,
    },
    /// Columns `start..start + len` of each of `groups` equal parts of a row.
    Slice {
        /// (rows, width).
        x: Value,
        /// Parts of a row.
        groups: usize,
        /// First column in a part.
        start: usize,
        /// Columns of a part.
        len: usize,
    },
    /// Depthwise causal convolution over the tokens of a sequence, then silu:
    /// y_t = silu(Σ_j weight\[j\] · x_{t−kernel+1+j}). See [`GraphBuilder::causal_conv1d`].
    CausalConv1d {
        /// (tokens, channels).
        x: Value,
        /// (channels · kernel), f32: the kernel of each channel, oldest token first.
        weight: WeightId,
        /// Tokens that a result depends on.
        kernel: usize,
        /// The last kernel − 1 inputs: (kernel − 1, channels), oldest first.
        state: StateId,
    },
    /// Linear attention by the gated delta rule. See [`GraphBuilder::gated_delta_rule`].
    GatedDeltaRule {
        /// What is mixed.
        inputs: DeltaInputs,
        /// (value_heads), f32: A < 0 of the decay exp(A · softplus(a + dt_bias)).
        decay: WeightId,
        /// (value_heads), f32.
        dt_bias: WeightId,
        /// Heads and their widths.
        shape: DeltaRule,
        /// S: (value_heads, key_dim, value_dim).
        state: StateId,
    },
    /// Keeps the rows whose logits were asked for.
    GatherRows {
        /// (tokens, width).
        x: Value,
    },
}

/// What a node yields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// A matrix.
    Value(Value),
    /// A router's choice.
    Routing(Routing),
}

/// An operation with its place in the model.
#[derive(Debug, Clone)]
pub struct Node {
    /// Where in the model, for errors and profiles: `layers.3.self_attn`.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Its result.
    pub out: Output,
}

/// A finished model.
#[derive(Debug, Clone)]
pub struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) weights: Vec<WeightSpec>,
    pub(crate) ropes: Vec<Rope>,
    pub(crate) caches: Vec<Attention>,
    pub(crate) states: Vec<usize>,
    pub(crate) latent_caches: Vec<LatentAttention>,
    pub(crate) expert_sets: Vec<ExpertSet>,
    pub(crate) values: usize,
    pub(crate) routings: usize,
    pub(crate) logits: Value,
}

impl Graph {
    /// Operations in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The layers' expert sets, indexed by [`ExpertSetId`].
    pub fn expert_sets(&self) -> &[ExpertSet] {
        &self.expert_sets
    }

    /// Shapes of the attention layers, indexed by [`CacheId`].
    pub fn caches(&self) -> &[Attention] {
        &self.caches
    }

    /// f32 elements of the recurrent states of one sequence, indexed by [`StateId`].
    pub fn states(&self) -> &[usize] {
        &self.states
    }

    /// Shapes of the multi-head latent attention layers, indexed by [`LatentCacheId`].
    pub fn latent_caches(&self) -> &[LatentAttention] {
        &self.latent_caches
    }

    /// Resident weights, in the order of their declaration.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// Width of the logits: the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.logits.width
    }

    /// Checks that `tensors` are the graph's weights, one each, of the declared encoding and shape.
    ///
    /// # Errors
    /// [`Error::Weight`] naming the first that is not.
    pub fn check_weights(&self, tensors: &[Tensor]) -> Result<()> {
        for (index, spec) in self.weights.iter().enumerate() {
            let given =
                tensors.get(index).map(|t| MatrixSpec { dtype: t.dtype(), rows: t.rows(), cols: t.cols() });
            if given != Some(spec.matrix) {
                return Err(Error::Weight { name: spec.name.clone(), expected: spec.matrix, got: given });
            }
        }
        Ok(())
    }
}

/// Records a [`Graph`]; every method checks widths and returns the value it adds.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    nodes: Vec<Node>,
    weights: Vec<WeightSpec>,
    ropes: Vec<Rope>,
    caches: Vec<Attention>,
    states: Vec<usize>,
    latent_caches: Vec<LatentAttention>,
    expert_sets: Vec<ExpertSet>,
    values: usize,
    routings: usize,
    scope: String,
}

fn check(op: &'static str, what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Shape { op, what, expected, got }) }
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names the part of the model that the following nodes belong to.
    pub fn scope(&mut self, name: impl Into<String>) {
        self.scope = name.into();
    }

    /// Declares a resident weight.
    pub fn weight(&mut self, name: impl Into<String>, matrix: MatrixSpec) -> WeightId {
        self.weights.push(WeightSpec { name: name.into(), matrix });
        WeightId(self.weights.len() - 1)
    }

    /// Encoding and shape of a declared weight.
    pub fn matrix(&self, id: WeightId) -> MatrixSpec {
        self.weights[id.0].matrix
    }

    /// Declares the experts of a layer.
    ///
    /// # Errors
    /// [`Error::Shape`] if gate, up and down do not fit together.
    pub fn expert_set(&mut self, set: ExpertSet) -> Result<ExpertSetId> {
        let op = "expert set";
        check(op, "rows of up", set.gate.rows, set.up.rows)?;
        check(op, "columns of up", set.gate.cols, set.up.cols)?;
        check(op, "columns of down", set.gate.rows, set.down.cols)?;
        check(op, "rows of down", set.gate.cols, set.down.rows)?;
        self.expert_sets.push(set);
        Ok(ExpertSetId(self.expert_sets.len() - 1))
    }

    /// Adds a rotation that [`GraphBuilder::rope`] can use; layers with the same rotation share it.
    pub fn rotation(&mut self, rope: Rope) -> usize {
        if let Some(index) = self.ropes.iter().position(|r| *r == rope) {
            return index;
        }
        self.ropes.push(rope);
        self.ropes.len() - 1
    }

    fn push(&mut self, op: Op, width: usize) -> Value {
        let out = Value { index: self.values, width };
        self.values += 1;
        self.nodes.push(Node { name: self.scope.clone(), op, out: Output::Value(out) });
        out
    }

    fn vector(&self, op: &'static str, what: &'static str, id: WeightId, len: usize) -> Result<()> {
        let weight = self.matrix(id);
        if weight.dtype != DType::F32 {
            return Err(Error::Unsupported { what: op, dtype: weight.dtype });
        }
        check(op, what, len, weight.rows.saturating_mul(weight.cols))
    }

    /// Token embeddings: (tokens, hidden_size).
    pub fn embed(&mut self, table: WeightId) -> Value {
        let width = self.matrix(table).cols;
        self.push(Op::Embed { table }, width)
    }

    /// x · weightᵀ (+ bias).
    ///
    /// # Errors
    /// [`Error::Shape`] if weight or bias do not fit x; [`Error::Unsupported`] if the bias is not f32.
    pub fn linear(
        &mut self,
        x: Value,
        weight: WeightId,
        bias: Option<WeightId>,
        precision: Precision,
    ) -> Result<Value> {
        let MatrixSpec { rows, cols, .. } = self.matrix(weight);
        check("linear", "columns of the weight", x.width, cols)?;
        if let Some(bias) = bias {
            self.vector("linear", "length of the bias", bias, rows)?;
        }
        Ok(self.push(Op::Linear { x, weight, bias, precision }, rows))
    }

    /// Root-mean-square norm of each of `groups` equal parts of a row.
    ///
    /// # Errors
    /// [`Error::Shape`] if the weight does not fit a part.
    pub fn rms_norm(&mut self, x: Value, weight: WeightId, groups: usize, eps: f32) -> Result<Value> {
        check("rms_norm", "width left over by groups", 0, x.width % groups.max(1))?;
        self.vector("rms_norm", "length of the weight", weight, x.width / groups.max(1))?;
        Ok(self.push(Op::RmsNorm { x, weight, groups, eps }, x.width))
    }

    /// Rotary embedding of each of `heads` heads of a row, by a rotation from [`GraphBuilder::rotation`].
    ///
    /// # Errors
    /// [`Error::Shape`] if a head is narrower than the rotation.
    pub fn rope(&mut self, x: Value, heads: usize, rope: usize) -> Result<Value> {
        check("rope", "width left over by heads", 0, x.width % heads.max(1))?;
        let (head_dim, rotary) = (x.width / heads.max(1), 2 * self.ropes[rope].inv_freq.len());
        if rotary > head_dim {
            return Err(Error::Shape { op: "rope", what: "rotary width", expected: head_dim, got: rotary });
        }
        Ok(self.push(Op::Rope { x, heads, rope }, x.width))
    }

    /// Appends k and v to a new cache and attends over it.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths and head counts do not fit.
    pub fn attention(&mut self, q: Value, k: Value, v: Value, shape: Attention) -> Result<Value> {
        self.attention_with_sinks(q, k, v, shape, None)
    }

    /// As [`GraphBuilder::attention`], with a logit of each head in the denominator of its softmax (attention sinks:
    /// gpt-oss).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths and head counts do not fit; [`Error::Unsupported`] if sinks are not f32.
    pub fn attention_with_sinks(
        &mut self,
        q: Value,
        k: Value,
        v: Value,
        shape: Attention,
        sinks: Option<WeightId>,
    ) -> Result<Value> {
        let op = "attention";
        if let Some(sinks) = sinks {
            self.vector(op, "sinks", sinks, shape.heads)?;
        }
        check(op, "query heads left over by kv heads", 0, shape.heads % shape.kv_heads.max(1))?;
        check(op, "width of q", shape.heads * shape.head_dim, q.width)?;
        check(op, "width of k", shape.kv_heads * shape.head_dim, k.width)?;
        check(op, "width of v", shape.kv_heads * shape.head_dim, v.width)?;
        self.caches.push(shape);
        let cache = CacheId(self.caches.len() - 1);
        Ok(self.push(Op::Attention { q, k, v, cache, sinks }, q.width))
    }

    /// Appends c and k_rope to a new cache and attends over it: (tokens, heads · value).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths or weights do not fit the shape.
    pub fn latent_attention(
        &mut self,
        [q_nope, q_rope]: [Value; 2],
        [c, k_rope]: [Value; 2],
        weights: LatentWeights,
        shape: LatentAttention,
    ) -> Result<Value> {
        let op = "latent_attention";
        check(op, "width of q_nope", shape.heads * shape.nope, q_nope.width)?;
        check(op, "width of q_rope", shape.heads * shape.rope, q_rope.width)?;
        check(op, "width of c", shape.rank, c.width)?;
        check(op, "width of k_rope", shape.rope, k_rope.width)?;
        let matrix = |id: WeightId, rows: &'static str, expected: usize, cols: &'static str, width: usize| {
            let weight = self.matrix(id);
            check(op, rows, expected, weight.rows)?;
            check(op, cols, width, weight.cols)
        };
        match weights {
            LatentWeights::Joint(id) => {
                let rows = shape.heads * (shape.nope + shape.value);
                matrix(id, "rows of the joint weight", rows, "columns of the joint weight", shape.rank)?;
            }
            LatentWeights::Split { k, v } => {
                let (k_rows, v_rows) = (shape.heads * shape.rank, shape.heads * shape.value);
                matrix(k, "rows of the key weight", k_rows, "columns of the key weight", shape.nope)?;
                matrix(v, "rows of the value weight", v_rows, "columns of the value weight", shape.rank)?;
            }
        }
        self.latent_caches.push(shape);
        let cache = LatentCacheId(self.latent_caches.len() - 1);
        let op = Op::LatentAttention { q_nope, q_rope, c, k_rope, weights, cache };
        Ok(self.push(op, shape.heads * shape.value))
    }

    /// silu(gate) ⊙ up.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value> {
        check("swiglu", "width of up", gate.width, up.width)?;
        Ok(self.push(Op::SwiGlu { gate, up }, gate.width))
    }

    /// a + b.
    ///
    /// # Errors
    /// [`Error::Shape`] if widths differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        check("add", "width of b", a.width, b.width)?;
        Ok(self.push(Op::Add { a, b }, a.width))
    }

    /// x limited to ±limit.
    pub fn clamp(&mut self, x: Value, limit: f32) -> Value {
        self.push(Op::Clamp { x, limit }, x.width)
    }

    /// The router: which experts, with what weight; `bias` is added to scores for choosing only.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is not one logit (and bias) an expert, top_k is not within 1..=experts, or groups do
    /// not divide the experts or keep too few of them.
    pub fn route(&mut self, logits: Value, bias: Option<WeightId>, route: Route) -> Result<Routing> {
        let op = "route";
        check(op, "logits", route.experts, logits.width)?;
        if let Some(bias) = bias {
            self.vector(op, "length of the bias", bias, route.experts)?;
        }
        let mut choosable = route.experts;
        if let Some(groups) = route.groups {
            check(op, "experts left over by groups", 0, route.experts % groups.count.max(1))?;
            if groups.keep == 0 || groups.keep > groups.count {
                let (expected, got) = (groups.count, groups.keep);
                return Err(Error::Shape { op, what: "groups kept", expected, got });
            }
            choosable = route.experts / groups.count * groups.keep;
        }
        if route.top_k == 0 || route.top_k > choosable {
            return Err(Error::Shape { op, what: "top_k", expected: choosable, got: route.top_k });
        }
        let out = Routing { index: self.routings, top_k: route.top_k };
        self.routings += 1;
        let op = Op::Route { logits, bias, route };
        self.nodes.push(Node { name: self.scope.clone(), op, out: Output::Routing(out) });
        Ok(out)
    }

    /// Weighted sum of the chosen experts.
    ///
    /// # Errors
    /// [`Error::Shape`] if the experts do not take x.
    pub fn moe_experts(&mut self, x: Value, routing: Routing, experts: ExpertSetId) -> Result<Value> {
        self.moe_experts_with(x, routing, experts, ExpertMlp::default())
    }

    /// As [`GraphBuilder::moe_experts`], for experts with biases or another activation.
    ///
    /// # Errors
    /// [`Error::Shape`] if the experts do not take x or biases do not fit; [`Error::Unsupported`] if biases are not
    /// f32.
    pub fn moe_experts_with(
        &mut self,
        x: Value,
        routing: Routing,
        experts: ExpertSetId,
        mlp: ExpertMlp,
    ) -> Result<Value> {
        let (op, set) = ("moe_experts", self.expert_sets[experts.0]);
        check(op, "columns of gate", x.width, set.gate.cols)?;
        if let Some(ExpertBiases { gate, up, down }) = mlp.biases {
            self.vector(op, "biases of gate", gate, set.experts * set.gate.rows)?;
            self.vector(op, "biases of up", up, set.experts * set.up.rows)?;
            self.vector(op, "biases of down", down, set.experts * set.down.rows)?;
        }
        Ok(self.push(Op::MoeExperts { x, routing, experts, mlp }, x.width))
    }

    /// x ⊙ sigmoid(gate), with one gate an element or one a row.
    ///
    /// # Errors
    /// [`Error::Shape`] if the gate has another width.
    pub fn sigmoid_gate(&mut self, x: Value, gate: Value) -> Result<Value> {
        if gate.width != 1 {
            check("sigmoid_gate", "width of the gate", x.width, gate.width)?;
        }
        Ok(self.push(Op::SigmoidGate { x, gate }, x.width))
    }

    /// Columns `start..start + len` of each of `groups` equal parts of a row, side by side.
    ///
    /// # Errors
    /// [`Error::Shape`] if parts are not equal or shorter than that.
    pub fn slice(&mut self, x: Value, groups: usize, start: usize, len: usize) -> Result<Value> {
        check("slice", "width left over by groups", 0, x.width % groups.max(1))?;
        let (part, end) = (x.width / groups.max(1), start.saturating_add(len));
        if len == 0 || end > part {
            return Err(Error::Shape { op: "slice", what: "end of the columns", expected: part, got: end });
        }
        Ok(self.push(Op::Slice { x, groups, start, len }, groups * len))
    }

    /// Keeps the rows whose logits were asked for.
    pub fn gather_rows(&mut self, x: Value) -> Value {
        self.push(Op::GatherRows { x }, x.width)
    }

    /// Ends the recording with `logits` (outputs, vocab_size) as the result.
    pub fn finish(self, logits: Value) -> Graph {
        Graph {
            nodes: self.nodes,
            weights: self.weights,
            ropes: self.ropes,
            caches: self.caches,
            states: self.states,
            latent_caches: self.latent_caches,
            expert_sets: self.expert_sets,
            values: self.values,
            routings: self.routings,
            logits,
        }
    }
}
