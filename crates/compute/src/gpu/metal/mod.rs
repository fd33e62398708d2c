//! [`Metal`]: runs dispatches on the GPU of a Mac with Apple silicon.
//!
//! Memory is shared with the processor: weights are used where they were read to, a buffer is written and read in place
//! once queued work that may use it has ended, and experts are copied into their slots while the GPU computes. A list of dispatches becomes a command
//! buffer, whose dispatches run beside each other except where [`Order`] says otherwise. Kernels are compiled from their
//! text when they are first used (`library.rs`); Metal keeps what it compiled in a cache of its own.
//!
//! It has been type-checked and never run: see ARCHITECTURE.md for what stands in for a Mac in the tests.

mod library;

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use library::{Library, Pipeline};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSError;
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandBufferError, MTLCommandBufferStatus,
    MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder, MTLCreateSystemDefaultDevice, MTLDevice,
    MTLDispatchType, MTLGPUFamily, MTLResourceOptions, MTLSize,
};

use super::device::{BufferId, Device, DeviceInfo, Dispatch, Grid, Order, RecordingId, Slice};
use crate::{Bytes, Error, Result};

// MTLCreateSystemDefaultDevice finds nothing in a program without it.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// Place of a kernel's constants among its buffers, as in `kernels/metal/dialect.h`.
const CONSTANTS_INDEX: usize = 30;

/// Dispatches of a command buffer, give or take a few that run beside its last. macOS ends what keeps the GPU from the
/// screen for seconds, and what is committed runs while the rest is being encoded.
const MOST_DISPATCHES: usize = 128;

type Object<T> = Retained<ProtocolObject<T>>;

struct Allocation {
    buffer: Object<dyn MTLBuffer>,
    /// Bytes that were asked for; the buffer may have some more.
    bytes: usize,
    /// Host memory that the buffer is, if it is not Metal's own.
    _host: Option<Bytes>,
}

/// A dispatch and its kernel.
struct Prepared {
    dispatch: Dispatch,
    pipeline: Arc<Pipeline>,
}

/// The GPU of a Mac.
pub struct Metal {
    device: Object<dyn MTLDevice>,
    queue: Object<dyn MTLCommandQueue>,
    /// Most bytes that buffers may take together.
    limit: u64,
    used: u64,
    library: Library,
    buffers: Vec<Option<Allocation>>,
    recordings: Vec<Option<Vec<Prepared>>>,
    /// What has been committed and not been waited for.
    queued: Vec<Object<dyn MTLCommandBuffer>>,
}

// SAFETY: Metal's objects may be used from any thread; buffers and command buffers, which are not to be used from two at
// once, are reached through `&mut self` only, and through `&self` only to ask a buffer for its address.
unsafe impl Send for Metal {}

/// The GPU, if it is one that can be used.
///
/// # Errors
/// [`Error::NoDevice`] if there is none.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    Ok(vec![Metal::open(None)?.info()])
}

impl Metal {
    /// The GPU, whose buffers may take `limit` bytes; without a limit, what the system recommends.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none that can be used.
    pub fn open(limit: Option<u64>) -> Result<Self> {
        let missing = |reason: &str| Error::NoDevice { reason: reason.into() };
        let device = MTLCreateSystemDefaultDevice().ok_or_else(|| missing("Metal finds none"))?;
        // What is older has other widths of warps or memory of its own.
        if !device.supportsFamily(MTLGPUFamily::Apple7) || !device.hasUnifiedMemory() {
            let name = device.name();
            return Err(missing(&format!("{name} is older than Apple's M1")));
        }
        let queue = device.newCommandQueue().ok_or_else(|| missing("Metal gives no command queue"))?;
        Ok(Self {
            library: Library::new(device.clone()),
            limit: limit.unwrap_or_else(|| device.recommendedMaxWorkingSetSize()),
            used: 0,
            device,
            queue,
            buffers: vec![],
            recordings: vec![],
            queued: vec![],
        })
    }

