//! What tests of kernels share: seeded values and weights, devices.

pub(crate) mod devices;
pub(crate) mod random;
pub(crate) mod weights;
