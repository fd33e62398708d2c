//! What tests of kernels share: seeded values and weights, graphs of one operation, devices.

pub(crate) mod devices;
pub(crate) mod one_op;
pub(crate) mod random;
pub(crate) mod weights;
