//! [`Tiers`]: experts that a device has no room for, in host memory, each in the form of a slot.
//!
//! Every layer has slots of its own. For few rows the device decides which experts they hold and fetches what is missing
//! (`kernels/tiers.h`), so that the host is not waited for. For many rows the host knows beforehand that all experts are
//! needed: it copies those without a slot through a ring of parts while others are computed, layer after layer, and
//! leaves the slots alone. A prompt so never pushes out what its next layer needs.
//!
//! What decides which experts stay is how often tokens chose them, over a long and a short while; see `docs/streaming.md`.

use std::ops::Range;

use super::expert_layout::ExpertLayout;
use super::inputs::{FEW_ROWS, FEW_ROWS_BESIDE_PANELS};
use super::weights::ALIGNMENT;
use crate::Result;
use crate::gpu::arguments::{BroughtConstants, ShelfConstants};
use crate::gpu::device::{BufferId, Device, Slice};
use crate::gpu::processor::MOST_PAIRS;
use crate::graph::{ExpertSetId, Graph, Op, RouteOp};

/// Table entry of an expert that is not there.
pub(super) const ABSENT: u32 = u32::MAX;
/// Parts of the ring, and the most experts of one.
const PARTS: usize = 4;
const PART_EXPERTS: usize = 8;
/// Bytes for tables and other small buffers, where slots would otherwise fill the memory.
const SMALL_BUFFERS: u64 = 16 << 20;
/// The ring takes this part of the memory for experts, at most.
const RING_SHARE: u64 = 8;
/// Counts that `place` keeps of a device's experts.
const TOTALS: usize = 5;
/// Experts that a set is foreseen to choose, at most, and words before their list: as in `kernels/placing.h`.
pub(crate) const MOST_FORESEEN: usize = 4;
const FORESEEN_LIST: usize = 1;
const FORESEEN_WORDS: usize = FORESEEN_LIST + MOST_FORESEEN;

/// A layer's slots and experts, in bytes from the start of the device's and the host's memory for experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shelf {
    pub(crate) experts: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    pub(super) first_slot: usize,
    pub(super) first_expert: usize,
    /// Where its entries begin in the tables of experts and of slots.
    expert_entry: usize,
    slot_entry: usize,
}

impl Shelf {
    pub(crate) fn constants(&self) -> ShelfConstants {
        ShelfConstants {
            experts: self.experts,
            slots: self.slots,
            first_expert: self.first_expert / ALIGNMENT,
            first_slot: self.first_slot / ALIGNMENT,
            stride: self.slot_bytes / ALIGNMENT,
        }
    }

    /// Where its experts begin in host memory, how far apart they are, and how many there are.
    pub(super) fn in_host(&self) -> (usize, usize, usize) {
        (self.first_expert, self.slot_bytes, self.experts)
    }

    /// Bringing a range of its slots' bytes, multiples of 16.
    pub(crate) fn brought(&self, bytes: Range<usize>) -> BroughtConstants {
        BroughtConstants { shelf: self.constants(), first: bytes.start / 16, count: bytes.len() / 16 }
    }
}

/// Memory of a set's placement.
pub(crate) struct Placement {
    pub(crate) shelf: Shelf,
    /// Where each expert's slot begins.
    pub(crate) table: Slice,
    /// Whose each slot is.
    pub(crate) owners: Slice,
    /// Frequencies of experts.
    pub(crate) worth: Slice,
    /// The experts on their way.
    pub(crate) fetches: Slice,
    /// How many were chosen and fetched so far.
    pub(crate) totals: Slice,
    /// What the layer before has foreseen, the list of experts in it, and the logits by which that is foreseen.
    pub(crate) foreseen: Slice,
    pub(crate) foreseen_list: Slice,
    pub(crate) logits: Slice,
    /// All experts in host memory.
    pub(crate) host: Slice,
}

/// How device memory for experts is divided.
#[derive(Debug, Clone)]
pub(super) struct TierPlan {
    shelves: Vec<Shelf>,
    ring: Ring,
    /// Bytes on the device and of the host.
    pub(super) slot_bytes: usize,
    pub(super) host_bytes: usize,
}

/// Memory that experts without slots pass through.
#[derive(Debug, Clone, Copy)]
struct Ring {
    start: usize,
    part_bytes: usize,
    /// The part that is filled next.
    next: usize,
}

/// Bytes of what is foreseen.
pub(super) fn foresight_bytes(graph: &Graph) -> usize {
    let experts = graph.expert_sets().iter().map(|set| set.experts);
    4 * (TOTALS + FORESEEN_WORDS * graph.expert_sets().len() + FEW_ROWS * experts.max().unwrap_or(0))
}

