//! The CPU backend: SIMD kernels chosen at run time, on a persistent thread pool.

pub(crate) mod activate;
pub mod activations;
mod attention;
mod bidirectional_attention;
mod block_attention;
mod causal_conv1d;
mod choose_blocks;
mod compressed_attention;
mod executable;
mod forecast;
mod gated_delta_rule;
mod gathered;
mod head_group;
mod hyper;
mod latent_attention;
mod linear;
mod low_rank;
pub mod matmul;
mod moe_experts;
mod ngrams;
mod norm;
mod pages;
pub mod pool;
mod rope;
mod route;
mod rows;
pub(crate) mod shared;
pub mod simd;
mod slots;
mod ssm_scan;
mod steps;
mod values;
pub mod vector;
mod window_pool;

use std::sync::Arc;

use crate::backend::{Backend, CompileOptions, Executable};
use crate::graph::{Graph, Output};
use crate::{Result, Tensor};
use executable::CpuExecutable;
use linear::CpuContext;
use pool::ThreadPool;
pub use simd::{Simd, SimdLevel};
use values::ValueBuffers;

/// Runs graphs on the CPU.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    pool: Arc<ThreadPool>,
    simd: Simd,
}

impl CpuBackend {
    /// A backend of `threads` threads, limited to `level` or using the best that the machine has.
    ///
    /// # Errors
    /// [`crate::Error::SimdLevel`] if the machine lacks the level.
    pub fn new(threads: usize, level: Option<SimdLevel>) -> Result<Self> {
        Ok(Self::with_simd(threads, level.map_or_else(|| Ok(Simd::detect()), Simd::new)?))
    }

    /// A backend of `threads` threads with the kernels of `simd`.
    pub fn with_simd(threads: usize, simd: Simd) -> Self {
        Self { pool: Arc::new(ThreadPool::new(threads)), simd }
    }
}

impl Backend for CpuBackend {
    fn describe(&self) -> String {
        format!("cpu ({}, {} threads)", self.simd, self.pool.threads())
    }

    fn batch_invariant(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
        let top_k = graph
            .nodes()
            .iter()
            .map(|n| if let Output::Routing(routing) = n.out { routing.top_k() } else { 0 });
        let top_k = top_k.max().unwrap_or(0);
        let terms = 1 + usize::from(has_second_term(graph));
        let moe = graph
            .expert_sets()
            .iter()
            .map(|set| moe_experts::scratch_bytes(set, top_k, options.max_rows, terms));
        let latent = graph.latent_caches().iter();
        let latent =
            latent.map(|c| latent_attention::scratch_bytes(c, options.max_rows, self.pool.threads()));
        let compressed = graph.compressed_caches().iter();
        let compressed =
            compressed.map(|c| compressed_attention::scratch_bytes(c, options.max_rows, self.pool.threads()));
        let logits = graph.vocab_size() * size_of::<f32>();
        let packed = bidirectional_attention::scratch_bytes(graph, options.max_rows);
        // One more widest row stands for the int8 copy of a value.
        let every = if options.every_hidden { graph.with_every_hidden() } else { None };
        let values = match &every {
            Some((graph, hidden)) => ValueBuffers::new(graph, Some(*hidden)),
            None => ValueBuffers::new(graph, None),
        };
        let widest = values.widest() * 2 * terms;
        let rows = (values.row_bytes() + widest).saturating_mul(options.max_rows);
        let experts = graph.expert_sets().iter().flat_map(|set| [set.up.cols, set.down.cols]);
        let cols = graph.weights().iter().map(|w| w.matrix.cols).chain(experts).max().unwrap_or(0);
        let products =
            self.pool.threads() * matmul::scratch_bytes(options.max_rows.saturating_mul(terms), cols);
        let adapters = low_rank::scratch_bytes(graph, top_k, options.max_rows);
        let shared = moe.max().unwrap_or(0).saturating_add(latent.chain(compressed).max().unwrap_or(0));
        let beside = products.saturating_add(adapters).saturating_add(packed);
        rows.saturating_add(shared).saturating_add(beside).saturating_add(logits)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: Vec<Tensor>,
        options: CompileOptions,
    ) -> Result<Box<dyn Executable>> {
        let context = CpuContext {
            pool: Arc::clone(&self.pool),
            simd: self.simd,
            activations: options.activations,
            second_term: has_second_term(graph),
        };
        Ok(Box::new(CpuExecutable::new(context, graph.clone(), weights, options)?))
    }
}

/// Whether int8 activations have a second term: all of a model's have if those of any of its weights are to.
fn has_second_term(graph: &Graph) -> bool {
    let experts = graph.expert_sets().iter().flat_map(|set| [set.up.dtype, set.down.dtype]);
    graph.weights().iter().map(|w| w.matrix.dtype).chain(experts).any(matmul::takes_second_term)
}
