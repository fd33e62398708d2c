//! Lowering of routed experts that adapters change: pairs of rows with one take kernels that make gate, up and down by
//! themselves, with what adapters add to each; those of other rows are as they would be without.

use super::Pairs;
use crate::gpu::arguments::{
    AdaptedIdsConstants, LowRankConstants, MoeActivateConstants, TensorSortConstants, WideDownConstants,
};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::lower::context::{Launch, Lowering, THREADS, blocks};
use crate::gpu::lower::low_rank::{GROUP_RANKS, TILE_ROWS, beside};
use crate::gpu::lower::tensor::kernels_for;
use crate::gpu::lower::wide::{MOST_TOKENS, TILE_ROWS as WIDE_TILE_ROWS, WideRows, splits};
use crate::gpu::memory::{
    Adapted, BucketScratch, ExpertMatrix, ExpertScratch, MOST_TILED_EXPERTS, PANEL_TOKENS, TILE, Updates,
    most_blocks, most_places, most_tiles,
};
use crate::graph::{ExpertMlp, Value};

/// What adapters add to a projection of pairs.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertUpdate {
    pub(super) updates: Updates,
    /// Gate, up or down.
    pub(super) which: usize,
    pub(super) x: Slice,
    /// Pairs that share a row of x.
    pub(super) share: usize,
    /// What rows of x count, a pair; all the same when absent.
    pub(super) weights: Option<Slice>,
    pub(super) to: Slice,
}

