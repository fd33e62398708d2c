//! Lowering of latent attention, and of products of each head's part of a weight, to the kernels of `kernels/latent.h`.

use super::attend::Attend;
use crate::gpu::arguments::{AppendConstants, CopyHeadsConstants, LatentConstants};
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS, WARPS};
use crate::gpu::memory::AttentionScratch;
use crate::graph::{LatentAttention, LatentInputs, LatentWeights, Value, WeightId};

/// What of a weight whose rows are divided among heads is multiplied, and where results go.
struct HeadPart {
    /// Rows of a head, and the first of those that are multiplied.
    rows: usize,
    first: usize,
    /// Channels of a head before and after.
    r#in: usize,
    out: usize,
    /// Channels from a head's results to the next one's.
    stride: usize,
}

impl Lowering<'_> {
    pub(in crate::gpu::lower) fn latent_attention(
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
        let kv_type = self.kv_code();
        let latent = AppendConstants { heads: 1, dim: width, start: 0, len: rank, kv_type };
        self.append(c, latents, latent);
        if let Some([_, k_rope]) = rotated {
            self.append(k_rope, latents, AppendConstants { start: rank, len: rope, ..latent });
        }
        let AttentionScratch { query, mixed, .. } = self.memory.scratch.attention;
        let (query, mixed) = (Slice::from(query), Slice::from(mixed));
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
    fn heads(&mut self, kernel: &'static str, weight: WeightId, part: HeadPart, [x, result]: [Slice; 2]) {
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

    /// Queues a product of each of `groups` parts of rows with a part of a weight.
    pub(in crate::gpu::lower) fn grouped_linear(
        &mut self,
        x: Value,
        weight: WeightId,
        groups: usize,
        out: Value,
    ) {
        let matrix = self.weight(weight).matrix;
        let (each, cols) = (matrix.rows / groups, matrix.cols);
        let slices = [self.value(x), self.value(out)];
        let part = HeadPart { rows: each, first: 0, r#in: cols, out: each, stride: each };
        self.heads("latent_matvec", weight, part, slices);
    }
}
