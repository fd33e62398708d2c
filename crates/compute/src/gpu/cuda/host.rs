//! Pinned host memory that transfers pass through, so that they are queued like any other work.

use std::ffi::{c_uint, c_void};
use std::ptr;

use super::driver::{DevicePointer, Driver, Event, Stream, call};
use crate::Result;

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

    /// Reads `out.len()` bytes once all queued work has ended.
    pub(super) fn download(
        &mut self,
        driver: &Driver,
        stream: Stream,
        from: DevicePointer,
        out: &mut [u8],
    ) -> Result<()> {
        // After this no transfer is under way: the whole ring is free.
        call!(driver, stream_synchronize(stream))?;
        (self.half, self.at) = (0, 0);
        let mut at = 0;
        for part in out.chunks_mut(2 * self.half_bytes) {
            let place = self.memory;
            call!(driver, copy_to_host(place.cast(), from + at, part.len(), stream))?;
            call!(driver, stream_synchronize(stream))?;
            // SAFETY: the transfer of `part.len()` bytes to the ring has ended.
            unsafe { ptr::copy_nonoverlapping(place, part.as_mut_ptr(), part.len()) };
            at += part.len() as u64;
        }
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
