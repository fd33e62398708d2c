//! [`Plan`]: what a model would need and how fast it would be on this machine, for several memory budgets, without loading or
//! downloading it.

mod json;
mod machine;
mod needs;
mod recorded;
mod subject;

use std::path::PathBuf;

use moeflux_compute::backend::{ActivationMode, Backend, KvType};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::gpu::{GpuOptions, computes_experts};
use moeflux_compute::graph::MatrixSpec;

use super::{CostModel, Link, MeasureOptions, Popularity, Prediction, Prompt, measure, memory_bandwidth};
use crate::experts::SlotPlan;
use crate::hardware::{Compute, Devices, threads};
use crate::models::Model;
use crate::{Error, Placement, Result, memory};

pub use json::tokens_per_second;
pub use machine::{DiskProbe, Machine, PlannedGpu};
pub use needs::PlannedMemory;
use recorded::Recorded;
pub use subject::PlannedModel;

/// Share of misses that the next layer's router guesses, if no trace says it: between the demo's and that of random
/// weights (docs/streaming.md).
const GUESSED: f64 = 0.85;

/// What is planned.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Memory budgets in bytes; none for those from the smallest that works to all experts in memory.
    pub memory: Vec<u64>,
    /// GPU memory budgets in bytes, of several GPUs for each; none for all that is free, and parts of it.
    pub device_memory: Vec<u64>,
    /// Context length in tokens; by default the model's, at most 4096.
    pub context: Option<usize>,
    /// Precision of cached keys and values; f16 by default.
    pub kv_type: Option<KvType>,
    /// Tokens of the prompt to predict.
    pub prompt: usize,
    /// Skew of the assumed routing: the expert of rank r is chosen r^-skew times as often as the first; from 0 to 10.
    pub skew: f64,
    /// A trace of the model, to replay its hits instead of assuming them.
    pub trace: Option<PathBuf>,
    /// What computes.
    pub compute: Compute,
    /// Which GPUs, if they compute.
    pub devices: Devices,
    /// Compute threads; by default one per core.
    pub threads: Option<usize>,
    /// Highest instruction set of the processor to use.
    pub simd: Option<SimdLevel>,
    /// Folder that the model would be downloaded to, whose disk is tried if the model is not here.
    pub downloads: PathBuf,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            memory: vec![],
            device_memory: vec![],
            context: None,
            kv_type: None,
            prompt: 512,
            skew: 0.8,
            trace: None,
            compute: Compute::Auto,
            devices: Devices::First,
            threads: None,
            simd: None,
            downloads: std::env::temp_dir(),
        }
    }
}

impl PlanOptions {
    fn check(&self) -> Result<()> {
        let refuse = |option, expected: &str, got: String| {
            Err(Error::Option { option, expected: expected.to_owned(), got })
        };
        if self.prompt == 0 {
            return refuse("prompt", "a positive number", "0".to_owned());
        }
        if !(0.0..=10.0).contains(&self.skew) {
            return refuse("skew", "a number from 0 to 10", self.skew.to_string());
        }
        Ok(())
    }

    fn measuring(
        &self,
        model: &Model,
        backend: &dyn Backend,
        needs: &PlannedMemory,
        gpu: Option<&PlannedGpu>,
    ) -> Result<MeasureOptions> {
        // Chunks are as long as they are with everything in memory.
        let Placement { chunk, kv_type, .. } = Placement::new(model, backend, &self.engine(u64::MAX))?;
        let memory = memory::available().unwrap_or(4 << 30);
        Ok(MeasureOptions {
            activations: ActivationMode::Int8,
            kv_type,
            context: needs.context,
            prompt: Prompt { tokens: self.prompt.min(needs.context), chunk },
            memory: gpu.map_or(memory, |gpu| memory.min(gpu.free)) / 4,
            cache: if gpu.is_some() { 64 << 20 } else { machine::cache_bytes() },
            device: gpu.is_some(),
        })
    }
}

/// What planning tells while it goes on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PlanProgress {
    /// Other programs take this part of the processors' time, 0..=1: measuring takes longer, and what it predicts is for a
    /// machine as busy as now.
    Busy(f64),
    /// This part of computing has been measured, 0..=1.
    Measured(f64),
}

/// What a budget gives.
#[derive(Debug)]
pub struct PlanRow {
    /// Bytes of memory.
    pub memory: u64,
    /// Of a GPU, if there is one; of several, of each.
    pub device_memory: Option<u64>,
    /// Share of experts that memory holds.
    pub held: f64,
    /// Share that the GPUs hold.
    pub device_held: Option<f64>,
    /// Tokens of a prompt that are evaluated together.
    pub chunk: usize,
    /// With uniform routing, or replayed from a trace.
    pub plain: Prediction,
    /// With skewed routing.
    pub skewed: Option<Prediction>,
    /// Whether this machine has so much.
    pub fits: bool,
}

/// Everything that was found out.
#[derive(Debug)]
pub struct Plan {
    /// What the model was called.
    pub name: String,
    /// What is said of it besides its name.
    pub note: String,
    /// Weights of the model.
    pub parameters: u64,
    /// Experts in all layers.
    pub experts: usize,
    /// Layers that have experts.
    pub routed_layers: usize,
    /// What it needs.
    pub needs: PlannedMemory,
    /// Where it would run.
    pub machine: Machine,
    /// The prompt that speeds are for.
    pub prompt: Prompt,
    /// Of the second prediction, if there is one.
    pub skew: Option<f64>,
    /// Share of misses that are prefetched.
    pub guessed: f64,
    /// What budgets give.
    pub rows: Vec<PlanRow>,
}

