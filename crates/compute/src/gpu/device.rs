//! [`Device`]: what runs dispatches. Implemented by the executors.

use std::any::Any;
use std::borrow::Cow;

use crate::backend::{DeviceCounts, KernelTime};
use crate::{Bytes, Result};

/// Memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub usize);

/// A place in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The buffer.
    pub buffer: BufferId,
    /// Bytes from its start.
    pub offset: usize,
}

impl Slice {
    /// The place `bytes` further on.
    #[must_use]
    pub fn at(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

impl From<BufferId> for Slice {
    fn from(buffer: BufferId) -> Self {
        Self { buffer, offset: 0 }
    }
}

/// Number of groups along three axes; nothing runs if one is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grid {
    /// Known when the dispatch is made.
    Fixed([u32; 3]),
    /// Three u32 in a buffer, written by an earlier dispatch; none is larger than in `limit`. An executor without
    /// indirect dispatch may launch `limit`: kernels return at once for groups beyond what their inputs ask for.
    Indirect {
        /// Where the numbers are.
        at: Slice,
        /// Upper bounds.
        limit: [u32; 3],
    },
}

/// When a dispatch may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// After all dispatches before it but those that are aside, and seeing what they wrote.
    #[default]
    After,
    /// The same for a kernel that waits by itself, but reads before that what they wrote.
    AfterEnd,
    /// As the dispatch before it, which it does not depend on.
    Beside,
    /// The same as [`Order::After`], while those that follow do not wait for it, up to the next [`Order::Joining`].
    Aside,
    /// The same as [`Order::After`], and after all that was aside.
    Joining,
}

/// One run of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatch {
    /// File of the kernel.
    pub unit: &'static str,
    /// Name of the kernel.
    pub kernel: Cow<'static, str>,
    /// Its buffers.
    pub buffers: Vec<Slice>,
    /// Its constants: 32-bit little-endian words.
    pub constants: Vec<u8>,
    /// Groups.
    pub grid: Grid,
    /// Threads of a group.
    pub threads: u32,
    /// Bytes of threadgroup memory beside what the kernel declares; only kernels of one executor ask for some.
    pub shared: u32,
    /// Neighbours along the first axis that run together and read each other's memory; only kernels of one executor have more than
    /// one.
    pub cluster: u32,
    /// When it may start.
    pub order: Order,
}

/// Part of a kernel's constants: 32-bit words.
pub trait Words {
    /// Appends them, little-endian.
    fn append(&self, out: &mut Vec<u8>);
}

impl Words for u32 {
    fn append(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }
}

impl Words for f32 {
    fn append(&self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }
}

impl Words for bool {
    fn append(&self, out: &mut Vec<u8>) {
        u32::from(*self).append(out);
    }
}

impl Words for usize {
    /// # Panics
    /// If it needs more than 32 bits.
    fn append(&self, out: &mut Vec<u8>) {
        u32::try_from(*self).expect("a constant of 32 bits").append(out);
    }
}

impl<T: Words, const N: usize> Words for [T; N] {
    fn append(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|word| word.append(out));
    }
}

/// The constants of a dispatch, in the order of the kernel's struct.
pub fn constants(words: &[&dyn Words]) -> Vec<u8> {
    let mut out = vec![];
    words.iter().for_each(|word| word.append(&mut out));
    out
}

/// A prepared list of dispatches (a captured graph, an encoded command buffer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordingId(pub usize);

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// For people: `NVIDIA H200 (compute capability 9.0)`.
    pub name: String,
    /// Bytes of memory in all.
    pub memory: u64,
    /// Bytes of memory that are free.
    pub free: u64,
    /// Bytes of a buffer, at most.
    pub largest_buffer: u64,
    /// Groups that run beside each other, each with a multiprocessor of its own.
    pub multiprocessors: usize,
    /// Bytes a second that kernels read of host memory, about.
    pub bus: u64,
    /// Bytes of memory that a group may have.
    pub group_memory: usize,
    /// Whether kernels copy weights to a group's memory beside other work.
    pub copies_ahead: bool,
    /// Whether it runs `kernels/cuda/expert_panels.cu`.
    pub bulk_copies: bool,
    /// Whether groups may be clusters, which reach each other's memory.
    pub clusters: bool,
    /// Whether its memory is that of the processor.
    pub unified: bool,
    /// Whether it runs the kernels of `kernels/cuda`.
    pub tensor_cores: bool,
    /// Whether it runs `kernels/cuda/wide.cu`.
    pub warp_groups: bool,
    /// Whether it runs `kernels/cuda/batched.h`.
    pub byte_matrices: bool,
    /// Whether it runs those of `kernels/metal`.
    pub simdgroup_matrices: bool,
}