impl TierPlan {
    /// Slots for `budget` bytes, at least `minimum` in every layer; `None` if that is too little.
    pub(super) fn new(
        layouts: &[ExpertLayout],
        experts: &[usize],
        budget: u64,
        minimum: usize,
    ) -> Option<Self> {
        let largest = layouts.iter().map(|layout| layout.bytes).max()?;
        let most = usize::try_from(budget / RING_SHARE).ok()? / (PARTS * largest);
        let part_bytes = most.clamp(1, PART_EXPERTS) * largest;
        let left = budget.checked_sub((PARTS * part_bytes) as u64)?;
        let total: u64 = layouts.iter().zip(experts).map(|(layout, n)| (layout.bytes * n) as u64).sum();
        let slots = |experts: usize| {
            let share = u128::from(left) * experts as u128 / u128::from(total);
            share.min(experts as u128) as usize
        };
        let enough = experts.iter().all(|n| slots(*n) >= minimum.min(*n));
        // What rounding leaves is a slot more for the first layers, but for what small buffers take.
        let mut slots: Vec<usize> = experts.iter().map(|n| slots(*n)).collect();
        let taken: u64 = layouts.iter().zip(&slots).map(|(layout, n)| (layout.bytes * n) as u64).sum();
        let mut left = left.saturating_sub(taken + SMALL_BUFFERS);
        for ((layout, slots), experts) in layouts.iter().zip(&mut slots).zip(experts) {
            if *slots < *experts && layout.bytes as u64 <= left {
                *slots += 1;
                left -= layout.bytes as u64;
            }
        }
        enough.then(|| Self::with(layouts, experts, part_bytes, &slots))
    }

    /// So many slots in every layer, and a ring whose parts hold one expert.
    pub(super) fn of_slots(layouts: &[ExpertLayout], experts: &[usize], slots: usize) -> Self {
        let largest = layouts.iter().map(|layout| layout.bytes).max().unwrap_or(ALIGNMENT);
        let slots: Vec<usize> = experts.iter().map(|experts| slots.min(*experts)).collect();
        Self::with(layouts, experts, largest, &slots)
    }

    fn with(layouts: &[ExpertLayout], experts: &[usize], part_bytes: usize, slots: &[usize]) -> Self {
        let mut plan = Self {
            shelves: vec![],
            ring: Ring { start: 0, part_bytes, next: 0 },
            slot_bytes: 0,
            host_bytes: 0,
        };
        let (mut expert_entry, mut slot_entry) = (0, 0);
        for ((layout, experts), slots) in
            layouts.iter().zip(experts.iter().copied()).zip(slots.iter().copied())
        {
            plan.shelves.push(Shelf {
                experts,
                slots,
                slot_bytes: layout.bytes,
                first_slot: plan.slot_bytes,
                first_expert: plan.host_bytes,
                expert_entry,
                slot_entry,
            });
            plan.slot_bytes += slots * layout.bytes;
            plan.host_bytes += experts * layout.bytes;
            expert_entry += experts;
            slot_entry += slots;
        }
        plan.ring.start = plan.slot_bytes;
        plan.slot_bytes += PARTS * part_bytes;
        plan
    }
}

/// Experts in host memory, and which of them have slots.
#[derive(Debug)]
pub(crate) struct Tiers {
    shelves: Vec<Shelf>,
    ring: Ring,
    host: BufferId,
    /// Tables of experts: what the device keeps, and what the host shows to kernels of many rows.
    table: BufferId,
    shown: BufferId,
    owners: BufferId,
    worth: BufferId,
    fetches: BufferId,
    /// Experts that batches of few rows chose, those of them that were fetched and handed over, and those that were asked for ahead and
    /// of use.
    totals: BufferId,
    /// What each set is foreseen to choose, and logits for that.
    foreseen: BufferId,
    logits: BufferId,
    /// The same of batches of many rows.
    streamed: [u64; 2],
    /// What the device's table is, unless it has changed since.
    known: Option<Vec<u32>>,
}

impl Tiers {
    pub(super) fn new(device: &mut dyn Device, graph: &Graph, plan: &TierPlan) -> Result<Self> {
        let experts: usize = plan.shelves.iter().map(|shelf| shelf.experts).sum();
        let slots: usize = plan.shelves.iter().map(|shelf| shelf.slots).sum();
        let chosen = graph.nodes().iter().map(|node| match &node.op {
            Op::Route(RouteOp { route, .. }) => route.top_k,
            _ => 0,
        });
        let most_fetches = FEW_ROWS * chosen.max().unwrap_or(0);
        let tiers = Self {
            shelves: plan.shelves.clone(),
            ring: plan.ring,
            host: device.alloc_host(plan.host_bytes)?,
            table: device.alloc(experts * 4)?,
            shown: device.alloc(experts * 4)?,
            owners: device.alloc((slots * 4).max(4))?,
            worth: device.alloc(experts * 8)?,
            fetches: device.alloc((most_fetches * 4).max(4))?,
            totals: device.alloc(TOTALS * 4)?,
            foreseen: device.alloc(plan.shelves.len() * FORESEEN_WORDS * 4)?,
            logits: device.alloc(FEW_ROWS * plan.shelves.iter().map(|s| s.experts).max().unwrap_or(1) * 4)?,
            streamed: [0; 2],
            known: None,
        };
        device.clear(tiers.worth.into(), experts * 8)?;
        device.clear(tiers.totals.into(), TOTALS * 4)?;
        // All is trusted to come true, and nothing is foreseen yet.
        let mut foreseen = [ABSENT; FORESEEN_WORDS];
        foreseen[0] = 1f32.to_bits();
        device.upload(tiers.foreseen.into(), &words(&foreseen.repeat(plan.shelves.len())))?;
        Ok(tiers)
    }

