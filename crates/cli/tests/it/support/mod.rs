//! What several tests of the command share.

pub mod hub;
pub mod server;
