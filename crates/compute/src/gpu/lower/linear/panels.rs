//! Lowering of products to `kernels/cuda/products.cu`.

use super::few::{MOST_PARTS, NONE};
use crate::DType;
use crate::gpu::arguments::{PanelProductsConstants, ProductPart};
use crate::gpu::device::{Dispatch, Order};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::PRODUCTS_UNIT;
use crate::gpu::lower::context::{Launch, Lowering, Product, named};
use crate::gpu::lower::panels::PANEL;
use crate::gpu::memory::PanelScratch;

/// Weight rows of a warp.
const ROWS: usize = 2 * PANEL;
/// Columns of a group, and the bytes of its activations of eight tokens.
const GROUP: usize = 128;
const GROUP_BYTES: usize = 2048;
/// Chunks of groups in threadgroup memory at once.
const STAGES: usize = 3;
/// Threadgroup memory of a block, at most, which every device has, and what kernels of decoding get of a multiprocessor, of which each
/// block takes some for itself.
const MOST_SHARED: usize = 96 << 10;
const ALL_SHARED: usize = 132 << 10;
const SHARED_BESIDE: usize = 1 << 10;
/// Weight rows from which on tiles of more tokens gain more than they leave idle.
const MANY_ROWS: usize = 32768;

/// What blocks are like, and who multiplies what in them.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Division {
    /// Tokens of a tile: 16, 32 or 64.
    tile: usize,
    /// Teams of warps, each with rows of its own.
    teams: usize,
    /// Warps of a team, which take groups of columns by turns.
    team: usize,
    /// Groups of a warp in a chunk.
    turns: usize,
    /// Blocks of a cluster, each with a part of the columns.
    slices: usize,
}

/// Products that are one dispatch.
#[derive(Debug)]
struct Work {
    /// Rows of each weight.
    rows: Vec<usize>,
    cols: usize,
    tokens: usize,
    /// Whether bytes of the encoding take many registers: `IS_LARGE` of `kernels/cuda/unpack.h`.
    large: bool,
    multiprocessors: usize,
    /// Whether blocks may be clusters.
    clusters: bool,
}

fn is_large(dtype: DType) -> bool {
    use DType::{Affine, BF16, F16, Fp8, Fp8_Rows, Fp8_Whole, Int, MXFP8_Planes, Q3_K, Q5_K, Q6_K, Q8_0};
    matches!(
        dtype,
        F16 | BF16
            | Q3_K
            | Q5_K
            | Q6_K
            | Q8_0
            | Fp8 { .. }
            | Fp8_Rows { .. }
            | Fp8_Whole { .. }
            | MXFP8_Planes
            | Affine { bits: 8, .. }
            | Int { bits: 8, .. }
    )
}

impl Work {
    fn tile(&self) -> usize {
        match self.tokens {
            0..=16 => 16,
            17..=32 => 32,
            33..=64 if self.rows.iter().sum::<usize>() < MANY_ROWS => 32,
            _ => 64,
        }
    }

    /// Warps of a multiprocessor, for which there are registers.
    fn most_warps(&self, tile: usize) -> usize {
        match (self.large, tile) {
            (true, _) => 8,
            (false, 16) => 16,
            (false, _) => 12,
        }
    }

    fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    fn clusters_of(&self, teams: usize) -> usize {
        self.rows.iter().map(|rows| rows.div_ceil(ROWS * teams)).sum()
    }

    /// A block's threadgroup memory: chunks of activations, then sums.
    fn shared(&self, d: &Division) -> usize {
        let parts = d.tile / 8;
        let sums = d.teams * (d.team - 1 + usize::from(d.slices > 1)) * parts * 1024;
        (STAGES * d.team * d.turns * parts * GROUP_BYTES).max(sums)
    }

    /// Microseconds on an H100, within a tenth of what was measured for 9 to 256 tokens.
    fn cost(&self, d: &Division) -> f64 {
        // Of a launch, of a group's latency, of adding a slice up, and of the activations of a group and eight tokens.
        const LAUNCH: f64 = 4.6;
        const LATENCY: f64 = 1.0;
        const SLICE: f64 = 0.15;
        const ACTIVATIONS: f64 = 0.035;
        // Of a warp's group where others compete with it.
        let each = match d.tile {
            16 => 0.1,
            32 => 0.15,
            _ => 0.3,
        };
        let warps = d.teams * d.team;
        let fitting = ALL_SHARED / (self.shared(d) + SHARED_BESIDE);
        let resident = (self.most_warps(d.tile) / warps).min(fitting).max(1);
        let blocks = self.clusters_of(d.teams) * d.slices * self.tokens.div_ceil(d.tile);
        // Clusters lie within parts of the device whose sizes they do not divide.
        let usable = match d.slices {
            1 => self.multiprocessors,
            2 => self.multiprocessors * 65 / 66,
            4 => self.multiprocessors * 10 / 11,
            _ => self.multiprocessors * 28 / 33,
        };
        let usable = usable.max(1);
        let together = blocks.div_ceil(usable).min(resident);
        let waves = blocks.div_ceil(usable * resident) as f64;
        let steps = self.groups().div_ceil(d.slices).div_ceil(d.team) as f64;
        let products = steps * LATENCY.max((together * warps) as f64 * each);
        let entering = (self.groups() * d.tile) as f64 / (8 * d.slices) as f64 * ACTIVATIONS;
        LAUNCH * (1.0 + (waves - 1.0) / resident as f64)
            + waves * (products + entering)
            + if d.slices > 1 { SLICE * d.slices as f64 } else { 0.0 }
    }

