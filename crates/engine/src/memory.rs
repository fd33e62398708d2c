//! How much memory there is: what the operating system makes available, and how a budget is divided.

use std::path::Path;

use crate::error::size;
use crate::{Error, Result};

/// Memory that the process may still take, in bytes: the least of what is available in the machine and what its
/// control groups leave. `None` where the system does not say.
pub fn available() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok();
    let of_groups = groups.and_then(|groups| cgroup_available(&groups, Path::new("/sys/fs/cgroup")));
    let limits = [meminfo_available(), of_groups, apple_available()];
    limits.into_iter().flatten().min()
}

/// The memory budget unless said otherwise, in bytes: nine tenths of what the system grants. The rest is for page tables,
/// other programs and its own caches.
pub fn default_budget() -> Option<u64> {
    available().map(|bytes| bytes / 10 * 9)
}

/// `6GiB`, `500MB`, `1.5G` (binary), or a number of bytes.
///
/// # Errors
/// What is wrong with the text, in words.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(format!("unknown unit {unit:?}: expected KiB, MiB, GiB, TiB, KB, MB, GB or TB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a size such as 6GiB"))?;
    let bytes = number * scale;
    if !(1.0..9e18).contains(&bytes) {
        return Err(format!("{text:?} is not a plausible size"));
    }
    Ok(bytes as u64)
}

#[cfg(target_vendor = "apple")]
use crate::io::apple_memory::available as apple_available;

#[cfg(not(target_vendor = "apple"))]
fn apple_available() -> Option<u64> {
    None
}

fn meminfo_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Memory that the tightest control group (v1 or v2) leaves, on the way from this process's group to the root. `groups` is
/// what Linux says of the process, `mounted` where control groups are.
fn cgroup_available(groups: &str, mounted: &Path) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (root, limit, usage, cache) = match controllers {
            "" => (mounted.to_owned(), "memory.max", "memory.current", "file"),
            c if c.split(',').any(|c| c == "memory") => {
                let root = mounted.join("memory");
                (root, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
            }
            _ => continue,
        };
        let mut folder = Some(Path::new(path.trim_start_matches('/')));
        while let Some(part) = folder {
            let group = root.join(part);
            let number = |name: &str| -> Option<u64> {
                std::fs::read_to_string(group.join(name)).ok()?.trim().parse().ok()
            };
            if let (Some(limit), Some(usage)) = (number(limit), number(usage)) {
                // Cached file pages count as used but can be dropped.
                let free = limit.saturating_sub(usage) + reclaimable(&group, cache);
                least = Some(least.map_or(free, |l: u64| l.min(free)));
            }
            folder = part.parent();
        }
    }
    least
}

fn reclaimable(group: &Path, field: &str) -> u64 {
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let line = stat.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(' ').map(str::to_owned));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// Gives memory back to the system that was freed and is kept for later, as after dropping a model.
pub fn trim() {
    crate::io::heap::trim();
}

/// Has all threads use one heap from now on, for programs that load and drop models: glibc's heap of each thread keeps pieces
/// of what was dropped, which other threads cannot use. (Measured: 985 MiB instead of 793 after twelve loads.) Nothing to do
/// elsewhere. It concerns the whole process.
pub fn share_heap() {
    crate::io::heap::unite();
}

/// Largest resident set that this process has had, in bytes.
pub fn peak_resident() -> Option<u64> {
    status("VmHWM:")
}

/// Resident set of this process, in bytes.
pub fn resident() -> Option<u64> {
    status("VmRSS:")
}

/// A size in what Linux says of this process.
fn status(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(field))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Everything that is not counted piece by piece: code, tensor directory and allocator slack, and for each entry of
/// the vocabulary what a tokenizer keeps of it. (Measured: 84 MiB with a vocabulary of 151,936.)
fn overhead(vocab_size: usize) -> u64 {
    (4 << 20) + 560 * vocab_size as u64
}

/// What a model needs besides its experts, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Resident weights.
    pub trunk: u64,
    /// Key-value pages for the whole context.
    pub kv: u64,
    /// Activations and scratch of a full chunk.
    pub scratch: u64,
    /// Everything that is not counted piece by piece.
    pub overhead: u64,
    /// Experts that the backend keeps in a form of its own.
    pub kept: u64,
    /// Whether trunk, pages and scratch are in a backend's own memory.
    pub in_own_memory: bool,
}

impl Needs {
    /// What is in the processor's memory all the time, in bytes. A backend that keeps experts takes them while weights that
    /// it was given are still there.
    pub fn held(&self) -> u64 {
        let Self { trunk, kv, scratch, overhead, kept, in_own_memory } = *self;
        let parts = if in_own_memory {
            [if kept > 0 { trunk } else { 0 }, 0, 0, overhead, kept]
        } else {
            [trunk, kv, scratch, overhead, kept]
        };
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// With the overhead of a model of `vocab_size` tokens.
    pub fn new(trunk: u64, kv: u64, scratch: u64, vocab_size: usize) -> Self {
        Self { trunk, kv, scratch, overhead: overhead(vocab_size), kept: 0, in_own_memory: false }
    }
}

/// How a memory budget is divided, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// All of it.
    pub total: u64,
    /// The part that does not depend on the number of expert slots.
    pub needs: Needs,
    /// Slots for routed experts.
    pub experts: u64,
}

