//! Lowering of products with resident weights: which kernels compute them, and those of `kernels/linear.h`, which suit every
//! encoding.

mod batch;
mod early;
mod exact;
mod few;
mod joint;
mod kept;
mod panels;
mod pieces;
mod tensor;
mod wide;

pub(super) use self::batch::{batch_span, batch_tokens, of_tokens};
pub(super) use self::early::COPY_UNIT;
pub(super) use self::joint::MOST_JOINT_ROWS;
pub(super) use self::pieces::columns_at_once;
pub(super) use self::wide::{Division, width};

use super::context::{Launch, Lowering, Product, Siblings, THREADS, WARPS, named};
use crate::gpu::arguments::LinearConstants;
use crate::gpu::device::{Dispatch, Order};
use crate::gpu::encodings::common_name;
use crate::gpu::memory::{FEW_ROWS, TILE};

/// Outputs of which groups make one or two: warps alone would be too few.
const GROUP_ROWS: usize = 512;
/// As `ROWS` of `kernels/floats.h`: outputs of a warp.
pub(super) const FLOAT_ROWS: usize = 2;
/// As `JOINT_TOKENS` of it.
const FLOAT_TOKENS: usize = 8;
/// Columns that a lane of these kernels reads at once.
const FLOAT_COLUMNS: usize = 8;

impl Lowering<'_> {
    /// Queues a product; `before` are those that the last steps were.
    pub(super) fn product(&mut self, p: Product, before: Siblings) {
        // What adapters have added to the last ones comes between.
        let before = if self.updates.is_empty() { before } else { Siblings::default() };
        let Some(before) = self.few_linear(p, before) else { return };
        self.flush_products();
        let (enter, dispatch) = if let Some(wide) = self.wide_linear(&p) {
            wide
        } else if let Some(mut list) = self.tensor_linear(&p) {
            return self.run.append(&mut list);
        } else {
            self.exact_linear(&p).unwrap_or_else(|| (None, self.linear(&p)))
        };
        self.push_product(&p, before, enter, dispatch);
    }

    /// Queues what makes a product, after what it needs for that: those of one input do not wait for each other.
    fn push_product(&mut self, p: &Product, before: Siblings, enter: Option<Dispatch>, dispatch: Dispatch) {
        let apart = p.residual.is_none_or(|r| !before.outs.contains(&r))
            && !before.residuals.contains(&self.value(p.out));
        let beside = before.x == Some(p.x) && apart && enter.is_none();
        let order = if beside { Order::Beside } else { Order::After };
        self.run.extend(enter);
        let mut siblings = if order == Order::Beside { before } else { Siblings::default() };
        siblings.x = Some(p.x);
        siblings.outs.push(p.out);
        siblings.residuals.extend(p.residual.map(|r| self.value(r)));
        self.siblings = siblings;
        self.run.push(Dispatch { order, ..dispatch });
    }

    fn linear(&self, p: &Product) -> Dispatch {
        let w = self.weight(p.weight);
        let rows = w.matrix.rows;
        let constants = &LinearConstants {
            weight: w.format,
            rows,
            tokens: self.rows,
            has_bias: p.bias.is_some(),
            has_residual: p.residual.is_some(),
        };
        let [a, b, c] = w.planes;
        let residual = p.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [a, b, c, self.value(p.x), self.optional(p.bias), residual, self.value(p.out)];
        let fits = w.matrix.cols.is_multiple_of(FLOAT_COLUMNS);
        if let Some(name) = common_name(w.matrix.dtype).filter(|_| self.rows <= FEW_ROWS && fits) {
            let (kernel, tokens, each) = match self.rows {
                _ if rows <= GROUP_ROWS => ("float_group", FLOAT_TOKENS, FLOAT_ROWS),
                1 => ("float_linear", 1, FLOAT_ROWS * WARPS),
                _ => ("float_joint", FLOAT_TOKENS, FLOAT_ROWS * WARPS),
            };
            let launch = Launch { unit: "floats", kernel, buffers: &buffers, constants };
            let grid = [self.rows.div_ceil(tokens), rows.div_ceil(each), 1];
            named(launch.over(grid, THREADS), name)
        } else if self.rows <= FEW_ROWS && rows <= GROUP_ROWS {
            Launch { unit: "linear", kernel: "matvec_group_any", buffers: &buffers, constants }
                .over([rows, self.rows, 1], THREADS)
        } else if self.rows <= FEW_ROWS {
            Launch { unit: "linear", kernel: "matvec_any", buffers: &buffers, constants }
                .over([rows.div_ceil(WARPS), self.rows, 1], THREADS)
        } else {
            let launch = Launch { unit: "linear", kernel: "matmul_any", buffers: &buffers, constants };
            let dispatch = launch.over([rows.div_ceil(TILE), self.rows.div_ceil(TILE), 1], THREADS);
            self.on_matrices(dispatch, "matmul", w.matrix.dtype)
        }
    }
}
