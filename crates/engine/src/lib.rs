//! Runs Mixture-of-Experts language models that are bigger than memory: the dense trunk stays resident,
//! routed experts stream from disk through a bounded cache.
//!
//! # Quickstart
//! ```
//! use moeflux::{AnswerOptions, OpenOptions};
//!
//! # fn main() -> moeflux::Result<()> {
//! // A GGUF file, a safetensors folder, or the demo model of the feature `demo`.
//! let mut model = OpenOptions::new().memory(64 << 20).open("demo")?;
//! let mut chat = model.conversation();
//! let answer = chat.ask(&mut model, "What is 17 + 25?", &AnswerOptions::default())?;
//! println!("{}", answer.text);
//! # assert_eq!(answer.text.trim(), "17 + 25 = 42");
//! # Ok(())
//! # }
//! ```
//! [`open()`] chooses everything, [`OpenOptions`] lets backend, memory and precision be said. A [`Conversation`] keeps
//! its tokens, so that every turn evaluates only what is new; [`Conversation::stream`] is an iterator over the answer.
//! [`Engine::eval`] gives logits, [`Engine::eval_with_routing`] the routers' choices too, [`Engine::embed`] an embedding, and the
//! [`Scheduler`] answers many requests at once. `docs/embedding.md` has an example of each.

pub mod adapters;
mod batch;
mod chain;
pub mod chat_template;
pub mod checkpoint;
pub mod conversation;
pub mod cost;
pub mod decoding;
#[cfg(feature = "demo")]
pub mod demo;
mod embeddings;
mod engine;
pub mod error;
pub mod experts;
mod fingerprint;
pub mod generation;
pub mod hardware;
pub mod hub;
pub mod io;
pub mod memory;
mod minima;
pub mod models;
mod open;
mod overlap;
pub mod pack;
pub mod perplexity;
mod pictures;
mod placement;
mod reasoning;
pub mod sampler;
pub mod scheduler;
pub mod session;
mod session_file;
mod speculation;
pub mod synth;
pub mod tokenizer;

pub use adapters::AdapterSource;
pub use batch::Part;
pub use conversation::{Answer, AnswerOptions, Answered, Conversation};
pub use decoding::{Constraint, Decoding, DecodingOptions};
pub use embeddings::Pooling;
pub use engine::{Engine, Options, Outputs, Reads, Stats};
pub use error::{Error, Result};
pub use experts::routing::RouterChoices;
pub use generation::{Finish, Generated, TextModel};
pub use hardware::{Compute, Devices, Processor};
pub use minima::Minima;
pub use moeflux_compute::TokenSet;
pub use moeflux_compute::backend::{Chosen, Overlap};
pub use moeflux_compute::gpu::Split;
pub use open::{OpenOptions, open};
pub use overlap::Begun;
pub use pictures::Picture;
pub use placement::Placement;
pub use reasoning::{Passage, ReasoningForm, ReasoningSplit};
pub use sampler::SamplerOptions;
pub use scheduler::{Request, Scheduler, SchedulerOptions};
pub use session::Session;
pub use speculation::{MOST_DRAFTED, SpecType};
pub use tokenizer::AddSpecial;

// The examples of that page are compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embedding.md")]
struct Embedding;
