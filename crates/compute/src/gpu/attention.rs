//! Lowering of attention to the kernels of `kernels/attention.h` and `kernels/latent.h`: for prompts, and where the kernels of
//! decoding do not suit a batch.

use super::arguments::{
    AppendConstants, AttendChosenConstants, AttendConstants, CombineConstants, CopyHeadsConstants,
    LatentConstants, PrepareConstants,
};
use super::decode::Decode;
use super::device::Slice;
use super::lower::{Launch, Lowering, THREADS, WARPS};
use super::steps::Prepare;
use crate::graph::{
    Attention, Chosen, LatentAttention, LatentInputs, LatentWeights, RopeStyle, Value, WeightId,
};

/// Query heads that a group of the attention kernel handles, and its threads.
pub(super) const QUERIES: usize = 8;
pub(super) const ATTENTION_THREADS: u32 = 128;

/// What the attention kernel is told.
struct Attend {
    heads: usize,
    kv_heads: usize,
    /// Channels of a key and of a value, and of a cached row of each.
    dims: [usize; 4],
    scale: f32,
    /// 0 for none.
    window: usize,
    chunk: usize,
    sinks: Option<WeightId>,
    /// The tokens that are seen; all when absent.
    chosen: Option<Chosen>,
}

/// What of a weight whose rows are divided among heads is multiplied, and where results go.
pub(super) struct HeadPart {
    /// Rows of a head, and the first of those that are multiplied.
    pub(super) rows: usize,
    pub(super) first: usize,
    /// Channels of a head before and after.
    pub(super) r#in: usize,
    pub(super) out: usize,
    /// Channels from a head's results to the next one's.
    pub(super) stride: usize,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Lowering<'_> {
    /// Writes x (rows, heads · len) to channels of a cache.
    fn append(&mut self, x: Value, cache: Slice, to: AppendConstants) {
        let buffers = [self.value(x), self.input(self.layout.places), self.pages(), cache];
        let dispatch = Launch { unit: "attention", kernel: "append", buffers: &buffers, constants: &to }
            .over([self.rows, 1, 1], THREADS);
        self.run.push(dispatch);
    }

    pub(super) fn attention(
        &mut self,
        [q, k, v]: [Value; 3],
        cache: usize,
        (sinks, chosen, prepare): (Option<WeightId>, Option<Chosen>, Option<Prepare>),
        out: Value,
    ) {
        let shape = self.graph.caches[cache];
        let [keys, values] = self.memory.state.caches[cache].each_ref().map(|pool| pool.slice());
        let (dim, value_dim) = (shape.head_dim, shape.value_dim);
        if let (Some(prepare), None) = (prepare, chosen) {
            let caches = [keys, values];
            let decode = Decode { shape: &shape, inputs: [q, k, v], prepare, caches, sinks, out };
            if self.decode_attention(&decode) {
                return;
            }
        }
        let query = match prepare {
            Some(prepare) => {
                let query = Slice::from(self.memory.scratch.attention[2]);
                self.prepare(&shape, &prepare, [q, k, v], [keys, values, query]);
                query
            }
            None => {
                let (heads, is_f32) = (shape.kv_heads, self.f32_cache());
                let whole = |dim| AppendConstants { heads, dim, start: 0, len: dim, is_f32 };
                self.append(k, keys, whole(dim));
                self.append(v, values, whole(value_dim));
                self.value(q)
            }
        };
        let slices = [query, keys, values, self.value(out)];
        let on_tensor_cores = || self.tensor_attention(&shape, slices, sinks.map(|s| self.vector(s)));
        if let Some(dispatch) = chosen.map_or_else(on_tensor_cores, |_| None) {
            return self.run.push(dispatch);
        }
        let attend = Attend {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            dims: [dim, value_dim, dim, value_dim],
            scale: shape.scale,
            window: shape.window.unwrap_or(0),
            chunk: shape.chunk.unwrap_or(0),
            sinks,
            chosen,
        };
        self.attend(&attend, [query, keys, values], self.value(out));
    }

