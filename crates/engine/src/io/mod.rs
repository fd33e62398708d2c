//! Reading checkpoint files.

pub mod file;
