//! Runs Mixture-of-Experts language models that are bigger than memory: the dense trunk stays resident,
//! routed experts stream from disk through a bounded cache.

pub mod error;

pub use error::{Error, Result};
