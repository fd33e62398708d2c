//! Routed experts: where they are on disk ([`store`]), how many fit memory ([`slots`]), which of them are there
//! ([`cache`]) and which give way ([`policy`]), which are read ahead ([`prefetch`]), how requests are recorded and
//! replayed ([`trace`], [`replay`]) and how often each was needed ([`usage`]).

pub mod cache;
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
