//! Lowering to the kernels of `kernels/few_rows.h`: products of few rows, with activations of eight bits where those may
//! be used, and wide loads of plain floats.

use super::device::{BufferId, Dispatch, Slice, Words};
use super::experts::Part;
use super::inputs::FEW_ROWS;
use super::lower::{Launch, Lowering};
use super::weights::DeviceWeight;
use crate::DType;
use crate::backend::ActivationMode;
use crate::graph::{Activation, ExpertMlp, ExpertSetId, Graph, Op, Precision, Value};

/// Columns that share a scale.
const BLOCK: usize = 32;
const THREADS: u32 = 256;
const WARPS: usize = 8;

/// Memory for activations of eight bits: their bytes, then scale and sum of each block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized {
    pub(crate) bytes: BufferId,
    pub(crate) scales: BufferId,
}

/// Copies of values that are kept at once: a layer's input stays while another product is made.
pub(crate) const COPIES: usize = 2;

/// Bytes of the copies' and of the experts' products' memory: bytes and scales of each.
pub(crate) fn scratch_bytes(graph: &Graph, rows: usize) -> [[usize; 2]; COPIES + 1] {
    let rows = rows.min(FEW_ROWS);
    let (mut widest, mut products) = (BLOCK, BLOCK);
    for node in graph.nodes() {
        match node.op {
            Op::Linear { x, .. } => widest = widest.max(x.width()),
            Op::MoeExperts { x, routing, experts, .. } => {
                widest = widest.max(x.width());
                products = products.max(routing.top_k() * graph.expert_sets()[experts.0].gate.rows);
            }
            _ => {}
        }
    }
    let sizes = |width: usize| [rows * width, rows * width.div_ceil(BLOCK) * 8];
    [sizes(widest), sizes(widest), sizes(products)]
}

/// The end of the kernels' names for an encoding, if they have it.
fn encoding(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::Q4_K => "q4_k",
        DType::Q5_K => "q5_k",
        DType::Q6_K => "q6_k",
        DType::Q8_0 => "q8_0",
        DType::Affine { bits: 4, .. } => "affine4",
        DType::Affine { bits: 8, .. } => "affine8",
        _ => return None,
    })
}

/// The same for plain floats.
fn plain(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("matvec_f32"),
        DType::F16 => Some("matvec_f16"),
        DType::BF16 => Some("matvec_bf16"),
        _ => None,
    }
}

/// A product with a resident weight.
pub(super) struct FewLinear<'a> {
    pub(super) x: Value,
    pub(super) weight: &'a DeviceWeight,
    pub(super) bias: Option<Slice>,
    pub(super) residual: Option<Slice>,
    pub(super) precision: Precision,
    pub(super) out: Slice,
}

/// Routed experts with their sum.
pub(super) struct FewExperts<'a> {
    pub(super) x: Value,
    pub(super) set: ExpertSetId,
    pub(super) ids: Slice,
    pub(super) weights: Slice,
    pub(super) top_k: usize,
    pub(super) parts: &'a [Part; 3],
    pub(super) mlp: &'a ExpertMlp,
    /// Biases of gate, up and down.
    pub(super) biases: Option<[Slice; 3]>,
    pub(super) residual: Option<Slice>,
    /// (pairs, inner) and (pairs, hidden), f32.
    pub(super) products: Slice,
    pub(super) outputs: Slice,
    pub(super) out: Slice,
}

/// Dispatches of routed experts.
pub(super) struct FewBody {
    pub(super) body: Vec<Dispatch>,
    /// Whether they make the weighted sum; else the outputs of pairs.
    pub(super) summed: bool,
}

