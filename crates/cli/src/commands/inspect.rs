//! `moeflux inspect`: what is in a checkpoint and how it would fit this machine. Reads headers, no weights.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use moeflux::chat_template::ChatTemplate;
use moeflux::checkpoint::{Checkpoint, Format};
use moeflux::error::size;

use moeflux::models::{self, Model};
use moeflux::pack::Loss;
use moeflux::synth::{Plan, Recipe};
use moeflux::tokenizer::Tokenizer;
use moeflux::{Compute, Devices, Error, Minima, Options, Placement, memory};
use moeflux_compute::DType;
use moeflux_compute::backend::{KvType, PAGE_TOKENS, page_bytes};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::gpu::GpuOptions;
use moeflux_compute::graph::{ExpertSetId, MatrixSpec, MoeExpertsOp, Op, RouteOp};
use serde_json::{Value, json};

use crate::engine_args::parse;
use crate::model::ModelArg;
use crate::table::Table;

/// Show what is in a checkpoint and how much of it fits in this machine's memory.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A GGUF file, a safetensors folder, `demo`, a model on the Hub such as org/name:Q4_K_M, or
    /// `synth:SHAPE[:ENCODING]` for what `synth` would write
    model: ModelArg,
    /// Precision of cached keys and values: f16, f32, q8_0
    #[arg(long, value_name = "TYPE", value_parser = parse::<KvType>, default_value = "f16")]
    kv: KvType,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A weight as the model sees it: an MLX module's three tensors are one.
struct Weight {
    name: String,
    encoding: String,
    shape: Vec<usize>,
    bytes: u64,
}

/// Tensors of one encoding.
struct Share {
    encoding: String,
    tensors: usize,
    bytes: u64,
}

/// What the recorded model says.
struct Facts {
    layers: usize,
    parameters: u64,
    active_parameters: u64,
    trunk_bytes: u64,
    expert_bytes: u64,
    /// Of one expert, the largest layer's.
    largest_expert_bytes: u64,
    /// Bytes that a token needs where no expert is in memory.
    routed_bytes_per_token: u64,
    /// (layers, experts of each, experts per token), for layers that agree in it.
    routed_layers: Vec<(usize, usize, usize)>,
    kv_bytes_per_token: u64,
    context_length: usize,
    vocab_size: usize,
}

/// A layer that drafts tokens.
struct Drafts {
    resident_bytes: u64,
    expert_bytes: u64,
    /// The least memory that the model needs with it.
    minimum: u64,
}

/// GPUs with memory of their own, and what the model needs at least with them.
struct OnGpu {
    name: String,
    count: usize,
    minima: Minima,
    /// Of each, if all compute.
    minimum_of_each: Option<u64>,
}

/// How the model fits into memory with default options.
struct Fit {
    available: Option<u64>,
    all_resident: u64,
    minimum: u64,
    gpu: Option<OnGpu>,
    /// Experts in memory, of all, at the available memory.
    slots: Option<(usize, usize)>,
}

pub fn run(args: &InspectArgs) -> Result<()> {
    let report = match args.model.to_string().strip_prefix("synth:") {
        Some(shape) => described(args, shape)?,
        None => stored(args)?,
    };
    crate::print(&if args.json {
        format!("{:#}\n", report.json(args.tensors))
    } else {
        report.text(args.tensors)
    })
}

/// On a checkpoint that could be made.
fn described(args: &InspectArgs, shape: &str) -> Result<Report> {
    let recipe = Recipe::whole(shape)?;
    let plan = Plan::new(recipe)?;
    let weight = |(name, dtype, shape, bytes): (&str, DType, &[usize], u64)| Weight {
        name: name.to_owned(),
        encoding: dtype.to_string(),
        shape: shape.to_vec(),
        bytes,
    };
    let weights: Vec<Weight> = plan.tensors().map(weight).collect();
    Ok(Report {
        model: args.model.to_string(),
        format: recipe.encoding.format(),
        files: 0,
        architecture: models::architecture(plan.model().checkpoint())?,
        shares: shares(&weights),
        obstacle: None,
        tokenizer: format!("{} tokens, synthetic", recipe.shape.vocab_size()),
        template: "ChatML".to_owned(),
        lost: None,
        facts: Some(Facts::new(plan.model(), args.kv)),
        drafts: None,
        fit: Some(Fit::new(plan.model(), args.kv)?),
        weights: if args.tensors { weights } else { vec![] },
    })
}

