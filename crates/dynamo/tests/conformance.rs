//! Dynamo's own tests of a worker's contract, with the demo model.

use clap::Parser as _;
use dynamo_backend_common::testing::run_conformance;
use moeflux_dynamo::{Arguments, Worker};

fn worker() -> Worker {
    let arguments = ["moeflux-dynamo", "demo", "--cpu", "--memory", "64MiB", "--threads", "1"];
    Worker::new(Arguments::parse_from(arguments)).expect("the demo model").0
}

#[tokio::test]
async fn the_conformance_kit_passes() {
    run_conformance(worker).await.expect("conformance");
}