    fn division(&self) -> Division {
        let tile = self.tile();
        let most = self.most_warps(tile).min(if tile == 16 { 8 } else { usize::MAX });
        let slices: &[usize] = if self.clusters { &[1, 2, 4, 8] } else { &[1] };
        let mut best = (f64::INFINITY, Division { tile, teams: 4, team: 1, turns: 1, slices: 1 });
        for &slices in slices {
            for team in [1, 2, 4, 8] {
                for teams in (1..=most / team).filter(|teams| teams * team >= 4) {
                    if slices > 1 && self.groups() / slices < team {
                        continue;
                    }
                    let turns = if self.groups() / slices < 2 * team { 1 } else { 2 };
                    let fitting =
                        (1..=turns).rev().map(|turns| Division { tile, teams, team, turns, slices });
                    for division in fitting.filter(|d| self.shared(d) <= MOST_SHARED).take(1) {
                        let cost = self.cost(&division);
                        if cost < best.0 {
                            best = (cost, division);
                        }
                    }
                }
            }
        }
        best.1
    }
}

impl Lowering<'_> {
    /// Queues products of one input: a dispatch for each encoding.
    pub(super) fn panel_products(&mut self, waiting: &[Product], scratch: PanelScratch) {
        let blocks = self.enter_blocks(scratch, waiting[0].x);
        self.run.extend(blocks);
        let name = |p: &Product| {
            kernel_name(self.weight(p.weight).matrix.dtype, FastPath::Tensor)
                .expect("weights for tensor cores")
        };
        let mut list: Vec<(bool, Dispatch)> = vec![];
        for (i, own) in waiting.iter().map(name).enumerate() {
            if waiting[..i].iter().any(|p| name(p) == own) {
                continue;
            }
            let same: Vec<&Product> = waiting.iter().filter(|p| name(p) == own).collect();
            list.push((
                is_large(self.weight(same[0].weight).matrix.dtype),
                self.panel_product(&same, own, scratch),
            ));
        }
        // Blocks that take most of a multiprocessor's registers would wait for one that all others have left.
        list.sort_by_key(|(large, _)| !large);
        let orders = std::iter::once(Order::After).chain(std::iter::repeat(Order::Beside));
        let list = list.into_iter().zip(orders).map(|((_, dispatch), order)| Dispatch { order, ..dispatch });
        self.run.extend(list);
    }

    fn panel_product(&self, products: &[&Product], name: &str, scratch: PanelScratch) -> Dispatch {
        let first = products[0];
        let work = Work {
            rows: products.iter().map(|p| self.weight(p.weight).matrix.rows).collect(),
            cols: first.x.width(),
            tokens: self.rows,
            large: is_large(self.weight(first.weight).matrix.dtype),
            multiprocessors: self.memory.info.multiprocessors,
            clusters: self.memory.info.clusters,
        };
        let division = work.division();
        let Division { tile, teams, team, turns, slices } = division;
        let mut parts = [ProductPart { bias: NONE, ..ProductPart::default() }; MOST_PARTS];
        for (part, p) in parts.iter_mut().zip(products) {
            *part = self.part(p, ROWS * teams, 1);
        }
        let out = |i: usize| self.value(products.get(i).unwrap_or(&first).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let (x, scale) = (scratch.x.into(), scratch.scale.into());
        let buffers = [self.all_weights(first), x, scale, residual, out(0), out(1), out(2)];
        let has_residual = first.residual.is_some();
        let constants =
            &PanelProductsConstants { parts, tokens: self.rows, teams, team, turns, slices, has_residual };
        let kernel = match tile {
            16 => "panel_products_16",
            32 => "panel_products_32",
            _ => "panel_products_64",
        };
        let launch = Launch { unit: PRODUCTS_UNIT, kernel, buffers: &buffers, constants };
        let grid = [work.clusters_of(teams) * slices, self.rows.div_ceil(tile), 1];
        let dispatch = named(launch.over(grid, (32 * teams * team) as u32), name);
        Dispatch { shared: work.shared(&division) as u32, cluster: slices as u32, ..dispatch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(rows: &[usize], cols: usize, tokens: usize, large: bool) -> Work {
        let rows = rows.to_vec();
        Work { rows, cols, tokens, large, multiprocessors: 132, clusters: true }
    }

    #[test]
    fn a_block_has_what_its_kernel_allows() {
        for cols in [128, 256, 768, 2048, 4096, 8192] {
            for rows in [1, 32, 512, 5120, 151_936] {
                for tokens in [9, 16, 17, 32, 33, 64, 65, 96, 128, 256, 512] {
                    for (large, clusters) in [(false, true), (true, true), (false, false), (true, false)] {
                        let work = Work { clusters, ..work(&[rows, 512], cols, tokens, large) };
                        let d = work.division();
                        let most = if large || d.tile == 16 { 8 } else { 12 };
                        assert!(d.teams * d.team <= most, "{work:?}: {d:?}");
                        assert!(work.shared(&d) <= MOST_SHARED, "{work:?}: {d:?}");
                        assert!(clusters || d.slices == 1, "{work:?}: {d:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn long_columns_are_cut_where_rows_are_few() {
        assert!(work(&[2048], 4096, 64, false).division().slices > 1);
        assert_eq!(work(&[151_936], 2048, 64, true).division().slices, 1);
    }
}