    /// Norms and rotates queries and keys, and appends keys and values to their caches.
    fn prepare(
        &mut self,
        shape: &Attention,
        how: &Prepare,
        [q, k, v]: [Value; 3],
        [keys, values, query]: [Slice; 3],
    ) {
        let rotation = &self.graph.ropes[how.rope];
        let (pairs, interleaved) = (rotation.inv_freq.len(), rotation.style == RopeStyle::Interleaved);
        let Attention { heads, kv_heads, head_dim, value_dim, .. } = *shape;
        let eps = |norm: Option<(WeightId, f32)>| norm.map_or(0.0, |(_, eps)| eps);
        let weight = |norm: Option<(WeightId, f32)>| self.optional(norm.map(|(weight, _)| weight));
        let buffers = [
            self.value(q),
            self.value(k),
            self.value(v),
            weight(how.q_norm),
            weight(how.k_norm),
            self.input(self.layout.angles[how.rope]),
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
            is_f32: self.f32_cache(),
        };
        let launch =
            Launch { unit: "attention", kernel: "prepare", buffers: &buffers, constants: &constants };
        let dispatch = launch.over([heads + 2 * kv_heads, self.rows, 1], 32);
        self.run.push(dispatch);
    }

    fn attend(&mut self, a: &Attend, [q, keys, values]: [Slice; 3], out: Slice) {
        if let Some(chosen) = a.chosen {
            return self.attend_chosen(a, chosen, [q, keys, values], out);
        }
        let chunks = (a.heads / a.kv_heads).div_ceil(QUERIES);
        let splits = self.shape.splits;
        let [key_dim, value_dim, key_stride, value_stride] = a.dims;
        let [parts, stats, ..] = self.memory.scratch.attention.map(Slice::from);
        let to = if splits == 1 { out } else { parts };
        let places = self.input(self.layout.places);
        let buffers = [q, keys, values, places, self.pages(), self.optional(a.sinks), stats, to];
        // What is not reached is as none.
        let [window, chunk] = [a.window, a.chunk].map(|n| u32::try_from(n).unwrap_or(0));
        let constants = AttendConstants {
            heads: a.heads,
            kv_heads: a.kv_heads,
            chunks,
            key_dim,
            value_dim,
            key_stride,
            value_stride,
            scale: a.scale,
            window,
            chunk,
            is_f32: self.f32_cache(),
            splits,
            has_sinks: a.sinks.is_some(),
        };
        let dispatch =
            Launch { unit: "attention", kernel: "attend", buffers: &buffers, constants: &constants }
                .over([a.kv_heads * chunks, splits, self.rows], ATTENTION_THREADS);
        self.run.push(dispatch);
        if splits > 1 {
            self.combine([parts, stats, out], a.heads, splits, value_dim);
        }
    }

    fn attend_chosen(&mut self, a: &Attend, chosen: Chosen, [q, keys, values]: [Slice; 3], out: Slice) {
        // Heads that share a key head and a choice.
        let share = gcd(a.heads / a.kv_heads, a.heads / chosen.groups);
        let (chunks, splits) = (share.div_ceil(QUERIES), self.shape.splits);
        let [parts, stats, ..] = self.memory.scratch.attention.map(Slice::from);
        let to = if splits == 1 { out } else { parts };
        let (blocks, places) = (self.value(chosen.blocks), self.input(self.layout.places));
        let buffers = [q, keys, values, blocks, places, self.pages(), self.optional(a.sinks), stats, to];
        let [key_dim, value_dim, key_stride, value_stride] = a.dims;
        let constants = AttendChosenConstants {
            heads: a.heads,
            kv_heads: a.kv_heads,
            share,
            chunks,
            key_dim,
            value_dim,
            key_stride,
            value_stride,
            scale: a.scale,
            is_f32: self.f32_cache(),
            splits,
            has_sinks: a.sinks.is_some(),
            groups: chosen.groups,
            top_k: chosen.blocks.width() / chosen.groups,
            block: chosen.block,
            tail: chosen.tail,
        };
        let (unit, kernel) = ("attention", "attend_chosen");
        let dispatch = Launch { unit, kernel, buffers: &buffers, constants: &constants }
            .over([a.heads / share * chunks, splits, self.rows], ATTENTION_THREADS);
        self.run.push(dispatch);
        if splits > 1 {
            self.combine([parts, stats, out], a.heads, splits, a.dims[1]);
        }
    }

