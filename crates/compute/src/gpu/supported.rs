//! What GPUs have kernels for. Other graphs are refused before anything is made ready.
//!
//! Kernels keep queries, scores and chosen experts in threadgroup memory, and states in registers, which are limited.

use crate::graph::{
    AttentionOp, BlockAttentionOp, CompressedAttentionOp, GatedDeltaRuleOp, Graph, HyperWeightsOp,
    LatentAttentionOp, Op, RouteOp, SsmScanOp,
};
use crate::{Error, Result};

/// The first operation of `graph` that there is no kernel of.
pub(crate) fn unsupported(graph: &Graph) -> Option<&'static str> {
    let of = |op: &Op| match op {
        Op::Attention(AttentionOp { cache, .. }) if graph.caches()[cache.0].head_dim > 512 => {
            Some("heads of more than 512 channels")
        }
        Op::Attention(AttentionOp { cache, .. }) if graph.caches()[cache.0].value_dim > 512 => {
            Some("values of more than 512 channels")
        }
        Op::LatentAttention(LatentAttentionOp { cache, .. }) if graph.latent_caches()[cache.0].rank > 512 => {
            Some("latents of more than 512 channels")
        }
        Op::LatentAttention(LatentAttentionOp { cache, .. })
            if graph.latent_caches()[cache.0].rank + graph.latent_caches()[cache.0].rope > 640 =>
        {
            Some("latents with rotated keys of more than 640 channels")
        }
        Op::CompressedAttention(CompressedAttentionOp { cache, .. })
        | Op::BlockAttention(BlockAttentionOp { cache, .. })
            if graph.compressed_caches()[cache.0].head_dim > 512 =>
        {
            Some("heads of more than 512 channels")
        }
        Op::Route(RouteOp { route, .. }) if route.experts > 1024 => Some("routers of more than 1024 experts"),
        Op::Route(RouteOp { route, .. }) if route.top_k > 64 => {
            Some("routers that choose more than 64 experts")
        }
        Op::GatedDeltaRule(GatedDeltaRuleOp { shape, .. }) if shape.key_dim > 512 => {
            Some("delta rules of more than 512 channels a key")
        }
        Op::SsmScan(SsmScanOp { shape, .. }) if shape.state_size > 256 => {
            Some("state space models of more than 256 numbers a channel")
        }
        Op::HyperWeights(HyperWeightsOp { shape, .. }) if shape.streams > 16 => {
            Some("more than 16 parallel streams")
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
