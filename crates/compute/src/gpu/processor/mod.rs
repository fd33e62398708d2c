//! [`Processor`]: the processor's part of the experts that a batch misses, computed where they are, beside the device.
//!
//! For few rows the device decides which missing experts come over the bus and which ones the processor computes
//! and puts their rows on a *desk* in host memory that both see (`kernels/tiers.h`), goes on with what it has, and waits for
//! the outputs where it needs them (`kernels/share.h`). A thread of the processor's looks at the desk as long as a batch is under
//! way. Where the host decides, it computes its part itself ([`Beside`]). Outputs have the device's bits, so that nobody can
//! tell who computed them.

mod beside;
mod costs;
mod desk;
mod experts;
mod rows;
mod trials;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(super) use self::beside::Beside;
pub(super) use self::costs::MOST_SHARED;
use self::costs::{Costs, Idle, Line, fixed_shares, median};
use self::desk::Desk;
pub(super) use self::desk::{DeskLayout, HandedPair, MOST_PAIRS, RowForm};
pub(super) use self::experts::HandedSet;
pub use self::experts::computes_experts;
use self::experts::{Scratch, compute};
use super::device::{BufferId, Device};
use super::memory::{HandOver, Tiers};
use super::options::ProcessorShare;
use crate::cpu::pool::ThreadPool;
use crate::{Error, Result};

/// Turns of the spin loop of threads that wait for the next layer: about a millisecond.
const SPINS: u32 = 40_000;
/// Batches after which the shares are looked at again.
const LOOKED_AT: u32 = 32;
/// Where the processor has no share: what it is given for so many batches to see whether it is still slow.
const TRIED_PART: f32 = 0.3;
const TRIED: u32 = 3;
/// Looks at an empty desk after which others may have the core.
const PATIENCE: u32 = 1 << 14;
/// Looks in vain after which a device is one that takes its time, whose requests may wait for a tenth of a millisecond.
const LONG: u32 = 64 * PATIENCE;

/// States of the thread.
const IDLE: u32 = 0;
const ACTIVE: u32 = 1;
const ENDED: u32 = 2;

/// What the thread shares with the one that runs batches.
struct Shared {
    state: AtomicU32,
    desk: Desk,
    /// Held while a request is answered.
    answering: Mutex<()>,
    sets: Vec<Option<HandedSet>>,
    /// All experts in host memory.
    host: HostMemory,
    /// What requests took, by their experts, since that was last looked at.
    took: Mutex<Took>,
    /// Whether a request could not be computed.
    failed: AtomicBool,
}

/// What requests took, and what they usually do: a start and nanoseconds an expert.
#[derive(Debug, Default)]
struct Took {
    line: Line,
    usual: [f64; 2],
}

/// Memory that outlives the thread, and that nothing writes while it runs.
struct HostMemory(*const u8, usize);

// SAFETY: memory that is only read, of any thread's.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn bytes(&self) -> &[u8] {
        // SAFETY: alive and not written by the type's contract.
        unsafe { std::slice::from_raw_parts(self.0, self.1) }
    }
}

/// The thread that computes experts for a device, and how many it is given.
pub(super) struct Processor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    share: ProcessorShare,
    costs: Option<Costs>,
    shares: [u32; MOST_SHARED + 1],
    /// Batches since the shares were last looked at, and after how many that happens next.
    batches: u32,
    looked_at: u32,
    idle: Idle,
}

impl Processor {
    /// For experts in host memory, all of which are there when the first batch begins. Memory of `hand_over` and of `tiers`
    /// outlives what this gives.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has no host memory.
    pub(super) fn new(
        device: &mut dyn Device,
        (tiers, hand_over): (&Tiers, &HandOver),
        sets: Vec<Option<HandedSet>>,
        share: ProcessorShare,
    ) -> Result<Self> {
        let (desk, layout) = (hand_over.desk, hand_over.layout);
        // SAFETY: by the caller the memory outlives the thread, which ends with `self`; besides it, `place` and `collect` use
        // it as `Desk` says.
        let desk = unsafe { Desk::new(device.host_bytes(desk)?, layout) };
        let host = device.host_bytes(tiers.host())?;
        let host = HostMemory(host.as_ptr(), host.len());
        let shared = Arc::new(Shared {
            state: AtomicU32::new(IDLE),
            desk,
            answering: Mutex::default(),
            sets,
            host,
            took: Mutex::default(),
            failed: AtomicBool::new(false),
        });
        Ok(Self {
            shared,
            thread: None,
            share,
            costs: None,
            shares: [0; MOST_SHARED + 1],
            batches: 0,
            looked_at: LOOKED_AT,
            idle: Idle::default(),
        })
    }

