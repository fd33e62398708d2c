//! [`Cuda`]: runs dispatches on an NVIDIA GPU.
//!
//! One stream runs everything in order, but for dispatches beside each other; another one copies experts from host memory. A
//! recording is a CUDA graph, built node by node from the dispatches' [`Order`], so that a token costs one launch. The driver is
//! loaded when a device is asked for (`driver.rs`); kernels are loaded when they are first used (`kernels.rs`), from the archive in
//! the binary (`archive.rs`).

mod archive;
mod driver;
mod host;
mod kernels;
mod profile;
mod sides;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use archive::Archive;
use driver::{
    Context, DevicePointer, Driver, Event, Graph, GraphExec, GraphNode, KernelNode, LaunchAttribute,
    LaunchConfig, Stream, attribute, call,
};
use host::{Pinned, Registered, Staging};
use kernels::{Kernel, Kernels};
use profile::EventProfile;
use sides::Sides;

use super::device::{BufferId, Device, DeviceInfo, Dispatch, Grid, Order, RecordingId, Slice, View};
use super::kernels::{
    BATCHED_UNIT, BLOCKS_UNIT, EARLY_UNIT, ENTER_EXPERTS_UNIT, EXPERT_PANELS_UNIT, JOINT_EXPERTS_UNIT,
    JOINT_ROWS_UNIT, MEET_UNIT, PANELS_UNIT, PRODUCTS_UNIT, TENSOR_DECODE_UNIT,
};
use crate::backend::{DeviceCounts, KernelTime};
use crate::{Error, Result};

/// Units of `kernels/cuda` whose kernels wait for the dispatch before them by themselves, as the common ones do.
const WAITING_UNITS: [&str; 11] = [
    TENSOR_DECODE_UNIT,
    EARLY_UNIT,
    JOINT_ROWS_UNIT,
    JOINT_EXPERTS_UNIT,
    BATCHED_UNIT,
    PRODUCTS_UNIT,
    PANELS_UNIT,
    EXPERT_PANELS_UNIT,
    BLOCKS_UNIT,
    ENTER_EXPERTS_UNIT,
    MEET_UNIT,
];

/// Bytes of pinned memory that small transfers pass through.
const STAGING_BYTES: usize = 4 << 20;
/// Bytes a second that kernels read of pinned memory, where the bus is of the fifth generation.
const BUS: u64 = 50_000_000_000;
/// Events that only order work.
const NO_TIMING: c_uint = 2;

struct Allocation {
    pointer: DevicePointer,
    bytes: usize,
    /// The memory, if it is the host's.
    host: Option<Pinned>,
    /// Whether it is another GPU's.
    viewed: bool,
}

struct Recording {
    graph: Graph,
    exec: GraphExec,
    /// For profiles, which run them one by one.
    dispatches: Vec<Dispatch>,
}

/// An NVIDIA GPU.
pub struct Cuda {
    driver: Arc<Driver>,
    ordinal: c_int,
    name: String,
    memory: u64,
    multiprocessors: usize,
    /// Most bytes of shared memory of a block.
    group_memory: usize,
    /// Most bytes that buffers may take together.
    limit: u64,
    used: u64,
    context: Context,
    stream: Stream,
    copies: Stream,
    copied: Event,
    /// Once dispatches run beside each other.
    sides: Option<Sides>,
    /// What [`Device::copy_away`] copies with, and after the last of it.
    away: Stream,
    went_away: Event,
    /// After the last copy to another GPU; and where this one stood when another's copy to it was queued.
    sent: Event,
    reached: Event,
    /// GPUs whose memory has been asked for, as it makes copies fast.
    neighbours: Vec<c_int>,
    /// What [`Device::mark_work`] remembers.
    marks: Vec<Event>,
    /// `None` only while this is dropped.
    kernels: Option<Arc<Kernels>>,
    buffers: Vec<Option<Allocation>>,
    recordings: Vec<Option<Recording>>,
    staging: Staging,
    counts: DeviceCounts,
    profile: Option<EventProfile>,
}

