//! The scalar meaning of every operation: the oracle that other backends are tested against.
//!
//! Nothing here is fast. Sums are accumulated in f64 so that the oracle's own rounding stays far below any
//! tolerance; activations are never quantised and keys and values are cached as f32.

mod activation;
mod attention;
mod compressed;
mod experts;
mod hyper;
mod linear;
mod low_rank;
mod ngrams;
mod norm;
mod recurrent;
mod rope;
mod rows;
mod selection;

use std::collections::HashMap;
use std::sync::Arc;

use activation::softplus;
pub use activation::{activate, sigmoid, squared_relu, swiglu};
pub use attention::{attend, visible};
use compressed::index_score;
pub use compressed::window_pool;
pub use experts::{expert, route, route_by_token};
pub use hyper::{gated_mean, hyper_collapse, hyper_expand, hyper_weights, stream_add, stream_gate};
pub use linear::{dot, linear};
pub use norm::{layer_norm, rms_norm};
pub use recurrent::{DeltaToken, SsmToken, causal_conv1d, gated_delta_rule, kept, ssm_scan};
pub use rope::rope;
pub use selection::seen;

use crate::backend::{
    Backend, Batch, CompileOptions, Executable, ExpertSource, KvType, PAGE_TOKENS, page_bytes, slot_bytes,
};
use crate::graph::{Graph, Output, Value, WeightId, with_op};
use crate::quant::dequantize_row;
use crate::{Error, Result, Tensor};

/// The backend that runs graphs by these definitions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Backend for Reference {
    fn describe(&self) -> String {
        "reference (scalar)".into()
    }

    fn scratch_bytes(&self, graph: &Graph, options: CompileOptions) -> usize {
        let width = |out| if let Output::Value(value) = out { value.width() } else { 0 };
        let widths: usize = graph.nodes.iter().map(|node| width(node.out)).sum();
        (widths * size_of::<f32>()).saturating_mul(options.max_rows)
    }

    fn compile(&self, graph: &Graph, weights: Vec<Tensor>, _: CompileOptions) -> Result<Box<dyn Executable>> {
        graph.check_weights(&weights)?;
        Ok(Box::new(Interpreter {
            graph: Arc::new(graph.clone()),
            weights,
            pages: HashMap::new(),
            latents: HashMap::new(),
            compressed: HashMap::new(),
            states: HashMap::new(),
        }))
    }
}

/// Little-endian f32, if there are `expected` bytes of them.
fn floats<'a>(op: &'static str, bytes: &'a [u8], expected: usize) -> Result<impl Iterator<Item = f32> + 'a> {
    if bytes.len() != expected {
        return Err(Error::Shape { op, what: "bytes", expected, got: bytes.len() });
    }
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

/// A cached key or value row: (kv_heads · head_dim), by cache, page and offset in the page.
type KvKey = (usize, u32, usize);

struct Interpreter {
    graph: Arc<Graph>,
    weights: Vec<Tensor>,
    pages: HashMap<KvKey, (Vec<f32>, Vec<f32>)>,
    /// By state and slot.
    states: HashMap<(usize, u32), Vec<f32>>,
    /// c and rotated key of a token.
    latents: HashMap<KvKey, (Vec<f32>, Vec<f32>)>,
    /// Pages of compressed attention by cache and page, laid out as [`crate::graph::CompressedAttention`] says.
    compressed: HashMap<(usize, u32), Vec<f32>>,
}

type Matrix = Vec<Vec<f32>>;

/// For each token the chosen experts with their weights.
type Routed = Vec<Vec<(u32, f32)>>;

/// What an operation yields.
enum Outcome {
    Rows(Matrix),
    Routing(Routed),
}

/// What an operation is run with.
struct ReferenceCall<'a> {
    batch: &'a Batch<'a>,
    experts: &'a mut dyn ExpertSource,
    values: &'a [Matrix],
    routings: &'a [Routed],
}

impl<'a> ReferenceCall<'a> {
    fn of(&self, value: Value) -> &'a Matrix {
        &self.values[value.index]
    }

    /// Of the batch's tokens.
    fn positions(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.batch.spans.iter().flat_map(|span| span.start..span.start + span.rows.len())
    }
}

/// An operation's meaning.
trait ReferenceOp {
    fn run(&self, own: &mut Interpreter, call: &mut ReferenceCall<'_>) -> Result<Outcome>;
}

impl Interpreter {
    /// The values of the first `nodes` nodes.
    fn values(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        nodes: usize,
    ) -> Result<Vec<Matrix>> {
        let graph = Arc::clone(&self.graph);
        let mut values: Vec<Matrix> = vec![vec![]; graph.values];
        let mut routings: Vec<Routed> = vec![vec![]; graph.routings];
        for node in &graph.nodes[..nodes] {
            let mut call = ReferenceCall { batch, experts, values: &values, routings: &routings };
            let outcome = with_op!(&node.op, op => op.run(self, &mut call))?;
            match (node.out, outcome) {
                (Output::Value(out), Outcome::Rows(rows)) => values[out.index] = rows,
                (Output::Routing(out), Outcome::Routing(choices)) => routings[out.index] = choices,
                _ => unreachable!("only a route yields a routing"),
            }
        }
        Ok(values)
    }