    fn too_little(&self, wanted: usize) -> Error {
        let DeviceInfo { name, free, largest_buffer, .. } = self.info();
        Error::DeviceMemory { device: name, wanted: wanted as u64, free: free.min(largest_buffer) }
    }

    fn keep(&mut self, allocation: Allocation) -> BufferId {
        self.used += allocation.bytes as u64;
        let index = self.buffers.iter().position(Option::is_none).unwrap_or(self.buffers.len());
        if index == self.buffers.len() {
            self.buffers.push(None);
        }
        self.buffers[index] = Some(allocation);
        BufferId(index)
    }

    fn buffer(&self, id: BufferId) -> Result<&Allocation> {
        let buffer = self.buffers.get(id.0).and_then(Option::as_ref);
        buffer.ok_or_else(|| Error::Device { reason: format!("{id:?} does not exist") })
    }

    /// The buffer of `slice`, whose `bytes` bytes lie in it.
    fn range(&self, slice: Slice, bytes: usize) -> Result<&Allocation> {
        let buffer = self.buffer(slice.buffer)?;
        if slice.offset.checked_add(bytes).is_none_or(|end| end > buffer.bytes) {
            let Slice { offset, .. } = slice;
            let reason = format!("{bytes} bytes at {offset} of a buffer of {}", buffer.bytes);
            return Err(Error::Device { reason });
        }
        Ok(buffer)
    }

    /// Where the `bytes` bytes of `slice` are for the processor.
    fn address(&self, slice: Slice, bytes: usize) -> Result<*mut u8> {
        let contents = self.range(slice, bytes)?.buffer.contents();
        // SAFETY: the offset is within the buffer, as `range` checked.
        Ok(unsafe { contents.as_ptr().cast::<u8>().add(slice.offset) })
    }

    fn write(&self, to: Slice, bytes: &[u8]) -> Result<()> {
        let address = self.address(to, bytes.len())?;
        // SAFETY: `address` has room for `bytes`, which are not in a buffer: those are only reached through raw pointers.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len()) };
        Ok(())
    }

    /// Waits for all queued work.
    fn finish(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for commands in std::mem::take(&mut self.queued) {
            commands.waitUntilCompleted();
            if outcome.is_ok() && commands.status() == MTLCommandBufferStatus::Error {
                outcome = Err(commands.error().map_or_else(
                    || Error::Device { reason: "the GPU failed, and says nothing more".into() },
                    |error| failure(&error),
                ));
            }
        }
        outcome
    }

    fn prepare(&mut self, dispatch: Dispatch) -> Result<Prepared> {
        let pipeline = self.library.pipeline(dispatch.unit, &dispatch.kernel)?;
        let most = pipeline.most_threads();
        if dispatch.threads as usize > most {
            let Dispatch { kernel, threads, .. } = dispatch;
            let reason = format!("kernel {kernel}: a group of {threads} threads; this GPU allows {most}");
            return Err(Error::Device { reason });
        }
        Ok(Prepared { dispatch, pipeline })
    }

    /// Queues a list: as one command buffer, or a few if it is long.
    fn commit(&mut self, mut list: &[Prepared]) -> Result<()> {
        while !list.is_empty() {
            let rest = list.get(MOST_DISPATCHES..).unwrap_or(&[]);
            let beside = rest.iter().take_while(|p| p.dispatch.order == Order::Beside).count();
            let (first, later) = list.split_at(list.len() - rest.len() + beside);
            self.commit_one(first)?;
            list = later;
        }
        Ok(())
    }

