//! Runs Mixture-of-Experts language models that are bigger than memory: the dense trunk stays resident,
//! routed experts stream from disk through a bounded cache.

pub mod checkpoint;
pub mod error;
pub mod io;

pub use error::{Error, Result};
