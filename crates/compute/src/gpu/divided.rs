//! [`DividedExecutable`]: a graph on several devices that hold a part of every layer's experts each.
//!
//! Every device evaluates all of a batch, with the same kernels and hence the same bits, but for the experts: of those it computes
//! the pairs whose experts it holds, and sums each token's pairs in the router's order, the others' where they are, in the other
//! devices' memory. Nothing is summed that is not summed on one device, so that all bits are those of one.
//!
//! Devices meet once a layer: where lists are recorded, kernels wait for the other devices' kernels, which is soonest; else what
//! follows on each is queued behind what is queued on the others. The price is that everything but experts is computed, and
//! held, by every device.

use std::time::Instant;

use super::device::Device;
use super::memory::{Ending, Held, MOST_HOLDERS, adapts_experts, usable, whole_memory};
use super::options::GpuOptions;
use super::pipeline::{Numbered, on_device};
use super::run::{GpuExecutable, Prepared, Turns, Way};
use super::steps::{buffers, steps};
use crate::backend::{Batch, CompileOptions, DeviceCounts, Executable, ExpertSource};
use crate::draw::Draw;
use crate::graph::{Ends, Graph};
use crate::profile::Profile;
use crate::{Error, Result, Tensor};

/// Bytes of memory that a device needs which is one of `devices` to hold a part of the experts of a graph.
///
/// # Errors
/// [`Error::RowLength`] if an encoding cannot store a weight's rows.
pub(super) fn member_memory(
    device: &dyn Device,
    graph: &Graph,
    options: &CompileOptions,
    held: Held,
) -> Result<u64> {
    let ends = Ends::default();
    let buffers = buffers(graph, &ends, &steps(graph, &ends));
    whole_memory(&device.info(), graph, &buffers, options, held)
}

/// Checks that devices can hold a part of a graph's experts each.
///
/// # Errors
/// [`Error::Device`] if they do not read each other's memory or are too many, or there are no experts or adapters of some;
/// [`Error::DeviceMemory`] if a device, which is named, has not enough; as [`member_memory`].
pub(super) fn check_division(
    devices: &mut [Numbered],
    graph: &Graph,
    options: &CompileOptions,
) -> Result<()> {
    let refused = |reason: &str| Err(Error::Device { reason: format!("experts over devices: {reason}") });
    if graph.expert_sets().is_empty() {
        return refused("the model has none");
    }
    if adapts_experts(graph) {
        return refused("not with adapters of experts");
    }
    let count = devices.len();
    if count > MOST_HOLDERS {
        return refused(&format!("{count} devices, of {MOST_HOLDERS} at most"));
    }
    for index in 0..count {
        let (before, rest) = devices.split_at_mut(index);
        let Some((own, after)) = rest.split_first_mut() else { break };
        for other in before.iter_mut().chain(after) {
            if !own.device.reaches(&mut *other.device) {
                let [own, other] = [own.number, other.number];
                return refused(&format!("GPU {own} cannot read the memory of GPU {other}"));
            }
        }
        let held = Held { index, devices: count };
        let wanted = member_memory(&*own.device, graph, options, held)?;
        let info = own.device.info();
        let free = usable(&info, own.memory);
        if free < wanted {
            let error = Error::DeviceMemory { device: info.name, wanted, free };
            return Err(on_device(own.number, error));
        }
    }
    Ok(())
}

/// A device with what it runs.
struct Member {
    number: usize,
    executable: GpuExecutable,
}

impl Member {
    fn with<T>(&mut self, run: impl FnOnce(&mut GpuExecutable) -> Result<T>) -> Result<T> {
        run(&mut self.executable).map_err(|error| on_device(self.number, error))
    }
}

/// Every two of `members`, in both orders.
fn pairs(
    members: &mut [Member],
    mut each: impl FnMut(&mut Member, &mut GpuExecutable) -> Result<()>,
) -> Result<()> {
    for index in 0..members.len() {
        let (before, rest) = members.split_at_mut(index);
        let Some((own, after)) = rest.split_first_mut() else { break };
        for other in before.iter_mut().chain(after) {
            each(own, &mut other.executable)?;
        }
    }
    Ok(())
}

/// A graph on several devices.
pub(super) struct DividedExecutable {
    /// The first one is asked for what all have: logits, pages, states.
    members: Vec<Member>,
    turns: Turns,
}

impl DividedExecutable {
    /// Takes memory of each device for `graph`, whose weights are `tensors`, with its part of the experts.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if a device, which is named, has not enough.
    pub(super) fn new(
        graph: &Graph,
        devices: Vec<Numbered>,
        tensors: &[Tensor],
        options: &CompileOptions,
        gpu: &GpuOptions,
    ) -> Result<Self> {
        let count = devices.len();
        let mut members = vec![];
        for (index, Numbered { number, device, memory }) in devices.into_iter().enumerate() {
            let whole = (graph.clone(), Ends::default(), Held { index, devices: count });
            let gpu = GpuOptions { memory, processor: None, ..*gpu };
            let executable = GpuExecutable::new(device, whole, tensors, options, &gpu);
            let executable = executable.map_err(|error| on_device(number, error))?;
            members.push(Member { number, executable });
        }
        pairs(&mut members, |own, other| own.with(|own| own.meet(other)))?;
        Ok(Self { members, turns: Turns::default() })
    }

    fn first(&mut self) -> &mut Member {
        &mut self.members[0]
    }

