//! [`ExpertCache`]: which routed experts are in memory.
//!
//! A bounded number of slots, each of which holds one expert at a time. Hits are handed to the compute layer at once, misses
//! as their reads finish, so that computing overlaps with reading. What a visit still needs cannot be evicted; among the
//! rest a [policy](super::PolicyKind) decides. A visit may need more experts than there are slots: then slots are refilled
//! during the visit.
//!
//! Between layers the cache may prefetch experts that a backend guesses will be needed, where that pays
//! ([`Prefetch`]).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use moeflux_compute::backend::{ExpertSource, ExpertView};
use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::quant::find_not_finite;

use super::copies::Copies;
use super::policy::{Demand, PolicyKind};
use super::prefetch::{Forecaster, Prefetch};
use super::residency::{Key, Place, Residency};
use super::slots::{SlotClass, SlotPlan};
use super::stock::Stock;
use super::store::ExpertStore;
use super::trace::{Request, Trace};
use crate::io::buffer::HostBuffer;
use crate::io::file::ReadMode;
use crate::io::queue::{ReadDone, ReadQueue, ReadRequest};
use crate::{Error, Result};

/// How the cache works; nothing here changes results.
#[derive(Debug, Clone, Copy)]
pub struct CacheOptions {
    /// Eviction policy.
    pub policy: PolicyKind,
    /// When to prefetch experts.
    pub prefetch: Prefetch,
    /// Past the page cache or through it.
    pub read_mode: ReadMode,
}

impl Default for CacheOptions {
    fn default() -> Self {
        let (policy, prefetch) = (PolicyKind::default(), Prefetch::default());
        Self { policy, prefetch, read_mode: ReadMode::Buffered }
    }
}

/// Statistics since the cache was created or since [`ExpertCache::take_stats`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CacheStats {
    /// Experts that were in memory when they were requested.
    pub hits: u64,
    /// Experts that a device held when batches chose them, so that they were not requested.
    pub device_hits: u64,
    /// Hits that had been prefetched.
    pub prefetch_hits: u64,
    /// Experts that were not in memory when they were requested.
    pub misses: u64,
    /// Misses that were already being read.
    pub late: u64,
    /// Experts prefetched by a guess.
    pub prefetches: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Those of them that came from mirrors.
    pub bytes_from_mirrors: u64,
    /// Mirrors of which a read failed, so that nothing is read from them any more.
    pub mirrors_lost: u64,
    /// Time that computing stood still waiting for reads.
    pub stall: Duration,
    /// Bytes of reads that have ended.
    pub bytes_arrived: u64,
    /// Time with reads under way, up to when their end was noticed.
    pub reading: Duration,
    /// Experts guessed for layers.
    pub guesses: u64,
    /// Those of the guesses that the layer asked for.
    pub guesses_right: u64,
    /// Experts that layers with a guess asked for.
    pub guesses_asked: u64,
}

impl CacheStats {
    /// Share of chosen experts that were in memory, the host's or a device's, 0..=1; 1 if there were none.
    pub fn hit_rate(&self) -> f64 {
        let hits = self.hits + self.device_hits;
        match hits + self.misses {
            0 => 1.0,
            all => hits as f64 / all as f64,
        }
    }

    /// Share of chosen experts that a device held, 0..=1.
    pub fn device_hit_rate(&self) -> f64 {
        self.device_hits as f64 / (self.hits + self.device_hits + self.misses).max(1) as f64
    }

    /// Bytes per second while something was read; `None` if nothing was. The disk may be faster: a read that ends while
    /// something is computed is noticed afterwards.
    pub fn bandwidth(&self) -> Option<f64> {
        (self.bytes_arrived > 0).then(|| self.bytes_arrived as f64 / self.reading.as_secs_f64().max(1e-9))
    }

    /// Share of guesses that were right, and of requests that were guessed; `None` without guesses.
    pub fn guess_precision_recall(&self) -> Option<(f64, f64)> {
        let share = |of: u64| self.guesses_right as f64 / of.max(1) as f64;
        (self.guesses > 0).then(|| (share(self.guesses), share(self.guesses_asked)))
    }
}

