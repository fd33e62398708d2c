//! Mamba's state space models, token by token.
//!
//! A task is one head of one sequence, whose state (32 KiB at 128 × 64) stays in the cache of the core that works on it.
//! Columns of the state are independent channels of x: a block of them is updated and read in one pass over its rows, with
//! no sums across lanes. Where each number of a channel decays on its own, a task is a block of channels, and lanes are the
//! numbers of one. Prefill runs the recurrence too, as for the
//! [gated delta rule](super::gated_delta_rule), so that results do not depend on where chunks begin.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::{Isa, Kernel, MAX_LANES, Simd};
use super::slots::{Slots, SpanState};
use super::vector::exp;
use crate::Result;
use crate::backend::Span;
use crate::graph::{SsmInputs, SsmScan, SsmScanOp, SsmWeights};

impl CpuOp for SsmScanOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (SsmInputs { x, b, c, dt }, SsmWeights { a, d, dt_bias }) = (self.inputs, self.weights);
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let [x, b, c, dt] = [x, b, c, dt].map(|value| cpu.values.of(value));
            let [a, d, dt_bias] = [a, d, dt_bias].map(|id| &cpu.vectors[id.0][..]);
            let inputs = SsmRows { x, b, c, dt, a, d, dt_bias };
            let (pool, slots) = (&cpu.context.pool, &mut cpu.states[self.state.0]);
            let scan = if a.len() == self.shape.heads { ssm_scan } else { selective_scan };
            scan(pool, cpu.context.simd, &inputs, &self.shape, slots, call.batch.spans, out);
            Ok(())
        })
    }
}

/// What is mixed, (rows, …), and weights of (heads).
#[derive(Debug, Clone, Copy)]
pub(crate) struct SsmRows<'a> {
    /// (rows, heads · head_dim).
    pub(crate) x: &'a [f32],
    /// (rows, groups · state_size).
    pub(crate) b: &'a [f32],
    /// (rows, groups · state_size).
    pub(crate) c: &'a [f32],
    /// (rows, heads).
    pub(crate) dt: &'a [f32],
    /// (heads), or (heads, state_size).
    pub(crate) a: &'a [f32],
    /// (heads).
    pub(crate) d: &'a [f32],
    /// (heads).
    pub(crate) dt_bias: &'a [f32],
}

/// Mixes the batch into `out` (rows, heads · head_dim).
pub(crate) fn ssm_scan(
    pool: &ThreadPool,
    simd: Simd,
    inputs: &SsmRows<'_>,
    shape: &SsmScan,
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let SsmScan { heads, head_dim, groups, state_size, .. } = *shape;
    let each = state_size * head_dim;
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let new = SharedMut::new(new);
        pool.run(heads, &|head| {
            // SAFETY: a task touches only its head of the state.
            let state = unsafe { new.part(head * each..(head + 1) * each) };
            if fresh {
                state.fill(0.0);
            } else if let Some(old) = old {
                state.copy_from_slice(&old[head * each..(head + 1) * each]);
            }
            for row in span.rows.clone() {
                let at = row * heads + head;
                let own = at * head_dim..(at + 1) * head_dim;
                let group = (row * groups + shape.group(head)) * state_size;
                let time_step = time_step(inputs.dt[at] + inputs.dt_bias[head], shape.time_steps);
                simd.run(SsmStep {
                    state,
                    x: &inputs.x[own.clone()],
                    b: &inputs.b[group..group + state_size],
                    c: &inputs.c[group..group + state_size],
                    time_step,
                    decay: (time_step * inputs.a[head]).exp(),
                    d: inputs.d[head],
                    // SAFETY: rows of a head are one task's.
                    out: unsafe { out.part(own) },
                });
            }
        });
    }
}

/// Channels of a task.
const CHANNELS: usize = 64;

/// As [`ssm_scan`] for heads of one channel, whose numbers decay each on its own.
pub(crate) fn selective_scan(
    pool: &ThreadPool,
    simd: Simd,
    inputs: &SsmRows<'_>,
    shape: &SsmScan,
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let SsmScan { heads, groups, state_size, .. } = *shape;
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let new = SharedMut::new(new);
        pool.run(heads.div_ceil(CHANNELS), &|task| {
            let channels = task * CHANNELS..heads.min((task + 1) * CHANNELS);
            let own = channels.start * state_size..channels.end * state_size;
            // SAFETY: a task touches only its channels of the state.
            let state = unsafe { new.part(own.clone()) };
            if fresh {
                state.fill(0.0);
            } else if let Some(old) = old {
                state.copy_from_slice(&old[own]);
            }
            for row in span.rows.clone() {
                for (channel, state) in channels.clone().zip(state.chunks_exact_mut(state_size)) {
                    let at = row * heads + channel;
                    let group = (row * groups + shape.group(channel)) * state_size;
                    let time_step = time_step(inputs.dt[at] + inputs.dt_bias[channel], shape.time_steps);
                    let sum = simd.run(SelectiveStep {
                        state,
                        a: &inputs.a[channel * state_size..(channel + 1) * state_size],
                        b: &inputs.b[group..group + state_size],
                        c: &inputs.c[group..group + state_size],
                        time_step,
                        x: inputs.x[at],
                    });
                    // SAFETY: rows of a channel are one task's.
                    let out = unsafe { out.part(at..at + 1) };
                    out[0] = sum + inputs.d[channel] * inputs.x[at];
                }
            }
        });
    }
}

