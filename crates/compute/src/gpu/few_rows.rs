//! Lowering to the kernels of `kernels/few_rows.h`: products of few rows with resident weights.
//!
//! Products of one input that follow each other become one dispatch. A norm that only such products and routed experts
//! read becomes part of each of them: every group normalises the row for itself, which is cheaper than a dispatch.

use super::arguments::{NormConstants, PlainConstants, ProductPart, ProductsConstants};
use super::device::{Dispatch, Slice};
use super::early::EARLY_UNIT;
use super::encodings::{FastPath, kernel_name};
use super::inputs::FEW_ROWS;
use super::lower::{Launch, Lowering, named};
use super::steps::Step;
use super::weights::{ALIGNMENT, DeviceWeight};
use crate::DType;
use crate::backend::ActivationMode;
use crate::graph::{Precision, Value, WeightId};

/// Columns that share a scale.
pub(super) const BLOCK: usize = 32;
const THREADS: u32 = 256;
pub(super) const WARPS: usize = 8;
/// Outputs of a group of a product of plain floats: one where there are few rows, else so many.
const PLAIN_ROWS: usize = 4;
const FEW_PLAIN_ROWS: usize = 512;
/// `MOST_COLUMNS` of `kernels/activations.h`.
pub(super) const MOST_COLUMNS: usize = 8192;
/// Products of one dispatch, at most.
const MOST_PARTS: usize = 3;
/// Groups that a large device runs at once: beyond, warps make more outputs each.
const GROUPS: usize = 264;
/// Stands for a weight that is not there.
const NONE: u32 = u32::MAX;

/// The end of the kernels' names for an encoding that is multiplied with activations of eight bits.
fn encoding(dtype: DType) -> Option<&'static str> {
    kernel_name(dtype, FastPath::Bytes)
}

/// Whether the kernel for several encodings has one.
fn mixes(dtype: DType) -> bool {
    !matches!(dtype, DType::Q4_0 | DType::Q5_0 | DType::MXFP4 | DType::MXFP4_Planes)
}

/// The end of the name of the kernel for products with weights of one encoding, or of several.
fn products(mut encodings: impl Iterator<Item = DType>) -> &'static str {
    let first = encodings.next().and_then(encoding);
    first.filter(|first| encodings.all(|dtype| encoding(dtype) == Some(*first))).unwrap_or("mixed")
}

/// Columns of which a warp's lanes have a piece each.
pub(super) fn columns_at_once(dtype: DType) -> usize {
    if is_super_block(dtype) { 2048 } else { 1024 }
}

/// Whether it is one of blocks of 256 columns, of which a lane takes 64 at once.
pub(super) fn is_super_block(dtype: DType) -> bool {
    dtype.block_len() == 256
}

/// What a row costs beside others: more where its bytes lie across words.
fn cost(dtype: DType) -> usize {
    if dtype == DType::Q6_K { 2 } else { 1 }
}

/// A product with a resident weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct FewLinear {
    pub(super) x: Value,
    pub(super) weight: WeightId,
    pub(super) bias: Option<WeightId>,
    pub(super) residual: Option<Value>,
    pub(super) precision: Precision,
    pub(super) out: Value,
}

/// A norm that is made where its result is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Norm {
    pub(super) x: Value,
    pub(super) weight: WeightId,
    pub(super) eps: f32,
}

impl From<Option<Norm>> for NormConstants {
    fn from(norm: Option<Norm>) -> Self {
        Self { has_norm: norm.is_some(), eps: norm.map_or(0.0, |norm| norm.eps) }
    }
}

/// Where a weight begins, in units of [`ALIGNMENT`] bytes from the start of the buffer that all weights share.
fn unit(at: Slice) -> u32 {
    u32::try_from(at.offset / ALIGNMENT).expect("weights of less than a terabyte")
}

