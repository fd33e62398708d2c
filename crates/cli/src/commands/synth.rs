//! `moeflux synth`: a checkpoint of random weights at the shape of a published model.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::checkpoint::Format;
use moeflux::error::size;
use moeflux::synth::{Encoding, Outcome, Plan, Recipe, SHAPES, Shape};

/// The names that there are.
fn shapes() -> String {
    SHAPES.iter().map(|shape| shape.name).collect::<Vec<_>>().join(", ")
}

/// Write a checkpoint with random weights at the shape of a published model, for benchmarks.
#[derive(Debug, Args)]
pub struct SynthArgs {
    #[arg(value_parser = Shape::by_name, help = shapes())]
    shape: Shape,
    /// GGUF file, or folder for other formats, to write
    out: PathBuf,
    /// File format
    #[arg(long, value_enum, default_value = "gguf")]
    format: FileFormat,
    /// Encoding: q4_k_m, q8_0, f16, mxfp4 for GGUF, or of experts alone iq4_xs, q3_k, iq3_s, iq3_xxs, q2_k, iq2_s, iq2_xxs,
    /// iq1_s; 4bit, 8bit for MLX; bf16, fp8, fp8_channel, mxfp8, nvfp4, int4, gptq, awq for Hugging Face [default: the first]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// Number of layers [default: the shape's]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Random seed; the same arguments give the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Routing skew: the expert of rank r is chosen about r^-S times as often as the first; 0 for uniform routing
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    router_skew: f32,
    /// Replace an existing checkpoint
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FileFormat {
    /// One GGUF file, as for llama.cpp
    Gguf,
    /// A folder of quantised safetensors, as for MLX
    Mlx,
    /// A folder of safetensors, as on Hugging Face's hub
    Hf,
}

/// Bytes that header, vocabulary and configuration take at most.
const BESIDE_WEIGHTS: u64 = 32 << 20;

pub fn run(args: &SynthArgs) -> Result<()> {
    let format = match args.format {
        FileFormat::Gguf => Format::Gguf,
        FileFormat::Mlx => Format::Mlx,
        FileFormat::Hf => Format::HuggingFace,
    };
    let plan = Plan::new(Recipe {
        shape: args.shape,
        layers: args.layers.unwrap_or(args.shape.layers()),
        encoding: Encoding::by_name(format, args.quant.as_deref())?,
        seed: args.seed,
        router_skew: args.router_skew,
    })?;
    let out = &args.out;
    check_target(out, format, args.force)?;
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    check_space(parent, plan.bytes() + BESIDE_WEIGHTS)?;

    // Dropping an unfinished file or folder removes it.
    let cannot_create = || format!("cannot create {}", out.display());
    let complete = match format {
        Format::Gguf => {
            let file = unfinished(0o666).tempfile_in(parent).with_context(cannot_create)?;
            write(&plan, file.path())? && {
                file.persist(out).with_context(cannot_create)?;
                true
            }
        }
        _ => {
            let folder = unfinished(0o777).tempdir_in(parent).with_context(cannot_create)?;
            write(&plan, folder.path())? && {
                put_folder(folder.path(), out, parent).with_context(cannot_create)?;
                true
            }
        }
    };
    if !complete {
        bail!("interrupted; nothing was written");
    }
    Ok(())
}

/// Moves `folder` to `out`. A folder cannot be renamed over another, so the one that is there steps aside first.
fn put_folder(folder: &Path, out: &Path, parent: &Path) -> std::io::Result<()> {
    if !out.exists() {
        return std::fs::rename(folder, out);
    }
    // What is in it is removed when it is dropped.
    let aside = unfinished(0o777).tempdir_in(parent)?;
    let old = aside.path().join("replaced");
    std::fs::rename(out, &old)?;
    std::fs::rename(folder, out).or_else(|error| std::fs::rename(&old, out).and(Err(error)))
}

/// Names of what is not finished start with a dot; permissions are subject to the umask as for any other file.
fn unfinished(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moeflux-synth-").permissions(Permissions::from_mode(mode));
    builder
}

/// Refuses to overwrite, and with `force` whatever is not a checkpoint.
fn check_target(out: &Path, format: Format, force: bool) -> Result<()> {
    let Ok(there) = std::fs::symlink_metadata(out) else { return Ok(()) };
    if !force {
        bail!("{} exists; use --force to replace it", out.display());
    }
    match format {
        Format::Gguf if there.is_dir() => bail!("{} is a folder, not a GGUF file", out.display()),
        Format::Gguf => Ok(()),
        _ if !there.is_dir() => bail!("{} is not a folder", out.display()),
        _ => {
            for entry in std::fs::read_dir(out).with_context(|| format!("cannot read {}", out.display()))? {
                let path = entry?.path();
                let known = path.extension().is_some_and(|e| e == "json" || e == "safetensors");
                if !known {
                    bail!("{} is not replaced: it holds {}", out.display(), path.display());
                }
            }
            Ok(())
        }
    }
}

/// Refuses to begin what the disk has no room for.
pub fn check_space(folder: &Path, needed: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(folder).with_context(|| format!("cannot open {}", folder.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed {
        bail!("{} has {} free, the checkpoint needs {}", folder.display(), size(free), size(needed));
    }
    Ok(())
}

/// Writes the checkpoint with a progress bar; false if Ctrl-C came between.
fn write(plan: &Plan, path: &Path) -> Result<bool> {
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst)).context("cannot watch for Ctrl-C")?;
    let template = "writing {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).context("progress template")?;
    let bar = ProgressBar::new(plan.bytes()).with_style(style);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let outcome = plan.write(path, threads, &mut |written| {
        bar.set_position(written);
        !stop.load(Ordering::SeqCst)
    })?;
    bar.finish_and_clear();
    Ok(outcome == Outcome::Complete && !stop.load(Ordering::SeqCst))
}
