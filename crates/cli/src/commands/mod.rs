//! One file a command.

pub mod logits;
pub mod run;
pub mod synth;
