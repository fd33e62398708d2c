//! What GPUs have kernels for. Other graphs are refused before anything is made ready.

use crate::graph::{Activation, Decay, DeltaRule, Graph, LatentInputs, Op, Score, Weighted};
use crate::{Error, Result};

/// The first operation of `graph` that there is no kernel of.
pub(crate) fn unsupported(graph: &Graph) -> Option<&'static str> {
    let of = |op: &Op| match op {
        Op::UnitNorm { .. } => Some("norms without a weight"),
        Op::PlacedRope { .. } => Some("rotations of the last channels of a head"),
        Op::GroupedLinear { .. } => Some("grouped linear layers"),
        Op::LimitedSwiGlu { .. } => Some("limited SwiGLU"),
        Op::Repeat { .. } | Op::HyperWeights { .. } | Op::HyperCollapse { .. } | Op::HyperExpand { .. } => {
            Some("hyper-connections")
        }
        Op::WindowPool { .. } | Op::CompressedAttention { .. } => Some("compressed attention"),
        Op::GatedDeltaRule { inputs, shape, .. } if inputs.a.width != shape.value_heads => {
            Some("a delta rule whose channels decay on their own")
        }
        Op::PositionScale { .. } => Some("factors by position"),
        Op::ChooseBlocks { .. }
        | Op::Attention { chosen: Some(_), .. }
        | Op::LatentAttention { inputs: LatentInputs { chosen: Some(_), .. }, .. } => {
            Some("attention over chosen tokens")
        }
        Op::LatentAttention { inputs: LatentInputs { rotated: None, .. }, .. } => {
            Some("latent attention without rotated channels")
        }
        Op::LatentAttention { inputs: LatentInputs { sinks: Some(_), .. }, .. } => {
            Some("latent attention with sinks")
        }
        Op::LayerNorm { .. } => Some("layer norms"),
        Op::ClampedSwiGlu { .. } => Some("clamped SwiGLU outside of experts"),
        Op::GatedDeltaRule { shape: DeltaRule { decay: Decay::Bounded(_), .. }, .. } => {
            Some("a delta rule whose decay is bounded")
        }
        Op::Attention { cache, .. } if graph.caches()[cache.0].chunk.is_some() => {
            Some("attention within chunks")
        }
        Op::Attention { cache, .. }
            if graph.caches()[cache.0].value_dim != graph.caches()[cache.0].head_dim =>
        {
            Some("attention with values that are not as wide as keys")
        }
        Op::MoeExperts { mlp, .. } if mlp.weighted == Weighted::Input => {
            Some("experts whose input is weighted")
        }
        Op::ScaledSilu { .. } | Op::GatedMean { .. } | Op::StreamAdd { .. } | Op::StreamGate { .. } => {
            Some("gated residual streams")
        }
        Op::NGramEmbed { .. } => Some("embeddings of n-grams"),
        Op::WindowMean { .. } | Op::BlockAttention { .. } => Some("attention over chosen blocks"),
        Op::CausalConv1d { dilation: 2.., .. } => Some("convolutions with dilation"),
        Op::RmsNorm { x, weight, groups: 2.., .. } if graph.weights()[weight.0].matrix.cols == x.width => {
            Some("norms of parts with a weight each")
        }
        Op::RouteByToken { .. } => Some("routing by token"),
        Op::Route { route, .. } if route.score == Score::SqrtSoftplus => Some("routing by √softplus"),
        Op::MoeExperts { mlp, .. } if matches!(mlp.activation, Activation::LimitedSwiGlu { .. }) => {
            Some("experts with a limited SwiGLU")
        }
        _ => None,
    };
    graph.nodes().iter().find_map(|node| of(&node.op))
}

/// Refuses a graph with operations that there are no kernels of.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    match unsupported(graph) {
        Some(what) => {
            Err(Error::Device { reason: format!("there are no GPU kernels of {what}: use the CPU") })
        }
        None => Ok(()),
    }
}