/// On a checkpoint that is there.
fn stored(args: &InspectArgs) -> Result<Report> {
    let path = args.model.path()?;
    let checkpoint = Arc::new(Checkpoint::open(&path)?);
    let weights = weights(&checkpoint);
    let architecture = models::architecture(&checkpoint).unwrap_or_else(|_| "unknown".to_owned());
    // What cannot be run can still be looked at.
    let model = models::record(Arc::clone(&checkpoint));
    let facts = model.as_ref().ok().map(|model| Facts::new(model, args.kv));
    let fit = model.as_ref().ok().map(|model| Fit::new(model, args.kv)).transpose()?;
    let drafts = model.as_ref().ok().and_then(|_| Drafts::find(&checkpoint).ok().flatten());
    Ok(Report {
        model: path.display().to_string(),
        format: checkpoint.format(),
        files: checkpoint.files().len(),
        architecture,
        shares: shares(&weights),
        obstacle: model.as_ref().err().map(Error::to_string),
        tokenizer: describe_tokenizer(&checkpoint),
        lost: Loss::of(&checkpoint),
        template: match ChatTemplate::from_checkpoint(&checkpoint) {
            Ok(Some(_)) => "yes".to_owned(),
            Ok(None) => "no".to_owned(),
            Err(error) => error.to_string(),
        },
        facts,
        drafts,
        fit,
        weights: if args.tensors { weights } else { vec![] },
    })
}

fn weights(checkpoint: &Checkpoint) -> Vec<Weight> {
    let mut parts: HashSet<String> = HashSet::new();
    let mut resolved = HashMap::new();
    for name in checkpoint.names() {
        // A tensor that is no usable weight is listed as its file declares it.
        if let Ok(Some(stored)) = checkpoint.weight(name) {
            if let (true, Some(module)) = (stored.planes.len() > 1, name.strip_suffix(".weight")) {
                parts.extend(["scales", "biases"].map(|part| format!("{module}.{part}")));
            }
            resolved.insert(name, stored);
        }
    }
    let entries = checkpoint.entries().iter().filter(|entry| !parts.contains(&entry.name));
    entries
        .map(|entry| match resolved.remove(entry.name.as_str()) {
            Some(stored) => Weight {
                name: entry.name.clone(),
                encoding: stored.dtype.to_string(),
                bytes: stored.bytes(),
                shape: stored.shape,
            },
            None => Weight {
                name: entry.name.clone(),
                encoding: entry.encoding.to_string(),
                bytes: entry.range.len,
                shape: entry.shape.clone(),
            },
        })
        .collect()
}

/// Encodings by descending bytes.
fn shares(weights: &[Weight]) -> Vec<Share> {
    let mut shares: Vec<Share> = vec![];
    for weight in weights {
        match shares.iter_mut().find(|share| share.encoding == weight.encoding) {
            Some(share) => {
                share.tensors += 1;
                share.bytes += weight.bytes;
            }
            None => shares.push(Share { encoding: weight.encoding.clone(), tensors: 1, bytes: weight.bytes }),
        }
    }
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares
}

fn describe_tokenizer(checkpoint: &Checkpoint) -> String {
    match Tokenizer::from_checkpoint(checkpoint) {
        Ok(tokenizer) => format!("{} tokens", tokenizer.vocab_size()),
        Err(error) => error.to_string(),
    }
}

