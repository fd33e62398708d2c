//! Lowering of products to `kernels/cuda/wide.cu`.

use crate::gpu::arguments::WideLinearConstants;
use crate::gpu::device::Dispatch;
use crate::gpu::lower::context::{Launch, Lowering, Product, Spread};
use crate::gpu::lower::tensor::kernels_for;
use crate::gpu::lower::wide::{MOST_LINEAR_TOKENS, MOST_TOKENS, TILE_ROWS, WideRows, shared_for, splits};
use crate::gpu::steps::Step;
use crate::graph::{Precision, Value};

/// Widths of tiles that there is code for, of those that a cluster has up to the fourth.
const WIDTHS: [usize; 7] = [32, 64, 96, 128, 144, 160, MOST_LINEAR_TOKENS];
const MOST_SLICED_TOKENS: usize = 128;
/// What a tile takes beside its tokens, in tokens.
const TILE_COST: usize = 190;
/// Columns of a step of a tile.
const STEP: usize = 128;
/// What adding up slices takes, in tokens of a step, and for each token.
const SLICES_COST: usize = 320;
const SLICED_TOKEN_COST: usize = 3;
/// Of 16 multiprocessors, those that clusters may count on.
const IN_CLUSTERS: usize = 15;

/// How a linear layer of a batch is divided: tokens of a tile, and blocks of a cluster that share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu::lower) struct Division {
    width: usize,
    slices: usize,
}

impl Division {
    /// Of up to eight slices the one that ends soonest.
    fn of(row_tiles: usize, tokens: usize, cols: usize, multiprocessors: usize) -> Self {
        let steps = cols.div_ceil(STEP);
        let (width, slices) = (width(MOST_LINEAR_TOKENS, row_tiles, tokens, multiprocessors), 1);
        let alone = Self { width, slices };
        let turns = (row_tiles * tokens.div_ceil(width)).div_ceil(multiprocessors);
        let widths = WIDTHS.into_iter().filter(|width| *width <= MOST_SLICED_TOKENS);
        let sliced = widths.flat_map(|width| [2, 4, 8].map(|slices| Self { width, slices }));
        let fits = |d: &Self| {
            let blocks = row_tiles * tokens.div_ceil(d.width) * d.slices;
            d.slices <= steps && blocks * 16 <= multiprocessors * IN_CLUSTERS
        };
        let cost = |d: &Self| {
            let adding = SLICES_COST + SLICED_TOKEN_COST * d.width;
            steps.div_ceil(d.slices) * (TILE_COST + d.width) + adding
        };
        let best = sliced.filter(fits).min_by_key(cost);
        let gains = |d: &Self| cost(d) < turns * steps * (TILE_COST + width);
        best.filter(gains).unwrap_or(alone)
    }
}

/// Tokens of a tile, `most` at most: those that end soonest, where `multiprocessors` work on a tile each.
pub(in crate::gpu::lower) fn width(
    most: usize,
    row_tiles: usize,
    tokens: usize,
    multiprocessors: usize,
) -> usize {
    let cost = |width: &usize| {
        let turns = (row_tiles * tokens.div_ceil(*width)).div_ceil(multiprocessors);
        turns * (TILE_COST + *width)
    };
    WIDTHS.into_iter().filter(|width| *width <= most).min_by_key(cost).expect("there are widths")
}

/// Whether `rows` of a batch take no longer by these kernels than by panels, with so many tiles of rows of so many columns: as measured
/// on an H200.
fn wins(rows: usize, [row_tiles, cols]: [usize; 2], multiprocessors: usize) -> bool {
    rows > 64 || row_tiles >= 2 * multiprocessors || row_tiles * cols >= 96 * 2048
}