impl Lowering<'_> {
    /// Whether the kernels for few rows may be used: they find weights by where they begin in one buffer, in which those
    /// that a device uses where they are do not lie. No product is made with those that are far.
    pub(super) fn is_few(&self) -> bool {
        let suits = |weight: &DeviceWeight| weight.common || weight.far;
        self.rows <= FEW_ROWS && self.memory.weights.iter().all(suits)
    }

    /// Whether products of a width may take activations of eight bits.
    pub(super) fn takes_bytes(&self, dtype: DType, cols: usize) -> Option<&'static str> {
        let bytes = self.is_few() && self.memory.activations == ActivationMode::Int8;
        encoding(dtype).filter(|_| bytes && cols.is_multiple_of(BLOCK) && cols <= MOST_COLUMNS)
    }

    /// Whether a product is one of 8-bit activations, or of plain floats.
    fn enters(&self, weight: WeightId, precision: Precision) -> Option<bool> {
        let matrix = self.weight(weight).matrix;
        if precision == Precision::Fast && self.takes_bytes(matrix.dtype, matrix.cols).is_some() {
            return Some(true);
        }
        let fits = self.is_few() && matrix.cols.is_multiple_of(8) && matrix.cols <= MOST_COLUMNS;
        kernel_name(matrix.dtype, FastPath::Plain).filter(|_| fits).map(|_| false)
    }

    /// Leaves a norm to the products that read it, if all of them can make it.
    pub(super) fn defer_norm(&mut self, norm: Norm, out: Value) -> bool {
        let can = |step: &Step| match *step {
            Step::Linear { x, weight, precision, residual, .. } => {
                x == out && residual != Some(out) && self.enters(weight, precision).is_some()
            }
            Step::MoeExperts { x, experts, residual, .. } => {
                x == out && residual != Some(out) && self.few_encodings(experts).is_some()
            }
            _ => false,
        };
        let mut readers = self.steps.iter().filter(|step| step.inputs().contains(&out));
        let deferred = self.is_few() && norm.x.width().is_multiple_of(BLOCK) && readers.all(can);
        if deferred {
            self.norms.insert(out, norm);
        }
        deferred
    }

    /// What a kernel reads for `x`, with the norm that it makes itself.
    pub(super) fn entering(&self, x: Value) -> (Slice, Option<Norm>) {
        match self.norms.get(&x) {
            Some(norm) => (self.value(norm.x), Some(*norm)),
            None => (self.value(x), None),
        }
    }

    /// Makes a product, perhaps together with those that follow; false if the kernels do not suit it.
    pub(super) fn few_linear(&mut self, p: FewLinear) -> bool {
        let Some(bytes) = self.enters(p.weight, p.precision) else { return false };
        if !bytes {
            self.flush_products();
            let dispatch = self.plain_product(&p);
            self.run.push(dispatch);
            return true;
        }
        let dtype = |p: &FewLinear| self.weight(p.weight).matrix.dtype;
        let fits = |w: &FewLinear| dtype(w) == dtype(&p) || (mixes(dtype(w)) && mixes(dtype(&p)));
        let joins = self.waiting.len() < MOST_PARTS
            && self.waiting.iter().chain([&p]).all(|w| w.x == p.x && w.residual.is_none() && fits(w));
        if !joins {
            self.flush_products();
        }
        self.waiting.push(p);
        true
    }

    /// A product whose groups make `each` outputs, or whose warps make `span`.
    fn part(&self, p: &FewLinear, each: usize, span: usize) -> ProductPart {
        let DeviceWeight { matrix, format, planes, .. } = *self.weight(p.weight);
        let bias = p.bias.map_or(NONE, |bias| unit(self.weight(bias).planes[0]));
        let groups = matrix.rows.div_ceil(each);
        ProductPart { format, planes: planes.map(unit), bias, rows: matrix.rows, groups, span }
    }

    /// The buffer of all weights.
    fn all_weights(&self, p: &FewLinear) -> Slice {
        self.weight(p.weight).planes[0].buffer.into()
    }

    fn norm_unit(&self, norm: Option<Norm>) -> u32 {
        norm.map_or(NONE, |norm| unit(self.weight(norm.weight).planes[0]))
    }

    fn plain_product(&self, p: &FewLinear) -> Dispatch {
        let (x, norm) = self.entering(p.x);
        let rows = self.weight(p.weight).matrix.rows;
        let name = kernel_name(self.weight(p.weight).matrix.dtype, FastPath::Plain).expect("plain floats");
        let (kernel, each) = if rows <= FEW_PLAIN_ROWS { ("product", 1) } else { ("products", PLAIN_ROWS) };
        let buffers =
            [self.all_weights(p), x, p.residual.map_or(self.input(0), |r| self.value(r)), self.value(p.out)];
        let (part, weight) = (self.part(p, each, 1), self.norm_unit(norm));
        let constants =
            PlainConstants { part, norm: norm.into(), weight, has_residual: p.residual.is_some() };
        let launch = Launch { unit: "few_rows", kernel, buffers: &buffers, constants: &constants };
        named(launch.over([part.groups, self.rows, 1], THREADS), name)
    }

    /// Queues the products that wait for others of their input.
    pub(super) fn flush_products(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        let Some(first) = waiting.first() else { return };
        let (x, norm) = self.entering(first.x);
        let matrices = waiting.iter().map(|p| self.weight(p.weight).matrix);
        let name = products(matrices.clone().map(|matrix| matrix.dtype));
        let work: usize = matrices.map(|matrix| matrix.rows * cost(matrix.dtype)).sum();
        let span = |p: &FewLinear| {
            let dtype = self.weight(p.weight).matrix.dtype;
            // A warp has two rows at a time, but one of a long row.
            let at_once = if first.x.width() > columns_at_once(dtype) { 1 } else { 2 };
            work.div_ceil(WARPS * GROUPS * cost(dtype)).next_multiple_of(at_once)
        };
        let spans: Vec<(FewLinear, usize)> = waiting.iter().map(|p| (*p, span(p))).collect();
        let mut parts = [ProductPart { bias: NONE, ..ProductPart::default() }; MOST_PARTS];
        for (part, (p, span)) in parts.iter_mut().zip(&spans) {
            *part = self.part(p, WARPS * span, *span);
        }
        let groups = parts.iter().map(|part| part.groups).sum();
        let out = |i: usize| self.value(waiting.get(i).unwrap_or(first).out);
        let residual = first.residual.map_or(self.input(0), |r| self.value(r));
        let buffers = [self.all_weights(first), x, residual, out(0), out(1), out(2)];
        let weight = self.norm_unit(norm);
        let has_residual = first.residual.is_some();
        let constants = &ProductsConstants { parts, norm: norm.into(), weight, has_residual };
        let (unit, kernel, name, shared) = match self.early_products(&spans) {
            Some((name, shared)) => (EARLY_UNIT, "early_products", name, shared),
            None => ("few_rows", "products", name, 0),
        };
        let launch = Launch { unit, kernel, buffers: &buffers, constants };
        let dispatch = named(launch.over([groups, self.rows, 1], THREADS), name);
        self.run.push(Dispatch { shared, ..dispatch });
    }
}
