//! [`CpuExecutable`]: runs a graph node by node on the thread pool. What an operation does is in its own file.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::activations::{BLOCK, Q8Rows};
use super::attention::KvCache;
use super::causal_conv1d::transpose;
use super::compressed_attention::CompressedCache;
use super::forecast::{Forecast, Router, routers, sets};
use super::latent_attention::{LatentCache, LatentScratch};
use super::linear::CpuContext;
use super::low_rank::RowAdapters;
use super::moe_experts::MoeScratch;
use super::pages::Pages;
use super::rope::Angles;
use super::route::Choice;
use super::shared::SharedMut;
use super::slots::Slots;
use super::steps;
use super::values::Values;
use crate::backend::{Batch, CompileOptions, Executable, ExpertSource, slot_bytes};
use crate::graph::{
    AttentionOp, CausalConv1dOp, ExpertSetId, Graph, LinearOp, MoeExpertsOp, Op, Output, Value, with_op,
};
use crate::profile::{Profile, Work};
use crate::quant::dequantize;
use crate::{DType, Error, Result, Tensor};

/// What an operation is run with.
pub(super) struct CpuCall<'a> {
    pub(super) batch: &'a Batch<'a>,
    pub(super) experts: &'a mut dyn ExpertSource,
    pub(super) logits: &'a mut Vec<f32>,
    /// Index of the operation's node.
    pub(super) node: usize,
    /// What it yields.
    pub(super) out: Output,
}

impl CpuCall<'_> {
    /// The value that an operation yields.
    pub(super) fn out(&self) -> Value {
        match self.out {
            Output::Value(out) => out,
            Output::Routing(_) => unreachable!("only a route yields a routing"),
        }
    }

    /// Tokens of the batch.
    pub(super) fn tokens(&self) -> usize {
        self.batch.tokens.len()
    }
}

/// An operation's side on the CPU.
pub(super) trait CpuOp {
    /// Computes its result from the executable's values.
    ///
    /// # Errors
    /// If a weight cannot be read or experts do not come.
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()>;
}

/// A graph ready to run on the CPU.
pub(crate) struct CpuExecutable {
    pub(super) context: CpuContext,
    pub(super) graph: Arc<Graph>,
    pub(super) weights: Vec<Tensor>,
    /// Values of f32 vectors, which enter elementwise operations; empty for matrices.
    pub(super) vectors: Vec<Vec<f32>>,
    /// Nodes that run in one parallel region: linear layers on the same input, else one node.
    steps: Vec<Range<usize>>,
    /// Experts by routing.
    pub(super) sets: Vec<Option<ExpertSetId>>,
    /// Routers by routing.
    pub(super) routers: Vec<Option<Router>>,
    pub(super) forecast: Forecast,
    pub(super) values: Values,
    /// The hidden state of every row, if it is asked for.
    every_hidden: Option<Value>,
    pub(super) choices: Vec<Choice>,
    pub(super) caches: Vec<KvCache>,
    pub(super) states: Vec<Slots>,
    /// Weights of convolutions by their state, (kernel, channels).
    pub(super) taps: Vec<Vec<f32>>,
    pub(super) latent_caches: Vec<LatentCache>,
    pub(super) latent: LatentScratch,
    pub(super) compressed_caches: Vec<CompressedCache>,
    pub(super) angles: Vec<Angles>,
    /// Of the batch's tokens.
    pub(super) positions: Vec<usize>,
    /// The same on the axes of rotations.
    pub(super) rope_positions: Vec<[usize; 3]>,
    /// A value as int8, and which it is.
    pub(super) q8: Q8Rows,
    pub(super) q8_of: Option<Value>,
    pub(super) moe: MoeScratch,
    /// Of the batch's rows.
    pub(super) adapters: RowAdapters,
    /// Filled if there is one.
    profile: Option<Profile>,
}

