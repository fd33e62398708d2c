//! Kernels and graphs against `reference`, on every backend.

mod chosen_ops;
mod compressed_ops;
mod draws;
mod emulator;
mod excerpt;
mod latent_attention;
mod matmul;
mod ops;
mod quant;
mod recurrent_ops;
mod support;
mod vector;
