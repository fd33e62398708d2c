//! The scalar meaning of every operation: the oracle that other backends are tested against.
//!
//! Nothing here is fast. Sums are accumulated in f64 so that the oracle's own rounding stays far below any
//! tolerance; activations are never quantised and keys and values are cached as f32.

mod compressed;
mod hyper;
mod ngrams;
mod recurrent;
mod rows;
mod selection;

use std::collections::HashMap;

pub use compressed::{index_score, window_pool};
pub use hyper::{gated_mean, hyper_collapse, hyper_expand, hyper_weights, stream_add, stream_gate};
pub use recurrent::{DeltaToken, SsmToken, causal_conv1d, gated_delta_rule, kept, ssm_scan};
pub use rows::{
    activate, attend, dot, expert, latent_weights, layer_norm, linear, rms_norm, rope, route, route_by_token,
    sigmoid, squared_relu, swiglu, visible,
};
use rows::{softmax, softplus};
pub use selection::seen;

use crate::backend::{
    Backend, Batch, CompileOptions, Executable, ExpertSource, KvType, PAGE_TOKENS, Span, page_bytes,
    slot_bytes,
};
use crate::graph::*;
use crate::plan::Plan;
use crate::quant::dequantize_row;
use crate::{Error, Result, Tensor};

/// The backend that runs graphs by these definitions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Backend for Reference {
    fn describe(&self) -> String {
        "reference (scalar)".into()
    }

    fn scratch_bytes(&self, graph: &Graph, plan: &Plan, options: CompileOptions) -> usize {
        (plan.row_bytes() + graph.vocab_size() * size_of::<f32>()).saturating_mul(options.max_rows)
    }

    fn compile(
        &self,
        graph: &Graph,
        _: Plan,
        weights: Vec<Tensor>,
        _: CompileOptions,
    ) -> Result<Box<dyn Executable>> {
        graph.check_weights(&weights)?;
        Ok(Box::new(Interpreter {
            graph: graph.clone(),
            weights,
            pages: HashMap::new(),
            latents: HashMap::new(),
            compressed: HashMap::new(),
            states: HashMap::new(),
        }))
    }
}

