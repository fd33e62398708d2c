//! Memory within a step: what kernels of one step leave for each other.

use super::inputs::{BATCH_ROWS, FEW_ROWS, MOST_SPLITS, PANEL_ROWS};
use super::low_rank;
use crate::backend::PAGE_TOKENS;
use crate::gpu::device::{BufferId, Device};
use crate::gpu::{steps, supported};
use crate::graph::{
    ChooseBlocksOp, CompressedAttention, Ends, EntryIndex, Graph, GroupedLinearOp, LinearOp, MatrixSpec,
    MoeExpertsOp, Op, Precision, TokenForm,
};
use crate::{DType, Result};

/// Outputs and rows of a tile of the common kernels.
pub(crate) const TILE: usize = 64;
/// Rows and weight rows of a tile of the kernels for tensor cores.
pub(crate) const TENSOR_TILE: usize = 128;
/// Pairs and experts that `batch_tiles` of `kernels/batch.h` sorts, at most.
pub(crate) const BATCH_PAIRS: usize = 8192;
pub(crate) const MOST_TILED_EXPERTS: usize = 1024;
/// Rows and columns that blocks of activations in f16 are filled up to, and most tokens of a tile of `kernels/cuda/panels.cu`.
pub(crate) const PANEL_TOKENS: usize = 8;
pub(crate) const PANEL_COLUMNS: usize = 128;
pub(crate) const PANEL_TILE: usize = 16;
/// Columns of activations of eight bits that share a scale.
pub(crate) const SCALED_COLUMNS: usize = 32;
/// Bytes of a weight that is unpacked, at most.
const MOST_UNPACKED: usize = 64 << 20;
/// Rows whose entries have scores at once, at least and at most, and so many of these scores if that is between.
const FEWEST_SCORED_ROWS: usize = 64;
const MOST_SCORED_ROWS: usize = 512;
const SCORES: usize = 8 << 20;

/// Of attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionScratch<T = BufferId> {
    /// Results of splits, and their maxima and sums.
    pub(crate) parts: T,
    pub(crate) stats: T,
    /// Queries that are ready; of latent attention, results too.
    pub(crate) query: T,
    pub(crate) mixed: T,
}

/// Of routed experts, of all pairs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertScratch<T = BufferId> {
    pub(crate) gates: T,
    pub(crate) ups: T,
    pub(crate) products: T,
    pub(crate) outputs: T,
}

/// Pairs sorted by expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BucketScratch<T = BufferId> {
    pub(crate) list: T,
    pub(crate) blocks: T,
    /// Of the two indirect dispatches.
    pub(crate) grids: T,
}

/// Of kernels for tensor cores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorScratch<T = BufferId> {
    /// f16 copy of the activations of a product, of rows or of pairs sorted by expert.
    pub(crate) x: T,
    /// What each of its rows was divided by, f32.
    pub(crate) scale: T,
    /// Tiles of pairs: (tiles, 4), u32.
    pub(crate) tiles: T,
    /// (places), u32: pairs, each expert's from a multiple of [`PANEL_TOKENS`] on.
    pub(crate) list: T,
    /// (pairs, 2), u32: where each is in the list, and its tile.
    pub(crate) places: T,
    /// A weight as f16, of all heads of latent attention, or as f32, of a product that rounds nothing.
    pub(crate) unpacked: T,
}

/// The experts' products in eight bits: their bytes, then scale and sum of each block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantizedScratch<T = BufferId> {
    pub(crate) bytes: T,
    pub(crate) scales: T,
}

/// Activations of up to `BATCH_ROWS` rows in eight bits, and tiles of their pairs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchScratch<T = BufferId> {
    /// (rows, cols).
    pub(crate) bytes: T,
    /// Scale and scaled sum of each block of 32 columns, f32.
    pub(crate) scales: T,
    /// By which the products of each row are multiplied, f32.
    pub(crate) factors: T,
    /// (tiles, 4), u32.
    pub(crate) tiles: T,
}

/// Of products on tensor cores of up to `PANEL_ROWS` rows, whose activations come in blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PanelScratch<T = BufferId> {
    /// f16 blocks of eight rows × eight columns, of rows or of pairs sorted by expert.
    pub(crate) x: T,
    /// By which the products of each row are multiplied, f32.
    pub(crate) scale: T,
    /// (places), u32: pairs, each expert's from a multiple of [`PANEL_TOKENS`] on.
    pub(crate) list: T,
    /// (tiles, 4), u32.
    pub(crate) tiles: T,
    /// (places, inner), f32: the activated products of gate and up.
    pub(crate) products: T,
}

