//! Memory that macOS could give to a process now.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// Bytes that are free, or can be reclaimed from file pages; `None` if the system does not say.
pub(crate) fn available() -> Option<u64> {
    let mut statistics = MaybeUninit::<libc::vm_statistics64>::zeroed();
    let mut count = libc::HOST_VM_INFO64_COUNT;
    // The advice is to use another crate, for one function.
    #[allow(deprecated)]
    // SAFETY: it takes nothing and gives a port.
    let host = unsafe { libc::mach_host_self() };
    // SAFETY: there is room for `count` words in `statistics`.
    let outcome = unsafe {
        libc::host_statistics64(host, libc::HOST_VM_INFO64, statistics.as_mut_ptr().cast(), &raw mut count)
    };
    if outcome != libc::KERN_SUCCESS {
        return None;
    }
    // SAFETY: zeros were a valid value already.
    let statistics = unsafe { statistics.assume_init() };
    let pages = u64::from(statistics.free_count)
        + u64::from(statistics.inactive_count)
        + u64::from(statistics.purgeable_count);
    Some(pages * rustix::param::page_size() as u64)
}
