//! Rotary embedding, and attention over keys and values or over latents.

use super::builder::check;
use super::operation::{Operation, Refers, Visitor, refers};
use super::selection::check_chosen;
use super::{CacheId, Chosen, GraphBuilder, LatentCacheId, Value, WeightId};
use crate::{Error, Result};

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
    /// Channels of a head's value.
    pub value_dim: usize,
    /// A key is visible iff query position − key position < window; everything before when absent.
    pub window: Option<usize>,
    /// A key is visible iff it is in the same chunk of so many positions as the query (Llama 4).
    pub chunk: Option<usize>,
    /// Whether a query sees keys after its own, as far as the batch says (`Batch::sees`).
    pub ahead: bool,
}

impl Attention {
    /// Over everything before, with values as wide as keys.
    pub fn grouped(heads: usize, kv_heads: usize, head_dim: usize, scale: f32) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            scale,
            value_dim: head_dim,
            window: None,
            chunk: None,
            ahead: false,
        }
    }
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

/// What a latent attention reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentInputs {
    /// (tokens, heads · nope).
    pub q_nope: Value,
    /// (tokens, rank).
    pub c: Value,
    /// Of queries (tokens, heads · rope) and of keys (tokens, rope), rotated; absent if no channel is.
    pub rotated: Option<[Value; 2]>,
    /// (heads), f32: a logit of each head that joins its softmax and whose probability is dropped.
    pub sinks: Option<WeightId>,
    /// The tokens that are seen; all when absent.
    pub chosen: Option<Chosen>,
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

/// Appends k and v to the cache, then causal attention over it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOp {
    /// (tokens, heads · head_dim).
    pub q: Value,
    /// (tokens, kv_heads · head_dim).
    pub k: Value,
    /// (tokens, kv_heads · value_dim).
    pub v: Value,
    /// Where keys and values live.
    pub cache: CacheId,
    /// (heads), f32: a logit of each head that joins its softmax and whose probability is dropped.
    pub sinks: Option<WeightId>,
    /// The tokens that are seen; all when absent.
    pub chosen: Option<Chosen>,
    /// (tokens, heads · extent): added to a head's score of a key that is as far behind the query as the column says; nothing is
    /// added to those farther behind.
    pub by_distance: Option<Value>,
}

refers!(AttentionOp { q, k, v, cache, sinks, chosen, by_distance });

impl Operation for AttentionOp {
    const NAME: &'static str = "attention";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, Self { q, k, v, sinks, chosen, by_distance, .. }) = (Self::NAME, *self);
        let shape = graph.caches[self.cache.0];
        check_chosen(op, chosen, shape.heads)?;
        if chosen.is_some() && (shape.window.is_some() || shape.chunk.is_some()) {
            return Err(Error::Shape { op, what: "windows over chosen tokens", expected: 0, got: 1 });
        }
        if let Some(added) = by_distance {
            check(op, "choices beside what is added by distance", 0, usize::from(chosen.is_some()))?;
            check(op, "sight ahead beside what is added by distance", 0, usize::from(shape.ahead))?;
            check(op, "columns left over by heads", 0, added.width % shape.heads.max(1))?;
        }
        if let Some(sinks) = sinks {
            graph.vector(op, "sinks", sinks, shape.heads)?;
        }
        check(op, "query heads left over by kv heads", 0, shape.heads % shape.kv_heads.max(1))?;
        check(op, "width of q", shape.heads * shape.head_dim, q.width)?;
        check(op, "width of k", shape.kv_heads * shape.head_dim, k.width)?;
        check(op, "width of v", shape.kv_heads * shape.value_dim, v.width)?;
        if shape.chunk == Some(0) {
            return Err(Error::Shape { op, what: "chunk", expected: 1, got: 0 });
        }
        Ok(shape.heads * shape.value_dim)
    }
}

/// Attention in which every row sees all rows of its span, those after it too. Nothing is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BidirectionalAttentionOp {
    /// (rows, heads · head_dim).
    pub q: Value,
    /// (rows, heads · head_dim).
    pub k: Value,
    /// (rows, heads · head_dim).
    pub v: Value,
    /// Heads of queries, keys and values.
    pub heads: usize,
    /// Factor on q·k before softmax.
    pub scale: f32,
}

refers!(BidirectionalAttentionOp { q, k, v, heads, scale });

impl Operation for BidirectionalAttentionOp {
    const NAME: &'static str = "bidirectional_attention";

    fn width(&self, _: &GraphBuilder) -> Result<usize> {
        let (op, Self { q, k, v, heads, .. }) = (Self::NAME, *self);
        check(op, "width of q left over by heads", 0, q.width % heads.max(1))?;
        check(op, "width of k", q.width, k.width)?;
        check(op, "width of v", q.width, v.width)?;
        Ok(q.width)
    }
}

