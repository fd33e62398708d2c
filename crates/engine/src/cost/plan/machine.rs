//! What a plan measures of the machine, besides computing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use moeflux_compute::graph::ExpertSetId;

use super::PlannedModel;
use crate::cost::{Disk, Measured};
use crate::io::file::ReadMode;
use crate::io::queue;
use crate::{Error, Options, Result};

/// Device memory that the engine leaves alone.
const MARGIN: u64 = 512 << 20;

/// The GPUs that would compute.
#[derive(Debug, Clone)]
pub struct PlannedGpu {
    /// What the first is called.
    pub name: String,
    /// How many there are.
    pub count: usize,
    /// Bytes of memory that are free on each of them.
    pub free: u64,
}

impl PlannedGpu {
    /// Bytes of each that the engine would use.
    pub fn usable(&self) -> u64 {
        self.free.saturating_sub(MARGIN)
    }
}

/// What was measured.
#[derive(Debug)]
pub struct Machine {
    /// Compute backend.
    pub backend: String,
    /// Bytes per second that its threads read from memory.
    pub bandwidth: f64,
    /// What computing takes.
    pub measured: Measured,
    /// How experts would be read.
    pub disk: DiskProbe,
    /// The GPUs, if they would compute.
    pub gpu: Option<PlannedGpu>,
    /// Part of the processors' time that other programs took before measuring, 0..=1, if it was worth telling.
    pub busy: Option<f64>,
}

/// How experts would be read.
#[derive(Debug, Clone, Copy)]
pub struct DiskProbe {
    /// What reads cost.
    pub disk: Disk,
    /// How files are read.
    pub mode: ReadMode,
    /// Whether it was tried on the model's own files.
    pub on_model: bool,
}

/// For how long it is looked whether processors are busy.
const LOOK: Duration = Duration::from_millis(200);
/// Less than this part of their time changes little.
const BUSY: f64 = 0.2;

/// The part of the processors' time that programs take now, if it changes what is measured.
pub(super) fn busy() -> Option<f64> {
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

/// Bytes of the processor's last cache, or what most have.
pub(super) fn cache_bytes() -> u64 {
    let of = |index: usize| -> Option<u64> {
        let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size"));
        Some(text.ok()?.trim().strip_suffix('K')?.parse::<u64>().ok()? << 10)
    };
    (0..5).filter_map(of).max().unwrap_or(32 << 20)
}

impl DiskProbe {
    /// Tries the disk of `planned`, or that of `downloads`, which it would be downloaded to, beside computing with `threads`.
    pub(super) fn of(planned: &PlannedModel, downloads: &Path, threads: usize) -> Result<Self> {
        let options = Options::default();
        let io = |source| Error::Io { action: "queue reads on", path: downloads.to_owned(), source };
        let (_, mut queue) = queue::open(options.read_queue, options.read_depth).map_err(io)?;
        let experts = &planned.model().experts;
        if planned.is_on_disk()
            && let Some((disk, mode)) = Disk::of_store(experts, &mut *queue, None, threads)
        {
            return Ok(Self { disk, mode, on_model: true });
        }
        let expert_bytes = (0..experts.sets()).map(|set| experts.expert_bytes(ExpertSetId(set))).max();
        let bytes = expert_bytes.unwrap_or(1 << 20);
        let folder = existing(downloads.to_owned());
        // A cache that cannot be written to is no reason not to say anything.
        let disk = Disk::of_folder(&folder, &mut *queue, bytes, threads)
            .or_else(|_| Disk::of_folder(&std::env::temp_dir(), &mut *queue, bytes, threads))?;
        Ok(Self { disk, mode: ReadMode::Direct, on_model: false })
    }
}

/// The folder, or the nearest above it that there is.
fn existing(mut folder: PathBuf) -> PathBuf {
    while !folder.is_dir() && folder.pop() {}
    folder
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
        let usable = |free| PlannedGpu { name: String::new(), count: 1, free }.usable();
        assert_eq!((usable(MARGIN + 5), usable(MARGIN - 1)), (5, 0));
    }
}