impl std::ops::AddAssign for CacheStats {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.prefetch_hits += other.prefetch_hits;
        self.misses += other.misses;
        self.late += other.late;
        self.prefetches += other.prefetches;
        self.bytes_read += other.bytes_read;
        self.bytes_from_mirrors += other.bytes_from_mirrors;
        self.mirrors_lost += other.mirrors_lost;
        self.device_hits += other.device_hits;
        self.stall += other.stall;
        self.bytes_arrived += other.bytes_arrived;
        self.reading += other.reading;
        self.guesses += other.guesses;
        self.guesses_right += other.guesses_right;
        self.guesses_asked += other.guesses_asked;
    }
}

/// Reads under way, and when the disk was busy.
struct Reading {
    queue: Box<dyn ReadQueue>,
    mode: ReadMode,
    /// Requests under way, by tag.
    requests: HashMap<u64, UnderWay>,
    next_tag: u64,
    /// When the last read ended, or the first began after the disk was idle; `None` while it is.
    busy_since: Option<Instant>,
    /// Whether that was noticed at once.
    exact: bool,
    /// When the last read ended that somebody waited for, or a layer asked for experts, whichever was later.
    needed_until: Instant,
}

/// A read of an expert, and from which copy.
struct UnderWay {
    key: Key,
    bytes: u64,
    copy: usize,
}

/// A guess of what the next layer will ask for.
struct Guess {
    set: usize,
    experts: Vec<u32>,
    /// Those that had no slot.
    absent: Vec<u32>,
}

/// Reads that [`ExpertCache::fill`] has under way at once.
const FILL_READS: usize = 16;

/// Experts in memory, and the queue that reads the others.
pub struct ExpertCache {
    store: ExpertStore,
    plan: SlotPlan,
    residency: Residency,
    /// Content of slots by set and expert.
    content: Vec<Vec<Option<HostBuffer>>>,
    /// Empty slots.
    free: Stock,
    /// Slots in use of each class: those of the plan, or fewer.
    slots: Vec<usize>,
    /// Failed reads; the error waits for whoever visits the expert.
    failed: HashMap<Key, Error>,
    reading: Reading,
    copies: Copies,
    /// Why mirrors were lost, until somebody asks.
    lost: Vec<Error>,
    /// Announced and not yet visited, hence held.
    announced: Vec<Key>,
    /// Given by a device whose copies may still be under way, hence held.
    given: Vec<Key>,
    /// Whether a device holds each expert, by set.
    away: Vec<Vec<bool>>,
    /// What the routers of the batch chose for the set announced next: tokens by expert, rows.
    routed: Option<(usize, Vec<u32>, usize)>,
    forecaster: Forecaster,
    guess: Option<Guess>,
    /// Read ahead for the layer that is asked next.
    read_ahead: Vec<Key>,
    /// Layers announced since an expert was last missing.
    layers_without_miss: usize,
    trace: Option<Trace>,
    stats: CacheStats,
}