/// Of choices of entries and blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexScratch {
    /// (`scored_rows`, room), f32.
    pub(crate) scores: BufferId,
    /// Scores that a row has room for.
    pub(crate) room: usize,
    /// (rows, top_k), u32.
    pub(crate) chosen: BufferId,
}

/// All of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    pub(crate) attention: AttentionScratch,
    pub(crate) experts: ExpertScratch,
    pub(crate) buckets: BucketScratch,
    /// Given if tensor cores may be used.
    pub(crate) tensor: Option<TensorScratch>,
    pub(crate) panels: Option<PanelScratch>,
    pub(crate) quantized: QuantizedScratch,
    pub(crate) batch: BatchScratch,
    pub(crate) index: IndexScratch,
}

/// Bytes of the buffers for batches of up to `rows` rows.
struct Sizes {
    attention: AttentionScratch<usize>,
    experts: ExpertScratch<usize>,
    buckets: BucketScratch<usize>,
    tensor: TensorScratch<usize>,
    panels: PanelScratch<usize>,
    quantized: QuantizedScratch<usize>,
    batch: BatchScratch<usize>,
    /// Of the lists of chosen entries.
    chosen: usize,
}

impl Scratch {
    /// Takes memory for batches of up to `rows` rows, with room for `room` scores a row.
    pub(super) fn new(
        device: &mut dyn Device,
        graph: &Graph,
        rows: usize,
        tensor_cores: bool,
        room: usize,
    ) -> Result<Self> {
        let Sizes { attention, experts, buckets, tensor, panels, quantized, batch, chosen } =
            sizes(graph, rows);
        let mut alloc = |bytes: usize| device.alloc(bytes.max(4));
        let attention = AttentionScratch {
            parts: alloc(attention.parts)?,
            stats: alloc(attention.stats)?,
            query: alloc(attention.query)?,
            mixed: alloc(attention.mixed)?,
        };
        let experts = ExpertScratch {
            gates: alloc(experts.gates)?,
            ups: alloc(experts.ups)?,
            products: alloc(experts.products)?,
            outputs: alloc(experts.outputs)?,
        };
        let buckets = BucketScratch {
            list: alloc(buckets.list)?,
            blocks: alloc(buckets.blocks)?,
            grids: alloc(buckets.grids)?,
        };
        let tensor = if tensor_cores {
            let TensorScratch { x, scale, tiles, list, places, unpacked } = tensor;
            let (x, scale, tiles, list) = (alloc(x)?, alloc(scale)?, alloc(tiles)?, alloc(list)?);
            let (places, unpacked) = (alloc(places)?, alloc(unpacked)?);
            Some(TensorScratch { x, scale, tiles, list, places, unpacked })
        } else {
            None
        };
        let panels = if tensor_cores {
            let PanelScratch { x, scale, list, tiles, products } = panels;
            let (x, scale, list) = (alloc(x)?, alloc(scale)?, alloc(list)?);
            Some(PanelScratch { x, scale, list, tiles: alloc(tiles)?, products: alloc(products)? })
        } else {
            None
        };
        let sizes = quantized;
        let quantized = QuantizedScratch { bytes: alloc(sizes.bytes)?, scales: alloc(sizes.scales)? };
        let batch = BatchScratch {
            bytes: alloc(batch.bytes)?,
            scales: alloc(batch.scales)?,
            factors: alloc(batch.factors)?,
            tiles: alloc(batch.tiles)?,
        };
        let (chosen, scores) = (alloc(chosen)?, alloc(score_bytes(room, rows))?);
        let index = IndexScratch { scores, room, chosen };
        // Read, though for nothing, of pairs that the processor computes.
        device.clear(quantized.bytes.into(), sizes.bytes)?;
        device.clear(quantized.scales.into(), sizes.scales)?;
        Ok(Self { attention, experts, buckets, tensor, panels, quantized, batch, index })
    }
}

/// Bytes of the outputs of all pairs.
pub(crate) fn output_bytes(graph: &Graph, rows: usize) -> usize {
    experts(graph, rows).0.outputs
}

