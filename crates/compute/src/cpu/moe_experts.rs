//! Routed experts of a batch: for each token Σ weight · down(silu(gate·x) ⊙ up·x), with other activations and
//! biases, or without a gate, where the model has them.
//!
//! Work is expert-major: each expert runs once, over all tokens that chose it, as soon as it is handed over. Every
//! (token, expert) pair has its own output row, and rows are summed in the router's order at the end, so neither
//! the order in which experts arrive nor what else is in the batch can change a bit. Where the expert returns what it
//! takes, that row is the token's own.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::activate::activate;
use super::activations::{Activations, BLOCK, Q8Rows, Q8Writer};
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::linear::{CpuContext, TASKS, row_tasks};
use super::low_rank::{ExpertAdapters, ExpertDelta};
use super::matmul::{NextJob, OutRows, ROW_TILE, Tokens, accepts_q8, matmul_rows_before};
use super::route::Choice;
use super::shared::SharedMut;
use super::vector;
use crate::backend::{ActivationMode, ExpertSource, ExpertView};
use crate::graph::{Activation, ExpertSet, ExpertSetId, MoeExpertsOp, Weighted};
use crate::{Result, TensorView};

impl CpuOp for MoeExpertsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, routing, experts: set, mlp, ref low_rank } = *self;
        if cpu.context.activations == ActivationMode::Int8 {
            cpu.quantize(x);
        }
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let biases = mlp.biases.map(|b| [b.gate, b.up, b.down].map(|id| &cpu.vectors[id.0][..]));
            let norm = mlp.norm.map(|norm| (&cpu.vectors[norm.weight.0][..], norm.eps));
            let body = ExpertBody { activation: mlp.activation, biases, weighted: mlp.weighted, norm };
            let adapters = (!cpu.adapters.is_empty() && !low_rank.is_empty()).then(|| ExpertAdapters {
                of_rows: cpu.adapters.of_rows(cpu.values.rows(x)),
                low_rank,
                weights: &cpu.weights,
            });
            moe_experts(
                &cpu.context,
                &mut cpu.moe,
                (set, &cpu.graph.expert_sets[set.0], body, adapters.as_ref()),
                (cpu.values.of(x), &cpu.q8),
                &cpu.choices[routing.index],
                call.experts,
                out,
            )
        })
    }
}

/// Stands for the pair of a choice whose expert returns what it takes.
const IDENTITY: u32 = u32::MAX;

/// Memory that layers share.
#[derive(Debug, Default)]
pub(crate) struct MoeScratch {
    /// Pairs of (row of the batch) in order of expert id, then row.
    rows: Vec<u32>,
    /// (rows, top_k): which pair a row's j-th choice is, or [`IDENTITY`].
    pair_of: Vec<u32>,
    /// Pairs of each distinct expert.
    pairs_of: Vec<Range<usize>>,
    /// Factors on what experts take, of each pair; empty without.
    input_weights: Vec<f32>,
    /// (pairs, moe_intermediate_size).
    gate: Vec<f32>,
    /// (pairs, moe_intermediate_size).
    up: Vec<f32>,
    /// The product, quantised, for a down projection that takes it so.
    product: Q8Rows,
    /// (pairs, hidden_size).
    down: Vec<f32>,
    /// What adapters' A make of the inputs of gate, up and down: (pairs, largest rank).
    inner: [Vec<f32>; 3],
    /// Time spent on gate and up projections, and on down projections.
    spent: [Duration; 2],
}

/// What experts compute besides their products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertBody<'a> {
    /// Between gate, up and down.
    pub(crate) activation: Activation,
    /// Of gate, up and down: (experts, rows).
    pub(crate) biases: Option<[&'a [f32]; 3]>,
    /// Where the router's weights enter.
    pub(crate) weighted: Weighted,
    /// Of results: the weights, (hidden_size), and epsilon.
    pub(crate) norm: Option<(&'a [f32], f32)>,
}

impl ExpertBody<'_> {
    /// Adds the bias of `expert` of projection `which`, from row `row` of `of` rows on, to `values`.
    fn add_bias(&self, which: usize, (expert, of, row): (u32, usize, usize), values: &mut [f32]) {
        if let Some(biases) = self.biases {
            let start = expert as usize * of + row;
            values.iter_mut().zip(&biases[which][start..]).for_each(|(v, b)| *v += b);
        }
    }
}

