//! What several tests of the command share.

// Every test binary that includes this module uses a part of it.
#![allow(dead_code)]

pub mod hub;