impl Facts {
    fn new(model: &Model, kv_type: KvType) -> Self {
        let graph = &model.graph;
        let count = |matrix: &MatrixSpec| matrix.rows as u64 * matrix.cols as u64;
        let trunk: u64 = graph.weights().iter().map(|weight| count(&weight.matrix)).sum();
        let (mut top_k, mut per_layer) = (0, HashMap::new());
        for node in graph.nodes() {
            match node.op {
                Op::Route(RouteOp { route, .. }) => top_k = route.top_k,
                Op::MoeExperts(MoeExpertsOp { experts, .. }) => drop(per_layer.insert(experts, top_k)),
                _ => {}
            }
        }
        let mut facts = Self {
            layers: graph.layers(),
            parameters: trunk,
            active_parameters: trunk,
            trunk_bytes: model.trunk_bytes(),
            expert_bytes: model.experts.total_bytes(),
            largest_expert_bytes: 0,
            routed_bytes_per_token: 0,
            routed_layers: vec![],
            kv_bytes_per_token: (page_bytes(graph, kv_type) / PAGE_TOKENS) as u64,
            context_length: model.context_length,
            vocab_size: graph.vocab_size(),
        };
        for (index, set) in graph.expert_sets().iter().enumerate() {
            let id = ExpertSetId(index);
            let top_k = per_layer.get(&id).copied().unwrap_or(0);
            let expert: u64 = set.matrices().map(|matrix| count(&matrix)).sum();
            let bytes = model.experts.expert_bytes(id);
            facts.parameters += expert * set.experts as u64;
            facts.active_parameters += expert * top_k as u64;
            facts.largest_expert_bytes = facts.largest_expert_bytes.max(bytes);
            facts.routed_bytes_per_token += bytes * top_k as u64;
            match facts.routed_layers.iter_mut().find(|l| (l.1, l.2) == (set.experts, top_k)) {
                Some(layers) => layers.0 += 1,
                None => facts.routed_layers.push((1, set.experts, top_k)),
            }
        }
        facts
    }
}

impl Fit {
    fn new(model: &Model, kv_type: KvType) -> Result<Self> {
        let options = Options { kv_type: Some(kv_type), ..Options::default() };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let backend = CpuBackend::new(threads, None)?;
        let place = |memory| Placement::new(model, &backend, &Options { memory, ..options.clone() });
        let unbounded = place(Some(u64::MAX))?;
        let beside_experts = unbounded.budget.total - unbounded.budget.experts;
        let minimum = Minima::new(model, &backend, &options)?.host;
        let slots = place(None).ok().map(|placement| (placement.slots.slots(), unbounded.slots.slots()));
        Ok(Self {
            available: memory::available(),
            all_resident: beside_experts + unbounded.slots.bytes(),
            minimum,
            gpu: OnGpu::find(model, &options)?,
            slots,
        })
    }
}

impl Drafts {
    fn find(checkpoint: &Arc<Checkpoint>) -> Result<Option<Self>> {
        let model = models::record_with_draft(Arc::clone(checkpoint), None)?;
        let Some((resident_bytes, expert_bytes)) = model.draft_bytes() else { return Ok(None) };
        let backend = CpuBackend::new(std::thread::available_parallelism().map_or(1, usize::from), None)?;
        let minimum = Minima::new(&model, &backend, &Options::default())?.host;
        Ok(Some(Self { resident_bytes, expert_bytes, minimum }))
    }
}

impl OnGpu {
    fn find(model: &Model, options: &Options) -> Result<Option<Self>> {
        let Ok(Some((all, gpus))) = Compute::Auto.gpus(&Devices::All) else { return Ok(None) };
        let Some(first) = all.first().filter(|gpu| !gpu.info.unified).cloned() else { return Ok(None) };
        let minima = |gpus_used| {
            let backend = gpus.backend(gpus_used, GpuOptions::default());
            Minima::new(model, &*backend, options)
        };
        let (name, count) = (first.info.name.clone(), all.len());
        let minimum_of_each = if count > 1 { minima(all)?.device } else { None };
        Ok(Some(Self { name, count, minima: minima(vec![first])?, minimum_of_each }))
    }
}

