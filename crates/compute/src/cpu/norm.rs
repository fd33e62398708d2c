//! Norms of rows and of parts of rows.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::vector;
use crate::Result;
use crate::graph::{LayerNormOp, RmsNormOp};

impl CpuOp for RmsNormOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, weight, groups, eps } = *self;
        let (simd, width) = (cpu.context.simd, x.width() / groups);
        let factor = |part: &[f32]| {
            let mean = vector::sum_of_squares(simd, part) / part.len() as f32;
            1.0 / (mean + eps).sqrt()
        };
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            let parts = out.chunks_exact_mut(width);
            let Some(weight) = weight else {
                parts.for_each(|part| vector::scale(simd, factor(part), part));
                return;
            };
            for (part, weights) in parts.zip(cpu.vectors[weight.0].chunks_exact(width).cycle()) {
                let factor = factor(part);
                for (v, w) in part.iter_mut().zip(weights) {
                    *v = *v * factor * w;
                }
            }
        });
        Ok(())
    }
}

impl CpuOp for LayerNormOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, weight, bias, eps } = *self;
        let simd = cpu.context.simd;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let x = cpu.values.row(x, row);
            let mean = vector::sum(simd, x) / x.len() as f32;
            out.iter_mut().zip(x).for_each(|(o, v)| *o = v - mean);
            let variance = vector::sum_of_squares(simd, out) / out.len() as f32;
            vector::scale(simd, 1.0 / (variance + eps).sqrt(), out);
            let affine = cpu.vectors[weight.0].iter().zip(&cpu.vectors[bias.0]);
            out.iter_mut().zip(affine).for_each(|(o, (w, b))| *o = *o * w + b);
        });
        Ok(())
    }
}
