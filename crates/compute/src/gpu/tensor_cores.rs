//! Lowering to the kernels of `kernels/cuda`, for devices with tensor cores: products and attention of many rows.
//!
//! Activations enter as f16, each row scaled by a power of two, and weights are unpacked to f16; sums are f32. That is
//! closer to the weights' own values than activations of 8 bits, and is used where those would be: for products that
//! may be fast, of encodings and shapes that the kernels have. Everything else goes the common way.

use super::arguments::{
    ActivationConstants, LinearConstants, TensorAttentionConstants, TensorDownConstants,
    TensorGateUpConstants, TensorSortConstants, ToF16Constants,
};
use super::device::{BufferId, Dispatch, Grid, Slice};
use super::encodings::{FastPath, kernel_name};
use super::experts::ExpertMatrix;
use super::lower::{Launch, Lowering, named};
use super::weights::DeviceWeight;
use crate::DType;
use crate::graph::{
    Activation, Attention, ExpertMlp, ExpertSetId, Graph, LinearOp, MoeExpertsOp, Op, Precision, Value,
};

/// Tokens and weight rows of a tile.
const TILE: usize = 128;
const THREADS: u32 = 256;
/// Threadgroup memory of a product: three tiles of activations and two of weights, 64 columns of f16 each.
const GEMM_SHARED: u32 = 5 * 128 * 64 * 2;
/// Tokens of a tile of attention, and its threads.
const QUERIES: usize = 64;
const ATTENTION_THREADS: u32 = 128;

/// Memory of these kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorScratch {
    /// f16 copy of the activations of a product.
    pub(crate) x: BufferId,
    /// What each of its rows was divided by, f32.
    pub(crate) scale: BufferId,
    /// Tiles of pairs: (tiles, 4), u32.
    pub(crate) tiles: BufferId,
}

/// Bytes of [`TensorScratch`]'s buffers for batches of up to `rows` rows.
pub(crate) fn scratch_bytes(graph: &Graph, rows: usize) -> [usize; 3] {
    let (mut values, mut scales, mut tiles) = (4, rows, 1);
    for node in graph.nodes() {
        match node.op {
            Op::Linear(LinearOp { x, .. }) => values = values.max(rows * x.width()),
            Op::MoeExperts(MoeExpertsOp { x, routing, experts, .. }) => {
                let set = &graph.expert_sets()[experts.0];
                let pairs = rows * routing.top_k();
                values = values.max(rows * x.width()).max(pairs * set.width());
                scales = scales.max(pairs);
                tiles = tiles.max(most_tiles(pairs, set.experts));
            }
            _ => {}
        }
    }
    [values * 2, scales * 4, tiles * 16]
}

fn most_tiles(pairs: usize, experts: usize) -> usize {
    pairs / TILE + experts.min(pairs)
}

/// The kernels take columns in halves of a step of 64.
fn kernels_for(dtype: DType, cols: usize) -> Option<&'static str> {
    kernel_name(dtype, FastPath::Tensor).filter(|_| cols.is_multiple_of(32))
}

fn gemm(encoding: &str, launch: Launch<'_>, grid: [usize; 3]) -> Dispatch {
    Dispatch { shared: GEMM_SHARED, ..named(launch.over(grid, THREADS), encoding) }
}

/// What a product with a resident weight is made of.
pub(super) struct TensorLinear<'a> {
    pub(super) x: Value,
    pub(super) weight: &'a DeviceWeight,
    pub(super) bias: Option<Slice>,
    pub(super) residual: Option<Slice>,
    pub(super) precision: Precision,
    pub(super) out: Slice,
}

/// Routed experts of many tokens.
pub(super) struct TensorExperts<'a> {
    pub(super) x: Value,
    pub(super) ids: Slice,
    /// What rows of x count, a pair; all the same when absent.
    pub(super) weights: Option<Slice>,
    pub(super) top_k: usize,
    pub(super) set: ExpertSetId,
    pub(super) parts: &'a [ExpertMatrix; 3],
    pub(super) mlp: &'a ExpertMlp,
    /// Biases of gate, up and down.
    pub(super) biases: Option<[Slice; 3]>,
    /// (pairs, inner) and (pairs, hidden), f32.
    pub(super) products: Slice,
    pub(super) outputs: Slice,
}

