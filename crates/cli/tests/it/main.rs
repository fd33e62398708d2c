//! The `moeflux` program as a user runs it.

mod chat;
mod demo;
mod documentation;
mod errors;
mod hub;
mod packaging;
mod perplexity;
mod plan;
mod serve;
mod streaming;
mod support;
mod synth;
mod top;
