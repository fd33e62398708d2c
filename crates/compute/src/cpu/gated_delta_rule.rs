//! Linear attention by the gated delta rule, token by token.
//!
//! A task is one value head of one sequence, so a head's state (64 KiB at 128 × 128) stays in the cache of the core
//! that works on it. Columns of the state are independent: a block of them is read twice a token, the second time from
//! the first-level cache. Prefill runs the recurrence too; the chunked form (matrix products within chunks of tokens)
//! would do more arithmetic to need fewer passes, and would make results depend on where chunks begin.

use super::activate::softplus;
use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::{Isa, Kernel, Simd};
use super::slots::{Slots, SpanState};
use super::vector;
use crate::Result;
use crate::backend::Span;
use crate::graph::{Decay, DeltaInputs, DeltaRule, GatedDeltaRuleOp};

impl CpuOp for GatedDeltaRuleOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let DeltaInputs { q, k, v, a, b } = self.inputs;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let [q, k, v, a, b] = [q, k, v, a, b].map(|value| cpu.values.of(value));
            let [decay, dt_bias] = [self.decay, self.dt_bias].map(|id| &cpu.vectors[id.0][..]);
            let inputs = Inputs { q, k, v, a, b, decay, dt_bias };
            let (pool, slots) = (&cpu.context.pool, &mut cpu.states[self.state.0]);
            gated_delta_rule(pool, cpu.context.simd, &inputs, &self.shape, slots, call.batch.spans, out);
            Ok(())
        })
    }
}

/// What is mixed; all (rows, …).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// (rows, key_heads · key_dim).
    pub(crate) q: &'a [f32],
    /// (rows, key_heads · key_dim).
    pub(crate) k: &'a [f32],
    /// (rows, value_heads · value_dim).
    pub(crate) v: &'a [f32],
    /// (rows, value_heads), or (rows, value_heads · key_dim).
    pub(crate) a: &'a [f32],
    /// (rows, value_heads).
    pub(crate) b: &'a [f32],
    /// (value_heads).
    pub(crate) decay: &'a [f32],
    /// A row of a.
    pub(crate) dt_bias: &'a [f32],
}

/// Mixes the batch into `out` (rows, value_heads · value_dim).
pub(crate) fn gated_delta_rule(
    pool: &ThreadPool,
    simd: Simd,
    inputs: &Inputs<'_>,
    shape: &DeltaRule,
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let DeltaRule { value_heads, key_dim, value_dim, .. } = *shape;
    let each = key_dim * value_dim;
    // Decays of a head: one, or one for each channel of a key.
    let decays = inputs.dt_bias.len() / value_heads;
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let new = SharedMut::new(new);
        pool.run(value_heads, &|head| {
            // SAFETY: a task touches only its head of the state.
            let state = unsafe { new.part(head * each..(head + 1) * each) };
            if fresh {
                state.fill(0.0);
            } else if let Some(old) = old {
                state.copy_from_slice(&old[head * each..(head + 1) * each]);
            }
            let (mut q, mut k) = (vec![0.0; key_dim], vec![0.0; key_dim]);
            for row in span.rows.clone() {
                let key = (row * shape.key_heads + shape.key_head(head)) * key_dim;
                normalize(simd, &inputs.q[key..key + key_dim], (key_dim as f32).sqrt().recip(), &mut q);
                normalize(simd, &inputs.k[key..key + key_dim], 1.0, &mut k);
                let at = row * value_heads + head;
                let decay = |i: usize| {
                    let x = inputs.a[at * decays + i] + inputs.dt_bias[head * decays + i];
                    match shape.decay {
                        Decay::Softplus => (inputs.decay[head] * softplus(x)).exp(),
                        Decay::Bounded(bound) => (bound / (1.0 + (inputs.decay[head] * x).exp())).exp(),
                    }
                };
                if decays > 1 {
                    let rows = state.chunks_exact_mut(value_dim).enumerate();
                    rows.for_each(|(i, row)| vector::scale(simd, decay(i), row));
                }
                let value = at * value_dim..(at + 1) * value_dim;
                simd.run(DeltaStep {
                    state,
                    q: &q,
                    k: &k,
                    v: &inputs.v[value.clone()],
                    decay: if decays > 1 { 1.0 } else { decay(0) },
                    beta: 1.0 / (1.0 + (-inputs.b[at]).exp()),
                    // SAFETY: rows of a head are one task's.
                    out: unsafe { out.part(value) },
                });
            }
        });
    }
}