/// A buffer of another device that kernels of a device read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// The other device's number of it.
    pub of: BufferId,
    /// That of the device which reads it.
    pub at: BufferId,
    /// Its bytes, or as many of its first as are read.
    pub bytes: usize,
}

/// A queue of work on a GPU, and its memory.
///
/// Everything runs in the order of the calls, except what [`Device::copy_in`] says. Calls return as soon as work is
/// queued; only [`Device::download`], [`Device::synchronize`] and [`Device::finish_copies`] wait. An error of queued
/// work is reported by a later call.
pub trait Device: Send + Any {
    /// What it is, and how much memory it has now.
    fn info(&self) -> DeviceInfo;

    /// Takes memory; its content is unspecified, its address a multiple of 256.
    ///
    /// # Errors
    /// [`crate::Error::DeviceMemory`] if there is not enough.
    fn alloc(&mut self, bytes: usize) -> Result<BufferId>;

    /// Gives memory back, once queued work no longer needs it.
    fn free(&mut self, buffer: BufferId);

    /// Makes host memory a buffer without copying it, where that is possible: its first byte is at the slice, a multiple
    /// of 16. Nothing writes there.
    ///
    /// # Errors
    /// [`crate::Error::DeviceMemory`] if that is more than the device may use.
    fn adopt(&mut self, _bytes: &Bytes) -> Result<Option<Slice>> {
        Ok(None)
    }

    /// Writes `bytes`; they are read before the call returns.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn upload(&mut self, to: Slice, bytes: &[u8]) -> Result<()>;

    /// Waits for all queued work, then reads; nothing waits to read nothing.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn download(&mut self, from: Slice, out: &mut [u8]) -> Result<()>;

    /// Copies within the device.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()>;

    /// Copies to another device: after what is queued on both so far, and before what is queued on either from now on.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy_to(
        &mut self,
        from: Slice,
        other: &mut (dyn Device + 'static),
        to: Slice,
        bytes: usize,
    ) -> Result<()> {
        let mut held = vec![0; bytes];
        self.download(from, &mut held)?;
        other.upload(to, &held)
    }

