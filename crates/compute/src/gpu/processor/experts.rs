//! [`HandedSet`]: the products of routed experts by the processor, with the bits of `kernels/few_experts.h` and `kernels/floats.h`.

use std::ops::Range;
use std::sync::Mutex;

use super::desk::{Desk, HandedPair, RowForm};
use super::rows::{HandedRows, Product, RowsWriter};
use crate::cpu::Simd;
use crate::cpu::activate::activate;
use crate::cpu::activations::BLOCK;
use crate::cpu::matmul::NextJob;
use crate::cpu::matmul::eights::has_eights;
use crate::cpu::matmul::pieces::{has_pieces, pieces_of};
use crate::cpu::pool::ThreadPool;
use crate::cpu::shared::SharedMut;
use crate::gpu::memory::{ExpertMatrix, FEW_ROWS};
use crate::graph::{Activation, ExpertMlp, Graph, MatrixSpec, MoeExpertsOp, Op, Weighted};
use crate::{Result, Tensor, TensorView};

/// Rows of down that a task makes.
const DOWN_ROWS: usize = 32;

/// Whether the processor has a device's bits for experts of these matrices, with rows of this form.
fn has_bits(mut matrices: impl Iterator<Item = MatrixSpec>, form: RowForm, mlp: &ExpertMlp) -> bool {
    let simd = Simd::detect();
    let has = match form {
        RowForm::Bytes => has_pieces,
        RowForm::Floats => has_eights,
    };
    let known = matrices.all(|m| has(simd, m.dtype, m.cols) && m.cols.is_multiple_of(BLOCK));
    known && mlp.activation.is_gated() && mlp.weighted != Weighted::Input
}

/// Whether the processor may compute some of a graph's routed experts beside a GPU that computes the others: of all of them it must
/// have the GPU's bits.
pub fn computes_experts(graph: &Graph) -> bool {
    graph.nodes().iter().all(|node| match &node.op {
        Op::MoeExperts(MoeExpertsOp { experts, mlp, .. }) => {
            let set = &graph.expert_sets()[experts.0];
            [RowForm::Bytes, RowForm::Floats].into_iter().any(|form| has_bits(set.matrices(), form, mlp))
        }
        _ => true,
    })
}

/// A set of experts in host memory.
#[derive(Debug)]
pub(crate) struct HandedSet {
    /// gate, up and down.
    parts: [ExpertMatrix; 3],
    /// Where the first one is in host memory, how far apart they are, and how many there are; nothing if a cache has them.
    place: Option<(usize, usize, usize)>,
    activation: Activation,
    /// Of gate, up and down, of all experts; of rows of bytes the device adds those of down.
    biases: Option<[Vec<f32>; 3]>,
    form: RowForm,
    top_k: usize,
}

impl HandedSet {
    /// Experts that are at `place`, where the processor has the device's bits for them with rows of this form.
    pub(crate) fn new(
        (parts, form): (&[ExpertMatrix; 3], RowForm),
        mlp: &ExpertMlp,
        top_k: usize,
        tensors: &[Tensor],
        place: Option<(usize, usize, usize)>,
    ) -> Option<Self> {
        if !has_bits(parts.iter().map(|part| part.matrix), form, mlp) {
            return None;
        }
        let vector = |id: crate::graph::WeightId| {
            let bytes = tensors[id.0].plane(0).as_slice().as_chunks().0.iter();
            bytes.map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let biases = mlp.biases.map(|b| [b.gate, b.up, b.down].map(vector));
        let (parts, activation) = (*parts, mlp.activation);
        Some(Self { parts, place, activation, biases, form, top_k })
    }

    /// Words of a row of x on the desk, and outputs of a pair.
    pub(crate) fn widths(&self) -> [usize; 2] {
        [self.form.words(self.parts[0].matrix.cols), self.parts[2].matrix.rows]
    }

    /// What rows of x are.
    pub(crate) fn form(&self) -> RowForm {
        self.form
    }

    /// Experts that are always in host memory.
    pub(super) fn experts(&self) -> usize {
        self.place.map_or(0, |(_, _, experts)| experts)
    }

    /// An expert's matrices: gate, up and down.
    ///
    /// # Errors
    /// [`crate::Error::PlaneSize`] and others if they are not in `host`.
    pub(super) fn matrices<'a>(&self, host: &'a [u8], expert: u32) -> Result<[TensorView<'a>; 3]> {
        let [gate, up, down] = [0, 1, 2].map(|which| self.matrix(host, expert as usize, which));
        Ok([gate?, up?, down?])
    }

