//! Runs Mixture-of-Experts language models that are bigger than memory: the dense trunk stays resident,
//! routed experts stream from disk through a bounded cache.

pub mod chat_template;
pub mod checkpoint;
pub mod error;
pub mod io;
pub mod sampler;
pub mod tokenizer;

pub use error::{Error, Result};