impl ExpertCache {
    /// An empty cache with the slots of `plan`; `prepare` gets their memory before it is used.
    ///
    /// # Errors
    /// If the system has no memory for the slots.
    pub fn new(
        store: ExpertStore,
        plan: SlotPlan,
        queue: Box<dyn ReadQueue>,
        options: CacheOptions,
        prepare: &mut dyn FnMut(&mut HostBuffer),
    ) -> std::io::Result<Self> {
        let mut allocate = |class: &SlotClass| {
            let bytes = class.slot_bytes.checked_mul(class.slots).ok_or(std::io::ErrorKind::OutOfMemory)?;
            let mut memory = HostBuffer::zeroed(bytes)?;
            prepare(&mut memory);
            Ok(memory.split(class.slots, class.slot_bytes))
        };
        let free = Stock::new(plan.classes().iter().map(&mut allocate).collect::<std::io::Result<_>>()?);
        let (shapes, store_copies) = (store.shapes(), store.copies());
        Ok(Self {
            residency: Residency::new(&shapes, &plan, options.policy),
            content: shapes.iter().map(|shape| (0..shape.experts).map(|_| None).collect()).collect(),
            store,
            slots: plan.classes().iter().map(|class| class.slots).collect(),
            plan,
            free,
            failed: HashMap::new(),
            reading: Reading {
                queue,
                mode: options.read_mode,
                requests: HashMap::new(),
                next_tag: 0,
                busy_since: None,
                exact: true,
                needed_until: Instant::now(),
            },
            copies: Copies::new(store_copies),
            lost: vec![],
            announced: vec![],
            given: vec![],
            away: shapes.iter().map(|shape| vec![false; shape.experts]).collect(),
            routed: None,
            forecaster: Forecaster::new(options.prefetch),
            guess: None,
            read_ahead: vec![],
            layers_without_miss: 0,
            trace: None,
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

    /// Slots in use: those of the plan unless it was given a lower limit.
    pub fn slots(&self) -> usize {
        self.slots.iter().sum()
    }

    /// Bytes of the slots in use.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes_of(&self.slots)
    }

    /// The least and the most bytes that the slots may have.
    pub fn range(&self) -> (u64, u64) {
        (self.plan.bytes_within(0), self.plan.bytes())
    }

    /// Holds the slots in use to `bytes`, in the plan's proportions: experts of the least worth leave, and their memory is
    /// given back; or empty slots are added. Between evaluations only.
    pub(crate) fn limit(&mut self, bytes: u64) {
        for (class, wanted) in self.plan.within_bytes(bytes).into_iter().enumerate() {
            while self.slots[class] < wanted && self.free.restore(class) {
                self.residency.restored(class);
                self.slots[class] += 1;
            }
            while self.slots[class] > wanted {
                let slot = match self.residency.withdraw(class) {
                    Ok(Some((set, id))) => self.content[set][id as usize].take(),
                    Ok(None) => self.free.take(class),
                    // What is being read comes first.
                    Err(()) if self.wait() => continue,
                    Err(()) => break,
                };
                self.free.withdraw(class, slot.expect("a slot that residency counts"));
                self.slots[class] -= 1;
            }
        }
        self.residency.divide(&self.slots);
    }

    /// Statistics since the last call.
    pub fn take_stats(&mut self) -> CacheStats {
        std::mem::take(&mut self.stats)
    }

    /// Why mirrors are no longer read from, since the last call: the file and what failed.
    pub fn take_lost_mirrors(&mut self) -> Vec<Error> {
        std::mem::take(&mut self.lost)
    }

    /// Says which expert in memory holds a value that is not finite, if any does.
    pub(crate) fn find_not_finite(&self) -> Option<String> {
        let sets = self.content.iter().enumerate();
        let mut slots = sets.flat_map(|(set, slots)| slots.iter().enumerate().map(move |slot| (set, slot)));
        slots.find_map(|(set, (id, slot))| {
            let set = ExpertSetId(set);
            let view = self.store.view(set, id as u32, slot.as_ref()?.as_ref()).ok()?;
            let matrices = [("gate", view.gate), ("up", Some(view.up)), ("down", Some(view.down))];
            let found = |(name, matrix): (_, Option<_>)| Some((name, find_not_finite(matrix?).ok()??));
            let (name, at) = matrices.into_iter().find_map(found)?;
            Some(format!("{name} of expert {id} of layer {} holds {at}", self.store.set(set).layer))
        })
    }

    /// Reads experts into the slots that are empty, the same number of every layer, and waits for them. Experts that are
    /// asked for take their places as they would take those of others.
    ///
    /// An expert that cannot be read stays absent: whoever asks for it meets the error.
    pub fn fill(&mut self) {
        let most = self.content.iter().map(Vec::len).max().unwrap_or(0);
        let sets = self.content.len();
        for (id, set) in (0..most).flat_map(|id| (0..sets).map(move |set| (id, set))) {
            let key = (set, id as u32);
            let empty = self.free.has_any(self.residency.class(set));
            if id >= self.content[set].len() || self.away[set][id] {
                continue;
            }
            if empty && self.residency.place(key) == Place::Absent {
                self.stats.prefetches += u64::from(self.start_read(key));
                if self.reading.requests.len() >= FILL_READS {
                    self.wait();
                }
            }
        }
        while self.wait() {}
    }

    /// Records all requests from now on.
    pub fn start_trace(&mut self) {
        self.trace = Some(Trace::default());
    }

    /// Ends recording and returns what was recorded.
    pub(crate) fn take_trace(&mut self) -> Option<Trace> {
        self.trace.take()
    }

    /// Starts reading an expert that has no slot. False if every slot is taken for now.
    fn start_read(&mut self, key: Key) -> bool {
        let Ok(victim) = self.residency.take_slot(key) else { return false };
        let buffer = self.slot_of(key.0, victim);
        let copy = self.copies.choose(self.store.expert_bytes(ExpertSetId(key.0)));
        self.read_from(copy, key, buffer);
        true
    }

    /// Starts reading an expert from a copy of the checkpoint.
    fn read_from(&mut self, copy: usize, key: Key, buffer: HostBuffer) {
        let parts = self.store.reads_from(copy, ExpertSetId(key.0), key.1);
        let by_columns = self.store.by_columns(ExpertSetId(key.0), key.1);
        let bytes = parts.iter().map(|p| p.len as u64).sum::<u64>();
        self.stats.bytes_read += bytes;
        if copy > 0 {
            self.stats.bytes_from_mirrors += bytes;
        }
        let now = Instant::now();
        self.copies.started(copy, bytes, now);
        let reading = &mut self.reading;
        reading.next_tag += 1;
        let (tag, mode) = (reading.next_tag, reading.mode);
        reading.requests.insert(tag, UnderWay { key, bytes, copy });
        if reading.busy_since.is_none() {
            (reading.busy_since, reading.exact) = (Some(now), true);
        }
        reading.queue.submit(ReadRequest { tag, buffer, parts, by_columns, mode });
    }

    /// The slot that a victim had, or an empty one for a set.
    fn slot_of(&mut self, set: usize, victim: Option<Key>) -> HostBuffer {
        let buffer = match victim {
            Some((set, id)) => self.content[set][id as usize].take(),
            None => self.free.take(self.residency.class(set)),
        };
        buffer.expect("a slot that residency counts")
    }

    /// Counts what a batch chose.
    fn count(&mut self, set: usize, experts: &[u32]) {
        let (tokens, rows) = match self.routed.take().filter(|(routed, ..)| *routed == set) {
            Some((_, tokens, rows)) => (experts.iter().map(|id| tokens[*id as usize]).collect(), rows),
            None => (vec![1; experts.len()], 1),
        };
        let guess = self.check_guess(set, experts);
        if let Some(trace) = &mut self.trace {
            trace.push(Request { set, rows, experts: experts.to_vec(), tokens: tokens.clone(), guess });
        }
        self.forecaster.layer(rows);
        self.forecaster.idle(self.reading.needed_until.elapsed());
        self.reading.needed_until = Instant::now();
        self.residency.asked(set, Demand { experts, tokens: &tokens, rows });
    }

    /// Files a finished read, which was `waited` for or noticed in passing.
    fn finish(&mut self, done: ReadDone, waited: bool) {
        let UnderWay { key, bytes, copy } =
            self.reading.requests.remove(&done.tag).expect("a tag of a request under way");
        let now = Instant::now();
        self.copies.finished(copy, bytes, now, waited);
        let took = self.reading.busy_since.replace(now).map_or(Duration::ZERO, |since| now - since);
        self.stats.bytes_arrived += bytes;
        self.stats.reading += took;
        if self.reading.requests.is_empty() {
            self.reading.busy_since = None;
        }
        if std::mem::replace(&mut self.reading.exact, waited) && waited {
            self.forecaster.read(bytes, took);
        }
        match done.result {
            Ok(()) => {
                self.content[key.0][key.1 as usize] = Some(done.buffer);
                self.residency.arrived(key);
            }
            // A mirror that fails is not asked again.
            Err(error) if copy > 0 => {
                if self.copies.give_up(copy) {
                    self.stats.mirrors_lost += 1;
                    self.lost.push(error);
                }
                self.read_from(0, key, done.buffer);
            }
            Err(error) => {
                // Nobody else needs to know: whoever asks for it later reads it again.
                if self.announced.contains(&key) {
                    self.failed.insert(key, error);
                }
                self.residency.vacated(key);
                self.free.put(self.residency.class(key.0), done.buffer);
            }
        }
        if self.announced.contains(&key) {
            self.reading.needed_until = Instant::now();
        }
    }

    /// Files every read that has finished by now.
    fn collect_finished(&mut self) {
        while let Some(done) = self.reading.queue.try_wait() {
            self.finish(done, false);
        }
    }

    /// Waits for a read; false if none is under way.
    fn wait(&mut self) -> bool {
        let start = Instant::now();
        let Some(done) = self.reading.queue.wait() else { return false };
        self.stats.stall += start.elapsed();
        self.finish(done, true);
        true
    }

    /// Starts as many reads of `wanted` as there are slots for; returns those left over.
    fn start_reads(&mut self, set: usize, wanted: &[u32]) -> Vec<u32> {
        let mut left = vec![];
        for id in wanted {
            let key = (set, *id);
            match self.residency.place(key) {
                Place::Absent if self.failed.contains_key(&key) => {}
                Place::Absent if !left.is_empty() || !self.start_read(key) => left.push(*id),
                _ => self.residency.hold(key),
            }
        }
        left
    }

    /// Hands over `ids`, which are present and held, and lets them go.
    fn hand_over(
        &mut self,
        set: usize,
        ids: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<()> {
        let mut views = Vec::with_capacity(ids.len());
        for id in ids {
            let slot = self.content[set][*id as usize].as_ref().expect("experts handed over are present");
            views.push(self.store.view(ExpertSetId(set), *id, slot.as_ref())?);
        }
        visitor(&views);
        ids.iter().for_each(|id| self.residency.let_go((set, *id)));
        Ok(())
    }

    /// Forgets what was announced and not visited: an error came between. Failed reads may be tried again.
    fn release(&mut self) {
        for key in self.announced.clone() {
            while self.residency.place(key) == Place::Reading {
                let Some(done) = self.reading.queue.wait() else { break };
                self.finish(done, true);
            }
            self.residency.let_go(key);
        }
        self.announced.clear();
        self.failed.clear();
    }

    fn visit_all(
        &mut self,
        set: usize,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<(), (u32, Error)> {
        self.collect_finished();
        let mut pending = experts.to_vec();
        let mut unread = self.start_reads(set, experts);
        loop {
            let present = |id: &u32| self.residency.place((set, *id)) == Place::Present;
            let (ready, rest): (Vec<u32>, Vec<u32>) = pending.into_iter().partition(present);
            pending = rest;
            if !ready.is_empty() {
                self.hand_over(set, &ready, visitor).map_err(|error| (ready[0], error))?;
                self.collect_finished();
                unread = self.start_reads(set, &unread);
            }
            if pending.is_empty() {
                return Ok(());
            }
            if let Some(id) = pending.iter().find(|id| self.failed.contains_key(&(set, **id)))
                && let Some(error) = self.failed.remove(&(set, *id))
            {
                return Err((*id, error));
            }
            if ready.is_empty() {
                let waited = self.wait();
                assert!(waited, "an expert that is not present is being read, or a slot is free to read it");
                unread = self.start_reads(set, &unread);
            }
        }
    }

    /// Compares the guess for `set`, if there is one, with what is asked for.
    fn check_guess(&mut self, set: usize, experts: &[u32]) -> Vec<u32> {
        let Some(guess) = self.guess.take().filter(|guess| guess.set == set) else { return vec![] };
        let right = |ids: &[u32]| ids.iter().filter(|id| experts.binary_search(id).is_ok()).count();
        self.stats.guesses += guess.experts.len() as u64;
        self.stats.guesses_right += right(&guess.experts) as u64;
        self.stats.guesses_asked += experts.len() as u64;
        self.forecaster.guessed(guess.absent.len(), right(&guess.absent));
        guess.experts
    }
}

impl ExpertSource for ExpertCache {
    fn routed(&mut self, set: ExpertSetId, ids: &[u32], rows: usize) {
        let mut tokens = vec![0; self.content[set.0].len()];
        ids.iter().for_each(|id| tokens[*id as usize] += 1);
        self.routed = Some((set.0, tokens, rows));
    }

    fn announce(&mut self, set: ExpertSetId, experts: &[u32]) -> moeflux_compute::Result<()> {
        self.announce_missing(set, experts, experts)
    }

    fn announce_missing(
        &mut self,
        set: ExpertSetId,
        chosen: &[u32],
        missing: &[u32],
    ) -> moeflux_compute::Result<()> {
        let set = set.0;
        self.release();
        self.collect_finished();
        // Nothing is chosen where experts are read ahead of all batches.
        if !chosen.is_empty() {
            self.count(set, chosen);
            self.stats.device_hits += (chosen.len() - missing.len()) as u64;
        }
        self.announced.extend(missing.iter().map(|id| (set, *id)));
        let mut absent = vec![];
        for id in missing {
            let key = (set, *id);
            match self.residency.place(key) {
                Place::Present => {
                    self.stats.hits += 1;
                    self.stats.prefetch_hits += u64::from(self.read_ahead.contains(&key));
                }
                Place::Reading => {
                    self.stats.misses += 1;
                    self.stats.late += 1;
                }
                Place::Absent => {
                    self.stats.misses += 1;
                    absent.push(*id);
                    continue;
                }
            }
            // Before any read starts, which might evict it.
            self.residency.hold(key);
        }
        self.read_ahead.clear();
        self.layers_without_miss = if absent.is_empty() { self.layers_without_miss + 1 } else { 0 };
        self.start_reads(set, &absent);
        Ok(())
    }

    fn worths(&self, set: ExpertSetId) -> &[f64] {
        self.residency.worths(set.0)
    }

    fn give(
        &mut self,
        set: ExpertSetId,
        expert: u32,
        copy: &mut dyn FnMut(&mut [&mut [u8]]) -> moeflux_compute::Result<()>,
    ) -> moeflux_compute::Result<bool> {
        let key = (set.0, expert);
        self.away[set.0][expert as usize] = false;
        // What is asked for comes first: all of it has a slot, and it stays.
        let waits = |key: &Key| self.residency.place(*key) == Place::Absent;
        if !waits(&key) || self.announced.iter().any(waits) || !self.store.is_separate(set, expert) {
            return Ok(false);
        }
        let Ok(victim) = self.residency.take_slot_if_worthy(key) else { return Ok(false) };
        let mut buffer = self.slot_of(key.0, victim);
        let planes = self.store.planes_mut(set, expert, buffer.as_mut_slice());
        let outcome = planes.map(|mut planes| copy(&mut planes));
        if let Some(Ok(())) = outcome {
            self.content[key.0][expert as usize] = Some(buffer);
            self.residency.arrived(key);
            self.residency.hold(key);
            self.given.push(key);
            return Ok(true);
        }
        self.residency.vacated(key);
        self.free.put(self.residency.class(key.0), buffer);
        outcome.unwrap_or(Ok(())).map(|()| false)
    }

    fn arrived(&mut self) {
        for key in self.given.drain(..) {
            self.residency.let_go(key);
        }
    }

    fn exchanged(&mut self, set: ExpertSetId, experts: &[u32]) {
        for id in experts {
            let key = (set.0, *id);
            self.away[set.0][*id as usize] = true;
            if self.residency.is_idle(key)
                && let Some(buffer) = self.content[set.0][*id as usize].take()
            {
                self.residency.vacated(key);
                self.free.put(self.residency.class(set.0), buffer);
            }
        }
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> moeflux_compute::Result<()> {
        // What is announced is counted, and released if the visit fails.
        if !self.announced.iter().copied().eq(experts.iter().map(|id| (set.0, *id))) {
            self.announce(set, experts)?;
        }
        let outcome = self.visit_all(set.0, experts, visitor);
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

    fn wants_forecast(&mut self) -> bool {
        self.trace.is_some() || (self.layers_without_miss <= self.content.len() && self.forecaster.wants())
    }

    fn forecast(&mut self, set: ExpertSetId, likely: &[u32]) {
        let set = set.0;
        let mut experts = likely.to_vec();
        experts.sort_unstable();
        let present = |id: &&u32| self.residency.place((set, **id)) != Place::Absent;
        let (there, absent): (Vec<u32>, Vec<u32>) = likely.iter().partition(present);
        // A guess must not push out another one.
        there.iter().for_each(|id| self.residency.reserve((set, *id)));
        for id in absent.iter().take(self.forecaster.count(self.store.expert_bytes(ExpertSetId(set)))) {
            let key = (set, *id);
            if !self.residency.has_room(key) || !self.start_read(key) {
                break;
            }
            self.residency.reserve(key);
            self.read_ahead.push(key);
            self.stats.prefetches += 1;
        }
        self.guess = Some(Guess { set, experts, absent });
    }
}

impl Drop for ExpertCache {
    fn drop(&mut self) {
        // Buffers in flight belong to the queue; wait for them so that no read outlives the files' owner.
        while self.reading.queue.wait().is_some() {}
    }
}