impl CpuExecutable {
    pub(crate) fn new(
        context: CpuContext,
        graph: Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Self> {
        graph.check_weights(&weights)?;
        let (graph, every_hidden) = if options.every_hidden {
            let (graph, hidden) = graph.with_every_hidden().ok_or(Error::NoHead)?;
            (graph, Some(hidden))
        } else {
            (graph, None)
        };
        options.kv_type.check(&graph)?;
        let vector = |w: &Tensor| match (w.dtype(), w.rows()) {
            (DType::F32, 1) => dequantize(w.view()),
            _ => Ok(vec![]),
        };
        let vectors: Vec<Vec<f32>> = weights.iter().map(vector).collect::<Result<_>>()?;
        let mut taps = vec![vec![]; graph.states.len()];
        for node in &graph.nodes {
            if let Op::CausalConv1d(CausalConv1dOp { weight, kernel, state, .. }) = node.op {
                taps[state.0] = transpose(&vectors[weight.0], kernel);
            }
        }
        let caches = graph.caches.iter().map(|shape| KvCache::new(*shape, options.kv_type)).collect();
        let latent_caches = graph.latent_caches.iter();
        let latent_caches = latent_caches.map(|shape| LatentCache::new(*shape, options.kv_type)).collect();
        let compressed = graph.compressed_caches.iter();
        let compressed_caches = compressed.map(|c| CompressedCache::new(*c, options.kv_type)).collect();
        Ok(Self {
            steps: group_linears(&graph),
            values: Values::new(&graph, every_hidden),
            every_hidden,
            choices: vec![Choice::default(); graph.routings],
            angles: graph.ropes.iter().map(|_| Angles::default()).collect(),
            vectors,
            sets: sets(&graph),
            routers: routers(&graph),
            forecast: Forecast::default(),
            caches,
            states: graph.states.iter().map(|elements| Slots::new(*elements)).collect(),
            taps,
            latent_caches,
            latent: LatentScratch::default(),
            compressed_caches,
            graph: Arc::new(graph),
            positions: vec![],
            rope_positions: vec![],
            weights,
            q8: Q8Rows::with_second_term(context.second_term),
            q8_of: None,
            moe: MoeScratch::new(context.second_term),
            adapters: RowAdapters::default(),
            profile: None,
            context,
        })
    }

    /// What every layer's attention keeps, in the order in which pages are saved.
    fn all_pages(&self) -> impl Iterator<Item = &Pages> {
        let caches = self.caches.iter().map(|cache| &cache.pages);
        let latents = self.latent_caches.iter().map(|cache| &cache.pages);
        caches.chain(latents).chain(self.compressed_caches.iter().map(|cache| &cache.pages))
    }

    /// [`CpuExecutable::all_pages`], to be changed.
    fn all_pages_mut(&mut self) -> impl Iterator<Item = &mut Pages> {
        let caches = self.caches.iter_mut().map(|cache| &mut cache.pages);
        let latents = self.latent_caches.iter_mut().map(|cache| &mut cache.pages);
        caches.chain(latents).chain(self.compressed_caches.iter_mut().map(|cache| &mut cache.pages))
    }

    /// Makes `self.q8` hold `x` as int8.
    pub(super) fn quantize(&mut self, x: Value) {
        if self.q8_of == Some(x) || !x.width().is_multiple_of(BLOCK) {
            return;
        }
        let mut q8 = std::mem::take(&mut self.q8);
        let (values, rows) = (self.values.of(x), self.values.rows(x));
        q8.resize(rows, x.width());
        let writer = q8.writer();
        self.context.for_rows(rows, x.width(), &|row| {
            let values = &values[row * x.width()..(row + 1) * x.width()];
            // SAFETY: each row is quantised by one task.
            unsafe { writer.write(self.context.simd, row, 0, values) };
        });
        self.q8 = q8;
        self.q8_of = Some(x);
    }

    /// Computes `out` row by row: `work(row, out_row)`.
    pub(super) fn map_rows(
        &mut self,
        out: Value,
        rows: usize,
        work: impl Fn(&Self, usize, &mut [f32]) + Sync,
    ) {
        let mut buffer = self.values.take(out, rows);
        let shared = SharedMut::new(&mut buffer);
        self.context.for_rows(rows, out.width(), &|row| {
            // SAFETY: each row is one task's.
            work(self, row, unsafe { shared.part(row * out.width()..(row + 1) * out.width()) });
        });
        self.values.put(out, buffer);
    }

    /// Computes `out`, of `rows` rows, in one go.
    pub(super) fn write(
        &mut self,
        out: Value,
        rows: usize,
        work: impl FnOnce(&mut Self, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let mut buffer = self.values.take(out, rows);
        let outcome = work(self, &mut buffer);
        self.values.put(out, buffer);
        outcome
    }

    /// Runs the first `steps` steps; the logits, if they are made, go to `logits`.
    fn run_steps(
        &mut self,
        steps: usize,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.q8_of = None;
        self.adapters.set(batch);
        self.positions.clear();
        self.positions.extend(batch.spans.iter().flat_map(|s| s.start..s.start + s.rows.len()));
        self.rope_positions.clear();
        self.rope_positions.extend(batch.rope_positions());
        for (angles, rope) in self.angles.iter_mut().zip(&self.graph.ropes) {
            angles.set(rope, self.rope_positions.iter().copied());
        }
        for step in 0..steps {
            let nodes = self.steps[step].clone();
            let start = Instant::now();
            if nodes.len() > 1 {
                self.linears(nodes.clone(), logits);
            } else {
                let (graph, node) = (Arc::clone(&self.graph), nodes.start);
                let mut call = CpuCall { batch, experts, logits, node, out: graph.nodes[node].out };
                with_op!(&graph.nodes[node].op, op => op.run(self, &mut call))?;
            }
            if let Some(mut profile) = self.profile.take() {
                let outcome = self.record(&mut profile, nodes, start.elapsed(), batch);
                self.profile = Some(profile);
                outcome?;
            }
        }
        Ok(())
    }

    /// Adds the step of `nodes`, which took `time`, to `profile`.
    fn record(
        &mut self,
        profile: &mut Profile,
        nodes: Range<usize>,
        time: Duration,
        batch: &Batch<'_>,
    ) -> Result<()> {
        let name = steps::name(&self.graph, nodes.clone());
        let work = match &self.graph.nodes[nodes.start].op {
            Op::Linear(_) => steps::linear(&self.graph, nodes, |x| self.values.rows(x))?,
            Op::Attention(AttentionOp { cache, .. }) => steps::attention(&self.caches[cache.0], batch),
            Op::MoeExperts(MoeExpertsOp { routing, experts, .. }) => {
                let set = &self.graph.expert_sets[experts.0];
                let work = steps::experts(set, &self.choices[routing.index])?;
                let spent = self.moe.take_spent();
                profile.add("experts, gate and up", spent[0], work[0]);
                profile.add("experts, down", spent[1], work[1]);
                let rest = time.saturating_sub(spent[0] + spent[1]);
                profile.add("experts, sorting and summing", rest, Work::default());
                return Ok(());
            }
            _ => Work::default(),
        };
        profile.add(&name, time, work);
        Ok(())
    }
}

fn check_bytes(op: &'static str, expected: usize, bytes: &[u8]) -> Result<()> {
    match bytes.len() {
        got if got == expected => Ok(()),
        got => Err(Error::Shape { op, what: "bytes", expected, got }),
    }
}

/// Groups consecutive linear layers with the same input.
fn group_linears(graph: &Graph) -> Vec<Range<usize>> {
    let input = |index: usize| match graph.nodes[index].op {
        Op::Linear(LinearOp { x, .. }) => Some(x),
        _ => None,
    };
    let mut steps: Vec<Range<usize>> = vec![];
    for index in 0..graph.nodes.len() {
        match steps.last_mut() {
            Some(step) if input(index).is_some() && input(index) == input(step.start) => step.end = index + 1,
            _ => steps.push(index..index + 1),
        }
    }
    steps
}

impl Executable for CpuExecutable {
    fn single_step_rows(&self) -> usize {
        usize::MAX
    }

    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.run_steps(self.steps.len(), batch, experts, logits)?;
        if let Some(made) = self.values.get(self.graph.logits) {
            logits.clear();
            logits.extend_from_slice(made);
        }
        Ok(())
    }

    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        let hidden = self.graph.hidden().ok_or(Error::NoHead)?;
        // Nothing but the head comes after the value, so that its buffer still holds it.
        self.run_steps(self.steps.len() - 1, batch, experts, &mut vec![])?;
        if !batch.outputs.is_empty() {
            visit(self.values.of(hidden));
        }
        Ok(())
    }

