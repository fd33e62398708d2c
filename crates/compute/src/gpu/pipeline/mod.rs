//! [`PipelineExecutable`]: a graph whose layers are in a row over several devices.
//!
//! Each device has a [`Part`] of the graph with memory of its own for all that the part needs, and hands on what crosses the
//! cut. Work is only queued, each device waiting for the one before, so that parts of a prompt whose logits nobody wants
//! follow each other through the devices. Of batches that decode, every device may have one ([`overlap`]). Kernels, batches and their
//! sizes are those of one device, and so are all bits.

mod division;
mod layout;
mod overlap;
mod source;

use std::ops::Range;
use std::time::Instant;

pub(super) use self::division::{Place, divide};
use self::layout::Layout;
use self::overlap::UnderWay;
use self::source::PartSource;
use super::device::Device;
use super::memory::Held;
use super::options::GpuOptions;
use super::run::{GpuExecutable, Turns, Way};
use crate::backend::{Batch, Chosen, CompileOptions, DeviceCounts, Executable, ExpertSource, Overlap};
use crate::draw::Draw;
use crate::graph::{ExpertSetId, Graph, Part};
use crate::profile::Profile;
use crate::{Error, Result, Tensor};

/// A device of several: what is called so in errors.
pub(super) struct Numbered {
    pub(super) number: usize,
    pub(super) device: Box<dyn Device>,
    /// See [`GpuOptions::memory`].
    pub(super) memory: Option<u64>,
}

/// An error that says on which device it happened.
pub(super) fn on_device(number: usize, error: Error) -> Error {
    match error {
        Error::DeviceMemory { device, wanted, free } => {
            Error::DeviceMemory { device: format!("GPU {number}, {device}"), wanted, free }
        }
        Error::DeviceLost { reason } => Error::DeviceLost { reason: format!("GPU {number}: {reason}") },
        Error::Device { reason } => Error::Device { reason: format!("GPU {number}: {reason}") },
        other => other,
    }
}

/// A part of the graph on its device.
struct Stage {
    number: usize,
    executable: GpuExecutable,
    /// The whole graph's numbers of its sets of experts.
    sets: Vec<ExpertSetId>,
    /// Its first layer and its last.
    layers: Option<[usize; 2]>,
}

impl Stage {
    /// Runs something with the experts of this part.
    fn with<T>(
        &mut self,
        experts: &mut dyn ExpertSource,
        run: impl FnOnce(&mut GpuExecutable, &mut dyn ExpertSource) -> Result<T>,
    ) -> Result<T> {
        let mut source = PartSource { whole: experts, sets: &self.sets };
        run(&mut self.executable, &mut source).map_err(|error| on_device(self.number, error))
    }

    /// Gives `next` what it needs of a batch of so many rows.
    fn hand_over(&mut self, next: &mut Self, rows: usize) -> Result<()> {
        let handed = self.executable.hand_over(&mut next.executable, rows);
        handed.map_err(|error| on_device(self.number, error))
    }
}

/// A graph on several devices.
pub(super) struct PipelineExecutable {
    /// All but the last.
    first: Vec<Stage>,
    last: Stage,
    pages: Layout,
    slots: Layout,
    turns: Turns,
    under_way: UnderWay,
    /// When a batch that decodes has ended, unless something else came after it.
    ended: Option<Instant>,
}

impl PipelineExecutable {
    /// Takes memory of each device for its part of `graph`, whose weights are `tensors`.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if a device, which is named, has not enough.
    pub(super) fn new(
        graph: &Graph,
        parts: Vec<Part>,
        devices: Vec<Numbered>,
        tensors: &[Tensor],
        options: &CompileOptions,
        gpu: &GpuOptions,
    ) -> Result<Self> {
        let pages = Layout::of_pages(graph, &parts, options.kv_type);
        let slots = Layout::of_slots(graph, &parts);
        let mut stages = vec![];
        for (part, Numbered { number, device, memory }) in parts.into_iter().zip(devices) {
            let own: Vec<Tensor> = part.weights.iter().map(|weight| tensors[*weight].clone()).collect();
            let gpu = GpuOptions { memory, ..*gpu };
            let executable =
                GpuExecutable::new(device, (part.graph, part.ends, Held::ALL), &own, options, &gpu);
            let executable = executable.map_err(|error| on_device(number, error))?;
            stages.push(Stage { number, executable, sets: part.expert_sets, layers: part.layers });
        }
        let last = stages.pop().expect("a graph has a part");
        let under_way = UnderWay::default();
        Ok(Self { first: stages, last, pages, slots, turns: Turns::default(), under_way, ended: None })
    }

    fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.first.iter().chain([&self.last])
    }

    fn stages_mut(&mut self) -> impl Iterator<Item = &mut Stage> {
        self.first.iter_mut().chain([&mut self.last])
    }

    fn stage(&self, index: usize) -> &GpuExecutable {
        &self.first.get(index).unwrap_or(&self.last).executable
    }

    /// Queues a batch on some devices, none of which is the last.
    fn advance(
        &mut self,
        over: Range<usize>,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
    ) -> Result<()> {
        for index in over.clone() {
            if index > over.start {
                self.hand_over_to(index, batch.tokens.len())?;
            }
            self.first[index].with(experts, |executable, experts| executable.advance(batch, experts))?;
        }
        Ok(())
    }

    /// Gives a device that is neither the first nor the last what the one before has of a batch of so many rows.
    fn hand_over_to(&mut self, index: usize, rows: usize) -> Result<()> {
        let (before, after) = self.first.split_at_mut(index);
        before[index - 1].hand_over(&mut after[0], rows)
    }

    fn hand_over_to_last(&mut self, rows: usize) -> Result<()> {
        match self.first.last_mut() {
            Some(stage) => stage.hand_over(&mut self.last, rows),
            None => Ok(()),
        }
    }

    /// Queues a batch on all devices but the last, and runs it there by `end`.
    fn run_batch<T>(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        end: impl FnOnce(&mut GpuExecutable, &mut dyn ExpertSource) -> Result<T>,
    ) -> Result<T> {
        self.expect_none_under_way()?;
        let begin = Instant::now();
        let rows = batch.tokens.len();
        let before = self.ended.take();
        self.advance(0..self.first.len(), batch, experts)?;
        self.hand_over_to_last(rows)?;
        let made = self.last.with(experts, end)?;
        if rows == batch.spans.len() && !batch.outputs.is_empty() {
            // With what the host did in between, as of batches that overlap.
            self.turns.add(Way::Alone, rows, before.unwrap_or(begin).elapsed());
            self.ended = Some(Instant::now());
        }
        Ok(made)
    }
}

impl Executable for PipelineExecutable {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.run_batch(batch, experts, |last, experts| last.run(batch, experts, logits))
    }

    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        self.run_batch(batch, experts, |last, experts| last.run_hidden(batch, experts, visit))
    }

    fn take_experts(&mut self, source: &mut dyn ExpertSource) -> Result<()> {
        self.stages_mut()
            .try_for_each(|stage| stage.with(source, |executable, source| executable.take_experts(source)))
    }

    fn pin(&mut self, memory: &mut [u8]) -> Option<Box<dyn Send>> {
        // What one device has pinned, all of them copy fast from.
        self.stages_mut().find_map(|stage| stage.executable.pin(memory))
    }

    fn division(&self) -> Option<String> {
        let on = |stage: &Stage| match stage.layers {
            Some([first, last]) => format!("{first} to {last} on GPU {}", stage.number),
            None => format!("none on GPU {}", stage.number),
        };
        Some(format!("layers {}", self.stages().map(on).collect::<Vec<_>>().join(", ")))
    }

    fn decode_rows(&self, sequences: usize) -> usize {
        self.turns.decode_rows(Way::Alone, sequences)
    }

    fn overlap(&self, sequences: usize) -> Option<Overlap> {
        self.division_of(sequences)
    }

    fn begin(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        let outcome = self.begin_batch(batch, experts);
        self.forgetting(outcome)
    }

    fn end(
        &mut self,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<Vec<Chosen>> {
        let outcome = self.end_batch(draws, vocab_size, experts);
        self.forgetting(outcome)
    }

    fn abandon(&mut self) {
        self.under_way.forget();
    }

    fn single_step_rows(&self) -> usize {
        self.stages().map(|stage| stage.executable.single_step_rows()).min().unwrap_or(1)
    }

    fn was_ready(&self) -> bool {
        self.stages().all(|stage| stage.executable.was_ready())
    }

    fn draws_tokens(&self) -> bool {
        self.last.executable.draws_tokens()
    }

    fn run_and_draw(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        draws: &mut dyn FnMut() -> Vec<Option<Draw>>,
        vocab_size: usize,
    ) -> Result<Vec<Option<u32>>> {
        self.run_batch(batch, experts, |last, experts| last.run_and_draw(batch, experts, draws, vocab_size))
    }

    fn read_logits(&mut self, output: usize, logits: &mut Vec<f32>) -> Result<()> {
        let number = self.last.number;
        self.last.executable.read_logits(output, logits).map_err(|error| on_device(number, error))
    }

    fn set_profiling(&mut self, on: bool) {
        self.stages_mut().for_each(|stage| stage.executable.set_profiling(on));
    }

    fn take_profile(&mut self) -> Option<Profile> {
        let mut all = Profile::default();
        for stage in self.stages_mut() {
            all.merge(&stage.executable.take_profile()?);
        }
        Some(all)
    }

    fn device_counts(&mut self) -> Option<DeviceCounts> {
        let mut all = DeviceCounts::default();
        for stage in self.stages_mut() {
            all = all + stage.executable.device_counts()?;
        }
        Some(all)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<()> {
        self.stages_mut().try_for_each(|stage| {
            stage.executable.reserve_pages(pages).map_err(|error| on_device(stage.number, error))
        })
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        self.stages_mut().try_for_each(|stage| {
            stage.executable.reserve_slots(slots).map_err(|error| on_device(stage.number, error))
        })
    }

    fn page_bytes(&self) -> usize {
        self.pages.bytes()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        self.pages.join(out, |part, bytes| self.stage(part).read_page(page, bytes))
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        let parts = self.pages.split("page", bytes)?;
        self.stages_mut().zip(&parts).try_for_each(|(stage, own)| stage.executable.write_page(page, own))
    }

    fn slot_bytes(&self) -> usize {
        self.slots.bytes()
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        self.slots.join(out, |part, bytes| self.stage(part).read_slot(slot, bytes))
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        let parts = self.slots.split("state slot", bytes)?;
        self.stages_mut().zip(&parts).try_for_each(|(stage, own)| stage.executable.write_slot(slot, own))
    }
}
