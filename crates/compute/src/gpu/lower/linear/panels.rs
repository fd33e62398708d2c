//! Lowering of products to `kernels/cuda/panels.cu`.

use super::few::{MOST_PARTS, NONE};
use crate::gpu::arguments::{PanelProductsConstants, ProductPart};
use crate::gpu::device::{Dispatch, Order};
use crate::gpu::kernels::PANELS_UNIT;
use crate::gpu::lower::bytes::encoding;
use crate::gpu::lower::context::{Launch, Lowering, Product, named};
use crate::gpu::lower::panels::{GROUP_WARPS, PANEL, PANEL_SHARED, THREADS};
use crate::gpu::memory::{PANEL_TILE, PanelScratch};

/// Groups that keep a large device busy: with fewer, warps share panels.
const GROUPS: usize = 256;
/// Tokens of a tile of the kernel for more work, and groups of it that keep a large device busy.
const WIDE_TILE: usize = 64;
const WIDE_GROUPS: usize = 128;

impl Lowering<'_> {
    /// Queues products of one input: a dispatch for each encoding.
    pub(super) fn panel_products(&mut self, waiting: &[Product], scratch: PanelScratch) {
        let blocks = self.enter_blocks(scratch, waiting[0].x);
        self.run.extend(blocks);
        let name =
            |p: &Product| encoding(self.weight(p.weight).matrix.dtype).expect("weights that take bytes");
        let mut list: Vec<Dispatch> = vec![];
        for (i, own) in waiting.iter().map(name).enumerate() {
            if waiting[..i].iter().any(|p| name(p) == own) {
                continue;
            }
            let same: Vec<&Product> = waiting.iter().filter(|p| name(p) == own).collect();
            let order = if list.is_empty() { Order::After } else { Order::Beside };
            list.push(Dispatch { order, ..self.panel_product(&same, own, scratch) });
        }
        self.run.append(&mut list);
    }

    fn panel_product(&self, products: &[&Product], name: &str, scratch: PanelScratch) -> Dispatch {
        let first = products[0];
        // Weight rows that a group multiplies, if so many of its warps share panels.
        let each = |slices: usize| 2 * PANEL * GROUP_WARPS / slices;
        let rows = |p: &Product| self.weight(p.weight).matrix.rows;
        let groups = |slices: usize, tile: usize| {
            products.iter().map(|p| rows(p).div_ceil(each(slices))).sum::<usize>() * self.rows.div_ceil(tile)
        };
        let wide = self.rows > PANEL_TILE && groups(1, WIDE_TILE) >= WIDE_GROUPS;
        let (kernel, tile) =
            if wide { ("panel_products_wide", WIDE_TILE) } else { ("panel_products", PANEL_TILE) };
        let slices = [1, 2, 4].into_iter().find(|slices| groups(*slices, tile) >= GROUPS);
        let slices = if wide { 1 } else { slices.unwrap_or(GROUP_WARPS) };
        let mut parts = [ProductPart { bias: NONE, ..ProductPart::default() }; MOST_PARTS];
        for (part, p) in parts.iter_mut().zip(products) {
            *part = self.part(p, each(slices), 1);
        }
        let groups = parts.iter().map(|part| part.groups).sum();
        let out = |i: usize| self.value(products.get(i).unwrap_or(&first).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let (x, scale) = (scratch.x.into(), scratch.scale.into());
        let buffers = [self.all_weights(first), x, scale, residual, out(0), out(1), out(2)];
        let has_residual = first.residual.is_some();
        let constants = &PanelProductsConstants { parts, tokens: self.rows, slices, has_residual };
        let launch = Launch { unit: PANELS_UNIT, kernel, buffers: &buffers, constants };
        let dispatch = named(launch.over([groups, self.rows.div_ceil(tile), 1], THREADS), name);
        Dispatch { shared: PANEL_SHARED * (tile / PANEL_TILE) as u32, ..dispatch }
    }
}