fn sizes(graph: &Graph, rows: usize) -> Sizes {
    let (experts, buckets) = experts(graph, rows);
    Sizes {
        attention: attention(graph, rows),
        experts,
        buckets,
        tensor: tensor(graph, rows),
        panels: panels(graph, rows),
        quantized: quantized(graph, rows),
        batch: batch(graph, rows),
        chosen: indices(graph).map(|(_, index)| rows.saturating_mul(index.top_k) * 4).max().unwrap_or(0),
    }
}

fn attention(graph: &Graph, rows: usize) -> AttentionScratch<usize> {
    let few = rows.min(FEW_ROWS);
    let mut bytes = AttentionScratch { parts: 4, stats: 4, query: 4, mixed: 4 };
    let grow = |bytes: &mut usize, elements: usize| *bytes = (*bytes).max(elements * 4);
    for cache in graph.caches() {
        grow(&mut bytes.query, rows * cache.heads * cache.head_dim);
        grow(&mut bytes.parts, few * cache.heads * MOST_SPLITS * cache.value_dim);
        grow(&mut bytes.stats, few * cache.heads * MOST_SPLITS * 2);
    }
    for cache in graph.compressed_caches() {
        grow(&mut bytes.parts, few * cache.heads * MOST_SPLITS * cache.head_dim);
        grow(&mut bytes.stats, few * cache.heads * MOST_SPLITS * 2);
    }
    for c in graph.latent_caches() {
        grow(&mut bytes.parts, few * c.heads * MOST_SPLITS * c.rank);
        grow(&mut bytes.stats, few * c.heads * MOST_SPLITS * 2);
        grow(&mut bytes.query, rows * c.heads * (c.rank + c.rope));
        grow(&mut bytes.mixed, rows * c.heads * c.rank);
    }
    bytes
}

fn experts(graph: &Graph, rows: usize) -> (ExpertScratch<usize>, BucketScratch<usize>) {
    let mut experts = ExpertScratch { gates: 4, ups: 4, products: 4, outputs: 4 };
    let mut buckets = BucketScratch { list: 4, blocks: 4, grids: 4 };
    for node in graph.nodes() {
        let Op::MoeExperts(MoeExpertsOp { routing, experts: set, .. }) = node.op else { continue };
        let set = &graph.expert_sets()[set.0];
        let pairs = rows * routing.top_k();
        let inner = pairs * set.width() * 4;
        experts.gates = experts.gates.max(inner);
        experts.ups = experts.ups.max(inner);
        experts.products = experts.products.max(inner);
        experts.outputs = experts.outputs.max(pairs * set.down.rows * 4);
        buckets.list = buckets.list.max(pairs * 4);
        buckets.blocks = buckets.blocks.max(most_blocks(pairs, set.experts) * 12);
        buckets.grids = buckets.grids.max(24);
    }
    (experts, buckets)
}

fn tensor(graph: &Graph, rows: usize) -> TensorScratch<usize> {
    let mut all = TensorScratch { x: 4, scale: rows * 4, tiles: 16, list: 4, places: 4, unpacked: 4 };
    for c in graph.latent_caches() {
        all.scale = all.scale.max(rows.next_multiple_of(PANEL_TOKENS) * c.heads * 4);
        all.unpacked = all.unpacked.max(c.heads * c.rank * c.nope.max(c.value) * 2);
    }
    for node in graph.nodes() {
        match node.op {
            Op::Linear(LinearOp { x, weight, precision, .. }) => {
                all.x = all.x.max(f16_bytes(rows, x.width()));
                let unpacked = unpacked_bytes(graph.weights()[weight.0].matrix, precision);
                all.unpacked = all.unpacked.max(unpacked.unwrap_or(0));
            }
            Op::GroupedLinear(op) => {
                let matrix = graph.weights()[op.weight.0].matrix;
                if suits_warp_groups(&op, matrix) {
                    all.x = all.x.max(op.groups * f16_bytes(rows, matrix.cols));
                    all.scale = all.scale.max(rows.next_multiple_of(PANEL_TOKENS) * op.groups * 4);
                    all.unpacked = all.unpacked.max(matrix.rows * matrix.cols * 2);
                }
            }
            Op::MoeExperts(MoeExpertsOp { x, routing, experts, .. }) => {
                let set = &graph.expert_sets()[experts.0];
                let pairs = rows * routing.top_k();
                let places = most_places(pairs, set.experts);
                all.x = all.x.max(f16_bytes(places, x.width().max(set.width())));
                all.scale = all.scale.max(places * 4);
                all.tiles = all.tiles.max(most_tiles(pairs, set.experts) * 16);
                all.list = all.list.max(places * 4);
                all.places = all.places.max(pairs * 8);
            }
            _ => {}
        }
    }
    all
}