impl Budget {
    /// Divides `total`: what `needs` leaves is for experts.
    ///
    /// # Errors
    /// [`Error::Budget`] if it leaves less than `minimum_experts`.
    pub(crate) fn divide(total: u64, needs: Needs, minimum_experts: u64) -> Result<Self> {
        let Needs { trunk, kv, scratch, overhead, in_own_memory, .. } = needs;
        let held = needs.held();
        // Weights pass through the processor's memory on their way to that of a backend.
        let loading = trunk.saturating_add(overhead);
        let minimum = held.saturating_add(minimum_experts).max(loading);
        if minimum > total || minimum == u64::MAX {
            let parts = if in_own_memory && minimum == loading {
                format!(
                    "resident weights {} on their way to the GPU, overhead {}",
                    size(trunk),
                    size(overhead)
                )
            } else if in_own_memory {
                format!("experts of one token {}, overhead {}", size(minimum_experts), size(overhead))
            } else {
                format!(
                    "resident weights {}, context {}, scratch {}, experts of one token {}, overhead {}",
                    size(trunk),
                    size(kv),
                    size(scratch),
                    size(minimum_experts),
                    size(overhead)
                )
            };
            return Err(Error::Budget { budget: total, minimum, parts, device: None });
        }
        Ok(Self { total, needs, experts: total - held })
    }
}

#[cfg(test)]
mod measured;

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs { trunk: 10, kv: 20, scratch: 30, overhead: 5, kept: 0, in_own_memory: false };

    #[test]
    fn what_is_left_is_for_experts() {
        let budget = Budget::divide(105, NEEDS, 40).unwrap();
        assert_eq!(budget.experts, 40);
    }

    #[test]
    fn a_backend_with_its_own_memory_leaves_the_processors_to_experts() {
        let needs = Needs { in_own_memory: true, ..NEEDS };
        assert_eq!(Budget::divide(105, needs, 40).unwrap().experts, 100);
        // What it keeps comes beside the weights, which are given to it then.
        assert_eq!(Budget::divide(105, Needs { kept: 50, ..needs }, 40).unwrap().experts, 40);
        // Weights must fit while they are loaded.
        let error = Budget::divide(14, needs, 4).unwrap_err();
        let Error::Budget { minimum, .. } = error else { panic!("{error}") };
        assert_eq!(minimum, 15);
    }

    #[test]
    fn too_small_a_budget_names_the_minimum() {
        let error = Budget::divide(104, NEEDS, 40).unwrap_err();
        let Error::Budget { minimum, .. } = error else { panic!("{error}") };
        assert_eq!(minimum, 105);
        assert!(Budget::divide(u64::MAX, Needs { trunk: u64::MAX, ..NEEDS }, 0).is_err());
    }

    /// Files of a control group: its path, then names and contents.
    fn group(root: &Path, path: &str, files: &[(&str, &str)]) {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).unwrap());
    }

    #[test]
    fn control_groups_leave_what_is_not_used_or_can_be_dropped() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let of = |groups: &str| cgroup_available(groups, root);
        assert_eq!(of("0::/a/b\n"), None, "no such group");
        group(
            root,
            "a/b",
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "700\n"),
                ("memory.stat", "anon 600\nfile_mapped 5\nfile 80\n"),
            ],
        );
        assert_eq!(of("0::/a/b\n"), Some(1000 - 700 + 80));
        // A parent is a bound too, without a limit none, and more may be used than is allowed.
        group(root, "a", &[("memory.max", "5000\n"), ("memory.current", "4900\n")]);
        assert_eq!(of("0::/a/b\n"), Some(100));
        group(root, "a", &[("memory.max", "max\n")]);
        assert_eq!(of("0::/a/b\n"), Some(380));
        group(root, "a", &[("memory.max", "4000\n")]);
        assert_eq!(of("0::/a/b\n"), Some(0));
        // The first version has a tree for each controller.
        group(
            root,
            "memory/c",
            &[
                ("memory.limit_in_bytes", "2000"),
                ("memory.usage_in_bytes", "1500"),
                ("memory.stat", "cache 1\ntotal_cache 30\n"),
            ],
        );
        assert_eq!(of("12:cpu,cpuacct:/c\n5:hugetlb,memory:/c\n"), Some(530));
        assert_eq!(of("12:cpu,cpuacct:/c\n"), None);
    }

    /// As measured with a vocabulary of so many.
    #[test]
    fn overhead_grows_with_the_vocabulary() {
        let of = |vocab_size| Needs::new(0, 0, 0, vocab_size).overhead;
        assert!(of(151_936) >= 84 << 20 && of(1000) < 8 << 20);
    }

    #[test]
    fn this_system_says_what_it_has() {
        if cfg!(target_os = "linux") {
            assert!(available().unwrap() > 1 << 20);
            assert!(peak_resident().unwrap() > 1 << 20);
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("6GiB", 6 << 30), ("1.5G", 3 << 29), ("500MB", 500_000_000), ("17", 17), ("2 kib", 2048)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "x", "-1", "0", "6Gib/s", "1e3", "99999999TiB", "1.2.3"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