    pub(super) fn shelf(&self, set: ExpertSetId) -> &Shelf {
        &self.shelves[set.0]
    }

    /// All experts in host memory.
    pub(crate) fn host(&self) -> BufferId {
        self.host
    }

    /// Starts copies of so many experts of a set, for the sake of the time that they take.
    pub(crate) fn try_copies(
        &mut self,
        device: &mut dyn Device,
        slots: BufferId,
        set: usize,
        count: usize,
    ) -> Result<()> {
        let shelf = self.shelves[set];
        let to = Slice { buffer: slots, offset: self.ring.start };
        for copy in 0..count {
            let offset = shelf.first_expert + copy % shelf.experts * shelf.slot_bytes;
            device.copy_from_host(Slice { buffer: self.host, offset }, to, shelf.slot_bytes)?;
        }
        Ok(())
    }

    /// The host's copies of a layer's experts, each of a slot's bytes.
    pub(super) fn host_bytes<'a>(
        &self,
        device: &'a mut dyn Device,
        set: ExpertSetId,
    ) -> Result<&'a mut [u8]> {
        let shelf = &self.shelves[set.0];
        let all = device.host_bytes(self.host)?;
        Ok(&mut all[shelf.first_expert..][..shelf.experts * shelf.slot_bytes])
    }

    /// Fills slots with each layer's first experts, once all are in host memory.
    pub(super) fn fill(&mut self, device: &mut dyn Device, slots: BufferId) -> Result<()> {
        let (mut table, mut owners) = (vec![], vec![]);
        for shelf in &self.shelves {
            let from = Slice { buffer: self.host, offset: shelf.first_expert };
            let to = Slice { buffer: slots, offset: shelf.first_slot };
            device.copy_from_host(from, to, shelf.slots * shelf.slot_bytes)?;
            for expert in 0..shelf.experts {
                let slot = shelf.first_slot + expert * shelf.slot_bytes;
                table.push(if expert < shelf.slots { (slot / ALIGNMENT) as u32 } else { ABSENT });
            }
            owners.extend(0..shelf.slots as u32);
        }
        device.upload(self.table.into(), &words(&table))?;
        device.upload(self.owners.into(), &words(&owners))?;
        self.known = Some(table);
        device.finish_copies()
    }

    /// Whether the device itself gives slots to the experts of so many pairs of so many rows: there are enough, or the
    /// processor `takes` those that find none, in batches whose products are made row by row on every device.
    pub(super) fn places(&self, set: ExpertSetId, rows: usize, pairs: usize, takes: bool) -> bool {
        let shelf = &self.shelves[set.0];
        let fits = pairs.min(shelf.experts) <= shelf.slots;
        pairs <= MOST_PAIRS && (rows <= FEW_ROWS && fits || rows <= FEW_ROWS_BESIDE_PANELS && takes)
    }

    /// The table that kernels are given.
    pub(super) fn table(&self, set: ExpertSetId, placed: bool) -> Slice {
        let buffer = if placed { self.table } else { self.shown };
        Slice { buffer, offset: 4 * self.shelves[set.0].expert_entry }
    }

    /// What placing the experts of a set reads and writes.
    pub(crate) fn placement(&self, set: ExpertSetId) -> Placement {
        let shelf = &self.shelves[set.0];
        let foreseen = Slice { buffer: self.foreseen, offset: 4 * FORESEEN_WORDS * set.0 };
        Placement {
            shelf: *shelf,
            table: self.table(set, true),
            owners: Slice { buffer: self.owners, offset: 4 * shelf.slot_entry },
            worth: Slice { buffer: self.worth, offset: 8 * shelf.expert_entry },
            fetches: self.fetches.into(),
            totals: self.totals.into(),
            foreseen,
            foreseen_list: foreseen.at(4 * FORESEEN_LIST),
            logits: self.logits.into(),
            host: self.host.into(),
        }
    }

    /// Experts that batches chose so far, those of them that came over the bus, and those that the processor computed; then those that
    /// came ahead, and those of them that were chosen.
    pub(crate) fn traffic(&self, device: &mut dyn Device) -> Result<[u64; TOTALS]> {
        let mut bytes = [0; TOTALS * 4];
        device.download(self.totals.into(), &mut bytes)?;
        let mut counts = [0; TOTALS];
        for (count, word) in counts.iter_mut().zip(bytes.as_chunks().0) {
            *count = u64::from(u32::from_le_bytes(*word));
        }
        counts[0] += self.streamed[0];
        counts[1] += self.streamed[1];
        Ok(counts)
    }

    /// The device decides from now on: what is known of its table is out of date.
    pub(crate) fn forget(&mut self) {
        self.known = None;
    }

    /// Runs `body` for groups of `wanted`: those with slots, then the others as they pass through the ring.
    pub(crate) fn stream(
        &mut self,
        device: &mut dyn Device,
        slots: BufferId,
        set: ExpertSetId,
        wanted: &[u32],
        body: impl Fn(&mut dyn Device) -> Result<()>,
    ) -> Result<()> {
        let shelf = self.shelves[set.0];
        if self.known.is_none() {
            let entries: usize = self.shelves.iter().map(|shelf| shelf.experts).sum();
            let mut bytes = vec![0; 4 * entries];
            device.download(self.table.into(), &mut bytes)?;
            self.known = Some(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect());
        }
        let known =
            self.known.as_ref().map_or(&[][..], |table| &table[shelf.expert_entry..][..shelf.experts]);
        let (here, elsewhere): (Vec<u32>, Vec<u32>) =
            wanted.iter().partition(|expert| known[**expert as usize] != ABSENT);
        self.streamed[0] += wanted.len() as u64;
        self.streamed[1] += elsewhere.len() as u64;
        let mut shown = vec![ABSENT; shelf.experts];
        here.iter().for_each(|expert| shown[*expert as usize] = known[*expert as usize]);
        let to = self.table(set, false);
        if !here.is_empty() {
            device.upload(to, &words(&shown))?;
            body(device)?;
        }
        for group in elsewhere.chunks(self.ring.part_bytes / shelf.slot_bytes) {
            let part = self.ring.next;
            self.ring.next = (part + 1) % PARTS;
            device.copies_after(part)?;
            shown.fill(ABSENT);
            let start = self.ring.start + part * self.ring.part_bytes;
            for (place, expert) in group.iter().enumerate() {
                let from = shelf.first_expert + *expert as usize * shelf.slot_bytes;
                let at = start + place * shelf.slot_bytes;
                let (from, to) =
                    (Slice { buffer: self.host, offset: from }, Slice { buffer: slots, offset: at });
                device.copy_from_host(from, to, shelf.slot_bytes)?;
                shown[*expert as usize] = (at / ALIGNMENT) as u32;
            }
            device.work_after_copies()?;
            device.upload(to, &words(&shown))?;
            body(device)?;
            device.mark_work(part)?;
        }
        Ok(())
    }
}