/// Bytes of scratch that a batch of `rows` rows with `top_k` choices each needs.
///
/// `terms` are those of int8 activations.
pub(crate) fn scratch_bytes(set: &ExpertSet, top_k: usize, rows: usize, terms: usize) -> usize {
    let pair = (2 * set.width() + set.down.rows) * size_of::<f32>() + set.width() * 2 * terms;
    rows.saturating_mul(top_k * pair)
}

/// Grows `buffer` to `len` without clearing what will be overwritten.
fn grow(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl MoeScratch {
    /// For int8 activations that have a second term, if so.
    pub(crate) fn new(second_term: bool) -> Self {
        Self { product: Q8Rows::with_second_term(second_term), ..Self::default() }
    }

    /// Time spent on gate and up projections and on down projections since the last call.
    pub(crate) fn take_spent(&mut self) -> [Duration; 2] {
        std::mem::take(&mut self.spent)
    }

    /// Sorts the batch's choices by expert; those that are not among `ids` are identities.
    fn sort(&mut self, choice: &Choice, top_k: usize, ids: &[u32]) {
        let mut count = vec![0usize; ids.len()];
        let index = |id: &u32| ids.binary_search(id).ok();
        choice.ids.iter().filter_map(index).for_each(|index| count[index] += 1);
        self.pairs_of.clear();
        let mut start = 0;
        for n in &mut count {
            self.pairs_of.push(start..start + *n);
            start += *n;
            *n = start - *n;
        }
        self.rows.resize(choice.ids.len(), 0);
        self.pair_of.resize(choice.ids.len(), 0);
        for (at, id) in choice.ids.iter().enumerate() {
            let Some(index) = index(id) else {
                self.pair_of[at] = IDENTITY;
                continue;
            };
            let pair = &mut count[index];
            self.rows[*pair] = (at / top_k) as u32;
            self.pair_of[at] = *pair as u32;
            *pair += 1;
        }
    }
}

impl MoeScratch {
    /// Keeps the factors on what experts take.
    fn weigh_inputs(&mut self, choice: &Choice, weighted: Weighted) {
        self.input_weights.clear();
        if weighted == Weighted::Input {
            self.input_weights.resize(choice.ids.len(), 0.0);
            for (pair, weight) in self.pair_of.iter().zip(&choice.weights) {
                self.input_weights[*pair as usize] = *weight;
            }
        }
    }
}

/// Runs the layer's experts on x (rows, hidden_size) into `out`, the same shape.
pub(crate) fn moe_experts(
    context: &CpuContext,
    scratch: &mut MoeScratch,
    (set_id, set, body, adapters): (ExpertSetId, &ExpertSet, ExpertBody<'_>, Option<&ExpertAdapters<'_>>),
    (x, x_q8): (&[f32], &Q8Rows),
    choice: &Choice,
    source: &mut dyn ExpertSource,
    out: &mut [f32],
) -> Result<()> {
    let (hidden, inner) = (set.down.rows, set.width());
    let rows = out.len() / hidden;
    let top_k = choice.ids.len() / rows;
    let ids = choice.distinct(set.experts);
    scratch.sort(choice, top_k, &ids);
    scratch.weigh_inputs(choice, body.weighted);
    let pairs = rows * top_k;
    let int8_down = context.activations == ActivationMode::Int8 && accepts_q8(set.down.dtype, inner);
    if int8_down {
        scratch.product.resize(pairs, inner);
    }
    let MoeScratch {
        rows: pair_rows,
        pair_of,
        pairs_of,
        input_weights,
        gate,
        up,
        product,
        down,
        inner: reduced,
        spent,
    } = scratch;
    let rank = adapters.map_or(0, ExpertAdapters::rank);
    let [gate_reduced, up_reduced, down_reduced] = reduced.each_mut().map(|own| grow(own, pairs * rank));
    let batch = ExpertBatch {
        context,
        body,
        x,
        x_q8,
        hidden,
        inner,
        int8_down,
        ids: &ids,
        pairs_of,
        pair_rows,
        input_weights,
        adapters,
        rank,
    };
    let (gate, up) = (grow(gate, pairs * inner), grow(up, pairs * inner));
    let down = grow(down, pairs * hidden);
    if adapters.is_some() {
        batch.reduce(0, &ids, x, gate_reduced);
        batch.reduce(1, &ids, x, up_reduced);
    }
    source.visit(set_id, &ids, &mut |group: &[ExpertView<'_>]| {
        let start = Instant::now();
        batch.gate_and_up(group, &product.writer(), [&mut *gate, &mut *up], [gate_reduced, up_reduced]);
        spent[0] += start.elapsed();
        let start = Instant::now();
        if adapters.is_some() {
            let ids: Vec<u32> = group.iter().map(|view| view.id).collect();
            batch.reduce(2, &ids, gate, down_reduced);
        }
        batch.down(group, product, (gate, down_reduced), down);
        spent[1] += start.elapsed();
    })?;
    if let Some(norm) = body.norm {
        batch.norm(norm, down);
    }
    batch.sum(pair_of, choice, down, out);
    Ok(())
}

/// What the experts of a batch work with.
struct ExpertBatch<'a> {
    context: &'a CpuContext,
    body: ExpertBody<'a>,
    /// (rows, hidden_size).
    x: &'a [f32],
    x_q8: &'a Q8Rows,
    hidden: usize,
    /// moe_intermediate_size.
    inner: usize,
    /// Whether the down projection takes int8.
    int8_down: bool,
    /// Distinct experts, ascending.
    ids: &'a [u32],
    /// Pairs of each.
    pairs_of: &'a [Range<usize>],
    /// Rows of pairs.
    pair_rows: &'a [u32],
    /// Factors on what experts take, of each pair; empty without.
    input_weights: &'a [f32],
    /// What is added to projections.
    adapters: Option<&'a ExpertAdapters<'a>>,
    /// Largest rank of the adapters.
    rank: usize,
}