fn quantized(graph: &Graph, rows: usize) -> QuantizedScratch<usize> {
    let mut products = SCALED_COLUMNS;
    for node in graph.nodes() {
        if let Op::MoeExperts(MoeExpertsOp { routing, experts, .. }) = node.op {
            products = products.max(routing.top_k() * graph.expert_sets()[experts.0].width());
        }
    }
    let rows = rows.min(BATCH_ROWS);
    let scales = rows * products.div_ceil(SCALED_COLUMNS) * 8;
    QuantizedScratch { bytes: rows * products, scales }
}

fn batch(graph: &Graph, rows: usize) -> BatchScratch<usize> {
    let rows = rows.min(BATCH_ROWS);
    let (mut width, mut tiles) = (SCALED_COLUMNS, 1);
    for node in graph.nodes() {
        match node.op {
            Op::Linear(LinearOp { x, .. }) => width = width.max(x.width()),
            Op::MoeExperts(MoeExpertsOp { x, routing, experts, .. }) => {
                width = width.max(x.width());
                tiles = tiles
                    .max(most_batch_tiles(rows * routing.top_k(), graph.expert_sets()[experts.0].experts));
            }
            _ => {}
        }
    }
    let scales = rows * width.div_ceil(SCALED_COLUMNS) * 8;
    BatchScratch { bytes: rows * width, scales, factors: rows * 4, tiles: tiles * 16 }
}

fn panels(graph: &Graph, rows: usize) -> PanelScratch<usize> {
    let rows = rows.min(PANEL_ROWS);
    let mut all = PanelScratch { x: 4, scale: rows * 4, list: 4, tiles: 16, products: 4 };
    for node in graph.nodes() {
        match node.op {
            Op::Linear(LinearOp { x, .. }) => all.x = all.x.max(f16_bytes(rows, x.width())),
            Op::MoeExperts(MoeExpertsOp { x, routing, experts, .. }) => {
                let set = &graph.expert_sets()[experts.0];
                let pairs = rows * routing.top_k();
                let places = most_places(pairs, set.experts);
                all.x = all.x.max(f16_bytes(places, x.width().max(set.width())));
                all.scale = all.scale.max(places * 4);
                all.list = all.list.max(places * 4);
                all.tiles = all.tiles.max(most_panel_tiles(pairs, set.experts, PANEL_TOKENS) * 16);
                all.products = all.products.max(places * set.width() * 4);
            }
            _ => {}
        }
    }
    all
}

/// Bytes of a weight as f32, if it is unpacked for products of many rows that round nothing; not of what would be large.
pub(crate) fn unpacked_bytes(matrix: MatrixSpec, precision: Precision) -> Option<usize> {
    let unpacks = precision == Precision::F32 && matrix.dtype != DType::F32;
    let bytes = matrix.rows.saturating_mul(matrix.cols).saturating_mul(size_of::<f32>());
    (unpacks && bytes <= MOST_UNPACKED).then_some(bytes)
}

/// Whether products of many rows with parts of a weight are for matrix units, which take the weight as f16.
pub(crate) fn suits_warp_groups(op: &GroupedLinearOp, matrix: MatrixSpec) -> bool {
    op.precision == Precision::Fast && matrix.dtype != DType::F32 && matrix.cols.is_multiple_of(32)
}

/// Bytes of rows as f16, filled up as kernels for matrix units take them.
pub(crate) fn f16_bytes(rows: usize, cols: usize) -> usize {
    rows.next_multiple_of(PANEL_TOKENS) * cols.next_multiple_of(PANEL_COLUMNS) * 2
}

/// Places of pairs that are sorted by expert, each expert's from a multiple of [`PANEL_TOKENS`] on, at most.
pub(crate) fn most_places(pairs: usize, experts: usize) -> usize {
    (pairs + (PANEL_TOKENS - 1) * experts.min(pairs)).next_multiple_of(PANEL_TOKENS)
}

/// Tiles of up to `tile` of their pairs, at most.
pub(crate) fn most_panel_tiles(pairs: usize, experts: usize, tile: usize) -> usize {
    pairs / tile + experts.min(pairs)
}

