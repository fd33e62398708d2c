//! `moeflux plan`: what a model would need and how fast it would be here, without loading or downloading it.

mod machine;
mod report;
mod subject;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use moeflux::cost::{
    CostModel, Link, MeasureOptions, Popularity, Prediction, Prompt, measure, memory_bandwidth,
};
use moeflux::experts::replay::{guesses, replay};
use moeflux::experts::trace::{Request, Trace, TraceHeader};
use moeflux::experts::{PolicyKind, SlotPlan};
use moeflux::hardware::threads;
use moeflux::memory::parse_size;
use moeflux::models::Model;
use moeflux::{Error, Options, Placement, memory};
use moeflux_compute::backend::{ActivationMode, Backend, KvType, PAGE_TOKENS, page_bytes};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::GpuOptions;

use crate::engine_args::{BackendKind, parse};
use crate::model::ModelArg;
use machine::{Gpu, Machine};
use report::Report;
use subject::Subject;

/// Share of misses that the next layer's router guesses, if no trace says it: between the demo's and that of random
/// weights (docs/streaming.md).
const GUESSED: f64 = 0.85;

/// Predict what a model needs and how fast it is on this machine, without loading or downloading it.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A GGUF file, a safetensors folder, a config.json, `demo`, a model on the Hub such as org/name:Q4_K_M (only headers
    /// are fetched), or `synth:SHAPE[:ENCODING]`
    model: ModelArg,
    /// Memory budgets, separated by commas [default: from the smallest that works to all experts in memory]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    memory: Vec<u64>,
    /// GPU memory budgets, separated by commas [default: all that is free, and parts of it]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    device_memory: Vec<u64>,
    /// Context length in tokens [default: the model's, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Length of the prompt to predict, in tokens
    #[arg(long, value_name = "N", default_value_t = 512)]
    prompt: usize,
    /// Encoding to assume for a config.json: bf16, fp8, fp4, mxfp4, q4_k_m, q8_0, 2bit to 8bit [default: what it states, or bf16]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// The same as --quant Nbit
    #[arg(long, value_name = "N", conflicts_with = "quant")]
    bits: Option<u8>,
    /// Trace of this model from `moeflux trace`: replay its hits instead of assuming them
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Skew of the assumed routing: the expert of rank r is chosen r^-S times as often as the first
    #[arg(long, value_name = "S", default_value_t = 0.8)]
    skew: f64,
    /// Compute backend
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: BackendKind,
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

/// A recorded trace, to be replayed.
struct Recorded {
    header: TraceHeader,
    requests: Vec<Request>,
    guessed: f64,
}

/// What a budget gives.
struct Row {
    memory: u64,
    /// Of a GPU, if there is one.
    device_memory: Option<u64>,
    /// Share of experts that memory holds, and that the GPU does.
    held: f64,
    device_held: Option<f64>,
    chunk: usize,
    /// With uniform routing, or replayed from a trace.
    plain: Prediction,
    /// With skewed routing.
    skewed: Option<Prediction>,
    /// Whether this machine has so much.
    fits: bool,
}

/// Memory, in bytes.
struct Needs {
    trunk: u64,
    experts: u64,
    kv: u64,
    scratch: u64,
    overhead: u64,
    all_resident: u64,
    minimum: u64,
    context: usize,
    available: Option<u64>,
}

