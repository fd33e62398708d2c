//! Memory for weights and reading of checkpoint files.

pub mod buffer;
pub mod file;
pub mod queue;
