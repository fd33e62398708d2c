//! Lowering to the kernels of `kernels/few_rows.h`: products of few rows with resident weights.
//!
//! Products of one input that follow each other become one dispatch. A norm that only such products and routed experts
//! read becomes part of each of them: every group normalises the row for itself, which is cheaper than a dispatch.

use super::joint::LEAST_AGAIN;
use super::pieces::{Tokens, cost, rows_at_once};
use crate::DType;
use crate::gpu::arguments::{PlainConstants, ProductPart, ProductsConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::encodings::{FastPath, kernel_name};
use crate::gpu::kernels::EARLY_UNIT;
use crate::gpu::lower::bytes::encoding;
use crate::gpu::lower::context::{DeferredNorm, Launch, Lowering, Product, Siblings, WARPS, named};
use crate::gpu::lower::tensor::kernels_for;
use crate::gpu::memory::{ALIGNMENT, DeviceWeight, FEW_ROWS, SCALED_COLUMNS};
use crate::gpu::steps::Step;
use crate::graph::{Precision, Value, WeightId};

const THREADS: u32 = 256;
/// Outputs of a group of a product of plain floats: one where there are few rows, else so many.
const PLAIN_ROWS: usize = 4;
const FEW_PLAIN_ROWS: usize = 512;
/// Products of one dispatch, at most.
pub(super) const MOST_PARTS: usize = 3;
/// Groups that a large device runs at once: beyond, warps make more outputs each.
const GROUPS: usize = 264;
/// Stands for a weight that is not there.
pub(super) const NONE: u32 = u32::MAX;

/// Whether the kernel for several encodings has one.
fn mixes(dtype: DType) -> bool {
    use DType::{Affine, Int, Q4_K, Q5_K, Q6_K, Q8_0};
    matches!(dtype, Q4_K | Q5_K | Q6_K | Q8_0 | Affine { .. } | Int { .. })
}

/// The end of the name of the kernel for products with weights of one encoding, or of several.
fn products(mut encodings: impl Iterator<Item = DType>) -> &'static str {
    let first = encodings.next().and_then(encoding);
    first.filter(|first| encodings.all(|dtype| encoding(dtype) == Some(*first))).unwrap_or("mixed")
}

/// Where a weight begins, in units of [`ALIGNMENT`] bytes from the start of the buffer that all weights share.
fn unit(at: Slice) -> u32 {
    u32::try_from(at.offset / ALIGNMENT).expect("weights of less than a terabyte")
}

