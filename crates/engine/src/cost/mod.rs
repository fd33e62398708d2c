//! What a model will cost on a machine: tokens per second for any memory budget, before anything is loaded or downloaded.
//!
//! Three things are put together. *Computing* is measured with the real kernels on random weights: each kind of layer that
//! the model has is run for a moment ([`measure`]), for one token and for a prompt. *Reading* is what a token needs and
//! memory does not hold ([`Popularity`]) at the speed of a probe of the disk ([`Disk`]). How the two overlap is what the
//! engine does ([`CostModel::predict`]): a layer's misses are read while its hits are computed, and what a guess has named
//! already while the layer before it is.
//!
//! The price of measuring layers instead of adding up operations is about two seconds; it knows of every kernel, cache and
//! thread what a table of rates would have to be told.

mod disk;
mod layers;
mod memory;
mod popularity;
mod predict;
mod random_weights;

pub use disk::Disk;
pub use layers::{LayerTimes, MeasureOptions, Measured, measure};
pub use memory::memory_bandwidth;
pub use popularity::Popularity;
pub use predict::{CostModel, Layer, Link, Prediction, Prompt, Routed};
