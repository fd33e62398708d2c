//! What `plan` measures of the machine.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::Options;
use moeflux::cost::{Disk, Measured};
use moeflux::io::file::ReadMode;
use moeflux::io::queue;
use moeflux_compute::graph::ExpertSetId;

use super::subject::Subject;
use crate::hub::Settings;

/// Device memory that the engine leaves alone.
const MARGIN: u64 = 512 << 20;

/// The GPU that would compute.
#[derive(Debug)]
pub struct Gpu {
    pub name: String,
    /// Bytes of its memory that are free.
    pub free: u64,
}

impl Gpu {
    /// Bytes that the engine would use.
    pub fn usable(&self) -> u64 {
        self.free.saturating_sub(MARGIN)
    }
}

/// All of it.
pub struct Machine {
    /// Compute backend.
    pub backend: String,
    /// Bytes per second that its threads read from memory.
    pub bandwidth: f64,
    /// What computing takes.
    pub measured: Measured,
    pub disk: DiskProbe,
    pub gpu: Option<Gpu>,
    /// Part of the processors' time that other programs took before measuring, 0..=1, if it was worth telling.
    pub busy: Option<f64>,
}

/// For how long it is looked whether processors are busy.
const LOOK: Duration = Duration::from_millis(200);
/// Less than this part of their time changes little.
const BUSY: f64 = 0.2;

/// The part of the processors' time that programs take now, if it changes what is measured.
pub fn busy() -> Option<f64> {
    let before = processor_times()?;
    std::thread::sleep(LOOK);
    let after = processor_times()?;
    let (idle, all) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    let part = 1.0 - idle as f64 / all.max(1) as f64;
    (all > 0 && part >= BUSY).then_some(part)
}

/// Idle time of all processors and time in all since the machine started, in the system's units.
fn processor_times() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    times(text.lines().next()?)
}

/// The same, of the first line of `/proc/stat`.
fn times(line: &str) -> Option<(u64, u64)> {
    let fields = line.strip_prefix("cpu ")?.split_whitespace().map(|field| field.parse().ok());
    // What guests take is counted as user time already.
    let fields: Vec<u64> = fields.take(8).collect::<Option<_>>()?;
    Some((fields.get(3)? + fields.get(4)?, fields.iter().sum()))
}

/// How experts would be read.
#[derive(Debug, Clone, Copy)]
pub struct DiskProbe {
    pub disk: Disk,
    pub mode: ReadMode,
    /// Whether it was tried on the model's own files.
    pub on_model: bool,
}

/// Bytes of the processor's last cache, or what most have.
pub fn cache_bytes() -> u64 {
    let of = |index: usize| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size"));
        Some(text.ok()?.trim().strip_suffix('K')?.parse::<u64>().ok()? << 10)
    };
    (0..5).filter_map(of).max().unwrap_or(32 << 20)
}

/// Tries the disk of `subject`, or that of the cache that it would be downloaded to, beside computing with `threads`.
pub fn disk(subject: &Subject, threads: usize) -> Result<DiskProbe> {
    let options = Options::default();
    let (_, mut queue) =
        queue::open(options.read_queue, options.read_depth).context("cannot open a queue to read")?;
    let experts = &subject.model().experts;
    if subject.is_on_disk()
        && let Some((disk, mode)) = Disk::of_store(experts, &mut *queue, None, threads)
    {
        return Ok(DiskProbe { disk, mode, on_model: true });
    }
    let expert_bytes = (0..experts.sets()).map(|set| experts.expert_bytes(ExpertSetId(set))).max();
    let folder = existing(Settings::from_environment().cache);
    let tried = Disk::of_folder(&folder, &mut *queue, expert_bytes.unwrap_or(1 << 20), threads);
    // A cache that cannot be written to is no reason not to say anything.
    let disk = match tried {
        Ok(disk) => disk,
        Err(_) => {
            Disk::of_folder(&std::env::temp_dir(), &mut *queue, expert_bytes.unwrap_or(1 << 20), threads)?
        }
    };
    Ok(DiskProbe { disk, mode: ReadMode::Direct, on_model: false })
}

/// The folder, or the nearest above it that there is.
fn existing(mut folder: PathBuf) -> PathBuf {
    while !folder.is_dir() && folder.pop() {}
    folder
}

/// A bar of a thousand steps.
pub fn bar(what: &'static str) -> Result<ProgressBar> {
    let bar = ProgressBar::new(1000);
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar}")?);
    bar.set_message(what);
    bar.tick();
    Ok(bar)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_idle() {
        assert_eq!(times("cpu  10 1 5 80 4 0 0 0 7 0"), Some((84, 100)));
        assert_eq!(times("cpu0 10 1 5 80 4 0 0 0 7 0"), None);
        assert_eq!(times("cpu  10 x"), None);
    }

    #[test]
    fn a_device_keeps_a_margin() {
        let usable = |free| Gpu { name: String::new(), free }.usable();
        assert_eq!((usable(MARGIN + 5), usable(MARGIN - 1)), (5, 0));
    }
}