pub(super) fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::gpu::memory::expert_layout::layouts;
    use crate::graph::{ExpertSet, GraphBuilder, MatrixSpec, Precision};

    /// Shares are rounded down, and layers with fewer experts have smaller ones.
    #[test]
    fn every_layer_has_its_minimum_or_there_is_no_plan() {
        const EXPERTS: [usize; 3] = [24, 4, 9];
        let mut g = GraphBuilder::new();
        let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
        for (layer, experts) in EXPERTS.into_iter().enumerate() {
            let (up, down) = (matrix(16, 64), matrix(64, 16));
            g.expert_set(ExpertSet { layer, experts, gate: Some(up), up, down }).unwrap();
        }
        let table = g.weight("table", matrix(3, 64));
        let x = g.embed(table);
        let rows = g.gather_rows(x);
        let logits = g.linear(rows, table, None, Precision::F32).unwrap();
        let layouts = layouts(&g.finish(logits)).unwrap();
        let all: u64 = layouts.iter().zip(EXPERTS).map(|(layout, n)| (layout.bytes * n) as u64).sum();
        for minimum in 1..=4 {
            let (mut none, mut some) = (0, 0);
            for part in 0..=200 {
                let Some(plan) = TierPlan::new(&layouts, &EXPERTS, all * part / 100, minimum) else {
                    none += 1;
                    continue;
                };
                some += 1;
                for (shelf, experts) in plan.shelves.iter().zip(EXPERTS) {
                    let enough = shelf.slots >= minimum.min(experts) && shelf.slots <= experts;
                    assert!(enough, "{} of {experts}, at least {minimum}, {part} %", shelf.slots);
                }
            }
            assert!(none > 10 && some > 10, "{minimum}: {none} without a plan, {some} with one");
        }
    }
}
