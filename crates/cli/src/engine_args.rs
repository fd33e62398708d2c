//! Options that every command which runs a model shares.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::error::size;
use moeflux::experts::{PolicyKind, Prefetch};
use moeflux::io::file::ReadMode;
use moeflux::io::queue::QueueKind;
use moeflux::{Engine, Options, TextModel};
use moeflux_compute::backend::{ActivationMode, Backend, KvType};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{Device, DeviceInfo, GpuBackend, GpuOptions};

/// Precision of activations in products with quantised weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Activations {
    /// As the checkpoint's floats: slower, closest to the model.
    F32,
    /// Quantised to 8 bits per 32 values: the fast default.
    Int8,
}

/// Precision of cached keys and values.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Kv {
    /// 16-bit floats.
    F16,
    /// 32-bit floats.
    F32,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The first GPU if there is one, else the processor.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    #[cfg(target_os = "linux")]
    Cuda,
    /// The GPU of a Mac.
    #[cfg(target_os = "macos")]
    Metal,
}

/// What GPUs are called here, how they are found, and how the first is opened with at most that much memory.
pub struct Gpus {
    pub name: &'static str,
    pub find: fn() -> moeflux_compute::Result<Vec<DeviceInfo>>,
    open: fn(Option<u64>) -> moeflux_compute::Result<Box<dyn Device>>,
}

impl Gpus {
    /// The first GPU, which is `device`, with at most `memory` bytes of its memory.
    pub fn backend(self, device: DeviceInfo, memory: Option<u64>) -> Box<dyn Backend> {
        let options = GpuOptions { memory, host_memory: !device.unified, ..GpuOptions::default() };
        Box::new(GpuBackend::new(device.name, options, move || (self.open)(memory)))
    }
}

#[cfg(target_os = "linux")]
pub const GPUS: Option<Gpus> = Some(Gpus {
    name: "cuda",
    find: moeflux_compute::gpu::cuda::devices,
    open: |memory| Ok(Box::new(moeflux_compute::gpu::cuda::Cuda::open(0, memory)?)),
});

#[cfg(target_os = "macos")]
pub const GPUS: Option<Gpus> = Some(Gpus {
    name: "metal",
    find: moeflux_compute::gpu::metal::devices,
    open: |memory| Ok(Box::new(moeflux_compute::gpu::metal::Metal::open(memory)?)),
});

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
pub const GPUS: Option<Gpus> = None;

/// How many sequences share a model.
#[derive(Debug, Clone, Copy)]
pub struct Sharing {
    /// Sequences at the same time.
    pub sequences: usize,
    /// Positions of all of them together.
    pub kv_tokens: Option<usize>,
    /// Bytes of `--memory` for what they are made from.
    pub reserved: u64,
}

