//! Lowering to the kernels of `kernels/cuda/batched.h` and `kernels/batch.h`: products of batches of more than few rows, with
//! the bits of those of few.

use super::few::{MOST_PARTS, NONE};
use super::pieces::Tokens;
use crate::gpu::arguments::{BatchEnterConstants, BatchPlainConstants, BatchProductsConstants, ProductPart};
use crate::gpu::device::{Dispatch, Order, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::BATCHED_UNIT;
use crate::gpu::lower::bytes::{MOST_COLUMNS, encoding};
use crate::gpu::lower::context::{Launch, Lowering, Product, named};
use crate::gpu::memory::{BatchScratch, SCALED_COLUMNS};
use crate::gpu::steps::Step;
use crate::graph::Value;

const THREADS: u32 = 256;
/// Outputs that a group makes at once.
const GROUP_ROWS: usize = 32;
/// Groups that a large device has work from; beyond, groups make more outputs each.
const GROUPS: usize = 1056;
/// Outputs and tokens of a group of a product of plain floats.
const PLAIN_ROWS: usize = 4;
const PLAIN_TOKENS: usize = 8;
/// Threadgroup memory of a group's activations, at most.
const MOST_ENTERED: usize = 88 << 10;

/// Bytes of the activations of `tokens` tokens: bytes, and eight for each block.
fn entered_bytes(tokens: usize, cols: usize) -> usize {
    tokens * (cols + cols / SCALED_COLUMNS * 8)
}

/// Tokens of a tile, where `likely` are there, and the threadgroup memory of its activations.
pub(in crate::gpu::lower) fn batch_tokens(likely: usize, cols: usize) -> (usize, u32) {
    let tokens = if likely > 8 && entered_bytes(16, cols) <= MOST_ENTERED { 16 } else { 8 };
    (tokens, entered_bytes(tokens, cols) as u32)
}

/// How often a group does what it does, if `groups` would do it once.
pub(in crate::gpu::lower) fn batch_span(groups: usize) -> usize {
    (groups / GROUPS).clamp(1, 4)
}

/// The name of a kernel for tiles of so many tokens.
pub(in crate::gpu::lower) fn of_tokens(dispatch: Dispatch, tokens: usize, encoding: &str) -> Dispatch {
    named(Dispatch { kernel: format!("{}_{tokens}", dispatch.kernel).into(), ..dispatch }, encoding)
}

impl Lowering<'_> {
    /// Bytes, scales and factors of `x`, and what makes them unless they are there.
    pub(in crate::gpu::lower) fn enter_batch(&mut self, x: Value) -> ([Slice; 3], Option<Dispatch>) {
        let BatchScratch { bytes, scales, factors, .. } = self.memory.scratch.batch;
        let entered = [bytes, scales, factors].map(Slice::from);
        if self.entered == Some(x) {
            return (entered, None);
        }
        self.entered = Some(x);
        let (from, norm) = self.entering(x);
        let weight = norm.map_or(self.input(0), |norm| self.vector(norm.weight));
        let buffers = [from, weight, entered[0], entered[1], entered[2]];
        let constants = &BatchEnterConstants { norm: norm.into(), cols: x.width() };
        let launch = Launch { unit: "batch", kernel: "batch_enter", buffers: &buffers, constants };
        (entered, Some(launch.over([self.rows, 1, 1], THREADS)))
    }

    /// Where rows of `out` go in eight bits, if all that reads them is a product that takes them so.
    pub(in crate::gpu::lower) fn rounded_for_reader(&self, out: Value) -> Option<[Slice; 3]> {
        let mut readers = self.readers(out);
        let (Some(&Step::Linear { x, weight, bias, residual, precision, out: to, .. }), None) =
            (readers.next(), readers.next())
        else {
            return None;
        };
        let suits = x == out && residual != Some(out) && self.enters(weight, precision)?;
        let spans = self.spans(&[Product { x, weight, bias, residual, precision, out: to }], Tokens::One);
        let joint = || self.joint_shares(&spans, self.early_products(&spans).is_some()).is_some();
        let takes = self.panel_scratch().is_none() && (self.enters_as_batch(x) || self.is_few() && joint());
        let BatchScratch { bytes, scales, factors, .. } = self.memory.scratch.batch;
        (suits && takes).then_some([bytes, scales, factors].map(Slice::from))
    }

    /// Whether products of `x` are those of a batch, for which it is brought into eight bits: wider rows have no room beside each
    /// other.
    pub(super) fn enters_as_batch(&self, x: Value) -> bool {
        self.is_batch() && x.width() <= MOST_COLUMNS
    }

    /// Queues products of one input: a dispatch for each encoding.
    pub(super) fn batch_products(&mut self, waiting: &[Product]) {
        let first = waiting[0];
        let (entered, enter) = self.enter_batch(first.x);
        self.run.extend(enter);
        let name =
            |p: &Product| encoding(self.weight(p.weight).matrix.dtype).expect("weights that take bytes");
        let (mut done, mut list): (Vec<&str>, Vec<Dispatch>) = (vec![], vec![]);
        for own in waiting.iter().map(name) {
            if done.contains(&own) {
                continue;
            }
            done.push(own);
            let same: Vec<&Product> = waiting.iter().filter(|p| name(p) == own).collect();
            let dispatch = self.batch_product(&same, own, entered);
            let order = if list.is_empty() { Order::After } else { Order::Beside };
            list.push(Dispatch { order, ..dispatch });
        }
        self.run.append(&mut list);
    }

    fn batch_product(
        &self,
        products: &[&Product],
        name: &str,
        [bytes, scales, factors]: [Slice; 3],
    ) -> Dispatch {
        let first = products[0];
        let (tokens, shared) = batch_tokens(self.rows, first.x.width());
        let tiles = self.rows.div_ceil(tokens);
        let rows = |p: &Product| self.weight(p.weight).matrix.rows;
        let span = batch_span(tiles * products.iter().map(|p| rows(p).div_ceil(GROUP_ROWS)).sum::<usize>());
        let mut parts = [ProductPart { bias: NONE, ..ProductPart::default() }; MOST_PARTS];
        for (part, p) in parts.iter_mut().zip(products) {
            *part = self.part(p, GROUP_ROWS * span, span);
        }
        let groups = parts.iter().map(|part| part.groups).sum();
        let out = |i: usize| self.value(products.get(i).unwrap_or(&first).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(first), bytes, scales, factors, residual, out(0), out(1), out(2)];
        let has_residual = first.residual.is_some();
        let constants = &BatchProductsConstants { parts, tokens: self.rows, has_residual };
        let launch = Launch { unit: BATCHED_UNIT, kernel: "batch_products", buffers: &buffers, constants };
        Dispatch { shared, ..of_tokens(launch.over([groups, tiles, 1], THREADS), tokens, name) }
    }

    /// A product with a weight of plain floats.
    pub(super) fn batch_plain(&self, p: &Product) -> Dispatch {
        let (x, norm) = self.entering(p.x);
        let name = kernel_name(self.weight(p.weight).matrix.dtype, FastPath::Small).expect("plain floats");
        let residual = p.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(p), x, residual, self.value(p.out)];
        let (part, weight) = (self.part(p, PLAIN_ROWS, 1), self.norm_unit(norm));
        let (norm, tokens, has_residual) = (norm.into(), self.rows, p.residual.is_some());
        let constants = &BatchPlainConstants { part, norm, weight, tokens, has_residual };
        let launch = Launch { unit: "batch", kernel: "batch_plain", buffers: &buffers, constants };
        named(launch.over([part.groups, self.rows.div_ceil(PLAIN_TOKENS), 1], THREADS), name)
    }
}
