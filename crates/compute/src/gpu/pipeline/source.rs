//! [`PartSource`]: the experts of a part of a graph, which numbers them by itself.

use crate::Result;
use crate::backend::{ExpertSource, ExpertView};
use crate::graph::ExpertSetId;

/// Asks the whole graph's source for a part's experts.
pub(super) struct PartSource<'a> {
    pub(super) whole: &'a mut dyn ExpertSource,
    /// The part's sets, as the whole graph numbers them.
    pub(super) sets: &'a [ExpertSetId],
}

impl PartSource<'_> {
    fn of(&self, set: ExpertSetId) -> ExpertSetId {
        self.sets[set.0]
    }
}

impl ExpertSource for PartSource<'_> {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> Result<()> {
        self.whole.announce(self.of(set), experts)
    }

    fn announce_missing(&mut self, set: ExpertSetId, chosen: &[u32], missing: &[u32]) -> Result<()> {
        self.whole.announce_missing(self.of(set), chosen, missing)
    }

    fn worths(&self, set: ExpertSetId) -> &[f64] {
        self.whole.worths(self.of(set))
    }

    fn give(
        &mut self,
        set: ExpertSetId,
        expert: u32,
        copy: &mut dyn FnMut(&mut [&mut [u8]]) -> Result<()>,
    ) -> Result<bool> {
        self.whole.give(self.of(set), expert, copy)
    }

    fn arrived(&mut self) {
        self.whole.arrived();
    }

    fn exchanged(&mut self, set: ExpertSetId, experts: &[u32]) {
        self.whole.exchanged(self.of(set), experts);
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()> {
        self.whole.visit(self.of(set), experts, visitor)
    }

    fn routed(&mut self, set: ExpertSetId, ids: &[u32], rows: usize) {
        self.whole.routed(self.of(set), ids, rows);
    }

    fn wants_forecast(&mut self) -> bool {
        self.whole.wants_forecast()
    }

    fn forecast(&mut self, set: ExpertSetId, likely: &[u32]) {
        self.whole.forecast(self.of(set), likely);
    }
}
