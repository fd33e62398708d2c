//! Options shared by every command that runs a model.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use moeflux::experts::{PolicyKind, Prefetch};
use moeflux::io::file::ReadMode;
use moeflux::io::queue::QueueKind;
use moeflux::memory::parse_size;
use moeflux::synth::Plan;
use moeflux::{AdapterSource, Compute, Devices, Engine, OpenOptions, Options, SpecType, Split, TextModel};
use moeflux_compute::backend::{ActivationMode, KvType};
use moeflux_compute::cpu::SimdLevel;

/// Precision of activations in products with quantised weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Activations {
    /// Floats as in the checkpoint: slower, closest to the model.
    F32,
    /// 8 bits with a scale per 32 values: fast, the default.
    Int8,
}

/// Compute backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The first GPU if there is one, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    #[cfg(target_os = "linux")]
    Cuda,
    /// The GPU of a Mac.
    #[cfg(target_os = "macos")]
    Metal,
}

/// How many sequences share the model.
#[derive(Debug, Clone)]
pub struct Sharing {
    /// Sequences at the same time.
    pub sequences: usize,
    /// Positions of all of them together.
    pub kv_tokens: Option<usize>,
    /// Bytes of `--memory` for what they are made from.
    pub reserved: u64,
    /// How pictures are read, if they are.
    pub pictures: Option<Pictures>,
}

/// How pictures are read.
#[derive(Debug, Clone)]
pub struct Pictures {
    /// Most pixels.
    pub pixels: usize,
    /// The file of what reads them, if it is named.
    pub mmproj: Option<PathBuf>,
}

impl Sharing {
    /// One sequence, without pictures.
    pub const ALONE: Self = Self { sequences: 1, kv_tokens: None, reserved: 0, pictures: None };
}

/// How to run the model.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// The folders of adapters that sequences are computed with, each named by its place.
    #[arg(skip)]
    pub adapters: Vec<PathBuf>,
    /// Compute backend
    #[arg(long, value_name = "BACKEND", default_value = "auto", help_heading = "Engine")]
    pub backend: BackendKind,
    /// GPUs to use, by number, such as 0,1, or all: as few as hold the model have some layers each,
    /// of several sequences at once all [default: the first]
    #[arg(long, value_name = "NUMBERS", value_parser = parse::<Devices>, help_heading = "Engine")]
    pub devices: Option<Devices>,
    /// What several GPUs divide: layers, or experts of every layer (each GPU has everything else, and evaluates every batch)
    #[arg(long, value_name = "WHAT", value_parser = parse::<Split>, default_value_t, help_heading = "Engine")]
    pub split: Split,
    /// GPU memory to use: weights, context, scratch, and experts in the rest; of several GPUs of each, or one size for each,
    /// separated by commas [default: what is free; of memory shared with the CPU, at most three quarters of --memory]
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_size, help_heading = "Engine")]
    pub device_memory: Vec<u64>,
    /// On a GPU, compute a token with the same bits whatever else is in its batch, as the CPU does; slower with many sequences
    #[arg(long, help_heading = "Engine")]
    pub batch_invariant: bool,
    /// Part of the experts missing on a GPU that the processor computes in host memory, from 0 to 1 [default: the fastest]
    #[arg(long, value_name = "PART", value_parser = parse_part, help_heading = "Engine")]
    pub processor_share: Option<f32>,
    /// Memory for everything: weights, context, scratch, experts (such as 6GiB) [default: what the system has available]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = "Engine")]
    pub memory: Option<u64>,
    /// Number of expert slots [default: as many as fit in memory]
    #[arg(long, value_name = "SLOTS", help_heading = "Engine")]
    pub expert_cache: Option<usize>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub threads: Option<usize>,
    /// Maximum tokens per evaluation [default: 512; up to 2048 when streaming, up to 4096 on a GPU with room for it; fewer if memory is short]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub chunk: Option<usize>,
    /// Context length in tokens [default: the model's, at most 4096; less if memory is short]
    #[arg(long, value_name = "N", help_heading = "Engine")]
    pub context: Option<usize>,
    /// Precision of activations in products with quantised weights [default: int8; f32 for `logits`]
    #[arg(long, value_name = "MODE", help_heading = "Engine")]
    pub activations: Option<Activations>,
    /// Draft tokens and verify several at once, which changes no token: auto (when it pays), ngram (whenever the context has a
    /// guess), mtp (always, by the model's own layer that predicts further tokens; not on several GPUs), off
    #[arg(long, value_name = "WHEN", value_parser = parse::<SpecType>, default_value_t, help_heading = "Engine")]
    pub spec_type: SpecType,
    /// Most tokens to draft at a time, up to 16; on a GPU 7
    #[arg(long, value_name = "N", default_value_t = Options::default().draft_max, help_heading = "Engine")]
    pub draft_max: usize,
    /// Precision of cached keys and values: f16, f32, q8_0 [default: f16; f32 with --activations f32]
    #[arg(long, value_name = "TYPE", value_parser = parse::<KvType>, help_heading = "Engine")]
    pub kv: Option<KvType>,
    /// Highest instruction set to use: portable, neon, avx2, avx512 [default: the machine's best]
    #[arg(long, value_name = "LEVEL", value_parser = parse::<SimdLevel>, help_heading = "Engine")]
    pub simd: Option<SimdLevel>,
    /// A copy of the model on another disk, file or folder, from which experts are read too; may be repeated
    #[arg(long, value_name = "PATH", help_heading = "Streaming")]
    pub mirror: Vec<PathBuf>,
    /// How to read experts: direct (bypassing the page cache) or buffered (through it) [default: the faster in a probe]
    #[arg(long, value_name = "MODE", value_parser = parse::<ReadMode>, help_heading = "Streaming")]
    pub read_mode: Option<ReadMode>,
    /// What reads experts: io_uring or pread [default: the best available]
    #[arg(long, value_name = "QUEUE", value_parser = parse::<QueueKind>, help_heading = "Streaming")]
    pub read_queue: Option<QueueKind>,
    /// Maximum expert reads in flight
    #[arg(long, value_name = "N", default_value_t = Options::default().read_depth, help_heading = "Streaming")]
    pub read_depth: usize,
    /// Eviction policy for experts: lru, lfu:HALF_LIFE or blend:LONG:SHORT:PART, half-lives in tokens
    #[arg(long, value_name = "POLICY", value_parser = parse::<PolicyKind>, default_value_t, help_heading = "Streaming")]
    pub cache_policy: PolicyKind,
    /// When to prefetch experts: auto (when it pays), off, always
    #[arg(long, value_name = "WHEN", value_parser = parse::<Prefetch>, default_value_t, help_heading = "Streaming")]
    pub prefetch: Prefetch,
}

