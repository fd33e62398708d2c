//! Lowering of attention: which kernels make it.

mod attend;
mod blocks;
mod compressed;
mod decode;
mod gathered;
mod heads;
mod latent;
mod tensor;
mod unpack;
mod wide;
mod wide_latents;

pub(super) use self::compressed::{Kept, Sparse};

use self::attend::Attend;
use self::decode::DecodeAttention;
use super::context::{Launch, Lowering, THREADS};
use crate::backend::PAGE_TOKENS;
use crate::gpu::arguments::PrepareConstants;
use crate::gpu::device::Slice;
use crate::gpu::steps::Prepare;
use crate::graph::{Attention, Chosen, Rope, RopeStyle, Value, WeightId};

/// The widest heads of `prepare_quads`.
const PREPARED_CHANNELS: usize = 256;
/// Heads that a group of `prepare` does: a warp each.
const PREPARED: usize = THREADS as usize / 32;

/// Attention with what is done to its heads before.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionStep {
    pub(super) q: Value,
    pub(super) k: Value,
    pub(super) v: Value,
    /// Index of the cache in the graph.
    pub(super) cache: usize,
    pub(super) sinks: Option<WeightId>,
    /// The tokens that are seen; all when absent.
    pub(super) chosen: Option<Chosen>,
    /// What is added to scores, by distance.
    pub(super) added: Option<Value>,
    /// What is done to queries and keys before.
    pub(super) prepare: Prepare,
    pub(super) out: Value,
}

/// Positions of a window and of a chunk, 0 for none. What is not reached is as none.
fn reach(shape: &Attention) -> [u32; 2] {
    [shape.window, shape.chunk].map(|n| n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0))
}

impl Lowering<'_> {
    /// Queues an attention.
    pub(super) fn attention(&mut self, step: &AttentionStep) {
        let AttentionStep { q, k, v, cache, sinks, chosen, added, prepare, out } = *step;
        let shape = self.graph.caches[cache];
        let [keys, values] = self.memory.state.caches[cache].each_ref().map(|pool| pool.slice());
        // Kernels for special shapes take scores as they are.
        let plain = chosen.is_none() && added.is_none();
        // Rows that see keys after their own are evaluated once more, by the kernel that takes queries as f32.
        let ahead = shape.ahead && self.shape.ahead;
        let (inputs, caches) = ([q, k, v], [keys, values]);
        let decode = DecodeAttention { shape: &shape, inputs, prepare, caches, sinks, out };
        if plain && !ahead && self.decode_attention(&decode) {
            return;
        }
        let wide = plain && !ahead && self.takes_wide_attention(&shape);
        let query = Slice::from(self.memory.scratch.attention.query);
        self.prepare(&shape, &prepare, inputs, [keys, values, query], wide);
        let sinks_of = |lowering: &Self| sinks.map(|sinks| lowering.vector(sinks));
        let on_tensor_cores = plain && self.takes_tensor_attention(&shape);
        let [keys_f16, values_f16] = if wide || on_tensor_cores {
            let elements = shape.kv_heads * PAGE_TOKENS * shape.head_dim;
            self.in_f16([keys, values], elements, reach(&shape))
        } else {
            [keys, values]
        };
        let slices = [query, keys_f16, values_f16, self.value(out)];
        if wide {
            let dispatch = self.wide_attention(&shape, slices, sinks_of(self));
            return self.run.push(dispatch);
        }
        let attend = Attend {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            dims: [shape.head_dim, shape.value_dim, shape.head_dim, shape.value_dim],
            scale: shape.scale,
            reach: reach(&shape),
            sinks,
            chosen,
            added,
            ahead,
        };
        if on_tensor_cores {
            let dispatch = self.tensor_attention(&shape, slices, sinks_of(self));
            self.run.push(dispatch);
            if ahead {
                self.attend_ahead(&attend, [query, keys, values], self.value(out));
            }
            return;
        }
        self.attend(&attend, [query, keys, values], self.value(out));
    }

    /// Where the angles of a rotation are, how many pairs it turns, and whether they are interleaved; none without one.
    fn angles(&self, rope: Option<usize>) -> (Slice, usize, bool) {
        let Some(rope) = rope else { return (self.input(0), 0, false) };
        let Rope { inv_freq, style, .. } = &self.graph.ropes[rope];
        (self.input(self.layout.angles[rope]), inv_freq.len(), *style == RopeStyle::Interleaved)
    }

    /// Norms and rotates queries, as f16 if `half`, and keys, and appends keys and values to their caches.
    fn prepare(
        &mut self,
        shape: &Attention,
        how: &Prepare,
        [q, k, v]: [Value; 3],
        [keys, values, query]: [Slice; 3],
        half: bool,
    ) {
        let (angles, pairs, interleaved) = self.angles(how.rope);
        let Attention { heads, kv_heads, head_dim, value_dim, .. } = *shape;
        let eps = |norm: Option<(WeightId, f32)>| norm.map_or(0.0, |(_, eps)| eps);
        let weight = |norm: Option<(WeightId, f32)>| self.optional(norm.map(|(weight, _)| weight));
        let buffers = [
            self.value(q),
            self.value(k),
            self.value(v),
            weight(how.q_norm),
            weight(how.k_norm),
            angles,
            self.input(self.layout.places),
            self.pages(),
            keys,
            values,
            query,
        ];
        let constants = PrepareConstants {
            heads,
            kv_heads,
            dim: head_dim,
            value_dim,
            q_norm: how.q_norm.is_some(),
            k_norm: how.k_norm.is_some(),
            q_eps: eps(how.q_norm),
            k_eps: eps(how.k_norm),
            pairs,
            interleaved,
            kv_type: self.kv_code(),
            half_out: half,
        };
        let turned = if interleaved { pairs.is_multiple_of(2) } else { pairs.is_multiple_of(4) };
        let by_quads = |dim: usize| dim.is_multiple_of(4) && dim <= PREPARED_CHANNELS;
        let suits = turned && by_quads(head_dim) && by_quads(value_dim);
        let kernel = if suits { "prepare_quads" } else { "prepare" };
        let launch = Launch { unit: "attention", kernel, buffers: &buffers, constants: &constants };
        let dispatch = launch.over([(heads + 2 * kv_heads).div_ceil(PREPARED), self.rows, 1], THREADS);
        self.run.push(dispatch);
    }
}
