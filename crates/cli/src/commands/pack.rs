//! `moeflux pack`: a copy of a checkpoint whose experts take one read each.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::checkpoint::Checkpoint;
use moeflux::pack::{Outcome, Pack};

use super::synth::check_space;
use crate::model::ModelArg;

/// Copy a GGUF checkpoint so that every expert is one contiguous, aligned range: one read instead of three.
///
/// The original is left alone, and the copy is opened like any other GGUF file. If it is interrupted, the same command
/// goes on where it stopped.
#[derive(Debug, Args)]
pub struct PackArgs {
    /// A GGUF file (any shard of a split one), `demo`, or a model of the hub such as org/name:Q4_K_M
    model: ModelArg,
    /// The file to make
    out: PathBuf,
}

pub fn run(args: &PackArgs) -> Result<()> {
    let out = &args.out;
    if std::fs::symlink_metadata(out).is_ok() {
        bail!("{} exists", out.display());
    }
    let pack = Pack::new(Arc::new(Checkpoint::open(&args.model.path()?)?))?;
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut partial = out.as_os_str().to_owned();
    partial.push(".partial");
    let there = std::fs::metadata(partial).map_or(0, |m| m.len());
    check_space(parent, pack.bytes().saturating_sub(there))?;

    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst)).context("cannot watch for Ctrl-C")?;
    let template = "packing {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).context("progress template")?;
    let bar = ProgressBar::new(pack.bytes()).with_style(style);
    let outcome = pack.write(out, &mut |written| {
        bar.set_position(written);
        !stop.load(Ordering::SeqCst)
    })?;
    bar.finish_and_clear();
    match outcome {
        Outcome::Complete => Ok(()),
        Outcome::Stopped => bail!("interrupted; the same command goes on"),
    }
}