    /// Makes what is queued from now on on every device come after what is queued so far on all of them.
    fn meet(&mut self, rows: usize) -> Result<()> {
        pairs(&mut self.members, |own, other| own.with(|own| own.follow(other, rows)))
    }

    /// Queues a batch on all devices.
    fn queue(&mut self, batch: &Batch<'_>, experts: &mut dyn ExpertSource, ending: Ending) -> Result<()> {
        let mut prepared: Vec<Prepared> = vec![];
        let mut outcome = Ok(());
        for member in &mut self.members {
            match member.with(|own| own.prepare(batch, experts, ending)) {
                Ok(one) => prepared.push(one),
                Err(error) => outcome = Err(error),
            }
            if outcome.is_err() {
                break;
            }
        }
        if outcome.is_ok() {
            outcome = self.run_pieces(&prepared, batch.tokens.len(), experts);
            if outcome.is_err() {
                // The first error is the cause.
                let _ = self.forget_meetings();
            }
        }
        for (member, prepared) in self.members.iter_mut().zip(prepared) {
            member.executable.finish(prepared, outcome.is_ok());
        }
        outcome
    }

    fn run_pieces(
        &mut self,
        prepared: &[Prepared],
        rows: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<()> {
        let pieces = prepared[0].pieces();
        debug_assert!(prepared.iter().all(|one| one.pieces() == pieces), "devices meet as often");
        for piece in 0..pieces {
            // Before the first, since the last batch's outputs may still be read.
            self.meet(rows)?;
            for (member, prepared) in self.members.iter_mut().zip(prepared) {
                member.with(|own| own.run_piece(prepared, piece, experts))?;
            }
        }
        Ok(())
    }

    /// Runs a batch: `read` gets what it ends with from the first device.
    fn run_batch<T>(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        ending: Ending,
        read: impl FnOnce(&mut GpuExecutable) -> Result<T>,
    ) -> Result<T> {
        let begin = Instant::now();
        self.queue(batch, experts, ending)?;
        let made = self.first().with(read)?;
        if !batch.outputs.is_empty() && self.first().with(GpuExecutable::late)? {
            self.forget_meetings()?;
            let error = Error::Device { reason: "other devices were waited for in vain".to_owned() };
            return Err(on_device(self.first().number, error));
        }
        let rows = batch.tokens.len();
        if rows == batch.spans.len() {
            self.turns.add(Way::Alone, rows, begin.elapsed());
        }
        Ok(made)
    }

    /// Waits until nothing runs, and makes devices meet for the first time again.
    fn forget_meetings(&mut self) -> Result<()> {
        self.every(GpuExecutable::synchronize)?;
        self.every(GpuExecutable::forget_meetings)
    }

    fn every(&mut self, mut run: impl FnMut(&mut GpuExecutable) -> Result<()>) -> Result<()> {
        self.members.iter_mut().try_for_each(|member| member.with(&mut run))
    }
}

impl Drop for DividedExecutable {
    /// No device gives memory back that another one still reads.
    fn drop(&mut self) {
        for member in &mut self.members {
            // A device that is lost reads nothing.
            let _ = member.executable.synchronize();
        }
    }
}

impl Executable for DividedExecutable {
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
        self.members[0].executable.hidden()?;
        self.run_batch(batch, experts, Ending::Hidden, |own| own.visit_hidden(batch.outputs.len(), visit))
    }

    fn take_experts(&mut self, source: &mut dyn ExpertSource) -> Result<()> {
        self.every(|own| own.take_experts(source))
    }

    fn pin(&mut self, memory: &mut [u8]) -> Option<Box<dyn Send>> {
        self.first().executable.pin(memory)
    }

    fn division(&self) -> Option<String> {
        let numbers: Vec<String> = self.members.iter().map(|member| member.number.to_string()).collect();
        Some(format!("experts of every layer over GPUs {}", numbers.join(", ")))
    }

    fn decode_rows(&self, sequences: usize) -> usize {
        self.turns.decode_rows(Way::Alone, sequences)
    }

    fn single_step_rows(&self) -> usize {
        self.members[0].executable.single_step_rows()
    }

    fn was_ready(&self) -> bool {
        self.members.iter().all(|member| member.executable.was_ready())
    }

    fn draws_tokens(&self) -> bool {
        self.members[0].executable.draws_tokens()
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
        self.first().with(|own| own.read_logits(output, logits))
    }

    fn set_profiling(&mut self, on: bool) {
        self.members.iter_mut().for_each(|member| member.executable.set_profiling(on));
    }

    fn take_profile(&mut self) -> Option<Profile> {
        let mut all = Profile::default();
        for member in &mut self.members {
            all.merge(&member.executable.take_profile()?);
        }
        Some(all)
    }

    fn device_counts(&mut self) -> Option<DeviceCounts> {
        let mut all = DeviceCounts::default();
        for member in &mut self.members {
            all = all + member.executable.device_counts()?;
        }
        Some(all)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<()> {
        self.every(|own| own.reserve_pages(pages))
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        self.every(|own| own.reserve_slots(slots))
    }

    fn page_bytes(&self) -> usize {
        self.members[0].executable.page_bytes()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        self.members[0].executable.read_page(page, out)
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        self.every(|own| own.write_page(page, bytes))
    }

    fn slot_bytes(&self) -> usize {
        self.members[0].executable.slot_bytes()
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        self.members[0].executable.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        self.every(|own| own.write_slot(slot, bytes))
    }
}