    /// Begins to look at the desk: before a batch is queued. The first time it finds out what the processor can take.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn begin(
        &mut self,
        device: &mut dyn Device,
        (tiers, slots, hand_over): (&mut Tiers, BufferId, &HandOver),
    ) -> Result<()> {
        if self.thread.is_none() {
            let pool = ThreadPool::that_spins(self.share.threads, SPINS);
            let shares = match self.share.part {
                Some(part) => fixed_shares(part),
                None => {
                    let costs = self.trial(device, tiers, slots, &pool)?;
                    self.costs = Some(costs);
                    self.shared.took().usual = costs.usual();
                    costs.shares()
                }
            };
            self.publish(device, hand_over, shares)?;
            let shared = Arc::clone(&self.shared);
            let run = move || shared.look(&pool);
            let thread = std::thread::Builder::new().name("experts".into()).spawn(run);
            let refused = |error| Error::Device { reason: format!("a thread for experts: {error}") };
            self.thread = Some(thread.map_err(refused)?);
        }
        self.shared.state.store(ACTIVE, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Ok(())
    }

    /// Ends looking at the desk: after the batch has ended.
    ///
    /// # Errors
    /// [`Error::Device`] if the device waited for the processor in vain: the batch's results are NaN.
    pub(super) fn end(&mut self, device: &mut dyn Device, hand_over: &HandOver) -> Result<()> {
        self.shared.state.store(IDLE, Ordering::Release);
        if self.shared.desk.take_late() {
            // An answer to what nobody waits for would be taken for one to the next request.
            let _answered = self.shared.answering.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.desk.take_asked();
            return Err(Error::Device { reason: "the processor did not compute its experts in time".into() });
        }
        if self.shared.failed.swap(false, Ordering::AcqRel) {
            return Err(Error::Device { reason: "the processor could not compute its experts".into() });
        }
        self.batches += 1;
        let Some(costs) = self.costs.as_mut().filter(|_| self.batches >= self.looked_at) else {
            return Ok(());
        };
        (self.batches, self.looked_at) = (0, LOOKED_AT);
        let [batches, experts, squares, time, products, rest @ ..] = hand_over.take_times(device)?;
        let bus = Line::of_sums([batches, experts, squares, time, products]);
        let handed = {
            let mut took = self.shared.took();
            let handed = std::mem::take(&mut took.line);
            costs.add(bus, handed, rest);
            took.usual = costs.usual();
            handed
        };
        let mut shares = costs.shares();
        let has_share = shares.iter().any(|share| *share > 0);
        if self.idle.tries_again(has_share, handed != Line::default()) {
            costs.forget_processor();
            shares = fixed_shares(TRIED_PART);
            self.looked_at = TRIED;
        }
        self.publish(device, hand_over, shares)
    }

    /// Tells the device the shares, if they have changed.
    fn publish(
        &mut self,
        device: &mut dyn Device,
        hand_over: &HandOver,
        shares: [u32; MOST_SHARED + 1],
    ) -> Result<()> {
        if shares == self.shares {
            return Ok(());
        }
        self.shares = shares;
        hand_over.set_shares(device, &shares)
    }

    /// Measures both sides at once, as they will be at work: they share the memory's bandwidth.
    fn trial(
        &self,
        device: &mut dyn Device,
        tiers: &mut Tiers,
        slots: BufferId,
        pool: &ThreadPool,
    ) -> Result<Costs> {
        /// Rounds, and experts of a request in each: the first round wakes everything up.
        const ROUNDS: usize = 6;
        const EXPERTS: [usize; 3] = [1, 2, 4];
        /// Copies for each expert that is computed.
        const COPIES: usize = 4;
        /// What a batch takes that brings nothing, and what handing over takes beside the processor's own time: guesses,
        /// in nanoseconds, until batches have shown it.
        const BEGIN: f64 = 10e3;
        const HAND_OVER: f64 = 4e3;
        let Some((index, set)) =
            self.shared.sets.iter().enumerate().find_map(|(i, s)| Some((i, s.as_ref()?)))
        else {
            return Ok(Costs::default());
        };
        // Copies go where a prompt before may still read.
        device.synchronize()?;
        let (mut copied, mut computed) = (vec![], EXPERTS.map(|_| vec![]));
        let mut scratch = Scratch::default();
        let mut next = 0;
        for round in 0..ROUNDS {
            let copies = COPIES * EXPERTS.iter().sum::<usize>();
            let mut computing = Duration::ZERO;
            let start = Instant::now();
            tiers.try_copies(device, slots, index, copies)?;
            for (experts, times) in EXPERTS.into_iter().zip(&mut computed) {
                // Each with outputs of its own, as threads write them at once.
                let pairs: Vec<_> = (0..experts)
                    .map(|i| desk::HandedPair { expert: ((next + i) % set.experts()) as u32, pair: i as u32 })
                    .collect();
                next += experts;
                let begin = Instant::now();
                let host = self.shared.host.bytes();
                let matrices = |expert| set.matrices(host, expert);
                compute(pool, set, matrices, &self.shared.desk, &pairs, &mut scratch)?;
                let took = begin.elapsed();
                computing += took;
                if round > 0 {
                    times.push(took.as_nanos() as f64);
                }
            }
            device.finish_copies()?;
            let mut took = start.elapsed();
            if computing > took / 2 {
                // The copies may have ended long before.
                let start = Instant::now();
                tiers.try_copies(device, slots, index, copies)?;
                device.finish_copies()?;
                took = start.elapsed();
            }
            if round > 0 {
                copied.push(took.as_nanos() as f64 / copies as f64);
            }
        }
        // Not means: a round in which threads waited for a core says nothing.
        let (mut bus, mut processor) = (Line::default(), Line::default());
        let each = median(copied);
        (1..=4).for_each(|n| bus.add(f64::from(n), BEGIN + f64::from(n) * each));
        for (experts, times) in EXPERTS.into_iter().zip(computed) {
            processor.add(experts as f64, median(times));
        }
        Ok(Costs::new(bus, processor, HAND_OVER))
    }
}