impl Lowering<'_> {
    /// Whether a product is one of 8-bit activations or of panels, or one of plain floats.
    pub(in crate::gpu::lower) fn enters(&self, weight: WeightId, precision: Precision) -> Option<bool> {
        let matrix = self.weight(weight).matrix;
        if precision == Precision::Fast && self.takes_bytes(matrix.dtype, matrix.cols).is_some() {
            return Some(true);
        }
        // Panels unpack any encoding; small ones of plain floats are better multiplied as they are.
        if precision == Precision::Fast && self.panel_scratch().is_some() {
            let small = matrix.rows <= FEW_PLAIN_ROWS && kernel_name(matrix.dtype, FastPath::Plain).is_some();
            let fits = matrix.cols.is_multiple_of(SCALED_COLUMNS) && !small;
            if fits && kernel_name(matrix.dtype, FastPath::Tensor).is_some() {
                return Some(true);
            }
        }
        // In a batch, weights of many rows are better multiplied as f16 if they may be.
        let few = matrix.rows <= FEW_PLAIN_ROWS || precision != Precision::Fast || self.rows <= FEW_ROWS;
        let batch = self.is_batch() && few;
        let fits = (self.is_few() || batch) && matrix.cols.is_multiple_of(8);
        let path = if matrix.rows <= FEW_PLAIN_ROWS { FastPath::Small } else { FastPath::Plain };
        kernel_name(matrix.dtype, path).filter(|_| fits).map(|_| false)
    }

    /// Leaves a norm to the products that read it, if all of them can make it. One that none reads is the result.
    pub(in crate::gpu::lower) fn defer_norm(&mut self, norm: DeferredNorm, out: Value) -> bool {
        let can = |step: &Step| match *step {
            Step::Linear { x, weight, precision, residual, .. } => {
                x == out && residual != Some(out) && self.enters(weight, precision).is_some()
            }
            Step::MoeExperts { x, experts, residual, mlp, .. } => {
                let reads = x == out && residual != Some(out) && mlp.identities == 0;
                let few = self.few_encodings(experts).or_else(|| self.float_encodings(experts));
                reads && few.is_some()
            }
            _ => false,
        };
        let can_wide = |step: &Step| match *step {
            Step::Linear { x, weight, precision: Precision::Fast, residual, .. } => {
                let matrix = self.weight(weight).matrix;
                x == out && residual != Some(out) && kernels_for(matrix.dtype, matrix.cols).is_some()
            }
            _ => false,
        };
        let few = self.is_few() || self.is_batch();
        let suits = (few || self.wide_scratch().is_some()) && norm.x.width().is_multiple_of(SCALED_COLUMNS);
        let is_read = self.readers(out).next().is_some();
        let deferred =
            suits && is_read && self.readers(out).all(|step| if few { can(step) } else { can_wide(step) });
        if deferred {
            self.norms.insert(out, norm);
        }
        deferred
    }

    /// Makes a product, perhaps together with those that follow; else, if the kernels do not suit it, returns those before it.
    pub(super) fn few_linear(&mut self, p: Product, before: Siblings) -> Option<Siblings> {
        if self.batch_is_wide(&p) {
            return Some(before);
        }
        let Some(bytes) = self.enters(p.weight, p.precision) else { return Some(before) };
        if !bytes {
            self.flush_products();
            let joint = || self.is_batch() || self.reads_again(&p);
            let kept = self.kept_product(&p);
            let other = || if joint() { self.batch_plain(&p) } else { self.plain_product(&p) };
            let dispatch = kept.unwrap_or_else(other);
            self.push_product(&p, before, None, dispatch);
            return None;
        }
        let dtype = |p: &Product| self.weight(p.weight).matrix.dtype;
        let fits = |w: &Product| dtype(w) == dtype(&p) || (mixes(dtype(w)) && mixes(dtype(&p)));
        // A batch has a dispatch for each encoding anyway.
        let fits = |w: &Product| self.is_batch() || fits(w);
        let joins = self.waiting.len() < MOST_PARTS
            && self.waiting.iter().chain([&p]).all(|w| w.x == p.x && w.residual.is_none() && fits(w));
        if !joins {
            self.flush_products();
        }
        self.waiting.push(p);
        None
    }

    /// A product whose groups make `each` outputs, or whose warps make `span`.
    pub(super) fn part(&self, p: &Product, each: usize, span: usize) -> ProductPart {
        let DeviceWeight { matrix, format, planes, .. } = *self.weight(p.weight);
        let bias = p.bias.map_or(NONE, |bias| unit(self.weight(bias).planes[0]));
        let groups = matrix.rows.div_ceil(each);
        ProductPart { format, planes: planes.map(unit), bias, rows: matrix.rows, groups, span }
    }

    /// The buffer of all weights.
    pub(super) fn all_weights(&self, p: &Product) -> Slice {
        self.weight(p.weight).planes[0].buffer.into()
    }

    pub(in crate::gpu::lower) fn norm_unit(&self, norm: Option<DeferredNorm>) -> u32 {
        norm.map_or(NONE, |norm| unit(self.weight(norm.weight).planes[0]))
    }

    fn plain_product(&self, p: &Product) -> Dispatch {
        self.plain_product_of(p, self.entering(p.x), self.value(p.out))
    }

    /// The same of another input, to another place.
    pub(in crate::gpu::lower) fn plain_product_of(
        &self,
        p: &Product,
        (x, norm): (Slice, Option<DeferredNorm>),
        out: Slice,
    ) -> Dispatch {
        let rows = self.weight(p.weight).matrix.rows;
        let name = kernel_name(self.weight(p.weight).matrix.dtype, FastPath::Small).expect("plain floats");
        let (kernel, each) = if rows <= FEW_PLAIN_ROWS { ("product", 1) } else { ("products", PLAIN_ROWS) };
        let buffers = [self.all_weights(p), x, p.residual.map_or(self.input(0), |r| self.value(r)), out];
        let (part, weight) = (self.part(p, each, 1), self.norm_unit(norm));
        let constants =
            PlainConstants { part, norm: norm.into(), weight, has_residual: p.residual.is_some() };
        let launch = Launch { unit: "few_rows", kernel, buffers: &buffers, constants: &constants };
        named(launch.over([part.groups, self.rows, 1], THREADS), name)
    }

    /// Whether rows had better share a weight of plain floats, with the same bits.
    fn reads_again(&self, p: &Product) -> bool {
        let matrix = self.weight(p.weight).matrix;
        let bytes = matrix.rows * matrix.dtype.row_bytes(0, matrix.cols).unwrap_or(0);
        matrix.rows > FEW_PLAIN_ROWS && bytes.saturating_mul(self.rows - 1) >= LEAST_AGAIN
    }

    /// Products of one input with the rows that a warp makes of each.
    pub(super) fn spans(&self, products: &[Product], tokens: Tokens) -> Vec<(Product, usize)> {
        let matrices = products.iter().map(|p| self.weight(p.weight).matrix);
        let work: usize = matrices.map(|matrix| matrix.rows * cost(matrix.dtype)).sum();
        let span = |p: &Product| {
            let dtype = self.weight(p.weight).matrix.dtype;
            let span = work.div_ceil(WARPS * GROUPS * cost(dtype));
            span.next_multiple_of(rows_at_once(dtype, p.x.width(), tokens, span))
        };
        products.iter().map(|p| (*p, span(p))).collect()
    }

    /// The parts of their dispatch, and the end of the name of its kernel.
    pub(super) fn parts(&self, spans: &[(Product, usize)]) -> ([ProductPart; MOST_PARTS], &'static str) {
        let mut parts = [ProductPart { bias: NONE, ..ProductPart::default() }; MOST_PARTS];
        for (part, (p, span)) in parts.iter_mut().zip(spans) {
            *part = self.part(p, WARPS * span, *span);
        }
        (parts, products(spans.iter().map(|(p, _)| self.weight(p.weight).matrix.dtype)))
    }

    /// Queues the products that wait for others of their input, and what adapters add to them.
    pub(in crate::gpu::lower) fn flush_products(&mut self) {
        self.queue_products();
        self.queue_updates();
    }

    fn queue_products(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let Some(first) = waiting.first() else { return };
        if let Some(scratch) = self.panel_scratch() {
            return self.panel_products(&waiting, scratch);
        }
        if self.enters_as_batch(first.x) {
            return self.batch_products(&waiting);
        }
        let spans = self.spans(&waiting, Tokens::One);
        let early = self.early_products(&spans);
        if let Some(shares) = self.joint_shares(&spans, early.is_some()) {
            return self.joint_products(&self.spans(&waiting, Tokens::Several), shares);
        }
        let (x, norm) = self.entering(first.x);
        let (parts, name) = self.parts(&spans);
        let groups = parts.iter().map(|part| part.groups).sum();
        let out = |i: usize| self.value(waiting.get(i).unwrap_or(first).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(first), x, residual, out(0), out(1), out(2)];
        let weight = self.norm_unit(norm);
        let has_residual = first.residual.is_some();
        let constants = &ProductsConstants { parts, norm: norm.into(), weight, has_residual };
        let (unit, kernel, name, shared) = match early {
            Some((name, shared)) => (EARLY_UNIT, "early_products", name, shared),
            None => ("few_rows", "products", name, 0),
        };
        let launch = Launch { unit, kernel, buffers: &buffers, constants };
        let dispatch = named(launch.over([groups, self.rows, 1], THREADS), name);
        self.run.push(Dispatch { shared, ..dispatch });
    }
}
