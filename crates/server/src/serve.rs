//! Running a router on a socket: limits on time and connections, and a graceful shutdown.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1::Builder;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::stall::StallLimit;

/// What a connection may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most time until a request's headers are complete.
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

/// Connections at a time that learn, after `shutdown`, that the server ends.
const LATE_CONNECTIONS: usize = 16;
/// For clients to be told that their answers were given up.
const FAREWELL: Duration = Duration::from_secs(2);

/// Serves `router` on `listener` until `shutdown` is ready; then waits for the connections that there are, while others
/// are still told how things stand. What has not ended in time is given up by `abandon`. Says whether all ended in time.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    shutdown: impl Future<Output = ()>,
    abandon: impl FnOnce(),
) -> bool {
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(limits.connections));
    let mut shutdown = std::pin::pin!(shutdown);
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout);
    loop {
        let Some(permit) = unless(&mut shutdown, Arc::clone(&permits).acquire_owned()).await else { break };
        let Ok(permit) = permit else { break };
        let Some(accepted) = unless(&mut shutdown, listener.accept()).await else { break };
        let Some(stream) = usable(accepted, limits).await else { continue };
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(builder.serve_connection(stream, service));
        tokio::spawn(async move {
            // A client that breaks off is none of our errors.
            let _ = connection.await;
            drop(permit);
        });
    }
    builder.keep_alive(false);
    let late = tokio::spawn(serve_late(listener, router, limits, builder));
    let mut ended = std::pin::pin!(graceful.shutdown());
    let in_time = tokio::time::timeout(limits.drain, &mut ended).await.is_ok();
    if !in_time {
        abandon();
        let _ = tokio::time::timeout(FAREWELL, ended).await;
    }
    late.abort();
    in_time
}

/// Answers those that come while the server ends, one request a connection.
async fn serve_late(listener: TcpListener, router: Router, limits: Limits, builder: Builder) {
    let permits = Arc::new(Semaphore::new(LATE_CONNECTIONS));
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        let Some(stream) = usable(listener.accept().await, limits).await else { continue };
        let connection = builder.serve_connection(stream, TowerToHyperService::new(router.clone()));
        tokio::spawn(async move {
            let _ = connection.await;
            drop(permit);
        });
    }
}

/// A connection that was accepted.
async fn usable(
    accepted: std::io::Result<(TcpStream, std::net::SocketAddr)>,
    limits: Limits,
) -> Option<TokioIo<StallLimit<TcpStream>>> {
    let Ok((stream, _)) = accepted else {
        // Out of file descriptors, as a rule: that passes.
        tokio::time::sleep(Duration::from_millis(50)).await;
        return None;
    };
    // Tokens are sent as they come.
    let _ = stream.set_nodelay(true);
    Some(TokioIo::new(StallLimit::new(stream, limits.stall_timeout)))
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
