//! Experts that come from the host's cache, layer by layer, and those that stay.
//!
//! Host and device hold different experts. What a batch misses comes as a *guest*: to a slot that is kept empty for that,
//! where it is read, while the host keeps it too. A guest that is worth more than an expert on the device stays, and changes
//! places with it. Both sides are told by the same numbers what an expert is worth, so that together they hold the experts
//! that are worth most.

use super::expert_layout::ExpertMatrix;
use super::experts::{Class, DeviceExperts, Set};
use crate::Result;
use crate::backend::{ExpertSource, ExpertView};
use crate::gpu::device::{Device, Slice};
use crate::gpu::processor::Beside;
use crate::graph::ExpertSetId;

/// An expert with a slot.
pub(super) type Owner = (ExpertSetId, u32);

/// Slots of one size with what they hold and when that was used last.
pub(super) type Contents = [(Option<Owner>, u64)];

/// A guest stays if it is worth so much more than what it replaces: changing places crosses the bus once more. One more
/// choice moves what an expert is worth by 0.025, so that a single one does not do.
const MARGIN: f64 = 0.04;
/// Of the slots, one in so many is for guests.
const GUESTS: usize = 64;
/// Guests that come at once where the others are computed meanwhile.
const PART_EXPERTS: usize = 8;
/// Parts that are on their way or computed at a time, where there are enough guests.
const PARTS: usize = 4;
/// Experts that are on their way to host memory, at most, before they are waited for.
const MOST_LEAVING: usize = 16;
/// Experts that are read at once where nobody waits for them.
const TAKEN_AT_ONCE: usize = 16;

/// How many of `slots` are kept for guests: so many that `least` can come at once, and up to `most`.
pub(super) fn guests(slots: usize, least: usize, most: usize) -> usize {
    (slots / GUESTS).min(most).max(least).min(slots)
}

impl DeviceExperts {
    /// Runs `body` for the experts of all pairs, `ids`: once if so many can be guests or the others are computed `beside`, which
    /// is given if the rows are on its desk; and else for those that have slots and for parts of the others as they come. No
    /// work that reads experts may be queued.
    pub(crate) fn pass(
        &mut self,
        device: &mut dyn Device,
        (set, ids): (ExpertSetId, &[u32]),
        source: &mut dyn ExpertSource,
        mut beside: Option<&mut Beside>,
        body: impl Fn(&mut dyn Device) -> Result<()>,
    ) -> Result<()> {
        let asked_for = |(owner, _): &(Owner, _)| owner.0 == set && ids.contains(&owner.1);
        let waits = self.leaving.len() >= MOST_LEAVING || self.leaving.iter().any(asked_for);
        self.settle(device, source, waits)?;
        self.clock += 1;
        let at_once = beside.is_some() || self.guests_suffice(set, ids.len());
        let mut chosen = ids.to_vec();
        chosen.sort_unstable();
        chosen.dedup();
        let (mut shown, mut missing) = (vec![], vec![]);
        for id in &chosen {
            match self.sets[set.0].slots[*id as usize] {
                Some(slot) => shown.push((*id, slot)),
                None => missing.push(*id),
            }
        }
        let index = self.sets[set.0].class;
        let class = &mut self.classes[index];
        shown.iter().for_each(|(_, slot)| class.slots[*slot].1 = self.clock);
        let guests = class.empty.clone();
        let coming = if at_once { missing.len().min(guests.len()) } else { guests.len() };
        if self.leaving.iter().any(|(_, [class, slot])| *class == index && guests[..coming].contains(slot)) {
            device.after_away()?;
        }
        self.counts[0] += chosen.len() as u64;
        self.counts[1] += missing.len() as u64;
        source.announce_missing(set, &chosen, &missing)?;
        if missing.is_empty()
            && let Some(beside) = &mut beside
        {
            self.tell(device, beside)?;
        }
        if missing.is_empty() {
            self.show_all(device, set, &[])?;
            return body(device);
        }
        if !at_once {
            self.forget_shown(set);
            if !shown.is_empty() {
                self.show(device, set, &shown)?;
                body(device)?;
            }
            shown.clear();
        }

        let part = if at_once { guests.len() } else { (guests.len() / PARTS).clamp(1, PART_EXPERTS) };
        let parts = guests.len() / part;
        let (mut next, mut brought) = (0, vec![]);
        let worths = source.worths(set).to_vec();
        let worth = |view: &&ExpertView<'_>| worths.get(view.id as usize).copied().unwrap_or_default();
        let mut bring = |device: &mut dyn Device, views: &[ExpertView<'_>]| {
            if at_once {
                // What may stay comes.
                let mut views: Vec<&ExpertView<'_>> = views.iter().collect();
                views.sort_by(|a, b| worth(b).total_cmp(&worth(a)));
                let wanted = beside.as_mut().map_or(0, |beside| beside.share(set, views.len()));
                // What finds no slot is the processor's, too.
                let handed = wanted.max(views.len().saturating_sub(guests.len() - brought.len()));
                let (coming, staying) = views.split_at(views.len() - handed);
                let mut copy = |device: &mut dyn Device| {
                    coming.iter().try_for_each(|view| {
                        let slot = guests[brought.len()];
                        brought.push((view.id, slot));
                        self.store(device, set, view, slot)
                    })
                };
                return match &mut beside {
                    Some(beside) => beside.compute(device, (set, ids), coming.len(), copy, staying),
                    None => copy(device).and_then(|()| device.finish_copies()),
                };
            }
            for some in views.chunks(part) {
                let mark = next % parts;
                next += 1;
                device.copies_after(mark)?;
                shown.clear();
                for (view, slot) in some.iter().zip(&guests[mark * part..]) {
                    self.store(device, set, view, *slot)?;
                    shown.push((view.id, *slot));
                }
                device.work_after_copies()?;
                self.show(device, set, &shown)?;
                body(device)?;
                device.mark_work(mark)?;
            }
            device.finish_copies()
        };
        let mut outcome = Ok(());
        let visited = source.visit(set, &missing, &mut |views| {
            if outcome.is_ok() {
                outcome = bring(device, views);
            }
        });
        outcome.and(device.finish_copies()).and(visited)?;
        if at_once {
            if let Some(beside) = beside {
                self.tell(device, beside)?;
            }
            self.show_all(device, set, &brought)?;
            body(device)?;
            self.keep(device, set, brought, source)?;
        }
        Ok(())
    }

