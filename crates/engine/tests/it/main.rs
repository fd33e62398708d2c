//! The engine on small models of every family, against goldens and against itself.

mod answers;
mod bad_input;
mod batches;
mod cache;
mod chat_template;
mod checkpoint;
mod configurations;
mod conversation;
mod deepseek;
mod demo_model;
mod embeddings;
mod emulator;
mod exchange;
mod faults;
mod generation_faults;
mod hidden;
mod mirrors;
mod pack;
mod parity;
mod sampler;
mod scheduler;
mod sessions;
mod streaming;
mod support;
mod synth;
mod tokenizer;