/// A number from 0 to 1.
fn parse_part(text: &str) -> Result<f32, String> {
    let part = text.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    part.ok_or_else(|| "expected a number from 0 to 1".into())
}

/// A positive number of pixels.
pub fn parse_pixels(text: &str) -> Result<usize, String> {
    let pixels = text.parse().ok().filter(|pixels| (1..=1 << 28).contains(pixels));
    pixels.ok_or_else(|| format!("expected a number of pixels from 1 to {}", 1 << 28))
}

/// A value of an option that knows how it is written.
pub fn parse<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{error}"))
}

impl BackendKind {
    /// What the engine calls it.
    pub fn compute(self) -> Compute {
        match self {
            Self::Auto => Compute::Auto,
            Self::Cpu => Compute::Cpu,
            #[cfg(target_os = "linux")]
            Self::Cuda => Compute::Gpu,
            #[cfg(target_os = "macos")]
            Self::Metal => Compute::Gpu,
        }
    }
}

impl EngineArgs {
    /// How to open a model, with `default` precision if none was asked for.
    fn open_options(&self, default: Activations, sharing: Sharing) -> OpenOptions {
        let activations = match self.activations.unwrap_or(default) {
            Activations::F32 => ActivationMode::F32,
            Activations::Int8 => ActivationMode::Int8,
        };
        let Sharing { sequences, kv_tokens, reserved, pictures } = sharing;
        let sources = self.adapters.iter().enumerate();
        let engine = Options {
            memory: self.memory,
            expert_cache: self.expert_cache,
            chunk: self.chunk,
            context: self.context,
            sequences,
            kv_tokens,
            reserved,
            activations,
            kv_type: self.kv,
            mirrors: self.mirror.clone(),
            read_mode: self.read_mode,
            read_queue: self.read_queue,
            read_depth: self.read_depth,
            cache_policy: self.cache_policy,
            prefetch: self.prefetch,
            spec_type: self.spec_type,
            draft_max: self.draft_max,
            picture_pixels: pictures.as_ref().map(|pictures| pictures.pixels),
            mmproj: pictures.as_ref().and_then(|pictures| pictures.mmproj.clone()),
            adapters: sources.map(|(place, folder)| adapter_at(place, folder)).collect(),
            ..Options::default()
        };
        let mut options = OpenOptions::new().engine_options(engine).compute(self.backend.compute());
        options = options.batch_invariant(self.batch_invariant);
        options = options.devices(self.devices.clone().unwrap_or_default());
        options = options.split(self.split).device_memories(self.device_memory.clone());
        options = self.processor_share.into_iter().fold(options, OpenOptions::processor_share);
        options = self.threads.into_iter().fold(options, OpenOptions::threads);
        self.simd.into_iter().fold(options, OpenOptions::simd)
    }

