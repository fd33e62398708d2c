//! Running a router on a [`Listener`]: limits on time and connections, and a graceful shutdown.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, watch};

use crate::listener::{Incoming, Listener};

/// What a connection may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most time until a request's headers are complete, and before that until TLS has begun.
    pub header_timeout: Duration,
    /// Most time that a client may leave what it is sent unread.
    pub stall_timeout: Duration,
    /// Maximum simultaneous connections; more wait.
    pub connections: usize,
    /// Most time for answers to end after `shutdown`.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
            connections: 1024,
            drain: Duration::from_secs(30),
        }
    }
}

/// Bytes that a connection reads ahead. Headers that have not ended by then get status 431.
const BUFFER: usize = 32 << 10;
/// Connections at a time that learn, after `shutdown`, that the server ends.
const LATE_CONNECTIONS: usize = 16;
/// For clients to be told that their answers were given up.
const FAREWELL: Duration = Duration::from_secs(2);

/// Serves `router` on `listener` until `shutdown` is ready; then waits for the connections that there are, while others
/// are still told how things stand. What has not ended in time is given up by `abandon`. Says whether all ended in time.
/// The listener is closed when this returns.
pub async fn serve(
    listener: impl Into<Listener>,
    router: Router,
    limits: Limits,
    shutdown: impl Future<Output = ()>,
    abandon: impl FnOnce(),
) -> bool {
    let listener = listener.into();
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(limits.connections));
    let (ending, _) = watch::channel(());
    let mut shutdown = std::pin::pin!(shutdown);
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_buf_size(BUFFER);
    loop {
        let Some(permit) = unless(&mut shutdown, Arc::clone(&permits).acquire_owned()).await else { break };
        let Ok(permit) = permit else { break };
        let Some(accepted) = unless(&mut shutdown, listener.accept(limits)).await else { break };
        let Some(incoming) = usable(accepted).await else { continue };
        let (watcher, mut ended) = (graceful.watcher(), ending.subscribe());
        let (builder, service) = (builder.clone(), TowerToHyperService::new(router.clone()));
        tokio::spawn(async move {
            // A client that has asked nothing yet is not waited for.
            let mut ended = std::pin::pin!(async { drop(ended.changed().await) });
            if let Some(Some(stream)) = unless(&mut ended, incoming.open()).await {
                // A client that breaks off is none of our errors.
                let _ = watcher.watch(builder.serve_connection(TokioIo::new(stream), service)).await;
            }
            drop(permit);
        });
    }
    drop(ending);
    builder.keep_alive(false);
    let late = tokio::spawn(serve_late(listener, router, limits, builder));
    let mut ended = std::pin::pin!(graceful.shutdown());
    let in_time = tokio::time::timeout(limits.drain, &mut ended).await.is_ok();
    if !in_time {
        abandon();
        let _ = tokio::time::timeout(FAREWELL, ended).await;
    }
    late.abort();
    let _ = late.await;
    in_time
}

/// Answers those that come while the server ends, one request a connection.
async fn serve_late(listener: Listener, router: Router, limits: Limits, builder: Builder) {
    let permits = Arc::new(Semaphore::new(LATE_CONNECTIONS));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        let Some(incoming) = usable(listener.accept(limits).await).await else { continue };
        let (builder, service) = (builder.clone(), TowerToHyperService::new(router.clone()));
        tokio::spawn(async move {
            if let Some(stream) = incoming.open().await {
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            }
            drop(permit);
        });
    }
}

/// A connection that was accepted.
async fn usable(accepted: std::io::Result<Incoming>) -> Option<Incoming> {
    if accepted.is_err() {
        // Out of file descriptors, as a rule: that passes.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    accepted.ok()
}

/// What `work` gives, unless `stop` is ready first.
async fn unless<T>(
    stop: &mut (impl Future<Output = ()> + Unpin),
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(|context| {
        use std::task::Poll;
        if std::pin::Pin::new(&mut *stop).poll(context).is_ready() {
            return Poll::Ready(None);
        }
        work.as_mut().poll(context).map(Some)
    })
    .await
}