impl Drop for Processor {
    fn drop(&mut self) {
        self.shared.state.store(ENDED, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its panics are caught where they happen.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn took(&self) -> MutexGuard<'_, Took> {
        self.took.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests until the end.
    fn look(&self, pool: &ThreadPool) {
        let (mut scratch, mut pairs) = (Scratch::default(), vec![]);
        let mut looks = 0;
        loop {
            match self.state.load(Ordering::Acquire) {
                ENDED => return,
                IDLE => {
                    std::thread::park();
                    looks = 0;
                }
                _ if self.desk.asked() => {
                    let _answering = self.answering.lock().unwrap_or_else(PoisonError::into_inner);
                    if !self.desk.take_asked() {
                        continue;
                    }
                    let begin = Instant::now();
                    let set = self.desk.request(&mut pairs);
                    let experts = pairs.chunk_by(|a, b| a.expert == b.expert).count();
                    let answer = || match self.sets.get(set).and_then(Option::as_ref) {
                        Some(set) => {
                            let matrices = |expert| set.matrices(self.host.bytes(), expert);
                            compute(pool, set, matrices, &self.desk, &pairs, &mut scratch).is_ok()
                        }
                        None => false,
                    };
                    if !catch_unwind(AssertUnwindSafe(answer)).unwrap_or(false) {
                        self.failed.store(true, Ordering::Release);
                    }
                    self.desk.answer();
                    let took = begin.elapsed().as_nanos() as f64;
                    let all = &mut *self.took();
                    all.line.add_unless_held_up(experts as f64, took, all.usual);
                    looks = 0;
                }
                _ => {
                    looks = LONG.min(looks + 1);
                    match looks {
                        LONG => std::thread::sleep(Duration::from_micros(50)),
                        looks if looks % PATIENCE == 0 => std::thread::yield_now(),
                        _ => std::hint::spin_loop(),
                    }
                }
            }
        }
    }
}
