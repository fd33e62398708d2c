//! Lowering of operations that nothing is fused with: rows and their positions, parallel streams, windows and n-grams.

use super::attention::{Kept, Sparse};
use super::context::Lowering;
use super::rows::RotatedChannels;
use crate::gpu::memory::Turn;
use crate::graph::{
    ActivateOp, BlockAttentionOp, BlockInputs, ChooseBlocksOp, CompressedAttentionOp, CompressedInputs,
    GatedMeanOp, GivenEmbeddingsOp, HeadScaleOp, HyperCollapseOp, HyperExpandOp, HyperWeightsOp, JoinOp,
    LayerNormOp, NGramEmbedOp, Op, Output, PositionScaleOp, RepeatOp, RmsNormOp, RopeOp, RoundBlocksOp,
    RouteBy, RouteOp, ScaledSiluOp, SoftmaxMixOp, SsmScanOp, StreamAddOp, StreamGateOp, WindowMeanOp,
    WindowPoolOp,
};

impl Lowering<'_> {
    /// Queues an operation.
    pub(super) fn alone(&mut self, op: &Op, out: Output) {
        let to = match (op, out) {
            (
                Op::Route(RouteOp { logits, by: RouteBy::Tokens { table }, route, .. }),
                Output::Routing(routing),
            ) => {
                let dispatch = self.route_by_token(*logits, *table, route, routing);
                return self.run.push(dispatch);
            }
            (_, Output::Value(out)) => out,
            (_, Output::Routing(_)) => unreachable!("only routes yield routings"),
        };
        let dispatch = match *op {
            Op::RmsNorm(RmsNormOp { x, weight, groups, eps }) => self.norm(x, weight, groups, eps, to),
            Op::Rope(RopeOp { x, heads, rope, place }) => {
                let turn = Turn { rope, stride: place.stride.max(1) };
                let channels = RotatedChannels { first: place.first, inverse: place.inverse };
                self.rotation(x, heads, turn, channels, to)
            }
            Op::Activate(ActivateOp { activation, gate, up }) => {
                self.activate([gate.unwrap_or(up), up], activation, to)
            }
            Op::PositionScale(PositionScaleOp { x, scale }) => self.position_scale(x, scale, to),
            Op::HeadScale(HeadScaleOp { x, base, slope, heads }) => {
                self.head_scale(x, heads, [base, slope], to)
            }
            Op::GroupedLinear(ref op) => return self.grouped_linear(op, to),
            Op::LayerNorm(LayerNormOp { x, weight, bias, eps }) => {
                self.layer_norm(x, [weight, bias], eps, to)
            }
            Op::SsmScan(SsmScanOp { inputs, weights, shape, state }) => {
                self.ssm_scan(inputs, weights, &shape, state, to)
            }
            Op::ChooseBlocks(ChooseBlocksOp { inputs, choice, cache }) => {
                return self.choose_blocks(inputs, &choice, cache.0, to);
            }
            Op::ScaledSilu(ScaledSiluOp { x, factor }) => self.elements("scaled_silu", &[x], factor, to),
            Op::RoundBlocks(RoundBlocksOp { x, block, form }) => self.round_blocks(x, block, form, to),
            Op::SoftmaxMix(SoftmaxMixOp { ref values, ref logits }) => {
                return self.softmax_mix(values, logits, to);
            }
            Op::Join(JoinOp { a, b }) => self.join([a, b], to),
            Op::Repeat(RepeatOp { x, times }) => self.repeat(x, times, to),
            Op::GivenEmbeddings(GivenEmbeddingsOp { x, level }) => {
                return self.given_embeddings(x, level, to);
            }
            Op::HyperWeights(HyperWeightsOp { x, mix, base, factors, shape }) => {
                self.hyper_weights([x, mix], [base, factors], &shape, to)
            }
            Op::HyperCollapse(HyperCollapseOp { x, weights, streams }) => {
                self.hyper_collapse([x, weights], streams, to)
            }
            Op::HyperExpand(HyperExpandOp { x, block, weights, streams }) => {
                self.hyper_expand([x, block, weights], streams, to)
            }
            Op::GatedMean(GatedMeanOp { x, gate, streams }) => self.gated_mean([x, gate], streams, to),
            Op::StreamAdd(StreamAddOp { x, block, logits }) => self.stream_add([x, block, logits], to),
            Op::StreamGate(StreamGateOp { keys, queries, value }) => {
                self.stream_gate(keys, queries, value, to)
            }
            Op::WindowPool(WindowPoolOp { kv, gate, bias, shape, state }) => {
                return self.window_pool([kv, gate], self.vector(bias), shape, state, to);
            }
            Op::WindowMean(WindowMeanOp { x, window, state }) => {
                return self.window_mean(x, window, state, to);
            }
            Op::CompressedAttention(CompressedAttentionOp { inputs, cache }) => {
                let CompressedInputs { q, kv, entries, index, sinks } = inputs;
                let kept =
                    Kept { tokens: Some([kv, kv]), entries: Some(entries), index_key: index.map(|i| i.k) };
                let sinks = Some(self.vector(sinks));
                return self.compressed_attention(&Sparse { q, kept, index, sinks, cache: cache.0, out: to });
            }
            Op::BlockAttention(BlockAttentionOp { inputs, cache }) => {
                let BlockInputs { q, k, v, index } = inputs;
                let kept = Kept { tokens: Some([k, v]), entries: None, index_key: Some(index.k) };
                let (index, sinks) = (Some(index), None);
                return self.compressed_attention(&Sparse { q, kept, index, sinks, cache: cache.0, out: to });
            }
            Op::NGramEmbed(NGramEmbedOp { ref ngrams, state, .. }) => {
                return self.ngram_embed(ngrams, state, to);
            }
            Op::TopSoftmax(ref op) => self.top_softmax(op, to),
            Op::Clamp(ref op) => self.clamp_between(op, to),
            Op::Standardize(ref op) => self.standardize(op, to),
            Op::BlockRows(ref op) => self.block_rows(op, to),
            Op::Gelu(ref op) => self.gelu(op, to),
            Op::BidirectionalAttention(ref op) => self.bidirectional_attention(op, to),
            // Steps of their own, which others are fused with, and no step at all.
            Op::Embed(_)
            | Op::InputRows(_)
            | Op::Add(_)
            | Op::Slice(_)
            | Op::GatherRows(_)
            | Op::Linear(_)
            | Op::Gate(_)
            | Op::Attention(_)
            | Op::LatentAttention(_)
            | Op::Route(_)
            | Op::MoeExperts(_)
            | Op::CausalConv1d(_)
            | Op::GatedDeltaRule(_) => unreachable!("not a step alone"),
            #[cfg(test)]
            Op::CpuOnly(_) => unreachable!("refused"),
        };
        self.run.push(dispatch);
    }
}
