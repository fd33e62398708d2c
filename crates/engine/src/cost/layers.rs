//! [`measure`]: how long a model's layers take here, by running one of each kind on random weights.

use std::time::Instant;

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, Executable, ExpertSource, ExpertView, KvType,
    PAGE_TOKENS, Span, page_bytes, slot_bytes,
};
use moeflux_compute::graph::{ExpertSet, ExpertSetId, Graph, LinearOp, MatrixSpec, Op, RouteOp};
use moeflux_compute::{Error as ComputeError, Tensor};

use super::predict::{Layer, Prompt, Routed};
use super::random_weights::RandomWeights;
use crate::error::size;
use crate::models::Model;
use crate::sampler::random::Random;
use crate::{Error, Result};

/// Kinds of layers that are run, the most frequent first; others are taken to be as fast for their bytes.
const MOST_KINDS: usize = 4;
/// Layers of a kind one after the other, at most.
const MOST_COPIES: usize = 24;
/// Tokens of an excerpt where the head is not what is measured: enough for routers to choose differently.
const SMALL_HEAD: usize = 1024;
/// Seconds that tokens of one kind are generated for, and the fewest of them.
const TOKENS_TIME: f64 = 0.3;
const LEAST_TOKENS: usize = 5;
/// Seconds that a prompt through one layer may take; it is shortened else.
const PROMPT_TIME: f64 = 0.6;
const SHORT_PROMPT: usize = 32;
/// Positions at which the cost of a long context is measured, at most.
const DEEP: usize = 4096;
/// Generated tokens are measured around this position.
const SHALLOW: usize = 32;

/// What is to be measured.
#[derive(Debug, Clone, Copy)]
pub struct MeasureOptions {
    /// Precision of products.
    pub activations: ActivationMode,
    /// Precision of keys and values.
    pub kv_type: KvType,
    /// Positions of the context.
    pub context: usize,
    /// The prompt, in chunks as they will be.
    pub prompt: Prompt,
    /// Bytes that measuring should take; a single layer may take up to twice as many.
    pub memory: u64,
    /// Bytes that the processor's last cache holds: weights that it could keep are no measure.
    pub cache: u64,
    /// Whether the backend has memory of its own, which every expert of an excerpt is copied to.
    pub device: bool,
}

/// What a layer takes, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerTimes {
    /// Numbers of the layers of this kind.
    pub layers: Vec<usize>,
    /// Bytes that a token reads of each.
    pub active_bytes: u64,
    /// One token at the start of a context.
    pub token: f64,
    /// What each position of the context adds.
    pub position: f64,
    /// Each token of a prompt.
    pub prompt: f64,
    /// Whether it was run, and not taken to be like another.
    pub measured: bool,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Every kind of layer.
    pub kinds: Vec<LayerTimes>,
    /// Seconds of embedding and head for one token.
    pub head: f64,
    /// Bytes of the head's weights.
    pub head_bytes: u64,
    /// Bytes per second at which experts are copied to a device.
    pub link: Option<f64>,
    layers: Vec<Layer>,
}

impl Measured {
    /// Every decoder layer.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Bytes that computing one token reads.
    pub fn active_bytes(&self) -> u64 {
        let layers = self.kinds.iter().map(|kind| kind.active_bytes * kind.layers.len() as u64);
        self.head_bytes + layers.sum::<u64>()
    }

    /// Seconds of computing one token, with everything in memory.
    pub fn token_seconds(&self) -> f64 {
        self.head + self.layers.iter().map(|layer| layer.token).sum::<f64>()
    }
}

