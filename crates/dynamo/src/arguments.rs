//! [`Arguments`]: the command line.

use std::path::PathBuf;

use clap::Parser;
use dynamo_backend_common::CommonArgs;
use moeflux::{Compute, Devices, OpenOptions, Options, Split};

/// Serves one model to the frontends of a Dynamo deployment.
#[derive(Debug, Clone, Parser)]
#[command(name = "moeflux-dynamo", version)]
pub struct Arguments {
    /// A GGUF file, a safetensors folder, or `demo`
    pub model: PathBuf,

    /// Name in the frontend's API [default: the file's]
    #[arg(long)]
    pub served_model_name: Option<String>,

    /// Folder with tokenizer.json and config.json, for a model that has neither and cannot express them
    #[arg(long, value_name = "FOLDER")]
    pub card: Option<PathBuf>,

    /// Most memory to use, as in 16GiB [default: most of what is free]
    #[arg(long, value_name = "SIZE", value_parser = moeflux::memory::parse_size)]
    pub memory: Option<u64>,

    /// GPUs to use, by number, such as 0,1, or all: as few as hold the model have some layers each,
    /// of several sequences at once all [default: the first]
    #[arg(long, value_name = "NUMBERS")]
    pub devices: Option<Devices>,

    /// What several GPUs divide: layers, or experts of every layer (each GPU has everything else, and evaluates every batch)
    #[arg(long, value_name = "WHAT", default_value_t)]
    pub split: Split,

    /// Most memory of the GPU to use; of several of each, or one size for each, separated by commas
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = moeflux::memory::parse_size)]
    pub device_memory: Vec<u64>,

    /// Use the processor even if there is a GPU
    #[arg(long)]
    pub cpu: bool,

    /// Threads that compute
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Maximum positions of a sequence
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,

    /// Maximum requests answered at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub sequences: usize,

    /// Tokens that all requests together may hold in the key-value cache
    #[arg(long, value_name = "N")]
    pub kv_tokens: Option<usize>,

    /// Sessions cached, so that requests with the same prefix skip its evaluation
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub kept_sessions: usize,

    /// Those of every worker.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl Arguments {
    /// How the model is opened.
    pub(crate) fn open_options(&self) -> OpenOptions {
        let engine = Options {
            context: self.context,
            sequences: self.sequences,
            kv_tokens: self.kv_tokens,
            ..Options::default()
        };
        let compute = if self.cpu { Compute::Cpu } else { Compute::Auto };
        let mut options = OpenOptions::new().engine_options(engine).compute(compute);
        if let Some(bytes) = self.memory {
            options = options.memory(bytes);
        }
        options = options.devices(self.devices.clone().unwrap_or_default());
        options = options.split(self.split).device_memories(self.device_memory.clone());
        self.threads.into_iter().fold(options, OpenOptions::threads)
    }
}
