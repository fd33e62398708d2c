//! Running a router on a socket: limits on time and connections, and a graceful shutdown.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
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

/// Serves `router` on `listener` until `shutdown` is ready; then takes no more connections and waits for those that
/// there are. Says whether all of them ended in time.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    shutdown: impl Future<Output = ()>,
) -> bool {
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(limits.connections));
    let mut shutdown = std::pin::pin!(shutdown);
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout);
    loop {
        let Some(permit) = unless(&mut shutdown, Arc::clone(&permits).acquire_owned()).await else { break };
        let Ok(permit) = permit else { break };
        let Some(accepted) = unless(&mut shutdown, listener.accept()).await else { break };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(_) => {
                // Out of file descriptors, as a rule: that passes.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are sent as they come.
        let _ = stream.set_nodelay(true);
        let stream = TokioIo::new(StallLimit::new(stream, limits.stall_timeout));
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(builder.serve_connection(stream, service));
        tokio::spawn(async move {
            // A client that breaks off is none of our errors.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    tokio::time::timeout(limits.drain, graceful.shutdown()).await.is_ok()
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