    fn every_hidden(&mut self, rows: Range<usize>) -> Result<&[f32]> {
        let all =
            |hidden: Value| &self.values.of(hidden)[rows.start * hidden.width()..rows.end * hidden.width()];
        Ok(self.every_hidden.map_or(&[], all))
    }

    fn run_tasks(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.context.pool.run(count, task);
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(Profile::default);
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.profile.as_mut().map(std::mem::take)
    }

    fn reserve_pages(&mut self, pages: usize) -> Result<()> {
        self.all_pages_mut().for_each(|own| own.reserve(pages));
        Ok(())
    }

    fn reserve_slots(&mut self, slots: usize) -> Result<()> {
        self.states.iter_mut().for_each(|state| state.reserve(slots));
        Ok(())
    }

    fn page_bytes(&self) -> usize {
        self.all_pages().map(Pages::page_bytes).sum()
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        self.all_pages().for_each(|own| own.read_page(page as usize, out));
        Ok(())
    }

    fn write_page(&mut self, page: u32, mut bytes: &[u8]) -> Result<()> {
        check_bytes("page", self.page_bytes(), bytes)?;
        for own in self.all_pages_mut() {
            let (first, rest) = bytes.split_at(own.page_bytes());
            own.write_page(page as usize, first);
            bytes = rest;
        }
        Ok(())
    }

    fn slot_bytes(&self) -> usize {
        slot_bytes(&self.graph)
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        let values = self.states.iter().flat_map(|state| state.slot(slot));
        out.extend(values.flat_map(|v| v.to_le_bytes()));
        Ok(())
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        check_bytes("state slot", self.slot_bytes(), bytes)?;
        let values = self.states.iter_mut().flat_map(|state| state.slot_mut(slot));
        let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        values.zip(bytes.chunks_exact(4)).for_each(|(v, b)| *v = value(b));
        Ok(())
    }
}