/// How to run the model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// What computes
    #[arg(long, value_name = "BACKEND", default_value = "auto", help_heading = "Engine")]
    pub backend: BackendKind,
    /// Memory of the GPU to use: weights, context, scratch, and experts in what is left [default: what is free; of memory
    /// that it shares with the processor, at most three quarters of --memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Engine")]
    pub device_memory: Option<u64>,
    /// Memory for everything: weights, context, scratch, experts (such as 6GiB) [default: what the system grants]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Engine")]
    pub memory: Option<u64>,
    /// Number of expert slots, instead of as many as the memory holds
    #[arg(long, value_name = "SLOTS", help_heading = "Engine")]
    pub expert_cache: Option<usize>,
    /// Threads that compute [default: one a core]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub threads: Option<usize>,
    /// Most tokens evaluated at once [default: 512, up to 2048 where experts stream, fewer if memory is short]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub chunk: Option<usize>,
    /// Positions of the context [default: the model's, at most 4096, fewer if memory is short]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub context: Option<usize>,
    /// Precision of activations in products with quantised weights [default: int8; f32 for `logits`]
    #[arg(long, value_name = "MODE", help_heading = "Engine")]
    pub activations: Option<Activations>,
    /// Precision of cached keys and values [default: f16; f32 with --activations f32]
    #[arg(long, value_name = "TYPE", help_heading = "Engine")]
    pub kv: Option<Kv>,
    /// Highest instruction set to use: portable, neon, avx2, avx512, amx [default: the machine's best, amx aside]
    #[arg(long, value_name = "LEVEL", value_parser = parse::<SimdLevel>, help_heading = "Engine")]
    pub simd: Option<SimdLevel>,
    /// How experts are read: direct (past the page cache) or buffered (through it) [default: what a probe finds faster]
    #[arg(long, value_name = "MODE", value_parser = parse::<ReadMode>, help_heading = "Streaming")]
    pub read_mode: Option<ReadMode>,
    /// What reads them: io_uring or pread [default: the best that the system allows]
    #[arg(long, value_name = "QUEUE", value_parser = parse::<QueueKind>, help_heading = "Streaming")]
    pub read_queue: Option<QueueKind>,
    /// Expert reads under way at once
    #[arg(long, value_name = "N", default_value_t = Options::default().read_depth, help_heading = "Streaming")]
    pub read_depth: usize,
    /// Which experts give way: lru, lfu:HALF_LIFE or blend:LONG:SHORT:PART, half-lives in tokens
    #[arg(long, value_name = "POLICY", value_parser = parse::<PolicyKind>, default_value_t, help_heading = "Streaming")]
    pub cache_policy: PolicyKind,
    /// Whether experts are read before they are asked for: auto (where it gains), off, always
    #[arg(long, value_name = "WHEN", value_parser = parse::<Prefetch>, default_value_t, help_heading = "Streaming")]
    pub prefetch: Prefetch,
}

/// `6GiB`, `500MB`, `1.5G` (binary), or a number of bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
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
        return Err(format!("{text:?} is not a size that a machine could have"));
    }
    Ok(bytes as u64)
}

/// A value of an option that knows how it is written.
pub fn parse<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{error}"))
}

impl BackendKind {
    /// The first GPU, if there is one and this means it, and how it is opened.
    ///
    /// # Errors
    /// If only a GPU would do and there is none.
    pub fn gpu(self) -> Result<Option<(DeviceInfo, Gpus)>> {
        let Some(gpus) = GPUS.filter(|_| self != Self::Cpu) else { return Ok(None) };
        let must = self != Self::Auto;
        match (gpus.find)() {
            Ok(devices) => match devices.into_iter().next() {
                None if must => anyhow::bail!("--backend {}: there is no GPU", gpus.name),
                first => Ok(first.map(|device| (device, gpus))),
            },
            Err(error) if must => Err(error.into()),
            Err(_) => Ok(None),
        }
    }
}

impl EngineArgs {
    /// What computes, for `auto` a GPU if one can be used, and the memory that is left for the processor.
    fn backend(&self, threads: usize) -> Result<(Box<dyn Backend>, Option<u64>)> {
        if let Some((gpu, gpus)) = self.backend.gpu()? {
            let (memory, host) = if gpu.unified {
                let (memory, host) = self.shared_memory(gpu.free)?;
                (Some(memory), Some(host))
            } else {
                (self.device_memory, self.memory)
            };
            return Ok((gpus.backend(gpu, memory), host));
        }
        if self.device_memory.is_some() {
            anyhow::bail!("--device-memory: there is no GPU to use");
        }
        Ok((Box::new(CpuBackend::new(threads, self.simd)?), self.memory))
    }

    /// Divides memory between a GPU that shares the processor's and may have `free` bytes of it, and the processor.
    fn shared_memory(&self, free: u64) -> Result<(u64, u64)> {
        let granted = || moeflux::memory::available().map(|bytes| bytes / 10 * 9);
        let total = self.memory.or_else(granted).unwrap_or(free);
        let gpu = self.device_memory.unwrap_or_else(|| free.min(total / 4 * 3));
        let host = total.checked_sub(gpu).filter(|host| *host > 0).with_context(|| {
            format!(
                "the GPU's memory is the processor's: {} for it leave nothing of {}",
                size(gpu),
                size(total)
            )
        })?;
        Ok((gpu, host))
    }
}

