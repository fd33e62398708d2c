//! Graphs on GPUs: what CUDA, Metal and the emulator share.
//!
//! A graph is lowered to lists of [`Dispatch`]es, and a [`Device`] runs them. Kernels are written once, in the dialect
//! of `kernels/dialect.h`. Executors know of buffers, kernels and their order, and nothing of models.
//!
//! # Conventions between lowering, kernels and executors
//! - A kernel is found by its unit (the file of `kernels/` it is in) and its name. Kernels of one body for many weight
//!   encodings are instantiated in their unit by macros and named `<operation>_<encoding>`: `matvec_q4_k`.
//! - Its parameters are its buffers, in order, then its constants: 32-bit words, in the order of the fields of its
//!   constants struct (see [`constants`]). CUDA passes the struct by value as the last
//!   parameter; its size is that of [`Dispatch::constants`].
//! - A buffer that a kernel has no use for is bound to any other buffer.
//! - No buffer that a dispatch writes overlaps another of its buffers.
//! - Groups are one-dimensional: a multiple of 32, at most 256 threads. Threadgroup memory is declared in kernels.
//! - What changes from batch to batch (tokens, positions, page tables, rotation angles) is in device buffers, so that a
//!   recorded list can run for every token.
//! - Dispatches run in order; one that is [`Order::Beside`] may run at the same time as the one before it, one that is
//!   [`Order::Aside`] at the same time as those after it.

mod arguments;
mod backend;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod device;
mod divided;
#[cfg(feature = "emulator")]
pub mod emulator;
mod encodings;
pub mod kernels;
mod lower;
mod memory;
#[cfg(target_os = "macos")]
pub mod metal;
mod options;
mod pipeline;
mod processor;
mod run;
mod steps;
mod supported;

pub use backend::{GpuBackend, GpuDevice};
pub use device::{BufferId, Device, DeviceInfo, Dispatch, Grid, Order, RecordingId, Slice, View, constants};
pub use options::{GpuOptions, ProcessorShare, Split};
pub use processor::computes_experts;