impl Lowering<'_> {
    fn is_few(&self) -> bool {
        self.rows <= FEW_ROWS
    }

    fn eight_bits(&self) -> bool {
        self.is_few() && self.memory.activations == ActivationMode::Int8
    }

    /// Whether products with such a weight take activations of eight bits.
    fn takes_bytes(&self, dtype: DType, cols: usize) -> Option<&'static str> {
        encoding(dtype).filter(|_| self.eight_bits() && cols.is_multiple_of(BLOCK))
    }

    /// Whether a later product of the same batch takes `x` as bytes.
    fn wanted_as_bytes(&self, x: Value) -> bool {
        self.eight_bits()
            && x.width().is_multiple_of(BLOCK)
            && self.graph.nodes.iter().any(|node| match node.op {
                Op::Linear { x: input, weight, precision: Precision::Fast, .. } => {
                    input == x && encoding(self.graph.weights[weight.0].matrix.dtype).is_some()
                }
                Op::MoeExperts { x: input, experts, .. } => {
                    input == x && encoding(self.graph.expert_sets[experts.0].gate.dtype).is_some()
                }
                _ => false,
            })
    }

    /// Memory for a copy of `x`, and whether it holds that already.
    fn copy_of(&mut self, x: Value) -> ([Slice; 2], bool) {
        let held = self.copies.iter().position(|copy| *copy == Some(x));
        let index = held.unwrap_or_else(|| {
            self.next_copy = (self.next_copy + 1) % COPIES;
            self.next_copy
        });
        self.copies[index] = Some(x);
        let Quantized { bytes, scales } = self.memory.quantized[index];
        ([bytes.into(), scales.into()], held.is_some())
    }

    /// Memory for a copy of `x`, whose heads of `dim` channels a kernel will fill, if products want it.
    pub(super) fn few_copy(&mut self, x: Value, dim: usize) -> Option<[Slice; 2]> {
        let wanted = dim.is_multiple_of(BLOCK) && self.wanted_as_bytes(x);
        wanted.then(|| self.copy_of(x).0)
    }

    /// A copy of `x`, made now if there is none.
    fn quantized(&mut self, x: Value) -> [Slice; 2] {
        let (copy, held) = self.copy_of(x);
        if !held {
            let blocks = self.rows * x.width() / BLOCK;
            let buffers = [self.value(x), copy[0], copy[1]];
            let launch =
                Launch { unit: "few_rows", kernel: "quantize", buffers: &buffers, constants: &[&blocks] };
            let dispatch = launch.over([blocks.div_ceil(WARPS), 1, 1], THREADS);
            self.run.push(dispatch);
        }
        copy
    }

    /// A norm of whole rows that leaves its result as bytes too, if products want that.
    pub(super) fn few_norm(&mut self, x: Value, weight: Slice, eps: f32, out: Value) -> Option<Dispatch> {
        if !self.wanted_as_bytes(out) {
            return None;
        }
        let (copy, _) = self.copy_of(out);
        let buffers = [self.value(x), weight, self.value(out), copy[0], copy[1]];
        let constants: &[&dyn Words] = &[&x.width(), &eps];
        let launch = Launch { unit: "few_rows", kernel: "rms_norm_quantized", buffers: &buffers, constants };
        Some(launch.over([self.rows, 1, 1], THREADS))
    }

    pub(super) fn few_linear(&mut self, p: &FewLinear<'_>) -> Option<Dispatch> {
        if !self.is_few() {
            return None;
        }
        let matrix = p.weight.matrix;
        let none = self.input(0);
        let (bias, residual) = (p.bias.unwrap_or(none), p.residual.unwrap_or(none));
        let (has_bias, has_residual) = (p.bias.is_some(), p.residual.is_some());
        let constants: &[&dyn Words] = &[&p.weight.format, &matrix.rows, &has_bias, &has_residual];
        if let Some(kernel) = plain(matrix.dtype) {
            if !matrix.cols.is_multiple_of(8) {
                return None;
            }
            let buffers = [p.weight.planes[0], self.value(p.x), bias, residual, p.out];
            let launch = Launch { unit: "few_rows", kernel, buffers: &buffers, constants };
            return Some(launch.over([matrix.rows.div_ceil(WARPS), self.rows, 1], THREADS));
        }
        let name = self.takes_bytes(matrix.dtype, matrix.cols).filter(|_| p.precision == Precision::Fast)?;
        let [bytes, scales] = self.quantized(p.x);
        let [a, b, c] = p.weight.planes;
        let buffers = [a, b, c, bytes, scales, bias, residual, p.out];
        let launch = Launch { unit: "few_rows", kernel: "matvec8", buffers: &buffers, constants };
        let dispatch = launch.over([matrix.rows.div_ceil(2 * WARPS), self.rows, 1], THREADS);
        Some(named(dispatch, name))
    }

    pub(super) fn few_experts(&mut self, e: &FewExperts<'_>) -> Option<FewBody> {
        let [gate, up, down] = e.parts;
        let name = self.takes_bytes(gate.matrix.dtype, gate.matrix.cols)?;
        let down_name = self.takes_bytes(down.matrix.dtype, down.matrix.cols)?;
        if up.matrix.dtype != gate.matrix.dtype {
            return None;
        }
        let pairs = self.rows * e.top_k;
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set));
        let [x_bytes, x_scales] = self.quantized(e.x);
        let Quantized { bytes, scales } = self.memory.quantized[COPIES];
        let (bytes, scales) = (Slice::from(bytes), Slice::from(scales));
        let none = self.input(0);
        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([none; 3]);
        let has_bias = e.biases.is_some();
        let (activation, alpha, limit) = match e.mlp.activation {
            Activation::SwiGlu => (0u32, 0.0, 0.0),
            Activation::ClampedSwiGlu { alpha, limit } => (1, alpha, limit),
        };
        let buffers = [slots, table, e.ids, x_bytes, x_scales, gate_bias, up_bias, e.products, bytes, scales];
        let constants: &[&dyn Words] = &[gate, up, &e.top_k, &activation, &alpha, &limit, &has_bias];
        let launch = Launch { unit: "few_rows", kernel: "gate_up8", buffers: &buffers, constants };
        let first = named(launch.over([gate.matrix.rows / BLOCK, pairs, 1], THREADS), name);

        // Where not all experts of a token may be there at once, their outputs are summed when all have been.
        let summed = self.memory.experts.room(e.set) >= pairs.min(self.graph.expert_sets[e.set.0].experts);
        let (to, count) = if summed { (e.out, self.rows) } else { (e.outputs, pairs) };
        let residual = e.residual.unwrap_or(none);
        let buffers = [slots, table, e.ids, bytes, scales, e.weights, down_bias, residual, to];
        let has_residual = e.residual.is_some();
        let constants: &[&dyn Words] = &[down, &e.top_k, &summed, &has_bias, &has_residual];
        let launch = Launch { unit: "few_rows", kernel: "down8", buffers: &buffers, constants };
        let second = named(launch.over([down.matrix.rows.div_ceil(WARPS), count, 1], THREADS), down_name);
        Some(FewBody { body: vec![first, second], summed })
    }
}

fn named(dispatch: Dispatch, encoding: &str) -> Dispatch {
    Dispatch { kernel: format!("{}_{encoding}", dispatch.kernel).into(), ..dispatch }
}
