//! The served interfaces over real connections.

mod api;
mod bad_input;
mod schemas;
mod structured;
mod support;
