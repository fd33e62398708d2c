//! What to run after the demo: the largest published model of a short list that this machine carries.
//!
//! The list is small and goes by file sizes, because nothing is asked of the network before somebody wants a model;
//! `plan` reads the headers of the real files and tells the speed.

use std::path::PathBuf;

use moeflux::memory;
use rustix::fs::statvfs;

use crate::hub::Settings;

/// A Mixture-of-Experts model on the Hub.
#[derive(Debug)]
struct Published {
    /// As `plan`, `run` and `pull` take it.
    id: &'static str,
    /// Of its files, in MB (10^6 bytes).
    file: u64,
    /// Of these, what must stay in memory: all but the experts.
    trunk: u64,
}

/// From small to large.
const PUBLISHED: [Published; 8] = [
    Published { id: "allenai/OLMoE-1B-7B-0924-Instruct-GGUF:Q4_K_M", file: 4_210, trunk: 320 },
    Published { id: "ggml-org/gpt-oss-20b-GGUF", file: 12_110, trunk: 1_920 },
    Published { id: "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", file: 18_560, trunk: 1_000 },
    Published { id: "Qwen/Qwen3-Next-80B-A3B-Instruct-GGUF:Q4_K_M", file: 48_500, trunk: 1_720 },
    Published { id: "ggml-org/gpt-oss-120b-GGUF", file: 63_400, trunk: 2_500 },
    Published { id: "Qwen/Qwen3-235B-A22B-GGUF:Q4_K_M", file: 142_000, trunk: 4_830 },
    Published { id: "unsloth/DeepSeek-V3-0324-GGUF:Q4_K_M", file: 404_000, trunk: 10_520 },
    Published { id: "unsloth/Kimi-K2-Instruct-GGUF:Q4_K_M", file: 621_000, trunk: 7_620 },
];
const MB: u64 = 1_000_000;
/// For the context and the program, in MB.
const BESIDE: u64 = 1_000;
/// The part of the experts that should fit into memory. With fewer a token waits for the disk most of its time
/// (docs/budget.md has figures).
const HELD: u64 = 8;

impl Published {
    /// Memory that it wants to run at a useful speed, in bytes.
    fn memory(&self) -> u64 {
        (self.trunk + (self.file - self.trunk) / HELD + BESIDE) * MB
    }

    /// The disk keeps a tenth of its free space, and memory is what a budget takes by default.
    fn fits(&self, disk: u64, budget: u64) -> bool {
        self.file * MB <= disk / 10 * 9 && self.memory() <= budget
    }
}

/// The line about the largest model that `disk` free bytes and a memory budget of `budget` bytes carry.
fn line(disk: u64, budget: u64) -> Option<String> {
    let model = PUBLISHED.iter().rev().find(|model| model.fits(disk, budget))?;
    let in_memory = if model.file * MB + BESIDE * MB <= budget {
        "fits into memory as a whole".to_owned()
    } else {
        format!("{:.1} GB of it always in memory", model.trunk as f64 / 1e3)
    };
    let (id, file) = (model.id, model.file as f64 / 1e3);
    Some(format!(
        "Next: moeflux plan {id} ({file:.1} GB; this disk has {:.0} GB free, {in_memory})",
        disk as f64 / 1e9,
    ))
}

/// What to try after the demo on this machine, in one line; nothing where the machine does not say what it has, or
/// carries no model of the list.
pub fn after_demo() -> Option<String> {
    let mut folder: PathBuf = Settings::from_environment().cache;
    while !folder.is_dir() && folder.pop() {}
    let space = statvfs(&folder).ok()?;
    line(space.f_bavail.saturating_mul(space.f_frsize), memory::default_budget()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::HubId;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn the_largest_that_disk_and_memory_carry() {
        let named = |disk: u64, budget: u64| line(disk * GB, budget * GB).unwrap_or_default();
        let check = |disk, budget, id: &str| {
            let line = named(disk, budget);
            assert!(line.starts_with(&format!("Next: moeflux plan {id} (")), "{disk} {budget}: {line}");
        };
        check(40, 14, "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M");
        check(2_000, 14, "ggml-org/gpt-oss-120b-GGUF");
        check(2_000, 500, "unsloth/Kimi-K2-Instruct-GGUF:Q4_K_M");
        // The disk decides, then the memory.
        check(20, 500, "ggml-org/gpt-oss-20b-GGUF");
        check(2_000, 5, "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M");
        check(5, 4, "allenai/OLMoE-1B-7B-0924-Instruct-GGUF:Q4_K_M");
        assert_eq!((line(4 * GB, 100 * GB), line(100 * GB, GB)), (None, None));
    }

    #[test]
    fn a_line_names_size_disk_and_memory() {
        let expected =
            "Next: moeflux plan Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M (18.6 GB; this disk has 30 GB free, ";
        assert_eq!(line(30 * GB, 14 * GB).unwrap(), format!("{expected}1.0 GB of it always in memory)"));
        assert_eq!(line(30 * GB, 24 * GB).unwrap(), format!("{expected}fits into memory as a whole)"));
    }

    #[test]
    fn the_list_is_in_order_and_can_be_named() {
        for pair in PUBLISHED.windows(2) {
            assert!(pair[0].file < pair[1].file, "{pair:?}");
        }
        for model in &PUBLISHED {
            assert!(HubId::parse(model.id).is_some() && model.trunk < model.file, "{model:?}");
        }
    }
}
