//! Checkpoints that are wrong in one place each, for every family and format: an error that names the file and what is
//! wrong in it, or a run that ends; never a panic, a hang or memory beyond the budget.
//!
//! Damage to headers is the subject of `checkpoint` and `header_mutations`, failing reads that of `faults`.

mod config;
mod editor;
mod groups;
mod metadata;
mod odd_keys;
mod supervisor;
mod tensors;
mod values;
mod vocabulary;
