//! [`ExpertCache`]: which routed experts are in memory.
//!
//! A bounded number of slots, each the home of one expert at a time. Experts asked for are handed to the compute
//! layer at once if they are here, and as their reads finish if they are not; computing what is here overlaps with
//! reading the rest. What a visit still needs is pinned; among the others the least recently used gives way. There
//! may be fewer slots than a visit needs experts: then slots are refilled while the visit goes on.
//!
//! Slots come in size classes, because layers of one checkpoint may store their experts in different encodings.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use moeflux_compute::backend::{ExpertSource, ExpertView};
use moeflux_compute::graph::ExpertSetId;

use super::store::ExpertStore;
use crate::io::buffer::HostBuffer;
use crate::io::queue::{ReadDone, ReadQueue, ReadRequest};
use crate::{Error, Result};

/// What the cache has done since it was made or since [`ExpertCache::take_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CacheStats {
    /// Experts that were in memory when they were asked for.
    pub hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Time that computing stood still waiting for reads.
    pub stall: Duration,
}

impl CacheStats {
    /// Share of requests that were hits, 0..=1; 1 if there were none.
    pub fn hit_rate(&self) -> f64 {
        match self.hits + self.misses {
            0 => 1.0,
            all => self.hits as f64 / all as f64,
        }
    }
}

impl CacheStats {
    /// A fraction of everything, 0..=1.
    #[must_use]
    pub fn share(&self, fraction: f64) -> Self {
        let of = |count: u64| (count as f64 * fraction).round() as u64;
        Self {
            hits: of(self.hits),
            misses: of(self.misses),
            bytes_read: of(self.bytes_read),
            stall: self.stall.mul_f64(fraction),
        }
    }
}

impl std::ops::AddAssign for CacheStats {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.bytes_read += other.bytes_read;
        self.stall += other.stall;
    }
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
}

impl SlotPlan {
    /// Slots for `budget` bytes. Each class gets the share that its experts have of all experts, and never more
    /// than it has experts; if a class would get fewer than `minimum` slots, all sets share slots of the largest size.
    ///
    /// # Errors
    /// The bytes needed, if `budget` does not hold `minimum` slots.
    pub fn within(store: &ExpertStore, budget: u64, minimum: usize) -> Result<Self, u64> {
        let (sizes, experts) = Self::sizes(store);
        let total: u64 = sizes.iter().zip(&experts).map(|(s, n)| *s as u64 * *n as u64).sum();
        if total <= budget {
            return Ok(Self::with(store, &sizes, &experts));
        }
        let share = |n: &usize| (u128::from(budget) * *n as u128 / u128::from(total.max(1))) as usize;
        let split: Vec<usize> = experts.iter().map(share).collect();
        if split.iter().all(|slots| *slots >= minimum) {
            return Ok(Self::with(store, &sizes, &split));
        }
        let largest = sizes.iter().copied().max().unwrap_or(0);
        let all: usize = experts.iter().sum();
        let slots = ((budget / largest.max(1) as u64) as usize).min(all);
        if slots < minimum.min(all) {
            return Err(largest as u64 * minimum.min(all) as u64);
        }
        Ok(Self::with(store, &[largest], &[slots]))
    }

    /// Exactly `slots` slots (at least one), all of the largest size.
    pub fn of_slots(store: &ExpertStore, slots: usize) -> Self {
        let (sizes, experts) = Self::sizes(store);
        let slots = slots.clamp(1, experts.iter().sum::<usize>().max(1));
        Self::with(store, &[sizes.iter().copied().max().unwrap_or(0)], &[slots])
    }

    /// Distinct slot sizes, ascending, and how many experts need each.
    fn sizes(store: &ExpertStore) -> (Vec<usize>, Vec<usize>) {
        let mut count = BTreeMap::new();
        for set in (0..store.sets()).map(ExpertSetId) {
            *count.entry(store.slot_bytes(set)).or_insert(0) += store.set(set).experts;
        }
        count.into_iter().unzip()
    }

