//! `moeflux pack`: a copy of a checkpoint whose experts take one read each and, on request, fewer bits.

mod measure;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::checkpoint::Checkpoint;
use moeflux::memory::parse_size;
use moeflux::models;
use moeflux::pack::{Loss, Outcome, Pack, PackOptions};

use super::synth::check_space;
use crate::model::ModelArg;
use measure::Original;

/// Prose, code, figures, tables and three languages; written for this.
const TEXT: &str = include_str!("text.txt");

/// Copy a checkpoint so that every expert is one contiguous range: one read instead of three or nine.
///
/// The original is not changed, and the copy opens like any other checkpoint. If interrupted, the same command
/// resumes. With --experts-bits experts get smaller and less accurate; by how much is measured, printed and
/// stored in the copy.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// A GGUF file (any shard of a split one), a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M
    model: ModelArg,
    /// GGUF file to write, or folder for safetensors
    out: PathBuf,
    /// Re-encode experts that have more bits than this: 4, 6 or 8 in GGUF files, 2 to 6 or 8 in MLX folders
    #[arg(long, value_name = "N")]
    experts_bits: Option<u8>,
    /// UTF-8 text on which to compare the copy with the original [default: a built-in page]
    #[arg(long, value_name = "FILE", requires = "experts_bits")]
    text: Option<PathBuf>,
    /// Memory for the comparison (such as 6GiB) [default: what the system has available]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "experts_bits")]
    memory: Option<u64>,
}

pub fn run(args: &PackArgs) -> Result<()> {
    let out = &args.out;
    if std::fs::symlink_metadata(out).is_ok() {
        bail!("{} exists", out.display());
    }
    let path = args.model.path()?;
    let model = models::record(Arc::new(Checkpoint::open(&path)?))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pack = Pack::new(&model, PackOptions { experts_bits: args.experts_bits, threads })?;
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    check_space(parent, pack.bytes().saturating_sub(begun(out)))?;
    let given = args
        .text
        .as_ref()
        .map(|path| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display())));
    let text = given.transpose()?.unwrap_or_else(|| TEXT.to_owned());

    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    let original =
        if pack.is_lossy() { Some(Original::new(&path, &text, args.memory, parent)?) } else { None };
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst)).context("cannot watch for Ctrl-C")?;
    let template = "packing {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).context("progress template")?;
    let bar = ProgressBar::new(pack.bytes()).with_style(style);
    let mut progress = |written| {
        bar.set_position(written);
        !stop.load(Ordering::SeqCst)
    };
    let outcome = pack.write(out, &mut progress, |copy| -> Result<Loss> {
        bar.finish_and_clear();
        let original = original.context("only copies that lose something are measured")?;
        original.compare(copy)
    })?;
    bar.finish_and_clear();
    match outcome {
        Outcome::Complete(None) => Ok(()),
        Outcome::Complete(Some(loss)) => {
            println!("{loss}");
            Ok(())
        }
        Outcome::Stopped => bail!("interrupted; run the same command again to resume"),
    }
}

/// Bytes of what an interrupted run has left.
fn begun(out: &Path) -> u64 {
    let mut partial = out.as_os_str().to_owned();
    partial.push(".partial");
    let files = [PathBuf::from(&partial), Path::new(&partial).join("model.safetensors")];
    files
        .iter()
        .filter_map(|file| std::fs::metadata(file).ok())
        .filter(|m| m.is_file())
        .map(|m| m.len())
        .sum()
}
