//! The heap of the C library.
#![allow(unsafe_code)]

/// Gives the system back what the heap holds and nobody uses, where the C library can do that.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointers, may be called at any time, and moves nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has all threads use one heap, where the C library can do that.
pub(crate) fn unite() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointers, may be called at any time, and concerns heaps that are not there yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
