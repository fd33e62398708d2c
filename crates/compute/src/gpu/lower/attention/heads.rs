//! Lowering of products of each head's part of a weight, to the kernels of `kernels/latent.h` and
//! `kernels/cuda/latent_products.cu`.

use crate::DType;
use crate::gpu::arguments::{
    CopyHeadsConstants, LatentConstants, LatentEnterConstants, LatentProductsConstants,
    LatentWeightsConstants,
};
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS, WARPS};
use crate::gpu::lower::linear::width;
use crate::gpu::lower::wide::{MOST_TOKENS, TILE_ROWS};
use crate::gpu::memory::{BATCH_ROWS, TensorScratch, suits_warp_groups};
use crate::graph::{GroupedLinearOp, Value, WeightId};

const PRODUCTS: &str = "cuda/latent_products";

/// Of `kernels/latent.h`.
const HEAD_TOKENS: usize = 4;
const TRANSPOSED_THREADS: u32 = 256;
/// Threads of it whose outputs are side by side, at most.
const MOST_SIDE_BY_SIDE: usize = 64;
/// Warps that a product is divided among, or more if a warp had more than 16 outputs.
const WARPS_OF_HEADS: usize = 4096;

/// What of a weight whose rows are divided among heads is multiplied, and where results go.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadPart {
    /// Rows of a head, and the first of those that are multiplied.
    pub(super) rows: usize,
    pub(super) first: usize,
    /// Channels of a head before and after.
    pub(super) r#in: usize,
    pub(super) out: usize,
    /// Channels from what a head takes to what the next one takes.
    pub(super) each: usize,
    /// Whether the weight's columns are those after.
    pub(super) transposed: bool,
    /// Channels from a head's results to the next one's.
    pub(super) stride: usize,
    /// Whether results are f16.
    pub(super) halves: bool,
}

/// Rows of heads as `latent_enter` writes them.
#[derive(Debug, Clone, Copy)]
pub(super) struct EnteredHeads {
    pub(super) x: Slice,
    /// Tokens of a tile.
    pub(super) width: usize,
    /// Whether they were scaled by what the scratch of scales undoes.
    pub(super) scaled: bool,
}

/// Whether kernels read weights in this encoding by words.
fn is_read_by_words(dtype: DType) -> bool {
    use DType::{BF16, Fp8, Q4_K, Q5_0, Q6_K, Q8_0};
    matches!(dtype, BF16 | Q8_0 | Q5_0 | Q4_K | Q6_K | Fp8 { .. })
}

