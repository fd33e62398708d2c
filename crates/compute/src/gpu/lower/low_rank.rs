//! Lowering of what adapters add to linear layers to the kernels of `kernels/low_rank.h`: after the products, which are
//! those of rows without an adapter.

use super::context::{Launch, Lowering, THREADS, blocks};
use crate::gpu::arguments::LowRankConstants;
use crate::gpu::device::{Dispatch, Order, Slice};
use crate::gpu::memory::{Adapted, Updates};
use crate::gpu::steps::Step;
use crate::graph::Value;

/// `TILE_ROWS` of `kernels/low_rank.h`.
pub(super) const TILE_ROWS: usize = 8;
/// `GROUP_RANKS` of the same.
pub(super) const GROUP_RANKS: usize = 4;

/// What adapters add to a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinearUpdate {
    pub(super) x: Value,
    out: Value,
    updates: Updates,
}

/// Dispatches that run beside each other.
pub(super) fn beside(list: impl IntoIterator<Item = Dispatch>) -> impl Iterator<Item = Dispatch> {
    let orders = std::iter::once(Order::After).chain(std::iter::repeat(Order::Beside));
    list.into_iter().zip(orders).map(|(dispatch, order)| Dispatch { order, ..dispatch })
}

impl Lowering<'_> {
    /// The updates of a node that has some, if a row of the batch has an adapter.
    pub(super) fn updates_of(&self, adapted: Option<usize>) -> Option<Updates> {
        let node = adapted.filter(|_| self.shape.adapted != Adapted::NoRow)?;
        self.memory.low_rank.as_ref()?.of(node)
    }

    /// What is added to the product of a node.
    pub(super) fn update(&self, adapted: Option<usize>, x: Value, out: Value) -> Option<LinearUpdate> {
        self.updates_of(adapted).map(|updates| LinearUpdate { x, out, updates })
    }

    /// Whether updates read a value.
    pub(super) fn is_adapted(&self, x: Value) -> bool {
        self.readers(x).any(|step| match *step {
            Step::Linear { x: own, adapted, .. } | Step::MoeExperts { x: own, adapted, .. } => {
                own == x && self.updates_of(adapted).is_some()
            }
            _ => false,
        })
    }

    /// (rows), u32: adapters.
    pub(super) fn row_adapters(&self) -> Slice {
        self.input(if self.gathered { self.layout.output_adapters } else { self.layout.adapters })
    }

    /// Queues what adapters add to products.
    pub(super) fn queue_updates(&mut self) {
        let updates = std::mem::take(&mut self.updates);
        let Some(low_rank) = self.memory.low_rank.as_ref().filter(|_| !updates.is_empty()) else { return };
        let (words, adapters) = (Slice::from(low_rank.words), self.row_adapters());
        let tiles = self.rows.div_ceil(TILE_ROWS);
        let mut start = 0;
        let (mut reduce, mut expand) = (vec![], vec![]);
        for LinearUpdate { x, out, updates } in updates {
            let rank = updates.ranks[0];
            let inner = Slice::from(low_rank.inner).at(start);
            start += self.rows * rank * size_of::<f32>();
            let constants = &LowRankConstants {
                first: updates.first,
                adapters: low_rank.adapters,
                cols: x.width(),
                rows: out.width(),
                rank,
                count: self.rows,
                share: 1,
                top_k: 1,
                weighs: false,
            };
            let unit = "low_rank";
            let buffers = [low_rank.matrices, words, adapters, self.value(x), inner];
            let launch = Launch { unit, kernel: "low_rank_reduce", buffers: &buffers, constants };
            reduce.push(launch.over([rank.div_ceil(GROUP_RANKS), tiles, 1], THREADS));
            let buffers = [low_rank.matrices, words, adapters, inner, self.value(out)];
            let launch = Launch { unit, kernel: "low_rank_expand", buffers: &buffers, constants };
            expand.push(launch.over([blocks(out.width()), tiles, 1], THREADS));
        }
        self.run.extend(beside(reduce).chain(beside(expand)));
    }
}