pub fn run(args: &PlanArgs) -> Result<()> {
    if args.prompt == 0 {
        bail!("--prompt: expected a positive number, got 0");
    }
    if !(0.0..=10.0).contains(&args.skew) {
        bail!("--skew: expected a number from 0 to 10, got {}", args.skew);
    }
    let threads = threads(args.threads)?;
    let subject = Subject::new(&args.model, args.quant.as_deref(), args.bits)?;
    let model = subject.model();
    let recorded = args.trace.as_ref().map(|path| Recorded::read(path, model)).transpose()?;
    let found = args.backend.compute().gpu()?;
    let gpu = found.as_ref().map(|(device, _)| Gpu { name: device.name.clone(), free: device.free });
    if gpu.is_none() && !args.device_memory.is_empty() {
        bail!("--device-memory: no GPU found");
    }
    let backend: Box<dyn Backend> = match found {
        Some((device, gpus)) => gpus.backend(device, GpuOptions::default()),
        None => Box::new(CpuBackend::new(threads, args.simd)?),
    };
    let needs = Needs::new(model, &*backend, args)?;
    let busy = machine::busy();
    if let Some(part) = busy {
        eprintln!(
            "warning: other programs take {:.0} % of the processors: measuring takes longer, and what it predicts is for a \
             machine as busy as now",
            100.0 * part
        );
    }
    let bar = machine::bar("measuring this machine")?;
    let disk = machine::disk(&subject, threads)?;
    let bandwidth = memory_bandwidth(threads)?;
    let options = args.measure_options(model, &*backend, &needs, gpu.as_ref())?;
    let measured = measure(model, &*backend, &options, |done| {
        bar.set_position((1000.0 * done) as u64);
    })?;
    bar.finish_and_clear();
    let machine = Machine { backend: backend.describe(), bandwidth, measured, disk, gpu, busy };
    let rows = args.rows(model, &*backend, &needs, &machine, recorded.as_ref())?;
    let report = Report {
        subject: &subject,
        needs: &needs,
        machine: &machine,
        prompt: options.prompt,
        skew: recorded.is_none().then_some(args.skew),
        guessed: recorded.as_ref().map_or(GUESSED, |recorded| recorded.guessed),
        rows: &rows,
    };
    crate::print(&if args.json { format!("{:#}\n", report.json()) } else { report.text() })
}

impl PlanArgs {
    fn options(&self, memory: Option<u64>) -> Options {
        Options { memory, context: self.context, ..Options::default() }
    }

    /// From the smallest budget that works to everything.
    fn budgets(&self, needs: &Needs) -> Vec<u64> {
        if !self.memory.is_empty() {
            return self.memory.clone();
        }
        let rest = needs.all_resident - needs.all_resident.min(needs.experts);
        let part = |n: u64| rest + needs.experts / 4 * n;
        let mut all = vec![needs.minimum, part(1), part(2), part(3), needs.all_resident];
        // Whole mebibytes, so that they can be asked for.
        all.iter_mut().for_each(|bytes| *bytes = bytes.next_multiple_of(1 << 20));
        all.extend(needs.available.map(|bytes| bytes >> 20 << 20));
        all.retain(|bytes| (needs.minimum..=needs.all_resident.next_multiple_of(1 << 20)).contains(bytes));
        all.sort_unstable();
        all.dedup();
        all
    }

    /// A quarter, half and all of the experts, as far as a GPU has memory for them.
    fn device_budgets(&self, needs: &Needs, gpu: Option<&Gpu>) -> Vec<Option<u64>> {
        let Some(gpu) = gpu else { return vec![None] };
        if !self.device_memory.is_empty() {
            return self.device_memory.iter().copied().map(Some).collect();
        }
        let parts = [needs.experts / 4, needs.experts / 2, needs.experts];
        let parts = parts.map(|part| needs.beside_experts() + part);
        let mut all: Vec<u64> = parts.into_iter().filter(|bytes| *bytes <= gpu.usable()).collect();
        if all.len() < parts.len() {
            all.push(gpu.usable());
        }
        all.into_iter().map(Some).collect()
    }

    fn measure_options(
        &self,
        model: &Model,
        backend: &dyn Backend,
        needs: &Needs,
        gpu: Option<&Gpu>,
    ) -> Result<MeasureOptions> {
        // Chunks are as long as they are with everything in memory.
        let chunk = Placement::new(model, backend, &self.options(Some(u64::MAX)))?.chunk;
        let memory = memory::available().unwrap_or(4 << 30);
        Ok(MeasureOptions {
            activations: ActivationMode::Int8,
            kv_type: KvType::F16,
            context: needs.context,
            prompt: Prompt { tokens: self.prompt.min(needs.context), chunk },
            memory: gpu.map_or(memory, |gpu| memory.min(gpu.free)) / 4,
            cache: if gpu.is_some() { 64 << 20 } else { machine::cache_bytes() },
            device: gpu.is_some(),
        })
    }