/// GPUs that the driver finds, in its order.
///
/// # Errors
/// [`Error::NoDevice`] if there is no driver or it finds none.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let driver = Arc::new(Driver::load()?);
    let mut count = 0;
    call!(driver, device_count(&mut count))?;
    (0..count).map(|ordinal| Ok(Cuda::with_driver(Arc::clone(&driver), ordinal)?.info())).collect()
}

/// Number of kernels in the binary, and the targets that they were compiled for, as in `sm_80`: the oldest GPUs that can
/// run them.
///
/// # Errors
/// [`Error::Device`] if they are damaged.
pub fn kernels() -> Result<(usize, Vec<String>)> {
    Archive::open(0).summary()
}

impl Cuda {
    /// The GPU number `ordinal` of the driver's, whose buffers may take `limit` bytes; without a limit, what is free.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such GPU or no driver for it.
    pub fn open(ordinal: usize, limit: Option<u64>) -> Result<Self> {
        let driver = Arc::new(Driver::load()?);
        let mut count = 0;
        call!(driver, device_count(&mut count))?;
        let ordinal = c_int::try_from(ordinal).ok().filter(|o| *o < count);
        let ordinal = ordinal
            .ok_or_else(|| Error::NoDevice { reason: format!("there are {count} GPUs, numbered from 0") })?;
        let mut cuda = Self::with_driver(driver, ordinal)?;
        if let Some(limit) = limit {
            cuda.limit = limit;
        }
        Ok(cuda)
    }

    fn with_driver(driver: Arc<Driver>, ordinal: c_int) -> Result<Self> {
        let mut device = 0;
        call!(driver, device_get(&mut device, ordinal))?;
        let mut text = [0; 128];
        call!(driver, device_name(text.as_mut_ptr(), text.len() as c_int, device))?;
        let name: Vec<u8> = text.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
        let mut memory = 0;
        call!(driver, device_memory(&mut memory, device))?;
        let read = |what| {
            let mut value = 0;
            call!(driver, device_attribute(&mut value, what, device)).map(|()| value)
        };
        let (major, minor) = (read(attribute::CAPABILITY_MAJOR)?, read(attribute::CAPABILITY_MINOR)?);
        let multiprocessors = read(attribute::MULTIPROCESSORS)?;
        let group_memory = read(attribute::MOST_SHARED_BYTES)?.max(0) as usize;
        let name = String::from_utf8_lossy(&name);
        if major < 8 {
            return Err(Error::NoDevice {
                reason: format!("{name} has compute capability {major}.{minor}; 8.0 or later is needed"),
            });
        }
        let mut context = Context::NULL;
        call!(driver, context_retain(&mut context, device))?;
        call!(driver, context_set(context))?;
        let mut cuda = Self {
            name: format!("{name} (compute capability {major}.{minor})"),
            ordinal: device,
            memory: memory as u64,
            multiprocessors: multiprocessors.max(1) as usize,
            group_memory,
            limit: u64::MAX,
            used: 0,
            context,
            stream: Stream::NULL,
            copies: Stream::NULL,
            copied: Event::NULL,
            sides: None,
            away: Stream::NULL,
            went_away: Event::NULL,
            sent: Event::NULL,
            reached: Event::NULL,
            neighbours: vec![],
            marks: vec![],
            kernels: Some(Kernels::of(&driver, device, major, group_memory)),
            buffers: vec![],
            recordings: vec![],
            staging: Staging::empty(),
            counts: DeviceCounts::default(),
            profile: None,
            driver,
        };
        const NON_BLOCKING: c_uint = 1;
        call!(cuda.driver, stream_create(&mut cuda.stream, NON_BLOCKING))?;
        call!(cuda.driver, stream_create(&mut cuda.copies, NON_BLOCKING))?;
        call!(cuda.driver, stream_create(&mut cuda.away, NON_BLOCKING))?;
        for event in [&mut cuda.copied, &mut cuda.went_away, &mut cuda.sent, &mut cuda.reached] {
            call!(cuda.driver, event_create(event, NO_TIMING))?;
        }
        cuda.staging = Staging::new(&cuda.driver, STAGING_BYTES)?;
        Ok(cuda)
    }

    fn kernels(&self) -> &Kernels {
        self.kernels.as_ref().expect("they are there until the end")
    }

