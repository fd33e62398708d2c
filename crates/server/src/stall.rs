//! [`StallLimit`]: closes a connection whose peer stops reading, so that it does not hold its place forever.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream on which a write that makes no progress for a while fails.
#[derive(Debug)]
pub(crate) struct StallLimit<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> StallLimit<S> {
    /// Lets writes to `stream` wait for `limit` at most.
    pub(crate) fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, stalled: None }
    }

    /// `outcome` of a write, or an error if writes have been waiting for too long.
    fn limit<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let limit = self.limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.limit(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(context, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(context, outcome)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    /// A peer that takes `at_once` bytes and nothing more for `pause`, for ever if there is none.
    struct Peer {
        at_once: usize,
        pause: Option<Duration>,
        waiting: Option<Pin<Box<Sleep>>>,
        taken: usize,
    }

    impl AsyncWrite for Peer {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            if let Some(waiting) = &mut self.waiting {
                std::task::ready!(waiting.as_mut().poll(context));
            } else if self.taken > 0 {
                return Poll::Pending;
            }
            self.waiting = self.pause.map(|pause| Box::pin(sleep(pause)));
            let n = bytes.len().min(self.at_once);
            self.taken += n;
            Poll::Ready(Ok(n))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Writes 100 bytes to a peer that takes 10 at once; says how many it took.
    fn write(pause: Option<Duration>, limit: Duration) -> (io::Result<()>, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let peer = Peer { at_once: 10, pause, waiting: None, taken: 0 };
        let mut limited = StallLimit::new(peer, limit);
        let outcome = runtime.expect("a runtime").block_on(async {
            while limited.stream.taken < 100 {
                let bytes = [0; 100];
                poll_fn(|context| Pin::new(&mut limited).poll_write(context, &bytes)).await?;
            }
            Ok(())
        });
        (outcome, limited.stream.taken)
    }

    #[test]
    fn a_peer_that_stops_reading_is_given_up() {
        let (outcome, taken) = write(None, Duration::from_millis(20));
        assert_eq!((outcome.map_err(|error| error.kind()), taken), (Err(io::ErrorKind::TimedOut), 10));
    }

    #[test]
    fn a_slow_peer_is_served() {
        let (outcome, taken) = write(Some(Duration::from_millis(2)), Duration::from_secs(60));
        assert!(outcome.is_ok() && taken == 100, "{outcome:?}, {taken}");
        // All of its pauses together may be longer than the limit.
        let (outcome, taken) = write(Some(Duration::from_millis(20)), Duration::from_millis(100));
        assert!(outcome.is_ok() && taken == 100, "{outcome:?}, {taken}");
    }
}
