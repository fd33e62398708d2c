//! Ctrl-C: stops an answer; a second one while it stops, or one where no editor reads, ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

/// Set by Ctrl-C while an answer is generated.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    generating: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Interrupt {
    pub fn install() -> Result<Self> {
        let interrupt = Self::default();
        let handler = interrupt.clone();
        ctrlc::set_handler(move || {
            let first =
                handler.generating.load(Ordering::SeqCst) && !handler.stop.swap(true, Ordering::SeqCst);
            if !first {
                std::process::exit(130);
            }
        })
        .context("cannot watch for Ctrl-C")?;
        Ok(interrupt)
    }

    /// An answer begins.
    pub fn begin(&self) {
        self.stop.store(false, Ordering::SeqCst);
        self.generating.store(true, Ordering::SeqCst);
    }

    /// Whether the answer is to end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// The answer is over; says whether it was stopped.
    pub fn end(&self) -> bool {
        self.generating.store(false, Ordering::SeqCst);
        self.stopped()
    }
}
