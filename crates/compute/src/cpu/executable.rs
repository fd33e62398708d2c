//! [`CpuExecutable`]: runs a planned graph node by node on the thread pool.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::activations::{BLOCK, Q8Rows};
use super::attention::KvCache;
use super::block_attention::BlockRows;
use super::causal_conv1d::{causal_conv1d, transpose};
use super::compressed_attention::{CompressedCache, CompressedRows, IndexRows};
use super::forecast::{Forecast, Router, routers};
use super::gated_delta_rule::{Inputs, gated_delta_rule};
use super::gathered::{Choices, Seen};
use super::hyper;
use super::latent_attention::{LatentCache, LatentInputs, LatentScratch};
use super::linear::{CpuContext, LinearJob, grouped_linear, linear};
use super::moe_experts::{ExpertBody, MoeScratch, activate, moe_experts};
use super::ngrams::ngram_embed;
use super::pages::Pages;
use super::rope::Angles;
use super::route::Choice;
use super::shared::SharedMut;
use super::slots::Slots;
use super::ssm_scan::{SsmRows, ssm_scan};
use super::steps;
use super::vector;
use super::window_pool::{window_mean, window_pool};
use crate::backend::{ActivationMode, Batch, CompileOptions, Executable, ExpertSource, slot_bytes};
use crate::graph::{self, *};
use crate::plan::Plan;
use crate::profile::{Profile, Work};
use crate::quant::{dequantize, dequantize_row};
use crate::{DType, Error, Result, Tensor};

/// A graph ready to run on the CPU.
pub(crate) struct CpuExecutable {
    context: CpuContext,
    graph: Graph,
    plan: Plan,
    weights: Vec<Tensor>,
    /// Values of f32 vectors, which enter elementwise operations; empty for matrices.
    vectors: Vec<Vec<f32>>,
    /// Nodes that run in one parallel region: linear layers on the same input, else one node.
    steps: Vec<Range<usize>>,
    /// Routers by routing.
    routers: Vec<Option<Router>>,
    forecast: Forecast,
    buffers: Vec<Vec<f32>>,
    choices: Vec<Choice>,
    caches: Vec<KvCache>,
    states: Vec<Slots>,
    /// Weights of convolutions by their state, (kernel, channels).
    taps: Vec<Vec<f32>>,
    latent_caches: Vec<LatentCache>,
    latent: LatentScratch,
    compressed_caches: Vec<CompressedCache>,
    angles: Vec<Angles>,
    /// A value as int8, and which it is.
    q8: Q8Rows,
    q8_of: Option<Value>,
    moe: MoeScratch,
    /// Filled if there is one.
    profile: Option<Profile>,
}

