//! What GPUs have kernels for. Other graphs are refused before anything is made ready.
//!
//! Kernels keep queries, scores and chosen experts in threadgroup memory, which is limited.

use crate::graph::{Activation, Decay, DeltaRule, Graph, HyperConnection, HyperKind, LatentInputs, Op};
use crate::{Error, Result};

const NO_GATE: &str = "experts without a gate";

fn refusal(what: &str) -> Error {
    Error::Device { reason: format!("there are no GPU kernels of {what}: use the CPU") }
}

/// That experts have no gate.
pub(crate) fn no_gate() -> Error {
    refusal(NO_GATE)
}

/// The first operation of `graph` that there is no kernel of.
pub(crate) fn unsupported(graph: &Graph) -> Option<&'static str> {
    let of = |op: &Op| match op {
        Op::Attention { cache, .. } if graph.caches()[cache.0].head_dim > 512 => {
            Some("heads of more than 512 channels")
        }
        Op::Attention { cache, .. } if graph.caches()[cache.0].value_dim > 512 => {
            Some("values of more than 512 channels")
        }
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
        Op::HyperWeights { shape: HyperConnection { kind: HyperKind::Independent { .. }, .. }, .. } => {
            Some("residual streams that stay apart")
        }
        Op::LayerNorm { .. } => Some("layer norms"),
        Op::ClampedSwiGlu { .. } => Some("clamped SwiGLU outside of experts"),
        Op::GatedDeltaRule { shape: DeltaRule { decay: Decay::Bounded(_), .. }, .. } => {
            Some("a delta rule whose decay is bounded")
        }
        Op::LatentAttention { cache, .. } if graph.latent_caches()[cache.0].rank > 512 => {
            Some("latents of more than 512 channels")
        }
        Op::LatentAttention { cache, .. }
            if graph.latent_caches()[cache.0].rank + graph.latent_caches()[cache.0].rope > 640 =>
        {
            Some("latents with rotated keys of more than 640 channels")
        }
        Op::CompressedAttention { cache, .. } | Op::BlockAttention { cache, .. }
            if graph.compressed_caches()[cache.0].head_dim > 512 =>
        {
            Some("heads of more than 512 channels")
        }
        Op::Route { route, .. } | Op::RouteByToken { route, .. } if route.experts > 1024 => {
            Some("routers of more than 1024 experts")
        }
        Op::Route { route, .. } | Op::RouteByToken { route, .. } if route.top_k > 64 => {
            Some("routers that choose more than 64 experts")
        }
        Op::GatedDeltaRule { shape, .. } if shape.key_dim > 512 => {
            Some("delta rules of more than 512 channels a key")
        }
        Op::HyperWeights { shape, .. } if shape.streams > 16 => Some("more than 16 parallel streams"),
        Op::CausalConv1d { bias: Some(_), .. } => Some("convolutions with a bias"),
        Op::CappedSwiGlu { .. } => Some("capped SwiGLU"),
        Op::MoeExperts { mlp, .. } if matches!(mlp.activation, Activation::CappedSwiGlu { .. }) => {
            Some("experts with a capped SwiGLU")
        }
        Op::SsmScan { .. } => Some("state space models"),
        Op::SquaredRelu { .. } => Some("squared ReLU"),
        Op::MoeExperts { mlp, .. } if mlp.activation == Activation::SquaredRelu => Some(NO_GATE),
        _ => None,
    };
    graph.nodes().iter().find_map(|node| of(&node.op))
}

/// Refuses a graph with operations that there are no kernels of.
pub(crate) fn check(graph: &Graph) -> Result<()> {
    match unsupported(graph) {
        Some(what) => Err(refusal(what)),
        None => Ok(()),
    }
}
