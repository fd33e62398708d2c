//! One file per command.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod devices;
pub mod families;
pub mod inspect;
pub mod list;
pub mod logits;
pub mod man;
pub mod pack;
pub mod perplexity;
pub mod plan;
pub mod pull;
pub mod replay;
pub mod rm;
pub mod run;
pub mod serve;
pub mod synth;
pub mod top;
pub mod trace;
