//! Routed experts: where they are on disk ([`store`]), how many fit in memory ([`slots`]), which are cached ([`cache`]),
//! which are evicted ([`policy`]) and prefetched ([`prefetch`]), how requests are recorded and replayed ([`trace`],
//! [`replay`]) and how often each expert was used ([`usage`]).

pub mod cache;
mod copies;
pub mod policy;
pub mod prefetch;
pub mod probe;
pub mod replay;
mod residency;
pub mod routing;
pub mod slots;
mod stock;
pub mod store;
pub mod trace;
pub mod usage;

pub use cache::{CacheOptions, CacheStats, ExpertCache};
pub use policy::PolicyKind;
pub use prefetch::Prefetch;
pub use slots::SlotPlan;
pub use store::{ExpertForm, ExpertLocation, ExpertStore};
pub use usage::ExpertUse;
