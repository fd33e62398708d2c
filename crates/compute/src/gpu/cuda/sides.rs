//! Streams for dispatches that are [`Order::Beside`](crate::gpu::device::Order::Beside) others in a list that is not recorded.

use super::NO_TIMING;
use super::driver::{Driver, Event, Stream, call};
use crate::Result;

/// Streams, which more dispatches than that share.
const SIDES: usize = 2;
const NON_BLOCKING: std::ffi::c_uint = 1;

/// Streams beside the one that runs everything in order.
pub(super) struct Sides {
    /// Where the first of the dispatches beside each other begins.
    begun: Event,
    sides: [(Stream, Event); SIDES],
    /// Dispatches on them since then.
    queued: usize,
}

impl Sides {
    /// The GPU's context is the calling thread's, here and in all others.
    pub(super) fn new(driver: &Driver) -> Result<Self> {
        let mut new = Self { begun: Event::NULL, sides: [(Stream::NULL, Event::NULL); SIDES], queued: 0 };
        call!(driver, event_create(&mut new.begun, NO_TIMING))?;
        for (stream, ended) in &mut new.sides {
            call!(driver, stream_create(stream, NON_BLOCKING))?;
            call!(driver, event_create(ended, NO_TIMING))?;
        }
        Ok(new)
    }

    /// What is queued on sides from here on comes after all that `stream` has.
    pub(super) fn begin(&self, driver: &Driver, stream: Stream) -> Result<()> {
        call!(driver, event_record(self.begun, stream))
    }

    /// The side for the next dispatch.
    pub(super) fn next(&mut self, driver: &Driver) -> Result<Stream> {
        let (stream, _) = self.sides[self.queued % SIDES];
        if self.queued < SIDES {
            call!(driver, stream_wait(stream, self.begun, 0))?;
        }
        self.queued += 1;
        Ok(stream)
    }

    /// What is queued on `stream` from here on comes after all that sides have.
    pub(super) fn join(&mut self, driver: &Driver, stream: Stream) -> Result<()> {
        for (side, ended) in &self.sides[..self.queued.min(SIDES)] {
            call!(driver, event_record(*ended, *side))?;
            call!(driver, stream_wait(stream, *ended, 0))?;
        }
        self.queued = 0;
        Ok(())
    }

    pub(super) fn release(&self, driver: &Driver) {
        let _ = call!(driver, event_destroy(self.begun));
        for (stream, ended) in self.sides {
            let _ = call!(driver, event_destroy(ended));
            let _ = call!(driver, stream_destroy(stream));
        }
    }
}