/// Runs a layer of every kind that `model` has on `backend`; `progress` gets what part of it is done.
///
/// # Errors
/// [`Error::Budget`] if a layer takes more memory than measuring may, before any of it is allocated; or if the backend
/// cannot run it.
pub fn measure(
    model: &Model,
    backend: &dyn Backend,
    options: &MeasureOptions,
    mut progress: impl FnMut(f64),
) -> Result<Measured> {
    let graph = &model.graph;
    let mut kinds = graph.layer_kinds()?;
    kinds.sort_by_key(|layers| std::cmp::Reverse(layers.len()));
    let runs = kinds.len().min(MOST_KINDS);
    let mut weights = RandomWeights::new(1);
    let (head, head_bytes) = measure_head(graph, backend, options, &mut weights)?;
    let small = Excerpt::new(graph, &[], SMALL_HEAD, &mut weights, options)?;
    let overhead = small.compile(backend, options, 1)?.tokens(0)?;
    let mut times: Vec<LayerTimes> = vec![];
    let link = if options.device { backend.link_bandwidth()? } else { None };
    for (index, layers) in kinds.into_iter().enumerate() {
        let active_bytes = active_bytes(graph, layers[0])?;
        if index < runs {
            progress(index as f64 / runs as f64);
            let kind = (layers, active_bytes, overhead);
            times.push(measure_kind(graph, backend, options, &mut weights, kind)?);
            continue;
        }
        let like = &times[0];
        let scale = active_bytes as f64 / like.active_bytes.max(1) as f64;
        times.push(LayerTimes {
            layers,
            active_bytes,
            token: like.token * scale,
            position: like.position,
            prompt: like.prompt * scale,
            measured: false,
        });
    }
    let layers = layers(graph, &times, model)?;
    Ok(Measured { kinds: times, head, head_bytes, link, layers })
}

/// Seconds of the head for one token, and its bytes.
fn measure_head(
    graph: &Graph,
    backend: &dyn Backend,
    options: &MeasureOptions,
    weights: &mut RandomWeights,
) -> Result<(f64, u64)> {
    let bytes = |graph: &Graph| -> u64 {
        let matrices = graph.weights().iter().map(|weight| weight.matrix);
        let head = matrices.skip(1).filter_map(|matrix| matrix.bytes().ok());
        head.map(|bytes| bytes as u64).sum()
    };
    let whole = graph.vocab_size();
    let all = bytes(&graph.excerpt(&[], whole)?).max(1);
    let rows = (whole as u64).saturating_mul(enough(options).min(all)) / all;
    let rows = (rows as usize).clamp(SMALL_HEAD.min(whole), whole);
    let excerpt = Excerpt::new(graph, &[], rows, weights, options)?;
    let seconds = excerpt.compile(backend, options, 1)?.tokens(0)?;
    Ok((seconds * whole as f64 / rows as f64, all))
}

/// Bytes that no cache holds.
fn enough(options: &MeasureOptions) -> u64 {
    (4 * options.cache).clamp(64 << 20, 1 << 30).min(options.memory / 4)
}

/// Bytes of the resident weights of `graph`.
fn weight_bytes(graph: &Graph) -> u64 {
    let bytes = |matrix: &MatrixSpec| matrix.bytes().map_or(u64::MAX, |bytes| bytes as u64);
    graph.weights().iter().map(|weight| bytes(&weight.matrix)).fold(0, u64::saturating_add)
}

/// Refuses what takes more memory than measuring a layer may.
fn check_memory(options: &MeasureOptions, parts: [(&str, u64); 3]) -> Result<()> {
    let minimum = parts.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
    let budget = options.memory.saturating_mul(2);
    if minimum > budget {
        let parts: Vec<String> = parts
            .iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(name, bytes)| format!("{name} {}", size(*bytes)))
            .collect();
        let parts = format!("to measure a layer: {}", parts.join(", "));
        return Err(Error::Budget { budget, minimum, parts, device: None });
    }
    Ok(())
}

/// Bytes that a token reads of a layer.
fn active_bytes(graph: &Graph, layer: usize) -> Result<u64> {
    let alone = graph.excerpt(&[layer], 1)?;
    let none = graph.excerpt(&[], 1)?;
    let active = |set: &ExpertSet| expert_bytes(set).saturating_mul(top_k(&alone) as u64);
    let experts = alone.expert_sets().iter().map(active).fold(0, u64::saturating_add);
    Ok(weight_bytes(&alone).saturating_sub(weight_bytes(&none)).saturating_add(experts))
}

fn expert_bytes(set: &ExpertSet) -> u64 {
    let bytes = set.matrices().map(|m| m.bytes().map_or(u64::MAX, |bytes| bytes as u64));
    bytes.fold(0, u64::saturating_add)
}

