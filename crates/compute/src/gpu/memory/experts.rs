//! Routed experts in device memory: slots of one buffer, and a table that tells kernels where an expert's slot is.
//!
//! If all experts fit, each has a slot for good and is loaded before the first batch. If host memory holds them all, it
//! does, and the device has slots for some ([`Tiers`]). Otherwise experts are asked for when they are needed, and change
//! places with those that are worth least ([`exchange`](super::exchange)); slots come in size classes then, because layers
//! may store experts in different encodings.

use super::exchange::Leaving;
use super::expert_layout::{ExpertLayout, ExpertMatrix, layouts, most_chosen};
use super::inputs::FEW_ROWS;
use super::tiers::{ABSENT, HandOver, TierPlan, Tiers};
use super::weights::{ALIGNMENT, plane_bytes};
use crate::backend::{ExpertSource, ExpertView};
use crate::gpu::device::{BufferId, Device, Slice, Words};
use crate::gpu::processor::HandedSet;
use crate::graph::{ExpertSetId, Graph, MoeExpertsOp, Op};
use crate::{Error, Result, Tensor, TensorView};

/// Experts of one layer.
#[derive(Debug)]
struct Set {
    /// gate, up, down; up in place of a gate that experts do not have.
    parts: [ExpertMatrix; 3],
    gated: bool,
    class: usize,
    /// Where its part of the table begins, in entries.
    table: usize,
    /// Slot of each expert within the class.
    slots: Vec<Option<usize>>,
}

/// Slots of one size.
#[derive(Debug)]
struct Class {
    slot_bytes: usize,
    /// Bytes from the start of the buffer.
    start: usize,
    /// What each slot holds, and when that was used last.
    slots: Vec<(Option<(ExpertSetId, u32)>, u64)>,
}

/// All routed experts of a graph.
#[derive(Debug)]
pub(crate) struct DeviceExperts {
    slots: BufferId,
    table: BufferId,
    sets: Vec<Set>,
    classes: Vec<Class>,
    clock: u64,
    /// Whether every expert has a slot for good.
    resident: bool,
    tiers: Option<Tiers>,
    loaded: bool,
    /// Experts that batches chose, and those that were brought.
    counts: [u64; 2],
}

/// Bytes of what says where experts are, in whichever way they are kept: tables and worths of experts, owners of slots,
/// experts on their way.
pub(super) fn table_bytes(graph: &Graph) -> usize {
    let experts: usize = graph.expert_sets().iter().map(|set| set.experts).sum();
    experts * (4 + 4 + 8 + 4) + FEW_ROWS * most_chosen(graph) * 4 + 7 * 4 + HandOver::BYTES + ALIGNMENT
}

/// How many experts a device may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Room {
    /// As many as `budget` bytes hold, at least `minimum`.
    Bytes {
        /// Bytes for slots.
        budget: u64,
        /// Experts that a token needs.
        minimum: usize,
    },
    /// This many, all slots of the largest size; in every layer, where host memory has all experts.
    Slots(usize),
}

/// Experts that are brought at once where nobody waits for them.
const TAKEN_AT_ONCE: usize = 16;

/// Bytes and number of slots by class, ascending, and the class of each set.
struct SlotPlan {
    classes: Vec<(usize, usize)>,
    class_of: Vec<usize>,
    resident: bool,
}

impl Set {
    /// What an expert's matrices are copied to, in their order.
    fn stored(&self) -> &[ExpertMatrix] {
        &self.parts[usize::from(!self.gated)..]
    }
}

impl SlotPlan {
    /// Slots for `budget` bytes, at least `minimum` in every class, or in one class of the largest size.
    fn new(sizes: &[usize], experts: &[usize], budget: u64, minimum: usize) -> Option<Self> {
        let mut distinct: Vec<usize> = sizes.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let class_of: Vec<usize> =
            sizes.iter().map(|s| distinct.iter().position(|d| d == s).expect("a size of the list")).collect();
        let mut counts = vec![0; distinct.len()];
        class_of.iter().zip(experts).for_each(|(class, n)| counts[*class] += n);
        let total: u64 = distinct.iter().zip(&counts).map(|(s, n)| *s as u64 * *n as u64).sum();
        if total <= budget {
            let classes = distinct.into_iter().zip(counts).collect();
            return Some(Self { classes, class_of, resident: true });
        }
        let share = |n: &usize| (u128::from(budget) * *n as u128 / u128::from(total)) as usize;
        let split: Vec<usize> = counts.iter().map(share).collect();
        if split.iter().zip(&counts).all(|(slots, n)| *slots >= minimum.min(*n)) {
            let classes = distinct.into_iter().zip(split).collect();
            return Some(Self { classes, class_of, resident: false });
        }
        let largest = distinct.last().copied()?;
        let slots = (budget / largest as u64) as usize;
        let all: usize = counts.iter().sum();
        (slots >= minimum.min(all)).then(|| Self {
            classes: vec![(largest, slots.min(all))],
            class_of: vec![0; sizes.len()],
            resident: false,
        })
    }
}

