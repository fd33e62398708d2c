//! The served interfaces over real connections.

mod api;
mod bad_input;
mod embeddings;
mod fields;
mod functions;
mod kv_events;
mod listening;
mod ollama;
mod pictures;

mod models;
mod probes;
mod prompts;
mod responses;
mod schemas;
mod structured;
mod support;
