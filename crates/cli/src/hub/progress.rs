//! [`Progress`]: how far a download is, on the error stream.
//!
//! A bar on a terminal; elsewhere, as in a log, a line at the beginning, one every half minute, and one at the end. Bytes
//! count when they arrive rather than when they are written, since files are written in order and up to eight ranges are
//! on their way; those of a request that fails are taken back.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use moeflux::error::size;

/// How often lines are written.
const EVERY: Duration = Duration::from_secs(30);
/// How often a bar is drawn when nothing arrives, so that it shows the speed falling.
const REDRAW: Duration = Duration::from_millis(500);

/// Where a download's progress is shown.
#[derive(Debug)]
pub enum Progress {
    Hidden,
    Bar(ProgressBar),
    Lines(Mutex<Lines>),
}

/// What of a download is written to a log.
#[derive(Debug)]
pub struct Lines {
    name: String,
    total: u64,
    /// What was there before it began.
    there: u64,
    arrived: u64,
    began: Instant,
    told: Instant,
}

impl Progress {
    /// Of `files` files of the model `name` with `total` bytes, of which an earlier download has left `there`.
    pub fn new(name: String, files: usize, total: u64, there: u64) -> Result<Self> {
        if !std::io::stderr().is_terminal() {
            let lines = Lines::new(name, total, there, Instant::now());
            eprintln!("{}", lines.first(files));
            return Ok(Self::Lines(Mutex::new(lines)));
        }
        // The name takes what the figures leave of the line.
        let template = "{wide_msg} {bar:12} {bytes}/{total_bytes} {binary_bytes_per_sec}{left}";
        let style = ProgressStyle::with_template(template)?.with_key("left", left);
        let bar = ProgressBar::new(total).with_style(style);
        bar.set_position(there);
        bar.reset_eta();
        bar.enable_steady_tick(REDRAW);
        Ok(Self::Bar(bar))
    }

    /// The file whose bytes come now.
    pub fn file(&self, path: &str) {
        if let Self::Bar(bar) = self {
            bar.set_message(path.to_owned());
        }
    }

    /// Counts what one request brings.
    pub fn request(&self) -> Arriving<'_> {
        Arriving { progress: self, bytes: 0 }
    }

    fn add(&self, bytes: u64) {
        match self {
            Self::Hidden => {}
            Self::Bar(bar) => bar.inc(bytes),
            Self::Lines(lines) => {
                let mut lines = lines.lock().expect("no thread panics with the lock");
                lines.arrived += bytes;
                if let Some(line) = lines.due(Instant::now()) {
                    eprintln!("{line}");
                }
            }
        }
    }

    fn take_back(&self, bytes: u64) {
        match self {
            Self::Hidden => {}
            Self::Bar(bar) => bar.dec(bytes),
            Self::Lines(lines) => lines.lock().expect("no thread panics with the lock").arrived -= bytes,
        }
    }

    /// Everything is there.
    pub fn finish(&self) {
        match self {
            Self::Hidden => {}
            Self::Bar(bar) => bar.finish_and_clear(),
            Self::Lines(lines) => {
                let lines = lines.lock().expect("no thread panics with the lock");
                eprintln!("{}", lines.last(Instant::now()));
            }
        }
    }
}

/// Time that is left, as soon as there is a speed.
fn left(state: &ProgressState, out: &mut dyn Write) {
    if state.per_sec() >= 1.0 {
        let _ = write!(out, " {:#} left", HumanDuration(state.eta()));
    }
}

/// Bytes of a request; they do not count unless [`Arriving::keep`] is called in the end.
#[derive(Debug)]
pub struct Arriving<'a> {
    progress: &'a Progress,
    bytes: u64,
}

impl Arriving<'_> {
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.progress.add(bytes);
    }

    pub fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.progress.take_back(self.bytes);
    }
}

impl Lines {
    fn new(name: String, total: u64, there: u64, now: Instant) -> Self {
        Self { name, total, there, arrived: 0, began: now, told: now }
    }

    fn first(&self, files: usize) -> String {
        let Self { name, total, there, .. } = self;
        let files = if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
        let there =
            if *there > 0 { format!(", {} of it there already", size(*there)) } else { String::new() };
        format!("{name}: downloading {files}, {}{there}", size(*total))
    }

    /// A line if it is time for one.
    fn due(&mut self, now: Instant) -> Option<String> {
        if now.duration_since(self.told) < EVERY {
            return None;
        }
        self.told = now;
        let Self { name, total, there, arrived, .. } = self;
        let per_second = *arrived as f64 / now.duration_since(self.began).as_secs_f64();
        let left = total.saturating_sub(*there + *arrived) as f64 / per_second.max(1.0);
        let left = HumanDuration(Duration::from_secs_f64(left));
        let (done, total) = (size(*there + *arrived), size(*total));
        Some(format!("{name}: {done} of {total}, {}/s, {left:#} left", size(per_second as u64)))
    }

    fn last(&self, now: Instant) -> String {
        let took = HumanDuration(now.duration_since(self.began));
        format!("{}: {} downloaded in {took:#}", self.name, size(self.arrived))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_a_log_should() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        let mut lines = Lines::new("org/model".into(), 10 << 30, 1 << 30, began);
        assert_eq!(lines.first(3), "org/model: downloading 3 files, 10.0 GiB, 1.0 GiB of it there already");
        lines.arrived = 3 << 30;
        assert_eq!(lines.due(after(29)), None);
        let line = lines.due(after(30)).unwrap();
        assert_eq!(line, "org/model: 4.0 GiB of 10.0 GiB, 102 MiB/s, 60s left");
        assert_eq!(lines.due(after(31)), None, "one every half minute");
        lines.arrived = 9 << 30;
        assert_eq!(lines.last(after(95)), "org/model: 9.0 GiB downloaded in 2m");
        assert_eq!(Lines::new("a/b".into(), 5, 0, began).first(1), "a/b: downloading 1 file, 5 B");
    }

    #[test]
    fn what_a_failed_request_brought_does_not_count() {
        let lines = Lines::new("a/b".into(), 100, 0, Instant::now());
        let progress = Progress::Lines(Mutex::new(lines));
        let mut failed = progress.request();
        failed.add(10);
        let mut kept = progress.request();
        kept.add(5);
        kept.keep();
        drop(failed);
        let Progress::Lines(lines) = progress else { unreachable!() };
        assert_eq!(lines.into_inner().unwrap().arrived, 5);
    }
}