impl DeviceExperts {
    /// Slots for the experts of `graph`; with `host`, host memory may take all of them.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(crate) fn new(device: &mut dyn Device, graph: &Graph, room: Room, host: bool) -> Result<Self> {
        let layouts = layouts(graph)?;
        let sizes: Vec<usize> = layouts.iter().map(|layout| layout.bytes).collect();
        let experts: Vec<usize> = graph.expert_sets().iter().map(|set| set.experts).collect();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let plan = match room {
            Room::Bytes { budget, minimum } => {
                SlotPlan::new(&sizes, &experts, budget, minimum).ok_or_else(|| Error::DeviceMemory {
                    device: device.info().name,
                    wanted: (largest * minimum) as u64,
                    free: budget,
                })?
            }
            Room::Slots(slots) => SlotPlan {
                classes: vec![(largest, slots.max(1))],
                class_of: vec![0; sizes.len()],
                resident: slots >= experts.iter().sum(),
            },
        };
        let tier_plan = match room {
            Room::Bytes { budget, minimum } if host && !plan.resident => {
                TierPlan::new(&layouts, &experts, budget, minimum)
            }
            Room::Slots(slots) if host => Some(TierPlan::of_slots(&layouts, &experts, slots)),
            _ => None,
        };
        if let Some(plan) = tier_plan {
            let set = |layout: ExpertLayout| Set {
                parts: layout.parts,
                gated: layout.gated,
                class: 0,
                table: 0,
                slots: vec![],
            };
            let tiers = Tiers::new(device, graph, &plan)?;
            return Ok(Self {
                slots: device.alloc(plan.slot_bytes)?,
                table: device.alloc(4)?,
                sets: layouts.into_iter().map(set).collect(),
                classes: vec![],
                clock: 0,
                resident: false,
                tiers: Some(tiers),
                loaded: false,
                counts: [0; 2],
            });
        }
        let mut end = 0;
        let mut class = |(slot_bytes, slots): (usize, usize)| {
            let start = end;
            end += slot_bytes * slots;
            Class { slot_bytes, start, slots: vec![(None, 0); slots] }
        };
        let classes: Vec<Class> = plan.classes.into_iter().map(&mut class).collect();
        let mut entries = 0;
        let mut sets = vec![];
        for ((layout, class), experts) in layouts.into_iter().zip(plan.class_of).zip(experts) {
            let (ExpertLayout { parts, gated, .. }, slots) = (layout, vec![None; experts]);
            sets.push(Set { parts, gated, class, table: entries, slots });
            entries += experts;
        }
        let slots = device.alloc(end.max(ALIGNMENT))?;
        let table = device.alloc((entries * 4).max(4))?;
        device.upload(table.into(), &vec![0xff; entries * 4])?;
        let (resident, tiers) = (plan.resident, None);
        Ok(Self { slots, table, sets, classes, clock: 0, resident, tiers, loaded: false, counts: [0; 2] })
    }

    /// Whether every expert has a slot for good.
    pub(crate) fn resident(&self) -> bool {
        self.resident
    }

    /// Whether experts come from the host's cache and go back there.
    pub(crate) fn exchanges(&self) -> bool {
        !self.resident && self.tiers.is_none() && !self.sets.is_empty()
    }

    /// The buffer of slots.
    pub(crate) fn slots(&self) -> Slice {
        self.slots.into()
    }

    /// Whether kernels for so many pairs of so many rows find all their experts without the host.
    pub(crate) fn all_at_hand(&self, set: ExpertSetId, counts: [usize; 2]) -> bool {
        self.resident || self.places(set, counts)
    }

    /// Whether the outputs of so many pairs of so many rows can be summed as they are made: their experts are there at once.
    pub(crate) fn all_at_once(&self, set: ExpertSetId, [rows, pairs]: [usize; 2]) -> bool {
        match &self.tiers {
            Some(tiers) => tiers.places(set, rows, pairs),
            None => self.room(set) >= pairs.min(self.sets[set.0].slots.len()),
        }
    }

    /// Whether the device itself brings the experts of so many pairs of so many rows.
    pub(crate) fn places(&self, set: ExpertSetId, [rows, pairs]: [usize; 2]) -> bool {
        self.tiers.as_ref().is_some_and(|tiers| tiers.places(set, rows, pairs))
    }

    /// The tiers that bring the experts of so many pairs of so many rows by themselves.
    pub(crate) fn placing(&self, set: ExpertSetId, counts: [usize; 2]) -> Option<&Tiers> {
        self.tiers.as_ref().filter(|_| self.places(set, counts))
    }

    /// The table of a set, for kernels of so many pairs of so many rows.
    pub(crate) fn table(&self, set: ExpertSetId, [rows, pairs]: [usize; 2]) -> Slice {
        match &self.tiers {
            Some(tiers) => tiers.table(set, tiers.places(set, rows, pairs)),
            None => self.own_table(set),
        }
    }

    fn own_table(&self, set: ExpertSetId) -> Slice {
        Slice { buffer: self.table, offset: self.sets[set.0].table * 4 }
    }

    /// gate, up and down of a set; up in place of a gate that its experts do not have.
    pub(crate) fn parts(&self, set: ExpertSetId) -> &[ExpertMatrix; 3] {
        &self.sets[set.0].parts
    }

    /// Experts of a set that can be present at once.
    pub(crate) fn room(&self, set: ExpertSetId) -> usize {
        self.classes[self.sets[set.0].class].slots.len()
    }

    /// Lets the processor compute experts that host memory keeps, and gives those sets for which it can, if there are some.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(crate) fn share(
        &mut self,
        device: &mut dyn Device,
        graph: &Graph,
        tensors: &[Tensor],
    ) -> Result<Option<Vec<Option<HandedSet>>>> {
        let Some(tiers) = &mut self.tiers else { return Ok(None) };
        let mut sets: Vec<Option<HandedSet>> = self.sets.iter().map(|_| None).collect();
        for node in graph.nodes() {
            let Op::MoeExperts(MoeExpertsOp { routing, experts, mlp, .. }) = &node.op else { continue };
            let place = tiers.shelf(*experts).in_host();
            let parts = &self.sets[experts.0].parts;
            sets[experts.0] = HandedSet::new(parts, mlp, routing.top_k(), tensors, place);
        }
        tiers.share(device, graph, &sets)?;
        Ok(sets.iter().any(Option::is_some).then_some(sets))
    }

    /// Experts in host memory, if they are there.
    pub(crate) fn tiers(&mut self) -> Option<(&mut Tiers, BufferId)> {
        self.tiers.as_mut().map(|tiers| (tiers, self.slots))
    }

    /// Experts that batches chose where not all have slots, and those of them that were brought.
    pub(crate) fn counts(&self) -> [u64; 2] {
        self.counts
    }

    /// If all experts have a place, on the device or in host memory, loads those that are not there yet.
    pub(crate) fn load_all(&mut self, device: &mut dyn Device, source: &mut dyn ExpertSource) -> Result<()> {
        if self.loaded {
            return Ok(());
        }
        if let Some(tiers) = &mut self.tiers {
            for (index, set) in self.sets.iter().enumerate() {
                let id = ExpertSetId(index);
                let slot_bytes = tiers.shelf(id).slot_bytes;
                let slots = tiers.host_bytes(device, id)?.chunks_exact_mut(slot_bytes);
                let mut slots: Vec<_> = slots.map(Some).collect();
                read_all(set, id, &mut slots, source)?;
            }
            tiers.fill(device, self.slots)?;
            self.loaded = true;
            return Ok(());
        }
        if !self.resident {
            return Ok(());
        }
        for set in (0..self.sets.len()).map(ExpertSetId) {
            let ids: Vec<u32> = (0..self.sets[set.0].slots.len() as u32).collect();
            self.bring(device, set, (&ids, &[]), source)?;
            self.publish(device, set, |_| true)?;
        }
        self.loaded = true;
        Ok(())
    }

    /// Gives slots to those of `ids` that have none: all of them are then present. `chosen` are those of them that a batch
    /// chose, for the source's statistics. No work that reads experts may be queued.
    pub(crate) fn bring(
        &mut self,
        device: &mut dyn Device,
        set: ExpertSetId,
        (ids, chosen): (&[u32], &[u32]),
        source: &mut dyn ExpertSource,
    ) -> Result<()> {
        self.clock += 1;
        let Set { class, slots, .. } = &self.sets[set.0];
        for slot in ids.iter().filter_map(|id| slots[*id as usize]) {
            self.classes[*class].slots[slot].1 = self.clock;
        }
        let missing: Vec<u32> = ids.iter().copied().filter(|id| slots[*id as usize].is_none()).collect();
        if !chosen.is_empty() {
            self.counts[0] += chosen.len() as u64;
            self.counts[1] += missing.len() as u64;
        }
        // What the device holds is read by nobody: it has left host memory.
        source.announce_missing(set, chosen, &missing)?;
        if missing.is_empty() {
            return Ok(());
        }
        let sweep = (4 * ids.len() >= 3 * self.sets[set.0].slots.len()).then_some(set);
        let mut outcome = Ok(());
        let mut free = self.vacate(device, (set, sweep), missing.len(), source)?;
        let visited = source.visit(set, &missing, &mut |views| {
            for view in views {
                if outcome.is_ok() {
                    let slot = free.pop().expect("a slot for every expert that is missing");
                    outcome = self.store(device, set, view, slot);
                }
            }
            if outcome.is_ok() {
                outcome = device.finish_copies();
            }
        });
        let outcome = outcome.and(device.finish_copies()).and(visited);
        source.exchanged(set, if outcome.is_ok() { &missing } else { &[] });
        outcome
    }

    /// Empties `count` slots for experts of a set, in a sweep if there is one, and offers the source what they held.
    fn vacate(
        &mut self,
        device: &mut dyn Device,
        (set, sweep): (ExpertSetId, Option<ExpertSetId>),
        count: usize,
        source: &mut dyn ExpertSource,
    ) -> Result<Vec<usize>> {
        let index = self.sets[set.0].class;
        let of_class = |(_, set): &(usize, &Set)| set.class == index;
        let sets: Vec<usize> = self.sets.iter().enumerate().filter(of_class).map(|(at, _)| at).collect();
        let most = sets.iter().map(|set| self.sets[*set].slots.len()).max().unwrap_or(0);
        let class = &self.classes[index];
        let sweep = sweep.map(|set| set.0);
        let leaving = Leaving { slots: &class.slots, now: self.clock, sets: &sets, most, sweep };
        let chosen = leaving.choose(count, |(set, expert), used| {
            source.worths(set).get(expert as usize).copied().unwrap_or(used as f64)
        });
        for slot in &chosen {
            let class = &mut self.classes[index];
            let (Some((set, expert)), _) = std::mem::take(&mut class.slots[*slot]) else { continue };
            let start = class.start + slot * class.slot_bytes;
            let from = Slice { buffer: self.slots, offset: start };
            let Set { slots, .. } = &mut self.sets[set.0];
            slots[expert as usize] = None;
            let stored = self.sets[set.0].stored();
            source.give(set, expert, &mut |planes| copy_planes(device, from, stored, planes))?;
        }
        Ok(chosen)
    }

    /// Starts copying an expert to an empty slot.
    fn store(
        &mut self,
        device: &mut dyn Device,
        id: ExpertSetId,
        view: &ExpertView<'_>,
        slot: usize,
    ) -> Result<()> {
        let set = &mut self.sets[id.0];
        let class = &mut self.classes[set.class];
        let start = class.start + slot * class.slot_bytes;
        for (part, matrix) in set.stored().iter().zip(view.matrices()) {
            copy_part(device, Slice { buffer: self.slots, offset: start }, part, matrix)?;
        }
        set.slots[view.id as usize] = Some(slot);
        class.slots[slot] = (Some((id, view.id)), self.clock);
        Ok(())
    }

    /// Gives slots that are empty to each layer's first experts.
    pub(crate) fn take(&mut self, device: &mut dyn Device, source: &mut dyn ExpertSource) -> Result<()> {
        self.load_all(device, source)?;
        if self.loaded {
            return Ok(());
        }
        for index in 0..self.sets.len() {
            let class = &self.classes[self.sets[index].class];
            let sharing = self.sets.iter().filter(|set| set.class == self.sets[index].class).count();
            let empty = class.slots.iter().filter(|(owner, _)| owner.is_none()).count();
            let share = (class.slots.len() / sharing).min(empty).min(self.sets[index].slots.len());
            let ids: Vec<u32> = (0..share as u32).collect();
            for some in ids.chunks(TAKEN_AT_ONCE) {
                self.bring(device, ExpertSetId(index), (some, &[]), source)?;
            }
        }
        Ok(())
    }

    /// Writes a set's part of the table: the slots of those experts that `shown` says.
    pub(crate) fn publish(
        &self,
        device: &mut dyn Device,
        id: ExpertSetId,
        shown: impl Fn(u32) -> bool,
    ) -> Result<()> {
        let set = &self.sets[id.0];
        let class = &self.classes[set.class];
        let mut table = vec![];
        for (expert, slot) in set.slots.iter().enumerate() {
            let address = |slot: usize| (class.start + slot * class.slot_bytes) / ALIGNMENT;
            match slot.filter(|_| shown(expert as u32)) {
                Some(slot) => address(slot).append(&mut table),
                None => ABSENT.append(&mut table),
            }
        }
        device.upload(self.own_table(id), &table)
    }
}

