//! The server's routes within another program, under a path of its own.
//!
//! `cargo run --release -p moeflux-server --example embed_router -- models/demo/demo.gguf`, then
//! `curl http://127.0.0.1:8090/model/v1/models`

use std::error::Error;
use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use moeflux::{OpenOptions, Scheduler, SchedulerOptions};
use moeflux_server::{Limits, ServerOptions, router, serve};

fn main() -> Result<(), Box<dyn Error>> {
    let model = std::env::args().nth(1).ok_or("expected the path of a model")?;
    let model = OpenOptions::new().sequences(4).open(model)?;
    let scheduler = Arc::new(Scheduler::start(model, SchedulerOptions::default())?);

    let routes = Router::new()
        .route("/", get(async || "ask /model/v1/chat/completions"))
        .nest("/model", router(Arc::clone(&scheduler), ServerOptions::default()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:8090").await?;
        eprintln!("http://{}", listener.local_addr()?);
        let stop = async { drop(tokio::signal::ctrl_c().await) };
        serve(listener, routes, Limits::default(), stop, || scheduler.abandon()).await;
        Ok(())
    })
}
