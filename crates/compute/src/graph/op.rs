//! What a graph is made of: one operation a node.
//!
//! Every operation is a struct in the file of its subject. [`Op`] is one of them.

use super::activation::{ActivateOp, ScaledSiluOp, SigmoidGateOp};
use super::attention::{AttentionOp, LatentAttentionOp};
use super::compressed::{BlockAttentionOp, CompressedAttentionOp, WindowMeanOp, WindowPoolOp};
use super::experts::{MoeExpertsOp, RouteOp};
use super::hyper::{GatedMeanOp, HyperCollapseOp, HyperExpandOp, HyperWeightsOp, StreamAddOp, StreamGateOp};
use super::linear::{GroupedLinearOp, LinearOp};
use super::ngrams::NGramEmbedOp;
use super::norm::{LayerNormOp, RmsNormOp};
use super::recurrent::{CausalConv1dOp, GatedDeltaRuleOp, SsmScanOp};
use super::rope::{PositionScaleOp, RopeOp};
use super::rows::{AddOp, ClampOp, EmbedOp, GatherRowsOp, RepeatOp, SliceOp};
use super::selection::ChooseBlocksOp;
use super::{Routing, Value};

/// Declares [`Op`] from the list of operations.
macro_rules! ops {
    ($($name:ident($op:ident),)*) => {
        /// One recorded operation. Inputs are named; the output is [`Node::out`].
        #[derive(Debug, Clone, PartialEq)]
        pub enum Op {
            $(#[doc = concat!("See [`", stringify!($op), "`].")] $name($op),)*
        }
    };
}

ops! {
    Embed(EmbedOp),
    Add(AddOp),
    Clamp(ClampOp),
    Slice(SliceOp),
    Repeat(RepeatOp),
    GatherRows(GatherRowsOp),
    Linear(LinearOp),
    GroupedLinear(GroupedLinearOp),
    RmsNorm(RmsNormOp),
    LayerNorm(LayerNormOp),
    Activate(ActivateOp),
    ScaledSilu(ScaledSiluOp),
    SigmoidGate(SigmoidGateOp),
    Rope(RopeOp),
    PositionScale(PositionScaleOp),
    Attention(AttentionOp),
    LatentAttention(LatentAttentionOp),
    WindowPool(WindowPoolOp),
    WindowMean(WindowMeanOp),
    CompressedAttention(CompressedAttentionOp),
    BlockAttention(BlockAttentionOp),
    ChooseBlocks(ChooseBlocksOp),
    Route(RouteOp),
    MoeExperts(MoeExpertsOp),
    CausalConv1d(CausalConv1dOp),
    GatedDeltaRule(GatedDeltaRuleOp),
    SsmScan(SsmScanOp),
    NGramEmbed(NGramEmbedOp),
    HyperWeights(HyperWeightsOp),
    HyperCollapse(HyperCollapseOp),
    HyperExpand(HyperExpandOp),
    GatedMean(GatedMeanOp),
    StreamAdd(StreamAddOp),
    StreamGate(StreamGateOp),
}

/// What a node yields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// A matrix.
    Value(Value),
    /// A router's choice.
    Routing(Routing),
}

/// An operation with its place in the model.
#[derive(Debug, Clone)]
pub struct Node {
    /// Where in the model, for errors and profiles: `layers.3.self_attn`.
    pub name: String,
    /// What is computed.
    pub op: Op,
    /// Its result.
    pub out: Output,
}
