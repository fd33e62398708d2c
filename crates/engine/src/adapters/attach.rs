//! Which of a model's operations an adapter's matrices belong to.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use moeflux_compute::graph::{
    ExpertLowRank, ExpertSet, Graph, LinearOp, LowRank, Op, StackedLowRank, WeightId,
};

use super::ModelAdapter;
use super::config::AdapterConfig;
use super::file::{AdapterFile, Matrix, Pair, check_rank};
use super::weights::{AdapterWeight, Stride};
use crate::checkpoint::Format;
use crate::models::{ExpertModule, GateUp, GgufOrder, Model, Module, Modules};
use crate::{Error, Result};

/// Names of gate, up and down in the modules of single experts.
const PROJECTIONS: [[&str; 2]; 3] = [["gate_proj", "w1"], ["up_proj", "w3"], ["down_proj", "w2"]];

/// Adds the adapter in `folder` to the model's graph.
pub(super) fn attach(model: &mut Model, name: &str, folder: &Path) -> Result<ModelAdapter> {
    let config = AdapterConfig::read(folder)?;
    let (file, pairs) = AdapterFile::open(folder)?;
    let Model { graph, modules, adapters, checkpoint, .. } = model;
    let first = graph.weights().len();
    let mut attaching = Attaching {
        number: adapters.len() as u32,
        gguf: checkpoint.format() == Format::Gguf,
        config,
        file,
        used: vec![false; pairs.len()],
        by_name: BTreeMap::new(),
        pairs,
        weights: vec![],
        described: String::new(),
    };
    attaching.name_pairs(modules)?;
    attaching.linears(graph, modules)?;
    for experts in &modules.experts {
        attaching.experts(graph, modules, experts)?;
    }
    attaching.check_used()?;
    let Attaching { file, weights, described, .. } = attaching;
    Ok(ModelAdapter { name: name.to_owned(), file, weights, first, described })
}

/// An adapter that is being added.
struct Attaching {
    number: u32,
    /// Whether the model is in a GGUF file.
    gguf: bool,
    config: AdapterConfig,
    file: AdapterFile,
    pairs: Vec<Pair>,
    /// Whether each pair has found its place.
    used: Vec<bool>,
    /// Pairs by the one name of their module; a module of several parameters may have several.
    by_name: BTreeMap<String, Vec<usize>>,
    weights: Vec<AdapterWeight>,
    described: String,
}

impl Attaching {
    fn name_pairs(&mut self, modules: &Modules) -> Result<()> {
        for (index, pair) in self.pairs.iter().enumerate() {
            let name = pair.module.replace(".base_layer", "");
            let Some(name) = modules.canonical(&name) else { return Err(self.unknown(pair)) };
            self.by_name.entry(name).or_default().push(index);
        }
        Ok(())
    }

    fn unknown(&self, pair: &Pair) -> Error {
        let expected = "a linear layer or routed experts of the model that adapters can be for".to_owned();
        self.file.fault(&pair.a, expected, format!("module {}", pair.module))
    }

    fn check_used(&self) -> Result<()> {
        let unused = self.used.iter().position(|used| !used);
        unused.map_or(Ok(()), |index| Err(self.unknown(&self.pairs[index])))
    }

    fn expect_shape(&self, matrix: &Matrix, rows: usize, cols: usize) -> Result<()> {
        if (matrix.rows, matrix.cols) == (rows, cols) {
            return Ok(());
        }
        let got = format!("[{}, {}]", matrix.rows, matrix.cols);
        Err(self.file.fault(matrix, format!("shape [{rows}, {cols}]"), got))
    }

    /// Declares a weight.
    fn add(&mut self, graph: &mut Graph, weight: AdapterWeight) -> WeightId {
        let id = graph.adapter_weight(weight.name(), weight.spec());
        self.weights.push(weight);
        id
    }