impl ExpertBatch<'_> {
    /// What the adapter of a pair's row adds to projection `which`.
    fn delta(&self, which: usize, expert: u32, pair: usize) -> Option<ExpertDelta<'_>> {
        self.adapters?.delta(which, expert, self.pair_rows[pair])
    }

    /// What adapters' A make of the inputs of projection `which` of `experts`, (pairs, rank): rows of x, or for down of pairs.
    fn reduce(&self, which: usize, experts: &[u32], input: &[f32], out: &mut [f32]) {
        let index = |id: &u32| self.ids.binary_search(id).expect("only experts asked for are handed over");
        let pairs = experts.iter().flat_map(|id| self.pairs_of[index(id)].clone().map(|pair| (*id, pair)));
        let pairs: Vec<(u32, usize)> = pairs.collect();
        let (shared, cols) = (SharedMut::new(out), if which == 2 { self.inner } else { self.hidden });
        self.context.for_rows(pairs.len(), cols * self.rank, &|index| {
            let (expert, pair) = pairs[index];
            let Some(delta) = self.delta(which, expert, pair) else { return };
            let row = if which == 2 { pair } else { self.pair_rows[pair] as usize };
            // SAFETY: each pair is one task's.
            let out = unsafe { shared.part(pair * self.rank..(pair + 1) * self.rank) };
            delta.reduce(self.context, &input[row * cols..(row + 1) * cols], out);
        });
    }

    /// Adds to rows of projection `which` of a pair, from `start` on, what its adapter says; `reduced` is (pairs, rank).
    fn adapt(
        &self,
        which: usize,
        (expert, pair, start): (u32, usize, usize),
        reduced: &[f32],
        out: &mut [f32],
    ) {
        if let Some(delta) = self.delta(which, expert, pair) {
            delta.add(self.context, &reduced[pair * self.rank..(pair + 1) * self.rank], start, out);
        }
    }

    fn pairs(&self, view: &ExpertView<'_>) -> Range<usize> {
        self.pairs_of[self.ids.binary_search(&view.id).expect("only experts asked for are handed over")]
            .clone()
    }

    /// Rows `task` of a gate or up projection of `pairs`, whose first is written to `to`.
    fn project(
        &self,
        weight: TensorView<'_>,
        task: Range<usize>,
        pairs: Range<usize>,
        to: &SharedMut<'_, f32>,
        next: Option<NextJob<'_>>,
    ) {
        let (hidden, inner) = (self.hidden, self.inner);
        let int8 = self.context.activations == ActivationMode::Int8;
        let input = if int8 && accepts_q8(weight.dtype(), hidden) {
            Activations::Q8(self.x_q8)
        } else {
            Activations::F32 { rows: self.x, cols: hidden }
        };
        // SAFETY: a task writes only its rows of its expert's pairs.
        let start = unsafe { to.as_ptr().add(pairs.start * inner) };
        // SAFETY: as above.
        let out = unsafe { OutRows::new(start, inner, pairs.len(), inner) };
        let tokens = Tokens::List(&self.pair_rows[pairs]);
        matmul_rows_before(self.context.simd, weight, task, input, tokens, out, next)
            .expect("the graph's widths agree");
    }

    /// What a group's experts make of x: gate and up projections, (pairs, moe_intermediate_size) each, and into gate their
    /// activations, in int8 too if down takes that.
    /// `reduced` is what adapters' A make of x.
    fn gate_and_up(
        &self,
        group: &[ExpertView<'_>],
        quantized: &Q8Writer<'_>,
        [gate, up]: [&mut [f32]; 2],
        reduced: [&[f32]; 2],
    ) {
        // Borrowed for one region: what it has written the next reads without aliasing.
        let (shared_gate, shared_up) = (SharedMut::new(gate), SharedMut::new(up));
        let (context, inner) = (self.context, self.inner);
        // Rows of gate and up in blocks of whole activation blocks, so that a task can quantise what it computed.
        let tasks = row_tasks(group.iter().map(|_| inner), TASKS * context.threads(), BLOCK.max(ROW_TILE));
        context.pool.run_in_order(tasks.len(), &|task, next| {
            let (index, rows) = &tasks[task];
            let (view, pairs) = (&group[*index], self.pairs(&group[*index]));
            if let Some(weight) = view.gate {
                self.project(weight, rows.clone(), pairs.clone(), &shared_gate, Some((view.up, rows.start)));
            }
            let next = next.map(|next| {
                let (index, rows) = &tasks[next];
                (group[*index].gate.unwrap_or(group[*index].up), rows.start)
            });
            self.project(view.up, rows.clone(), pairs.clone(), &shared_up, next);
            for pair in pairs {
                let at = pair * inner + rows.start..pair * inner + rows.end;
                // SAFETY: a task writes only its rows of its expert's pairs.
                let (gate, up) = unsafe { (shared_gate.part(at.clone()), shared_up.part(at)) };
                if view.gate.is_some() {
                    self.adapt(0, (view.id, pair, rows.start), reduced[0], gate);
                }
                self.adapt(1, (view.id, pair, rows.start), reduced[1], up);
                // Products are linear, so their input's factor may follow them.
                if let Some(weight) = self.input_weights.get(pair) {
                    vector::scale(context.simd, *weight, gate);
                    vector::scale(context.simd, *weight, up);
                }
                self.body.add_bias(0, (view.id, inner, rows.start), gate);
                self.body.add_bias(1, (view.id, inner, rows.start), up);
                activate(context.simd, self.body.activation, gate, up);
                if self.int8_down {
                    // SAFETY: as above; tasks are cut at multiples of the quantisation block.
                    unsafe { quantized.write(context.simd, pair, rows.start, gate) };
                }
            }
        });
    }

    /// The down projections of a group's experts into `down`, (pairs, hidden_size); of `gate` unless they take int8.
    /// `reduced` is what adapters' A make of `gate`.
    fn down(
        &self,
        group: &[ExpertView<'_>],
        product: &Q8Rows,
        (gate, reduced): (&[f32], &[f32]),
        down: &mut [f32],
    ) {
        let shared_down = SharedMut::new(down);
        let (context, hidden, inner) = (self.context, self.hidden, self.inner);
        let tasks = row_tasks(group.iter().map(|_| hidden), TASKS * context.threads(), ROW_TILE);
        context.pool.run_in_order(tasks.len(), &|task, next| {
            let (index, rows) = &tasks[task];
            let (view, pairs) = (&group[*index], self.pairs(&group[*index]));
            let next = next.map(|next| (group[tasks[next].0].down, tasks[next].1.start));
            let input = if self.int8_down {
                Activations::Q8(product)
            } else {
                Activations::F32 { rows: gate, cols: inner }
            };
            // SAFETY: a task writes only its rows of its expert's pairs.
            let start = unsafe { shared_down.as_ptr().add(pairs.start * hidden) };
            // SAFETY: as above.
            let out = unsafe { OutRows::new(start, hidden, pairs.len(), hidden) };
            let tokens = Tokens::Range(pairs.clone());
            let product = matmul_rows_before(context.simd, view.down, rows.clone(), input, tokens, out, next);
            product.expect("the graph's widths agree");
            for pair in pairs {
                let at = pair * hidden + rows.start..pair * hidden + rows.end;
                // SAFETY: as above.
                let down = unsafe { shared_down.part(at) };
                self.adapt(2, (view.id, pair, rows.start), reduced, down);
                self.body.add_bias(2, (view.id, hidden, rows.start), down);
            }
        });
    }

    /// Norms of what experts return, (pairs, hidden_size).
    fn norm(&self, (weight, eps): (&[f32], f32), down: &mut [f32]) {
        let (context, hidden) = (self.context, self.hidden);
        let pairs = down.len() / hidden;
        let shared = SharedMut::new(down);
        context.for_rows(pairs, hidden, &|pair| {
            // SAFETY: each pair is one task's.
            let row = unsafe { shared.part(pair * hidden..(pair + 1) * hidden) };
            row.iter_mut().zip(weight).for_each(|(v, w)| *v *= w);
            let mean = vector::sum_of_squares(context.simd, row) / hidden as f32;
            vector::scale(context.simd, 1.0 / (mean + eps).sqrt(), row);
        });
    }

    /// Adds up the experts of each row in the router's order; `pair_of` (rows, top_k) says where they are.
    fn sum(&self, pair_of: &[u32], choice: &Choice, down: &[f32], out: &mut [f32]) {
        let (context, hidden) = (self.context, self.hidden);
        let rows = out.len() / hidden;
        let top_k = pair_of.len() / rows;
        let shared = SharedMut::new(out);
        context.for_rows(rows, hidden, &|row| {
            // SAFETY: each row is one task's.
            let sum = unsafe { shared.part(row * hidden..(row + 1) * hidden) };
            sum.fill(0.0);
            let chosen = row * top_k..(row + 1) * top_k;
            for (pair, weight) in pair_of[chosen.clone()].iter().zip(&choice.weights[chosen]) {
                let (from, at) = if *pair == IDENTITY { (self.x, row) } else { (down, *pair as usize) };
                let weight = if self.body.weighted == Weighted::Input { &1.0 } else { weight };
                vector::axpy_f32(context.simd, *weight, &from[at * hidden..(at + 1) * hidden], sum);
            }
        });
    }
}
