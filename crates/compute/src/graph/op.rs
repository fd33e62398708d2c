//! What a graph is made of: one operation a node.
//!
//! Every operation is a struct in the file of its subject. [`Op`] is one of them.

#[cfg(test)]
use super::CpuOnlyOp;
use super::activation::{ActivateOp, GateOp, GeluOp, ScaledSiluOp};
use super::attention::{AttentionOp, BidirectionalAttentionOp, LatentAttentionOp};
use super::compressed::{BlockAttentionOp, CompressedAttentionOp, WindowMeanOp, WindowPoolOp};
use super::experts::{MoeExpertsOp, RouteOp, TopSoftmaxOp};
use super::hyper::{
    GatedMeanOp, HyperCollapseOp, HyperExpandOp, HyperWeightsOp, SoftmaxMixOp, StreamAddOp, StreamGateOp,
};
use super::linear::{GroupedLinearOp, LinearOp};
use super::ngrams::NGramEmbedOp;
use super::norm::{LayerNormOp, RmsNormOp};
use super::operation::{Operation, Refers, Visitor};
use super::recurrent::{CausalConv1dOp, GatedDeltaRuleOp, SsmScanOp};
use super::rope::{HeadScaleOp, PositionScaleOp, RopeOp};
use super::rows::{
    AddOp, BlockRowsOp, ClampOp, EmbedOp, GatherRowsOp, GivenEmbeddingsOp, InputRowsOp, JoinOp, RepeatOp,
    RoundBlocksOp, SliceOp, StandardizeOp,
};
use super::selection::ChooseBlocksOp;
use super::{Routing, Value};

/// Declares [`Op`] from the list of operations, and `with_op`.
macro_rules! ops {
    ($d:tt $($(#[$attribute:meta])* $name:ident($op:ident),)*) => {
        /// One recorded operation. Inputs are named; the output is [`Node::out`].
        #[derive(Debug, Clone, PartialEq)]
        pub enum Op {
            $(
                $(#[$attribute])*
                #[doc = concat!("See [`", stringify!($op), "`].")]
                $name($op),
            )*
        }

        impl Op {
            /// Every kind of operation.
            pub const KINDS: &[&str] = &[$($(#[$attribute])* stringify!($name),)*];

            /// Its kind: one of [`Op::KINDS`].
            pub fn kind(&self) -> &'static str {
                match self {
                    $($(#[$attribute])* Self::$name(_) => stringify!($name),)*
                }
            }
        }

        $($(#[$attribute])* impl From<$op> for Op {
            fn from(op: $op) -> Self {
                Self::$name(op)
            }
        })*

        /// Evaluates an expression in which a name stands for the operation's structure.
        macro_rules! with_op {
            ($d on:expr, $d op:ident => $d body:expr) => {
                match $d on {
                    $($(#[$attribute])* $crate::graph::Op::$name($d op) => $d body,)*
                }
            };
        }
        pub(crate) use with_op;
    };
}

ops! { $
    Embed(EmbedOp),
    Add(AddOp),
    Standardize(StandardizeOp),
    Clamp(ClampOp),
    RoundBlocks(RoundBlocksOp),
    Slice(SliceOp),
    Repeat(RepeatOp),
    InputRows(InputRowsOp),
    GivenEmbeddings(GivenEmbeddingsOp),
    Join(JoinOp),
    BlockRows(BlockRowsOp),
    GatherRows(GatherRowsOp),
    Linear(LinearOp),
    GroupedLinear(GroupedLinearOp),
    RmsNorm(RmsNormOp),
    LayerNorm(LayerNormOp),
    Activate(ActivateOp),
    Gelu(GeluOp),
    ScaledSilu(ScaledSiluOp),
    Gate(GateOp),
    Rope(RopeOp),
    PositionScale(PositionScaleOp),
    HeadScale(HeadScaleOp),
    Attention(AttentionOp),
    BidirectionalAttention(BidirectionalAttentionOp),
    LatentAttention(LatentAttentionOp),
    WindowPool(WindowPoolOp),
    WindowMean(WindowMeanOp),
    CompressedAttention(CompressedAttentionOp),
    BlockAttention(BlockAttentionOp),
    ChooseBlocks(ChooseBlocksOp),
    Route(RouteOp),
    TopSoftmax(TopSoftmaxOp),
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
    SoftmaxMix(SoftmaxMixOp),
    #[cfg(test)]
    CpuOnly(CpuOnlyOp),
}

impl Op {
    /// What errors and profiles call it.
    pub fn label(&self) -> &'static str {
        with_op!(self, op => op.label())
    }

    /// The values that it reads.
    pub fn values(&self) -> Vec<Value> {
        let mut values = ReadValues(vec![]);
        self.clone().visit(&mut values);
        values.0
    }

    /// Shows what it refers to.
    pub(crate) fn visit(&mut self, visitor: &mut dyn Visitor) {
        with_op!(self, op => op.visit(visitor));
    }
}

/// Collects values.
struct ReadValues(Vec<Value>);

impl Visitor for ReadValues {
    fn value(&mut self, value: &mut Value) {
        self.0.push(*value);
    }
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