    /// Makes the device's context that of the calling thread: an executable may move between threads.
    fn enter(&self) -> Result<()> {
        call!(self.driver, context_set(self.context))
    }

    /// Another GPU.
    fn of<'a>(other: &'a mut (dyn Device + 'static)) -> Result<&'a mut Self> {
        let other: &mut dyn Any = other;
        let none = || Error::Device { reason: "a device of another kind".into() };
        other.downcast_mut::<Self>().ok_or_else(none)
    }

    /// Has the driver copy to another GPU directly, where the two are connected. Else it goes through host memory, which
    /// changes no bytes.
    fn reach(&mut self, other: &Self) {
        if self.ordinal == other.ordinal || self.neighbours.contains(&other.ordinal) {
            return;
        }
        for (from, to) in [(&*self, other), (other, &*self)] {
            let mut can = 0;
            let asked = call!(self.driver, can_reach(&mut can, from.ordinal, to.ordinal));
            if asked.is_ok() && can != 0 && from.enter().is_ok() {
                // A refusal, as when another engine of the process has asked before, changes nothing.
                let _ = call!(self.driver, context_reach(to.context, 0));
            }
        }
        self.neighbours.push(other.ordinal);
    }

    /// The address of `slice`, whose `bytes` bytes lie in its buffer.
    fn address(&self, slice: Slice, bytes: usize) -> Result<DevicePointer> {
        let buffer = self.buffers.get(slice.buffer.0).and_then(Option::as_ref);
        match buffer {
            Some(buffer) if slice.offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes) => {
                Ok(buffer.pointer + slice.offset as u64)
            }
            Some(buffer) => Err(Error::Device {
                reason: format!("{bytes} bytes at {} of a buffer of {}", slice.offset, buffer.bytes),
            }),
            None => Err(Error::Device { reason: format!("{:?} does not exist", slice.buffer) }),
        }
    }