    /// Tells the device what was computed beside it.
    fn tell(&mut self, device: &mut dyn Device, beside: &mut Beside) -> Result<()> {
        let Some(hand_over) = self.hand_over() else { return Ok(()) };
        let computed = beside.tell(device, hand_over)? as u64;
        self.counts[1] -= computed;
        self.counts[2] += computed;
        Ok(())
    }

    /// Tells the source that what was given has arrived, if it has; if it `waits`, it has. No batch leaves experts on their way.
    pub(crate) fn settle(
        &mut self,
        device: &mut dyn Device,
        source: &mut dyn ExpertSource,
        waits: bool,
    ) -> Result<()> {
        if !self.leaving.is_empty() && device.are_away(waits)? {
            self.leaving.clear();
            source.arrived();
        }
        Ok(())
    }

    /// Whether experts of so many pairs can be guests at the same time.
    pub(super) fn guests_suffice(&self, set: ExpertSetId, pairs: usize) -> bool {
        let Set { class, slots, .. } = &self.sets[set.0];
        self.classes[*class].guests >= pairs.min(slots.len())
    }

    /// Lets those guests stay that are worth it, in place of others, which the source is offered.
    fn keep(
        &mut self,
        device: &mut dyn Device,
        set: ExpertSetId,
        mut brought: Vec<(u32, usize)>,
        source: &mut dyn ExpertSource,
    ) -> Result<()> {
        let worth =
            |(set, id): Owner, used: u64| source.worths(set).get(id as usize).copied().unwrap_or(used as f64);
        let now = self.clock;
        let index = self.sets[set.0].class;
        let class = &self.classes[index];
        brought.sort_by(|(a, _), (b, _)| worth((set, *b), now).total_cmp(&worth((set, *a), now)));
        let spare = class.empty.len().saturating_sub(class.guests);
        let mut leaving = least_worthy(&class.slots, now, brought.len(), worth).into_iter();
        let (mut kept, mut victims) = (vec![], vec![]);
        for (place, (id, slot)) in brought.into_iter().enumerate() {
            if place >= spare {
                match leaving.next() {
                    Some((least, victim)) if worth((set, id), now) > least + MARGIN => victims.push(victim),
                    _ => break,
                }
            }
            kept.push((id, slot));
        }
        let class = &mut self.classes[index];
        for (id, slot) in &kept {
            self.sets[set.0].slots[*id as usize] = Some(*slot);
            class.slots[*slot] = (Some((set, *id)), now);
        }
        class.empty.retain(|slot| class.slots[*slot].0.is_none());
        if !kept.is_empty() {
            // They make room in host memory for those that leave.
            let ids: Vec<u32> = kept.iter().map(|(id, _)| *id).collect();
            source.exchanged(set, &ids);
        }
        let mut outcome = Ok(());
        for slot in victims {
            let class = &mut self.classes[index];
            class.empty.push(slot);
            let (Some((set, expert)), _) = std::mem::take(&mut class.slots[slot]) else { continue };
            let from = Slice { buffer: self.slots, offset: class.start + slot * class.slot_bytes };
            let Set { slots, .. } = &mut self.sets[set.0];
            slots[expert as usize] = None;
            let stored = self.sets[set.0].stored();
            let given = source.give(set, expert, &mut |planes| copy_planes(device, from, stored, planes));
            let takes = given.map(|takes| {
                if takes {
                    self.leaving.push(((set, expert), [index, slot]));
                }
            });
            outcome = outcome.and(takes);
        }
        outcome
    }