/// Tiles of pairs of up to [`BATCH_ROWS`] rows, at most, of eight pairs or more each.
pub(crate) fn most_batch_tiles(pairs: usize, experts: usize) -> usize {
    pairs / 8 + experts.min(pairs)
}

/// Blocks of pairs of the common kernels, at most.
pub(crate) fn most_blocks(pairs: usize, experts: usize) -> usize {
    pairs / TILE + experts.min(pairs)
}

/// The same of kernels for tensor cores.
pub(crate) fn most_tiles(pairs: usize, experts: usize) -> usize {
    pairs / TENSOR_TILE + experts.min(pairs)
}

/// Attentions that choose entries themselves.
fn indices(graph: &Graph) -> impl Iterator<Item = (CompressedAttention, EntryIndex)> {
    let own = graph.compressed_caches().iter().filter(|shape| shape.form != TokenForm::Elsewhere);
    own.filter_map(|shape| Some((*shape, shape.index?)))
}

/// Positions that a batch's pages reach to.
pub(super) fn positions(pages: usize) -> usize {
    pages.saturating_mul(PAGE_TOKENS)
}

/// Scores that rows need room for in contexts of `positions` tokens.
pub(super) fn score_room(graph: &Graph, positions: usize) -> usize {
    let entries = indices(graph).map(|(shape, _)| positions / shape.stride);
    let blocks = graph.nodes().iter().filter_map(|node| match &node.op {
        Op::ChooseBlocks(ChooseBlocksOp { choice, .. }) => {
            Some(positions.div_ceil(choice.block).saturating_mul(choice.groups()))
        }
        _ => None,
    });
    entries.chain(blocks).max().unwrap_or(0)
}

/// Rows whose entries have scores at once, each of which has room for so many.
pub(crate) fn scored_rows(room: usize) -> usize {
    (SCORES / room.max(1)).clamp(FEWEST_SCORED_ROWS, MOST_SCORED_ROWS)
}

/// Bytes of scores in batches of up to `rows` rows.
pub(super) fn score_bytes(room: usize, rows: usize) -> usize {
    room.saturating_mul(rows.min(scored_rows(room)) * 4)
}

/// Bytes of each buffer of a [`Scratch`].
pub(super) fn buffer_bytes(graph: &Graph, rows: usize, tensor_cores: bool, room: usize) -> Vec<usize> {
    let Sizes { attention: a, experts: e, buckets: b, tensor: t, panels: p, quantized: q, batch: s, chosen } =
        sizes(graph, rows);
    let mut all = vec![a.parts, a.stats, a.query, a.mixed, e.gates, e.ups, e.products, e.outputs];
    all.extend([b.list, b.blocks, b.grids, q.bytes, q.scales, s.bytes, s.scales, s.factors, s.tiles]);
    all.extend([chosen, score_bytes(room, rows)]);
    if tensor_cores {
        all.extend([t.x, t.scale, t.tiles, t.list, t.places, t.unpacked]);
        all.extend([p.x, p.scale, p.list, p.tiles, p.products]);
    }
    all
}

/// Bytes of activations and scratch for batches of up to `rows` rows; `usize::MAX` if that is not enough to say it,
/// nothing for a graph that cannot run on GPUs.
pub(crate) fn device_scratch_bytes(graph: &Graph, ends: &Ends, rows: usize) -> usize {
    if supported::unsupported(graph).is_some() {
        return 0;
    }
    let steps = steps::steps(graph, ends);
    let widths: usize = steps::buffers(graph, ends, &steps).widths.iter().sum();
    let Sizes { attention: a, experts: e, buckets: b, tensor: t, panels: p, quantized: q, batch: s, chosen } =
        sizes(graph, rows);
    let attention = [a.parts, a.stats, a.query, a.mixed];
    let experts = [e.gates, e.ups, e.products, e.outputs, b.list, b.blocks, b.grids];
    let bytes = [q.bytes, q.scales, s.bytes, s.scales, s.factors, s.tiles];
    let scratch = attention.into_iter().chain(experts).chain(bytes).chain([t.x, t.scale, t.tiles, chosen]);
    let scratch = scratch.chain([t.list, t.places, t.unpacked]);
    let scratch =
        scratch.chain([p.x, p.scale, p.list, p.tiles, p.products]).chain(low_rank::bytes(graph, rows));
    let values = widths.saturating_mul(rows).saturating_mul(size_of::<f32>());
    scratch.fold(values, usize::saturating_add)
}