    fn keep(&mut self, buffer: Allocation) -> BufferId {
        let free = self.buffers.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.buffers.push(None);
            self.buffers.len() - 1
        });
        self.buffers[index] = Some(buffer);
        BufferId(index)
    }

    /// Everything that launching a dispatch takes; nothing if its grid is empty.
    fn launch(&self, dispatch: &Dispatch) -> Result<Option<KernelLaunch>> {
        let grid = match dispatch.grid {
            Grid::Fixed(grid) | Grid::Indirect { limit: grid, .. } => grid,
        };
        if grid.contains(&0) {
            return Ok(None);
        }
        let kernel = self.kernels().get(dispatch)?;
        let buffers = dispatch.buffers.iter().map(|slice| self.address(*slice, 0));
        Ok(Some(KernelLaunch {
            kernel,
            grid,
            threads: dispatch.threads,
            shared: dispatch.shared,
            cluster: dispatch.cluster,
            buffers: buffers.collect::<Result<_>>()?,
            constants: dispatch.constants.clone(),
        }))
    }

    fn queue(&self, dispatch: &Dispatch, stream: Stream) -> Result<()> {
        let Some(mut launch) = self.launch(dispatch)? else { return Ok(()) };
        let mut cluster = LaunchAttribute::cluster(launch.cluster);
        let config = LaunchConfig {
            grid: launch.grid,
            threads: [launch.threads, 1, 1],
            shared_bytes: launch.shared,
            stream,
            attributes: &mut cluster,
            attribute_count: u32::from(launch.cluster > 1),
        };
        let function = launch.kernel.function;
        let mut parameters = launch.parameters();
        call!(self.driver, launch(&config, function, parameters.as_mut_ptr(), ptr::null_mut()))
            .map_err(|error| Error::Device { reason: format!("kernel {}: {error}", dispatch.kernel) })
    }

    /// Queues dispatches that run beside each other.
    fn queue_beside(&mut self, group: &[Dispatch]) -> Result<()> {
        let mut sides = match self.sides.take() {
            Some(sides) => sides,
            None => Sides::new(&self.driver)?,
        };
        sides.begin(&self.driver, self.stream)?;
        let queued = group.iter().enumerate().try_for_each(|(index, dispatch)| {
            let stream = if index == 0 { self.stream } else { sides.next(&self.driver)? };
            self.queue(dispatch, stream)
        });
        // Whatever has failed: nothing that follows begins before them.
        let joined = sides.join(&self.driver, self.stream);
        self.sides = Some(sides);
        queued.and(joined)
    }

    /// A graph whose nodes depend on each other as the dispatches' order says.
    fn build(&mut self, dispatches: &[Dispatch], graph: Graph) -> Result<()> {
        // Nodes that run beside each other, and those that they come after.
        let (mut group, mut before): (Vec<GraphNode>, Vec<GraphNode>) = (vec![], vec![]);
        // Nodes that nothing waits for yet.
        let mut aside: Vec<GraphNode> = vec![];
        for dispatch in dispatches {
            let Some(mut launch) = self.launch(dispatch)? else { continue };
            let is_aside = dispatch.order == Order::Aside;
            if !is_aside && dispatch.order != Order::Beside && !group.is_empty() {
                before = std::mem::take(&mut group);
            }
            let before = if is_aside { &group } else { &before };
            let ended = if dispatch.order == Order::Joining { std::mem::take(&mut aside) } else { vec![] };
            // Kernels of the common dialect wait, those of `kernels/cuda` do not, but for those of some units.
            let common = !dispatch.unit.starts_with("cuda/") || WAITING_UNITS.contains(&dispatch.unit);
            let waits = launch.kernel.waits && common && dispatch.order != Order::AfterEnd;
            let early = waits && !is_aside && !before.is_empty() && self.driver.has_early_edges();
            let (function, grid, threads) = (launch.kernel.function, launch.grid, launch.threads);
            let (shared_bytes, cluster) = (launch.shared, launch.cluster);
            let mut parameters = launch.parameters();
            let node = KernelNode {
                function,
                grid,
                threads: [threads, 1, 1],
                shared_bytes,
                parameters: parameters.as_mut_ptr(),
                extra: ptr::null_mut(),
                kernel: ptr::null_mut(),
                context: self.context,
            };
            let mut added = GraphNode::NULL;
            let mut whole = ended;
            whole.extend(if early { &[] } else { &before[..] });
            call!(self.driver, graph_add_kernel(&mut added, graph, whole.as_ptr(), whole.len(), &node))
                .and_then(|()| if cluster > 1 { self.driver.set_cluster(added, cluster) } else { Ok(()) })
                .and_then(|()| {
                    let early = if early { &before[..] } else { &[] };
                    early.iter().try_for_each(|from| self.driver.add_early_edge(graph, *from, added))
                })
                .map_err(|error| Error::Device { reason: format!("kernel {}: {error}", dispatch.kernel) })?;
            if is_aside { aside.push(added) } else { group.push(added) }
        }
        Ok(())
    }
}

/// A launch with the memory that its parameters are in.
struct KernelLaunch {
    kernel: Kernel,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    cluster: u32,
    buffers: Vec<DevicePointer>,
    constants: Vec<u8>,
}

impl KernelLaunch {
    /// Pointers to each parameter, valid as long as `self` stays as it is.
    fn parameters(&mut self) -> Vec<*mut c_void> {
        let buffers = self.buffers.iter_mut().map(|buffer| ptr::from_mut(buffer).cast());
        let mut all: Vec<*mut c_void> = buffers.collect();
        all.push(self.constants.as_mut_ptr().cast());
        all
    }
}

