//! Lowering to the kernels of `kernels/tiers.h`: giving slots to experts that are in host memory, and bringing them there.

use super::foresight::Ahead;
use crate::gpu::arguments::{
    BroughtConstants, CollectConstants, DeskRowsConstants, FetchConstants, OfferConstants, PlaceConstants,
    RouteConstants, WorthConstants,
};
use crate::gpu::device::{Dispatch, Order, Slice};
use crate::gpu::lower::context::{Launch, Lowering, THREADS};
use crate::gpu::memory::HandOver;
use crate::gpu::processor::RowForm;
use crate::graph::{ExpertSetId, Value};

/// Half-lives of an expert's frequencies in tokens, and the shorter one's part.
const LONG: f32 = 256.0;
const SHORT: f32 = 8.0;
const SHORT_PART: f32 = 0.3;
/// Groups that fetch an expert: a dozen in all keep the bus busy.
pub(super) const FETCH_GROUPS: usize = 8;

/// What experts are worth after a batch of so many rows.
pub(super) fn worth(rows: usize) -> WorthConstants {
    let decay = |half_life: f32, rows: usize| (-(rows as f32) / half_life).exp2();
    WorthConstants {
        long_decay: decay(LONG, rows),
        short_decay: decay(SHORT, rows),
        // A sum over all tokens to come tends to 1 / (1 - decay).
        long_part: (1.0 - SHORT_PART) * (1.0 - decay(LONG, 1)),
        short_part: SHORT_PART * (1.0 - decay(SHORT, 1)),
    }
}

/// Where kernels find which experts are on their way, and where from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fetches {
    pub(super) list: Slice,
    pub(super) host: Slice,
    /// What is left to be brought.
    pub(super) rest: BroughtConstants,
}

/// A batch's choice of experts: known, or to be made by `place`.
pub(super) struct ChosenExperts {
    pub(super) rows: usize,
    pub(super) pairs: usize,
    /// (pairs): experts, and how much each counts.
    pub(super) ids: Slice,
    pub(super) weights: Slice,
    /// Logits and their correction.
    pub(super) route: Option<([Slice; 2], RouteConstants)>,
    /// What they take, if the processor may compute some.
    pub(super) handed: Option<Value>,
}

