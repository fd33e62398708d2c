//! The served interfaces over real connections.

mod api;
mod bad_input;
mod structured;
mod support;
