//! Pinned host memory: what transfers pass through, so that they are queued like any other work, and what kernels read.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::driver::{Context, DevicePointer, Driver, Event, Stream, call};
use crate::{Error, Result};

/// A ring of pinned memory in two halves: one is filled while the transfers of the other may be under way.
pub(super) struct Staging {
    memory: *mut u8,
    half_bytes: usize,
    /// Which half is being filled, and how far.
    half: usize,
    at: usize,
    /// After the last transfer of each half.
    done: [Event; 2],
}

// SAFETY: the memory is the struct's own, and pinned memory may be used by any thread.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) const fn empty() -> Self {
        Self { memory: ptr::null_mut(), half_bytes: 0, half: 0, at: 0, done: [Event::NULL; 2] }
    }

    pub(super) fn new(driver: &Driver, bytes: usize) -> Result<Self> {
        let mut staging = Self { half_bytes: bytes / 2, ..Self::empty() };
        let mut memory: *mut c_void = ptr::null_mut();
        const PORTABLE: c_uint = 1;
        call!(driver, host_alloc(&mut memory, bytes, PORTABLE))?;
        staging.memory = memory.cast();
        const NO_TIMING: c_uint = 2;
        for done in &mut staging.done {
            call!(driver, event_create(done, NO_TIMING))?;
        }
        Ok(staging)
    }

    /// Queues a copy of `bytes`, which are read before this returns.
    pub(super) fn upload(
        &mut self,
        driver: &Driver,
        stream: Stream,
        to: DevicePointer,
        bytes: &[u8],
    ) -> Result<()> {
        if bytes.len() > self.half_bytes {
            // From memory that is not pinned the driver reads before it returns.
            return call!(driver, copy_to_device(to, bytes.as_ptr().cast(), bytes.len(), stream));
        }
        if self.at + bytes.len() > self.half_bytes {
            call!(driver, event_record(self.done[self.half], stream))?;
            self.half = 1 - self.half;
            self.at = 0;
            call!(driver, event_synchronize(self.done[self.half]))?;
        }
        // SAFETY: `at + bytes.len()` is within the half, whose earlier transfers have ended.
        let place = unsafe { self.memory.add(self.half * self.half_bytes + self.at) };
        // SAFETY: as above; `bytes` is not pinned memory of ours.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        self.at += bytes.len().next_multiple_of(64);
        call!(driver, copy_to_device(to, place.cast_const().cast(), bytes.len(), stream))
    }

    /// Reads `out.len()` bytes once all queued work has ended; does not wait if there are none.
    pub(super) fn download(
        &mut self,
        driver: &Driver,
        stream: Stream,
        from: DevicePointer,
        out: &mut [u8],
    ) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        // In the stream's order: uploads that the ring still holds have ended by then.
        let mut at = 0;
        for part in out.chunks_mut(2 * self.half_bytes) {
            let place = self.memory;
            call!(driver, copy_to_host(place.cast(), from + at, part.len(), stream))?;
            call!(driver, stream_synchronize(stream))?;
            // SAFETY: the transfer of `part.len()` bytes to the ring has ended.
            unsafe { ptr::copy_nonoverlapping(place, part.as_mut_ptr(), part.len()) };
            at += part.len() as u64;
        }
        (self.half, self.at) = (0, 0);
        Ok(())
    }

    pub(super) fn release(&mut self, driver: &Driver) {
        if !self.memory.is_null() {
            let _ = call!(driver, host_free(self.memory.cast()));
            for done in self.done {
                let _ = call!(driver, event_destroy(done));
            }
        }
        *self = Self::empty();
    }
}

/// Host memory of zeros that the device can read, pinned, in huge pages where there are some.
pub(super) struct Pinned {
    memory: *mut u8,
    bytes: usize,
    /// Where the device sees it.
    pub(super) pointer: DevicePointer,
}

// SAFETY: the memory is the struct's own, and pinned memory may be used by any thread.
unsafe impl Send for Pinned {}

/// Makes the pages of memory of zeros, by many threads: pinning would make them one after the other.
fn touch(memory: &mut [u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(TOUCHING);
    let each = memory.len().div_ceil(threads).next_multiple_of(HUGE_PAGE);
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(each.max(1)) {
            scope.spawn(|| part.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
        }
    });
}

/// Host memory of somebody else that is pinned until this is dropped, which must be before the memory is given back. It
/// keeps the device's context.
pub(super) struct Registered {
    driver: Arc<Driver>,
    device: c_int,
    context: Context,
    memory: *mut c_void,
}

// SAFETY: the pointer is a name for the driver and never read through; the driver may be called by any thread.
unsafe impl Send for Registered {}

impl Registered {
    /// Pins `memory`, zeros that nothing was written to.
    pub(super) fn new(driver: &Arc<Driver>, device: c_int, memory: &mut [u8]) -> Result<Self> {
        touch(memory);
        let mut context = Context::NULL;
        call!(driver, context_retain(&mut context, device))?;
        let start: *mut c_void = memory.as_mut_ptr().cast();
        const PORTABLE: c_uint = 1;
        if let Err(error) = call!(driver, host_register(start, memory.len(), PORTABLE)) {
            let _ = call!(driver, context_release(device));
            return Err(error);
        }
        Ok(Self { driver: Arc::clone(driver), device, context, memory: start })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _ = call!(self.driver, context_set(self.context));
        let _ = call!(self.driver, host_unregister(self.memory));
        let _ = call!(self.driver, context_release(self.device));
    }
}

/// Bytes of a huge page, and the threads that touch pages at most.
const HUGE_PAGE: usize = 2 << 20;
const TOUCHING: usize = 16;

impl Pinned {
    /// # Errors
    /// [`Error::Device`] if the system or the driver refuses.
    pub(super) fn new(driver: &Driver, bytes: usize) -> Result<Self> {
        let refused = |why: String| Error::Device {
            reason: format!("{bytes} bytes of host memory for experts: {why}"),
        };
        let bytes =
            bytes.max(1).checked_next_multiple_of(HUGE_PAGE).ok_or_else(|| refused("too many".into()))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a private anonymous mapping at an address of the system's choosing touches no existing memory.
        let memory = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        let memory: *mut u8 = memory.map_err(|error| refused(error.to_string()))?.cast();
        let mut pinned = Self { memory, bytes, pointer: 0 };
        // SAFETY: the range is the mapping just made. Huge pages are a wish: a refusal changes nothing.
        let _ = unsafe { madvise(memory.cast(), bytes, Advice::LinuxHugepage) };
        touch(pinned.as_mut_slice());
        const PORTABLE_AND_MAPPED: c_uint = 3;
        if let Err(error) = call!(driver, host_register(memory.cast(), bytes, PORTABLE_AND_MAPPED)) {
            pinned.unmap();
            return Err(refused(error.to_string()));
        }
        match call!(driver, host_pointer(&mut pinned.pointer, memory.cast(), 0)) {
            Ok(()) => Ok(pinned),
            Err(error) => {
                pinned.release(driver);
                Err(error)
            }
        }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is the struct's own and initialised, by the system with zeros.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }

    fn unmap(&mut self) {
        // SAFETY: the mapping is the struct's own and not used after this. A refusal only leaks memory.
        let _ = unsafe { munmap(self.memory.cast(), self.bytes) };
    }

    /// Gives the memory back; no queued work uses it.
    pub(super) fn release(mut self, driver: &Driver) {
        let _ = call!(driver, host_unregister(self.memory.cast()));
        self.unmap();
    }
}
