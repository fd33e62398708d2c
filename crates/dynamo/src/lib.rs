//! moeflux as a worker of NVIDIA Dynamo, on its `dynamo-backend-common`.
//!
//! Dynamo's frontend renders chats, tokenizes, parses calls and sends token ids; a worker evaluates them and sends others back.
//! For that the frontend reads files of Hugging Face's format beside the model ([`card`]), which a GGUF file has inside.
//! The scheduler is the one of `moeflux serve`; what prefixes it has cached goes to Dynamo's router ([`events`]).
//!
//! Not here: disaggregated prefill, adapters, several answers to one prompt (the frontend asks several times).

mod arguments;
pub mod card;
mod error;
mod events;
mod request;
mod worker;

pub use arguments::Arguments;
pub use worker::Worker;
