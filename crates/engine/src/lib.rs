//! Runs Mixture-of-Experts language models that are bigger than memory: the dense trunk stays resident,
//! routed experts stream from disk through a bounded cache.

mod batch;
pub mod chat_template;
pub mod checkpoint;
pub mod cost;
pub mod decoding;
pub mod engine;
pub mod error;
pub mod experts;
mod fingerprint;
pub mod generation;
pub mod io;
pub mod memory;
pub mod models;
pub mod pack;
pub mod perplexity;
pub mod placement;
pub mod reasoning;
pub mod sampler;
pub mod scheduler;
pub mod session;
mod session_file;
pub mod synth;
pub mod tokenizer;

pub use batch::Part;
pub use decoding::{Constraint, Decoding, DecodingOptions};
pub use engine::{Engine, Options, Outputs, Reads, Stats};
pub use error::{Error, Result};
pub use generation::{Finish, Generated, TextModel};
pub use placement::Placement;
pub use reasoning::{Passage, ReasoningForm, ReasoningSplit};
pub use scheduler::{Request, Scheduler, SchedulerOptions};
pub use session::Session;
