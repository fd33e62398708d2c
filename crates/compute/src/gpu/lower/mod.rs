//! Lowering: steps to dispatches, for batches of one shape. A file or a folder has the steps of one subject.
//!
//! `context` is what all of them start from; only this file knows them all.

mod attention;
mod bytes;
mod context;
mod elementwise;
mod encoder;
mod experts;
mod linear;
mod low_rank;
mod ngrams;
mod operations;
mod panels;
mod recurrent;
mod rows;
mod streams;
mod tensor;
mod wide;

pub(super) use self::context::{Launch, Piece};
pub(super) use self::experts::meeting;

use self::attention::AttentionStep;
use self::context::{DeferredNorm, DeferredRoute, Lowering, Product};
use self::experts::MoeStep;
use self::rows::RotatedChannels;
use super::arguments::{CarryConstants, WindowConstants};
use super::device::Dispatch;
use super::memory::{Memory, Shape, Turn};
use super::steps::{Buffers, Step};
use crate::graph::Graph;

/// Lowers all steps.
pub(super) fn lower(
    graph: &Graph,
    steps: &[Step],
    buffers: &Buffers,
    memory: &Memory,
    shape: Shape,
) -> Vec<Piece<Vec<Dispatch>>> {
    let mut lowering = Lowering::new(graph, steps, buffers, memory, shape);
    lowering.make_angles();
    for step in steps {
        lowering.step(step);
    }
    lowering.flush_products();
    lowering.end_run();
    lowering.pieces
}

impl Lowering<'_> {
    /// Ends the run: it goes on where experts end whose body runs once.
    fn end_run(&mut self) {
        let run = std::mem::take(&mut self.run);
        match self.pieces.last_mut() {
            Some(Piece::Experts { once: true, body, .. }) => body.extend(run),
            _ => self.pieces.push(Piece::Run(run)),
        }
    }

    /// Rows are those of what the step reads: of tokens or of outputs.
    fn choose_rows(&mut self, step: &Step) {
        let gathered = step.inputs().iter().any(|value| self.of_outputs.contains(value));
        if gathered != self.gathered {
            self.flush_products();
            self.gathered = gathered;
            self.rows = if gathered { self.shape.outputs } else { self.shape.rows };
        }
        if gathered || matches!(step, Step::GatherRows { .. }) {
            self.of_outputs.extend(step.output());
        }
    }

    fn step(&mut self, step: &Step) {
        self.choose_rows(step);
        let siblings = std::mem::take(&mut self.siblings);
        if !matches!(step, Step::Linear { .. }) {
            self.flush_products();
        }
        let dispatch = match *step {
            Step::Alone { ref op, out } => return self.alone(op, out),
            Step::Embed { table, out } => self.embed(table, out),
            Step::Linear { x, weight, bias, precision, cap, residual, adapted, out } => {
                // An update of what this reads comes before.
                if self.updates.iter().any(|update| update.x != x) {
                    self.flush_products();
                }
                self.product(Product { x, weight, bias, residual, precision, out }, siblings);
                self.updates.extend(self.update(adapted, x, out));
                let Some(cap) = cap else { return };
                self.flush_products();
                self.elements("soft_cap", &[out], cap, out)
            }
            Step::RmsNorm { x, weight, groups, eps, out } => {
                if groups == 1
                    && self.defer_norm(DeferredNorm { x, weight, eps }, out)
                    && !self.is_adapted(out)
                {
                    return;
                }
                self.norm(x, Some(weight), groups, eps, out)
            }
            Step::Rope { x, heads, rope, out } => {
                self.rotation(x, heads, Turn { rope, stride: 1 }, RotatedChannels::default(), out)
            }
            Step::Attention { q, k, v, cache, sinks, chosen, added, prepare, out } => {
                let cache = cache.0;
                return self.attention(&AttentionStep { q, k, v, cache, sinks, chosen, added, prepare, out });
            }
            Step::LatentAttention { inputs, weights, cache, entering, out } => {
                return self.latent_attention(inputs, weights, cache.0, entering, out);
            }
            Step::SwiGlu { gate, up, out } => self.elements("swiglu", &[gate, up], 0.0, out),
            Step::Add { a, b, out } => self.elements("add", &[a, b], 0.0, out),
            Step::Clamp { x, limit, out } => self.elements("clamp_to", &[x], limit, out),
            Step::Gate { x, gate, function, out } => self.gate([x, gate], function, out),
            Step::Slice { x, groups, start, len, out } => self.slice(x, groups, [start, len], out),
            Step::GatherRows { x, out } => self.gather_rows(x, out),
            Step::Route { logits, bias, scales, route, routing } => {
                let choice = DeferredRoute { logits, bias, route };
                // Kernels that make a choice themselves know no scales.
                if scales.is_none() && self.defer_route(choice, routing) {
                    return self.foresee(logits, routing);
                }
                let routed = self.route(&choice, routing);
                self.routed = scales.is_none().then_some((routing, choice));
                match scales {
                    None => routed,
                    Some(scales) => {
                        self.run.push(routed);
                        self.scale_chosen(scales, routing)
                    }
                }
            }
            Step::MoeExperts { x, routing, experts: set, mlp, residual, adapted, out } => {
                let updates = self.updates_of(adapted);
                return self.moe_experts(&MoeStep { x, routing, set, mlp, residual, updates, out });
            }
            Step::CausalConv1d { x, weight, bias, kernel, dilation, plain, state, out } => {
                let weights = [self.vector(weight), self.optional(bias)];
                let (channels, has_bias) = (x.width(), bias.is_some());
                let taps = WindowConstants { channels, taps: kernel, dilation, has_bias, plain };
                let mixed = self.window("causal_conv1d", x, &weights, taps, state, out);
                self.run.push(mixed);
                let held = (kernel - 1) * dilation;
                return self.carry([x, x], CarryConstants { first: x.width(), second: 0, held }, state);
            }
            Step::GatedDeltaRule { inputs, decay, dt_bias, shape, state, out } => {
                self.gated_delta_rule(inputs, [decay, dt_bias], shape, state, out)
            }
        };
        self.run.push(dispatch);
    }
}
