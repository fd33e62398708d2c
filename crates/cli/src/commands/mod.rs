//! One file a command.

pub mod bench;
pub mod devices;
pub mod inspect;
pub mod logits;
pub mod perplexity;
pub mod replay;
pub mod run;
pub mod synth;
pub mod trace;
