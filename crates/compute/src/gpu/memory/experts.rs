//! Routed experts in device memory: slots of one buffer, and a table that tells kernels where an expert's slot is.
//!
//! If all experts fit, each has a slot for good and is loaded before the first batch. If host memory holds them all, it
//! does, and the device has slots for some ([`Tiers`]). Otherwise experts are asked for when they are needed, and those that
//! are worth it change places with others ([`exchange`](super::exchange)); slots come in size classes then, because layers
//! may store experts in different encodings.

use super::exchange::{Owner, guests};
use super::expert_layout::{ExpertLayout, ExpertMatrix, layouts, most_chosen};
use super::hand_over::HandOver;
use super::held::Held;
use super::inputs::{FEW_ROWS, FEW_ROWS_BESIDE_PANELS};
use super::low_rank::adapts_experts;
use super::tiers::{ABSENT, TierPlan, Tiers, foresight_bytes, words};
use super::weights::{ALIGNMENT, plane_bytes};
use crate::backend::{ExpertSource, ExpertView};
use crate::gpu::device::{BufferId, Device, DeviceInfo, Slice};
use crate::gpu::processor::{HandedSet, MOST_PAIRS, RowForm};
use crate::graph::{ExpertSet, ExpertSetId, Graph, MoeExpertsOp, Op};
use crate::{Error, Result, Tensor, TensorView};

/// Experts of one layer.
#[derive(Debug)]
pub(super) struct Set {
    /// gate, up, down; up in place of a gate that experts do not have.
    parts: [ExpertMatrix; 3],
    gated: bool,
    pub(super) class: usize,
    /// Where its part of the table begins, in entries.
    table: usize,
    /// Slot of each expert within the class.
    pub(super) slots: Vec<Option<usize>>,
    /// Its part of the table as the device has it; nothing where that is not known.
    shown: Vec<u32>,
}

/// Slots of one size.
#[derive(Debug)]
pub(super) struct Class {
    pub(super) slot_bytes: usize,
    /// Bytes from the start of the buffer.
    pub(super) start: usize,
    /// What each slot holds, and when that was used last.
    pub(super) slots: Vec<(Option<Owner>, u64)>,
    /// The slots that hold nothing; so many of them are for guests.
    pub(super) empty: Vec<usize>,
    pub(super) guests: usize,
}

/// All routed experts of a graph.
#[derive(Debug)]
pub(crate) struct DeviceExperts {
    pub(super) slots: BufferId,
    table: BufferId,
    pub(super) sets: Vec<Set>,
    pub(super) classes: Vec<Class>,
    pub(super) clock: u64,
    /// Those that the device is to have; others are on other devices.
    held: Held,
    /// Whether every one of them has a slot for good.
    resident: bool,
    tiers: Option<Tiers>,
    hand_over: Option<HandOver>,
    loaded: bool,
    /// Experts that batches chose, those that were brought, and those that the processor computed.
    pub(super) counts: [u64; 3],
    /// Experts on their way to host memory, with their classes and the slots that they leave.
    pub(super) leaving: Vec<(Owner, [usize; 2])>,
}

/// Bytes of what says where experts are, in whichever way they are kept: tables and worths of experts, owners of slots,
/// experts on their way.
pub(super) fn table_bytes(graph: &Graph) -> usize {
    let experts: usize = entries(graph).iter().sum();
    let tables = experts * (4 + 4 + 8 + 4) + FEW_ROWS * most_chosen(graph) * 4;
    tables + foresight_bytes(graph) + 7 * 4 + HandOver::BYTES + ALIGNMENT
}

