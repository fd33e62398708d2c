//! [`Beside`]: the processor's part where the host decides what comes to the device, computed while that comes.

use std::time::{Duration, Instant};

use super::SPINS;
use super::desk::{Desk, HandedPair};
use super::experts::{HandedSet, Scratch, compute};
use super::trials::Trials;
use crate::backend::ExpertView;
use crate::cpu::pool::ThreadPool;
use crate::gpu::device::Device;
use crate::gpu::memory::HandOver;
use crate::gpu::options::ProcessorShare;
use crate::graph::ExpertSetId;
use crate::{Error, Result};

/// How long the desk is looked at before the device is asked.
const PATIENCE: Duration = Duration::from_millis(2);

/// The processor as a help to the thread that runs batches.
pub(in crate::gpu) struct Beside {
    pool: ThreadPool,
    sets: Vec<Option<HandedSet>>,
    desk: Desk,
    scratch: Scratch,
    /// As many experts as this says, if not as takes least time.
    part: Option<f32>,
    trials: Trials,
    /// What was chosen last.
    wanted: usize,
    /// What was computed for the batch's current layer.
    pairs: Vec<HandedPair>,
    experts: usize,
    /// Whether the device has been told of any.
    told: bool,
    waits: u64,
}

impl Beside {
    /// For experts of `sets`. Memory of `hand_over` outlives what this gives.
    ///
    /// # Errors
    /// [`Error::Device`] if the device has no host memory.
    pub(in crate::gpu) fn new(
        device: &mut dyn Device,
        hand_over: &HandOver,
        sets: Vec<Option<HandedSet>>,
        share: ProcessorShare,
    ) -> Result<Self> {
        // SAFETY: by the caller the memory outlives this; kernels use it only while this does not: `offer` before it has said
        // that rows are there, `collect` after the list of pairs was sent.
        let desk = unsafe { Desk::new(device.host_bytes(hand_over.desk)?, hand_over.layout) };
        desk.answer();
        Ok(Self {
            pool: ThreadPool::that_spins(share.threads, SPINS),
            sets,
            desk,
            scratch: Scratch::default(),
            part: share.part,
            trials: Trials::default(),
            wanted: 0,
            pairs: vec![],
            experts: 0,
            told: false,
            waits: 0,
        })
    }

    /// The experts of a batch's pairs, once they and the rows are on the desk.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails to put them there.
    pub(in crate::gpu) fn ids(&mut self, device: &mut dyn Device, pairs: usize) -> Result<Vec<u32>> {
        self.waits += 1;
        let begin = Instant::now();
        while !self.desk.asked() {
            if begin.elapsed() > PATIENCE {
                // Whatever keeps the device from it is told here.
                device.synchronize()?;
                break;
            }
            std::hint::spin_loop();
        }
        if !self.desk.take_asked() {
            return Err(Error::Device { reason: "the choice of experts is not on the desk".into() });
        }
        Ok(self.desk.ids(pairs).to_vec())
    }

    /// Forgets what the device has put on the desk and nobody has taken: after a batch that failed.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(in crate::gpu) fn forget(&mut self, device: &mut dyn Device, hand_over: &HandOver) -> Result<()> {
        device.synchronize()?;
        self.desk.take_asked();
        self.pairs.clear();
        self.experts = 0;
        hand_over.set_handed(device, &[], 0)
    }

    /// How often the desk was waited for.
    pub(in crate::gpu) fn waits(&self) -> u64 {
        self.waits
    }

    /// How many of so many experts that are at hand the processor computes.
    pub(in crate::gpu) fn share(&mut self, set: ExpertSetId, experts: usize) -> usize {
        if self.sets[set.0].is_none() || experts == 0 {
            return 0;
        }
        self.wanted = match self.part {
            Some(part) => (part.clamp(0.0, 1.0) * experts as f32).round() as usize,
            None => self.trials.choose(experts),
        };
        self.wanted
    }

    /// Queues copies by `copy` of so many experts, computes `views` meanwhile for those of the pairs (`ids`) that have them, and
    /// waits for the copies.
    ///
    /// # Errors
    /// Those of `copy`; others if the experts are not what they were taken for.
    pub(in crate::gpu) fn compute(
        &mut self,
        device: &mut dyn Device,
        (set, ids): (ExpertSetId, &[u32]),
        copies: usize,
        copy: impl FnOnce(&mut dyn Device) -> Result<()>,
        views: &[&ExpertView<'_>],
    ) -> Result<()> {
        let begin = Instant::now();
        copy(device)?;
        if let (Some(handed), false) = (&self.sets[set.0], views.is_empty()) {
            let first = self.pairs.len();
            for (pair, expert) in ids.iter().enumerate() {
                if views.iter().any(|view| view.id == *expert) {
                    self.pairs.push(HandedPair { expert: *expert, pair: pair as u32 });
                }
            }
            let pairs = &mut self.pairs[first..];
            pairs.sort_unstable();
            let matrices = |expert| {
                let view = views.iter().find(|view| view.id == expert);
                let gated = view.and_then(|view| Some([view.gate?, view.up, view.down]));
                gated.ok_or_else(|| Error::Device { reason: format!("expert {expert} is not at hand") })
            };
            compute(&self.pool, handed, matrices, &self.desk, pairs, &mut self.scratch)?;
            self.experts += views.len();
        }
        device.finish_copies()?;
        if views.len() == self.wanted {
            self.trials.add(copies + views.len(), begin.elapsed().as_nanos() as f64);
        }
        Ok(())
    }

    /// Tells the device which pairs were computed since this was last called; gives how many experts.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(in crate::gpu) fn tell(&mut self, device: &mut dyn Device, hand_over: &HandOver) -> Result<usize> {
        let experts = std::mem::take(&mut self.experts);
        if !self.pairs.is_empty() || self.told {
            hand_over.set_handed(device, &self.pairs, experts)?;
        }
        self.told = !self.pairs.is_empty();
        self.pairs.clear();
        Ok(experts)
    }
}
