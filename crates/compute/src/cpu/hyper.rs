//! Hyper-connections, a row at a time: see [`crate::graph::HyperConnection`].

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::simd::Simd;
use super::vector;
use crate::Result;
use crate::graph::{
    GatedMeanOp, HyperCollapseOp, HyperConnection, HyperExpandOp, HyperKind, HyperWeightsOp, SoftmaxMixOp,
    StreamAddOp, StreamGateOp,
};

impl CpuOp for HyperWeightsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.x, op.mix].map(|value| cpu.values.row(value, row));
            let vectors = [op.base, op.factors].map(|id| &cpu.vectors[id.0][..]);
            weights(simd, &op.shape, inputs, vectors, out);
        });
        Ok(())
    }
}

impl CpuOp for HyperCollapseOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.x, op.weights].map(|value| cpu.values.row(value, row));
            collapse(simd, inputs, out);
        });
        Ok(())
    }
}

impl CpuOp for HyperExpandOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.x, op.block, op.weights].map(|value| cpu.values.row(value, row));
            expand(simd, op.streams, inputs, out);
        });
        Ok(())
    }
}

impl CpuOp for GatedMeanOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.x, op.gate].map(|value| cpu.values.row(value, row));
            gated_mean(simd, op.streams, inputs, out);
        });
        Ok(())
    }
}

impl CpuOp for StreamAddOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.x, op.block, op.logits].map(|value| cpu.values.row(value, row));
            stream_add(simd, inputs, out);
        });
        Ok(())
    }
}

impl CpuOp for StreamGateOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (op, simd) = (*self, cpu.context.simd);
        let rows = cpu.values.rows(op.keys);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let inputs = [op.keys, op.queries, op.value].map(|value| cpu.values.row(value, row));
            stream_gate(simd, inputs, out);
        });
        Ok(())
    }
}

impl CpuOp for SoftmaxMixOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(self.values[0]);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let mut weights: Vec<f32> =
                self.logits.iter().map(|logit| cpu.values.row(*logit, row)[0]).collect();
            let best = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|w| *w = (*w - best).exp());
            let sum: f32 = weights.iter().sum();
            out.fill(0.0);
            for (value, weight) in self.values.iter().zip(&weights) {
                vector::axpy_f32(simd, weight / sum, cpu.values.row(*value, row), out);
            }
        });
        Ok(())
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Weights of one row from its streams x and the logits `mix`.
fn weights(
    simd: Simd,
    shape: &HyperConnection,
    [x, mix]: [&[f32]; 2],
    [base, factors]: [&[f32]; 2],
    out: &mut [f32],
) {
    let n = shape.streams;
    let mean = vector::sum_of_squares(simd, x) / x.len() as f32;
    let norm = 1.0 / (mean + shape.norm_eps).sqrt();
    let (magnitude, floor) = match shape.kind {
        HyperKind::Independent { magnitude } => (magnitude, shape.floor),
        _ => (2.0, 0.0),
    };
    for (i, ((out, mix), base)) in out.iter_mut().zip(mix).zip(base).enumerate() {
        let kind = (i / n).min(2);
        *out = mix * norm * factors[kind] + base;
        match kind {
            0 => *out = sigmoid(*out) + shape.floor,
            1 => *out = magnitude * sigmoid(*out) + floor,
            _ => {}
        }
    }
    if let HyperKind::Mixed { iterations } = shape.kind {
        balance(&mut out[2 * n..], shape, iterations);
    }
}

/// Mixing weights (from, into) from their logits.
fn balance(mixing: &mut [f32], shape: &HyperConnection, iterations: usize) {
    let (n, floor) = (shape.streams, shape.floor);
    for row in mixing.chunks_exact_mut(n) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|w| *w = (*w - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|w| *w = *w / sum + floor);
    }
    let columns = |mixing: &mut [f32]| {
        for into in 0..n {
            let sum: f32 = mixing[into..].iter().step_by(n).sum();
            mixing[into..].iter_mut().step_by(n).for_each(|w| *w /= sum + floor);
        }
    };
    columns(mixing);
    for _ in 1..iterations {
        for row in mixing.chunks_exact_mut(n) {
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|w| *w /= sum + floor);
        }
        columns(mixing);
    }
}

/// Σ weight · stream of one row.
fn collapse(simd: Simd, [x, weights]: [&[f32]; 2], out: &mut [f32]) {
    out.fill(0.0);
    for (stream, weight) in x.chunks_exact(out.len()).zip(weights) {
        vector::axpy_f32(simd, *weight, stream, out);
    }
}

/// The streams of one row after a block.
fn expand(simd: Simd, streams: usize, [x, block, weights]: [&[f32]; 3], out: &mut [f32]) {
    let (adding, mixing) = weights[streams..].split_at(streams);
    for (into, (out, add)) in out.chunks_exact_mut(block.len()).zip(adding).enumerate() {
        if mixing.is_empty() {
            out.copy_from_slice(&x[into * block.len()..(into + 1) * block.len()]);
        } else {
            out.fill(0.0);
        }
        for (stream, weights) in x.chunks_exact(block.len()).zip(mixing.chunks_exact(streams)) {
            vector::axpy_f32(simd, weights[into], stream, out);
        }
        vector::axpy_f32(simd, *add, block, out);
    }
}

/// Mean over streams of sigmoid(gate) ⊙ stream of one row.
fn gated_mean(simd: Simd, streams: usize, [x, gate]: [&[f32]; 2], out: &mut [f32]) {
    let mut part = vec![0.0; out.len()];
    out.fill(0.0);
    for (x, gate) in x.chunks_exact(out.len()).zip(gate.chunks_exact(out.len())) {
        part.copy_from_slice(x);
        vector::sigmoid_mul(simd, gate, &mut part);
        out.iter_mut().zip(&part).for_each(|(o, p)| *o += p);
    }
    vector::scale(simd, 1.0 / streams as f32, out);
}

/// The streams of one row with the block's result added to each by its logit.
fn stream_add(simd: Simd, [x, block, logits]: [&[f32]; 3], out: &mut [f32]) {
    out.copy_from_slice(x);
    for (out, logit) in out.chunks_exact_mut(block.len()).zip(logits) {
        vector::axpy_f32(simd, 2.0 * sigmoid(logit / logits.len() as f32), block, out);
    }
}

/// The value of one row, gated for each stream by its key and query.
fn stream_gate(simd: Simd, [keys, queries, value]: [&[f32]; 3], out: &mut [f32]) {
    let width = value.len();
    let pairs = keys.chunks_exact(width).zip(queries.chunks_exact(width));
    for (out, (key, query)) in out.chunks_exact_mut(width).zip(pairs) {
        let score = vector::dot_f32(simd, key, query) / (width as f32).sqrt();
        let sign = if score == 0.0 { 0.0 } else { score.signum() };
        out.copy_from_slice(value);
        vector::scale(simd, sigmoid(sign * score.abs().max(1e-6).sqrt()), out);
    }
}
