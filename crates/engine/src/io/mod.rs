//! Memory for weights and reading of checkpoint files.

pub mod buffer;
pub mod file;
pub mod pread;
pub mod queue;
#[cfg(target_os = "linux")]
pub mod uring;
