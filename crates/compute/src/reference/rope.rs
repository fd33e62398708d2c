//! The scalar meaning of what depends on a token's position.

use super::{Interpreter, Outcome, ReferenceCall, ReferenceOp};
use crate::Result;
use crate::graph::{HeadScaleOp, PositionScaleOp, Rope, RopeOp, RopeStyle};

/// Rotates one head of a token in place, whose position on every axis is given.
pub fn rope(head: &mut [f32], rotation: &Rope, position: [usize; 3]) {
    let pairs = rotation.inv_freq.len();
    for (i, freq) in rotation.inv_freq.iter().enumerate() {
        let (a, b) = match rotation.style {
            RopeStyle::HalfSplit => (i, i + pairs),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let axis = rotation.axes.get(i).map_or(0, |axis| usize::from(*axis));
        let (sin, cos) = (position[axis] as f32 * freq).sin_cos();
        let (sin, cos) = (sin * rotation.magnitude, cos * rotation.magnitude);
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

impl ReferenceOp for RopeOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let mut rotation = own.graph.ropes[self.rope].clone();
        if self.place.inverse {
            rotation.inv_freq.iter_mut().for_each(|freq| *freq = -*freq);
        }
        let mut rows = call.of(self.x).clone();
        for (row, position) in rows.iter_mut().zip(call.batch.rope_positions()) {
            let position = self.place.position(position);
            let rotate = |head: &mut [f32]| rope(&mut head[self.place.first..], &rotation, position);
            row.chunks_mut(self.x.width() / self.heads).for_each(rotate);
        }
        Ok(Outcome::Rows(rows))
    }
}

impl ReferenceOp for HeadScaleOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let (base, slope) = (own.vector(self.base)?, own.vector(self.slope)?);
        let mut rows = call.of(self.x).clone();
        for (row, position) in rows.iter_mut().zip(call.positions()) {
            let growth = (position as f64 + 1.0).ln();
            for (head, values) in row.chunks_mut(self.x.width() / self.heads).enumerate() {
                let factor = f64::from(base[head]) + f64::from(slope[head]) * growth;
                values.iter_mut().for_each(|v| *v = (f64::from(*v) * factor) as f32);
            }
        }
        Ok(Outcome::Rows(rows))
    }
}

impl ReferenceOp for PositionScaleOp {
    fn run(&self, _: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome> {
        let mut rows = call.of(self.x).clone();
        let mut positions: Vec<usize> = call.positions().collect();
        if rows.len() != positions.len() {
            positions = call.batch.outputs.iter().map(|row| positions[*row as usize]).collect();
        }
        for (row, position) in rows.iter_mut().zip(positions) {
            let factor = self.scale.at(position);
            row.iter_mut().for_each(|v| *v *= factor);
        }
        Ok(Outcome::Rows(rows))
    }
}