impl Device for Cuda {
    fn info(&self) -> DeviceInfo {
        let (mut free, mut total) = (0, 0);
        let known = self.enter().and_then(|()| call!(self.driver, memory_info(&mut free, &mut total)));
        let free = if known.is_ok() { free as u64 } else { 0 };
        let free = free.min(self.limit.saturating_sub(self.used));
        DeviceInfo {
            name: self.name.clone(),
            memory: self.memory,
            free,
            largest_buffer: self.memory,
            multiprocessors: self.multiprocessors,
            bus: BUS,
            group_memory: self.group_memory,
            copies_ahead: true,
            bulk_copies: self.kernels().has_code() && self.driver.has_early_edges(),
            unified: false,
            clusters: self.kernels().has_code() && self.driver.has_early_edges(),
            tensor_cores: true,
            warp_groups: self.kernels().runs_code(),
            byte_matrices: true,
            simdgroup_matrices: false,
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<BufferId> {
        self.enter()?;
        let fits = self.used.saturating_add(bytes as u64) <= self.limit;
        // Kernels read whole words: some bytes more, so that the last word of a buffer is inside.
        let pointer = if fits { self.driver.try_alloc(bytes.max(1).next_multiple_of(16))? } else { None };
        let Some(pointer) = pointer else {
            let DeviceInfo { name, free, .. } = self.info();
            return Err(Error::DeviceMemory { device: name, wanted: bytes as u64, free });
        };
        self.used += bytes as u64;
        Ok(self.keep(Allocation { pointer, bytes, host: None, viewed: false }))
    }

    fn alloc_host(&mut self, bytes: usize) -> Result<BufferId> {
        self.enter()?;
        let host = Pinned::new(&self.driver, bytes)?;
        Ok(self.keep(Allocation { pointer: host.pointer, bytes, host: Some(host), viewed: false }))
    }

    fn host_bytes(&mut self, buffer: BufferId) -> Result<&mut [u8]> {
        match self.buffers.get_mut(buffer.0).and_then(Option::as_mut) {
            Some(Allocation { host: Some(host), bytes, .. }) => Ok(&mut host.as_mut_slice()[..*bytes]),
            _ => Err(Error::Device { reason: format!("{buffer:?} is not in host memory") }),
        }
    }

    fn free(&mut self, buffer: BufferId) {
        if let Some(buffer) = self.buffers.get_mut(buffer.0).and_then(Option::take) {
            if let Some(host) = buffer.host {
                let _ = self.synchronize().and_then(|()| call!(self.driver, stream_synchronize(self.copies)));
                return host.release(&self.driver);
            }
            if buffer.viewed {
                return;
            }
            self.used -= buffer.bytes as u64;
            // Waits for queued work. An error of that work will be reported by the next call.
            let _ = self.enter().and_then(|()| call!(self.driver, memory_free(buffer.pointer)));
        }
    }

    fn upload(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let address = self.address(to, bytes.len())?;
        self.staging.upload(&self.driver, self.stream, address, bytes)
    }

    fn download(&mut self, from: Slice, out: &mut [u8]) -> Result<()> {
        self.enter()?;
        self.counts.waits += 1;
        if let Some(Allocation { host: Some(host), .. }) =
            self.buffers.get_mut(from.buffer.0).and_then(Option::as_mut)
        {
            call!(self.driver, stream_synchronize(self.stream))?;
            let range =
                from.offset.checked_add(out.len()).and_then(|end| host.as_mut_slice().get(from.offset..end));
            let range = range
                .ok_or_else(|| Error::Device { reason: format!("{} bytes of host memory", out.len()) })?;
            out.copy_from_slice(range);
            return Ok(());
        }
        let address = self.address(from, out.len())?;
        self.staging.download(&self.driver, self.stream, address, out)
    }

    fn copy(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()> {
        self.enter()?;
        let (from, to) = (self.address(from, bytes)?, self.address(to, bytes)?);
        call!(self.driver, copy_within(to, from, bytes, self.stream))
    }

    fn copy_to(
        &mut self,
        from: Slice,
        other: &mut (dyn Device + 'static),
        to: Slice,
        bytes: usize,
    ) -> Result<()> {
        let other = Self::of(other)?;
        self.reach(other);
        let (from, to) = (self.address(from, bytes)?, other.address(to, bytes)?);
        other.enter()?;
        call!(self.driver, event_record(other.reached, other.stream))?;
        self.enter()?;
        call!(self.driver, stream_wait(self.stream, other.reached, 0))?;
        if self.context == other.context {
            call!(self.driver, copy_within(to, from, bytes, self.stream))?;
        } else {
            call!(self.driver, copy_between(to, other.context, from, self.context, bytes, self.stream))?;
        }
        call!(self.driver, event_record(self.sent, self.stream))?;
        other.enter()?;
        call!(self.driver, stream_wait(other.stream, self.sent, 0))
    }

    fn reaches(&mut self, other: &mut (dyn Device + 'static)) -> bool {
        let other: &mut dyn Any = other;
        other.downcast_mut::<Self>().is_some_and(|other| {
            let mut can = 0;
            let same = self.ordinal == other.ordinal;
            same || call!(self.driver, can_reach(&mut can, self.ordinal, other.ordinal)).is_ok() && can != 0
        })
    }

    fn view(&mut self, other: &mut (dyn Device + 'static), buffer: BufferId, bytes: usize) -> Result<View> {
        if !self.reaches(other) {
            let reason = format!("{} does not read the other GPU's memory", self.name);
            return Err(Error::Device { reason });
        }
        let other = Self::of(other)?;
        self.reach(other);
        let pointer = other.address(buffer.into(), bytes)?;
        let at = self.keep(Allocation { pointer, bytes, host: None, viewed: true });
        Ok(View { of: buffer, at, bytes })
    }

    /// The GPUs' memory is one: there is nothing to copy.
    fn follow(&mut self, other: &mut (dyn Device + 'static), _views: &[View]) -> Result<()> {
        let other = Self::of(other)?;
        other.enter()?;
        call!(self.driver, event_record(other.reached, other.stream))?;
        self.enter()?;
        call!(self.driver, stream_wait(self.stream, other.reached, 0))
    }

    fn waits_in_recordings(&self) -> bool {
        true
    }

    fn clear(&mut self, at: Slice, bytes: usize) -> Result<()> {
        self.enter()?;
        let address = self.address(at, bytes)?;
        call!(self.driver, set_bytes(address, 0, bytes, self.stream))
    }

    fn run(&mut self, dispatches: &[Dispatch]) -> Result<()> {
        self.enter()?;
        self.counts.launches += dispatches.len() as u64;
        self.counts.kernels += dispatches.len() as u64;
        if let Some(mut profile) = self.profile.take() {
            for dispatch in dispatches {
                profile.before(&self.driver, self.stream)?;
                self.queue(dispatch, self.stream)?;
                profile.after(&self.driver, self.stream, dispatch)?;
            }
            self.profile = Some(profile);
            return Ok(());
        }
        let beside = |dispatch: &Dispatch| dispatch.order == Order::Beside;
        for group in dispatches.chunk_by(|_, next| beside(next)) {
            if group.len() == 1 {
                self.queue(&group[0], self.stream)?;
            } else {
                self.queue_beside(group)?;
            }
        }
        Ok(())
    }

    fn record(&mut self, dispatches: Vec<Dispatch>) -> Result<RecordingId> {
        self.enter()?;
        let mut graph = Graph::NULL;
        call!(self.driver, graph_create(&mut graph, 0))?;
        let mut exec = GraphExec::NULL;
        let built = self.build(&dispatches, graph);
        let built = built.and_then(|()| call!(self.driver, graph_instantiate(&mut exec, graph, 0)));
        if let Err(error) = built {
            call!(self.driver, graph_destroy(graph))?;
            return Err(error);
        }
        self.recordings.push(Some(Recording { graph, exec, dispatches }));
        Ok(RecordingId(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: RecordingId) -> Result<()> {
        self.enter()?;
        let place = self.recordings.get_mut(recording.0).and_then(Option::take);
        let found = place.ok_or_else(|| Error::Device { reason: format!("{recording:?} does not exist") })?;
        let outcome = match self.profile {
            Some(_) => self.run(&found.dispatches),
            None => {
                self.counts.launches += 1;
                self.counts.kernels += found.dispatches.len() as u64;
                call!(self.driver, graph_launch(found.exec, self.stream))
            }
        };
        self.recordings[recording.0] = Some(found);
        outcome
    }

    fn forget(&mut self, recording: RecordingId) {
        if let Some(recording) = self.recordings.get_mut(recording.0).and_then(Option::take) {
            let _ = self.enter();
            let _ = call!(self.driver, graph_exec_destroy(recording.exec));
            let _ = call!(self.driver, graph_destroy(recording.graph));
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.enter()?;
        self.counts.waits += 1;
        call!(self.driver, stream_synchronize(self.stream))
    }

    fn copy_in(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        self.enter()?;
        let address = self.address(to, bytes.len())?;
        call!(self.driver, copy_to_device(address, bytes.as_ptr().cast(), bytes.len(), self.copies))
    }

    fn copy_out(&mut self, from: Slice, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        let address = self.address(from, to.len())?;
        call!(self.driver, copy_to_host(to.as_mut_ptr().cast(), address, to.len(), self.copies))
    }

    fn copy_away(&mut self, from: Slice, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        let address = self.address(from, to.len())?;
        call!(self.driver, copy_to_host(to.as_mut_ptr().cast(), address, to.len(), self.away))?;
        call!(self.driver, event_record(self.went_away, self.away))
    }

    fn are_away(&mut self, waits: bool) -> Result<bool> {
        self.enter()?;
        if waits {
            self.counts.waits += 1;
            return call!(self.driver, event_synchronize(self.went_away)).map(|()| true);
        }
        self.driver.has_ended(self.went_away)
    }

    fn after_away(&mut self) -> Result<()> {
        self.enter()?;
        call!(self.driver, stream_wait(self.copies, self.went_away, 0))?;
        call!(self.driver, stream_wait(self.stream, self.went_away, 0))
    }

    fn pin(&mut self, memory: &mut [u8]) -> Option<Box<dyn Send>> {
        self.enter().ok()?;
        let registered = Registered::new(&self.driver, self.ordinal, memory).ok()?;
        Some(Box::new(registered))
    }

    fn finish_copies(&mut self) -> Result<()> {
        self.enter()?;
        self.counts.waits += 1;
        call!(self.driver, stream_synchronize(self.copies))
    }

    fn copy_from_host(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()> {
        self.enter()?;
        let (start, to) = (from.offset, self.address(to, bytes)?);
        let all = self.host_bytes(from.buffer)?;
        let range = start.checked_add(bytes).and_then(|end| all.get(start..end));
        let range = range
            .ok_or_else(|| Error::Device { reason: format!("{bytes} bytes at {start} of host memory") })?;
        let from = range.as_ptr().cast();
        call!(self.driver, copy_to_device(to, from, bytes, self.copies))
    }

    fn work_after_copies(&mut self) -> Result<()> {
        self.enter()?;
        call!(self.driver, event_record(self.copied, self.copies))?;
        call!(self.driver, stream_wait(self.stream, self.copied, 0))
    }

    fn mark_work(&mut self, mark: usize) -> Result<()> {
        self.enter()?;
        while self.marks.len() <= mark {
            let mut event = Event::NULL;
            call!(self.driver, event_create(&mut event, NO_TIMING))?;
            self.marks.push(event);
        }
        call!(self.driver, event_record(self.marks[mark], self.stream))
    }

    fn copies_after(&mut self, mark: usize) -> Result<()> {
        self.enter()?;
        match self.marks.get(mark) {
            Some(event) => call!(self.driver, stream_wait(self.copies, *event, 0)),
            None => Ok(()),
        }
    }

    fn counts(&self) -> DeviceCounts {
        self.counts
    }

    /// Recordings run one by one then, which is slower than as a graph.
    fn start_profile(&mut self) {
        self.profile = Some(EventProfile::default());
    }

    fn take_profile(&mut self) -> Result<Vec<KernelTime>> {
        self.synchronize()?;
        self.profile.take().map_or(Ok(vec![]), |profile| profile.finish(&self.driver))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Nothing can be done about errors here: the process may be ending, or the device is lost.
        let _ = self.enter();
        let _ = call!(self.driver, stream_synchronize(self.copies));
        let _ = call!(self.driver, stream_synchronize(self.stream));
        for index in 0..self.recordings.len() {
            self.forget(RecordingId(index));
        }
        for index in 0..self.buffers.len() {
            self.free(BufferId(index));
        }
        self.kernels = None;
        self.staging.release(&self.driver);
        for event in self.marks.iter().chain([&self.copied, &self.went_away, &self.sent, &self.reached]) {
            let _ = call!(self.driver, event_destroy(*event));
        }
        if let Some(sides) = &self.sides {
            sides.release(&self.driver);
        }
        for stream in [self.away, self.copies, self.stream] {
            let _ = call!(self.driver, stream_destroy(stream));
        }
        let _ = call!(self.driver, context_release(self.ordinal));
    }
}