/// What `--threads` says, or as many as there are processors.
pub fn threads(given: Option<usize>) -> Result<usize> {
    match given {
        Some(0) => anyhow::bail!("--threads: expected a positive number, got 0"),
        Some(n) => Ok(n),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

impl EngineArgs {
    /// The backend, and options with `default` precision if none was asked for.
    fn resolve(&self, default: Activations) -> Result<(Box<dyn Backend>, Options)> {
        let threads = threads(self.threads)?;
        let activations = match self.activations.unwrap_or(default) {
            Activations::F32 => ActivationMode::F32,
            Activations::Int8 => ActivationMode::Int8,
        };
        let kv_type = self.kv.map(|kv| match kv {
            Kv::F16 => KvType::F16,
            Kv::F32 => KvType::F32,
        });
        let (backend, memory) = self.backend(threads)?;
        let options = Options {
            memory,
            expert_cache: self.expert_cache,
            chunk: self.chunk,
            context: self.context,
            activations,
            kv_type,
            read_mode: self.read_mode,
            read_queue: self.read_queue,
            read_depth: self.read_depth,
            cache_policy: self.cache_policy,
            prefetch: self.prefetch,
            ..Options::default()
        };
        Ok((backend, options))
    }

    /// Opens a model without its tokenizer, with a progress bar where a person watches.
    pub fn open(&self, model: &Path, default: Activations) -> Result<Engine> {
        self.open_shared(model, default, Sharing { sequences: 1, kv_tokens: None, reserved: 0 })
    }

    /// As [`EngineArgs::open`], for several sequences at the same time.
    pub fn open_shared(&self, model: &Path, default: Activations, sharing: Sharing) -> Result<Engine> {
        let (backend, options) = self.resolve(default)?;
        let Sharing { sequences, kv_tokens, reserved } = sharing;
        let options = Options { sequences, kv_tokens, reserved, ..options };
        let bar = loading_bar()?;
        let engine = Engine::open(model, &*backend, &options, |loaded, total| advance(&bar, loaded, total))?;
        bar.finish_and_clear();
        Ok(engine)
    }

    /// Opens a model with its tokenizer and chat template.
    pub fn open_text(&self, model: &Path) -> Result<TextModel> {
        self.open_text_shared(model, Sharing { sequences: 1, kv_tokens: None, reserved: 0 })
    }

    /// Opens a model for several sequences at the same time.
    pub fn open_text_shared(&self, model: &Path, sharing: Sharing) -> Result<TextModel> {
        let (backend, options) = self.resolve(Activations::Int8)?;
        let Sharing { sequences, kv_tokens, reserved } = sharing;
        let options = Options { sequences, kv_tokens, reserved, ..options };
        let bar = loading_bar()?;
        let model =
            TextModel::open(model, &*backend, &options, |loaded, total| advance(&bar, loaded, total))?;
        bar.finish_and_clear();
        Ok(model)
    }
}

fn loading_bar() -> Result<ProgressBar> {
    let template = "loading {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec}";
    let style = ProgressStyle::with_template(template).context("progress template")?;
    Ok(ProgressBar::no_length().with_style(style))
}

fn advance(bar: &ProgressBar, loaded: u64, total: u64) {
    bar.set_length(total);
    bar.set_position(loaded);
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{EngineArgs, parse_size};

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        engine: EngineArgs,
    }

    #[test]
    fn shared_memory_is_divided() {
        let divide = |arguments: &[&str], free| {
            let arguments = ["moeflux"].iter().chain(arguments);
            let command = Command::try_parse_from(arguments).expect("arguments are right");
            command.engine.shared_memory(free).map_err(|error| error.to_string())
        };
        assert_eq!(divide(&["--memory", "16GiB"], 64 << 30), Ok((12 << 30, 4 << 30)));
        assert_eq!(divide(&["--memory", "16GiB"], 8 << 30), Ok((8 << 30, 8 << 30)));
        assert_eq!(
            divide(&["--memory", "16GiB", "--device-memory", "1GiB"], 8 << 30),
            Ok((1 << 30, 15 << 30))
        );
        let error = divide(&["--memory", "4GiB", "--device-memory", "4GiB"], 8 << 30).unwrap_err();
        assert!(error.contains("4.0 GiB for it leave nothing"), "{error}");
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