/// Little-endian f32, if there are `expected` bytes of them.
fn floats<'a>(op: &'static str, bytes: &'a [u8], expected: usize) -> Result<impl Iterator<Item = f32> + 'a> {
    if bytes.len() != expected {
        return Err(Error::Shape { op, what: "bytes", expected, got: bytes.len() });
    }
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

/// A cached key or value row: (kv_heads · head_dim), by cache, page and offset in the page.
type KvKey = (usize, u32, usize);

struct Interpreter {
    graph: Graph,
    weights: Vec<Tensor>,
    pages: HashMap<KvKey, (Vec<f32>, Vec<f32>)>,
    /// By state and slot.
    states: HashMap<(usize, u32), Vec<f32>>,
    /// c and rotated key of a token.
    latents: HashMap<KvKey, (Vec<f32>, Vec<f32>)>,
    /// Pages of compressed attention by cache and page, laid out as [`crate::graph::CompressedAttention`] says.
    compressed: HashMap<(usize, u32), Vec<f32>>,
}

type Matrix = Vec<Vec<f32>>;

impl Interpreter {
    fn vector(&self, id: WeightId) -> Result<Vec<f32>> {
        let view = self.weights[id.0].view();
        let mut out = vec![0.0; view.cols()];
        dequantize_row(view, 0, &mut out)?;
        Ok(out)
    }

    fn attention(
        &mut self,
        cache: usize,
        [q, k, v]: [&Matrix; 3],
        sinks: Option<&[f32]>,
        chosen: Option<(Chosen, &Matrix)>,
        spans: &[Span<'_>],
    ) -> Matrix {
        let shape = self.graph.caches[cache];
        let (dim, value_dim) = (shape.head_dim, shape.value_dim);
        let group = shape.heads / shape.kv_heads;
        let mut out = vec![vec![0.0; shape.heads * value_dim]; q.len()];
        for span in spans {
            let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
            for (i, row) in span.rows.clone().enumerate() {
                self.pages.insert(key(span.start + i), (k[row].clone(), v[row].clone()));
            }
            for (i, row) in span.rows.clone().enumerate() {
                let position = span.start + i;
                if chosen.is_some_and(|(_, blocks)| blocks[row][0].is_nan()) {
                    out[row].fill(f32::NAN);
                    continue;
                }
                for head in 0..shape.heads {
                    let positions = match chosen {
                        Some((chosen, blocks)) => seen(&chosen, &blocks[row], position, head, shape.heads),
                        None => visible(&shape, position).collect(),
                    };
                    let cached: Vec<_> = positions.iter().map(|p| &self.pages[&key(*p)]).collect();
                    let part = |head: usize, width: usize| head * width..(head + 1) * width;
                    let (key_at, value_at) = (part(head / group, dim), part(head / group, value_dim));
                    let keys: Vec<&[f32]> = cached.iter().map(|c| &c.0[key_at.clone()]).collect();
                    let values: Vec<&[f32]> = cached.iter().map(|c| &c.1[value_at.clone()]).collect();
                    let sink = sinks.map(|s| s[head]);
                    let out = &mut out[row][part(head, value_dim)];
                    attend(&q[row][part(head, dim)], &keys, &values, shape.scale, sink, out);
                }
            }
        }
        out
    }

    /// Takes the state that `span` starts from.
    fn state(&self, state: StateId, span: &Span<'_>) -> Vec<f32> {
        let zeros = || vec![0.0; self.graph.states[state.0]];
        match span.start {
            0 => zeros(),
            _ => self.states.get(&(state.0, span.slots.read)).cloned().unwrap_or_else(zeros),
        }
    }

    fn conv(
        &mut self,
        x: &Matrix,
        [weight, bias]: [&[f32]; 2],
        [kernel, dilation]: [usize; 2],
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let mut out = x.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                causal_conv1d([weight, bias], kernel, dilation, &x[row], &mut held, &mut out[row]);
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }

    fn delta_rule(
        &mut self,
        [q, k, v, a, b]: [&Matrix; 5],
        [decay, dt_bias]: [&[f32]; 2],
        shape: &DeltaRule,
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
        let mut out = v.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                for (head, state) in held.chunks_mut(key_dim * value_dim).enumerate() {
                    let key = shape.key_head(head) * key_dim..(shape.key_head(head) + 1) * key_dim;
                    let value = head * value_dim..(head + 1) * value_dim;
                    let decays = dt_bias.len() / shape.value_heads;
                    if decays > 1 {
                        for (i, channel) in state.chunks_mut(value_dim).enumerate() {
                            let at = head * decays + i;
                            let g = kept(shape.decay, decay[head], a[row][at] + dt_bias[at]);
                            channel.iter_mut().for_each(|s| *s = (f64::from(*s) * g) as f32);
                        }
                    }
                    let own = a[row][head * decays] + dt_bias[head * decays];
                    let token = DeltaToken {
                        q: &q[row][key.clone()],
                        k: &k[row][key],
                        v: &v[row][value.clone()],
                        b: b[row][head],
                        kept: if decays > 1 { 1.0 } else { kept(shape.decay, decay[head], own) },
                    };
                    gated_delta_rule(&token, state, &mut out[row][value]);
                }
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }

    fn ssm_scan(
        &mut self,
        [x, b, c, dt]: [&Matrix; 4],
        [a, d, dt_bias]: &[Vec<f32>; 3],
        shape: &SsmScan,
        state: StateId,
        spans: &[Span<'_>],
    ) -> Matrix {
        let mut out = x.clone();
        for span in spans {
            let mut held = self.state(state, span);
            for row in span.rows.clone() {
                for (head, state) in held.chunks_mut(shape.head_dim * shape.state_size).enumerate() {
                    let group =
                        shape.group(head) * shape.state_size..(shape.group(head) + 1) * shape.state_size;
                    let own = head * shape.head_dim..(head + 1) * shape.head_dim;
                    let token = SsmToken {
                        x: &x[row][own.clone()],
                        b: &b[row][group.clone()],
                        c: &c[row][group],
                        dt: dt[row][head],
                        dt_bias: dt_bias[head],
                        time_steps: shape.time_steps,
                        a: a[head],
                        d: d[head],
                    };
                    ssm_scan(&token, state, &mut out[row][own]);
                }
            }
            self.states.insert((state.0, span.slots.write), held);
        }
        out
    }

    /// Every head's keys and values are made from the latents, as the paper defines them.
    fn latent_attention(
        &mut self,
        (cache, weights): (usize, LatentWeights),
        [q_nope, c]: [&Matrix; 2],
        rotated: Option<[&Matrix; 2]>,
        sinks: Option<&[f32]>,
        chosen: Option<(Chosen, &Matrix)>,
        spans: &[Span<'_>],
    ) -> Result<Matrix> {
        let none = vec![vec![]; c.len()];
        let [q_rope, k_rope] = rotated.unwrap_or([&none; 2]);
        let shape = self.graph.latent_caches[cache];
        let LatentAttention { heads, nope, rope, value, scale, .. } = shape;
        let mut out = vec![vec![0.0; heads * value]; c.len()];
        for span in spans {
            let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
            for (i, row) in span.rows.clone().enumerate() {
                self.latents.insert(key(span.start + i), (c[row].clone(), k_rope[row].clone()));
            }
        }
        for head in 0..heads {
            let view = |id: WeightId| {
                let view = self.weights[id.0].view();
                let row = |r| {
                    let mut row = vec![0.0; view.cols()];
                    dequantize_row(view, r, &mut row).map(|()| row)
                };
                (0..view.rows()).map(row).collect()
            };
            let [w_k, w_v] = latent_weights(&shape, weights, view, head)?;
            for span in spans {
                let key = |p: usize| (cache, span.pages[p / PAGE_TOKENS], p % PAGE_TOKENS);
                let times = |w: &Matrix, c: &[f32]| w.iter().map(|row| dot(row, c)).collect::<Vec<f32>>();
                let cached = (0..span.start + span.rows.len()).map(|p| &self.latents[&key(p)]);
                let (keys, values): (Matrix, Matrix) = cached
                    .map(|(c, k_rope)| ([times(&w_k, c), k_rope.clone()].concat(), times(&w_v, c)))
                    .unzip();
                let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
                let values: Vec<&[f32]> = values.iter().map(Vec::as_slice).collect();
                for (i, row) in span.rows.clone().enumerate() {
                    let position = span.start + i;
                    if chosen.is_some_and(|(_, blocks)| blocks[row][0].is_nan()) {
                        out[row].fill(f32::NAN);
                        continue;
                    }
                    let positions = match chosen {
                        Some((chosen, blocks)) => seen(&chosen, &blocks[row], position, head, heads),
                        None => (0..position + 1).collect(),
                    };
                    let [keys, values] =
                        [&keys, &values].map(|all| positions.iter().map(|p| all[*p]).collect::<Vec<_>>());
                    let q_nope = &q_nope[row][head * nope..(head + 1) * nope];
                    let query = [q_nope, &q_rope[row][head * rope..(head + 1) * rope]].concat();
                    let out = &mut out[row][head * value..(head + 1) * value];
                    attend(&query, &keys, &values, scale, sinks.map(|sinks| sinks[head]), out);
                }
            }
        }
        Ok(out)
    }

    fn moe(
        &self,
        (set, mlp): (ExpertSetId, ExpertMlp),
        x: &Matrix,
        chosen: &[Vec<(u32, f32)>],
        source: &mut dyn ExpertSource,
    ) -> Result<Matrix> {
        let biases = match mlp.biases {
            Some(b) => Some([self.vector(b.gate)?, self.vector(b.up)?, self.vector(b.down)?]),
            None => None,
        };
        let mut ids: Vec<u32> = chosen.iter().flatten().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut parts: HashMap<(usize, u32), Vec<f32>> = HashMap::new();
        let mut failed = Ok(());
        source.visit(set, &ids, &mut |group| {
            for weights in group {
                let spec = &self.graph.expert_sets[set.0];
                let widths = [spec.up.rows, spec.up.rows, spec.down.rows];
                let own = |which: usize, all: &'_ [Vec<f32>; 3]| {
                    let start = weights.id as usize * widths[which];
                    start..(start + widths[which]).min(all[which].len())
                };
                let own = biases.as_ref().map(|b| [0, 1, 2].map(|which| &b[which][own(which, b)]));
                let weight =
                    |chosen: &Vec<(u32, f32)>| chosen.iter().find(|c| c.0 == weights.id).map(|c| c.1);
                for (row, weight) in chosen.iter().enumerate().filter_map(|(r, c)| Some((r, weight(c)?))) {
                    let mut out = vec![0.0; weights.down.rows()];
                    let mut x = x[row].clone();
                    if mlp.weighted == Weighted::Input {
                        x.iter_mut().for_each(|v| *v *= weight);
                    }
                    if let Err(error) = expert(weights, mlp.activation, own, &x, &mut out) {
                        failed = Err(error);
                    }
                    parts.insert((row, weights.id), out);
                }
            }
        })?;
        failed?;
        let sum = |row: usize, column: usize| -> f32 {
            chosen[row]
                .iter()
                .map(|(id, w)| if mlp.weighted == Weighted::Input { (id, &1.0) } else { (id, w) })
                .map(|(id, w)| f64::from(*w) * f64::from(parts[&(row, *id)][column]))
                .sum::<f64>() as f32
        };
        Ok((0..x.len()).map(|row| (0..x[row].len()).map(|column| sum(row, column)).collect()).collect())
    }
}

impl Executable for Interpreter {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let mut values: Vec<Matrix> = vec![vec![]; self.graph.values];
        let mut routings: Vec<Vec<Vec<(u32, f32)>>> = vec![vec![]; self.graph.routings];
        for index in 0..self.graph.nodes.len() {
            let node = self.graph.nodes[index].clone();
            let of = |value: Value| &values[value.index];
            let result = match node.op {
                Op::Embed(EmbedOp { table }) => {
                    let table = self.weights[table.0].view();
                    let row = |token: &u32| {
                        let mut out = vec![0.0; table.cols()];
                        dequantize_row(table, *token as usize, &mut out).map(|()| out)
                    };
                    batch.tokens.iter().map(row).collect::<Result<Matrix>>()?
                }
                Op::Linear(LinearOp { x, weight, bias, precision: _ }) => {
                    let weight = self.weights[weight.0].view();
                    let bias = bias.map(|b| self.vector(b)).transpose()?;
                    let mut result = vec![];
                    for x in of(x) {
                        let mut out = vec![0.0; weight.rows()];
                        linear(weight, x, &mut out)?;
                        out.iter_mut().zip(bias.iter().flatten()).for_each(|(o, b)| *o += b);
                        result.push(out);
                    }
                    result
                }
                Op::Attention(AttentionOp { q, k, v, cache, sinks, chosen }) => {
                    let sinks = sinks.map(|s| self.vector(s)).transpose()?;
                    let chosen = chosen.map(|chosen| (chosen, of(chosen.blocks)));
                    self.attention(cache.0, [q, k, v].map(of), sinks.as_deref(), chosen, batch.spans)
                }
                Op::LatentAttention(LatentAttentionOp { inputs, weights, cache }) => {
                    let LatentInputs { q_nope, c, rotated, sinks, chosen } = inputs;
                    let sinks = sinks.map(|s| self.vector(s)).transpose()?;
                    let rotated = rotated.map(|rotated| rotated.map(of));
                    let chosen = chosen.map(|chosen| (chosen, of(chosen.blocks)));
                    let inputs = [q_nope, c].map(of);
                    let sinks = sinks.as_deref();
                    self.latent_attention((cache.0, weights), inputs, rotated, sinks, chosen, batch.spans)?
                }
                Op::ChooseBlocks(ChooseBlocksOp { inputs: IndexInputs { q, k, weights }, choice, cache }) => {
                    let inputs = [q, k].map(of);
                    self.choose_blocks(cache.0, inputs, weights.map(of), &choice, batch.spans)
                }
                Op::LayerNorm(LayerNormOp { x, weight, bias, eps }) => {
                    let (weight, bias) = (self.vector(weight)?, self.vector(bias)?);
                    let mut result = of(x).clone();
                    result.iter_mut().for_each(|row| layer_norm(row, &weight, &bias, eps));
                    result
                }
                Op::Activate(ActivateOp { activation, gate, up }) => {
                    let up = of(up);
                    let gates = gate.map_or(up, of);
                    let row = |(g, u): (&Vec<f32>, &Vec<f32>)| {
                        g.iter().zip(u).map(|(g, u)| activate(activation, *g, *u)).collect()
                    };
                    gates.iter().zip(up).map(row).collect()
                }
                Op::RmsNorm(RmsNormOp { x, weight, groups, eps }) => {
                    let weight = weight.map(|weight| self.vector(weight)).transpose()?;
                    let mut result = of(x).clone();
                    for row in &mut result {
                        let part = row.len() / groups;
                        let weight = weight.clone().unwrap_or_else(|| vec![1.0; part]);
                        let weights = weight.chunks(part).cycle();
                        row.chunks_mut(part).zip(weights).for_each(|(part, w)| rms_norm(part, w, eps));
                    }
                    result
                }
                Op::Rope(RopeOp { x, heads, rope: rotation, place }) => {
                    let mut result = of(x).clone();
                    let mut rotation = self.graph.ropes[rotation].clone();
                    if place.inverse {
                        rotation.inv_freq.iter_mut().for_each(|freq| *freq = -*freq);
                    }
                    for span in batch.spans {
                        for (i, row) in span.rows.clone().enumerate() {
                            let dim = result[row].len() / heads;
                            let position = place.position(span.start + i);
                            let rotate =
                                |head: &mut [f32]| rope(&mut head[place.first..], &rotation, position);
                            result[row].chunks_mut(dim).for_each(rotate);
                        }
                    }
                    result
                }
                Op::Route(RouteOp { logits, by, route: how }) => {
                    let Output::Routing(out) = node.out else { unreachable!("a route yields a routing") };
                    match by {
                        RouteBy::Scores { bias } => {
                            let bias = bias.map(|b| self.vector(b)).transpose()?;
                            let row = |row: &Vec<f32>| route(row, bias.as_deref(), &how);
                            routings[out.index] = of(logits).iter().map(row).collect();
                        }
                        RouteBy::Tokens { table } => {
                            let table = self.weights[table.0].view();
                            for (logits, token) in of(logits).clone().iter().zip(batch.tokens) {
                                let mut ids = vec![0.0; table.cols()];
                                dequantize_row(table, *token as usize, &mut ids)?;
                                routings[out.index].push(route_by_token(logits, &ids, &how));
                            }
                        }
                    }
                    continue;
                }
                Op::Add(AddOp { a, b }) => {
                    let row = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
                    of(a).iter().zip(of(b)).map(row).collect()
                }
                Op::SigmoidGate(SigmoidGateOp { x, gate }) => {
                    let row = |(x, gate): (&Vec<f32>, &Vec<f32>)| {
                        let part = x.len() / gate.len();
                        x.iter().enumerate().map(|(i, x)| x * sigmoid(gate[i / part])).collect()
                    };
                    of(x).iter().zip(of(gate)).map(row).collect()
                }
                Op::Slice(SliceOp { x, groups, start, len }) => {
                    let part = |p: &[f32]| p[start..start + len].to_vec();
                    of(x).iter().map(|row| row.chunks(row.len() / groups).flat_map(part).collect()).collect()
                }
                Op::Clamp(ClampOp { x, limit }) => {
                    of(x).iter().map(|row| row.iter().map(|v| v.clamp(-limit, limit)).collect()).collect()
                }
                Op::MoeExperts(MoeExpertsOp { x, routing, experts: set, mlp }) => {
                    self.moe((set, mlp), of(x), &routings[routing.index], experts)?
                }
                Op::CausalConv1d(CausalConv1dOp { x, weight, bias, kernel, dilation, state }) => {
                    let (x, weight) = (of(x).clone(), self.vector(weight)?);
                    let bias = bias.map(|bias| self.vector(bias)).transpose()?.unwrap_or_default();
                    self.conv(&x, [&weight, &bias], [kernel, dilation], state, batch.spans)
                }
                Op::SsmScan(SsmScanOp { inputs: SsmInputs { x, b, c, dt }, weights, shape, state }) => {
                    let SsmWeights { a, d, dt_bias } = weights;
                    let weights = [self.vector(a)?, self.vector(d)?, self.vector(dt_bias)?];
                    let inputs = [x, b, c, dt].map(|value| &values[value.index]);
                    self.ssm_scan(inputs, &weights, &shape, state, batch.spans)
                }
                Op::GatedDeltaRule(GatedDeltaRuleOp {
                    inputs: DeltaInputs { q, k, v, a, b },
                    decay,
                    dt_bias,
                    shape,
                    state,
                }) => {
                    let weights = [&self.vector(decay)?[..], &self.vector(dt_bias)?];
                    let inputs = [q, k, v, a, b].map(|value| &values[value.index]);
                    self.delta_rule(inputs, weights, &shape, state, batch.spans)
                }
                Op::PositionScale(PositionScaleOp { x, scale }) => {
                    let mut result = of(x).clone();
                    for span in batch.spans {
                        for (i, row) in span.rows.clone().enumerate() {
                            let factor = scale.at(span.start + i);
                            result[row].iter_mut().for_each(|v| *v *= factor);
                        }
                    }
                    result
                }
                Op::GroupedLinear(GroupedLinearOp { x, weight, groups }) => {
                    let view = self.weights[weight.0].view();
                    let each = view.rows() / groups;
                    let mut result = vec![];
                    for x in of(x) {
                        let mut out = vec![0.0; view.rows()];
                        let parts = x.chunks(view.cols()).zip(out.chunks_mut(each));
                        for (group, (x, out)) in parts.enumerate() {
                            linear(view.rows_range(group * each..(group + 1) * each), x, out)?;
                        }
                        result.push(out);
                    }
                    result
                }
                Op::Repeat(RepeatOp { x, times }) => of(x).iter().map(|row| row.repeat(times)).collect(),
                Op::HyperWeights(HyperWeightsOp { x, mix, base, factors, shape }) => {
                    let (base, factors) = (self.vector(base)?, self.vector(factors)?);
                    let rows = of(x).iter().zip(of(mix));
                    rows.map(|(x, mix)| hyper_weights(&shape, x, mix, &base, &factors)).collect()
                }
                Op::HyperCollapse(HyperCollapseOp { x, weights, streams }) => {
                    let rows = of(x).iter().zip(of(weights));
                    rows.map(|(x, weights)| hyper_collapse(x, weights, streams)).collect()
                }
                Op::HyperExpand(HyperExpandOp { x, block, weights, streams }) => {
                    let rows = of(x).iter().zip(of(block)).zip(of(weights));
                    rows.map(|((x, block), weights)| hyper_expand(x, block, weights, streams)).collect()
                }
                Op::WindowPool(WindowPoolOp { kv, gate, bias, shape, state }) => {
                    let (kv, gate, bias) = (of(kv).clone(), of(gate).clone(), self.vector(bias)?);
                    self.pool([&kv, &gate], &bias, &shape, state, batch.spans)
                }
                Op::CompressedAttention(CompressedAttentionOp { inputs, cache }) => {
                    let CompressedInputs { q, kv, entries, index, sinks } = inputs;
                    let sinks = self.vector(sinks)?;
                    let index = index.map(|index| ([index.q, index.k].map(of), index.weights.map(of)));
                    let inputs = [q, kv, entries].map(of);
                    self.compressed_attention(cache.0, inputs, index, &sinks, batch.spans)
                }
                Op::NGramEmbed(NGramEmbedOp { tables, ngrams, state }) => {
                    self.ngram_embed(&tables, &ngrams, state, batch)?
                }
                Op::ScaledSilu(ScaledSiluOp { x, factor }) => {
                    of(x).iter().map(|row| row.iter().map(|v| swiglu(v * factor, 1.0)).collect()).collect()
                }
                Op::GatedMean(GatedMeanOp { x, gate, streams }) => {
                    of(x).iter().zip(of(gate)).map(|(x, gate)| gated_mean(x, gate, streams)).collect()
                }
                Op::StreamAdd(StreamAddOp { x, block, logits }) => {
                    let rows = of(x).iter().zip(of(block)).zip(of(logits));
                    rows.map(|((x, block), logits)| stream_add(x, block, logits)).collect()
                }
                Op::StreamGate(StreamGateOp { keys, queries, value }) => {
                    let rows = of(keys).iter().zip(of(queries)).zip(of(value));
                    rows.map(|((keys, queries), value)| stream_gate(keys, queries, value)).collect()
                }
                Op::WindowMean(WindowMeanOp { x, window, state }) => {
                    let x = of(x).clone();
                    self.window_mean(&x, window, state, batch.spans)
                }
                Op::BlockAttention(BlockAttentionOp { inputs, cache }) => {
                    let BlockInputs { q, k, v, index } = inputs;
                    let weights = index.weights.map(of);
                    let inputs = [q, k, v, index.q, index.k].map(of);
                    self.block_attention(cache.0, inputs, weights, batch.spans)
                }
                Op::GatherRows(GatherRowsOp { x }) => {
                    batch.outputs.iter().map(|row| of(x)[*row as usize].clone()).collect()
                }
            };
            let Output::Value(out) = node.out else { unreachable!("only a route yields a routing") };
            values[out.index] = result;
        }
        logits.clear();
        logits.extend(values[self.graph.logits.index].iter().flatten());
        Ok(())
    }

    fn reserve_pages(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn reserve_slots(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn page_bytes(&self) -> usize {
        page_bytes(&self.graph, KvType::F32)
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        for (cache, shape) in self.graph.caches.iter().enumerate() {
            let [keys, values] =
                [shape.head_dim, shape.value_dim].map(|width| vec![0.0; shape.kv_heads * width]);
            let rows = (0..PAGE_TOKENS).map(|offset| self.pages.get(&(cache, page, offset)));
            let rows: Vec<_> = rows.map(|row| row.map_or((&keys, &values), |(k, v)| (k, v))).collect();
            for row in rows.iter().map(|r| r.0).chain(rows.iter().map(|r| r.1)) {
                out.extend(row.iter().flat_map(|v| v.to_le_bytes()));
            }
        }
        for (cache, shape) in self.graph.latent_caches.iter().enumerate() {
            for offset in 0..PAGE_TOKENS {
                match self.latents.get(&(cache, page, offset)) {
                    Some((c, k_rope)) => out.extend(c.iter().chain(k_rope).flat_map(|v| v.to_le_bytes())),
                    None => out.resize(out.len() + (shape.rank + shape.rope) * size_of::<f32>(), 0),
                }
            }
        }
        for (cache, shape) in self.graph.compressed_caches.iter().enumerate() {
            match self.compressed.get(&(cache, page)) {
                Some(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
                None => out.resize(out.len() + shape.page_elements() * size_of::<f32>(), 0),
            }
        }
        Ok(())
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        let mut values = floats("page", bytes, self.page_bytes())?;
        for (cache, shape) in self.graph.caches.iter().enumerate() {
            let mut half = |width: usize| -> Matrix {
                (0..PAGE_TOKENS).map(|_| values.by_ref().take(shape.kv_heads * width).collect()).collect()
            };
            for (offset, row) in half(shape.head_dim).into_iter().zip(half(shape.value_dim)).enumerate() {
                self.pages.insert((cache, page, offset), row);
            }
        }
        for (cache, shape) in self.graph.latent_caches.iter().enumerate() {
            for offset in 0..PAGE_TOKENS {
                let c = values.by_ref().take(shape.rank).collect();
                let k_rope = values.by_ref().take(shape.rope).collect();
                self.latents.insert((cache, page, offset), (c, k_rope));
            }
        }
        for (cache, shape) in self.graph.compressed_caches.iter().enumerate() {
            self.compressed.insert((cache, page), values.by_ref().take(shape.page_elements()).collect());
        }
        Ok(())
    }

    fn slot_bytes(&self) -> usize {
        slot_bytes(&self.graph)
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        for (state, elements) in self.graph.states.iter().enumerate() {
            match self.states.get(&(state, slot)) {
                Some(held) => out.extend(held.iter().flat_map(|v| v.to_le_bytes())),
                None => out.resize(out.len() + elements * size_of::<f32>(), 0),
            }
        }
        Ok(())
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        let mut values = floats("state slot", bytes, self.slot_bytes())?;
        for (state, elements) in self.graph.states.iter().enumerate() {
            self.states.insert((state, slot), values.by_ref().take(*elements).collect());
        }
        Ok(())
    }
}
