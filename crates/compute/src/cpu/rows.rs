//! Operations on rows alone: embeddings, sums, columns and copies.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use crate::Result;
use crate::graph::operation::Operation;
use crate::graph::{
    AddOp, BlockFloat, BlockRowsOp, ClampOp, EmbedOp, GatherRowsOp, GivenEmbeddingsOp, InputRowsOp, JoinOp,
    RepeatOp, RoundBlocksOp, SliceOp, StandardizeOp,
};
use crate::quant::dequantize_row;

impl CpuOp for EmbedOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let out = call.out();
        cpu.write(out, call.tokens(), |cpu, buffer| {
            let table = cpu.weights[self.table.0].view();
            let rows = buffer.chunks_exact_mut(out.width());
            rows.zip(call.batch.tokens)
                .try_for_each(|(row, token)| dequantize_row(table, *token as usize, row))
        })
    }
}

impl CpuOp for GivenEmbeddingsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (x, out) = (self.x, call.out());
        cpu.write(out, call.tokens(), |cpu, buffer| {
            buffer.copy_from_slice(cpu.values.of(x));
            for (row, given) in call.batch.embeddings.level(Self::NAME, self.level, x.width())? {
                let row = &mut buffer[row * x.width()..(row + 1) * x.width()];
                if self.level == 0 {
                    row.copy_from_slice(given);
                } else {
                    row.iter_mut().zip(given).for_each(|(x, more)| *x += more);
                }
            }
            Ok(())
        })
    }
}

impl CpuOp for BlockRowsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (x, block, spans) = (self.x, self.rows, call.batch.spans);
        cpu.map_rows(call.out(), call.tokens(), |cpu, row, out| {
            let span = spans.iter().find(|span| span.rows.contains(&row)).expect("spans cover all rows");
            let first = span.rows.start + (row - span.rows.start) / block * block;
            let end = (first + block).min(span.rows.end);
            let (given, beyond) = out.split_at_mut((end - first) * x.width());
            given.copy_from_slice(&cpu.values.of(x)[first * x.width()..end * x.width()]);
            beyond.fill(0.0);
        });
        Ok(())
    }
}

/// The exponent of x, and whether x is that power of two.
fn exponent(x: f32) -> (i32, bool) {
    ((x.to_bits() >> 23 & 255) as i32 - 127, x.to_bits() << 9 == 0)
}

/// 2 to a power of a normal number.
fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent.clamp(-126, 127) + 127) as u32) << 23)
}

/// x rounded to so many bits of mantissa, to fewer from the power `least` of two down; ties to even.
fn round_to(x: f32, least: i32, mantissa: i32) -> f32 {
    let step = power(exponent(x).0.max(least) - mantissa);
    (x / step).round_ties_even() * step
}

/// Rounds a block to floats of few bits, in place.
fn round_block(form: BlockFloat, x: &mut [f32]) {
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let above = |x: f32| match exponent(x) {
        (exponent, true) => power(exponent),
        (exponent, false) => power(exponent + 1),
    };
    let (scale, limit, least, mantissa) = match form {
        BlockFloat::E4m3 => (above(largest.max(1e-4) / 448.0), 448.0, -6, 3),
        BlockFloat::E2m1 => (above((largest / 6.0).max(f32::MIN_POSITIVE)), 6.0, 0, 1),
        BlockFloat::E2m1ByE4m3 => (round_to((largest / 6.0).clamp(power(-9), 448.0), -6, 3), 6.0, 0, 1),
    };
    x.iter_mut().for_each(|x| *x = round_to((*x / scale).clamp(-limit, limit), least, mantissa) * scale);
}

impl CpuOp for RoundBlocksOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, block, form } = *self;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            out.chunks_exact_mut(block).for_each(|block| round_block(form, block));
        });
        Ok(())
    }
}

impl CpuOp for AddOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { a, b } = *self;
        let rows = cpu.values.rows(a);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let (a, b) = (cpu.values.row(a, row), cpu.values.row(b, row));
            for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
                *o = a + b;
            }
        });
        Ok(())
    }
}

impl CpuOp for ClampOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, limits: [low, high] } = *self;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let x = cpu.values.row(x, row);
            // Not a number stays so.
            let limited = |v: f32| {
                if v < low {
                    low
                } else if v > high {
                    high
                } else {
                    v
                }
            };
            out.iter_mut().zip(x).for_each(|(o, v)| *o = limited(*v));
        });
        Ok(())
    }
}

impl CpuOp for StandardizeOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, mean, scale } = *self;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let (mean, scale) = (&cpu.vectors[mean.0], &cpu.vectors[scale.0]);
            let columns = cpu.values.row(x, row).iter().zip(mean.iter().zip(scale.iter()));
            out.iter_mut().zip(columns).for_each(|(o, (x, (m, s)))| *o = (x - m) * s);
        });
        Ok(())
    }
}

impl CpuOp for SliceOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, groups, start, len } = *self;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let x = cpu.values.row(x, row);
            let parts = x.chunks_exact(x.len() / groups);
            for (out, part) in out.chunks_exact_mut(len).zip(parts) {
                out.copy_from_slice(&part[start..start + len]);
            }
        });
        Ok(())
    }
}

impl CpuOp for RepeatOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let x = self.x;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let x = cpu.values.row(x, row);
            out.chunks_exact_mut(x.len()).for_each(|out| out.copy_from_slice(x));
        });
        Ok(())
    }
}

impl CpuOp for InputRowsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        call.batch.check_rows(self.width)?;
        cpu.write(call.out(), call.tokens(), |_, buffer| {
            buffer.copy_from_slice(call.batch.rows);
            Ok(())
        })
    }
}

impl CpuOp for JoinOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { a, b } = *self;
        let rows = cpu.values.rows(a);
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            let (left, right) = out.split_at_mut(a.width());
            left.copy_from_slice(cpu.values.row(a, row));
            right.copy_from_slice(cpu.values.row(b, row));
        });
        Ok(())
    }
}

impl CpuOp for GatherRowsOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let (x, outputs) = (self.x, call.batch.outputs);
        let rows = outputs.len();
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, outputs[row] as usize));
        });
        Ok(())
    }
}

#[cfg(test)]
impl CpuOp for crate::graph::CpuOnlyOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let x = self.x;
        let rows = cpu.values.rows(x);
        cpu.map_rows(call.out(), rows, |cpu, row, out| out.copy_from_slice(cpu.values.row(x, row)));
        Ok(())
    }
}
