//! [`HostBuffer`]: page-aligned anonymous memory for weights.
//!
//! Weights live in anonymous memory with transparent huge pages asked for: two threads read it about 15 %
//! faster than 4 KiB pages, and unlike a mapped file it cannot be evicted behind the engine's back. A buffer
//! commits memory only where it is written.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size of a memory page and of a disk block that direct reads must be aligned to.
pub(crate) const PAGE_BYTES: usize = 4096;

struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What must go before the memory does.
    guard: Mutex<Option<Box<dyn Send>>>,
}

// SAFETY: a region is plain memory; who may access which part is decided by the `HostBuffer`s that own its
// disjoint ranges.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        *self.guard.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: `start` and `bytes` are what mmap returned, and the last buffer of the region is gone. An
        // unmapping that the system refuses only leaks memory.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// An owned range of page-aligned, zero-initialised memory.
pub struct HostBuffer {
    region: Arc<Region>,
    offset: usize,
    len: usize,
}

impl HostBuffer {
    /// `len` zero bytes, starting at a page boundary.
    ///
    /// # Errors
    /// If the system has no address space left for it.
    pub(crate) fn zeroed(len: usize) -> std::io::Result<Self> {
        let bytes = len.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a private anonymous mapping at an address of the system's choosing touches no existing memory.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE)? };
        let start = NonNull::new(start.cast::<u8>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        #[cfg(target_os = "linux")]
        // SAFETY: the range is the mapping just made. Huge pages are a wish: a refusal changes nothing.
        let _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        Ok(Self { region: Arc::new(Region { start, bytes, guard: Mutex::new(None) }), offset: 0, len })
    }

    /// Keeps `guard` as long as the memory of this buffer and of all that it is cut into.
    pub fn keep(&self, guard: Box<dyn Send>) {
        *self.region.guard.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    }

    /// Cuts the buffer into `count` buffers of `each` bytes; what is left over stays unused.
    ///
    /// # Panics
    /// If the buffer is shorter than that.
    pub fn split(self, count: usize, each: usize) -> Vec<Self> {
        assert!(count.checked_mul(each).is_some_and(|total| total <= self.len), "buffer holds its parts");
        let part = |i| Self { region: Arc::clone(&self.region), offset: self.offset + i * each, len: each };
        (0..count).map(part).collect()
    }

    /// Finds memory for the buffer now, which otherwise happens where it is first written. Content does not change; if the
    /// system refuses, nothing does.
    #[cfg(target_os = "linux")]
    pub(crate) fn populate(&mut self) {
        let start = self.as_mut_ptr();
        // SAFETY: the range is this buffer's own part of a mapping that may be written; the pages that it touches get what
        // writing to them would give them.
        let _ = unsafe { madvise(start.cast(), self.len, Advice::LinuxPopulateWrite) };
    }

    /// As above; here memory is found where it is first written.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn populate(&mut self) {}

    /// Gives the buffer's memory back until it is written again; its content is lost.
    pub(crate) fn release(&mut self) {
        #[cfg(target_os = "linux")]
        const GIVEN_UP: Advice = Advice::LinuxDontNeed;
        #[cfg(not(target_os = "linux"))]
        const GIVEN_UP: Advice = Advice::DontNeed;
        let start = self.as_mut_slice().as_mut_ptr();
        // SAFETY: the range is this buffer's own part of a private anonymous mapping: its pages read as zeros or as before.
        let _ = unsafe { madvise(start.cast(), self.len, GIVEN_UP) };
    }

    /// Where the bytes begin, for a kernel that writes them.
    #[cfg(target_os = "linux")]
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: the range lies within the mapping.
        unsafe { self.region.start.as_ptr().add(self.offset) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the range lies within the mapping and is initialised (zeroed by the system); this buffer is its
        // only owner (`zeroed` makes one, `split` consumes the whole), and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(self.region.start.as_ptr().add(self.offset), self.len) }
    }
}

impl AsRef<[u8]> for HostBuffer {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as in `as_mut_slice`; shared borrows of `self` exclude writers.
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().add(self.offset), self.len) }
    }
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_outlive_each_other() {
        let whole = HostBuffer::zeroed(3 * PAGE_BYTES).unwrap();
        let mut parts = whole.split(3, PAGE_BYTES);
        for (i, part) in parts.iter_mut().enumerate() {
            part.as_mut_slice().fill(i as u8 + 1);
        }
        let last = parts.pop().unwrap();
        drop(parts);
        assert!(last.as_ref().iter().all(|b| *b == 3));
        assert_eq!(last.as_ref().as_ptr() as usize % PAGE_BYTES, 0);
    }

    #[test]
    fn populating_changes_nothing() {
        let mut parts = HostBuffer::zeroed(8 * PAGE_BYTES).unwrap().split(2, 4 * PAGE_BYTES);
        parts[0].as_mut_slice().fill(7);
        parts.iter_mut().for_each(HostBuffer::populate);
        assert!(parts[0].as_ref().iter().all(|b| *b == 7));
        assert!(parts[1].as_ref().iter().all(|b| *b == 0));
    }

    #[test]
    fn released_memory_can_be_used_again() {
        let mut parts = HostBuffer::zeroed(8 * PAGE_BYTES).unwrap().split(2, 4 * PAGE_BYTES);
        parts.iter_mut().for_each(|part| part.as_mut_slice().fill(7));
        parts[0].release();
        assert!(parts[1].as_ref().iter().all(|b| *b == 7), "the neighbour keeps its own");
        #[cfg(target_os = "linux")]
        assert!(parts[0].as_ref().iter().all(|b| *b == 0));
        parts[0].as_mut_slice().fill(9);
        assert!(parts[0].as_ref().iter().all(|b| *b == 9));
    }

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(HostBuffer::zeroed(usize::MAX).is_err());
        assert!(HostBuffer::zeroed(usize::MAX / 2).is_err());
        assert_eq!(HostBuffer::zeroed(0).unwrap().as_ref().len(), 0);
    }
}