fn top_k(graph: &Graph) -> usize {
    let route = |op: &Op| if let Op::Route(RouteOp { route, .. }) = op { route.top_k } else { 0 };
    graph.nodes().iter().map(|node| route(&node.op)).max().unwrap_or(0)
}

/// Runs layers that are like the first of `layers`.
fn measure_kind(
    graph: &Graph,
    backend: &dyn Backend,
    options: &MeasureOptions,
    weights: &mut RandomWeights,
    (layers, active_bytes, overhead): (Vec<usize>, u64, f64),
) -> Result<LayerTimes> {
    let one = graph.excerpt(&layers[..1], 1)?;
    let stored = |set: &ExpertSet| expert_bytes(set).saturating_mul(set.experts as u64);
    let stored = one.expert_sets().iter().map(stored).fold(0, u64::saturating_add);
    let on_device = if options.device { stored } else { 0 };
    let wanted = enough(options).div_ceil(active_bytes.max(1));
    let room = options.memory / 2 / active_bytes.saturating_add(on_device).max(1);
    let copies = wanted.min(room).clamp(1, MOST_COPIES as u64) as usize;
    let excerpt = Excerpt::new(graph, &vec![layers[0]; copies], SMALL_HEAD, weights, options)?;
    let mut running = excerpt.compile(backend, options, 1)?;
    let each = |seconds: f64| ((seconds - overhead) / copies as f64).max(1e-9);
    let token = each(running.tokens(0)?);
    let depth = options.context.min(DEEP).saturating_sub(2 * SHALLOW);
    let position = match depth {
        0 => 0.0,
        _ => ((each(running.tokens(depth)?) - token) / depth as f64).max(0.0),
    };
    drop(running);
    drop(excerpt);
    let single = Excerpt::new(graph, &layers[..1], SMALL_HEAD, weights, options)?;
    let prompt = measure_prompt(&single, backend, options, overhead)?;
    Ok(LayerTimes { layers, active_bytes, token, position, prompt, measured: true })
}

/// Seconds that a token of the prompt takes in the layer of `excerpt`.
fn measure_prompt(
    excerpt: &Excerpt,
    backend: &dyn Backend,
    options: &MeasureOptions,
    overhead: f64,
) -> Result<f64> {
    let Prompt { tokens, chunk } = options.prompt;
    let rows = tokens.min(chunk).max(1);
    let mut running = excerpt.compile(backend, options, rows)?;
    let short = rows.min(SHORT_PROMPT);
    running.prompt(0, short)?;
    let second = running.prompt(0, short)?;
    let mut fits = rows;
    while fits > short && second / short as f64 * fits as f64 > PROMPT_TIME {
        fits = (fits / 2).max(short);
    }
    let mut at = |start: usize| -> Result<f64> {
        running.prompt(start, fits)?;
        let seconds = running.prompt(start, fits)?.min(running.prompt(start, fits)?);
        Ok((seconds - overhead).max(1e-9) / fits as f64)
    };
    let beginning = at(0)?;
    let last = tokens.min(options.context).saturating_sub(rows);
    let end = if last > 0 { at(last)? } else { beginning };
    Ok((beginning + end) / 2.0)
}

/// Layers of a graph with weights.
struct Excerpt {
    graph: Graph,
    weights: Vec<Tensor>,
    /// A few experts of each set, which stand for all of them.
    experts: Vec<Vec<Expert>>,
}

/// An expert's projections.
struct Expert {
    gate: Option<Tensor>,
    up: Tensor,
    down: Tensor,
}

