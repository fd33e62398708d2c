//! Linear layers, and how their rows are divided among threads.

use std::ops::Range;
use std::sync::Arc;

use super::activate::soft_cap;
use super::activations::{Activations, Q8Rows};
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::low_rank;
use super::matmul::{OutRows, ROW_TILE, Tokens, accepts_q8, matmul_rows, matmul_rows_before};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::Simd;
use crate::backend::ActivationMode;
use crate::graph::{GroupedLinearOp, LinearOp, Op, Output, Precision, Value, WeightId};
use crate::{DType, Result, Tensor};

impl CpuOp for LinearOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        cpu.linears(call.node..call.node + 1, call.logits);
        Ok(())
    }
}

impl CpuOp for GroupedLinearOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let weight = &cpu.weights[self.weight.0];
            grouped_linear(&cpu.context, weight, self.groups, cpu.values.of(self.x), out)
        })
    }
}

impl CpuExecutable {
    /// Runs linear layers `nodes` on their common input; the logits' go to `logits`.
    pub(super) fn linears(&mut self, nodes: Range<usize>, logits: &mut Vec<f32>) {
        let graph = Arc::clone(&self.graph);
        let mut layers: Vec<(Value, WeightId, Option<WeightId>, bool)> = vec![];
        let (mut caps, mut low_ranks) = (vec![], vec![]);
        let mut input = None;
        for node in &graph.nodes[nodes] {
            let (Op::Linear(LinearOp { x, weight, bias, precision, cap, low_rank }), Output::Value(out)) =
                (&node.op, node.out)
            else {
                unreachable!("a step of linear layers")
            };
            let q8 = self.context.takes_q8(*precision, self.weights[weight.0].dtype(), x.width());
            layers.push((out, *weight, *bias, q8));
            caps.push(*cap);
            low_ranks.push(&low_rank[..]);
            input = Some(*x);
        }
        let x = input.expect("a step is not empty");
        if layers.iter().any(|l| l.3) {
            self.quantize(x);
        }
        let rows = self.values.rows(x);
        let mut outs: Vec<Vec<f32>> = vec![];
        for (out, ..) in &layers {
            outs.push(if *out == self.graph.logits {
                let mut buffer = std::mem::take(logits);
                buffer.resize(rows * out.width(), 0.0);
                buffer
            } else {
                self.values.take(*out, rows)
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
        linear(&self.context, &jobs, self.values.of(x), &self.q8, rows);
        drop(jobs);
        if !self.adapters.is_empty() {
            for (low_rank, out) in low_ranks.into_iter().zip(&mut outs) {
                let of_rows = self.adapters.of_rows(rows);
                low_rank::add(&self.context, (low_rank, &self.weights), of_rows, self.values.of(x), out);
            }
        }
        for ((out, ..), (buffer, cap)) in layers.iter().zip(outs.iter_mut().zip(caps)) {
            let Some(cap) = cap else { continue };
            let (width, shared) = (out.width(), SharedMut::new(buffer));
            let simd = self.context.simd;
            self.context.for_rows(rows, width, &|row| {
                // SAFETY: each row is one task's.
                soft_cap(simd, unsafe { shared.part(row * width..(row + 1) * width) }, cap);
            });
        }
        for ((out, ..), buffer) in layers.iter().zip(outs) {
            if *out == self.graph.logits {
                *logits = buffer;
            } else {
                self.values.put(*out, buffer);
            }
        }
    }
}

/// What every operation needs to run.
#[derive(Debug, Clone)]
pub(crate) struct CpuContext {
    pub(crate) pool: Arc<ThreadPool>,
    pub(crate) simd: Simd,
    pub(crate) activations: ActivationMode,
    /// Int8 activations have a second term.
    pub(crate) second_term: bool,
}

/// Elements below which waking the other threads costs more than it saves.
const INLINE_ELEMENTS: usize = 16 * 1024;

impl CpuContext {
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Calls `work` for every row, in parallel if rows of `width` elements are worth it.
    pub(crate) fn for_rows(&self, rows: usize, width: usize, work: &(dyn Fn(usize) + Sync)) {
        if rows * width <= INLINE_ELEMENTS {
            return (0..rows).for_each(work);
        }
        let block = rows.div_ceil(4 * self.threads());
        self.pool.run(rows.div_ceil(block), &|task| {
            (task * block..((task + 1) * block).min(rows)).for_each(work);
        });
    }

    /// Whether a product with weights of this kind takes int8 activations.
    pub(crate) fn takes_q8(&self, precision: Precision, dtype: DType, cols: usize) -> bool {
        self.activations == ActivationMode::Int8 && precision == Precision::Fast && accepts_q8(dtype, cols)
    }
}

/// Tasks a thread, so that one that is held up leaves work to the others.
pub(crate) const TASKS: usize = 8;

/// Tasks a thread where there are many tokens, whose activations every task packs for itself.
const TASKS_OF_MANY: usize = 3;

/// Tokens from which on [`TASKS_OF_MANY`] are made.
const MANY: usize = 64;

/// Cuts matrices of so many rows each into tasks (matrix, rows) of a multiple of `multiple` rows, about `count` of them.
pub(crate) fn row_tasks(
    matrices: impl Iterator<Item = usize> + Clone,
    count: usize,
    multiple: usize,
) -> Vec<(usize, Range<usize>)> {
    let total: usize = matrices.clone().sum();
    let block = (total / count).next_multiple_of(multiple).clamp(multiple, 1024);
    let cut = |(matrix, rows): (usize, usize)| {
        // Even parts: a matrix that is little larger than a block stays whole, as every part packs its activations.
        let parts = ((rows + block / 2) / block).max(1);
        let size = rows.div_ceil(parts).next_multiple_of(multiple).max(multiple);
        (0..rows).step_by(size).map(move |start| (matrix, start..(start + size).min(rows)))
    };
    matrices.enumerate().flat_map(cut).collect()
}

/// One linear layer of a group that shares its input.
pub(crate) struct LinearJob<'a> {
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) q8: bool,
    /// (rows, out features).
    pub(crate) out: SharedMut<'a, f32>,
}

/// Runs `jobs` on the same x (rows, cols) in one parallel region.
pub(crate) fn linear(context: &CpuContext, jobs: &[LinearJob<'_>], x: &[f32], x_q8: &Q8Rows, rows: usize) {
    if rows == 0 {
        return;
    }
    let count = context.threads() * if rows < MANY { TASKS } else { TASKS_OF_MANY };
    let tasks = row_tasks(jobs.iter().map(|j| j.weight.rows()), count, ROW_TILE);
    context.pool.run_in_order(tasks.len(), &|task, next| {
        let (index, range) = &tasks[task];
        let job = &jobs[*index];
        let next = next.map(|next| (jobs[tasks[next].0].weight.view(), tasks[next].1.start));
        let width = job.weight.rows();
        let input = if job.q8 {
            Activations::Q8(x_q8)
        } else {
            Activations::F32 { rows: x, cols: job.weight.cols() }
        };
        // SAFETY: `out` is (rows, width), and a task writes only its range of columns.
        let out = unsafe { OutRows::new(job.out.as_ptr(), width, rows, width) };
        let (view, tokens) = (job.weight.view(), Tokens::Range(0..rows));
        let product = matmul_rows_before(context.simd, view, range.clone(), input, tokens, out, next);
        product.expect("the graph's widths agree");
        if let Some(bias) = job.bias {
            for row in 0..rows {
                // SAFETY: as above.
                let out = unsafe { job.out.part(row * width + range.start..row * width + range.end) };
                out.iter_mut().zip(&bias[range.clone()]).for_each(|(o, b)| *o += b);
            }
        }
    });
}

/// Part g of x (rows, groups · cols) through rows g of `weight`, for each of `groups` parts: `out` is (rows, weight rows).
/// Activations stay f32.
///
/// # Errors
/// If the weight's encoding has no kernel.
pub(crate) fn grouped_linear(
    context: &CpuContext,
    weight: &Tensor,
    groups: usize,
    x: &[f32],
    out: &mut [f32],
) -> Result<()> {
    let (cols, width) = (weight.cols(), weight.rows());
    let (rows, each) = (x.len() / (groups * cols).max(1), width / groups);
    // The parts of all rows, a group after the other.
    let mut parts = vec![0.0; x.len()];
    for (row, x) in x.chunks_exact(groups * cols).enumerate() {
        for (group, part) in x.chunks_exact(cols).enumerate() {
            let at = (group * rows + row) * cols;
            parts[at..at + cols].copy_from_slice(part);
        }
    }
    let tasks = row_tasks((0..groups).map(|_| each), TASKS * context.threads(), ROW_TILE);
    let shared = SharedMut::new(out);
    let failure = std::sync::Mutex::new(None);
    context.pool.run(tasks.len(), &|task| {
        let (group, range) = &tasks[task];
        let rows_of = &parts[group * rows * cols..(group + 1) * rows * cols];
        let input = Activations::F32 { rows: rows_of, cols };
        // SAFETY: `out` is (rows, width), and a task writes only its range of its group's columns.
        let out = unsafe { OutRows::new(shared.as_ptr().add(group * each), width, rows, each) };
        let view = weight.view().rows_range(group * each..(group + 1) * each);
        let product = matmul_rows(context.simd, view, range.clone(), input, Tokens::Range(0..rows), out);
        if let (Err(error), Ok(mut failure)) = (product, failure.lock()) {
            *failure = Some(error);
        }
    });
    failure.into_inner().ok().flatten().map_or(Ok(()), Err)
}
