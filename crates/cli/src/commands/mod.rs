//! One file a command.

pub mod bench;
pub mod devices;
pub mod inspect;
pub mod logits;
pub mod pack;
pub mod perplexity;
pub mod plan;
pub mod pull;
pub mod replay;
pub mod run;
pub mod serve;
pub mod synth;
pub mod trace;
