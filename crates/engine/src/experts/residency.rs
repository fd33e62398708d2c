//! Residency: which experts have slots, and which is evicted next.
//!
//! Bookkeeping without memory or reads, so that the engine and the replay of a trace decide identically. An expert with a
//! slot is *held* while a batch needs it, *reserved* if it was prefetched because a batch will probably need it soon, or
//! idle. Idle experts are evicted first, the lowest score in the size class before others; reserved ones only if there is
//! nothing else; held ones never.
//!
//! Large batches need almost every expert of a layer, so the future is known: the layers' experts in order. The layer that
//! has just run is needed last, so it is evicted first, lowest scores first, until it is down to its share. Every layer
//! thus keeps its highest-scored experts, however long the prompt.

use super::policy::{Demand, Policy, PolicyKind};
use super::prefetch::MANY_ROWS;
use super::slots::{SetShape, SlotPlan};

/// An expert: its set and its id there.
pub(crate) type Key = (usize, u32);

/// Whether an expert has a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Place {
    #[default]
    Absent,
    /// It has a slot that is being filled.
    Reading,
    /// It has a slot.
    Present,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Claim {
    #[default]
    Idle,
    Reserved,
    Held,
}

struct Set {
    class: usize,
    entries: Vec<(Place, Claim)>,
    worth: Vec<f64>,
    /// Ids with a claim on them, so that claims end without a search.
    reserved: Vec<u32>,
    /// The least worthy idle expert; `None` if that has to be found out.
    weakest: Option<Option<u32>>,
}

impl Set {
    fn weakest(&mut self) -> Option<u32> {
        *self.weakest.get_or_insert_with(|| {
            let idle = self.entries.iter().enumerate().filter(|(_, e)| **e == (Place::Present, Claim::Idle));
            let weakest = idle.min_by(|(a, _), (b, _)| self.worth[*a].total_cmp(&self.worth[*b]));
            weakest.map(|(id, _)| id as u32)
        })
    }
}

/// Which experts have slots.
pub(crate) struct Residency {
    sets: Vec<Set>,
    /// Slots of each class that nobody has.
    free: Vec<usize>,
    /// Of each class: experts that each of its sets keeps while two others have all of theirs in slots.
    shares: Vec<usize>,
    policy: Box<dyn Policy>,
    /// The set that a batch is at that goes through almost all experts of every set.
    sweep: Option<usize>,
}

impl Residency {
    pub(crate) fn new(shapes: &[SetShape], plan: &SlotPlan, policy: PolicyKind) -> Self {
        let set = |(shape, class): (&SetShape, &usize)| Set {
            class: *class,
            entries: vec![Default::default(); shape.experts],
            worth: vec![0.0; shape.experts],
            reserved: vec![],
            weakest: None,
        };
        let experts: Vec<usize> = shapes.iter().map(|s| s.experts).collect();
        let slots: Vec<usize> = plan.classes().iter().map(|c| c.slots).collect();
        let mut residency = Self {
            sets: shapes.iter().zip(plan.class_of()).map(set).collect(),
            free: slots.clone(),
            shares: vec![],
            policy: policy.policy(&experts),
            sweep: None,
        };
        residency.divide(&slots);
        residency
    }

    /// Determines what each set keeps of so many slots of each class.
    pub(crate) fn divide(&mut self, slots: &[usize]) {
        let share = |(class, slots): (usize, &usize)| {
            let own = self.sets.iter().filter(|set| set.class == class);
            let (sets, most) =
                own.fold((0usize, 0), |(sets, most), set| (sets + 1, most.max(set.entries.len())));
            slots.saturating_sub(2 * most) / sets.saturating_sub(2).max(1)
        };
        self.shares = slots.iter().enumerate().map(share).collect();
    }

    /// Takes a slot of `class` out of use; `Some(victim)` is who had it. `Err` if all are held or being filled.
    pub(crate) fn withdraw(&mut self, class: usize) -> Result<Option<Key>, ()> {
        if self.free[class] > 0 {
            self.free[class] -= 1;
            return Ok(None);
        }
        let victim = self.weakest(class).or_else(|| self.any_reserved(class)).ok_or(())?;
        *self.entry(victim) = Default::default();
        Ok(Some(victim))
    }

    /// Counts a slot of `class` that is in use again.
    pub(crate) fn restored(&mut self, class: usize) {
        self.free[class] += 1;
    }

    pub(crate) fn place(&self, (set, id): Key) -> Place {
        self.sets[set].entries[id as usize].0
    }

    fn entry(&mut self, (set, id): Key) -> &mut (Place, Claim) {
        let set = &mut self.sets[set];
        set.weakest = None;
        &mut set.entries[id as usize]
    }

    /// A batch asks for experts of a set: the policy counts them, and what was reserved for the set and is not among
    /// them is idle again.
    pub(crate) fn asked(&mut self, index: usize, demand: Demand<'_>) {
        let set = &mut self.sets[index];
        let almost_all = 4 * demand.experts.len() >= 3 * set.entries.len();
        self.sweep = (demand.rows >= MANY_ROWS && almost_all).then_some(index);
        self.policy.asked(index, demand, &mut set.worth);
        set.weakest = None;
        for id in set.reserved.drain(..) {
            let claim = &mut set.entries[id as usize].1;
            if *claim == Claim::Reserved {
                *claim = Claim::Idle;
            }
        }
    }

    /// Nobody may take its slot until it is let go.
    pub(crate) fn hold(&mut self, key: Key) {
        self.entry(key).1 = Claim::Held;
    }