    fn commit_one(&mut self, list: &[Prepared]) -> Result<()> {
        autoreleasepool(|_| {
            let none = |what: &str| Error::Device { reason: format!("Metal gives no {what}") };
            let commands = self.queue.commandBuffer().ok_or_else(|| none("command buffer"))?;
            let start = || {
                let encoder = commands.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent);
                encoder.ok_or_else(|| none("command encoder"))
            };
            let mut encoder = start()?;
            let mut outcome = Ok(());
            for (index, prepared) in list.iter().enumerate() {
                let dispatch = &prepared.dispatch;
                if matches!(dispatch.grid, Grid::Indirect { .. }) {
                    // What comes before an encoder has ended when the GPU reads the grids of its dispatches.
                    encoder.endEncoding();
                    encoder = start()?;
                } else if index > 0 && dispatch.order != Order::Beside {
                    encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
                }
                outcome = self.encode(&encoder, prepared);
                if outcome.is_err() {
                    break;
                }
            }
            // An encoder must end before it is given back.
            encoder.endEncoding();
            outcome?;
            commands.commit();
            self.queued.push(commands);
            Ok(())
        })
    }

    fn encode(&self, encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>, what: &Prepared) -> Result<()> {
        let Dispatch { buffers, constants, grid, threads, .. } = &what.dispatch;
        if matches!(grid, Grid::Fixed(grid) if grid.contains(&0)) {
            return Ok(());
        }
        encoder.setComputePipelineState(what.pipeline.state());
        for (index, slice) in buffers.iter().enumerate() {
            let allocation = self.range(*slice, 0)?;
            // SAFETY: the command buffer keeps the buffer; kernels have fewer than CONSTANTS_INDEX buffers, and read and
            // write within them what the emulator checks.
            unsafe { encoder.setBuffer_offset_atIndex(Some(&allocation.buffer), slice.offset, index) };
        }
        let bytes = NonNull::from(constants.as_slice()).cast::<c_void>();
        // SAFETY: `bytes` are `constants`, which are copied at once.
        unsafe { encoder.setBytes_length_atIndex(bytes, constants.len(), CONSTANTS_INDEX) };
        let size = |[width, height, depth]: [u32; 3]| MTLSize {
            width: width as usize,
            height: height as usize,
            depth: depth as usize,
        };
        let group = size([*threads, 1, 1]);
        match grid {
            Grid::Fixed(grid) => encoder.dispatchThreadgroups_threadsPerThreadgroup(size(*grid), group),
            Grid::Indirect { at, .. } => {
                let grids = self.range(*at, 12)?;
                // SAFETY: three u32 are at the offset, written by an encoder before this one.
                unsafe {
                    encoder
                        .dispatchThreadgroupsWithIndirectBuffer_indirectBufferOffset_threadsPerThreadgroup(
                            &grids.buffer,
                            at.offset,
                            group,
                        );
                }
            }
        }
        Ok(())
    }
}

/// What an error of a command buffer means.
fn failure(error: &NSError) -> Error {
    let reason = error.localizedDescription().to_string();
    let code = MTLCommandBufferError(error.code() as usize);
    if [MTLCommandBufferError::AccessRevoked, MTLCommandBufferError::DeviceRemoved].contains(&code) {
        Error::DeviceLost { reason }
    } else {
        Error::Device { reason }
    }
}

impl Drop for Metal {
    fn drop(&mut self) {
        // Nothing may use the buffers any more; nobody is left to be told of an error.
        let _ = self.finish();
    }
}

