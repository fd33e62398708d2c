//! Lowering to the kernels of `kernels/cuda/batched.h`: routed experts of batches of more than few rows, with the bits of those
//! of few.

use super::few::FewExperts;
use crate::gpu::arguments::{BatchDownConstants, BatchGateUpConstants, BatchTilesConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::kernels::BATCHED_UNIT;
use crate::gpu::lower::context::{Launch, Lowering};
use crate::gpu::lower::linear::{batch_span, batch_tokens, of_tokens};
use crate::gpu::memory::{BATCH_PAIRS, BATCH_ROWS, MOST_TILED_EXPERTS, QuantizedScratch, most_batch_tiles};
use crate::graph::Weighted;

const THREADS: u32 = 256;
/// Weight rows that a group makes at once.
const GROUP_ROWS: usize = 128;

impl Lowering<'_> {
    /// Outputs of all pairs whose experts are present; nothing if the kernels do not suit them.
    pub(super) fn batch_experts(&mut self, e: &FewExperts<'_>) -> Option<Vec<Dispatch>> {
        let [gate_name, down_name] = self.few_encodings(e.set)?;
        let [gate, up, down] = e.parts;
        let experts = self.graph.expert_sets()[e.set.0].experts;
        let top_k = e.routing.top_k();
        let pairs = self.rows * top_k;
        let suits = self.is_batch()
            && self.rows <= BATCH_ROWS
            && pairs <= BATCH_PAIRS
            && experts <= MOST_TILED_EXPERTS;
        if !suits {
            return None;
        }
        let counts = [self.rows, pairs];
        let (slots, table) = (self.memory.experts.slots(), self.memory.experts.table(e.set, counts));
        let [ids, weights] = self.routing(e.routing);
        let (list, tiles) = (self.memory.scratch.buckets.list.into(), self.memory.scratch.batch.tiles.into());
        // So many that most experts' pairs are one tile.
        let likely = (pairs * 2).div_ceil(experts);
        let widest = gate.matrix.cols.max(down.matrix.cols);
        let (each, _) = batch_tokens(likely, widest);
        let most = (pairs / each + experts.min(pairs)).min(most_batch_tiles(pairs, experts));
        // A body runs once for each of several groups of experts, so that nothing is left over from before it.
        self.entered = None;
        let (entered, enter) = self.enter_batch(e.x);
        self.entered = None;
        let mut body: Vec<Dispatch> = enter.into_iter().collect();

        let constants = &BatchTilesConstants { pairs, experts, tiles: most, shift: each.ilog2() };
        let buffers = [table, ids, list, tiles];
        let sort = Launch { unit: "batch", kernel: "batch_tiles", buffers: &buffers, constants };
        body.push(sort.over([1, 1, 1], THREADS));

        let none = self.input(0);
        let [gate_bias, up_bias, down_bias] = e.biases.unwrap_or([none; 3]);
        let QuantizedScratch { bytes, scales } = self.memory.scratch.quantized;
        let (bytes, scales) = (Slice::from(bytes), Slice::from(scales));
        let [x, x_scales, factors] = entered;
        // Half of the weight rows are of gate, where there is one.
        let outputs = if e.mlp.activation.is_gated() { GROUP_ROWS / 2 } else { GROUP_ROWS };
        let groups = up.matrix.rows.div_ceil(outputs);
        let span = batch_span(groups * experts.min(pairs));
        let constants = &BatchGateUpConstants {
            gate: gate.part,
            up: up.part,
            share: top_k,
            activation: e.mlp.activation.into(),
            has_bias: e.biases.is_some(),
            weighs: e.mlp.weighted == Weighted::Input,
            span,
        };
        let buffers =
            [x, x_scales, factors, list, tiles, slots, table, weights, gate_bias, up_bias, bytes, scales];
        let launch = Launch { unit: BATCHED_UNIT, kernel: "batch_gate_up", buffers: &buffers, constants };
        let (_, shared) = batch_tokens(each, gate.matrix.cols);
        let grid = [groups.div_ceil(span), most, 1];
        body.push(Dispatch { shared, ..of_tokens(launch.over(grid, THREADS), each, gate_name) });

        let groups = down.matrix.rows.div_ceil(GROUP_ROWS);
        let span = batch_span(groups * experts.min(pairs));
        let constants = &BatchDownConstants { part: down.part, has_bias: e.biases.is_some(), span };
        let buffers = [bytes, scales, list, tiles, slots, table, down_bias, e.outputs];
        let launch = Launch { unit: BATCHED_UNIT, kernel: "batch_down", buffers: &buffers, constants };
        let (_, shared) = batch_tokens(each, down.matrix.cols);
        let grid = [groups.div_ceil(span), most, 1];
        body.push(Dispatch { shared, ..of_tokens(launch.over(grid, THREADS), each, down_name) });
        Some(body)
    }
}