    fn with(store: &ExpertStore, sizes: &[usize], slots: &[usize]) -> Self {
        let classes = sizes.iter().zip(slots).map(|(s, n)| SlotClass { slot_bytes: *s, slots: *n }).collect();
        let class = |set| sizes.iter().position(|size| *size >= store.slot_bytes(ExpertSetId(set)));
        let class_of = (0..store.sets()).map(|set| class(set).expect("a size for every set")).collect();
        Self { classes, class_of }
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
    pub fn holds_all(&self, store: &ExpertStore) -> bool {
        let experts: usize = (0..store.sets()).map(|set| store.set(ExpertSetId(set)).experts).sum();
        self.slots() >= experts
    }
}

/// An expert of a layer.
type Key = (ExpertSetId, u32);

enum Content {
    /// In a slot; `last_used` is its place in the class's order of use, absent while pinned.
    Present { buffer: HostBuffer, last_used: Option<u64> },
    /// Being read.
    Reading,
    /// The read failed; the error waits for whoever visits the expert.
    Failed(Error),
}

#[derive(Default)]
struct Class {
    /// Empty slots.
    free: Vec<HostBuffer>,
    /// Unpinned experts, least recently used first.
    order: BTreeMap<u64, Key>,
}

/// Experts in memory, and the queue that reads the others.
pub struct ExpertCache {
    store: ExpertStore,
    plan: SlotPlan,
    classes: Vec<Class>,
    content: HashMap<Key, Content>,
    queue: Box<dyn ReadQueue>,
    /// Requests under way, by tag.
    reading: HashMap<u64, Key>,
    /// Announced and not yet visited, hence pinned as soon as they are present.
    announced: Vec<Key>,
    clock: u64,
    stats: CacheStats,
}

impl ExpertCache {
    /// An empty cache with the slots of `plan`.
    ///
    /// # Errors
    /// If the system has no memory for the slots.
    pub fn new(store: ExpertStore, plan: SlotPlan, queue: Box<dyn ReadQueue>) -> std::io::Result<Self> {
        let allocate = |class: &SlotClass| {
            let bytes = class.slot_bytes.checked_mul(class.slots).ok_or(std::io::ErrorKind::OutOfMemory)?;
            let mut free = HostBuffer::zeroed(bytes)?.split(class.slots, class.slot_bytes);
            free.reverse();
            Ok(Class { free, order: BTreeMap::new() })
        };
        let classes = plan.classes.iter().map(allocate).collect::<std::io::Result<_>>()?;
        Ok(Self {
            store,
            plan,
            classes,
            content: HashMap::new(),
            queue,
            reading: HashMap::new(),
            announced: vec![],
            clock: 0,
            stats: CacheStats::default(),
        })
    }

    /// Where the experts are on disk.
    pub fn store(&self) -> &ExpertStore {
        &self.store
    }

    /// Slots and their sizes.
    pub fn plan(&self) -> &SlotPlan {
        &self.plan
    }

    /// Statistics since the last call.
    pub fn take_stats(&mut self) -> CacheStats {
        std::mem::take(&mut self.stats)
    }

    /// Takes an expert that is present out of the order of use, so that it cannot be evicted.
    fn pin(&mut self, key: Key) -> bool {
        let Some(Content::Present { last_used, .. }) = self.content.get_mut(&key) else { return false };
        if let Some(tick) = last_used.take() {
            self.classes[self.plan.class_of[key.0.0]].order.remove(&tick);
        }
        true
    }

    /// Makes a pinned expert the most recently used one.
    fn unpin(&mut self, key: Key) {
        if let Some(Content::Present { last_used, .. }) = self.content.get_mut(&key)
            && last_used.is_none()
        {
            self.clock += 1;
            *last_used = Some(self.clock);
            self.classes[self.plan.class_of[key.0.0]].order.insert(self.clock, key);
        }
    }

    /// An empty slot of the class, if need be by evicting its least recently used expert that is not pinned.
    fn take_slot(&mut self, class: usize) -> Option<HostBuffer> {
        let class = &mut self.classes[class];
        if let Some(buffer) = class.free.pop() {
            return Some(buffer);
        }
        let (_, victim) = class.order.pop_first()?;
        match self.content.remove(&victim) {
            Some(Content::Present { buffer, .. }) => Some(buffer),
            _ => unreachable!("the order of use lists experts that are present"),
        }
    }

    /// Starts reading an expert that is neither present nor under way. False if every slot is taken for now.
    fn start_read(&mut self, key: Key) -> bool {
        let Some(buffer) = self.take_slot(self.plan.class_of[key.0.0]) else { return false };
        self.clock += 1;
        let tag = self.clock;
        let parts = self.store.reads(key.0, key.1);
        self.stats.bytes_read += parts.iter().map(|p| p.len as u64).sum::<u64>();
        self.reading.insert(tag, key);
        self.content.insert(key, Content::Reading);
        self.queue.submit(ReadRequest { tag, buffer, parts });
        true
    }