/// One token of one channel: s ← exp(Δ·a)·s + Δ·x·b; gives s·c.
struct SelectiveStep<'a> {
    /// s: (state_size).
    state: &'a mut [f32],
    /// (state_size).
    a: &'a [f32],
    /// (state_size).
    b: &'a [f32],
    /// (state_size).
    c: &'a [f32],
    /// Δ.
    time_step: f32,
    x: f32,
}

impl Kernel for SelectiveStep<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f32 {
        let Self { state, a, b, c, time_step, x } = self;
        let count = state.len();
        assert_eq!([a.len(), b.len(), c.len()], [count; 3], "lengths agree");
        let (written, step) = (isa.splat(time_step * x), isa.splat(time_step));
        let mut sums = isa.splat(0.0);
        let mut at = 0;
        while at < count {
            // What lies behind the end is zero, and stays so.
            let len = I::LANES.min(count - at);
            let mut last = [[0.0; MAX_LANES]; 4];
            let [a, b, c, held] = if len == I::LANES {
                [&a[at..], &b[at..], &c[at..], &state[at..]].map(<[f32]>::as_ptr)
            } else {
                for (last, all) in last.iter_mut().zip([a, b, c, &*state]) {
                    last[..len].copy_from_slice(&all[at..]);
                }
                [0, 1, 2, 3].map(|i: usize| last[i].as_ptr())
            };
            // SAFETY: each points to as many elements as there are lanes.
            let [a, b, c, held] = unsafe { [isa.load(a), isa.load(b), isa.load(c), isa.load(held)] };
            let new = isa.mul_add(b, written, isa.mul(exp(isa, isa.mul(step, a)), held));
            sums = isa.mul_add(c, new, sums);
            let mut lanes = [0.0; MAX_LANES];
            // SAFETY: there are no more lanes than elements.
            unsafe { isa.store(lanes.as_mut_ptr(), new) };
            state[at..at + len].copy_from_slice(&lanes[..len]);
            at += len;
        }
        isa.reduce_add(sums)
    }
}

/// ln(1 + eˣ) within limits.
fn time_step(x: f32, (least, most): (f32, f32)) -> f32 {
    // `max` drops a NaN, comparisons keep it.
    let positive = if x < 0.0 { 0.0 } else { x };
    match positive + (-x.abs()).exp().ln_1p() {
        step if step < least => least,
        step if step > most => most,
        step => step,
    }
}

/// One token of one head: S ← g·S + Δ·b·xᵀ; out = Sᵀc + d·x.
struct SsmStep<'a> {
    /// S: (state_size, head_dim).
    state: &'a mut [f32],
    /// (head_dim).
    x: &'a [f32],
    /// (state_size).
    b: &'a [f32],
    /// (state_size).
    c: &'a [f32],
    /// Δ.
    time_step: f32,
    /// g.
    decay: f32,
    /// Weight of x itself.
    d: f32,
    /// (head_dim).
    out: &'a mut [f32],
}

impl Kernel for SsmStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let width = self.x.len();
        assert_eq!(self.out.len(), width, "lengths agree");
        assert_eq!(self.b.len(), self.c.len(), "lengths agree");
        assert_eq!(self.state.len(), width * self.b.len(), "lengths agree");
        let mut column = 0;
        while column + 4 * I::LANES <= width {
            // SAFETY: the columns are within the row; lengths were checked above.
            unsafe { self.columns::<I, 4>(isa, column) };
            column += 4 * I::LANES;
        }
        while column + I::LANES <= width {
            // SAFETY: as above.
            unsafe { self.columns::<I, 1>(isa, column) };
            column += I::LANES;
        }
        (column..width).for_each(|column| self.column(column));
    }
}

impl SsmStep<'_> {
    /// Columns `column..column + N · LANES`.
    ///
    /// # Safety
    /// They are within the head's width, and the slices have the lengths that they are documented to have.
    #[inline(always)]
    unsafe fn columns<I: Isa, const N: usize>(&mut self, isa: I, column: usize) {
        let width = self.x.len();
        let state = self.state.as_mut_ptr();
        let (mut written, mut out) = ([isa.splat(0.0); N], [isa.splat(0.0); N]);
        for (n, (written, out)) in written.iter_mut().zip(&mut out).enumerate() {
            // SAFETY: by the caller.
            let x = unsafe { isa.load(self.x.as_ptr().add(column + n * I::LANES)) };
            *written = isa.mul(isa.splat(self.time_step), x);
            *out = isa.mul(isa.splat(self.d), x);
        }
        let decay = isa.splat(self.decay);
        for (row, (b, c)) in self.b.iter().zip(self.c).enumerate() {
            let (b, c) = (isa.splat(*b), isa.splat(*c));
            for (n, (written, out)) in written.iter().zip(&mut out).enumerate() {
                // SAFETY: by the caller.
                unsafe {
                    let place = state.add(row * width + column + n * I::LANES);
                    let new = isa.mul_add(b, *written, isa.mul(decay, isa.load(place)));
                    isa.store(place, new);
                    *out = isa.mul_add(c, new, *out);
                }
            }
        }
        for (n, out) in out.into_iter().enumerate() {
            // SAFETY: by the caller.
            unsafe { isa.store(self.out.as_mut_ptr().add(column + n * I::LANES), out) };
        }
    }

    /// One column, where fewer than a vector's are left.
    #[inline(always)]
    fn column(&mut self, column: usize) {
        let x = self.x[column];
        let (written, mut out) = (self.time_step * x, self.d * x);
        for ((b, c), row) in self.b.iter().zip(self.c).zip(self.state.chunks_exact_mut(self.x.len())) {
            row[column] = b * written + self.decay * row[column];
            out += c * row[column];
        }
        self.out[column] = out;
    }
}