/// Entries of each set in the table: experts that return what they take have one, which says that they are nowhere, and so
/// has what stands for those of rows without an adapter.
fn entries(graph: &Graph) -> Vec<usize> {
    let beside = usize::from(adapts_experts(graph));
    let of = |(set, id): (&ExpertSet, usize)| set.experts + graph.identities(ExpertSetId(id)) + beside;
    graph.expert_sets().iter().zip(0..).map(of).collect()
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

/// Bytes and number of slots by class, ascending, and the class of each set.
struct SlotPlan {
    classes: Vec<(usize, usize)>,
    class_of: Vec<usize>,
    resident: bool,
}

impl Set {
    /// What an expert's matrices are copied to, in their order.
    pub(super) fn stored(&self) -> &[ExpertMatrix] {
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
    /// Slots for the `held` experts of `graph`; with `host`, host memory may take all of them.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough: where others hold the rest, for all that are held.
    pub(crate) fn new(
        device: &mut dyn Device,
        graph: &Graph,
        (room, held): (Room, Held),
        host: bool,
    ) -> Result<Self> {
        let layouts = layouts(graph)?;
        let sizes: Vec<usize> = layouts.iter().map(|layout| layout.bytes).collect();
        let experts: Vec<usize> = graph.expert_sets().iter().map(|set| held.count(set.experts)).collect();
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
        if held.is_part() && !plan.resident {
            let wanted = sizes.iter().zip(&experts).map(|(bytes, count)| (bytes * count) as u64).sum();
            let DeviceInfo { name, free, .. } = device.info();
            return Err(Error::DeviceMemory { device: name, wanted, free });
        }
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
                shown: vec![],
            };
            let tiers = Tiers::new(device, graph, &plan)?;
            return Ok(Self {
                slots: device.alloc(plan.slot_bytes)?,
                table: device.alloc(4)?,
                sets: layouts.into_iter().map(set).collect(),
                classes: vec![],
                clock: 0,
                held,
                resident: false,
                tiers: Some(tiers),
                hand_over: None,
                loaded: false,
                counts: [0; 3],
                leaving: vec![],
            });
        }
        let chosen = most_chosen(graph);
        let mut end = 0;
        let mut class = |(slot_bytes, slots): (usize, usize)| {
            let start = end;
            end += slot_bytes * slots;
            let guests = if plan.resident { 0 } else { guests(slots, chosen, FEW_ROWS * chosen) };
            let empty = (0..slots).rev().collect();
            Class { slot_bytes, start, slots: vec![(None, 0); slots], empty, guests }
        };
        let classes: Vec<Class> = plan.classes.into_iter().map(&mut class).collect();
        let mut first = 0;
        let mut sets = vec![];
        let sizes = graph.expert_sets().iter().map(|set| set.experts).zip(entries(graph));
        for ((layout, class), (experts, entries)) in layouts.into_iter().zip(plan.class_of).zip(sizes) {
            let (ExpertLayout { parts, gated, .. }, slots) = (layout, vec![None; experts]);
            sets.push(Set { parts, gated, class, table: first, slots, shown: vec![] });
            first += entries;
        }
        let slots = device.alloc(end.max(ALIGNMENT))?;
        let table = device.alloc((first * 4).max(4))?;
        device.upload(table.into(), &vec![0xff; first * 4])?;
        Ok(Self {
            slots,
            table,
            sets,
            classes,
            clock: 0,
            held,
            resident: plan.resident,
            tiers: None,
            hand_over: None,
            loaded: false,
            counts: [0; 3],
            leaving: vec![],
        })
    }

    /// Whether every expert has a slot for good, here or on another device.
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
            Some(_) => self.places(set, [rows, pairs]),
            None if self.held.is_part() => false,
            None => self.resident || self.guests_suffice(set, pairs) || self.shares([rows, pairs], set),
        }
    }

    /// Whether the device itself brings the experts of so many pairs of so many rows.
    pub(crate) fn places(&self, set: ExpertSetId, [rows, pairs]: [usize; 2]) -> bool {
        self.tiers.as_ref().is_some_and(|tiers| tiers.places(set, rows, pairs, self.takes(set)))
    }

    /// What hands experts over to the processor, if it takes any.
    pub(crate) fn hand_over(&self) -> Option<&HandOver> {
        self.hand_over.as_ref()
    }

    /// The same, if the processor takes experts of so many pairs of so many rows: those for which there are no slots, and
    /// others.
    pub(crate) fn handing(&self, set: ExpertSetId, counts: [usize; 2]) -> Option<&HandOver> {
        self.hand_over.as_ref().filter(|_| match self.tiers {
            Some(_) => self.places(set, counts) && self.takes(set),
            None => self.shares(counts, set),
        })
    }

    fn takes(&self, set: ExpertSetId) -> bool {
        self.hand_over.as_ref().is_some_and(|hand_over| hand_over.form(set).is_some())
    }

    /// Whether the processor takes experts of so many pairs of so many rows, where the host decides.
    fn shares(&self, [rows, pairs]: [usize; 2], set: ExpertSetId) -> bool {
        rows <= FEW_ROWS_BESIDE_PANELS && pairs <= MOST_PAIRS && self.takes(set)
    }

    /// The tiers that bring the experts of so many pairs of so many rows by themselves.
    pub(crate) fn placing(&self, set: ExpertSetId, counts: [usize; 2]) -> Option<&Tiers> {
        self.tiers.as_ref().filter(|_| self.places(set, counts))
    }

    /// The table of a set, for kernels of so many pairs of so many rows.
    pub(crate) fn table(&self, set: ExpertSetId, counts: [usize; 2]) -> Slice {
        match &self.tiers {
            Some(tiers) => tiers.table(set, self.places(set, counts)),
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

    /// Lets the processor compute experts that host memory keeps, of sets whose kernels take rows in one of the `forms`, and gives
    /// those for which it can, if there are some.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(crate) fn share(
        &mut self,
        device: &mut dyn Device,
        graph: &Graph,
        tensors: &[Tensor],
        forms: &[Option<RowForm>],
    ) -> Result<Option<Vec<Option<HandedSet>>>> {
        if self.resident {
            return Ok(None);
        }
        let mut sets: Vec<Option<HandedSet>> = self.sets.iter().map(|_| None).collect();
        for node in graph.nodes() {
            let Op::MoeExperts(MoeExpertsOp { routing, experts, mlp, .. }) = &node.op else { continue };
            let place = self.tiers.as_ref().map(|tiers| tiers.shelf(*experts).in_host());
            let parts = &self.sets[experts.0].parts;
            if let Some(form) = forms[experts.0] {
                sets[experts.0] = HandedSet::new((parts, form), mlp, routing.top_k(), tensors, place);
            }
        }
        self.hand_over = HandOver::new(device, graph, &sets)?;
        if self.hand_over.is_some() && self.tiers.is_none() {
            // Products with what is not there are made of what is there first, and not used.
            let first = self.classes.iter().map(|class| class.slot_bytes).max().unwrap_or(0);
            let all = self.classes.iter().map(|class| class.slot_bytes * class.slots.len()).sum();
            device.clear(self.slots.into(), first.min(all))?;
        }
        Ok(self.hand_over.is_some().then_some(sets))
    }

    /// Experts in host memory, if they are there, with the slots and what hands over.
    pub(crate) fn tiers(&mut self) -> Option<(&mut Tiers, BufferId, Option<&HandOver>)> {
        self.tiers.as_mut().map(|tiers| (tiers, self.slots, self.hand_over.as_ref()))
    }

    /// Experts that batches chose where not all have slots, those of them that were brought, and those that the processor
    /// computed.
    pub(crate) fn counts(&self) -> [u64; 3] {
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
            let ids: Vec<u32> = self.held.ids(self.sets[set.0].slots.len()).collect();
            self.load(device, set, &ids, source)?;
            self.show_all(device, set, &[])?;
        }
        self.loaded = true;
        Ok(())
    }

    /// Starts copying an expert to a slot that nobody reads.
    pub(super) fn store(
        &self,
        device: &mut dyn Device,
        id: ExpertSetId,
        view: &ExpertView<'_>,
        slot: usize,
    ) -> Result<()> {
        let set = &self.sets[id.0];
        let class = &self.classes[set.class];
        let start = class.start + slot * class.slot_bytes;
        for (part, matrix) in set.stored().iter().zip(view.matrices()) {
            copy_part(device, Slice { buffer: self.slots, offset: start }, part, matrix)?;
        }
        Ok(())
    }

    /// Gives slots that are empty to each layer's first experts.
    pub(crate) fn take(&mut self, device: &mut dyn Device, source: &mut dyn ExpertSource) -> Result<()> {
        self.load_all(device, source)?;
        if self.loaded {
            return Ok(());
        }
        self.load_first(device, source)
    }

    /// Writes a set's part of the table: these experts have these slots, the others none.
    pub(super) fn show(
        &self,
        device: &mut dyn Device,
        id: ExpertSetId,
        shown: &[(u32, usize)],
    ) -> Result<()> {
        device.upload(self.own_table(id), &words(&self.table_of(id, shown.iter().copied())))
    }

    /// Writes a set's part of the table, if it is not so: all experts that have slots, and these guests.
    pub(super) fn show_all(
        &mut self,
        device: &mut dyn Device,
        id: ExpertSetId,
        guests: &[(u32, usize)],
    ) -> Result<()> {
        let slots = self.sets[id.0].slots.iter().zip(0..);
        let own = slots.filter_map(|(slot, id)| Some((id, (*slot)?)));
        let table = self.table_of(id, own.chain(guests.iter().copied()));
        if self.sets[id.0].shown != table {
            self.forget_shown(id);
            device.upload(self.own_table(id), &words(&table))?;
            self.sets[id.0].shown = table;
        }
        Ok(())
    }

    /// A set's part of the table is not known any more.
    pub(super) fn forget_shown(&mut self, id: ExpertSetId) {
        self.sets[id.0].shown.clear();
    }

    fn table_of(&self, id: ExpertSetId, shown: impl Iterator<Item = (u32, usize)>) -> Vec<u32> {
        let set = &self.sets[id.0];
        let class = &self.classes[set.class];
        let mut table = vec![ABSENT; set.slots.len()];
        shown.for_each(|(expert, slot)| {
            table[expert as usize] = ((class.start + slot * class.slot_bytes) / ALIGNMENT) as u32;
        });
        table
    }
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
