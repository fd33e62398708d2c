//! `moeflux plan`: what a model would need and how fast it would be here, without loading or downloading it.

mod report;
mod subject;

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moeflux::Devices;
use moeflux::cost::{Plan, PlanOptions, PlanProgress};
use moeflux::memory::parse_size;
use moeflux_compute::backend::KvType;
use moeflux_compute::cpu::SimdLevel;
use report::Report;
use subject::Subject;

use crate::engine_args::{BackendKind, parse};
use crate::hub::Settings;
use crate::model::ModelArg;

/// Predict what a model needs and how fast it is on this machine, without loading or downloading it.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A GGUF file, a safetensors folder, a config.json, `demo`, a model on the Hub such as org/name:Q4_K_M (only headers
    /// are fetched), or `synth:SHAPE[:ENCODING]`
    model: ModelArg,
    /// Memory budgets, separated by commas [default: from the smallest that works to all experts in memory]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    memory: Vec<u64>,
    /// GPU memory budgets, separated by commas; of several GPUs, for each [default: all that is free, and parts of it]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    device_memory: Vec<u64>,
    /// Context length in tokens [default: the model's, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Length of the prompt to predict, in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Encoding to assume for a config.json: bf16, fp8, fp4, mxfp4, nvfp4, int4, int8, q4_k_m, q8_0, 2bit to 8bit [default: what it states, or bf16]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// The same as --quant Nbit
    #[arg(long, value_name = "N", conflicts_with = "quant")]
    bits: Option<u8>,
    /// Precision of cached keys and values: f16, f32, q8_0
    #[arg(long, value_name = "TYPE", value_parser = parse::<KvType>, default_value = "f16")]
    kv: KvType,
    /// Trace of this model from `moeflux trace`: replay its hits instead of assuming them
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Skew of the assumed routing: the expert of rank r is chosen r^-S times as often as the first
    #[arg(long, value_name = "S", default_value_t = 0.8)]
    skew: f64,
    /// Compute backend
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: BackendKind,
    /// GPUs to use, by number, or all: layers are divided over them [default: the first]
    #[arg(long, value_name = "NUMBERS", value_parser = parse::<Devices>)]
    devices: Option<Devices>,
    /// Compute threads [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Highest instruction set to use: portable, neon, avx2, avx512 [default: the machine's best]
    #[arg(long, value_name = "LEVEL", value_parser = parse::<SimdLevel>)]
    simd: Option<SimdLevel>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &PlanArgs) -> Result<()> {
    let options = PlanOptions {
        memory: args.memory.clone(),
        device_memory: args.device_memory.clone(),
        context: args.context,
        kv_type: Some(args.kv),
        prompt: args.prompt,
        skew: args.skew,
        trace: args.trace.clone(),
        compute: args.backend.compute(),
        devices: args.devices.clone().unwrap_or_default(),
        threads: args.threads,
        simd: args.simd,
        downloads: Settings::from_environment().cache,
    };
    let subject = Subject::new(&args.model, args.quant.as_deref(), args.bits)?;
    let bar = ProgressBar::hidden();
    bar.set_length(1000);
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar}")?);
    bar.set_message("measuring this machine");
    let plan = Plan::new(&subject.planned, &options, |progress| match progress {
        PlanProgress::Busy(part) => eprintln!(
            "warning: other programs take {:.0} % of the processors: measuring takes longer, and what it predicts is for a \
             machine as busy as now",
            100.0 * part
        ),
        PlanProgress::Measured(done) => {
            if bar.is_hidden() {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
            bar.set_position((1000.0 * done) as u64);
        }
    })
    .map_err(named)?;
    bar.finish_and_clear();
    crate::print(&if args.json { format!("{:#}\n", plan.json()) } else { Report(&plan).text() })
}

/// Options by the names that they have here.
fn named(error: moeflux::Error) -> anyhow::Error {
    match error {
        moeflux::Error::Option { option, expected, got } => {
            anyhow!("--{}: expected {expected}, got {got}", option.replace('_', "-"))
        }
        error => error.into(),
    }
}