impl Lowering<'_> {
    /// Whether all rows have updates.
    pub(super) fn all_adapted(&self, updates: &Updates) -> bool {
        self.shape.adapted == Adapted::AllRows && updates.complete
    }

    /// Outputs of the pairs that have updates and whose experts are present.
    pub(super) fn adapted_experts(
        &mut self,
        x: Value,
        weights: Option<Slice>,
        pairs: Pairs,
        mlp: ExpertMlp,
        updates: Updates,
    ) -> Vec<Dispatch> {
        let low_rank = self.memory.low_rank.as_ref().expect("updates are of a graph with adapters");
        let mut body = vec![];
        let mut own = pairs;
        if !self.all_adapted(&updates) {
            own.ids = low_rank.ids.into();
            let constants = &AdaptedIdsConstants {
                first: updates.first,
                adapters: low_rank.adapters,
                projections: updates.ranks.len(),
                pairs: pairs.count,
                top_k: pairs.top_k,
                nowhere: self.graph.expert_sets()[pairs.set.0].experts + mlp.identities,
            };
            let buffers = [low_rank.words.into(), self.row_adapters(), pairs.ids, own.ids];
            let launch = Launch { unit: "low_rank", kernel: "adapted_ids", buffers: &buffers, constants };
            body.push(launch.each(pairs.count));
        }
        let wide = if weights.is_none() { self.wide_adapted(x, own, &mlp, updates) } else { None };
        let places = [self.value(x), self.memory.scratch.experts.outputs.into()];
        body.extend(wide.unwrap_or_else(|| self.common_experts(places, weights, own, mlp, Some(updates))));
        body
    }

    /// The same by the kernels of `kernels/cuda/wide.cu` for down projections, which multiply any rows in tiles; nothing if they
    /// do not suit them.
    fn wide_adapted(
        &mut self,
        x: Value,
        pairs: Pairs,
        mlp: &ExpertMlp,
        updates: Updates,
    ) -> Option<Vec<Dispatch>> {
        let scratch = self.wide_scratch()?;
        let Pairs { set, ids, count, top_k } = pairs;
        let parts = *self.memory.experts.parts(set);
        let [gate, up, down] = &parts;
        let encoding = |part: &ExpertMatrix| kernels_for(part.matrix.dtype, part.matrix.cols);
        let [of_gate, of_up, of_down] = [encoding(gate)?, encoding(up)?, encoding(down)?];
        let experts = self.graph.expert_sets()[set.0].experts;
        // What stands for an expert that is nowhere is sorted too.
        if experts + mlp.identities >= MOST_TILED_EXPERTS || splits(of_gate) != splits(of_up) {
            return None;
        }
        let (inner, hidden) = (up.matrix.rows, down.matrix.rows);
        let (most, places) = (most_tiles(count, experts), most_places(count, experts));
        let (slots, table) =
            (self.memory.experts.slots(), self.memory.experts.table(set, [self.rows, count]));
        let [entered, scale, list, tiles] =
            [scratch.x, scratch.scale, scratch.list, scratch.tiles].map(Slice::from);
        let ExpertScratch { gates, ups, products, outputs } = self.memory.scratch.experts;
        let [gates, ups, products, outputs] = [gates, ups, products, outputs].map(Slice::from);
        let biases = mlp.biases.map(|b| [b.gate, b.up, b.down]);

        let tokens = MOST_TOKENS;
        let constants =
            &TensorSortConstants { pairs: count, experts, tiles: most, tokens, align: PANEL_TOKENS, places };
        let buffers = [table, ids, list, scratch.places.into(), tiles];
        let sort = Launch { unit: "cuda/wide_tokens", kernel: "wide_sort", buffers: &buffers, constants };
        let mut body = vec![self.bucket(pairs, [inner, hidden]), sort.over([1, 1, 1], 1024)];
        // The rows are those of pairs from here on.
        (self.converted, self.spread) = (None, None);
        let projection = |which: usize, encoding: &str, to: Slice| {
            let bias = biases.map(|b| b[which]);
            let constants =
                &WideDownConstants { part: parts[which].part, has_bias: bias.is_some(), tiles: most };
            let buffers = [entered, scale, list, tiles, slots, table, self.optional(bias), to];
            let launch = Launch { unit: "cuda/wide", kernel: "wide_down", buffers: &buffers, constants };
            self.wide(encoding, launch, parts[which].matrix.rows.div_ceil(WIDE_TILE_ROWS) * most)
        };
        let update = |which: usize, x: Slice, share: usize, to: Slice| ExpertUpdate {
            updates,
            which,
            x,
            share,
            weights: None,
            to,
        };
        let (from, shape) = (self.value(x), [self.rows, x.width()]);
        body.push(self.enter_wide(scratch, (from, None), shape, WideRows::Shared(top_k), splits(of_up)));
        let mut first = vec![update(1, from, top_k, ups)];
        if mlp.activation.is_gated() {
            body.push(projection(0, of_gate, gates));
            first.insert(0, update(0, from, top_k, gates));
        }
        body.push(projection(1, of_up, ups));
        body.extend(self.expert_updates(pairs, &parts, &first));
        let elements = count * inner;
        let constants =
            &MoeActivateConstants { count: elements, width: inner, activation: mlp.activation.into() };
        let gates = if mlp.activation.is_gated() { gates } else { ups };
        let buffers = [table, ids, gates, ups, products];
        let activate = Launch { unit: "moe", kernel: "moe_activate", buffers: &buffers, constants };
        body.push(activate.each(elements));
        body.push(self.enter_wide(
            scratch,
            (products, None),
            [count, inner],
            WideRows::Shared(1),
            splits(of_down),
        ));
        body.push(projection(2, of_down, outputs));
        body.extend(self.expert_updates(pairs, &parts, &[update(2, products, 1, outputs)]));
        Some(body)
    }

    /// What adapters add to projections that nothing was added to yet, of pairs that are sorted by expert.
    pub(super) fn expert_updates(
        &self,
        pairs: Pairs,
        parts: &[ExpertMatrix; 3],
        updates: &[ExpertUpdate],
    ) -> Vec<Dispatch> {
        let Some(low_rank) = &self.memory.low_rank else { return vec![] };
        let (words, adapters) = (Slice::from(low_rank.words), self.row_adapters());
        let BucketScratch { list, blocks: sorted, grids } = self.memory.scratch.buckets;
        let [list, sorted, grids] = [list, sorted, grids].map(Slice::from);
        let experts = self.graph.expert_sets()[pairs.set.0].experts;
        let (most, tiles) = (most_blocks(pairs.count, experts), TILE / TILE_ROWS);
        let mut start = 0;
        let (mut reduce, mut expand) = (vec![], vec![]);
        for update in updates {
            let &ExpertUpdate { updates, which, x, share, weights, to } = update;
            let (rank, matrix) = (updates.ranks[which], parts[which].matrix);
            if rank == 0 {
                continue;
            }
            let inner = Slice::from(low_rank.inner).at(start);
            start += pairs.count * rank * size_of::<f32>();
            let constants = &LowRankConstants {
                first: updates.of(which, low_rank.adapters),
                adapters: low_rank.adapters,
                cols: matrix.cols,
                rows: matrix.rows,
                rank,
                count: pairs.count,
                share,
                top_k: pairs.top_k,
                weighs: weights.is_some(),
            };
            let (unit, weights) = ("low_rank", weights.unwrap_or(self.input(0)));
            let buffers = [low_rank.matrices, words, adapters, list, sorted, grids, x, weights, inner];
            let launch = Launch { unit, kernel: "expert_low_rank_reduce", buffers: &buffers, constants };
            reduce.push(launch.over([rank.div_ceil(GROUP_RANKS), most, tiles], THREADS));
            let buffers = [low_rank.matrices, words, adapters, list, sorted, grids, inner, to];
            let launch = Launch { unit, kernel: "expert_low_rank_expand", buffers: &buffers, constants };
            expand.push(launch.over([blocks(matrix.rows), most, tiles], THREADS));
        }
        beside(reduce).chain(beside(expand)).collect()
    }
}