impl Lowering<'_> {
    /// Memory for products of heads' parts by warp groups, if they are to be used for the batch.
    pub(super) fn heads_scratch(&self) -> Option<TensorScratch> {
        let many = self.rows > self.most_few() && (!self.memory.batch_invariant || self.rows > BATCH_ROWS);
        self.memory.scratch.tensor.filter(|_| self.memory.info.warp_groups && many)
    }

    /// Tokens of a tile of such products.
    pub(super) fn heads_width(&self, heads: usize, out: usize) -> usize {
        width(MOST_TOKENS, heads * out.div_ceil(TILE_ROWS), self.rows, self.memory.info.multiprocessors)
    }

    /// Queues what brings the first `cols` of each `each` columns of x (rows, heads · each) into the form of such products.
    pub(super) fn enter_heads(
        &mut self,
        scratch: TensorScratch,
        [x, to]: [Slice; 2],
        [heads, cols, each]: [usize; 3],
        width: usize,
    ) -> EnteredHeads {
        // They share the scratch of scales with other products.
        (self.converted, self.spread) = (None, None);
        let buffers = [x, to, scratch.scale.into()];
        let constants = &LatentEnterConstants { rows: self.rows, heads, cols, each, width };
        let launch = Launch { unit: PRODUCTS, kernel: "latent_enter", buffers: &buffers, constants };
        self.run.push(launch.over([(self.rows * heads).div_ceil(WARPS), 1, 1], THREADS));
        EnteredHeads { x: to, width, scaled: true }
    }

    /// Queues such a product.
    pub(super) fn wide_heads(
        &mut self,
        scratch: TensorScratch,
        weight: WeightId,
        part: HeadPart,
        x: EnteredHeads,
        result: Slice,
    ) {
        let w = *self.weight(weight);
        let HeadPart { rows: head_rows, first: first_row, r#in, out, transposed, stride, halves, .. } = part;
        let heads = w.matrix.rows / head_rows;
        let count = heads * r#in * out / 8;
        let [a, b, c] = w.planes;
        let unpacked = Slice::from(scratch.unpacked);
        let constants =
            LatentWeightsConstants { weight: w.format, count, head_rows, first_row, out, r#in, transposed };
        let (unit, kernel, buffers) = ("latent", "latent_weights", [a, b, c, unpacked]);
        let unpack = Launch { unit, kernel, buffers: &buffers, constants: &constants };
        self.run.push(unpack.each(count));
        let EnteredHeads { x, width, scaled } = x;
        let rows = self.rows;
        let constants = &LatentProductsConstants { heads, rows, r#in, out, stride, width, scaled, halves };
        let buffers = [x, scratch.scale.into(), unpacked, result];
        let launch = Launch { unit: PRODUCTS, kernel: "latent_products", buffers: &buffers, constants };
        let tiles = heads * out.div_ceil(TILE_ROWS) * rows.div_ceil(width);
        let dispatch = self.in_tiles(launch, tiles);
        self.run.push(dispatch);
    }

    /// Queues a product of each head's part of a weight, whose results do not depend on how many rows there are.
    pub(super) fn heads(&mut self, weight: WeightId, part: HeadPart, [x, result]: [Slice; 2]) {
        let w = self.weight(weight);
        let HeadPart { rows: head_rows, first: first_row, r#in, each, out, transposed, stride, halves } =
            part;
        // Of all heads: the weight's rows are theirs.
        let heads = w.matrix.rows / head_rows;
        let span = if transposed {
            out.div_ceil(8).next_power_of_two().min(MOST_SIDE_BY_SIDE)
        } else {
            (heads * out / WARPS_OF_HEADS).next_power_of_two().clamp(2, 16)
        };
        let rows = self.rows;
        let constants = LatentConstants {
            weight: w.format,
            heads,
            rows,
            head_rows,
            first_row,
            r#in,
            each,
            out,
            stride,
            halves,
            span,
        };
        let [a, b, c] = w.planes;
        let buffers = [a, b, c, x, result];
        let launch = |kernel| Launch { unit: "latent", kernel, buffers: &buffers, constants: &constants };
        let tokens = rows.div_ceil(HEAD_TOKENS);
        let by_words = is_read_by_words(w.matrix.dtype)
            && w.matrix.cols.is_multiple_of(8)
            && (transposed || each.is_multiple_of(4));
        let dispatch = if transposed {
            let kernel = if by_words { "latent_transposed" } else { "latent_transposed_any" };
            launch(kernel).over([out.div_ceil(8 * span), heads, tokens], TRANSPOSED_THREADS)
        } else {
            let kernel = if by_words { "latent_matvec" } else { "latent_matvec_any" };
            launch(kernel).over([out.div_ceil(span * WARPS), heads, tokens], THREADS)
        };
        self.run.push(dispatch);
    }

    /// Queues what copies x (rows · heads, len) to channels start.. of rows of `stride` channels, as f16 if `halves`.
    pub(super) fn copy_heads(
        &mut self,
        [x, to]: [Slice; 2],
        heads: usize,
        [len, stride, start]: [usize; 3],
        halves: bool,
    ) {
        let count = self.rows * heads * len;
        let constants = CopyHeadsConstants { count, len, stride, start, halves };
        let (unit, kernel) = ("latent", "copy_heads");
        let copy = Launch { unit, kernel, buffers: &[x, to], constants: &constants }.each(count);
        self.run.push(copy);
    }

    /// Queues a product of each part of rows with its part of a weight.
    pub(in crate::gpu::lower) fn grouped_linear(&mut self, op: &GroupedLinearOp, out: Value) {
        let GroupedLinearOp { x, weight, groups, .. } = *op;
        let matrix = self.weight(weight).matrix;
        let (each, cols) = (matrix.rows / groups, matrix.cols);
        let [x, out] = [x, out].map(|value| self.value(value));
        let (transposed, halves) = (false, false);
        let part = HeadPart {
            rows: each,
            first: 0,
            r#in: cols,
            each: cols,
            out: each,
            transposed,
            stride: each,
            halves,
        };
        match self.heads_scratch().filter(|_| suits_warp_groups(op, matrix)) {
            Some(scratch) => {
                let width = self.heads_width(groups, each);
                let entered = self.enter_heads(scratch, [x, scratch.x.into()], [groups, cols, cols], width);
                self.wide_heads(scratch, weight, part, entered, out);
            }
            None => self.heads(weight, part, [x, out]),
        }
    }
}