impl Device for Metal {
    fn info(&self) -> DeviceInfo {
        let memory = self.device.recommendedMaxWorkingSetSize();
        let free = memory.saturating_sub(self.device.currentAllocatedSize() as u64);
        DeviceInfo {
            name: self.device.name().to_string(),
            memory,
            free: free.min(self.limit.saturating_sub(self.used)),
            largest_buffer: self.device.maxBufferLength() as u64,
            unified: true,
            clusters: false,
            tensor_cores: false,
            warp_groups: false,
            byte_matrices: false,
            // Metal does not say.
            multiprocessors: 32,
            bus: 0,
            group_memory: self.device.maxThreadgroupMemoryLength(),
            copies_ahead: false,
            bulk_copies: false,
            simdgroup_matrices: true,
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<BufferId> {
        let fits = self.used.saturating_add(bytes as u64) <= self.limit;
        // Kernels read whole words: some bytes more, so that the last word of a buffer is inside.
        let length = bytes.max(1).next_multiple_of(16);
        let options = MTLResourceOptions::StorageModeShared;
        let buffer = if fits { self.device.newBufferWithLength_options(length, options) } else { None };
        let buffer = buffer.ok_or_else(|| self.too_little(bytes))?;
        Ok(self.keep(Allocation { buffer, bytes, _host: None }))
    }

    fn adopt(&mut self, bytes: &Bytes) -> Result<Option<Slice>> {
        let (start, len) = (bytes.as_slice().as_ptr(), bytes.as_slice().len());
        // Pages around the bytes, as Metal takes nothing less.
        let page = rustix::param::page_size();
        let offset = start.addr() % page;
        if len == 0 || !offset.is_multiple_of(16) {
            return Ok(None);
        }
        let length = (offset + len).next_multiple_of(page);
        if self.used.saturating_add(length as u64) > self.limit {
            return Err(self.too_little(length));
        }
        let pages = NonNull::new(start.wrapping_sub(offset).cast_mut().cast::<c_void>());
        let pages = pages.expect("memory of a slice is not at zero");
        let options = MTLResourceOptions::StorageModeShared;
        // SAFETY: the pages are mapped as long as `bytes` are, which are kept beside the buffer; kernels only read weights,
        // and nothing but `bytes` of these pages.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(pages, length, options, None)
        };
        // Metal refuses memory that it cannot share; then it is copied.
        let Some(buffer) = buffer else { return Ok(None) };
        let buffer = self.keep(Allocation { buffer, bytes: offset + len, _host: Some(bytes.clone()) });
        Ok(Some(Slice { buffer, offset }))
    }

    fn free(&mut self, buffer: BufferId) {
        // Command buffers keep what they use.
        if let Some(buffer) = self.buffers.get_mut(buffer.0).and_then(Option::take) {
            self.used -= buffer.bytes as u64;
        }
    }

    fn upload(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        self.finish()?;
        self.write(to, bytes)
    }

    fn download(&mut self, from: Slice, out: &mut [u8]) -> Result<()> {
        self.finish()?;
        let address = self.address(from, out.len())?;
        // SAFETY: `address` has that many bytes, no work is queued that writes them, and `out` is not in a buffer.
        unsafe { ptr::copy_nonoverlapping(address, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn copy(&mut self, from: Slice, to: Slice, bytes: usize) -> Result<()> {
        self.finish()?;
        let (from, to) = (self.address(from, bytes)?, self.address(to, bytes)?);
        // SAFETY: both have that many bytes and no work is queued.
        unsafe { ptr::copy(from, to, bytes) };
        Ok(())
    }

    fn clear(&mut self, at: Slice, bytes: usize) -> Result<()> {
        self.finish()?;
        let address = self.address(at, bytes)?;
        // SAFETY: `address` has that many bytes and no work is queued.
        unsafe { ptr::write_bytes(address, 0, bytes) };
        Ok(())
    }

    fn run(&mut self, dispatches: &[Dispatch]) -> Result<()> {
        let list = dispatches.iter().map(|d| self.prepare(d.clone())).collect::<Result<Vec<_>>>()?;
        self.commit(&list)
    }

    fn record(&mut self, dispatches: Vec<Dispatch>) -> Result<RecordingId> {
        let list = dispatches.into_iter().map(|d| self.prepare(d)).collect::<Result<Vec<_>>>()?;
        self.recordings.push(Some(list));
        Ok(RecordingId(self.recordings.len() - 1))
    }

    fn replay(&mut self, recording: RecordingId) -> Result<()> {
        let list = self.recordings.get_mut(recording.0).and_then(Option::take);
        let list = list.ok_or_else(|| Error::Device { reason: format!("{recording:?} does not exist") })?;
        let outcome = self.commit(&list);
        self.recordings[recording.0] = Some(list);
        outcome
    }

    fn forget(&mut self, recording: RecordingId) {
        if let Some(slot) = self.recordings.get_mut(recording.0) {
            *slot = None;
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.finish()
    }

    /// The slot is written in place: nothing queued uses it.
    fn copy_in(&mut self, to: Slice, bytes: &[u8]) -> Result<()> {
        self.write(to, bytes)
    }
}
