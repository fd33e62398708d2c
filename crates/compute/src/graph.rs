//! What a model computes: language-model level operations recorded once through [`GraphBuilder`].
//!
//! A value is a matrix of f32 with one row a token (or one row an *output*, after [`GraphBuilder::gather_rows`])
//! and a width that is known when the graph is built. The number of rows is known only when a batch runs, so
//! one graph serves decode and prefill. Weights are declared by name, [`crate::DType`] and shape; their bytes are
//! given to the backend when it compiles the graph, so a model can be recorded, sized and planned from its
//! configuration alone. Routed experts are not even weights of the graph: an [`ExpertSet`] says what they look
//! like, and an [`crate::backend::ExpertSource`] hands them over while the graph runs. That is what makes
//! streaming a matter of placement.
//!
//! Shape errors are caught while recording, so that a backend can rely on every width in a finished graph.

use crate::{DType, Error, Result, Tensor};

mod activation;
mod attention;
mod builder;
mod compressed;
#[cfg(test)]
mod cpu_only;
mod excerpt;
mod experts;
mod hidden;
mod hyper;
mod linear;
mod low_rank;
mod ngrams;
mod norm;
mod op;
pub(crate) mod operation;
mod part;
mod recurrent;
mod rope;
mod rows;
mod selection;

pub use activation::{ActivateOp, Activation, Gate, GateOp, Gelu, GeluOp, ScaledSiluOp};
pub use attention::{
    Attention, AttentionOp, BidirectionalAttentionOp, LatentAttention, LatentAttentionOp, LatentInputs,
    LatentWeights,
};
pub use builder::GraphBuilder;
pub use compressed::{
    BlockAttentionOp, BlockInputs, CompressedAttention, CompressedAttentionOp, CompressedInputs, EntryIndex,
    IndexInputs, TokenForm, WindowMeanOp, WindowPool, WindowPoolOp,
};
#[cfg(test)]
pub use cpu_only::CpuOnlyOp;
pub use experts::{
    ExpertBiases, ExpertMlp, ExpertSet, GroupRank, Groups, MoeExpertsOp, OutputNorm, Route, RouteBy, RouteOp,
    Score, TopSoftmaxOp, Weighted,
};
pub use hyper::{
    GatedMeanOp, HyperCollapseOp, HyperConnection, HyperExpandOp, HyperKind, HyperWeightsOp, SoftmaxMixOp,
    StreamAddOp, StreamGateOp,
};
pub use linear::{GroupedLinearOp, LinearOp};
pub use low_rank::{ExpertLowRank, LowRank, StackedLowRank};
pub use ngrams::{NGramEmbedOp, NGrams};
pub use norm::{LayerNormOp, RmsNormOp};
pub(crate) use op::with_op;
pub use op::{Node, Op, Output};
pub(crate) use part::{Ends, Part};
pub use recurrent::{
    CausalConv1dOp, Decay, DeltaInputs, DeltaRule, GatedDeltaRuleOp, HeadPairing, SsmInputs, SsmScan,
    SsmScanOp, SsmWeights, StateId,
};
pub use rope::{Growth, HeadScaleOp, Placement, PositionScale, PositionScaleOp, Rope, RopeOp, RopeStyle};
pub use rows::{
    AddOp, BlockFloat, BlockRowsOp, ClampOp, EmbedOp, GatherRowsOp, GivenEmbeddingsOp, InputRowsOp, JoinOp,
    RepeatOp, RoundBlocksOp, SliceOp, StandardizeOp,
};
pub use selection::{BlockChoice, BlockScore, ChooseBlocksOp, Chosen};

/// A value in a graph: f32 (rows, width).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Value {
    pub(crate) index: usize,
    pub(crate) width: usize,
}

impl Value {
    /// Number of columns.
    pub fn width(self) -> usize {
        self.width
    }
}

/// What a router chose: for each token `top_k` expert ids and their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Routing {
    pub(crate) index: usize,
    pub(crate) top_k: usize,
    /// How many they are chosen from.
    pub(crate) experts: usize,
}

