//! Memory for weights, reading of checkpoint files, and writing of files.

#[cfg(target_vendor = "apple")]
pub(crate) mod apple_memory;
pub mod atomic_file;
pub(crate) mod buffer;
pub mod columns;
pub mod file;
pub(crate) mod heap;
pub mod pread;
pub mod queue;
#[cfg(target_os = "linux")]
mod uring;
