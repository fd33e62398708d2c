//! Lowering of sums over experts that several devices hold, to `kernels/divided.h`.

use super::MoeStep;
use crate::gpu::arguments::{MeetConstants, SumDividedConstants};
use crate::gpu::device::{Dispatch, Slice};
use crate::gpu::kernels::MEET_UNIT;
use crate::gpu::lower::context::{Launch, Lowering, THREADS, blocks};
use crate::gpu::memory::{Exchange, Held, MOST_HOLDERS};
use crate::graph::Weighted;

impl Lowering<'_> {
    /// The sums of a step whose pairs' outputs are on several devices, by the time that all of them have come here. Devices meet
    /// where a run ends, so that this one does.
    pub(super) fn sum_divided(&mut self, step: &MoeStep, exchange: &Exchange) -> Dispatch {
        let turn = self.exchanged;
        self.exchanged += 1;
        self.end_run();
        let MoeStep { routing, set, mlp, residual, out, .. } = *step;
        let [ids, weights] = self.routing(routing);
        let has_residual = residual.is_some();
        let residual = residual.map_or(self.input(0), |residual| self.value(residual));
        let mut buffers = vec![exchange.words().into(), ids, weights, residual];
        buffers.extend(exchange.all_outputs(turn).map(Slice::from));
        buffers.resize(4 + MOST_HOLDERS, self.input(0));
        buffers.push(self.value(out));
        let constants = &SumDividedConstants {
            top_k: routing.top_k(),
            width: out.width(),
            has_residual,
            weighs: mlp.weighted == Weighted::Output,
            experts: self.graph.expert_sets()[set.0].experts,
            devices: exchange.held.devices,
            own: exchange.held.index,
        };
        let sum = Launch { unit: "divided", kernel: "sum_divided", buffers: &buffers, constants };
        sum.over([self.rows, blocks(out.width()), 1], THREADS)
    }
}

/// What waits, within a list, for the other devices to come as far.
pub(in crate::gpu) fn meeting(exchange: &Exchange) -> Dispatch {
    let mut buffers: Vec<Slice> = exchange.all_words().map(Slice::from).collect();
    buffers.resize(MOST_HOLDERS, exchange.words().into());
    let Held { index, devices } = exchange.held;
    let constants = &MeetConstants { devices, own: index };
    Launch { unit: MEET_UNIT, kernel: "meet", buffers: &buffers, constants }.over([1, 1, 1], 32)
}