impl Routing {
    /// Experts per token.
    pub fn top_k(self) -> usize {
        self.top_k
    }
}

/// A resident weight of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightId(pub(crate) usize);

impl WeightId {
    /// Place in [`Graph::weights`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// Key-value storage of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheId(pub usize);

/// Latent storage of one multi-head latent attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LatentCacheId(pub usize);

/// Storage of one compressed attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompressedCacheId(pub usize);

/// The routed experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertSetId(pub usize);

/// Encoding and shape of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixSpec {
    /// Encoding.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl MatrixSpec {
    /// An f32 vector: norm weights, biases.
    pub fn vector(len: usize) -> Self {
        Self { dtype: DType::F32, rows: 1, cols: len }
    }

    /// Bytes over all planes.
    ///
    /// # Errors
    /// [`Error::RowLength`] if the encoding cannot store such rows.
    pub fn bytes(&self) -> Result<usize> {
        self.dtype.matrix_bytes(self.rows, self.cols)
    }
}

/// How activations enter a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// As [`crate::backend::ActivationMode`] says.
    Fast,
    /// Never quantised: routers, whose choice of experts must not hang on rounding.
    F32,
}

/// A weight of the graph, without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSpec {
    /// Name in the model, for errors.
    pub name: String,
    /// Encoding and shape.
    pub matrix: MatrixSpec,
}

/// A finished model.
#[derive(Debug, Clone)]
pub struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) weights: Vec<WeightSpec>,
    pub(crate) ropes: Vec<Rope>,
    pub(crate) caches: Vec<Attention>,
    pub(crate) states: Vec<usize>,
    pub(crate) latent_caches: Vec<LatentAttention>,
    pub(crate) compressed_caches: Vec<CompressedAttention>,
    pub(crate) expert_sets: Vec<ExpertSet>,
    pub(crate) values: usize,
    pub(crate) routings: usize,
    pub(crate) logits: Value,
}

impl Graph {
    /// Operations in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The layers' expert sets, indexed by [`ExpertSetId`].
    pub fn expert_sets(&self) -> &[ExpertSet] {
        &self.expert_sets
    }

    /// How many experts beside those of `set` return what they take.
    pub(crate) fn identities(&self, set: ExpertSetId) -> usize {
        let of = |node: &Node| match &node.op {
            Op::MoeExperts(MoeExpertsOp { experts, mlp, .. }) if *experts == set => mlp.identities,
            _ => 0,
        };
        self.nodes.iter().map(of).max().unwrap_or(0)
    }

    /// Shapes of the attention layers, indexed by [`CacheId`].
    pub fn caches(&self) -> &[Attention] {
        &self.caches
    }

    /// f32 elements of the recurrent states of one sequence, indexed by [`StateId`].
    pub fn states(&self) -> &[usize] {
        &self.states
    }

    /// Shapes of the multi-head latent attention layers, indexed by [`LatentCacheId`].
    pub(crate) fn latent_caches(&self) -> &[LatentAttention] {
        &self.latent_caches
    }

    /// Shapes of the compressed attention layers, indexed by [`CompressedCacheId`].
    pub(crate) fn compressed_caches(&self) -> &[CompressedAttention] {
        &self.compressed_caches
    }

    /// Resident weights, in the order of their declaration.
    pub fn weights(&self) -> &[WeightSpec] {
        &self.weights
    }

    /// Width of the logits: the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.logits.width
    }

    /// Checks that `tensors` are the graph's weights, one each, of the declared encoding and shape.
    ///
    /// # Errors
    /// [`Error::Weight`] naming the first that is not.
    pub(crate) fn check_weights(&self, tensors: &[Tensor]) -> Result<()> {
        for (index, spec) in self.weights.iter().enumerate() {
            let given =
                tensors.get(index).map(|t| MatrixSpec { dtype: t.dtype(), rows: t.rows(), cols: t.cols() });
            if given != Some(spec.matrix) {
                return Err(Error::Weight { name: spec.name.clone(), expected: spec.matrix, got: given });
            }
        }
        Ok(())
    }
}