    fn matrix<'a>(&self, host: &'a [u8], expert: usize, which: usize) -> Result<TensorView<'a>> {
        let ExpertMatrix { matrix, part } = &self.parts[which];
        let (first, slot_bytes, _) = self.place.unwrap_or_default();
        let slot = &host[first + expert * slot_bytes..][..slot_bytes];
        let mut planes = [&[] as &[u8]; 3];
        for (plane, bytes) in planes.iter_mut().enumerate().take(matrix.dtype.planes()) {
            let length = matrix.dtype.plane_bytes(plane, matrix.rows, matrix.cols)?;
            *bytes = &slot[part.offsets[plane]..][..length];
        }
        TensorView::new(matrix.dtype, matrix.rows, matrix.cols, &planes)
    }
}

/// What a request takes, kept for the next one.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    x: HandedRows,
    factors: [f32; FEW_ROWS],
    products: HandedRows,
}

/// Pairs of one expert, by their places in the list, and its matrices.
struct Group<'a> {
    pairs: Range<usize>,
    expert: usize,
    matrices: [TensorView<'a>; 3],
}

/// Computes pairs of a set, ascending: their rows of x are on the desk, their outputs go there. `matrices` gives gate, up and
/// down of an expert.
///
/// # Errors
/// [`crate::Error::Shape`] and [`crate::Error::Unsupported`] if the matrices are not what they were taken for; those of
/// `matrices`.
pub(super) fn compute<'a>(
    pool: &ThreadPool,
    set: &HandedSet,
    matrices: impl Fn(u32) -> Result<[TensorView<'a>; 3]>,
    desk: &Desk,
    pairs: &[HandedPair],
    scratch: &mut Scratch,
) -> Result<()> {
    let simd = Simd::detect();
    let [gate, _, down] = &set.parts;
    let (cols, inner, width) = (gate.matrix.cols, gate.matrix.rows, down.matrix.rows);
    let Scratch { x, factors, products } = scratch;
    let mut wanted = [false; FEW_ROWS];
    pairs.iter().for_each(|pair| wanted[pair.pair as usize / set.top_k] = true);
    x.bring(desk, set.form, cols, &wanted, factors);
    products.resize(set.form, pairs.len(), inner);
    let mut groups = vec![];
    let mut start = 0;
    for group in pairs.chunk_by(|a, b| a.expert == b.expert) {
        let expert = group[0].expert;
        let pairs = start..start + group.len();
        start = pairs.end;
        groups.push(Group { pairs, expert: expert as usize, matrices: matrices(expert)? });
    }
    let failure = Mutex::new(Ok(()));
    let keep = |outcome: Result<()>| {
        if outcome.is_err()
            && let Ok(mut failure) = failure.lock()
        {
            *failure = outcome;
        }
    };

    let row_of = |place: usize| pairs[place].pair as usize / set.top_k;
    let writer = products.writer();
    let blocks = inner / BLOCK;
    pool.run_in_order(groups.len() * blocks, &|task, next| {
        let (group, block) = (&groups[task / blocks], task % blocks);
        let next = next.map(|next| (groups[next / blocks].matrices[0], next % blocks * BLOCK));
        for place in group.pairs.clone() {
            let row = row_of(place);
            let x = InputRow { x, row, factor: factors[row] };
            keep(gate_up_block(simd, set, group, (block, next), &x, &writer, place));
        }
    });

    let team = if pieces_of(down.matrix.dtype, inner) <= 16 { 16 } else { 32 };
    let parts = width.div_ceil(DOWN_ROWS);
    // SAFETY: the only one while the processor is asked.
    let outputs = SharedMut::new(unsafe { desk.outputs() });
    pool.run_in_order(groups.len() * parts, &|task, next| {
        let (group, first) = (&groups[task / parts], task % parts * DOWN_ROWS);
        let next = next.map(|next| (groups[next / parts].matrices[2], next % parts * DOWN_ROWS));
        let rows = first..(first + DOWN_ROWS).min(width);
        for place in group.pairs.clone() {
            let to = pairs[place].pair as usize * width;
            // SAFETY: rows of a pair that no other task has.
            let out = unsafe { outputs.part(to + rows.start..to + rows.end) };
            let product = Product { w: group.matrices[2], rows: rows.clone(), row: place, team, next };
            keep(products.multiply(simd, &product, out));
            if let (RowForm::Floats, Some([.., biases])) = (set.form, &set.biases) {
                let of_expert = &biases[group.expert * width..][rows.clone()];
                out.iter_mut().zip(of_expert).for_each(|(v, bias)| *v += bias);
            }
        }
    });
    failure.into_inner().unwrap_or(Ok(()))
}