/// Appends latents and rotated keys to the cache, then causal multi-head latent attention over it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentAttentionOp {
    /// What is read.
    pub inputs: LatentInputs,
    /// W_k and W_v.
    pub weights: LatentWeights,
    /// Where latents and rotated keys live.
    pub cache: LatentCacheId,
}

refers!(LatentAttentionOp { inputs, weights, cache });

impl Operation for LatentAttentionOp {
    const NAME: &'static str = "latent_attention";

    fn width(&self, graph: &GraphBuilder) -> Result<usize> {
        let (op, inputs) = (Self::NAME, self.inputs);
        let shape = graph.latent_caches[self.cache.0];
        let [q_rope, k_rope] = inputs.rotated.map_or([0, 0], |rotated| rotated.map(|x| x.width));
        check(op, "width of q_nope", shape.heads * shape.nope, inputs.q_nope.width)?;
        check(op, "width of q_rope", shape.heads * shape.rope, q_rope)?;
        check(op, "width of c", shape.rank, inputs.c.width)?;
        check(op, "width of k_rope", shape.rope, k_rope)?;
        check_chosen(op, inputs.chosen, shape.heads)?;
        if let Some(Chosen { groups: 2.., .. }) = inputs.chosen {
            return Err(Error::Shape { op, what: "choices of a query", expected: 1, got: 2 });
        }
        if let Some(sinks) = inputs.sinks {
            graph.vector(op, "sinks", sinks, shape.heads)?;
        }
        let matrix = |id: WeightId, rows: &'static str, expected: usize, cols: &'static str, width: usize| {
            let weight = graph.matrix(id);
            check(op, rows, expected, weight.rows)?;
            check(op, cols, width, weight.cols)
        };
        match self.weights {
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
        Ok(shape.heads * shape.value)
    }
}

refers!(LatentInputs { q_nope, c, rotated, sinks, chosen });

impl Refers for LatentWeights {
    fn visit(&mut self, visitor: &mut dyn Visitor) {
        match self {
            Self::Joint(id) => visitor.weight(id),
            Self::Split { k, v } => [k, v].into_iter().for_each(|id| visitor.weight(id)),
        }
    }
}

impl GraphBuilder {
    /// Attention in which every row sees all rows of its span.
    ///
    /// # Errors
    /// [`Error::Shape`] if q, k and v are not of the same width, or heads are not equal parts of it.
    pub fn bidirectional_attention(
        &mut self,
        [q, k, v]: [Value; 3],
        heads: usize,
        scale: f32,
    ) -> Result<Value> {
        self.record(BidirectionalAttentionOp { q, k, v, heads: heads.max(1), scale })
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
        self.attention_over([q, k, v], shape, sinks, None)
    }

    /// As [`GraphBuilder::attention_with_sinks`], over the tokens that were chosen for each query.
    ///
    /// # Errors
    /// As [`GraphBuilder::attention_with_sinks`], and if the choice is for another number of heads.
    pub fn attention_over(
        &mut self,
        [q, k, v]: [Value; 3],
        shape: Attention,
        sinks: Option<WeightId>,
        chosen: Option<Chosen>,
    ) -> Result<Value> {
        self.caches.push(shape);
        let cache = CacheId(self.caches.len() - 1);
        self.record(AttentionOp { q, k, v, cache, sinks, chosen, by_distance: None })
    }

    /// As [`GraphBuilder::attention`], with `added` to scores by how far a key is behind its query: (tokens, heads · extent)
    /// values, of which one for each distance below the extent (Inkling, transformers' `modeling_inkling.py`).
    ///
    /// # Errors
    /// As [`GraphBuilder::attention`], and if heads are not equal parts of `added`, or queries see keys after them.
    pub fn attention_by_distance(
        &mut self,
        [q, k, v]: [Value; 3],
        shape: Attention,
        added: Value,
    ) -> Result<Value> {
        self.caches.push(shape);
        let cache = CacheId(self.caches.len() - 1);
        self.record(AttentionOp { q, k, v, cache, sinks: None, chosen: None, by_distance: Some(added) })
    }

    /// Appends c and the rotated key to a new cache and attends over it: (tokens, heads · value).
    ///
    /// # Errors
    /// [`Error::Shape`] if widths or weights do not fit the shape; [`Error::Unsupported`] if sinks are not f32.
    pub fn latent_attention(
        &mut self,
        inputs: LatentInputs,
        weights: LatentWeights,
        shape: LatentAttention,
    ) -> Result<Value> {
        self.latent_caches.push(shape);
        let cache = LatentCacheId(self.latent_caches.len() - 1);
        self.record(LatentAttentionOp { inputs, weights, cache })
    }
}
