//! Memory for weights and reading of checkpoint files.

#[cfg(target_vendor = "apple")]
pub(crate) mod apple_memory;
pub mod buffer;
pub mod file;
pub mod pread;
pub mod queue;
#[cfg(target_os = "linux")]
pub mod uring;
