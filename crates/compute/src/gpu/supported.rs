//! What GPUs have kernels for. Other graphs are refused before anything is made ready.
//!
//! Kernels keep queries, scores and chosen experts in threadgroup memory, and states in registers, which are limited.

use crate::gpu::memory::is_plain;
use crate::graph::{BlockScore, CompressedCacheId, Graph, Op};
use crate::{Error, Result};

/// The first operation of `graph` that there is no kernel of.
pub(crate) fn unsupported(graph: &Graph) -> Option<&'static str> {
    graph.nodes().iter().find_map(|node| refused(graph, &node.op))
}

/// What there is no kernel of, if an operation has none: all of it, by its name, or what is too large for kernels.
fn refused(graph: &Graph, op: &Op) -> Option<&'static str> {
    match op {
        Op::Attention(op) => {
            let shape = graph.caches()[op.cache.0];
            if shape.head_dim > 512 {
                return Some("heads of more than 512 channels");
            }
            (shape.value_dim > 512).then_some("values of more than 512 channels")
        }
        Op::LatentAttention(op) => {
            let shape = graph.latent_caches()[op.cache.0];
            if shape.rank > 512 {
                return Some("latents of more than 512 channels");
            }
            (shape.rank + shape.rope > 640).then_some("latents with rotated keys of more than 640 channels")
        }
        Op::CompressedAttention(op) => too_wide(graph, op.cache),
        Op::BlockAttention(op) => too_wide(graph, op.cache),
        Op::Route(op) => {
            if op.route.experts > 1024 {
                return Some("routers of more than 1024 experts");
            }
            (op.route.top_k > 64).then_some("routers that choose more than 64 experts")
        }
        Op::TopSoftmax(op) => {
            if op.logits.width() > 1024 {
                return Some("softmaxes over some of more than 1024 logits");
            }
            (op.top_k > 64).then_some("softmaxes over more than 64 chosen logits")
        }
        Op::GatedDeltaRule(op) => {
            (op.shape.key_dim > 512).then_some("delta rules of more than 512 channels a key")
        }
        Op::SsmScan(op) => {
            (op.shape.state_size > 256).then_some("state space models of more than 256 numbers a channel")
        }
        Op::HyperWeights(op) => (op.shape.streams > 16).then_some("more than 16 parallel streams"),
        Op::Linear(_) | Op::MoeExperts(_) => {
            (!is_plain(graph, op)).then_some("adapters in other encodings than F32, F16 and BF16")
        }
        Op::ChooseBlocks(op) => {
            let by_token = op.choice.score != BlockScore::Sum;
            (by_token && op.choice.index.head_dim > 512).then_some("an index of more than 512 channels")
        }
        Op::SoftmaxMix(op) => (op.values.len() > 14).then_some("mixtures of more than 14 values"),
        Op::BidirectionalAttention(op) => {
            (op.q.width() / op.heads > 128).then_some("heads of more than 128 channels that see all rows")
        }
        #[cfg(test)]
        Op::CpuOnly(_) => Some(op.label()),
        Op::Embed(_)
        | Op::Add(_)
        | Op::Clamp(_)
        | Op::Standardize(_)
        | Op::BlockRows(_)
        | Op::Gelu(_)
        | Op::InputRows(_)
        | Op::GivenEmbeddings(_)
        | Op::Slice(_)
        | Op::Join(_)
        | Op::Repeat(_)
        | Op::GatherRows(_)
        | Op::GroupedLinear(_)
        | Op::RmsNorm(_)
        | Op::LayerNorm(_)
        | Op::RoundBlocks(_)
        | Op::Activate(_)
        | Op::ScaledSilu(_)
        | Op::Gate(_)
        | Op::Rope(_)
        | Op::PositionScale(_)
        | Op::HeadScale(_)
        | Op::WindowPool(_)
        | Op::WindowMean(_)
        | Op::CausalConv1d(_)
        | Op::NGramEmbed(_)
        | Op::HyperCollapse(_)
        | Op::HyperExpand(_)
        | Op::GatedMean(_)
        | Op::StreamAdd(_)
        | Op::StreamGate(_) => None,
    }
}

fn too_wide(graph: &Graph, cache: CompressedCacheId) -> Option<&'static str> {
    (graph.compressed_caches()[cache.0].head_dim > 512).then_some("heads of more than 512 channels")
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

#[cfg(test)]
mod tests {
    use crate::backend::{Backend, CompileOptions};
    use crate::gpu::{GpuBackend, GpuOptions};
    use crate::graph::{GraphBuilder, MatrixSpec};
    use crate::{DType, Error, Tensor};

    #[test]
    fn an_operation_without_kernels_is_refused_by_name_before_a_device_is_opened() {
        let mut g = GraphBuilder::new();
        let table = g.weight("table", MatrixSpec { dtype: DType::F32, rows: 2, cols: 3 });
        let x = g.embed(table);
        let x = g.cpu_only(x);
        let graph = g.finish(x);
        let weights = vec![Tensor::from_f32(2, 3, &[0.5; 6]).unwrap()];
        let options = CompileOptions::default();

        let unopened = || Err(Error::Device { reason: "opened".into() });
        let gpu = GpuBackend::new("none", GpuOptions::default(), unopened);
        let error = gpu.compile(&graph, weights, options).err().expect("refused").to_string();
        assert!(error.contains("no GPU kernels of cpu_only: use the CPU"), "{error}");
        assert_eq!(gpu.scratch_bytes(&graph, options), 0);
    }

    #[test]
    fn what_is_too_large_for_kernels_is_refused_by_name() {
        let refused = |terms: usize| {
            let mut g = GraphBuilder::new();
            let table = g.weight("table", MatrixSpec { dtype: DType::F32, rows: 2, cols: 1 });
            let x = g.embed(table);
            let out = g.softmax_mix(vec![x; terms], vec![x; terms]).unwrap();
            super::unsupported(&g.finish(out))
        };
        assert_eq!([14, 15].map(refused), [None, Some("mixtures of more than 14 values")]);
    }
}