impl Lowering<'_> {
    /// Writes x (rows, cols) as scaled f16.
    fn to_f16(&self, scratch: TensorScratch, x: Slice, [rows, cols]: [usize; 2]) -> Dispatch {
        let buffers = [x, scratch.x.into(), scratch.scale.into()];
        let constants = &ToF16Constants { rows, cols };
        Launch { unit: "cuda/prefill", kernel: "to_f16", buffers: &buffers, constants }
            .over([rows.div_ceil(8), 1, 1], THREADS)
    }

    /// Makes the scratch hold `x`, unless it does.
    fn convert(&mut self, scratch: TensorScratch, x: Value) -> Option<Dispatch> {
        if self.converted == Some(x) {
            return None;
        }
        self.converted = Some(x);
        Some(self.to_f16(scratch, self.value(x), [self.rows, x.width()]))
    }

    /// A linear layer; nothing if the kernels do not suit it.
    pub(super) fn tensor_linear(&mut self, l: &TensorLinear<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.tensor_scratch()?;
        let matrix = l.weight.matrix;
        let encoding = kernels_for(matrix.dtype, matrix.cols).filter(|_| l.precision == Precision::Fast)?;
        let mut list: Vec<Dispatch> = self.convert(scratch, l.x).into_iter().collect();
        let [a, b, c] = l.weight.planes;
        let none = self.input(0);
        let (bias, residual) = (l.bias.unwrap_or(none), l.residual.unwrap_or(none));
        let buffers = [scratch.x.into(), scratch.scale.into(), a, b, c, bias, residual, l.out];
        let constants = &LinearConstants {
            weight: l.weight.format,
            rows: matrix.rows,
            tokens: self.rows,
            has_bias: l.bias.is_some(),
            has_residual: l.residual.is_some(),
        };
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_linear", buffers: &buffers, constants };
        let grid = [matrix.rows.div_ceil(TILE), self.rows.div_ceil(TILE), 1];
        list.push(gemm(encoding, launch, grid));
        Some(list)
    }

    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn tensor_experts(&mut self, e: &TensorExperts<'_>) -> Option<Vec<Dispatch>> {
        let scratch = self.tensor_scratch()?;
        let [gate, up, down] = e.parts;
        let inner_encoding = kernels_for(gate.matrix.dtype, gate.matrix.cols);
        let inner_encoding = inner_encoding.filter(|_| gate.matrix.dtype == up.matrix.dtype)?;
        let outer_encoding = kernels_for(down.matrix.dtype, down.matrix.cols)?;
        let (inner, hidden, pairs) = (gate.matrix.rows, down.matrix.rows, self.rows * e.top_k);
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let [list, ..] = self.memory.scratch.buckets.map(Slice::from);
        let (x16, scale, tiles) = (scratch.x.into(), scratch.scale.into(), Slice::from(scratch.tiles));
        let experts = self.graph.expert_sets()[e.set.0].experts;
        let most = most_tiles(pairs, experts);
        // A body runs once for each of several groups of experts, so that nothing is left over from before it.
        self.converted = None;
        let mut body: Vec<Dispatch> = self.convert(scratch, e.x).into_iter().collect();

        let constants = &TensorSortConstants { pairs, experts, tiles: most, tokens: TILE };
        let buffers = [table, e.ids, list, tiles];
        let sort = Launch { unit: "cuda/prefill", kernel: "tensor_sort", buffers: &buffers, constants };
        body.push(sort.over([1, 1, 1], 1024));

        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([self.input(0); 3]);
        let has_bias = e.biases.is_some();
        let weights = e.weights.unwrap_or(self.input(0));
        let ActivationConstants { kind, alpha, limit } = e.mlp.activation.into();
        let constants = &TensorGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: e.top_k,
            has_bias,
            activation: kind,
            alpha,
            limit,
            weighs: e.weights.is_some(),
        };
        let buffers = [x16, scale, list, tiles, slots, table, weights, gate_bias, up_bias, e.products];
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_gate_up", buffers: &buffers, constants };
        let outputs = if e.mlp.activation == Activation::SquaredRelu { TILE } else { TILE / 2 };
        body.push(gemm(inner_encoding, launch, [inner.div_ceil(outputs), most, 1]));

        self.converted = None;
        body.push(self.to_f16(scratch, e.products, [pairs, inner]));
        let constants = &TensorDownConstants { part: down.part, has_bias };
        let buffers = [x16, scale, list, tiles, slots, table, down_bias, e.outputs];
        let launch = Launch { unit: "cuda/gemm", kernel: "tensor_down", buffers: &buffers, constants };
        body.push(gemm(outer_encoding, launch, [hidden.div_ceil(TILE), most, 1]));
        Some(body)
    }

    /// Attention of many rows over f16 pages; nothing if the kernels do not suit it.
    pub(super) fn tensor_attention(
        &self,
        shape: &Attention,
        [q, keys, values, out]: [Slice; 4],
        sinks: Option<Slice>,
    ) -> Option<Dispatch> {
        self.tensor_scratch()?;
        let kernel = match shape.head_dim {
            64 => "tensor_attention_64",
            128 => "tensor_attention_128",
            256 => "tensor_attention_256",
            _ => return None,
        };
        if self.f32_cache() || shape.chunk.is_some() || shape.value_dim != shape.head_dim {
            return None;
        }
        let (sequences, places) = (self.input(self.layout.sequences), self.input(self.layout.places));
        let none = self.input(0);
        let buffers = [q, keys, values, sequences, places, self.pages(), sinks.unwrap_or(none), out];
        let window = shape.window.and_then(|w| u32::try_from(w).ok()).unwrap_or(0);
        let scale = shape.scale * std::f32::consts::LOG2_E;
        let constants = &TensorAttentionConstants {
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            sequences: self.shape.sequences,
            window,
            scale,
            has_sinks: sinks.is_some(),
        };
        // Keys and values of a page; queries too, where registers do not hold them.
        let tiles = if shape.head_dim > 128 { 3 } else { 2 };
        let shared = (tiles * QUERIES * shape.head_dim * 2) as u32;
        let most = self.rows / QUERIES + self.shape.sequences;
        let launch = Launch { unit: "cuda/flash_attention", kernel, buffers: &buffers, constants };
        let grid = Grid::Fixed([most as u32, shape.heads as u32, 1]);
        Some(Dispatch { shared, ..launch.on(grid, ATTENTION_THREADS) })
    }

    /// Memory for these kernels, if they are to be used for the batch.
    fn tensor_scratch(&self) -> Option<TensorScratch> {
        self.memory.tensor.filter(|_| self.rows > super::inputs::FEW_ROWS)
    }
}
