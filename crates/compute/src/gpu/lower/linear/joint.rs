//! Lowering to the kernels of `kernels/cuda/joint_rows.cu`: products of few rows that read a weight once for all of them, with
//! the bits of those that read it once a row.

use super::pieces::is_super_block;
use crate::gpu::arguments::BatchProductsConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::kernels::JOINT_ROWS_UNIT;
use crate::gpu::lower::context::{Launch, Lowering, Product, named};

const THREADS: u32 = 256;
/// Bytes that are otherwise read again, from which reading weights once took less time on an H100, whose multiprocessors share them:
/// if they would be copied ahead, and if not.
const LEAST_COPIED_AGAIN: usize = 8 << 20;
pub(super) const LEAST_AGAIN: usize = 4 << 20;
/// Threadgroup memory of the activations of a share of the rows, at most.
const MOST_ENTERED: usize = 88 << 10;
/// As `JOINT_TOKENS` of `kernels/cuda/joint_rows.cu` and `joint_experts.cu`.
pub(in crate::gpu::lower) const MOST_JOINT_ROWS: usize = 8;
/// Columns of eight quads, as `quad_at` of `kernels/pieces.h` orders them.
const QUADS_COLUMNS: usize = 128;

impl Lowering<'_> {
    /// The shares of rows that a dispatch of these products reads their weights once for, and the threadgroup memory that it takes;
    /// nothing if it had better not. `copied` is whether the dispatch that reads them once a row copies them ahead.
    pub(super) fn joint_shares(&self, products: &[(Product, usize)], copied: bool) -> Option<(usize, u32)> {
        let matrices = products.iter().map(|(p, _)| self.weight(p.weight).matrix);
        let bytes: usize = matrices.map(|m| m.rows * m.dtype.row_bytes(0, m.cols).unwrap_or(0)).sum();
        let again = bytes.saturating_mul(self.rows.saturating_sub(1));
        let cols = products.first()?.0.x.width();
        let least = self.share_of_h100(if copied { LEAST_COPIED_AGAIN } else { LEAST_AGAIN });
        let entered = cols.next_multiple_of(QUADS_COLUMNS) + cols / 4;
        let suits =
            self.rows <= MOST_JOINT_ROWS && self.memory.info.copies_ahead && self.memory.info.byte_matrices;
        let most = (MOST_ENTERED / entered).min(self.rows);
        if !suits || again < least || most == 0 {
            return None;
        }
        let shares = self.rows.div_ceil(most);
        Some((shares, (self.rows.div_ceil(shares) * entered) as u32))
    }

    /// Queues products of one input with the rows that a warp makes of each, after what makes its activations.
    pub(super) fn joint_products(&mut self, spans: &[(Product, usize)], (shares, shared): (usize, u32)) {
        let (first, _) = spans[0];
        let ([bytes, scales, factors], enter) = self.enter_batch(first.x);
        let (parts, name) = self.parts(spans);
        let mut dtypes = spans.iter().map(|(p, _)| self.weight(p.weight).matrix.dtype);
        let name = if name == "mixed" && dtypes.all(is_super_block) { "k_quants" } else { name };
        let groups = parts.iter().map(|part| part.groups).sum();
        let out = |i: usize| self.value(spans.get(i).map_or(first, |(p, _)| *p).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(&first), bytes, scales, factors, residual, out(0), out(1), out(2)];
        let has_residual = first.residual.is_some();
        let constants = &BatchProductsConstants { parts, tokens: self.rows, has_residual };
        let launch = Launch { unit: JOINT_ROWS_UNIT, kernel: "joint_products", buffers: &buffers, constants };
        let dispatch = Dispatch { shared, ..named(launch.over([shares, groups, 1], THREADS), name) };
        self.run.extend(enter);
        self.run.push(dispatch);
    }
}