impl Lowering<'_> {
    /// What brings a batch's experts to the device before kernels read them, where the device does that: gives slots to
    /// them and fetches those that have none, the first `ready` bytes of each.
    pub(super) fn place(&self, set: ExpertSetId, chosen: &ChosenExperts, ready: usize) -> Vec<Dispatch> {
        let ChosenExperts { rows, pairs, ids, weights, ref route, handed } = *chosen;
        let Some(tiers) = self.memory.experts.placing(set, [rows, pairs]) else { return vec![] };
        let at = tiers.placement(set);
        let [logits, bias] = route.as_ref().map_or([ids; 2], |(slices, _)| *slices);
        let route = route.as_ref().map(|(_, words)| *words);
        let hand_over = self.memory.experts.hand_over().zip(handed);
        let groups = 1 + if route.is_some() || hand_over.is_some() { rows } else { 0 };
        let [shares, list, x, weight, desk] = hand_over.map_or([ids; 5], |(hand_over, x)| {
            let [from, weight] = self.desk_inputs(x);
            [hand_over.shares.into(), hand_over.handed.into(), from, weight, hand_over.desk.into()]
        });
        let placing = [logits, bias, ids, weights, at.table, at.owners, at.worth, at.fetches, at.totals];
        let handing = [shares, list, x, weight, desk];
        let buffers: Vec<Slice> = placing.into_iter().chain(handing).chain([at.foreseen]).collect();
        let Ahead { count: foreseen, bytes, rest } = self.was_foreseen(set, &at.shelf);
        let constants = &PlaceConstants {
            shelf: at.shelf.constants(),
            pairs,
            worth: worth(rows),
            hands: hand_over.is_some(),
            rows,
            set: set.0,
            desk: hand_over.map_or_else(Default::default, |(hand_over, x)| self.desk_rows(hand_over, set, x)),
            routes: route.is_some(),
            route: route.unwrap_or_default(),
            foreseen,
            rest,
        };
        let place = Launch { unit: "tiers", kernel: "place", buffers: &buffers, constants }
            .over([groups, 1, 1], THREADS);
        let slots = self.memory.experts.slots();
        let brought = at.shelf.brought(0..ready.min(at.shelf.slot_bytes));
        let buffers = [at.fetches, at.host, slots];
        let constants = &FetchConstants { brought, there: if rest > 0 { bytes / 16 } else { 0 } };
        let fetch = Launch { unit: "tiers", kernel: "fetch", buffers: &buffers, constants }
            .over([FETCH_GROUPS, pairs.min(at.shelf.experts), 1], THREADS);
        let order = if foreseen > 0 { Order::Joining } else { Order::After };
        vec![place, Dispatch { order, ..fetch }]
    }

    /// What rows on the processor's desk are made of: rows, and the weight of the norm that they take.
    fn desk_inputs(&self, x: Value) -> [Slice; 2] {
        let (from, norm) = self.entering(x);
        [from, norm.map_or(from, |norm| self.vector(norm.weight))]
    }

    /// How rows of `x` lie on the processor's desk.
    fn desk_rows(&self, hand_over: &HandOver, set: ExpertSetId, x: Value) -> DeskRowsConstants {
        let (_, norm) = self.entering(x);
        DeskRowsConstants {
            cols: x.width(),
            first: hand_over.layout.rows,
            words: hand_over.layout.row_words,
            floats: hand_over.form(set) == Some(RowForm::Floats),
            norm: norm.into(),
        }
    }

    /// What puts rows of `x` and the experts of their pairs, `ids`, on the processor's desk, if there is one.
    pub(super) fn offer(&self, set: ExpertSetId, x: Value, ids: Slice, top_k: usize) -> Option<Dispatch> {
        let hand_over = self.memory.experts.hand_over()?;
        let [from, weight] = self.desk_inputs(x);
        let buffers = [ids, from, weight, hand_over.handed.into(), hand_over.desk.into()];
        let desk = self.desk_rows(hand_over, set, x);
        let constants = &OfferConstants { desk, rows: self.rows, top_k };
        let offer = Launch { unit: "share", kernel: "offer", buffers: &buffers, constants };
        Some(offer.over([self.rows, 1, 1], THREADS))
    }

    /// What brings the outputs that the processor has made of a batch's pairs to `out` (pairs, width), where it takes part.
    pub(super) fn collect(
        &self,
        set: ExpertSetId,
        counts: [usize; 2],
        ids: Slice,
        (out, width): (Slice, usize),
    ) -> Option<Dispatch> {
        let experts = &self.memory.experts;
        let hand_over = experts.handing(set, counts)?;
        let (handed, times, desk) = (hand_over.handed, hand_over.times, hand_over.desk);
        let buffers = [experts.table(set, counts), ids, handed.into(), times.into(), desk.into(), out];
        let constants = &CollectConstants { width, desk_outputs: hand_over.layout.outputs };
        let collect = Launch { unit: "share", kernel: "collect", buffers: &buffers, constants };
        Some(collect.over([counts[1], 1, 1], THREADS))
    }

    /// What is left of the experts that a batch of so many pairs of so many rows fetches, when the first `ready` bytes are
    /// there; nothing where the device does not bring them.
    pub(super) fn rest(&self, set: ExpertSetId, counts: [usize; 2], ready: usize) -> Option<Fetches> {
        let at = self.memory.experts.placing(set, counts)?.placement(set);
        let rest = at.shelf.brought(ready..at.shelf.slot_bytes);
        Some(Fetches { list: at.fetches, host: at.host, rest })
    }
}