    /// Whether kernels can read the other device's memory.
    fn reaches(&mut self, _other: &mut (dyn Device + 'static)) -> bool {
        false
    }

    /// Lets kernels read a buffer of another device, of `bytes` bytes, which must not be given back before the view.
    ///
    /// # Errors
    /// [`crate::Error::Device`] if the other device's memory cannot be read.
    fn view(
        &mut self,
        _other: &mut (dyn Device + 'static),
        _buffer: BufferId,
        _bytes: usize,
    ) -> Result<View> {
        let DeviceInfo { name, .. } = self.info();
        Err(crate::Error::Device { reason: format!("{name} does not read other devices' memory") })
    }

    /// What is queued from now on comes after what is queued on another device so far, and sees `views` of it as that leaves
    /// them, as long as nothing queued there later writes them.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn follow(&mut self, _other: &mut (dyn Device + 'static), _views: &[View]) -> Result<()> {
        let DeviceInfo { name, .. } = self.info();
        Err(crate::Error::Device { reason: format!("{name} does not follow other devices") })
    }

    /// Whether kernels of recorded lists may wait for those of another device's, which is given its own list beside them.
    fn waits_in_recordings(&self) -> bool {
        false
    }

    /// Sets `bytes` bytes to zero.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn clear(&mut self, at: Slice, bytes: usize) -> Result<()>;

    /// Queues dispatches that will not be run again.
    ///
    /// # Errors
    /// [`crate::Error::Device`], also for a kernel that does not exist.
    fn run(&mut self, dispatches: &[Dispatch]) -> Result<()>;

    /// Prepares dispatches for being run many times.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn record(&mut self, dispatches: Vec<Dispatch>) -> Result<RecordingId>;

    /// Queues what was recorded.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn replay(&mut self, recording: RecordingId) -> Result<()>;

    /// Forgets a recording.
    fn forget(&mut self, recording: RecordingId);

    /// Waits for all queued work.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn synchronize(&mut self) -> Result<()>;

    /// Takes host memory of zeros that kernels can read, slower than the device's own, and that copies are fast from. It is
    /// given back with [`Device::free`].
    ///
    /// # Errors
    /// [`crate::Error::Device`] if there is not enough, or the device has no memory of its own to copy to.
    fn alloc_host(&mut self, bytes: usize) -> Result<BufferId> {
        let DeviceInfo { name, .. } = self.info();
        Err(crate::Error::Device { reason: format!("{name}: no {bytes} bytes beside the device's memory") })
    }

    /// What [`Device::alloc_host`] gave, to be written while no queued work reads it.
    ///
    /// # Errors
    /// [`crate::Error::Device`] if it is no such buffer.
    fn host_bytes(&mut self, buffer: BufferId) -> Result<&mut [u8]> {
        Err(crate::Error::Device { reason: format!("{buffer:?} is not in host memory") })
    }

    /// Starts a copy from memory of [`Device::alloc_host`] beside the queued work, as [`Device::copy_in`] does.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy_from_host(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()> {
        self.copy(from, to, bytes)
    }

    /// What is queued from now on sees the copies that have been started.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn work_after_copies(&mut self) -> Result<()> {
        self.finish_copies()
    }

    /// Remembers what has been queued so far under a small number.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn mark_work(&mut self, _mark: usize) -> Result<()> {
        Ok(())
    }

    /// Copies that are started from now on begin after what was last remembered under a number.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copies_after(&mut self, _mark: usize) -> Result<()> {
        Ok(())
    }

    /// Starts a copy from host memory beside the queued work: it may overtake that, so nothing queued may use the
    /// destination. `bytes` must stay as they are until [`Device::finish_copies`]; an executor that cannot read them
    /// after the call returns copies them first.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy_in(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        self.upload(to, bytes)
    }

    /// Starts a copy to host memory beside the queued work, in the order of the other copies: nothing queued may write the
    /// source. `to` is written until [`Device::finish_copies`], so nothing else may use it until then; an executor that
    /// cannot write it after the call returns does it first.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy_out(&mut self, from: Slice, to: &mut [u8]) -> Result<()> {
        self.download(from, to)
    }

    /// As [`Device::copy_out`], but beside other copies too, and `to` is written until [`Device::are_away`] says that all such
    /// copies have ended. Nothing may write the source but what is started after [`Device::after_away`].
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn copy_away(&mut self, from: Slice, to: &mut [u8]) -> Result<()> {
        self.download(from, to)
    }

    /// Whether all copies of [`Device::copy_away`] have ended; if `waits`, they have.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn are_away(&mut self, _waits: bool) -> Result<bool> {
        Ok(true)
    }

    /// What is queued and copied from now on comes after all copies of [`Device::copy_away`].
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn after_away(&mut self) -> Result<()> {
        Ok(())
    }

    /// As [`crate::backend::Executable::pin`].
    fn pin(&mut self, _memory: &mut [u8]) -> Option<Box<dyn Send>> {
        None
    }

    /// Waits until all copies started have ended; what is queued from now on sees them.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn finish_copies(&mut self) -> Result<()> {
        Ok(())
    }

    /// What it has done so far; of experts it knows nothing.
    fn counts(&self) -> DeviceCounts {
        DeviceCounts::default()
    }

    /// Times every kernel from now on. Does nothing on devices without a clock.
    fn start_profile(&mut self) {}

    /// Waits for all queued work and ends the profile: kernels by the time they took, longest first.
    ///
    /// # Errors
    /// [`crate::Error::Device`].
    fn take_profile(&mut self) -> Result<Vec<KernelTime>> {
        Ok(vec![])
    }
}