/// A row of x, and what its products are multiplied with.
struct InputRow<'a> {
    x: &'a HandedRows,
    row: usize,
    factor: f32,
}

/// What 32 rows of gate and up make of a row of x: a block of `to`'s row `place`.
fn gate_up_block(
    simd: Simd,
    set: &HandedSet,
    group: &Group<'_>,
    (block, next): (usize, Option<NextJob<'_>>),
    x: &InputRow<'_>,
    to: &RowsWriter<'_>,
    place: usize,
) -> Result<()> {
    let rows = block * BLOCK..(block + 1) * BLOCK;
    let mut both = [[0.0; BLOCK]; 2];
    for (which, out) in both.iter_mut().enumerate() {
        let w = group.matrices[which];
        let next = if which == 0 { Some((group.matrices[1], rows.start)) } else { next };
        let product = Product { w, rows: rows.clone(), row: x.row, team: 32, next };
        x.x.multiply(simd, &product, out)?;
        out.iter_mut().for_each(|v| *v *= x.factor);
        if let Some(biases) = &set.biases {
            let of_expert = &biases[which][group.expert * w.rows()..][rows.clone()];
            out.iter_mut().zip(of_expert).for_each(|(v, bias)| *v += bias);
        }
    }
    let [mut gate, up] = both;
    activate(simd, set.activation, &mut gate, &up);
    // SAFETY: a task has its block of its pairs to itself.
    unsafe { to.write(place, block, &gate) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{ExpertSet, GraphBuilder, Precision, Route};
    use crate::{DType, Half};

    fn graph_of(dtype: DType, mlp: ExpertMlp) -> Graph {
        let mut g = GraphBuilder::new();
        let weight =
            |g: &mut GraphBuilder, rows| g.weight("w", MatrixSpec { dtype: DType::F32, rows, cols: 256 });
        let (table, router) = (weight(&mut g, 5), weight(&mut g, 3));
        let x = g.embed(table);
        let logits = g.linear(x, router, None, Precision::F32).unwrap();
        let routing = g.route(logits, None, Route::softmax(3, 2, true)).unwrap();
        let matrix = MatrixSpec { dtype, rows: 256, cols: 256 };
        let set = ExpertSet { layer: 0, experts: 3, gate: Some(matrix), up: matrix, down: matrix };
        let set = g.expert_set(set).unwrap();
        let out = g.moe_experts_with(x, routing, set, mlp).unwrap();
        g.finish(out)
    }

    #[test]
    fn a_share_of_experts_is_for_encodings_whose_bits_the_processor_has() {
        let affine = |bits| DType::Affine { bits, group: 64, scale: Half::BF16 };
        let vectors = Simd::detect().level() != crate::cpu::SimdLevel::Portable;
        for (dtype, expected) in [
            (DType::Q4_K, vectors),
            (DType::BF16, vectors),
            (affine(4), vectors),
            (affine(3), false),
            (DType::Q5_1, false),
        ] {
            assert_eq!(computes_experts(&graph_of(dtype, ExpertMlp::default())), expected, "{dtype}");
        }
        let weighted = ExpertMlp { weighted: Weighted::Input, ..ExpertMlp::default() };
        assert!(!computes_experts(&graph_of(DType::Q4_K, weighted)));
    }
}
