//! [`GpuExecutable`]: a graph on a device.

mod draws;
mod recording;
mod together;
mod turns;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(super) use self::draws::Queued;
pub(super) use self::draws::ROW_BYTES as DRAW_ROW_BYTES;
use self::draws::{DrawBuffers, MOST_TOKENS};
use self::recording::Recordings;
pub(super) use self::together::Prepared;
pub(super) use self::turns::{Turns, Way};
use super::device::{Device, Slice};
use super::memory::{Ending, FEW_ROWS, Held, Memory, STEPWISE_ROWS, Shape, adapts_experts};
use super::options::GpuOptions;
use super::processor::{Beside, Processor};
use super::steps::{Buffers, Step, buffers, steps};
use crate::backend::{Batch, CompileOptions, DeviceCounts, Executable, ExpertSource};
use crate::draw::Draw;
use crate::graph::{Ends, ExpertSetId, Graph, Value};
use crate::profile::{Profile, Work};
use crate::{Error, Result, Tensor};

/// The mark behind what chooses tokens. Where all experts are on the device nothing else is marked.
const CHOSEN: usize = 0;
/// Rows of hidden states that come from the device at a time.
const HIDDEN_ROWS: usize = 64;

/// A graph ready to run on a device.
pub(crate) struct GpuExecutable {
    /// Ends before the device's memory does.
    processor: Option<Processor>,
    beside: Option<Beside>,
    device: Mutex<Box<dyn Device>>,
    graph: Graph,
    ends: Ends,
    /// The hidden state of every row, if it is asked for.
    every_hidden: Option<Value>,
    /// Those that were asked for last.
    hidden_rows: Vec<f32>,
    steps: Vec<Step>,
    buffers: Buffers,
    memory: Memory,
    recordings: Recordings,
    turns: Turns,
    draws: DrawBuffers,
    profiling: bool,
    /// How often the device was waited for to count what it did.
    asked: u64,
}

impl GpuExecutable {
    /// Takes memory of the device for a graph with the `held` experts, and gives it the weights. With
    /// [`CompileOptions::every_hidden`] the graph yields that.
    ///
    /// # Errors
    /// [`crate::Error::DeviceMemory`] if there is not enough.
    pub(crate) fn new(
        mut device: Box<dyn Device>,
        (graph, ends, held): (Graph, Ends, Held),
        tensors: &[Tensor],
        options: &CompileOptions,
        gpu: &GpuOptions,
    ) -> Result<Self> {
        let steps = steps(&graph, &ends);
        let buffers = buffers(&graph, &ends, &steps);
        let mut memory = Memory::new(&mut *device, (&graph, held), &buffers, tensors, options, gpu)?;
        let (mut processor, mut beside) = (None, None);
        let sets = (0..graph.expert_sets().len()).map(ExpertSetId);
        let suits = |set: &ExpertSetId| graph.identities(*set) == 0 && !adapts_experts(&graph);
        let forms: Vec<_> = sets.map(|set| memory.expert_rows(set).filter(|_| suits(&set))).collect();
        if let Some(share) = gpu.processor.filter(|share| share.part != Some(0.0))
            && let Some(sets) = memory.experts.share(&mut *device, &graph, tensors, &forms)?
        {
            if let Some((tiers, _, Some(hand_over))) = memory.experts.tiers() {
                processor = Some(Processor::new(&mut *device, (tiers, hand_over), sets, share)?);
            } else if let Some(hand_over) = memory.experts.hand_over() {
                beside = Some(Beside::new(&mut *device, hand_over, sets, share)?);
            }
        }
        Ok(Self {
            processor,
            beside,
            device: Mutex::new(device),
            graph,
            every_hidden: ends.outputs.first().copied().filter(|_| options.every_hidden),
            hidden_rows: vec![],
            ends,
            steps,
            buffers,
            memory,
            recordings: Recordings::default(),
            turns: Turns::default(),
            draws: DrawBuffers::default(),
            profiling: false,
            asked: 0,
        })
    }

    /// The device, for calls through a shared reference.
    fn device(&self) -> MutexGuard<'_, Box<dyn Device>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device_mut(&mut self) -> &mut dyn Device {
        &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a value is, as long as it is alive.
    fn place(&self, value: Value) -> Slice {
        let buffer = self.buffers.of[value.index].expect("a value that is made or brought has a buffer");
        self.memory.values[buffer].into()
    }

    /// Queues a batch of a part of a graph that others follow, and waits for it only where experts need the host.
    pub(super) fn advance(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        let batch = Batch { outputs: &[], ..*batch };
        self.run_batch(&batch, experts, Ending::Logits, |_| Ok(()))
    }

    /// Whether the host is not needed between the beginning and the end of a batch.
    pub(super) fn runs_alone(&self) -> bool {
        self.memory.experts.resident()
    }