    /// Gives slots that are empty to experts of a set; fewer if there are not so many.
    pub(super) fn load(
        &mut self,
        device: &mut dyn Device,
        set: ExpertSetId,
        ids: &[u32],
        source: &mut dyn ExpertSource,
    ) -> Result<()> {
        let class = self.sets[set.0].class;
        let missing = |id: &u32| self.sets[set.0].slots[*id as usize].is_none();
        let spare = self.classes[class].empty.len().saturating_sub(self.classes[class].guests);
        let ids: Vec<u32> = ids.iter().copied().filter(missing).take(spare).collect();
        if ids.is_empty() {
            return Ok(());
        }
        source.announce_missing(set, &[], &ids)?;
        let mut outcome = Ok(());
        let visited = source.visit(set, &ids, &mut |views| {
            for view in views {
                if outcome.is_err() {
                    return;
                }
                let Some(slot) = self.classes[class].empty.pop() else { return };
                outcome = self.store(device, set, view, slot);
                self.sets[set.0].slots[view.id as usize] = Some(slot);
                self.classes[class].slots[slot] = (Some((set, view.id)), self.clock);
            }
            if outcome.is_ok() {
                outcome = device.finish_copies();
            }
        });
        let outcome = outcome.and(device.finish_copies()).and(visited);
        source.exchanged(set, if outcome.is_ok() { &ids } else { &[] });
        outcome
    }

    /// Gives each layer's first experts a share of the slots that are not for guests.
    pub(super) fn load_first(
        &mut self,
        device: &mut dyn Device,
        source: &mut dyn ExpertSource,
    ) -> Result<()> {
        for index in 0..self.sets.len() {
            let Class { slots, guests, .. } = &self.classes[self.sets[index].class];
            let sharing = self.sets.iter().filter(|set| set.class == self.sets[index].class).count();
            let share = ((slots.len() - guests) / sharing).min(self.sets[index].slots.len());
            let ids: Vec<u32> = (0..share as u32).collect();
            for some in ids.chunks(TAKEN_AT_ONCE) {
                self.load(device, ExpertSetId(index), some, source)?;
            }
        }
        Ok(())
    }
}

/// Up to `count` slots whose experts are worth least, the least one first, with what they are worth; none that were used now.
/// `worth` is that of an expert with the time of its last use.
fn least_worthy(
    slots: &Contents,
    now: u64,
    count: usize,
    worth: impl Fn(Owner, u64) -> f64,
) -> Vec<(f64, usize)> {
    let mut idle: Vec<(f64, usize)> = slots
        .iter()
        .enumerate()
        .filter(|(_, (_, used))| *used != now)
        .filter_map(|(slot, (owner, used))| owner.map(|owner| (worth(owner, *used), slot)))
        .collect();
    let order = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    if count < idle.len() {
        idle.select_nth_unstable_by(count, order);
        idle.truncate(count);
    }
    idle.sort_unstable_by(order);
    idle
}

/// Copies an expert's planes in a slot to host memory.
fn copy_planes(
    device: &mut dyn Device,
    slot: Slice,
    parts: &[ExpertMatrix],
    planes: &mut [&mut [u8]],
) -> Result<()> {
    let starts = parts.iter().flat_map(|part| &part.part.offsets[..part.matrix.dtype.planes()]);
    starts.zip(planes).try_for_each(|(start, plane)| device.copy_away(slot.at(*start), plane))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_worthy_that_is_not_needed_leaves() {
        let owner = |set: usize, expert: u32| Some((ExpertSetId(set), expert));
        let slots = [(owner(0, 3), 5), (None, 0), (owner(1, 1), 2), (owner(0, 2), 9), (owner(1, 4), 1)];
        let choose = |count| {
            let chosen = least_worthy(&slots, 9, count, |(_, expert), _| f64::from(expert));
            chosen.into_iter().map(|(_, slot)| slot).collect::<Vec<_>>()
        };
        assert_eq!(choose(1), [2]);
        assert_eq!(choose(9), [2, 0, 4], "expert 2 is needed, and a slot is empty");
    }

    #[test]
    fn guests_have_few_slots_but_those_that_they_need() {
        assert_eq!(guests(6400, 8, 64), 64);
        assert_eq!(guests(1600, 8, 64), 25);
        assert_eq!(guests(40, 8, 64), 8);
        assert_eq!(guests(3, 8, 64), 3);
    }
}