    /// Puts the splits of attention together.
    pub(super) fn combine(&mut self, buffers: [Slice; 3], heads: usize, splits: usize, value_dim: usize) {
        let constants = CombineConstants { splits, value_dim };
        let launch =
            Launch { unit: "attention", kernel: "combine", buffers: &buffers, constants: &constants };
        let dispatch = launch.over([self.rows * heads, value_dim.div_ceil(32), 1], ATTENTION_THREADS);
        self.run.push(dispatch);
    }

    pub(super) fn latent_attention(
        &mut self,
        inputs: LatentInputs,
        weights: LatentWeights,
        cache: usize,
        out: Value,
    ) {
        let LatentInputs { q_nope, c, rotated, sinks, chosen } = inputs;
        let LatentAttention { heads, nope, rope, rank, value, scale } = self.graph.latent_caches[cache];
        let latents = self.memory.state.latents[cache].slice();
        let width = rank + rope;
        let is_f32 = self.f32_cache();
        let latent = AppendConstants { heads: 1, dim: width, start: 0, len: rank, is_f32 };
        self.append(c, latents, latent);
        if let Some([_, k_rope]) = rotated {
            self.append(k_rope, latents, AppendConstants { start: rank, len: rope, ..latent });
        }
        let [_, _, query, mixed] = self.memory.scratch.attention.map(Slice::from);
        let (q_nope, out) = (self.value(q_nope), self.value(out));
        match weights {
            LatentWeights::Joint(weight) => {
                let part = HeadPart { rows: nope + value, first: 0, r#in: nope, out: rank, stride: width };
                self.heads("latent_transposed", weight, part, [q_nope, query]);
            }
            LatentWeights::Split { k, .. } => {
                let part = HeadPart { rows: rank, first: 0, r#in: nope, out: rank, stride: width };
                self.heads("latent_matvec", k, part, [q_nope, query]);
            }
        }
        if let Some([q_rope, _]) = rotated {
            let count = self.rows * heads * rope;
            let buffers = [self.value(q_rope), query];
            let constants = CopyHeadsConstants { count, len: rope, stride: width, start: rank };
            let launch =
                Launch { unit: "latent", kernel: "copy_heads", buffers: &buffers, constants: &constants };
            let copy = launch.each(count);
            self.run.push(copy);
        }
        let dims = [width, rank, width, width];
        let attend = Attend { heads, kv_heads: 1, dims, scale, window: 0, chunk: 0, sinks, chosen };
        self.attend(&attend, [query, latents, latents], mixed);
        match weights {
            LatentWeights::Joint(weight) => {
                let part =
                    HeadPart { rows: nope + value, first: nope, r#in: rank, out: value, stride: value };
                self.heads("latent_matvec", weight, part, [mixed, out]);
            }
            LatentWeights::Split { v, .. } => {
                let part = HeadPart { rows: value, first: 0, r#in: rank, out: value, stride: value };
                self.heads("latent_matvec", v, part, [mixed, out]);
            }
        }
    }

    /// A product of each head's part of a weight: see `kernels/latent.h`.
    pub(super) fn heads(
        &mut self,
        kernel: &'static str,
        weight: WeightId,
        part: HeadPart,
        [x, result]: [Slice; 2],
    ) {
        let w = self.weight(weight);
        let HeadPart { rows: head_rows, first: first_row, r#in, out, stride } = part;
        // Of all heads: the weight's rows are theirs.
        let heads = w.matrix.rows / head_rows;
        let constants =
            LatentConstants { weight: w.format, heads, head_rows, first_row, r#in, out, stride, start: 0 };
        let [a, b, c] = w.planes;
        let buffers = [a, b, c, x, result];
        let launch = Launch { unit: "latent", kernel, buffers: &buffers, constants: &constants };
        let dispatch = if kernel == "latent_matvec" {
            launch.over([out.div_ceil(WARPS), heads, self.rows], THREADS)
        } else {
            launch.over([out.div_ceil(8 * 64), heads, self.rows], 64)
        };
        self.run.push(dispatch);
    }
}
