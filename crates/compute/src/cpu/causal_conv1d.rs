//! Depthwise causal convolution over tokens, then silu unless it is plain.
//!
//! A task is a block of channels of one sequence: it computes all its tokens, then its part of the new state. Every
//! result is the same sequence of operations wherever its inputs come from (batch or state), so it does not depend on
//! how a sequence is cut into batches.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::pool::ThreadPool;
use super::shared::SharedMut;
use super::simd::Simd;
use super::slots::{Slots, SpanState};
use super::vector;
use crate::Result;
use crate::backend::Span;
use crate::graph::CausalConv1dOp;

impl CpuOp for CausalConv1dOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, bias, dilation, plain, state, .. } = *self;
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let bias = bias.map_or(&[][..], |bias| &cpu.vectors[bias.0]);
            let inputs = [cpu.values.of(x), &cpu.taps[state.0], bias];
            let slots = &mut cpu.states[state.0];
            let shape = ConvShape { channels: x.width(), dilation, plain };
            causal_conv1d(&cpu.context.pool, cpu.context.simd, inputs, shape, slots, call.batch.spans, out);
            Ok(())
        })
    }
}

/// What a convolution is besides its weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvShape {
    channels: usize,
    /// Tokens from one that a result depends on to the next.
    dilation: usize,
    /// Whether there is no silu.
    plain: bool,
}

/// Channels of a task.
const CHANNELS: usize = 512;

/// `weight` as recorded, (channels, kernel), to the order that channels are computed in, (kernel, channels).
pub(crate) fn transpose(weight: &[f32], kernel: usize) -> Vec<f32> {
    let channels = weight.len() / kernel;
    (0..weight.len()).map(|i| weight[i % channels * kernel + i / channels]).collect()
}

/// x (rows, channels) → out, the same shape; `weight` is (kernel, channels), `bias` (channels) or empty.
pub(crate) fn causal_conv1d(
    pool: &ThreadPool,
    simd: Simd,
    [x, weight, bias]: [&[f32]; 3],
    shape: ConvShape,
    slots: &mut Slots,
    spans: &[Span<'_>],
    out: &mut [f32],
) {
    let ConvShape { channels, dilation, plain } = shape;
    let taps = weight.len() / channels;
    let held = (taps - 1) * dilation;
    let out = SharedMut::new(out);
    for span in spans {
        let SpanState { old, new, fresh } = slots.of(span);
        let new = SharedMut::new(new);
        let first = span.rows.start;
        pool.run(channels.div_ceil(CHANNELS), &|task| {
            let block = task * CHANNELS..((task + 1) * CHANNELS).min(channels);
            let width = block.len();
            let at = |row: usize| row * channels + block.start..row * channels + block.end;
            // SAFETY: a task touches only its channels of the state.
            let new = |row: usize| unsafe { new.part(at(row)) };
            let mut past = vec![0.0; held * width];
            for (row, past) in past.chunks_exact_mut(width).enumerate().filter(|_| !fresh) {
                past.copy_from_slice(old.map_or_else(|| &*new(row), |old| &old[at(row)]));
            }
            // Input `index`, counted from the first one that the state held.
            let input = |index: usize| match index.checked_sub(held) {
                Some(row) => &x[at(first + row)],
                None => &past[index * width..(index + 1) * width],
            };
            for (i, row) in span.rows.clone().enumerate() {
                // SAFETY: rows and channels are one task's.
                let out = unsafe { out.part(at(row)) };
                match bias.get(block.clone()) {
                    Some(bias) => out.copy_from_slice(bias),
                    None => out.fill(0.0),
                }
                for tap in 0..taps {
                    vector::add_product(simd, &weight[at(tap)], input(i + tap * dilation), out);
                }
                if !plain {
                    vector::silu(simd, out);
                }
            }
            for row in 0..held {
                new(row).copy_from_slice(input(span.rows.len() + row));
            }
        });
    }
}