    fn vector(&self, id: WeightId) -> Result<Vec<f32>> {
        let view = self.weights[id.0].view();
        let mut out = vec![0.0; view.cols()];
        dequantize_row(view, 0, &mut out)?;
        Ok(out)
    }
}

impl Executable for Interpreter {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        let values = self.values(batch, experts, self.graph.nodes.len())?;
        logits.clear();
        logits.extend(values[self.graph.logits.index].iter().flatten());
        Ok(())
    }

    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        experts: &mut dyn ExpertSource,
        visit: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        let hidden = self.graph.hidden().ok_or(Error::NoHead)?;
        let values = self.values(batch, experts, self.graph.nodes.len() - 1)?;
        values[hidden.index].iter().for_each(|row| visit(row));
        Ok(())
    }

    fn reserve_pages(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn reserve_slots(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn page_bytes(&self) -> usize {
        page_bytes(&self.graph, KvType::F32)
    }

    fn read_page(&self, page: u32, out: &mut Vec<u8>) -> Result<()> {
        for (cache, shape) in self.graph.caches.iter().enumerate() {
            let [keys, values] =
                [shape.head_dim, shape.value_dim].map(|width| vec![0.0; shape.kv_heads * width]);
            let rows = (0..PAGE_TOKENS).map(|offset| self.pages.get(&(cache, page, offset)));
            let rows: Vec<_> = rows.map(|row| row.map_or((&keys, &values), |(k, v)| (k, v))).collect();
            for row in rows.iter().map(|r| r.0).chain(rows.iter().map(|r| r.1)) {
                out.extend(row.iter().flat_map(|v| v.to_le_bytes()));
            }
        }
        for (cache, shape) in self.graph.latent_caches.iter().enumerate() {
            for offset in 0..PAGE_TOKENS {
                match self.latents.get(&(cache, page, offset)) {
                    Some((c, k_rope)) => out.extend(c.iter().chain(k_rope).flat_map(|v| v.to_le_bytes())),
                    None => out.resize(out.len() + (shape.rank + shape.rope) * size_of::<f32>(), 0),
                }
            }
        }
        for (cache, shape) in self.graph.compressed_caches.iter().enumerate() {
            match self.compressed.get(&(cache, page)) {
                Some(values) => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
                None => out.resize(out.len() + shape.page_elements() * size_of::<f32>(), 0),
            }
        }
        Ok(())
    }

    fn write_page(&mut self, page: u32, bytes: &[u8]) -> Result<()> {
        let mut values = floats("page", bytes, self.page_bytes())?;
        for (cache, shape) in self.graph.caches.iter().enumerate() {
            let mut half = |width: usize| -> Matrix {
                (0..PAGE_TOKENS).map(|_| values.by_ref().take(shape.kv_heads * width).collect()).collect()
            };
            for (offset, row) in half(shape.head_dim).into_iter().zip(half(shape.value_dim)).enumerate() {
                self.pages.insert((cache, page, offset), row);
            }
        }
        for (cache, shape) in self.graph.latent_caches.iter().enumerate() {
            for offset in 0..PAGE_TOKENS {
                let c = values.by_ref().take(shape.rank).collect();
                let k_rope = values.by_ref().take(shape.rope).collect();
                self.latents.insert((cache, page, offset), (c, k_rope));
            }
        }
        for (cache, shape) in self.graph.compressed_caches.iter().enumerate() {
            self.compressed.insert((cache, page), values.by_ref().take(shape.page_elements()).collect());
        }
        Ok(())
    }

    fn slot_bytes(&self) -> usize {
        slot_bytes(&self.graph)
    }

    fn read_slot(&self, slot: u32, out: &mut Vec<u8>) -> Result<()> {
        for (state, elements) in self.graph.states.iter().enumerate() {
            match self.states.get(&(state, slot)) {
                Some(held) => out.extend(held.iter().flat_map(|v| v.to_le_bytes())),
                None => out.resize(out.len() + elements * size_of::<f32>(), 0),
            }
        }
        Ok(())
    }

    fn write_slot(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        let mut values = floats("state slot", bytes, self.slot_bytes())?;
        for (state, elements) in self.graph.states.iter().enumerate() {
            self.states.insert((state, slot), values.by_ref().take(*elements).collect());
        }
        Ok(())
    }
}
