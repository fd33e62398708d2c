//! Routed experts of a batch: for each token Σ weight · down(silu(gate·x) ⊙ up·x), with other activations and
//! biases, or without a gate, where the model has them.
//!
//! Work is expert-major: each expert runs once, over all tokens that chose it, as soon as it is handed over. Every
//! (token, expert) pair has its own output row, and rows are summed in the router's order at the end, so neither
//! the order in which experts arrive nor what else is in the batch can change a bit.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::activate::activate;
use super::activations::{Activations, BLOCK, Q8Rows, Q8Writer};
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::linear::{CpuContext, TASKS, row_tasks};
use super::matmul::{NextJob, OutRows, ROW_TILE, Tokens, accepts_q8, matmul_rows_before};
use super::route::Choice;
use super::shared::SharedMut;
use super::vector;
use crate::backend::{ActivationMode, ExpertSource, ExpertView};
use crate::graph::{Activation, ExpertSet, ExpertSetId, MoeExpertsOp, Weighted};
use crate::{Result, TensorView};

impl CpuOp for MoeExpertsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, routing, experts: set, mlp } = *self;
        if cpu.context.activations == ActivationMode::Int8 {
            cpu.quantize(x);
        }
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let biases = mlp.biases.map(|b| [b.gate, b.up, b.down].map(|id| &cpu.vectors[id.0][..]));
            let body = ExpertBody { activation: mlp.activation, biases, weighted: mlp.weighted };
            moe_experts(
                &cpu.context,
                &mut cpu.moe,
                (set, &cpu.graph.expert_sets[set.0], body),
                (cpu.values.of(x), &cpu.q8),
                &cpu.choices[routing.index],
                call.experts,
                out,
            )
        })
    }
}

/// Memory that layers share.
#[derive(Debug, Default)]
pub(crate) struct MoeScratch {
    /// Pairs of (row of the batch) in order of expert id, then row.
    rows: Vec<u32>,
    /// (rows, top_k): which pair a row's j-th choice is.
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

    /// Sorts the batch's choices by expert.
    fn sort(&mut self, choice: &Choice, top_k: usize, ids: &[u32]) {
        let mut count = vec![0usize; ids.len()];
        let index = |id: &u32| ids.binary_search(id).expect("ids are the distinct choices");
        choice.ids.iter().for_each(|id| count[index(id)] += 1);
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
            let pair = &mut count[index(id)];
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
    (set_id, set, body): (ExpertSetId, &ExpertSet, ExpertBody<'_>),
    (x, x_q8): (&[f32], &Q8Rows),
    choice: &Choice,
    source: &mut dyn ExpertSource,
    out: &mut [f32],
) -> Result<()> {
    let (hidden, inner) = (set.down.rows, set.width());
    let rows = out.len() / hidden;
    let top_k = choice.ids.len() / rows;
    let ids = choice.distinct();
    scratch.sort(choice, top_k, &ids);
    scratch.weigh_inputs(choice, body.weighted);
    let pairs = rows * top_k;
    let int8_down = context.activations == ActivationMode::Int8 && accepts_q8(set.down.dtype, inner);
    if int8_down {
        scratch.product.resize(pairs, inner);
    }
    let MoeScratch { rows: pair_rows, pair_of, pairs_of, input_weights, gate, up, product, down, spent } =
        scratch;
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
    };
    let (gate, up) = (grow(gate, pairs * inner), grow(up, pairs * inner));
    let down = grow(down, pairs * hidden);
    source.visit(set_id, &ids, &mut |group: &[ExpertView<'_>]| {
        let start = Instant::now();
        batch.gate_and_up(group, &product.writer(), [&mut *gate, &mut *up]);
        spent[0] += start.elapsed();
        let start = Instant::now();
        batch.down(group, product, gate, down);
        spent[1] += start.elapsed();
    })?;
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
}

impl ExpertBatch<'_> {
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
    fn gate_and_up(&self, group: &[ExpertView<'_>], quantized: &Q8Writer<'_>, [gate, up]: [&mut [f32]; 2]) {
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
    fn down(&self, group: &[ExpertView<'_>], product: &Q8Rows, gate: &[f32], down: &mut [f32]) {
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
                self.body.add_bias(2, (view.id, hidden, rows.start), unsafe { shared_down.part(at) });
            }
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
                let pair = *pair as usize;
                let weight = if self.body.weighted == Weighted::Input { &1.0 } else { weight };
                vector::axpy_f32(context.simd, *weight, &down[pair * hidden..(pair + 1) * hidden], sum);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::pool::ThreadPool;
    use super::*;
    use crate::cpu::Simd;
    use crate::graph::MatrixSpec;
    use crate::{DType, Tensor};

    /// Experts in memory, handed over one at a time.
    struct Held(Vec<[Tensor; 3]>);

    impl ExpertSource for Held {
        fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
            Ok(())
        }

        fn visit(
            &mut self,
            _: ExpertSetId,
            experts: &[u32],
            visitor: &mut dyn FnMut(&[ExpertView<'_>]),
        ) -> Result<()> {
            for id in experts {
                let [gate, up, down] = &self.0[*id as usize];
                visitor(&[ExpertView { id: *id, gate: Some(gate.view()), up: up.view(), down: down.view() }]);
            }
            Ok(())
        }
    }

    /// Tasks of several threads get parts of scratch and of outputs that do not overlap, though all read the products.
    #[test]
    fn threads_share_no_elements() {
        let (rows, hidden, inner, experts) = (96, 256, 96, 4);
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 100.0;
        let matrix = |rows: usize, cols: usize, seed: usize| {
            let values: Vec<f32> = (0..rows * cols).map(|i| value(i + seed)).collect();
            Tensor::from_f32(rows, cols, &values).unwrap()
        };
        let mut source = Held(
            (0..experts)
                .map(|e| {
                    [matrix(inner, hidden, e), matrix(inner, hidden, e + 7), matrix(hidden, inner, e + 9)]
                })
                .collect(),
        );
        let spec = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
        let (wide, down) = (spec(inner, hidden), spec(hidden, inner));
        let set = ExpertSet { layer: 0, experts, gate: Some(wide), up: wide, down };
        let choice = Choice {
            ids: (0..rows).flat_map(|row| [(row % experts) as u32, ((row + 1) % experts) as u32]).collect(),
            weights: vec![0.5; 2 * rows],
        };
        let x: Vec<f32> = (0..rows * hidden).map(value).collect();
        let mut run = |threads: usize| {
            let context = CpuContext {
                pool: Arc::new(ThreadPool::new(threads)),
                simd: Simd::detect(),
                activations: ActivationMode::F32,
                second_term: false,
            };
            let body =
                ExpertBody { activation: Activation::SwiGlu, biases: None, weighted: Weighted::Output };
            let mut out = vec![0.0; rows * hidden];
            let input = (&x[..], &Q8Rows::new());
            let set = (ExpertSetId(0), &set, body);
            moe_experts(&context, &mut MoeScratch::new(false), set, input, &choice, &mut source, &mut out)
                .unwrap();
            out
        };
        assert_eq!(run(1), run(4));
    }
}
