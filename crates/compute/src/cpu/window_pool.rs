//! Pooling of tokens by windows: see [`crate::graph::WindowPool`].
//!
//! An entry is made from the same inputs in the same order wherever they come from (batch or state), so it does not
//! depend on how a sequence is cut into batches.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::linear::CpuContext;
use super::shared::SharedMut;
use super::slots::{Slots, SpanState};
use crate::Result;
use crate::backend::Span;
use crate::graph::{WindowMeanOp, WindowPool, WindowPoolOp};

impl CpuOp for WindowPoolOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let inputs = [cpu.values.of(self.kv), cpu.values.of(self.gate), &cpu.vectors[self.bias.0]];
            let slots = &mut cpu.states[self.state.0];
            window_pool(&cpu.context, &self.shape, inputs, slots, call.batch.spans, out);
            Ok(())
        })
    }
}

impl CpuOp for WindowMeanOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let x = self.x;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let (input, slots) = (cpu.values.of(x), &mut cpu.states[self.state.0]);
            window_mean(&cpu.context, self.window, input, x.width(), slots, call.batch.spans, out);
            Ok(())
        })
    }
}

/// kv and gate (rows, channels) → out (rows, width); `bias` is (window, channels).
pub(crate) fn window_pool(
    context: &CpuContext,
    shape: &WindowPool,
    [kv, gate, bias]: [&[f32]; 3],
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let (channels, held, width) = (shape.channels(), shape.held(), shape.width);
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let past = if fresh { vec![0.0; new.len()] } else { old.unwrap_or(new).to_vec() };
        let first = span.rows.start;
        let at = |row: usize| row * channels..(row + 1) * channels;
        // kv and gate of token `index`, counted from the first one that the state held.
        let input = |index: usize| match index.checked_sub(held) {
            Some(row) => (&kv[at(first + row)], &gate[at(first + row)]),
            None => past[2 * index * channels..2 * (index + 1) * channels].split_at(channels),
        };
        context.for_rows(span.rows.len(), width, &|i| {
            let row = first + i;
            // SAFETY: each row is one task's.
            let out = unsafe { out.part(row * width..(row + 1) * width) };
            out.fill(0.0);
            if shape.ends(span.start + i) {
                // There is no window before the first one.
                let skipped = if shape.overlap && span.start + i < shape.window { shape.window } else { 0 };
                pool(shape, bias, (skipped..=held).map(|slot| (slot, input(i + slot))), out);
            }
        });
        for row in 0..held {
            let (kv, gate) = input(span.rows.len() + row);
            let new = &mut new[2 * row * channels..2 * (row + 1) * channels];
            new[..channels].copy_from_slice(kv);
            new[channels..].copy_from_slice(gate);
        }
    }
}

/// x (rows, width) → out, the same shape: means of windows.
pub(crate) fn window_mean(
    context: &CpuContext,
    window: usize,
    x: &[f32],
    width: usize,
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let held = window - 1;
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let past = if fresh { vec![0.0; new.len()] } else { old.unwrap_or(new).to_vec() };
        let first = span.rows.start;
        // Token `index`, counted from the first one that the state held.
        let input = |index: usize| match index.checked_sub(held) {
            Some(row) => &x[(first + row) * width..(first + row + 1) * width],
            None => &past[index * width..(index + 1) * width],
        };
        context.for_rows(span.rows.len(), width, &|i| {
            let row = first + i;
            // SAFETY: each row is one task's.
            let out = unsafe { out.part(row * width..(row + 1) * width) };
            out.fill(0.0);
            if (span.start + i + 1).is_multiple_of(window) {
                for token in i..=i + held {
                    out.iter_mut().zip(input(token)).for_each(|(o, v)| *o += v);
                }
                out.iter_mut().for_each(|o| *o /= window as f32);
            }
        });
        for row in 0..held {
            new[row * width..(row + 1) * width].copy_from_slice(input(span.rows.len() + row));
        }
    }
}

/// One entry, from the (kv, gate) of its tokens by their slot among those that an entry can have.
fn pool<'a>(
    shape: &WindowPool,
    bias: &[f32],
    tokens: impl Iterator<Item = (usize, (&'a [f32], &'a [f32]))> + Clone,
    out: &mut [f32],
) {
    let (width, channels) = (shape.width, shape.channels());
    // Of every token: its channels for this entry.
    let parts = tokens.map(|(slot, (kv, gate))| {
        let first = if shape.overlap && slot >= shape.window { width } else { 0 };
        let bias = &bias[slot % shape.window * channels + first..][..width];
        (&kv[first..first + width], &gate[first..first + width], bias)
    });
    let mut max = vec![f32::NEG_INFINITY; width];
    for (_, gate, bias) in parts.clone() {
        for ((max, gate), bias) in max.iter_mut().zip(gate).zip(bias) {
            // `max` would drop a NaN.
            let logit = gate + bias;
            *max = if logit > *max || logit.is_nan() { logit } else { *max };
        }
    }
    let mut sum = vec![0.0f32; width];
    for (kv, gate, bias) in parts {
        let weights = gate.iter().zip(bias).zip(&max).map(|((gate, bias), max)| (gate + bias - max).exp());
        for (((weight, kv), sum), out) in weights.zip(kv).zip(&mut sum).zip(&mut *out) {
            *sum += weight;
            *out += weight * kv;
        }
    }
    out.iter_mut().zip(&sum).for_each(|(out, sum)| *out /= sum);
}