impl Lowering<'_> {
    /// Whether a batch had better take these kernels for a linear layer than panels: of fewer rows where the layers that read its
    /// input are larger.
    pub(super) fn batch_is_wide(&self, p: &Product) -> bool {
        let matrix = self.weight(p.weight).matrix;
        let suits = p.precision == Precision::Fast
            && self.panel_scratch().is_some()
            && self.wide_scratch().is_some()
            && kernels_for(matrix.dtype, matrix.cols).is_some();
        suits && wins(self.rows, [self.row_tiles_of(p.x), matrix.cols], self.memory.info.multiprocessors)
    }

    /// A linear layer, and what brings its input into the kernels' form unless it is; nothing if the kernels do not suit it.
    pub(super) fn wide_linear(&mut self, p: &Product) -> Option<(Option<Dispatch>, Dispatch)> {
        let scratch = self.wide_scratch()?;
        let weight = *self.weight(p.weight);
        let matrix = weight.matrix;
        let encoding = kernels_for(matrix.dtype, matrix.cols).filter(|_| p.precision == Precision::Fast)?;
        let (row_tiles, split) = (matrix.rows.div_ceil(TILE_ROWS), splits(encoding));
        // Products of one input share its tiles, whose width the first one chooses for all, which run beside each other.
        let there = self.spread.filter(|there| there.x == p.x && there.split == split);
        let divided = || {
            let row_tiles = self.row_tiles_of(p.x).max(row_tiles);
            let multiprocessors = self.memory.info.multiprocessors;
            if self.is_batch() {
                return Division::of(row_tiles, self.rows, matrix.cols, multiprocessors);
            }
            // However a prompt is cut, sums have one order.
            Division { width: width(MOST_LINEAR_TOKENS, row_tiles, self.rows, multiprocessors), slices: 1 }
        };
        let division = there.map_or_else(divided, |there| there.division);
        let Division { width, slices } = division;
        let shape = [self.rows, matrix.cols];
        let enter = there
            .is_none()
            .then(|| self.enter_wide(scratch, self.entering(p.x), shape, WideRows::All { width }, split));
        (self.spread, self.converted) = (Some(Spread { x: p.x, split, division }), None);
        let [a, b, c] = weight.planes;
        let (bias, residual) = (self.optional(p.bias), p.residual.map_or(self.input(0), |r| self.value(r)));
        let buffers = [scratch.x.into(), scratch.scale.into(), a, b, c, bias, residual, self.value(p.out)];
        let constants = &WideLinearConstants {
            weight: weight.format,
            rows: matrix.rows,
            tokens: self.rows,
            width,
            slices,
            has_bias: p.bias.is_some(),
            has_residual: p.residual.is_some(),
        };
        let kernel = if slices == 1 { "wide_linear" } else { "wide_linear_sliced" };
        let launch = Launch { unit: "cuda/wide", kernel, buffers: &buffers, constants };
        let dispatch = self.wide(encoding, launch, row_tiles * self.rows.div_ceil(width) * slices);
        let most = if slices > 1 {
            MOST_SLICED_TOKENS
        } else if width > MOST_TOKENS {
            MOST_LINEAR_TOKENS
        } else {
            MOST_TOKENS
        };
        Some((enter, Dispatch { shared: shared_for(most), cluster: slices as u32, ..dispatch }))
    }
}

impl Lowering<'_> {
    /// Tiles of rows of all linear layers that read x.
    fn row_tiles_of(&self, x: Value) -> usize {
        let weights = self.readers(x).filter_map(|step| match step {
            Step::Linear { x: own, weight, precision: Precision::Fast, .. } if *own == x => Some(*weight),
            _ => None,
        });
        weights.map(|weight| self.weight(weight).matrix.rows.div_ceil(TILE_ROWS)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_wide_from_few_rows_on_and_small_layers_from_many() {
        let of = |[rows, cols]: [usize; 2], tokens| wins(tokens, [rows.div_ceil(TILE_ROWS), cols], 132);
        assert!(of([151_936, 2048], 64));
        assert!(of([4096, 12288], 64));
        let heads = [5120, 2048];
        assert!(of(heads, 65) && !of(heads, 64));
    }

    #[test]
    fn widths_leave_few_multiprocessors_without_work() {
        assert_eq!(width(160, 22, 2048, 132), 128);
        assert_eq!(width(176, 22, 2048, 132), 176);
        assert_eq!(width(176, 28, 2048, 132), 160);
        assert_eq!(width(176, 3, 2048, 132), 64);
        assert_eq!(width(176, 11, 2048, 132), 176);
        assert_eq!(width(176, 1, 40, 132), 32);
    }

    #[test]
    fn clusters_share_tiles_where_these_are_few() {
        let of = |rows: usize, cols, tokens| Division::of(rows.div_ceil(TILE_ROWS), tokens, cols, 132);
        assert_eq!(of(2048, 4096, 256), Division { width: 128, slices: 4 });
        assert_eq!(of(2048, 4096, 64), Division { width: 64, slices: 8 });
        assert_eq!(of(5120, 2048, 256), Division { width: 128, slices: 2 });
        assert_eq!(of(151_936, 2048, 64).slices, 1);
        assert_eq!(of(192, 128, 200).slices, 1);
    }
}