    /// Queues a batch of a part that [`GpuExecutable::runs_alone`], and leaves its logits where they are.
    pub(super) fn start(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        self.queue(batch, experts, Ending::Logits)
    }

    /// Queues what chooses tokens by the logits that a batch has left.
    pub(super) fn choose(&mut self, draws: &[Option<Draw>], vocab_size: usize) -> Result<Queued> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all = self.graph.vocab_size();
        let queued = self.draws.queue(
            device,
            self.memory.logits.buffer().into(),
            draws,
            [all, vocab_size.min(all)],
        )?;
        device.mark_work(CHOSEN)?;
        Ok(queued)
    }

    /// Reads the logits of so many outputs, which a batch has left.
    pub(super) fn read_all_logits(&mut self, outputs: usize, logits: &mut Vec<f32>) -> Result<()> {
        // Not cleared: what has the right length need not be filled before it is overwritten.
        logits.resize(outputs * self.graph.vocab_size(), 0.0);
        let from = self.memory.logits.buffer();
        self.device_mut().download(from.into(), bytes_of(logits))
    }

    /// What the head reads.
    ///
    /// # Errors
    /// [`Error::NoHead`].
    pub(super) fn hidden(&self) -> Result<Value> {
        self.graph.hidden().ok_or(Error::NoHead)
    }

    /// Reads the hidden states of so many outputs, which a batch without the head has left, some rows at a time.
    pub(super) fn visit_hidden(&mut self, outputs: usize, visit: &mut dyn FnMut(&[f32])) -> Result<()> {
        let hidden = self.hidden()?;
        // Nothing but the head comes after the value, so that its buffer still holds it.
        let from = self.place(hidden);
        let (width, mut rows) = (hidden.width(), vec![]);
        for first in (0..outputs).step_by(HIDDEN_ROWS) {
            rows.resize((outputs - first).min(HIDDEN_ROWS) * width, 0.0);
            let from = from.at(first * width * size_of::<f32>());
            self.device_mut().download(from, bytes_of(&mut rows))?;
            visit(&rows);
        }
        Ok(())
    }

    /// Chooses tokens by the logits that a batch has left, and waits for them.
    pub(super) fn draw(&mut self, draws: &[Option<Draw>], vocab_size: usize) -> Result<Vec<Option<u32>>> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all = self.graph.vocab_size();
        let logits = self.memory.logits.buffer().into();
        self.draws.queue(device, logits, draws, [all, vocab_size.min(all)])?.read(device)
    }

    /// The tokens that were chosen last, as soon as they are: other work may be queued by now.
    pub(super) fn read_chosen(&mut self, queued: Queued) -> Result<Vec<Option<u32>>> {
        let device = self.device_mut();
        device.copies_after(CHOSEN)?;
        queued.read_beside(device)
    }

    /// Gives the next part, on a device of its own, what this one yields of a batch of so many rows.
    pub(super) fn hand_over(&mut self, next: &mut Self, rows: usize) -> Result<()> {
        for value in self.ends.outputs.clone() {
            let (from, to) = (self.place(value), next.place(value));
            let other = next.device.get_mut().unwrap_or_else(PoisonError::into_inner);
            let device = self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
            device.copy_to(from, &mut **other, to, rows * value.width() * size_of::<f32>())?;
        }
        Ok(())
    }

    /// Runs a batch: `read` gets what it ends with from the device.
    fn run_batch<T>(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        ending: Ending,
        read: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let begin = Instant::now();
        let outcome = self.queue(batch, experts, ending).and_then(|()| read(self));
        if outcome.is_ok() && batch.tokens.len() == batch.spans.len() {
            self.turns.add(Way::Alone, batch.tokens.len(), begin.elapsed());
        }
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let few = Shape::of(batch, ending).rows <= FEW_ROWS;
        let ended = match (&mut self.processor, self.memory.experts.tiers()) {
            (Some(processor), Some((_, _, Some(hand_over)))) if few => {
                // Whatever is under way may ask for the processor.
                let unread = outcome.is_err() || batch.outputs.is_empty();
                let waited = if unread { device.synchronize() } else { Ok(()) };
                processor.end(device, hand_over).and(waited)
            }
            _ => match (&mut self.beside, self.memory.experts.hand_over()) {
                (Some(beside), Some(hand_over)) if outcome.is_err() => beside.forget(device, hand_over),
                _ => Ok(()),
            },
        };
        // The first error is the cause.
        outcome.and_then(|value| ended.map(|()| value))
    }

    /// Queues a batch; what it ends with is in the device's memory then.
    fn queue(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource, ending: Ending) -> Result<()> {
        let prepared = self.prepare(batch, experts, ending)?;
        let rows = prepared.rows();
        let outcome = (0..prepared.pieces()).try_for_each(|piece| self.run_piece(&prepared, piece, experts));
        self.finish(prepared, outcome.is_ok());
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.experts.settle(device, experts, true).and(outcome)?;
        if rows <= FEW_ROWS
            && let Some((tiers, ..)) = self.memory.experts.tiers()
        {
            tiers.forget();
        }
        Ok(())
    }

    /// Forgets what was recorded: buffers have moved.
    fn forget(&mut self) {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.recordings.forget(device);
    }
}

