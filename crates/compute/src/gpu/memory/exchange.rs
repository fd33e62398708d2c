//! Which experts leave a device's memory for those that come.
//!
//! Host and device hold different experts: one that comes leaves the host, and the host is offered the one that gives way.
//! Both are told by the same numbers what an expert is worth, so that together they hold the experts that are worth most.
//! In a batch that needs almost all experts of every layer, the layer that has just run is needed last: it gives way first,
//! down to its share, as in host memory.

use crate::graph::ExpertSetId;

/// An expert with a slot.
pub(super) type Owner = (ExpertSetId, u32);

/// Slots of one size with what they hold and when that was used last.
pub(super) type Contents = [(Option<Owner>, u64)];

/// What decides which experts give way.
pub(super) struct Leaving<'a> {
    pub(super) slots: &'a Contents,
    /// What was used at this time is needed.
    pub(super) now: u64,
    /// Sets whose experts have these slots, and how many experts the largest has.
    pub(super) sets: &'a [usize],
    pub(super) most: usize,
    /// The set that needs slots, if the batch goes through almost all experts.
    pub(super) sweep: Option<usize>,
}

impl Leaving<'_> {
    /// Slots for `count` experts, empty ones first; fewer if what is needed now has the others. `worth` is that of an expert
    /// with the time of its last use.
    pub(super) fn choose(&self, count: usize, worth: impl Fn(Owner, u64) -> f64) -> Vec<usize> {
        let slots = || self.slots.iter().enumerate();
        let mut chosen: Vec<usize> =
            slots().filter(|(_, (owner, _))| owner.is_none()).map(|(slot, _)| slot).take(count).collect();
        let mut idle: Vec<(f64, usize, usize)> = slots()
            .filter(|(_, (_, used))| *used != self.now)
            .filter_map(|(slot, (owner, used))| owner.map(|owner| (worth(owner, *used), slot, owner.0.0)))
            .collect();
        idle.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for set in self.passed() {
            let there = self.slots.iter().filter(|(owner, _)| owner.is_some_and(|(s, _)| s.0 == set)).count();
            let mut spare = there.saturating_sub(self.share()).min(count - chosen.len());
            idle.retain(|(_, slot, of)| {
                let leaves = *of == set && spare > 0;
                if leaves {
                    spare -= 1;
                    chosen.push(*slot);
                }
                !leaves
            });
        }
        let rest = count - chosen.len();
        chosen.extend(idle.into_iter().map(|(_, slot, _)| slot).take(rest));
        chosen
    }

    /// Experts that every set keeps while two others have all of theirs.
    fn share(&self) -> usize {
        self.slots.len().saturating_sub(2 * self.most) / self.sets.len().saturating_sub(2).max(1)
    }

    /// The sets that a sweep has passed, the last one first.
    fn passed(&self) -> impl Iterator<Item = usize> {
        let at = self.sweep.and_then(|set| self.sets.iter().position(|of| *of == set));
        let n = self.sets.len();
        at.into_iter().flat_map(move |at| (1..n).map(move |back| self.sets[(at + n - back) % n]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(set: usize, expert: u32) -> Option<Owner> {
        Some((ExpertSetId(set), expert))
    }

    #[test]
    fn the_least_worthy_that_is_not_needed_leaves() {
        let slots = [(owner(0, 3), 5), (None, 0), (owner(1, 1), 2), (owner(0, 2), 9), (owner(1, 4), 1)];
        let leaving = Leaving { slots: &slots, now: 9, sets: &[0, 1], most: 6, sweep: None };
        let worth = |(_, expert): Owner, _| f64::from(expert);
        assert_eq!(leaving.choose(1, worth), [1]);
        assert_eq!(leaving.choose(3, worth), [1, 2, 0]);
        assert_eq!(leaving.choose(9, worth), [1, 2, 0, 4], "expert 2 is needed");
    }

    #[test]
    fn layers_that_were_passed_give_way_down_to_their_share() {
        // Of ten slots two sets may have four each: the third and fourth keep one.
        let mut slots: Vec<(Option<Owner>, u64)> = (0..4).map(|id| (owner(0, id), 7)).collect();
        slots.extend((0..4).map(|id| (owner(1, id), 8)));
        slots.extend([(owner(2, 0), 1), (owner(3, 0), 2)]);
        let leaving = Leaving { slots: &slots, now: 9, sets: &[0, 1, 2, 3], most: 4, sweep: Some(2) };
        let worth = |(set, expert): Owner, _| if set.0 > 1 { -1.0 } else { f64::from(expert) };
        assert_eq!(leaving.choose(3, worth), [4, 5, 6], "the layer before, but for its share");
        assert_eq!(leaving.choose(5, worth), [4, 5, 6, 0, 1]);
    }
}