    /// Files a finished read; the expert is pinned until it is visited.
    fn finish(&mut self, done: ReadDone) -> Key {
        let key = self.reading.remove(&done.tag).expect("a tag of a request under way");
        let content = match done.result {
            Ok(()) => Content::Present { buffer: done.buffer, last_used: None },
            Err(error) => {
                self.classes[self.plan.class_of[key.0.0]].free.push(done.buffer);
                Content::Failed(error)
            }
        };
        self.content.insert(key, content);
        key
    }

    /// Files every read that has finished by now.
    fn collect_finished(&mut self) {
        while let Some(done) = self.queue.try_wait() {
            self.finish(done);
        }
    }

    /// Starts as many reads of `wanted` as there are slots for; returns those left over.
    fn start_reads(&mut self, set: ExpertSetId, wanted: &[u32]) -> Vec<u32> {
        let mut left = vec![];
        for id in wanted {
            let key = (set, *id);
            if !left.is_empty() || (!self.content.contains_key(&key) && !self.start_read(key)) {
                left.push(*id);
            }
        }
        left
    }

    /// Hands over `ids`, which are present and pinned, and unpins them.
    fn hand_over(
        &mut self,
        set: ExpertSetId,
        ids: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()> {
        let mut views = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(Content::Present { buffer, .. }) = self.content.get(&(set, *id)) else {
                unreachable!("experts handed over are present")
            };
            views.push(self.store.view(set, *id, buffer.as_ref())?);
        }
        visitor(&views);
        for id in ids {
            self.unpin((set, *id));
        }
        Ok(())
    }

    /// Forgets what was announced and not visited: an error came between. Failed reads may be tried again.
    fn release(&mut self) {
        self.collect_finished();
        for key in std::mem::take(&mut self.announced) {
            while let Some(Content::Reading) = self.content.get(&key) {
                let Some(done) = self.queue.wait() else { break };
                self.finish(done);
            }
            if let Some(Content::Failed(_)) = self.content.get(&key) {
                self.content.remove(&key);
            }
            self.unpin(key);
        }
    }

    fn visit_all(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<(), (u32, Error)> {
        self.collect_finished();
        let (mut ready, mut pending): (Vec<u32>, Vec<u32>) =
            experts.iter().partition(|id| self.pin((set, **id)));
        let mut unread = self.start_reads(set, &pending);
        loop {
            if !ready.is_empty() {
                self.hand_over(set, &ready, visitor).map_err(|error| (ready[0], error))?;
                self.collect_finished();
                unread = self.start_reads(set, &unread);
            }
            if pending.is_empty() {
                return Ok(());
            }
            let arrived = |id: &u32| matches!(self.content.get(&(set, *id)), Some(Content::Present { .. }));
            (ready, pending) = pending.into_iter().partition(arrived);
            for id in &pending {
                if let Some(Content::Failed(_)) = self.content.get(&(set, *id))
                    && let Some(Content::Failed(error)) = self.content.remove(&(set, *id))
                {
                    return Err((*id, error));
                }
            }
            if ready.is_empty() {
                let start = Instant::now();
                let done = self.queue.wait();
                self.stats.stall += start.elapsed();
                match done {
                    Some(done) => drop(self.finish(done)),
                    None => unreachable!(
                        "an expert that is not present is being read, or a slot is free to read it"
                    ),
                }
                unread = self.start_reads(set, &unread);
            }
        }
    }
}

impl ExpertSource for ExpertCache {
    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.release();
        self.announced.extend(experts.iter().map(|id| (set, *id)));
        // Pinned first, so that starting one read cannot evict another expert of the same visit.
        let missing: Vec<u32> = experts.iter().copied().filter(|id| !self.pin((set, *id))).collect();
        self.stats.hits += (experts.len() - missing.len()) as u64;
        self.stats.misses += missing.len() as u64;
        self.start_reads(set, &missing);
        Ok(())
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        // What is announced is counted, and released if the visit fails.
        if !self.announced.iter().copied().eq(experts.iter().map(|id| (set, *id))) {
            self.announce(set, experts)?;
        }
        let outcome = self.visit_all(set, experts, visitor);
        if outcome.is_err() {
            self.release();
        }
        self.announced.clear();
        outcome.map_err(|(expert, error)| moeflux_compute::Error::Expert {
            layer: self.store.set(set).layer,
            expert: expert as usize,
            reason: error.to_string(),
        })
    }
}

impl Drop for ExpertCache {
    fn drop(&mut self) {
        // Buffers in flight belong to the queue; wait for them so that no read outlives the files' owner.
        while self.queue.wait().is_some() {}
    }
}