    /// What the adapter has for linear layers.
    fn linears(&mut self, graph: &mut Graph, modules: &Modules) -> Result<()> {
        // A of modules of which several weights have rows.
        let mut shared: BTreeMap<usize, WeightId> = BTreeMap::new();
        let last = graph.nodes().len().saturating_sub(1);
        for node in 0..graph.nodes().len() {
            let Op::Linear(LinearOp { weight, .. }) = graph.nodes()[node].op else { continue };
            let Some(index) = modules.linears.iter().position(|own| own.weight == weight) else { continue };
            let module = &modules.linears[index];
            let is_head = node == last && module.name == "model.embed_tokens";
            let places = modules.places(index, is_head);
            let found = places.into_iter().find_map(|place| match self.by_name.get(&place.module)?[..] {
                [pair] => Some((place, pair)),
                _ => None,
            });
            let Some((place, pair_index)) = found else { continue };
            let pair = self.pairs[pair_index].clone();
            let (rank, scale) = check_rank(&self.file, &self.config, (&pair, ""), 1)?;
            let cols = graph.weights()[weight.index()].matrix.cols;
            self.expect_shape(&pair.a, rank, cols)?;
            self.expect_shape(&pair.b, place.of, rank)?;
            let rows = self.ordered(graph, node, modules, module, &pair, place.rows)?;
            let a = match shared.get(&pair_index) {
                Some(a) => *a,
                None => self.add(graph, whole(pair.a)),
            };
            shared.insert(pair_index, a);
            let b = self.add(graph, AdapterWeight::Rows { matrix: pair.b, rows });
            self.used[pair_index] = true;
            writeln!(self.described, "{} {rank} {scale}", module.name).expect("a string takes text");
            graph.adapt_linear(node, LowRank { adapter: self.number, a, b, scale })?;
        }
        Ok(())
    }

    /// `rows` of a module in the order that the model's file has them in.
    fn ordered(
        &self,
        graph: &Graph,
        node: usize,
        modules: &Modules,
        module: &Module,
        pair: &Pair,
        rows: Vec<Range<usize>>,
    ) -> Result<Vec<Range<usize>>> {
        let order = if self.gguf { modules.gguf_order(module) } else { None };
        match order {
            None => Ok(rows),
            Some(GgufOrder::TiledHeads) => {
                let expected = "no module whose heads the model's GGUF file has in another order".to_owned();
                Err(self.file.fault(&pair.b, expected, format!("module {}", pair.module)))
            }
            Some(GgufOrder::RotatedPairs) => {
                let head_dim = head_dim(graph, node).ok_or_else(|| self.unknown(pair))?;
                let all: Vec<usize> = rows.into_iter().flatten().collect();
                let of = |row: usize| {
                    let (head, at) = (row / head_dim * head_dim, row % head_dim);
                    let row = all[head + at % 2 * (head_dim / 2) + at / 2];
                    row..row + 1
                };
                Ok((0..all.len()).map(of).collect())
            }
        }
    }

    /// What the adapter has for the experts of a layer.
    fn experts(&mut self, graph: &mut Graph, modules: &Modules, module: &ExpertModule) -> Result<()> {
        let set = graph.expert_sets()[module.set.0];
        let mut projections: [Option<StackedLowRank>; 3] = [const { None }; 3];
        for name in modules.expert_aliases(module) {
            for pair in self.by_name.get(&name).cloned().unwrap_or_default() {
                self.fused(graph, module, &set, pair, &mut projections)?;
            }
            for (which, names) in PROJECTIONS.iter().enumerate() {
                if let Some(own) = self.separate(graph, &name, &set, which, names)? {
                    projections[which] = Some(own);
                }
            }
        }
        if projections.iter().all(Option::is_none) {
            return Ok(());
        }
        for (which, own) in projections.iter().enumerate() {
            let Some(own) = own else { continue };
            writeln!(self.described, "{} {which} {:?}", module.name, own.scales)
                .expect("a string takes text");
        }
        Ok(graph.adapt_experts(module.set, ExpertLowRank { adapter: self.number, projections })?)
    }

    /// Projection `which` of experts that are modules each, below the module `name`.
    fn separate(
        &mut self,
        graph: &mut Graph,
        name: &str,
        set: &ExpertSet,
        which: usize,
        names: &[&str; 2],
    ) -> Result<Option<StackedLowRank>> {
        let find = |expert: usize| {
            let named = |own: &str| self.by_name.get(&format!("{name}.{expert}.{own}"));
            names.iter().find_map(|own| named(own)).and_then(|all| all.first().copied())
        };
        let found: Vec<Option<usize>> = (0..set.experts).map(find).collect();
        let Some(first) = found.iter().flatten().next() else { return Ok(None) };
        let Some(matrix) = [set.gate, Some(set.up), Some(set.down)][which] else {
            return Err(self.unknown(&self.pairs[*first]));
        };
        let dtypes = (self.pairs[*first].a.dtype, self.pairs[*first].b.dtype);
        let (mut scales, mut rank) = (vec![0.0; set.experts], 0);
        for (expert, index) in found.iter().enumerate() {
            let Some(index) = index else { continue };
            let pair = self.pairs[*index].clone();
            let (own, scale) = check_rank(&self.file, &self.config, (&pair, ""), 1)?;
            self.expect_shape(&pair.a, own, matrix.cols)?;
            self.expect_shape(&pair.b, matrix.rows, own)?;
            for (own, of_all) in [(&pair.a, dtypes.0), (&pair.b, dtypes.1)] {
                if own.dtype != of_all {
                    let expected = format!("{of_all} as of the other experts");
                    return Err(self.file.fault(own, expected, own.dtype.to_string()));
                }
            }
            (scales[expert], rank) = (scale, rank.max(own));
            self.used[*index] = true;
        }
        let of = |matrix: fn(&Pair) -> &Matrix| -> Vec<Option<Matrix>> {
            found.iter().map(|index| index.map(|index| matrix(&self.pairs[index]).clone())).collect()
        };
        let (a, b) = (of(|pair| &pair.a), of(|pair| &pair.b));
        let a = AdapterWeight::Experts { matrices: a, dtype: dtypes.0, rows: rank, cols: matrix.cols };
        let b = AdapterWeight::Experts { matrices: b, dtype: dtypes.1, rows: matrix.rows, cols: rank };
        Ok(Some(StackedLowRank { a: self.add(graph, a), b: self.add(graph, b), scales }))
    }

