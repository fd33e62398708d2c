//! [`SlotPlan`]: how many experts memory holds.
//!
//! Slots come in size classes, because layers of one checkpoint may store their experts in different encodings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How many experts a layer has, and their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetShape {
    /// Experts of the layer.
    pub experts: usize,
    /// Weight bytes of one.
    pub expert_bytes: u64,
    /// Bytes of a slot that can hold any of them.
    pub slot_bytes: usize,
}

/// Slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotClass {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Number of slots.
    pub slots: usize,
}

/// Divides a byte budget (or a number of slots) into size classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotPlan {
    classes: Vec<SlotClass>,
    /// Class of each expert set.
    class_of: Vec<usize>,
    /// The fewest slots that a class may have.
    minimum: usize,
}

impl SlotPlan {
    /// Slots for `budget` bytes. Each class gets the share that its experts have of all experts, and never more
    /// than it has experts; if a class would get fewer than `minimum` slots, all sets share slots of the largest size.
    ///
    /// # Errors
    /// The bytes needed, if `budget` does not hold `minimum` slots.
    pub fn within(sets: &[SetShape], budget: u64, minimum: usize) -> Result<Self, u64> {
        let (sizes, experts) = Self::sizes(sets);
        let total: u64 = sizes.iter().zip(&experts).map(|(s, n)| *s as u64 * *n as u64).sum();
        if total <= budget {
            return Ok(Self::with(sets, &sizes, &experts, minimum));
        }
        let share = |n: &usize| (u128::from(budget) * *n as u128 / u128::from(total.max(1))) as usize;
        let split: Vec<usize> = experts.iter().map(share).collect();
        if split.iter().all(|slots| *slots >= minimum) {
            return Ok(Self::with(sets, &sizes, &split, minimum));
        }
        Self::of_one_size(sets, budget, minimum)
    }

    /// Slots for `budget` bytes, all of the largest size.
    ///
    /// # Errors
    /// As [`SlotPlan::within`].
    pub(crate) fn of_one_size(sets: &[SetShape], budget: u64, minimum: usize) -> Result<Self, u64> {
        let (sizes, experts) = Self::sizes(sets);
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let all: usize = experts.iter().sum();
        let slots = ((budget / largest.max(1) as u64) as usize).min(all);
        if slots < minimum.min(all) {
            return Err(largest as u64 * minimum.min(all) as u64);
        }
        Ok(Self::with(sets, &[largest], &[slots], minimum))
    }

    /// Exactly `slots` slots (at least one), all of the largest size.
    pub fn of_slots(sets: &[SetShape], slots: usize) -> Self {
        let (sizes, experts) = Self::sizes(sets);
        let slots = slots.clamp(1, experts.iter().sum::<usize>().max(1));
        Self::with(sets, &[sizes.iter().copied().max().unwrap_or(0)], &[slots], 1)
    }

    /// Distinct slot sizes, ascending, and how many experts need each.
    fn sizes(sets: &[SetShape]) -> (Vec<usize>, Vec<usize>) {
        let mut count = BTreeMap::new();
        for set in sets {
            *count.entry(set.slot_bytes).or_insert(0) += set.experts;
        }
        count.into_iter().unzip()
    }

    fn with(sets: &[SetShape], sizes: &[usize], slots: &[usize], minimum: usize) -> Self {
        let classes = sizes.iter().zip(slots).map(|(s, n)| SlotClass { slot_bytes: *s, slots: *n }).collect();
        let class = |set: &SetShape| sizes.iter().position(|size| *size >= set.slot_bytes);
        let class_of = sets.iter().map(|set| class(set).expect("a size for every set")).collect();
        Self { classes, class_of, minimum }
    }

    /// Slots of each class that `bytes` hold, in the plan's proportions; never fewer than a token needs.
    pub(crate) fn within_bytes(&self, bytes: u64) -> Vec<usize> {
        let all = u128::from(self.bytes()).max(1);
        let part = |slots: usize| (slots as u128 * u128::from(bytes) / all) as usize;
        self.classes.iter().map(|class| part(class.slots).max(self.minimum).min(class.slots)).collect()
    }

    /// Bytes of the slots that [`SlotPlan::within_bytes`] gives.
    pub(crate) fn bytes_within(&self, bytes: u64) -> u64 {
        self.bytes_of(&self.within_bytes(bytes))
    }

    /// Bytes of `slots` slots of each class.
    pub(crate) fn bytes_of(&self, slots: &[usize]) -> u64 {
        self.classes.iter().zip(slots).map(|(class, slots)| class.slot_bytes as u64 * *slots as u64).sum()
    }

    /// The size classes.
    pub fn classes(&self) -> &[SlotClass] {
        &self.classes
    }

    /// Class of each expert set.
    pub(crate) fn class_of(&self) -> &[usize] {
        &self.class_of
    }

    /// Slots over all classes.
    pub fn slots(&self) -> usize {
        self.classes.iter().map(|c| c.slots).sum()
    }

    /// Bytes over all classes.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|c| c.slot_bytes as u64 * c.slots as u64).sum()
    }

    /// Whether every expert has a slot for good.
    pub fn holds_all(&self, sets: &[SetShape]) -> bool {
        self.slots() >= sets.iter().map(|set| set.experts).sum()
    }
}