struct Report {
    model: String,
    format: Format,
    /// 0 if it is only described.
    files: usize,
    architecture: String,
    shares: Vec<Share>,
    /// Why it cannot be run.
    obstacle: Option<String>,
    tokenizer: String,
    template: String,
    /// Bits of experts that have lost some, and what that has changed.
    lost: Option<(u64, Loss)>,
    facts: Option<Facts>,
    drafts: Option<Drafts>,
    fit: Option<Fit>,
    weights: Vec<Weight>,
}

impl Report {
    fn format(&self) -> &'static str {
        match self.format {
            Format::Gguf => "GGUF",
            Format::HuggingFace => "Hugging Face safetensors",
            Format::Mlx => "MLX safetensors",
        }
    }

    fn bytes(&self) -> u64 {
        self.shares.iter().map(|share| share.bytes).sum()
    }

    fn text(&self, tensors: bool) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: String| text += &format!("{key:<16} {value}\n");
        line("model", self.model.clone());
        line("architecture", self.architecture.clone());
        let files = match self.files {
            0 => "not on disk".to_owned(),
            1 => "1 file".to_owned(),
            n => format!("{n} files"),
        };
        line("format", format!("{}, {files}, {} of tensors", self.format(), size(self.bytes())));
        if let Some(obstacle) = &self.obstacle {
            line("cannot run", obstacle.clone());
        }
        if let Some(facts) = &self.facts {
            facts.lines(&mut line);
        }
        if let Some(Drafts { resident_bytes, expert_bytes, minimum }) = self.drafts {
            let [resident, experts, minimum] = [resident_bytes, expert_bytes, minimum].map(size);
            let with = format!("with --spec-type mtp at least {minimum}");
            line("drafts tokens", format!("by a layer, resident {resident}, experts {experts}; {with}"));
        }
        line("tokenizer", self.tokenizer.clone());
        line("chat template", self.template.clone());
        if let Some((bits, loss)) = self.lost {
            line("lossy", format!("experts re-encoded to {bits} bits: {loss}"));
        }
        if let Some(fit) = &self.fit {
            fit.lines(&mut line);
        }
        let mut table = Table::new(&["encoding", "tensors", "bytes", "share"]);
        let all = self.bytes().max(1) as f64;
        for share in &self.shares {
            table.row(&[
                share.encoding.clone(),
                share.tensors.to_string(),
                size(share.bytes),
                format!("{:.1} %", 100.0 * share.bytes as f64 / all),
            ]);
        }
        text += &format!("\n{table}");
        if tensors {
            let mut table = Table::new(&["tensor", "encoding", "shape", "bytes"]);
            for weight in &self.weights {
                let shape: Vec<String> = weight.shape.iter().map(usize::to_string).collect();
                table.row(&[
                    weight.name.clone(),
                    weight.encoding.clone(),
                    shape.join("×"),
                    weight.bytes.to_string(),
                ]);
            }
            text += &format!("\n{table}");
        }
        text
    }

    fn json(&self, tensors: bool) -> Value {
        let encodings = self.shares.iter().map(
            |share| json!({ "encoding": share.encoding, "tensors": share.tensors, "bytes": share.bytes }),
        );
        let mut report = json!({
            "model": self.model,
            "architecture": self.architecture,
            "format": self.format(),
            "files": self.files,
            "bytes": self.bytes(),
            "cannot_run": self.obstacle,
            "tokenizer": self.tokenizer,
            "chat_template": self.template,
            "experts_lost": self.lost.map(|(bits, loss)| json!({ "bits": bits, "kl_divergence": loss.kl_divergence })),
            "encodings": encodings.collect::<Vec<_>>(),
            "facts": self.facts.as_ref().map(Facts::json),
            "drafts": self.drafts.as_ref().map(|drafts| json!({
                "resident_bytes": drafts.resident_bytes,
                "expert_bytes": drafts.expert_bytes,
                "minimum": drafts.minimum,
            })),
            "memory": self.fit.as_ref().map(Fit::json),
        });
        if tensors {
            let tensor = |weight: &Weight| {
                json!({
                    "name": weight.name,
                    "encoding": weight.encoding,
                    "shape": weight.shape,
                    "bytes": weight.bytes,
                })
            };
            report["tensors"] = self.weights.iter().map(tensor).collect();
        }
        report
    }
}

