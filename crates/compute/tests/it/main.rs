//! Kernels and graphs against `reference`, on every backend.

mod draws;
mod emulator;
mod excerpt;
mod matmul;
mod ops;
mod quant;
mod support;
mod vector;
