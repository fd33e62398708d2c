//! `moeflux-dynamo`: one model as a worker of NVIDIA Dynamo.

use std::sync::Arc;

use clap::Parser;
use moeflux_dynamo::{Arguments, Worker};

fn main() -> anyhow::Result<()> {
    let (worker, config) = Worker::new(Arguments::parse())?;
    dynamo_backend_common::run(Arc::new(worker), config)
}