/// `n` in thousands, millions or billions, as models are named.
pub fn parameters(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.1} B", n as f64 / 1e9),
        1_000_000.. => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.1} K", n as f64 / 1e3),
    }
}

impl Facts {
    fn lines(&self, line: &mut impl FnMut(&str, String)) {
        let active = parameters(self.active_parameters);
        line("parameters", format!("{}, {active} active per token", parameters(self.parameters)));
        line("layers", self.layers.to_string());
        for (layers, experts, top_k) in &self.routed_layers {
            line("experts", format!("{experts} in each of {layers} layers, {top_k} per token"));
        }
        line("resident", size(self.trunk_bytes));
        let each = size(self.largest_expert_bytes);
        let per_token = size(self.routed_bytes_per_token);
        line(
            "streamed",
            format!("{} of experts, up to {each} each, {per_token} per token", size(self.expert_bytes)),
        );
        let whole = size(self.kv_bytes_per_token * self.context_length as u64);
        let per_token = size(self.kv_bytes_per_token);
        line("context", format!("{} tokens; {per_token} per token, {whole} in all", self.context_length));
        line("vocabulary", self.vocab_size.to_string());
    }

    fn json(&self) -> Value {
        let routed = self.routed_layers.iter().map(|(layers, experts, top_k)| {
            json!({ "layers": layers, "experts": experts, "experts_per_token": top_k })
        });
        json!({
            "layers": self.layers,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "trunk_bytes": self.trunk_bytes,
            "expert_bytes": self.expert_bytes,
            "largest_expert_bytes": self.largest_expert_bytes,
            "routed_bytes_per_token": self.routed_bytes_per_token,
            "routed_layers": routed.collect::<Vec<_>>(),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "context_length": self.context_length,
            "vocab_size": self.vocab_size,
        })
    }
}

impl Fit {
    fn lines(&self, line: &mut impl FnMut(&str, String)) {
        let available = self.available.map_or("unknown".to_owned(), size);
        line("memory here", format!("{available} available"));
        line("needs", format!("{} for everything, at least {}", size(self.all_resident), size(self.minimum)));
        if let Some(OnGpu { name, count, minima: Minima { host, device }, minimum_of_each }) = &self.gpu {
            let device = size(device.unwrap_or(0));
            line(
                "with the GPU",
                format!("at least {device} of {name}'s memory, and {} of this one", size(*host)),
            );
            if let Some(each) = minimum_of_each {
                line("with all GPUs", format!("at least {} of the memory of each of {count}", size(*each)));
            }
        }
        let outcome = match self.slots {
            Some((slots, all)) if slots >= all => "everything in memory".to_owned(),
            Some((slots, all)) => {
                format!(
                    "{:.0} % of the experts in memory, the rest streamed",
                    100.0 * slots as f64 / all as f64
                )
            }
            None => "not enough memory".to_owned(),
        };
        line("would run with", outcome);
    }

    fn json(&self) -> Value {
        json!({
            "available": self.available,
            "all_resident": self.all_resident,
            "minimum": self.minimum,
            "gpu": self.gpu.as_ref().map(|OnGpu { name, count, minima, minimum_of_each }| json!({
                "name": name,
                "count": count,
                "minimum_of_each": minimum_of_each,
                "minimum": minima.device,
                "host_minimum": minima.host,
            })),
            "expert_slots": self.slots.map(|(slots, _)| slots),
            "experts": self.slots.map(|(_, all)| all),
        })
    }
}