/// out = x / √(Σx² + eps) · scale.
fn normalize(simd: Simd, x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = 1.0 / (vector::sum_of_squares(simd, x) + DeltaRule::L2_EPS).sqrt();
    out.copy_from_slice(x);
    vector::scale(simd, factor * scale, out);
}

/// One token of one head: S ← g·S; δ = β(v − Sᵀk); S ← S + kδᵀ; out = Sᵀq.
struct DeltaStep<'a> {
    /// S: (key_dim, value_dim).
    state: &'a mut [f32],
    /// (key_dim), normalised and scaled.
    q: &'a [f32],
    /// (key_dim), normalised.
    k: &'a [f32],
    /// (value_dim).
    v: &'a [f32],
    /// g.
    decay: f32,
    /// β.
    beta: f32,
    /// (value_dim).
    out: &'a mut [f32],
}

impl Kernel for DeltaStep<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let width = self.v.len();
        assert_eq!(self.out.len(), width, "lengths agree");
        assert_eq!(self.q.len(), self.k.len(), "lengths agree");
        assert_eq!(self.state.len(), width * self.k.len(), "lengths agree");
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

impl DeltaStep<'_> {
    /// Columns `column..column + N · LANES`.
    ///
    /// # Safety
    /// They are within the value width, and the slices have the lengths that they are documented to have.
    #[inline(always)]
    unsafe fn columns<I: Isa, const N: usize>(&mut self, isa: I, column: usize) {
        let width = self.v.len();
        let state = self.state.as_mut_ptr();
        let at = |row: usize, n: usize| row * width + column + n * I::LANES;
        let mut recalled = [isa.splat(0.0); N];
        for (row, k) in self.k.iter().enumerate() {
            let k = isa.splat(*k);
            for (n, sum) in recalled.iter_mut().enumerate() {
                // SAFETY: by the caller.
                *sum = isa.mul_add(k, unsafe { isa.load(state.add(at(row, n))) }, *sum);
            }
        }
        let (decay, beta) = (isa.splat(self.decay), isa.splat(self.beta));
        let mut delta = recalled;
        for (n, delta) in delta.iter_mut().enumerate() {
            // SAFETY: by the caller.
            let v = unsafe { isa.load(self.v.as_ptr().add(column + n * I::LANES)) };
            *delta = isa.mul(beta, isa.sub(v, isa.mul(decay, *delta)));
        }
        let mut out = [isa.splat(0.0); N];
        for (row, (k, q)) in self.k.iter().zip(self.q).enumerate() {
            let (k, q) = (isa.splat(*k), isa.splat(*q));
            for (n, sum) in out.iter_mut().enumerate() {
                // SAFETY: by the caller.
                unsafe {
                    let place = state.add(at(row, n));
                    let new = isa.mul_add(k, delta[n], isa.mul(decay, isa.load(place)));
                    isa.store(place, new);
                    *sum = isa.mul_add(q, new, *sum);
                }
            }
        }
        for (n, sum) in out.into_iter().enumerate() {
            // SAFETY: by the caller.
            unsafe { isa.store(self.out.as_mut_ptr().add(column + n * I::LANES), sum) };
        }
    }

    /// One column, where fewer than a vector's are left.
    #[inline(always)]
    fn column(&mut self, column: usize) {
        let width = self.v.len();
        let mut recalled = 0.0;
        for (k, row) in self.k.iter().zip(self.state.chunks_exact(width)) {
            recalled += k * row[column];
        }
        let delta = self.beta * (self.v[column] - self.decay * recalled);
        let mut out = 0.0;
        for ((k, q), row) in self.k.iter().zip(self.q).zip(self.state.chunks_exact_mut(width)) {
            row[column] = k * delta + self.decay * row[column];
            out += q * row[column];
        }
        self.out[column] = out;
    }
}