    /// A batch will probably need it.
    pub(crate) fn reserve(&mut self, key: Key) {
        if self.entry(key).1 == Claim::Idle {
            self.entry(key).1 = Claim::Reserved;
            self.sets[key.0].reserved.push(key.1);
        }
    }

    pub(crate) fn let_go(&mut self, key: Key) {
        self.entry(key).1 = Claim::Idle;
    }

    /// Takes a slot for an expert that has none; `Some(victim)` is who had it before. `Err` if all slots of its class are
    /// held or being filled.
    pub(crate) fn take_slot(&mut self, key: Key) -> Result<Option<Key>, ()> {
        let class = self.sets[key.0].class;
        let mut victim = None;
        if self.free[class] > 0 {
            self.free[class] -= 1;
        } else {
            let passed = self.passed(class);
            let found =
                passed.or_else(|| self.weakest(class)).or_else(|| self.any_reserved(class)).ok_or(())?;
            *self.entry(found) = Default::default();
            victim = Some(found);
        }
        self.entry(key).0 = Place::Reading;
        Ok(victim)
    }

    /// As [`Residency::take_slot`], for an expert that somebody else gives up: `Err` also if all that could be evicted is worth
    /// as much.
    pub(crate) fn take_slot_if_worthy(&mut self, key: Key) -> Result<Option<Key>, ()> {
        let class = self.sets[key.0].class;
        if self.free[class] == 0 && self.passed(class).is_none() {
            let (set, id) = self.weakest(class).ok_or(())?;
            if self.sets[set].worth[id as usize] >= self.sets[key.0].worth[key.1 as usize] {
                return Err(());
            }
        }
        self.take_slot(key)
    }

    /// What the experts of a set are worth.
    pub(crate) fn worths(&self, set: usize) -> &[f64] {
        &self.sets[set].worth
    }

    /// Whether nobody needs an expert that is present.
    pub(crate) fn is_idle(&self, (set, id): Key) -> bool {
        self.sets[set].entries[id as usize] == (Place::Present, Claim::Idle)
    }

    /// Whether a slot for `key` could be had without taking a reserved one.
    pub(crate) fn has_room(&mut self, key: Key) -> bool {
        let class = self.sets[key.0].class;
        self.free[class] > 0 || self.weakest(class).is_some()
    }

    /// The read of `key` has ended.
    pub(crate) fn arrived(&mut self, key: Key) {
        self.entry(key).0 = Place::Present;
    }

    /// `key` has left its slot, or never came: the slot is free.
    pub(crate) fn vacated(&mut self, key: Key) {
        *self.entry(key) = Default::default();
        let class = self.sets[key.0].class;
        self.free[class] += 1;
    }

    pub(crate) fn class(&self, set: usize) -> usize {
        self.sets[set].class
    }

    /// The least worthy idle expert of the set that a batch passed last on its way through all of them, or of one before if
    /// that has only its share.
    fn passed(&mut self, class: usize) -> Option<Key> {
        let (at, n, share) = (self.sweep?, self.sets.len(), self.shares[class]);
        (1..n).map(|back| (at + n - back) % n).find_map(|index| {
            let set = &mut self.sets[index];
            let there = |set: &Set| set.entries.iter().filter(|(place, _)| *place != Place::Absent).count();
            let id = if set.class == class && there(set) > share { set.weakest() } else { None };
            id.map(|id| (index, id))
        })
    }

    fn weakest(&mut self, class: usize) -> Option<Key> {
        let mut found: Option<(f64, Key)> = None;
        for (index, set) in self.sets.iter_mut().enumerate().filter(|(_, set)| set.class == class) {
            if let Some(id) = set.weakest() {
                let worth = set.worth[id as usize];
                if found.is_none_or(|(least, _)| worth < least) {
                    found = Some((worth, (index, id)));
                }
            }
        }
        found.map(|(_, key)| key)
    }

    fn any_reserved(&self, class: usize) -> Option<Key> {
        let is = |set: &Set, id: u32| set.entries[id as usize] == (Place::Present, Claim::Reserved);
        let sets = self.sets.iter().enumerate().filter(|(_, set)| set.class == class);
        sets.flat_map(|(index, set)| set.reserved.iter().map(move |id| (index, set, *id)))
            .find(|(_, set, id)| is(set, *id))
            .map(|(index, _, id)| (index, id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch that goes through all experts of every layer takes slots of the layers it has passed, the last one first,
    /// and leaves each its share.
    #[test]
    fn layers_that_were_passed_keep_their_share() {
        const SHAPE: SetShape = SetShape { experts: 4, expert_bytes: 100, slot_bytes: 4096 };
        let plan = SlotPlan::of_slots(&[SHAPE; 4], 10);
        let mut residency = Residency::new(&[SHAPE; 4], &plan, PolicyKind::Lru);
        // Two layers have all theirs, the other two share what is left: one each.
        assert_eq!(residency.shares, [1]);
        for (set, count) in [(0, 1), (1, 3), (2, 4), (3, 2)] {
            for id in 0..count {
                assert_eq!(residency.take_slot((set, id)), Ok(None));
                residency.arrived((set, id));
            }
        }
        residency.asked(1, Demand { experts: &[0, 1, 2, 3], tokens: &[4; 4], rows: MANY_ROWS });
        (0..3).for_each(|id| residency.hold((1, id)));
        let victim = residency.take_slot((1, 3)).unwrap().unwrap();
        assert_eq!(victim.0, 3, "the layer before has its share only");
        assert_eq!((residency.place((0, 0)), residency.place(victim)), (Place::Present, Place::Absent));
    }
}
