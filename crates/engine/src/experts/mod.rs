//! Routed experts: where they are on disk ([`store`]), which of them are in memory ([`cache`]) and in use ([`usage`]).

pub mod cache;
pub mod store;
pub mod usage;

pub use cache::{CacheStats, ExpertCache};
pub use store::{ExpertForm, ExpertLocation, ExpertStore};
pub use usage::ExpertUse;