    /// What a pair for all experts of a layer together adds: PEFT's `target_parameters`, whose A has an expert's rows after the
    /// other's, and whose B has columns by rank, then by expert.
    fn fused(
        &mut self,
        graph: &mut Graph,
        module: &ExpertModule,
        set: &ExpertSet,
        index: usize,
        projections: &mut [Option<StackedLowRank>; 3],
    ) -> Result<()> {
        let pair = self.pairs[index].clone();
        let (experts, hidden, inner) = (set.experts, set.up.cols, set.width());
        let first = if set.gate.is_some() { 2 * inner } else { inner };
        // Parameters that have columns as rows may have A for their outputs.
        let (is_first, transposed) = match (pair.a.cols, pair.b.rows) {
            shape if shape == (hidden, first) => (true, false),
            shape if shape == (inner, hidden) => (false, false),
            shape if shape == (first, hidden) => (true, true),
            shape if shape == (hidden, inner) => (false, true),
            (cols, rows) => {
                let expected = format!(
                    "A and B of {hidden} columns and {first} rows, or of {inner} and {hidden}, of experts"
                );
                return Err(self.file.fault(&pair.a, expected, format!("{cols} columns and {rows} rows")));
            }
        };
        let parameter = match (is_first, set.gate.is_some()) {
            (true, true) => ".gate_up_proj",
            (true, false) => ".up_proj",
            (false, _) => ".down_proj",
        };
        let (rank, scale) = check_rank(&self.file, &self.config, (&pair, parameter), experts)?;
        let stride = |start, step, len| Stride { start, step, len };
        let parts: Vec<(usize, Stride)> = match (is_first, set.gate.is_some(), module.gate_up) {
            (false, ..) => vec![(2, stride(0, 1, hidden))],
            (true, false, _) => vec![(1, stride(0, 1, inner))],
            (true, true, GateUp::Halves) => {
                vec![(0, stride(0, 1, inner)), (1, stride(inner, 1, inner))]
            }
            (true, true, GateUp::Interleaved) => vec![(0, stride(0, 2, inner)), (1, stride(1, 2, inner))],
        };
        if parts.iter().any(|(which, _)| projections[*which].is_some()) {
            return Err(self.unknown(&pair));
        }
        let a = match transposed {
            true => AdapterWeight::TransposedB { matrix: pair.b.clone(), experts },
            false => whole(pair.a.clone()),
        };
        let a = self.add(graph, a);
        for (which, rows) in parts {
            let b = match transposed {
                true => AdapterWeight::TransposedA { matrix: pair.a.clone(), experts, rows },
                false => AdapterWeight::ByRank { matrix: pair.b.clone(), experts, rows },
            };
            let b = self.add(graph, b);
            projections[which] = Some(StackedLowRank { a, b, scales: vec![scale; experts] });
        }
        self.used[index] = true;
        writeln!(self.described, "{rank}").expect("a string takes text");
        Ok(())
    }
}

/// All rows of a matrix.
fn whole(matrix: Matrix) -> AdapterWeight {
    let rows = std::iter::once(0..matrix.rows).collect();
    AdapterWeight::Rows { matrix, rows }
}

/// Channels of a head of the attention that node `node` belongs to.
fn head_dim(graph: &Graph, node: usize) -> Option<usize> {
    let name = &graph.nodes()[node].name;
    graph.nodes()[node..].iter().find_map(|other| match &other.op {
        Op::Attention(op) if other.name == *name => Some(graph.caches()[op.cache.0].head_dim),
        _ => None,
    })
}