/// The bytes of floats, little-endian as on every GPU.
#[cfg(target_endian = "little")]
fn bytes_of(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: floats and bytes have no invalid values and no padding; the length is that of the same memory.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

impl Executable for GpuExecutable {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.run_batch(batch, experts, Ending::Logits, |own| own.read_all_logits(batch.outputs.len(), logits))
    }

    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        self.hidden()?;
        self.run_batch(batch, experts, Ending::Hidden, |own| own.visit_hidden(batch.outputs.len(), visit))
    }

    fn every_hidden(&mut self, rows: Range<usize>) -> Result<&[f32]> {
        let Some(hidden) = self.every_hidden else { return Ok(&[]) };
        let width = hidden.width();
        // Nothing takes its buffer before the next batch.
        let from = self.place(hidden).at(rows.start * width * size_of::<f32>());
        let mut values = std::mem::take(&mut self.hidden_rows);
        values.resize(rows.len() * width, 0.0);
        let read = self.device_mut().download(from, bytes_of(&mut values));
        self.hidden_rows = values;
        read.map(|()| &self.hidden_rows[..])
    }

    fn take_experts(&mut self, source: &mut dyn ExpertSource) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.memory.experts.take(device, source)
    }

    fn pin(&mut self, memory: &mut [u8]) -> Option<Box<dyn Send>> {
        if self.memory.experts.exchanges() { self.device_mut().pin(memory) } else { None }
    }

    fn decode_rows(&self, sequences: usize) -> usize {
        // Few rows are read once for all, and leave the processor a part of what is missing.
        self.turns.decode_rows(Way::Alone, sequences)
    }

    fn single_step_rows(&self) -> usize {
        STEPWISE_ROWS
    }

    fn was_ready(&self) -> bool {
        self.recordings.replayed()
    }

    fn draws_tokens(&self) -> bool {
        self.graph.vocab_size() <= MOST_TOKENS
    }

    fn run_and_draw(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
    ) -> Result<Vec<Option<u32>>> {
        self.run_batch(batch, experts, Ending::Logits, |own| {
            if batch.outputs.is_empty() {
                return Ok(vec![]);
            }
            own.draw(&draws(), vocab_size)
        })
    }

    fn read_logits(&mut self, output: usize, logits: &mut Vec<f32>) -> Result<()> {
        let vocab_size = self.graph.vocab_size();
        logits.resize(vocab_size, 0.0);
        let from = Slice::from(self.memory.logits.buffer()).at(output * vocab_size * size_of::<f32>());
        self.device_mut().download(from, bytes_of(logits))
    }

    fn set_profiling(&mut self, on: bool) {
        self.profiling = on;
        if on {
            self.device_mut().start_profile();
        } else {
            // What was measured is not wanted, nor is an error of it.
            let _ = self.device_mut().take_profile();
        }
    }

    fn device_counts(&mut self) -> Option<DeviceCounts> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        let [experts, fetched, computed, ahead, useful] = match self.memory.experts.tiers() {
            Some((tiers, ..)) => {
                self.asked += 1;
                tiers.traffic(device).ok()?
            }
            None => {
                let [experts, fetched, computed] = self.memory.experts.counts();
                [experts, fetched, computed, 0, 0]
            }
        };
        let mut counts = device.counts();
        counts.waits += self.beside.as_ref().map_or(0, Beside::waits);
        Some(DeviceCounts {
            experts,
            fetched,
            computed,
            ahead,
            useful,
            waits: counts.waits.saturating_sub(self.asked),
            ..counts
        })
    }

    fn take_profile(&mut self) -> Option<Profile> {
        if !self.profiling {
            return None;
        }
        let kernels = self.device_mut().take_profile().ok()?;
        self.device_mut().start_profile();
        let mut profile = Profile::default();
        for kernel in kernels {
            profile.add_all(&kernel.kernel, kernel.runs, kernel.time, Work::default());
        }
        Some(profile)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.memory.state.reserve_pages(device, pages)? {
            self.forget();
        }
        Ok(())
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        let device = &mut **self.device.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.memory.state.reserve_slots(device, slots)? {
            self.forget();
        }
        Ok(())
    }

    fn page_bytes(&self) -> usize {
        self.memory.state.page_bytes()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        self.memory.state.read_page(&mut **self.device(), page, out)
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        self.memory.state.write_page(&mut **self.device(), page, bytes)
    }

    fn slot_bytes(&self) -> usize {
        self.memory.state.slot_bytes()
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        self.memory.state.read_slot(&mut **self.device(), slot, out)
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        self.memory.state.write_slot(&mut **self.device(), slot, bytes)
    }
}
