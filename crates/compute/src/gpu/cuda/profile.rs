//! How long kernels take, by events around each of them.

use std::collections::HashMap;
use std::time::Duration;

use super::driver::{Driver, Event, Stream, call};
use crate::Result;
use crate::backend::KernelTime;
use crate::gpu::device::Dispatch;

/// Events of kernels that have been queued.
#[derive(Default)]
pub(super) struct EventProfile {
    spans: Vec<(String, Event, Event)>,
    start: Option<Event>,
}

fn mark(driver: &Driver, stream: Stream) -> Result<Event> {
    let mut event = Event::NULL;
    call!(driver, event_create(&mut event, 0))?;
    call!(driver, event_record(event, stream))?;
    Ok(event)
}

impl EventProfile {
    pub(super) fn before(&mut self, driver: &Driver, stream: Stream) -> Result<()> {
        self.start = Some(mark(driver, stream)?);
        Ok(())
    }

    pub(super) fn after(&mut self, driver: &Driver, stream: Stream, dispatch: &Dispatch) -> Result<()> {
        if let Some(start) = self.start.take() {
            self.spans.push((dispatch.kernel.to_string(), start, mark(driver, stream)?));
        }
        Ok(())
    }

    /// Sums by kernel, longest first. All queued work has ended.
    pub(super) fn finish(self, driver: &Driver) -> Result<Vec<KernelTime>> {
        let mut sums: HashMap<String, (u64, f64)> = HashMap::new();
        for (kernel, start, end) in self.spans {
            let mut milliseconds = 0.0f32;
            call!(driver, event_elapsed(&mut milliseconds, start, end))?;
            call!(driver, event_destroy(start))?;
            call!(driver, event_destroy(end))?;
            let sum = sums.entry(kernel).or_default();
            sum.0 += 1;
            sum.1 += f64::from(milliseconds) / 1e3;
        }
        let time =
            |(kernel, (runs, seconds))| KernelTime { kernel, runs, time: Duration::from_secs_f64(seconds) };
        let mut times: Vec<KernelTime> = sums.into_iter().map(time).collect();
        times.sort_by_key(|t| std::cmp::Reverse(t.time));
        Ok(times)
    }
}
