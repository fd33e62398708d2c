//! What a graph is made of: one operation a node.

use super::{
    BlockChoice, BlockInputs, CacheId, Chosen, CompressedCacheId, CompressedInputs, DeltaInputs, DeltaRule,
    ExpertMlp, ExpertSetId, HyperConnection, IndexInputs, LatentCacheId, LatentInputs, LatentWeights, NGrams,
    Placement, PositionScale, Precision, Route, Routing, SsmInputs, SsmScan, SsmWeights, StateId, Value,
    WeightId, WindowPool,
};

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
        /// (width / groups) for all parts, or (width), f32.
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
        /// (tokens, kv_heads · value_dim).
        v: Value,
        /// Where keys and values live.
        cache: CacheId,
        /// (heads), f32: a logit of each head that joins its softmax and whose probability is dropped.
        sinks: Option<WeightId>,
        /// The tokens that are seen; all when absent.
        chosen: Option<Chosen>,
    },
    /// Appends latents and rotated keys to the cache, then causal multi-head latent attention over it.
    LatentAttention {
        /// What is read.
        inputs: LatentInputs,
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
        /// (rows, gates): one for each of as many equal parts of x, which may be single elements or whole rows.
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
    /// y_t = silu(Σ_j weight\[j\] · x_{t−(kernel−1−j)·dilation} + bias). See [`causal_conv1d`](super::GraphBuilder::causal_conv1d).
    CausalConv1d {
        /// (tokens, channels).
        x: Value,
        /// (channels · kernel), f32: the kernel of each channel, oldest token first.
        weight: WeightId,
        /// (channels), f32: added before silu.
        bias: Option<WeightId>,
        /// Tokens that a result depends on.
        kernel: usize,
        /// Tokens from one of these to the next.
        dilation: usize,
        /// The last (kernel − 1) · dilation inputs, channels each, oldest first.
        state: StateId,
    },
    /// Linear attention by the gated delta rule. See [`gated_delta_rule`](super::GraphBuilder::gated_delta_rule).
    GatedDeltaRule {
        /// What is mixed.
        inputs: DeltaInputs,
        /// (value_heads), f32: A < 0 of the decay exp(A · softplus(a + dt_bias)).
        decay: WeightId,
        /// As wide as a, f32.
        dt_bias: WeightId,
        /// Heads and their widths.
        shape: DeltaRule,
        /// S: (value_heads, key_dim, value_dim).
        state: StateId,
    },
    /// Mamba-2's state space model. See [`ssm_scan`](super::GraphBuilder::ssm_scan).
    SsmScan {
        /// What is written and read.
        inputs: SsmInputs,
        /// What is the same for all tokens.
        weights: SsmWeights,
        /// Heads and their widths.
        shape: SsmScan,
        /// S: (heads, state_size, head_dim).
        state: StateId,
    },
    /// relu(x)² (So et al. 2021).
    SquaredRelu {
        /// (rows, width).
        x: Value,
    },
    /// Root-mean-square norm of each of `groups` equal parts of a row, without a weight.
    UnitNorm {
        /// (rows, width).
        x: Value,
        /// Parts that are normalised on their own.
        groups: usize,
        /// Added to the mean square.
        eps: f32,
    },
    /// Rows times a factor that depends on the token's position.
    PositionScale {
        /// (rows, width).
        x: Value,
        /// Factors.
        scale: PositionScale,
    },
    /// Rotary position embedding at other channels or by other angles than [`Op::Rope`].
    PlacedRope {
        /// (rows, heads · head_dim).
        x: Value,
        /// Heads in a row.
        heads: usize,
        /// Index of the rotation in the graph.
        rope: usize,
        /// Where and by which angles.
        place: Placement,
    },
    /// Part g of a row through rows g of the weight, for each of `groups` equal parts.
    GroupedLinear {
        /// (rows, groups · in).
        x: Value,
        /// (groups · out, in).
        weight: WeightId,
        /// Parts.
        groups: usize,
    },
    /// silu(min(gate, limit)) ⊙ up, with up limited to ±limit.
    LimitedSwiGlu {
        /// (rows, width).
        gate: Value,
        /// (rows, width).
        up: Value,
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
    /// min(silu(gate), limit) ⊙ up, with up limited to ±limit.
    CappedSwiGlu {
        /// (rows, width).
        gate: Value,
        /// (rows, width).
        up: Value,
        /// Largest silu(gate), and largest magnitude of up.
        limit: f32,
    },
    /// Copies of a row side by side.
    Repeat {
        /// (rows, width).
        x: Value,
        /// How many.
        times: usize,
    },
    /// Weights of collapsing, adding to and mixing residual streams. See
    /// [`hyper_weights`](super::GraphBuilder::hyper_weights).
    HyperWeights {
        /// (rows, streams · width).
        x: Value,
        /// (rows, weights): their logits.
        mix: Value,
        /// (weights), f32: added to logits.
        base: WeightId,
        /// (kinds), f32: factors on logits.
        factors: WeightId,
        /// How.
        shape: HyperConnection,
    },
    /// Σ over streams of weight · stream.
    HyperCollapse {
        /// (rows, streams · width).
        x: Value,
        /// (rows, at least streams).
        weights: Value,
        /// Residual streams.
        streams: usize,
    },
    /// Mixes streams and adds a block's result to each.
    HyperExpand {
        /// (rows, streams · width).
        x: Value,
        /// (rows, width).
        block: Value,
        /// (rows, streams · (2 + streams)).
        weights: Value,
        /// Residual streams.
        streams: usize,
    },
    /// Pools the tokens of each window. See [`window_pool`](super::GraphBuilder::window_pool).
    WindowPool {
        /// (tokens, channels).
        kv: Value,
        /// (tokens, channels).
        gate: Value,
        /// (window · channels), f32.
        bias: WeightId,
        /// Windows and channels.
        shape: WindowPool,
        /// kv and gate of the tokens before, oldest first: (held, 2 · channels).
        state: StateId,
    },
    /// Attention over recent tokens and over entries. See
    /// [`compressed_attention`](super::GraphBuilder::compressed_attention).
    CompressedAttention {
        /// What is read.
        inputs: CompressedInputs,
        /// Where tokens and entries live.
        cache: CompressedCacheId,
    },
    /// Experts that a table has for each token, weighted by their scores as [`Op::Route`] does.
    RouteByToken {
        /// (tokens, experts).
        logits: Value,
        /// (vocab_size, top_k): expert ids.
        table: WeightId,
        /// How scores become weights.
        route: Route,
    },
    /// Rows of a table in parts that the last tokens choose. See [`ngram_embed`](super::GraphBuilder::ngram_embed).
    NGramEmbed {
        /// (rows, width) each.
        tables: Vec<WeightId>,
        /// How tokens become rows.
        ngrams: NGrams,
        /// The tokens before, newest first, plus one each; 0 where there are none.
        state: StateId,
    },
    /// silu(factor · x).
    ScaledSilu {
        /// (rows, width).
        x: Value,
        /// Factor.
        factor: f32,
    },
    /// Mean over streams of sigmoid(gate) ⊙ stream.
    GatedMean {
        /// (rows, streams · width).
        x: Value,
        /// The same shape.
        gate: Value,
        /// Residual streams.
        streams: usize,
    },
    /// Adds 2 · sigmoid(logit / streams) · block to each stream.
    StreamAdd {
        /// (rows, streams · width).
        x: Value,
        /// (rows, width).
        block: Value,
        /// (rows, streams).
        logits: Value,
    },
    /// Gates a value for each stream. See [`stream_gate`](super::GraphBuilder::stream_gate).
    StreamGate {
        /// (rows, streams · width).
        keys: Value,
        /// (rows, streams · width).
        queries: Value,
        /// (rows, width).
        value: Value,
    },
    /// Mean of the tokens of each window. See [`window_mean`](super::GraphBuilder::window_mean).
    WindowMean {
        /// (tokens, width).
        x: Value,
        /// Tokens of a window.
        window: usize,
        /// The tokens before, oldest first: (window − 1, width).
        state: StateId,
    },
    /// Attention over the tokens of chosen windows. See [`block_attention`](super::GraphBuilder::block_attention).
    BlockAttention {
        /// What is read.
        inputs: BlockInputs,
        /// Where tokens and keys of windows live.
        cache: CompressedCacheId,
    },
    /// Blocks of tokens for attention to see. See [`choose_blocks`](super::GraphBuilder::choose_blocks).
    ChooseBlocks {
        /// What is compared.
        inputs: IndexInputs,
        /// How.
        choice: BlockChoice,
        /// Where keys live.
        cache: CompressedCacheId,
    },
    /// (x − mean(x)) / √(variance(x) + eps) ⊙ weight + bias (Ba et al. 2016).
    LayerNorm {
        /// (rows, width).
        x: Value,
        /// (width), f32.
        weight: WeightId,
        /// (width), f32.
        bias: WeightId,
        /// Added to the variance.
        eps: f32,
    },
    /// (u + 1) · g · sigmoid(alpha · g), with g = min(gate, limit) and u = up limited to ±limit.
    ClampedSwiGlu {
        /// (rows, width).
        gate: Value,
        /// (rows, width).
        up: Value,
        /// Factor within the sigmoid.
        alpha: f32,
        /// Largest gate, and largest magnitude of up.
        limit: f32,
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
