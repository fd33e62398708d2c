//! The CPU backend.

pub mod activations;
pub mod matmul;
pub mod pool;
pub mod simd;
pub mod vector;
