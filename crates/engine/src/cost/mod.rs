//! Predicts tokens per second of a model on this machine, for any memory budget, before anything is loaded or downloaded.
//!
//! [`Plan`] does all of it for a model.
//!
//! A prediction has three parts. *Computing* is measured with the real kernels on random weights: one layer of each kind is
//! run briefly ([`measure`]), for one token and for a prompt. *Reading* is what a token needs and memory does not hold
//! ([`Popularity`]), at the speed of a probe of the disk ([`Disk`]). How the two overlap follows the engine
//! ([`CostModel::predict`]): a layer's misses are read while its hits are computed, and guessed ones already while the
//! preceding layer is.
//!
//! The price of measuring layers instead of adding up operations is about two seconds; in return it accounts for every
//! kernel, cache and thread, which a table of rates would have to know.

mod disk;
mod layers;
mod memory;
mod plan;
mod popularity;
mod predict;
mod random_weights;

pub use disk::Disk;
pub use layers::{LayerTimes, MeasureOptions, Measured, measure};
pub use memory::memory_bandwidth;
pub use plan::{
    DiskProbe, Machine, Plan, PlanOptions, PlanProgress, PlanRow, PlannedGpu, PlannedMemory, PlannedModel,
    tokens_per_second,
};
pub use popularity::Popularity;
pub use predict::{CostModel, Layer, Link, Prediction, Prompt, Routed};
