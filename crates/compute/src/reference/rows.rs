//! The scalar meaning of operations on rows alone.

use super::{Interpreter, Matrix, Outcome, ReferenceCall, ReferenceOp};
use crate::Result;
use crate::graph::operation::Operation;
use crate::graph::{
    AddOp, BlockFloat, BlockRowsOp, ClampOp, EmbedOp, GatherRowsOp, GivenEmbeddingsOp, InputRowsOp, JoinOp,
    RepeatOp, RoundBlocksOp, SliceOp, StandardizeOp,
};
use crate::quant::dequantize_row;

impl ReferenceOp for EmbedOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let table = own.weights[self.table.0].view();
        let row = |token: &u32| {
            let mut out = vec![0.0; table.cols()];
            dequantize_row(table, *token as usize, &mut out).map(|()| out)
        };
        Ok(Outcome::Rows(call.batch.tokens.iter().map(row).collect::<Result<Matrix>>()?))
    }
}

impl ReferenceOp for GivenEmbeddingsOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let mut rows = call.of(self.x).clone();
        for (row, given) in call.batch.embeddings.level(Self::NAME, self.level, self.x.width())? {
            let replaces = self.level == 0;
            rows[row].iter_mut().zip(given).for_each(|(x, own)| *x = if replaces { *own } else { *x + own });
        }
        Ok(Outcome::Rows(rows))
    }
}

impl ReferenceOp for BlockRowsOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (x, width) = (call.of(self.x), self.x.width());
        let mut rows = vec![];
        for span in call.batch.spans {
            for row in 0..span.rows.len() {
                let first = span.rows.start + row / self.rows * self.rows;
                let end = (first + self.rows).min(span.rows.end);
                let mut block = x[first..end].concat();
                block.resize(self.rows * width, 0.0);
                rows.push(block);
            }
        }
        Ok(Outcome::Rows(rows))
    }
}

impl ReferenceOp for AddOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let row = |(a, b): (&Vec<f32>, &Vec<f32>)| a.iter().zip(b).map(|(a, b)| a + b).collect();
        Ok(Outcome::Rows(call.of(self.a).iter().zip(call.of(self.b)).map(row).collect()))
    }
}

/// The least power of two that is not below x > 0.
fn power_of_two(x: f32) -> f32 {
    x.log2().ceil().exp2()
}

/// The value that is nearest to x of all that `bits` of exponent, with this bias, and of mantissa make; ties to the one whose
/// mantissa is even.
fn nearest(x: f32, [exponents, bias, mantissa]: [i32; 3]) -> f32 {
    let steps = 1 << mantissa;
    let value = |code: i32| match (code / steps, code % steps) {
        (0, part) => part as f32 / steps as f32 * ((1 - bias) as f32).exp2(),
        (exponent, part) => (1.0 + part as f32 / steps as f32) * ((exponent - bias) as f32).exp2(),
    };
    let distance = |code: &i32| (value(*code) - x.abs()).abs();
    let better = |a: &i32, b: &i32| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let best = (0..(1 << exponents) * steps).min_by(better).map_or(0.0, value);
    if x.is_nan() { x } else { best.copysign(x) }
}

/// x rounded to a block of floats of few bits.
fn round_block(x: &[f32], form: BlockFloat) -> Vec<f32> {
    let (e4m3, e2m1) = ([4, 7, 3], [2, 1, 1]);
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let (scale, limit, bits) = match form {
        BlockFloat::E4m3 => (power_of_two(largest.max(1e-4) / 448.0), 448.0, e4m3),
        BlockFloat::E2m1 => (power_of_two((largest / 6.0).max(f32::MIN_POSITIVE)), 6.0, e2m1),
        BlockFloat::E2m1ByE4m3 => (nearest((largest / 6.0).clamp(0.5f32.powi(9), 448.0), e4m3), 6.0, e2m1),
    };
    x.iter().map(|x| nearest((x / scale).clamp(-limit, limit), bits) * scale).collect()
}

impl ReferenceOp for RoundBlocksOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let row =
            |x: &Vec<f32>| x.chunks(self.block).flat_map(|block| round_block(block, self.form)).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for ClampOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let [low, high] = self.limits;
        // Not a number stays so.
        let limited = |v: &f32| {
            if *v < low {
                low
            } else if *v > high {
                high
            } else {
                *v
            }
        };
        let row = |row: &Vec<f32>| row.iter().map(limited).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for StandardizeOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (mean, scale) = (own.vector(self.mean)?, own.vector(self.scale)?);
        let row = |row: &Vec<f32>| row.iter().zip(&mean).zip(&scale).map(|((x, m), s)| (x - m) * s).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for SliceOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let part = |part: &[f32]| part[self.start..self.start + self.len].to_vec();
        let row = |row: &Vec<f32>| row.chunks(row.len() / self.groups).flat_map(part).collect();
        Ok(Outcome::Rows(call.of(self.x).iter().map(row).collect()))
    }
}

impl ReferenceOp for RepeatOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        Ok(Outcome::Rows(call.of(self.x).iter().map(|row| row.repeat(self.times)).collect()))
    }
}

impl ReferenceOp for InputRowsOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        call.batch.check_rows(self.width)?;
        Ok(Outcome::Rows(call.batch.rows.chunks_exact(self.width).map(<[f32]>::to_vec).collect()))
    }
}

impl ReferenceOp for JoinOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let rows = call.of(self.a).iter().zip(call.of(self.b));
        Ok(Outcome::Rows(rows.map(|(a, b)| [&a[..], &b[..]].concat()).collect()))
    }
}

impl ReferenceOp for GatherRowsOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let x = call.of(self.x);
        Ok(Outcome::Rows(call.batch.outputs.iter().map(|row| x[*row as usize].clone()).collect()))
    }
}

#[cfg(test)]
impl ReferenceOp for crate::graph::CpuOnlyOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        Ok(Outcome::Rows(call.of(self.x).clone()))
    }
}
