//! [`Intake`]: how much memory requests may take until their tokens are in the queue.
//!
//! A body counts while it arrives, and several times while it is parsed, rendered and tokenised. What finds no room waits,
//! and after a while is told to come back. Clients that send slowly hold only what they send: what is made of bodies has
//! room of its own.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::log::Tally;

/// Bytes that are counted as one.
const UNIT: usize = 4 << 10;
/// Bytes that are made of a byte of a request, at most at a time: values, messages as templates see them, text, words.
const MADE: usize = 8;
/// The part for bodies that arrive.
const ARRIVING: usize = 3;

/// Memory for requests.
#[derive(Debug)]
pub(crate) struct Intake {
    arriving: Pool,
    preparing: Pool,
}

/// A request's memory; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    _permit: OwnedSemaphorePermit,
    /// What is counted of the request.
    pub(crate) tally: Arc<Tally>,
}

#[derive(Debug)]
struct Pool {
    free: Arc<Semaphore>,
    units: usize,
}

impl Pool {
    fn new(bytes: usize) -> Self {
        let units = (bytes / UNIT).clamp(1, u32::MAX as usize);
        Self { free: Arc::new(Semaphore::new(units)), units }
    }

    /// Waits for room for `bytes`, or if there never is so much, until there is nothing else.
    async fn take(&self, bytes: usize, patience: Duration) -> Result<Room, ApiError> {
        let units = bytes.div_ceil(UNIT).clamp(1, self.units) as u32;
        match tokio::time::timeout(patience, Arc::clone(&self.free).acquire_many_owned(units)).await {
            Ok(Ok(permit)) => Ok(Room { _permit: permit, tally: Arc::default() }),
            _ => Err(ApiError {
                retry_after: Some(Duration::from_secs(5)),
                code: Some("out_of_memory"),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too many large requests at once")
            }),
        }
    }
}

impl Intake {
    /// With so many bytes for all requests.
    pub(crate) fn new(bytes: usize) -> Self {
        let arriving = bytes / ARRIVING;
        Self { arriving: Pool::new(arriving), preparing: Pool::new(bytes - arriving) }
    }

    /// Room for a body of `bytes` while it arrives.
    ///
    /// # Errors
    /// 429 if there is none for as long as `patience`.
    pub(crate) async fn arriving(&self, bytes: usize, patience: Duration) -> Result<Room, ApiError> {
        self.arriving.take(bytes, patience).await
    }

    /// Room for what is made of a body of `bytes`.
    ///
    /// # Errors
    /// As [`Intake::arriving`].
    pub(crate) async fn preparing(&self, bytes: usize, patience: Duration) -> Result<Room, ApiError> {
        self.preparing.take(bytes.saturating_mul(MADE), patience).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_waits_then_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (intake, little) = (Arc::new(Intake::new(3 << 20)), Duration::from_millis(20));
            // More than there is takes everything.
            let all = intake.preparing(1 << 20, little).await.unwrap();
            let refused = intake.preparing(1, little).await.unwrap_err();
            assert_eq!((refused.status.as_u16(), refused.retry_after.is_some()), (429, true));
            // Bodies that arrive have room of their own.
            let half = intake.arriving(512 << 10, little).await.unwrap();
            assert!(intake.arriving(600 << 10, little).await.is_err());
            let theirs = Arc::clone(&intake);
            let waiting =
                tokio::spawn(async move { theirs.preparing(1, Duration::from_secs(10)).await.is_ok() });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            drop((all, half));
            assert!(waiting.await.unwrap());
            intake.arriving(1 << 20, little).await.unwrap();
        });
    }
}