impl Excerpt {
    fn new(
        whole: &Graph,
        layers: &[usize],
        vocab_size: usize,
        weights: &mut RandomWeights,
        options: &MeasureOptions,
    ) -> Result<Self> {
        let graph = whole.excerpt(layers, vocab_size)?;
        let share = enough(options) / graph.expert_sets().len().max(1) as u64;
        let least = |set: &ExpertSet| top_k(&graph).min(set.experts).max(1);
        let kept = |set: &ExpertSet| {
            let wanted = share.div_ceil(expert_bytes(set).max(1)) as usize;
            wanted.clamp(least(set), set.experts.max(least(set)))
        };
        let experts =
            graph.expert_sets().iter().map(|set| expert_bytes(set).saturating_mul(kept(set) as u64));
        let bytes = experts.fold(weight_bytes(&graph), u64::saturating_add);
        check_memory(options, [("weights", bytes), ("keys, values and states", 0), ("scratch", 0)])?;
        let sets = || graph.expert_sets().iter().map(|set| (set, kept(set)));
        let specs = sets().flat_map(|(set, kept)| (0..kept).flat_map(|_| set.matrices()));
        let (weights, matrices) = weights.of_graph(&graph, &specs.collect::<Vec<_>>())?;
        let mut matrices = matrices.into_iter();
        let mut matrix = || matrices.next().expect("a matrix for each");
        let mut expert =
            |set: &ExpertSet| Expert { gate: set.gate.map(|_| matrix()), up: matrix(), down: matrix() };
        let experts = sets().map(|(set, kept)| (0..kept).map(|_| expert(set)).collect()).collect();
        Ok(Self { graph, weights, experts })
    }

    fn compile(&self, backend: &dyn Backend, options: &MeasureOptions, rows: usize) -> Result<Running<'_>> {
        let positions = options.context.min(DEEP).max(options.prompt.tokens.min(options.context)).max(rows);
        let pages = (positions + 2 * SHALLOW).div_ceil(PAGE_TOKENS);
        let compile = CompileOptions {
            activations: options.activations,
            kv_type: options.kv_type,
            max_rows: rows.max(1),
            pages,
            state_slots: 1,
            positions,
            sequences: 1,
            outputs: 1,
            keep_experts: false,
            every_hidden: false,
            beside: 0,
        };
        let state = (page_bytes(&self.graph, options.kv_type) as u64)
            .saturating_mul(pages as u64)
            .saturating_add(slot_bytes(&self.graph) as u64);
        let scratch = backend.scratch_bytes(&self.graph, compile) as u64;
        let weights = weight_bytes(&self.graph);
        let parts = [("weights", weights), ("keys, values and states", state), ("scratch", scratch)];
        check_memory(options, parts)?;
        let mut executable = backend.compile(&self.graph, self.weights.clone(), compile)?;
        executable.reserve_pages(pages)?;
        executable.reserve_slots(1)?;
        let tokens = self.graph.weights().first().map_or(1, |table| table.matrix.rows);
        Ok(Running {
            executable,
            source: Resident { excerpt: self },
            pages: (0..pages as u32).collect(),
            tokens,
            random: Random::new(2),
            logits: vec![],
        })
    }
}

/// Hands over the experts of an excerpt.
struct Resident<'a> {
    excerpt: &'a Excerpt,
}

impl ExpertSource for Resident<'_> {
    fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<(), ComputeError> {
        Ok(())
    }

    fn visit(
        &mut self,
        set: ExpertSetId,
        experts: &[u32],
        visitor: &mut dyn FnMut(&[ExpertView<'_>]),
    ) -> Result<(), ComputeError> {
        let kept = &self.excerpt.experts[set.0];
        let view = |id: &u32| {
            let Expert { gate, up, down } = &kept[*id as usize % kept.len()];
            ExpertView { id: *id, gate: gate.as_ref().map(Tensor::view), up: up.view(), down: down.view() }
        };
        visitor(&experts.iter().map(view).collect::<Vec<_>>());
        Ok(())
    }
}

/// An excerpt that can be run.
struct Running<'a> {
    executable: Box<dyn Executable>,
    source: Resident<'a>,
    pages: Vec<u32>,
    /// Token ids.
    tokens: usize,
    random: Random,
    logits: Vec<f32>,
}

