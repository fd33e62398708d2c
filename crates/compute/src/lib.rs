//! Kernels, quantisation formats and compute graphs for Mixture-of-Experts decoder models.
//!
//! This crate knows nothing of files or models. A model is recorded once as a graph of language-model
//! level operations; a backend compiles that graph and replays it for every batch of tokens.
// SIMD, FFI and shared scratch memory live here; the rest of the workspace denies `unsafe`.
#![allow(unsafe_code)]

pub mod backend;
pub mod cpu;
pub mod draw;
pub mod dtype;
pub mod error;
pub mod gpu;
pub mod graph;
mod kv_type;
pub mod profile;
pub mod quant;
pub mod reference;
pub mod tensor;
mod token_set;

pub use dtype::{BlockScale, DType, Half, MatrixScale, Zeros};
pub use error::Error;
pub use tensor::{Bytes, Tensor, TensorView};
pub use token_set::TokenSet;

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
