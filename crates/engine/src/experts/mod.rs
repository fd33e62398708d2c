//! Routed experts: where they are on disk ([`ExpertStore`]), how many fit in memory ([`slots`]), which are cached ([`cache`]),
//! which are evicted ([`PolicyKind`]) and prefetched ([`Prefetch`]), how requests are recorded and replayed ([`trace`],
//! [`replay`]) and how often each expert was used ([`ExpertUse`]).

pub mod cache;
mod copies;
mod policy;
mod prefetch;
pub(crate) mod probe;
pub mod replay;
mod residency;
pub mod routing;
pub mod slots;
mod stock;
mod store;
pub mod trace;
pub(crate) mod usage;

pub use cache::{CacheOptions, CacheStats, ExpertCache};
pub use policy::PolicyKind;
pub use prefetch::Prefetch;
pub use slots::SlotPlan;
pub use store::{ExpertForm, ExpertLocation, ExpertStore};
pub use usage::ExpertUse;