impl Running<'_> {
    /// Seconds of `rows` random tokens from position `start` on.
    fn prompt(&mut self, start: usize, rows: usize) -> Result<f64> {
        let token = |_| (self.random.next_unit() * self.tokens as f64) as u32;
        let tokens: Vec<u32> = (0..rows).map(token).collect();
        let pages = &self.pages[..(start + rows).div_ceil(PAGE_TOKENS)];
        let span = Span { rows: 0..rows, start, pages, ..Span::default() };
        let batch =
            Batch { tokens: &tokens, spans: &[span], outputs: &[rows as u32 - 1], ..Batch::default() };
        let begin = Instant::now();
        self.executable.run(&batch, &mut self.source, &mut self.logits)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds of one token at positions from `start` on: the mean, because what disturbs this disturbs the engine too.
    fn tokens(&mut self, start: usize) -> Result<f64> {
        // What is done once only: memory is touched, kernels are translated, lists are recorded.
        for position in 0..3 {
            self.prompt(start + position, 1)?;
        }
        let (mut tokens, mut seconds) = (0, 0.0);
        while tokens < LEAST_TOKENS || seconds < TOKENS_TIME {
            seconds += self.prompt(start + tokens % SHALLOW, 1)?;
            tokens += 1;
        }
        Ok(seconds / tokens as f64)
    }
}

/// Every layer of the model, with the times of its kind.
fn layers(graph: &Graph, times: &[LayerTimes], model: &Model) -> Result<Vec<Layer>> {
    let mut layers: Vec<(usize, Layer)> = vec![];
    for kind in times {
        let alone = graph.excerpt(&kind.layers[..1], 1)?;
        let overlapping = overlapping(&alone);
        for number in &kind.layers {
            let set = graph.expert_sets().iter().position(|set| set.layer == *number);
            let routed = set.map(|set| Routed {
                set,
                experts: graph.expert_sets()[set].experts,
                top_k: top_k(&alone),
                expert_bytes: model.experts.expert_bytes(ExpertSetId(set)),
                overlapping,
            });
            let LayerTimes { token, position, prompt, .. } = *kind;
            layers.push((*number, Layer { token, position, prompt, routed }));
        }
    }
    layers.sort_by_key(|(number, _)| *number);
    Ok(layers.into_iter().map(|(_, layer)| layer).collect())
}

/// Share of the bytes of a layer that are read after its router, but for one expert.
fn overlapping(layer: &Graph) -> f64 {
    let bytes = |op: &Op| match op {
        Op::Linear(LinearOp { weight, .. }) => {
            layer.weights()[weight.index()].matrix.bytes().unwrap_or(0) as u64
        }
        _ => 0,
    };
    let of_layer = || layer.nodes().iter().filter(|node| node.name.starts_with("layers."));
    let all: u64 = of_layer().map(|node| bytes(&node.op)).sum();
    let after: u64 =
        of_layer().skip_while(|node| !matches!(node.op, Op::Route(_))).map(|node| bytes(&node.op)).sum();
    let expert = layer.expert_sets().first().map_or(0, expert_bytes);
    let experts = expert.saturating_mul(top_k(layer) as u64);
    (after + experts.saturating_sub(expert)) as f64 / (all + experts).max(1) as f64
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use moeflux_compute::cpu::CpuBackend;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::models;

    #[test]
    fn a_layer_that_memory_does_not_hold_is_not_measured() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hf/qwen3_moe_basic");
        let model = models::record(Arc::new(Checkpoint::open(&path).unwrap())).unwrap();
        let backend = CpuBackend::new(1, None).unwrap();
        let options = |memory, tokens| MeasureOptions {
            activations: ActivationMode::Int8,
            kv_type: KvType::F16,
            context: 64,
            prompt: Prompt { tokens, chunk: tokens },
            memory,
            cache: 0,
            device: false,
        };
        let minimum = |memory, tokens| match measure(&model, &backend, &options(memory, tokens), |_| ()) {
            Ok(_) => None,
            Err(Error::Budget { budget, minimum, parts, .. }) => {
                assert!(minimum > budget && parts.contains("weights"), "{minimum} of {budget}: {parts}");
                Some(minimum)
            }
            Err(other) => panic!("{other}"),
        };
        assert!(minimum(1 << 8, 1).is_some());
        assert!(minimum(1 << 30, 1).is_none());
        // A prompt's scratch counts.
        let scratch = minimum(1 << 20, 1 << 20).expect("scratch of a million tokens");
        assert!(scratch > 1 << 26, "{scratch}");
    }
}
