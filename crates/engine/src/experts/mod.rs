//! Routed experts: where they are on disk ([`store`]) and which of them are in memory ([`cache`]).

pub mod cache;
pub mod store;

pub use cache::{CacheStats, ExpertCache};
pub use store::{ExpertForm, ExpertLocation, ExpertStore};
