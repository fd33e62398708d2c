//! Rotary position embedding, with angles computed once a batch and shared by all layers.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::vector;
use crate::Result;
use crate::graph::{HeadScaleOp, Placement, PositionScaleOp, Rope, RopeOp, RopeStyle};

impl CpuOp for RopeOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, heads, rope, place } = *self;
        let rows = call.tokens();
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            let (rotation, at) = (&cpu.graph.ropes[rope], (row, cpu.rope_positions[row]));
            cpu.angles[rope].rotate(rotation, place, at, out, x.width() / heads);
        });
        Ok(())
    }
}

impl CpuOp for PositionScaleOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, scale } = *self;
        let (simd, outputs) = (cpu.context.simd, call.batch.outputs);
        let rows = cpu.values.rows(x);
        let gathered = rows != call.tokens();
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            let of_batch = if gathered { outputs[row] as usize } else { row };
            vector::scale(simd, scale.at(cpu.positions[of_batch]), out);
        });
        Ok(())
    }
}

impl CpuOp for HeadScaleOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { x, base, slope, heads } = *self;
        let simd = cpu.context.simd;
        let rows = call.tokens();
        cpu.map_rows(call.out(), rows, |cpu, row, out| {
            out.copy_from_slice(cpu.values.row(x, row));
            let growth = (cpu.positions[row] as f32).ln_1p();
            let factors = cpu.vectors[base.0].iter().zip(&cpu.vectors[slope.0]);
            for (head, (base, slope)) in out.chunks_exact_mut(x.width() / heads).zip(factors) {
                vector::scale(simd, base + slope * growth, head);
            }
        });
        Ok(())
    }
}

/// cos and sin of every pair at every row of a batch.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    /// (rows, pairs), (cos, sin) times the rotation's magnitude.
    table: Vec<(f32, f32)>,
}

impl Angles {
    /// Fills the table for rows at `positions`.
    pub(crate) fn set(&mut self, rope: &Rope, positions: impl Iterator<Item = [usize; 3]>) {
        self.table.clear();
        positions.for_each(|position| self.table.extend(rope.angles(position)));
    }

    /// Rotates the channels that `place` says of every head of row `row`, which is at `position`, in place.
    pub(crate) fn rotate(
        &self,
        rope: &Rope,
        place: Placement,
        (row, position): (usize, [usize; 3]),
        heads: &mut [f32],
        head_dim: usize,
    ) {
        let pairs = rope.inv_freq.len();
        let mut own = Self::default();
        let mut angles = match place.position(position) {
            same if same == position => &self.table[row * pairs..(row + 1) * pairs],
            other => {
                own.set(rope, std::iter::once(other));
                &own.table[..]
            }
        };
        let inverse: Vec<(f32, f32)>;
        if place.inverse {
            inverse = angles.iter().map(|(cos, sin)| (*cos, -*sin)).collect();
            angles = &inverse;
        }
        for head in heads.chunks_exact_mut(head_dim) {
            rotate(rope.style, angles, &mut head[place.first..]);
        }
    }
}

/// Rotates the first pairs of channels of a head.
fn rotate(style: RopeStyle, angles: &[(f32, f32)], head: &mut [f32]) {
    let pairs = angles.len();
    match style {
        RopeStyle::HalfSplit => {
            let (first, second) = head[..2 * pairs].split_at_mut(pairs);
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
        RopeStyle::Interleaved => {
            for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
                (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
            }
        }
    }
}