impl CpuExecutable {
    pub(crate) fn new(
        context: CpuContext,
        graph: Graph,
        plan: Plan,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Self> {
        graph.check_weights(&weights)?;
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
            buffers: vec![vec![]; plan.buffer_widths.len()],
            choices: vec![Choice::default(); graph.routings],
            angles: graph.ropes.iter().map(|_| Angles::default()).collect(),
            vectors,
            routers: routers(&graph),
            forecast: Forecast::default(),
            caches,
            states: graph.states.iter().map(|elements| Slots::new(*elements)).collect(),
            taps,
            latent_caches,
            latent: LatentScratch::default(),
            compressed_caches,
            graph,
            plan,
            weights,
            q8: Q8Rows::with_second_term(context.second_term),
            q8_of: None,
            moe: MoeScratch::new(context.second_term),
            profile: None,
            context,
        })
    }

    fn buffer(&self, value: Value) -> usize {
        self.plan.buffer_of[value.index].expect("only the logits have no buffer, and nothing reads them")
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

    /// A value's content.
    fn value(&self, value: Value) -> &[f32] {
        &self.buffers[self.buffer(value)]
    }

    /// Buffers of an index's q, k and weights.
    fn index_buffers(&self, index: IndexInputs) -> (usize, usize, Option<usize>) {
        let IndexInputs { q, k, weights } = index;
        (self.buffer(q), self.buffer(k), weights.map(|weights| self.buffer(weights)))
    }

    /// Takes the buffer that a value will be written to, resized for `rows` rows.
    fn take(&mut self, value: Value, rows: usize) -> Vec<f32> {
        let index = self.buffer(value);
        let mut buffer = std::mem::take(&mut self.buffers[index]);
        buffer.resize(rows * value.width(), 0.0);
        buffer
    }

    fn put(&mut self, value: Value, buffer: Vec<f32>) {
        let index = self.buffer(value);
        self.buffers[index] = buffer;
    }

    /// Makes `self.q8` hold `x` as int8.
    fn quantize(&mut self, x: Value) {
        if self.q8_of == Some(x) || !x.width().is_multiple_of(BLOCK) {
            return;
        }
        let mut q8 = std::mem::take(&mut self.q8);
        let values = self.value(x);
        let rows = values.len() / x.width();
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
    fn map_rows(&mut self, out: Value, rows: usize, work: impl Fn(&Self, usize, &mut [f32]) + Sync) {
        let mut buffer = self.take(out, rows);
        let shared = SharedMut::new(&mut buffer);
        self.context.for_rows(rows, out.width(), &|row| {
            // SAFETY: each row is one task's.
            work(self, row, unsafe { shared.part(row * out.width()..(row + 1) * out.width()) });
        });
        self.put(out, buffer);
    }

    /// Runs linear layers `nodes` on their common input; the logits' go to `logits`.
    fn linears(&mut self, nodes: Range<usize>, logits: &mut Vec<f32>) {
        let mut layers: Vec<(Value, WeightId, Option<WeightId>, bool)> = vec![];
        let mut input = None;
        for node in &self.graph.nodes[nodes] {
            let (Op::Linear(LinearOp { x, weight, bias, precision }), Output::Value(out)) =
                (&node.op, node.out)
            else {
                unreachable!("a step of linear layers")
            };
            let q8 = self.context.takes_q8(*precision, self.weights[weight.0].dtype(), x.width());
            layers.push((out, *weight, *bias, q8));
            input = Some(*x);
        }
        let x = input.expect("a step is not empty");
        if layers.iter().any(|l| l.3) {
            self.quantize(x);
        }
        let rows = self.value(x).len() / x.width();
        let mut outs: Vec<Vec<f32>> = vec![];
        for (out, ..) in &layers {
            outs.push(if *out == self.graph.logits {
                let mut buffer = std::mem::take(logits);
                buffer.resize(rows * out.width(), 0.0);
                buffer
            } else {
                self.take(*out, rows)
            });
        }
        let jobs: Vec<LinearJob<'_>> = layers
            .iter()
            .zip(&mut outs)
            .map(|((_, weight, bias, q8), out)| LinearJob {
                weight: &self.weights[weight.0],
                bias: bias.map(|b| &self.vectors[b.0][..]),
                q8: *q8,
                out: SharedMut::new(out),
            })
            .collect();
        linear(&self.context, &jobs, self.value(x), &self.q8, rows);
        drop(jobs);
        for ((out, ..), buffer) in layers.iter().zip(outs) {
            if *out == self.graph.logits {
                *logits = buffer;
            } else {
                self.put(*out, buffer);
            }
        }
    }

    /// Tells `experts` what a router chose, and what the next one will probably choose.
    fn announce(
        &mut self,
        routing: usize,
        choice: &Choice,
        rows: usize,
        experts: &mut dyn ExpertSource,
    ) -> Result<()> {
        let Some(router) = self.routers[routing] else { return Ok(()) };
        experts.routed(router.set, &choice.ids, rows);
        experts.announce(router.set, &choice.distinct())?;
        if let Some(next) = self.routers.get(routing + 1).copied().flatten()
            && next.x.width() == router.x.width()
            && experts.wants_forecast()
        {
            let mut forecast = std::mem::take(&mut self.forecast);
            let weights = (&self.weights[..], &self.vectors[..]);
            let likely = forecast.likely(&self.context, weights, &next, self.value(router.x));
            self.forecast = forecast;
            experts.forecast(next.set, &likely);
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
            Op::Linear(_) => steps::linear(&self.graph, nodes, |x| self.value(x).len() / x.width().max(1))?,
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

    fn route(
        &mut self,
        op: &RouteOp,
        routing: usize,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
    ) -> Result<()> {
        let RouteOp { logits, by, route } = op;
        let rows = batch.tokens.len();
        let mut choice = std::mem::take(&mut self.choices[routing]);
        let outcome = match by {
            RouteBy::Scores { bias } => {
                choice.route(self.value(*logits), bias.map(|b| &self.vectors[b.0][..]), route);
                self.announce(routing, &choice, rows, experts)
            }
            RouteBy::Tokens { table } => {
                let mut ids = vec![0.0; rows * route.top_k];
                for (ids, token) in ids.chunks_exact_mut(route.top_k).zip(batch.tokens) {
                    dequantize_row(self.weights[table.0].view(), *token as usize, ids)?;
                }
                let last = route.experts as u32 - 1;
                let ids: Vec<u32> = ids.iter().map(|id| (*id as u32).min(last)).collect();
                choice.route_to(self.value(*logits), &ids, route);
                Ok(())
            }
        };
        self.choices[routing] = choice;
        outcome
    }

    fn node(&mut self, index: usize, batch: &Batch<'_>, experts: &mut dyn ExpertSource) -> Result<()> {
        let (op, out) = (self.graph.nodes[index].op.clone(), self.graph.nodes[index].out);
        let simd = self.context.simd;
        let rows = batch.tokens.len();
        if let (Op::Route(op), Output::Routing(routing)) = (&op, out) {
            return self.route(op, routing.index, batch, experts);
        }
        let Output::Value(out) = out else { unreachable!("only a route yields a routing") };
        match op {
            Op::Linear(_) | Op::Route(_) => unreachable!("run as steps of their own"),
            Op::Embed(EmbedOp { table }) => {
                let mut buffer = self.take(out, rows);
                for (row, token) in buffer.chunks_exact_mut(out.width()).zip(batch.tokens) {
                    dequantize_row(self.weights[table.0].view(), *token as usize, row)?;
                }
                self.put(out, buffer);
            }
            Op::Attention(AttentionOp { q, k, v, cache, sinks, chosen }) => {
                let mut buffer = self.take(out, rows);
                let inputs = [q, k, v].map(|value| self.buffer(value));
                let blocks = chosen.map(|chosen| self.buffer(chosen.blocks));
                let qkv = inputs.map(|index| &self.buffers[index][..]);
                let choices = chosen.zip(blocks);
                let choices = choices.map(|(how, blocks)| Choices { how, blocks: &self.buffers[blocks] });
                let seen = Seen { sinks: sinks.map(|s| &self.vectors[s.0][..]), choices };
                self.caches[cache.0].attend(&self.context.pool, simd, qkv, seen, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::LatentAttention(LatentAttentionOp { inputs, weights, cache }) => {
                let mut buffer = self.take(out, rows);
                let graph::LatentInputs { q_nope, c, rotated, sinks, chosen } = inputs;
                let indices = [q_nope, c].map(|value| self.buffer(value));
                let rotated = rotated.map(|rotated| rotated.map(|value| self.buffer(value)));
                let blocks = chosen.map(|chosen| self.buffer(chosen.blocks));
                let of = |index: usize| &self.buffers[index][..];
                let ([q_nope, c], rotated) = (indices.map(of), rotated.map(|rotated| rotated.map(of)));
                let [q_rope, k_rope] = rotated.unwrap_or_default();
                let choices = chosen.zip(blocks).map(|(how, blocks)| Choices { how, blocks: of(blocks) });
                let seen = Seen { sinks: sinks.map(|s| &self.vectors[s.0][..]), choices };
                let inputs =
                    LatentInputs { q_nope, q_rope, c, k_rope, seen, weights, tensors: &self.weights };
                let outcome = self.latent_caches[cache.0].attend(
                    &self.context,
                    &mut self.latent,
                    &inputs,
                    batch.spans,
                    &mut buffer,
                );
                self.put(out, buffer);
                outcome?;
            }
            Op::Activate(ActivateOp { activation, gate, up }) => {
                let rows = self.value(up).len() / up.width();
                self.map_rows(out, rows, |this, row, out| {
                    let at = row * out.len()..(row + 1) * out.len();
                    if let Some(gate) = gate {
                        out.copy_from_slice(&this.value(gate)[at.clone()]);
                    }
                    activate(simd, activation, out, &this.value(up)[at]);
                });
            }
            Op::RmsNorm(RmsNormOp { x, weight, groups, eps }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    out.copy_from_slice(&this.value(x)[row * x.width()..(row + 1) * x.width()]);
                    let part = x.width() / groups;
                    let factor = |part: &[f32]| {
                        let mean = vector::sum_of_squares(simd, part) / part.len() as f32;
                        1.0 / (mean + eps).sqrt()
                    };
                    let Some(weight) = weight else {
                        return out
                            .chunks_exact_mut(part)
                            .for_each(|part| vector::scale(simd, factor(part), part));
                    };
                    let weights = this.vectors[weight.0].chunks_exact(part).cycle();
                    for (part, weights) in out.chunks_exact_mut(part).zip(weights) {
                        let factor = factor(part);
                        for (v, w) in part.iter_mut().zip(weights) {
                            *v = *v * factor * w;
                        }
                    }
                });
            }
            Op::Rope(RopeOp { x, heads, rope, place }) => {
                let positions: Vec<usize> =
                    batch.spans.iter().flat_map(|s| s.start..s.start + s.rows.len()).collect();
                self.map_rows(out, rows, |this, row, out| {
                    out.copy_from_slice(&this.value(x)[row * x.width()..(row + 1) * x.width()]);
                    let (rotation, at) = (&this.graph.ropes[rope], (row, positions[row]));
                    this.angles[rope].rotate(rotation, place, at, out, x.width() / heads);
                });
            }
            Op::Add(AddOp { a, b }) => {
                let rows = self.value(a).len() / a.width();
                self.map_rows(out, rows, |this, row, out| {
                    let at = row * out.len()..(row + 1) * out.len();
                    for ((o, a), b) in out.iter_mut().zip(&this.value(a)[at.clone()]).zip(&this.value(b)[at])
                    {
                        *o = a + b;
                    }
                });
            }
            Op::SigmoidGate(SigmoidGateOp { x, gate }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    out.copy_from_slice(&this.value(x)[row * x.width()..(row + 1) * x.width()]);
                    let gate = &this.value(gate)[row * gate.width()..(row + 1) * gate.width()];
                    match out.len() / gate.len() {
                        1 if out.len() > 1 => vector::sigmoid_mul(simd, gate, out),
                        part => {
                            for (gate, out) in gate.iter().zip(out.chunks_exact_mut(part)) {
                                vector::scale(simd, 1.0 / (1.0 + (-gate).exp()), out);
                            }
                        }
                    }
                });
            }
            Op::Slice(SliceOp { x, groups, start, len }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let x = &this.value(x)[row * x.width()..(row + 1) * x.width()];
                    let parts = x.chunks_exact(x.len() / groups);
                    for (out, part) in out.chunks_exact_mut(len).zip(parts) {
                        out.copy_from_slice(&part[start..start + len]);
                    }
                });
            }
            Op::Clamp(ClampOp { x, limit }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let x = &this.value(x)[row * out.len()..(row + 1) * out.len()];
                    out.iter_mut().zip(x).for_each(|(o, v)| *o = v.clamp(-limit, limit));
                });
            }
            Op::MoeExperts(MoeExpertsOp { x, routing, experts: set, mlp }) => {
                if self.context.activations == ActivationMode::Int8 {
                    self.quantize(x);
                }
                let mut buffer = self.take(out, rows);
                let mut moe = std::mem::take(&mut self.moe);
                let biases = mlp.biases.map(|b| [b.gate, b.up, b.down].map(|id| &self.vectors[id.0][..]));
                let body = ExpertBody { activation: mlp.activation, biases, weighted: mlp.weighted };
                let outcome = moe_experts(
                    &self.context,
                    &mut moe,
                    (set, &self.graph.expert_sets[set.0], body),
                    (self.value(x), &self.q8),
                    &self.choices[routing.index],
                    experts,
                    &mut buffer,
                );
                self.moe = moe;
                self.put(out, buffer);
                outcome?;
            }
            Op::CausalConv1d(CausalConv1dOp { x, bias, dilation, state, .. }) => {
                let mut buffer = self.take(out, rows);
                let bias = bias.map_or(&[][..], |bias| &self.vectors[bias.0]);
                let inputs = [&self.buffers[self.buffer(x)][..], &self.taps[state.0], bias];
                let slots = &mut self.states[state.0];
                let shape = [x.width(), dilation];
                causal_conv1d(&self.context.pool, simd, inputs, shape, slots, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::GatedDeltaRule(GatedDeltaRuleOp {
                inputs: DeltaInputs { q, k, v, a, b },
                decay,
                dt_bias,
                shape,
                state,
            }) => {
                let mut buffer = self.take(out, rows);
                let indices = [q, k, v, a, b].map(|value| self.buffer(value));
                let [q, k, v, a, b] = indices.map(|index| &self.buffers[index][..]);
                let (decay, dt_bias) = (&self.vectors[decay.0][..], &self.vectors[dt_bias.0][..]);
                let inputs = Inputs { q, k, v, a, b, decay, dt_bias };
                let slots = &mut self.states[state.0];
                gated_delta_rule(&self.context.pool, simd, &inputs, &shape, slots, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::SsmScan(SsmScanOp { inputs: SsmInputs { x, b, c, dt }, weights, shape, state }) => {
                let mut buffer = self.take(out, rows);
                let indices = [x, b, c, dt].map(|value| self.buffer(value));
                let [x, b, c, dt] = indices.map(|index| &self.buffers[index][..]);
                let SsmWeights { a, d, dt_bias } = weights;
                let [a, d, dt_bias] = [a, d, dt_bias].map(|id| &self.vectors[id.0][..]);
                let inputs = SsmRows { x, b, c, dt, a, d, dt_bias };
                let slots = &mut self.states[state.0];
                ssm_scan(&self.context.pool, simd, &inputs, &shape, slots, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::PositionScale(PositionScaleOp { x, scale }) => {
                let positions: Vec<usize> =
                    batch.spans.iter().flat_map(|s| s.start..s.start + s.rows.len()).collect();
                self.map_rows(out, rows, |this, row, out| {
                    out.copy_from_slice(&this.value(x)[row * x.width()..(row + 1) * x.width()]);
                    vector::scale(simd, scale.at(positions[row]), out);
                });
            }
            Op::GroupedLinear(GroupedLinearOp { x, weight, groups }) => {
                let mut buffer = self.take(out, rows);
                let weight = &self.weights[weight.0];
                let outcome = grouped_linear(&self.context, weight, groups, self.value(x), &mut buffer);
                self.put(out, buffer);
                outcome?;
            }
            Op::Repeat(RepeatOp { x, .. }) => self.map_rows(out, rows, |this, row, out| {
                let x = &this.value(x)[row * x.width()..(row + 1) * x.width()];
                out.chunks_exact_mut(x.len()).for_each(|out| out.copy_from_slice(x));
            }),
            Op::HyperWeights(HyperWeightsOp { x, mix, base, factors, shape }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let inputs = [x, mix].map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                    let vectors = [base, factors].map(|id| &this.vectors[id.0][..]);
                    hyper::weights(simd, &shape, inputs, vectors, out);
                });
            }
            Op::HyperCollapse(HyperCollapseOp { x, weights, .. }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let [x, w] = [x, weights].map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                    hyper::collapse(simd, x, w, out);
                });
            }
            Op::HyperExpand(HyperExpandOp { x, block, weights, streams }) => {
                self.map_rows(out, rows, |this, row, out| {
                    let inputs =
                        [x, block, weights].map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                    hyper::expand(simd, streams, inputs, out);
                })
            }
            Op::WindowPool(WindowPoolOp { kv, gate, bias, shape, state }) => {
                let mut buffer = self.take(out, rows);
                let [kv, gate] = [kv, gate].map(|value| self.buffer(value));
                let [kv, gate] = [kv, gate].map(|index| &self.buffers[index][..]);
                let inputs = [kv, gate, &self.vectors[bias.0]];
                let slots = &mut self.states[state.0];
                window_pool(&self.context, &shape, inputs, slots, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::CompressedAttention(CompressedAttentionOp { inputs, cache }) => {
                let mut buffer = self.take(out, rows);
                let CompressedInputs { q, kv, entries, index, sinks } = inputs;
                let [q, kv, entries] = [q, kv, entries].map(|value| self.buffer(value));
                let index = index.map(|index| self.index_buffers(index));
                let of = |index: usize| &self.buffers[index][..];
                let inputs = CompressedRows {
                    q: of(q),
                    kv: of(kv),
                    entries: of(entries),
                    index: index.map(|(q, k, weights)| IndexRows {
                        q: of(q),
                        k: of(k),
                        weights: weights.map(of),
                    }),
                    sinks: &self.vectors[sinks.0],
                };
                self.compressed_caches[cache.0].attend(&self.context, inputs, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::NGramEmbed(NGramEmbedOp { tables, ngrams, state }) => {
                let mut buffer = self.take(out, rows);
                let tables: Vec<&Tensor> = tables.iter().map(|table| &self.weights[table.0]).collect();
                let slots = &mut self.states[state.0];
                let outcome = ngram_embed(&tables, &ngrams, slots, batch, &mut buffer);
                self.put(out, buffer);
                outcome?;
            }
            Op::ScaledSilu(ScaledSiluOp { x, factor }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    out.copy_from_slice(&this.value(x)[row * x.width()..(row + 1) * x.width()]);
                    vector::scale(simd, factor, out);
                    vector::silu(simd, out);
                });
            }
            Op::GatedMean(GatedMeanOp { x, gate, streams }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let inputs = [x, gate].map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                    hyper::gated_mean(simd, streams, inputs, out);
                });
            }
            Op::StreamAdd(StreamAddOp { x, block, logits }) => self.map_rows(out, rows, |this, row, out| {
                let inputs =
                    [x, block, logits].map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                hyper::stream_add(simd, inputs, out);
            }),
            Op::StreamGate(StreamGateOp { keys, queries, value }) => {
                self.map_rows(out, rows, |this, row, out| {
                    let inputs = [keys, queries, value]
                        .map(|v| &this.value(v)[row * v.width()..(row + 1) * v.width()]);
                    hyper::stream_gate(simd, inputs, out);
                })
            }
            Op::WindowMean(WindowMeanOp { x, window, state }) => {
                let mut buffer = self.take(out, rows);
                let input = &self.buffers[self.buffer(x)][..];
                let slots = &mut self.states[state.0];
                window_mean(&self.context, window, input, x.width(), slots, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::BlockAttention(BlockAttentionOp { inputs: BlockInputs { q, k, v, index }, cache }) => {
                let mut buffer = self.take(out, rows);
                let inputs = [q, k, v].map(|value| self.buffer(value));
                let (index_q, index_k, weights) = self.index_buffers(index);
                let of = |index: usize| &self.buffers[index][..];
                let index = IndexRows { q: of(index_q), k: of(index_k), weights: weights.map(of) };
                let [q, k, v] = inputs.map(of);
                let inputs = BlockRows { q, k, v, index };
                self.compressed_caches[cache.0].attend_blocks(
                    &self.context,
                    inputs,
                    batch.spans,
                    &mut buffer,
                );
                self.put(out, buffer);
            }
            Op::ChooseBlocks(ChooseBlocksOp { inputs, choice, cache }) => {
                let mut buffer = self.take(out, rows);
                let (q, k, weights) = self.index_buffers(inputs);
                let of = |index: usize| &self.buffers[index][..];
                let inputs = IndexRows { q: of(q), k: of(k), weights: weights.map(of) };
                let cache = &mut self.compressed_caches[cache.0];
                cache.choose_blocks(&self.context, inputs, &choice, batch.spans, &mut buffer);
                self.put(out, buffer);
            }
            Op::LayerNorm(LayerNormOp { x, weight, bias, eps }) => {
                let rows = self.value(x).len() / x.width();
                self.map_rows(out, rows, |this, row, out| {
                    let x = &this.value(x)[row * x.width()..(row + 1) * x.width()];
                    let mean = vector::sum(simd, x) / x.len() as f32;
                    out.iter_mut().zip(x).for_each(|(o, v)| *o = v - mean);
                    let variance = vector::sum_of_squares(simd, out) / out.len() as f32;
                    vector::scale(simd, 1.0 / (variance + eps).sqrt(), out);
                    let affine = this.vectors[weight.0].iter().zip(&this.vectors[bias.0]);
                    out.iter_mut().zip(affine).for_each(|(o, (w, b))| *o = *o * w + b);
                });
            }
            Op::GatherRows(GatherRowsOp { x }) => {
                let outputs = batch.outputs;
                self.map_rows(out, outputs.len(), |this, row, out| {
                    let from = outputs[row] as usize;
                    out.copy_from_slice(&this.value(x)[from * x.width()..(from + 1) * x.width()]);
                });
            }
        }
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
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        self.q8_of = None;
        for (angles, rope) in self.angles.iter_mut().zip(&self.graph.ropes) {
            let positions = batch.spans.iter().flat_map(|s| s.start..s.start + s.rows.len());
            angles.set(rope, positions);
        }
        for step in 0..self.steps.len() {
            let nodes = self.steps[step].clone();
            let start = Instant::now();
            if matches!(self.graph.nodes[nodes.start].op, Op::Linear(_)) {
                self.linears(nodes.clone(), logits);
            } else {
                self.node(nodes.start, batch, experts)?;
            }
            if let Some(mut profile) = self.profile.take() {
                let outcome = self.record(&mut profile, nodes, start.elapsed(), batch);
                self.profile = Some(profile);
                outcome?;
            }
        }
        Ok(())
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