    fn rows(
        &self,
        model: &Model,
        backend: &dyn Backend,
        needs: &Needs,
        machine: &Machine,
        recorded: Option<&Recorded>,
    ) -> Result<Vec<Row>> {
        let Machine { measured, disk, gpu, .. } = machine;
        let shapes = model.experts.shapes();
        let all: usize = shapes.iter().map(|set| set.experts).sum();
        let device_budgets = self.device_budgets(needs, gpu.as_ref());
        let mut rows = vec![];
        for memory in self.budgets(needs) {
            let placement = Placement::new(model, backend, &self.options(Some(memory)))?;
            let host_slots = if placement.keep_experts { all } else { placement.slots.slots() };
            for device_memory in &device_budgets {
                let device_held = device_memory.map(|bytes| {
                    let left = bytes.saturating_sub(needs.beside_experts());
                    (left as f64 / needs.experts.max(1) as f64).min(1.0)
                });
                // What a backend keeps needs no slots in front of it; else it holds other experts than the host.
                let plan = match device_held {
                    _ if placement.keep_experts => &SlotPlan::of_slots(&shapes, all),
                    Some(held) => {
                        let slots = placement.slots.slots() + (held * all as f64) as usize;
                        &SlotPlan::of_slots(&shapes, slots.min(all))
                    }
                    None => &placement.slots,
                };
                let link = device_held.map(|held| Link {
                    bandwidth: measured.link.unwrap_or(f64::INFINITY),
                    slots: shapes.iter().map(|set| held * set.experts as f64).collect(),
                });
                let costs = CostModel {
                    layers: measured.layers().to_vec(),
                    head: measured.head,
                    disk: disk.disk,
                    // Nothing is prefetched for a device.
                    guessed: match link {
                        Some(_) => 0.0,
                        None => recorded.map_or(GUESSED, |recorded| recorded.guessed),
                    },
                    link,
                };
                let prompt = Prompt { tokens: self.prompt.min(placement.context), chunk: placement.chunk };
                let predict = |popularity| costs.predict(plan, popularity, prompt, placement.context);
                let (plain, skewed) = match recorded {
                    Some(recorded) => (predict(recorded.popularity(plan)), None),
                    None => (predict(Popularity::Uniform), Some(predict(Popularity::Skewed(self.skew)))),
                };
                rows.push(Row {
                    memory,
                    device_memory: *device_memory,
                    held: host_slots.min(all) as f64 / all.max(1) as f64,
                    device_held,
                    chunk: placement.chunk,
                    plain,
                    skewed,
                    fits: needs.available.is_none_or(|available| memory <= available),
                });
            }
        }
        Ok(rows)
    }
}

impl Needs {
    /// What a device needs besides experts.
    fn beside_experts(&self) -> u64 {
        self.trunk + self.kv + self.scratch
    }

    fn new(model: &Model, backend: &dyn Backend, args: &PlanArgs) -> Result<Self> {
        let place = |memory| Placement::new(model, backend, &args.options(Some(memory)));
        let whole = place(u64::MAX)?;
        let needs = whole.budget.needs;
        let memory::Needs { trunk, kv, scratch, overhead, .. } = needs;
        let minimum = match place(0) {
            Err(Error::Budget { minimum, .. }) => minimum,
            Err(error) => return Err(error.into()),
            Ok(_) => 0,
        };
        let pages =
            page_bytes(&model.graph, whole.kv_type) as u64 * whole.context.div_ceil(PAGE_TOKENS) as u64;
        Ok(Self {
            trunk,
            experts: model.experts.total_bytes(),
            kv: kv.max(pages),
            scratch,
            overhead,
            all_resident: needs.held() + whole.slots.bytes(),
            minimum,
            context: whole.context,
            // As the engine takes it if nothing is asked for.
            available: memory::available().map(|bytes| bytes / 10 * 9),
        })
    }
}

impl Recorded {
    fn read(path: &std::path::Path, model: &Model) -> Result<Self> {
        let (header, requests) = Trace::read(path)?;
        let described = |sets: &[moeflux::experts::slots::SetShape]| -> Vec<usize> {
            sets.iter().map(|set| set.experts).collect()
        };
        let shapes = model.experts.shapes();
        if described(&header.sets) != described(&shapes) {
            bail!(
                "{}: a trace of {}, which has {} layers with experts; this model has {}",
                path.display(),
                header.model,
                header.sets.len(),
                shapes.len()
            );
        }
        if requests.is_empty() {
            bail!("{}: the trace holds no requests", path.display());
        }
        let [router, _] = guesses(&header.sets, &requests);
        let guessed = if router.guessed > 0 { router.recall() } else { GUESSED };
        Ok(Self { header: TraceHeader { sets: shapes, ..header }, requests, guessed })
    }

    /// Hits with the slots of `plan`, after the first quarter of the trace has filled them.
    fn popularity(&self, plan: &SlotPlan) -> Popularity {
        let skip = self.requests.len() / 4;
        let replayed = replay(&self.header.sets, &self.requests, plan, PolicyKind::default(), skip);
        Popularity::Measured(replayed.hit_rate())
    }
}