impl Plan {
    /// Measures this machine for some seconds and predicts.
    ///
    /// # Errors
    /// [`Error::Option`] for options without meaning; if the trace is not one of this model, or a budget is too small.
    pub fn new(
        planned: &PlannedModel,
        options: &PlanOptions,
        mut progress: impl FnMut(PlanProgress),
    ) -> Result<Self> {
        options.check()?;
        let threads = threads(options.threads)?;
        let model = planned.model();
        let recorded = options.trace.as_ref().map(|path| Recorded::read(path, model)).transpose()?;
        let found = options.compute.gpus(&options.devices)?;
        let gpu = found.as_ref().and_then(|(found, _)| {
            let (name, count) = (found.first()?.info.name.clone(), found.len());
            Some(PlannedGpu { name, count, free: found.iter().map(|gpu| gpu.info.free).min()? })
        });
        if gpu.is_none() && !options.device_memory.is_empty() {
            let (expected, got) = ("a GPU that computes".to_owned(), "none".to_owned());
            return Err(Error::Option { option: "device_memory", expected, got });
        }
        let backend: Box<dyn Backend> = match found {
            Some((found, gpus)) => gpus.backend(found, GpuOptions::default()),
            None => Box::new(CpuBackend::new(threads, options.simd)?),
        };
        let needs = PlannedMemory::new(model, &*backend, options)?;
        let busy = machine::busy();
        busy.into_iter().for_each(|part| progress(PlanProgress::Busy(part)));
        progress(PlanProgress::Measured(0.0));
        let disk = DiskProbe::of(planned, &options.downloads, threads)?;
        let bandwidth = memory_bandwidth(threads)?;
        let measuring = options.measuring(model, &*backend, &needs, gpu.as_ref())?;
        let measured = measure(model, &*backend, &measuring, |done| progress(PlanProgress::Measured(done)))?;
        let machine = Machine { backend: backend.describe(), bandwidth, measured, disk, gpu, busy };
        let rows = rows(model, &*backend, options, &needs, &machine, recorded.as_ref())?;
        Ok(Self {
            name: planned.name().to_owned(),
            note: planned.note().to_owned(),
            parameters: parameters(model),
            experts: model.experts.shapes().iter().map(|set| set.experts).sum(),
            routed_layers: model.experts.sets(),
            needs,
            machine,
            prompt: measuring.prompt,
            skew: recorded.is_none().then_some(options.skew),
            guessed: recorded.as_ref().map_or(GUESSED, |recorded| recorded.guessed),
            rows,
        })
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.machine.measured.layers().len()
    }

    /// The row of the budget that is fastest here.
    pub fn best(&self) -> Option<&PlanRow> {
        let fitting = self.rows.iter().filter(|row| row.fits);
        fitting.max_by(|a, b| a.plain.decode.total_cmp(&b.plain.decode))
    }
}

fn parameters(model: &Model) -> u64 {
    let count = |matrix: &MatrixSpec| matrix.rows as u64 * matrix.cols as u64;
    let graph = &model.graph;
    let experts = graph
        .expert_sets()
        .iter()
        .map(|set| set.matrices().map(|matrix| count(&matrix)).sum::<u64>() * set.experts as u64);
    graph.weights().iter().map(|weight| count(&weight.matrix)).sum::<u64>() + experts.sum::<u64>()
}

fn rows(
    model: &Model,
    backend: &dyn Backend,
    options: &PlanOptions,
    needs: &PlannedMemory,
    machine: &Machine,
    recorded: Option<&Recorded>,
) -> Result<Vec<PlanRow>> {
    let Machine { measured, disk, gpu, .. } = machine;
    let shapes = model.experts.shapes();
    let all: usize = shapes.iter().map(|set| set.experts).sum();
    let devices = gpu.as_ref().map_or(1, |gpu| gpu.count);
    let device_budgets = needs.device_budgets(&options.device_memory, gpu.as_ref());
    let shared = computes_experts(&model.graph);
    let mut rows = vec![];
    for memory in needs.budgets(&options.memory) {
        let placement = Placement::new(model, backend, &options.engine(memory))?;
        let host_slots = if placement.keep_experts { all } else { placement.slots.slots() };
        for device_memory in &device_budgets {
            let device_held = device_memory.map(|bytes| {
                let all = bytes.saturating_mul(devices as u64);
                let left = all.saturating_sub(needs.beside_experts(devices));
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
                processor: shared.then_some(machine.bandwidth),
                host_decides: !placement.keep_experts,
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
            let prompt = Prompt { tokens: options.prompt.min(placement.context), chunk: placement.chunk };
            let predict = |popularity| costs.predict(plan, popularity, prompt, placement.context);
            let (plain, skewed) = match recorded {
                Some(recorded) => (predict(recorded.popularity(plan)), None),
                None => (predict(Popularity::Uniform), Some(predict(Popularity::Skewed(options.skew)))),
            };
            rows.push(PlanRow {
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
