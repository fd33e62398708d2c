//! Rotary position embedding, with angles computed once a batch and shared by all layers.

use crate::graph::{Placement, Rope, RopeStyle};

/// cos and sin of every pair at every row of a batch.
#[derive(Debug, Default)]
pub(crate) struct Angles {
    /// (rows, pairs), (cos, sin) times the rotation's magnitude.
    table: Vec<(f32, f32)>,
}

impl Angles {
    /// Fills the table for rows at `positions`.
    pub(crate) fn set(&mut self, rope: &Rope, positions: impl Iterator<Item = usize>) {
        self.table.clear();
        for position in positions {
            self.table.extend(rope.inv_freq.iter().map(|freq| {
                let (sin, cos) = (position as f32 * freq).sin_cos();
                (cos * rope.magnitude, sin * rope.magnitude)
            }));
        }
    }

    /// Rotates channels `place` says of every head of row `row`, which is at `position`, in place.
    pub(crate) fn rotate_placed(
        &self,
        rope: &Rope,
        place: Placement,
        (row, position): (usize, usize),
        heads: &mut [f32],
        head_dim: usize,
    ) {
        let pairs = rope.inv_freq.len();
        let mut angles = match place.position(position) {
            same if same == position => self.table[row * pairs..(row + 1) * pairs].to_vec(),
            other => {
                let mut own = Self::default();
                own.set(rope, std::iter::once(other));
                own.table
            }
        };
        if place.inverse {
            angles.iter_mut().for_each(|(_, sin)| *sin = -*sin);
        }
        for head in heads.chunks_exact_mut(head_dim) {
            rotate(rope.style, &angles, &mut head[place.first..]);
        }
    }

    /// Rotates every head of row `row` in place.
    pub(crate) fn rotate(&self, rope: &Rope, row: usize, heads: &mut [f32], head_dim: usize) {
        let pairs = rope.inv_freq.len();
        let angles = &self.table[row * pairs..(row + 1) * pairs];
        heads.chunks_exact_mut(head_dim).for_each(|head| rotate(rope.style, angles, head));
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