    /// Opens a model without its tokenizer, with a progress bar on a terminal.
    pub fn open(&self, model: &Path, default: Activations) -> Result<Engine> {
        self.open_shared(model, default, Sharing::ALONE)
    }

    /// As [`EngineArgs::open`], for several sequences at the same time.
    pub fn open_shared(&self, model: &Path, default: Activations, sharing: Sharing) -> Result<Engine> {
        let bar = loading_bar()?;
        let options = self.open_options(default, sharing);
        let engine = options.open_engine(model, |loaded, total| advance(&bar, loaded, total))?;
        bar.finish_and_clear();
        warn_of_context(&engine);
        Ok(engine)
    }

    /// As [`EngineArgs::open_shared`], of a model that is made in memory.
    pub fn open_synthetic(&self, plan: &Plan, default: Activations, sharing: Sharing) -> Result<Engine> {
        let bar = loading_bar()?;
        let options = self.open_options(default, sharing);
        let engine = options.open_synthetic(plan, |loaded, total| advance(&bar, loaded, total))?;
        bar.finish_and_clear();
        warn_of_context(&engine);
        Ok(engine)
    }

    /// Opens a model with its tokenizer and chat template.
    pub fn open_text(&self, model: &Path) -> Result<TextModel> {
        self.open_text_shared(model, Sharing::ALONE, &[])
    }

    /// As [`EngineArgs::open_text`], to answer with the adapter in the folder `lora`, if there is one, and with the part that reads
    /// pictures, if they are.
    pub fn open_adapted(
        &self,
        model: &Path,
        lora: Option<&Path>,
        pictures: Option<Pictures>,
    ) -> Result<TextModel> {
        let sharing = Sharing { pictures, ..Sharing::ALONE };
        let Some(folder) = lora else { return self.open_text_shared(model, sharing, &[]) };
        let source = adapter_at(0, folder);
        let mut model = self.open_text_shared(model, sharing, std::slice::from_ref(&source))?;
        model.engine.set_adapter(Some(&source.name))?;
        Ok(model)
    }

    /// How to open a model that is to answer requests.
    pub fn serving_options(&self, sharing: Sharing) -> OpenOptions {
        self.open_options(Activations::Int8, sharing)
    }

    /// Opens a model with adapters for several sequences at the same time.
    pub fn open_text_shared(
        &self,
        model: &Path,
        sharing: Sharing,
        adapters: &[AdapterSource],
    ) -> Result<TextModel> {
        let bar = loading_bar()?;
        let mut options = self.serving_options(sharing);
        for AdapterSource { name, folder } in adapters {
            options = options.adapter(name, folder);
        }
        let model = options.open_with_progress(model, |loaded, total| advance(&bar, loaded, total))?;
        bar.finish_and_clear();
        warn_of_context(&model.engine);
        Ok(model)
    }
}

/// The adapter in a folder, named by its place among others.
fn adapter_at(place: usize, folder: &Path) -> AdapterSource {
    AdapterSource { name: place.to_string(), folder: folder.to_owned() }
}

/// Says if the context is longer than what the model was made for.
fn warn_of_context(engine: &Engine) {
    let (context, trained) = (engine.context(), engine.model().context_length);
    if context > trained {
        eprintln!(
            "warning: --context {context}: the model was made for {trained} tokens; beyond them it may write nonsense"
        );
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