/// Copies an expert's planes in a slot to host memory.
fn copy_planes(
    device: &mut dyn Device,
    slot: Slice,
    parts: &[ExpertMatrix],
    planes: &mut [&mut [u8]],
) -> Result<()> {
    let starts = parts.iter().flat_map(|part| &part.part.offsets[..part.matrix.dtype.planes()]);
    starts.zip(planes).try_for_each(|(start, plane)| device.copy_out(slot.at(*start), plane))
}

/// Threads that bring experts into the form of slots, at most.
const WRITERS: usize = 8;

/// Writes all experts of a set to `slots`.
fn read_all(
    set: &Set,
    id: ExpertSetId,
    slots: &mut [Option<&mut [u8]>],
    source: &mut dyn ExpertSource,
) -> Result<()> {
    let ids: Vec<u32> = (0..slots.len() as u32).collect();
    let mut outcome = Ok(());
    let visited = source.visit(id, &ids, &mut |views| {
        let mut work: Vec<_> =
            views.iter().filter_map(|view| Some((view, slots[view.id as usize].take()?))).collect();
        let each = work.len().div_ceil(WRITERS).max(1);
        let write = |part: &mut [(&ExpertView<'_>, &mut [u8])]| {
            part.iter_mut().try_for_each(|(view, slot)| write_expert(set, view, slot))
        };
        let written: Vec<Result<()>> = if work.len() <= 1 {
            vec![write(&mut work)]
        } else {
            std::thread::scope(|scope| {
                let threads: Vec<_> = work.chunks_mut(each).map(|part| scope.spawn(|| write(part))).collect();
                threads.into_iter().map(|t| t.join().expect("copying does not panic")).collect()
            })
        };
        outcome = std::mem::replace(&mut outcome, Ok(())).and(written.into_iter().collect());
    });
    outcome.and(visited)
}

fn write_expert(set: &Set, view: &ExpertView<'_>, slot: &mut [u8]) -> Result<()> {
    let mut rows = vec![];
    for (part, matrix) in set.stored().iter().zip(view.matrices()) {
        for plane in 0..matrix.dtype().planes() {
            let bytes = plane_bytes(matrix, plane, &mut rows)?;
            slot[part.part.offsets[plane]..][..bytes.len()].copy_from_slice(bytes);
        }
    }
    Ok(())
}

fn copy_part(device: &mut dyn Device, slot: Slice, part: &ExpertMatrix, view: &TensorView<'_>) -> Result<()> {
    for plane in 0..view.dtype().planes() {
        let mut rows = vec![];
        let to = slot.at(part.part.offsets[plane]);
        let bytes = plane_bytes(view, plane, &mut rows)?;
        // Rows that were gathered here do not outlive this call.
        if bytes.as_ptr() == view.plane(plane).as_ptr() {
            device.copy_in(to, bytes)?;
        } else {
            device.upload(to, bytes)?;
        }
    }
    Ok(())
}
