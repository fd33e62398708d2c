//! How often each expert was requested.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moeflux_compute::backend::{ExpertSource, ExpertView};
use moeflux_compute::graph::ExpertSetId;

use super::ExpertStore;
use super::routing::RouterChoices;

/// Batches that needed each expert since the engine was opened; can be read from other threads.
#[derive(Debug, Clone)]
pub struct ExpertUse {
    sets: Arc<[SetUse]>,
}

#[derive(Debug)]
struct SetUse {
    layer: usize,
    counts: Box<[AtomicU64]>,
}

impl ExpertUse {
    /// Zeros for every expert of `store`.
    pub(crate) fn new(store: &ExpertStore) -> Self {
        let set = |id| {
            let set = store.set(ExpertSetId(id));
            SetUse { layer: set.layer, counts: (0..set.experts).map(|_| AtomicU64::new(0)).collect() }
        };
        Self { sets: (0..store.sets()).map(set).collect() }
    }

    fn count(&self, set: ExpertSetId, experts: &[u32]) {
        for id in experts {
            self.sets[set.0].counts[*id as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Of every layer with experts its number and the counts by expert id.
    pub fn layers(&self) -> impl Iterator<Item = (usize, Vec<u64>)> {
        let counts = |set: &SetUse| set.counts.iter().map(|c| c.load(Ordering::Relaxed)).collect();
        self.sets.iter().map(move |set| (set.layer, counts(set)))
    }
}

/// Counts what is asked of a source, and notes what routers choose if somebody asks. Every set is announced once a batch.
pub(crate) struct Counting<'a, S> {
    pub(crate) source: &'a mut S,
    pub(crate) uses: &'a ExpertUse,
    /// One entry for each set, in the order of sets.
    pub(crate) choices: Option<&'a mut [RouterChoices]>,
}

impl<S: ExpertSource> ExpertSource for Counting<'_, S> {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.uses.count(set, experts);
        self.source.announce(set, experts)
    }

    fn announce_missing(
        &mut self,
        set: ExpertSetId,
        chosen: &[u32],
        missing: &[u32],
    ) -> moeflux_compute::Result<()> {
        self.uses.count(set, chosen);
        self.source.announce_missing(set, chosen, missing)
    }

    fn worths(&self, set: ExpertSetId) -> &[f64] {
        self.source.worths(set)
    }

    fn give(
        &mut self,
        set: ExpertSetId,
        expert: u32,
        copy: &mut dyn FnMut(&mut [&mut [u8]]) -> moeflux_compute::Result<()>,
    ) -> moeflux_compute::Result<bool> {
        self.source.give(set, expert, copy)
    }

    fn arrived(&mut self) {
        self.source.arrived();
    }

    fn exchanged(&mut self, set: ExpertSetId, experts: &[u32]) {
        self.source.exchanged(set, experts);
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        self.source.visit(set, experts, visitor)
    }

    fn routed(&mut self, set: ExpertSetId, ids: &[u32], rows: usize) {
        if let Some(choices) = &mut self.choices {
            choices[set.0].extend(ids, rows);
        }
        self.source.routed(set, ids, rows);
    }

    fn wants_forecast(&mut self) -> bool {
        self.source.wants_forecast()
    }

    fn forecast(&mut self, set: ExpertSetId, likely: &[u32]) {
        self.source.forecast(set, likely);
    }
}
