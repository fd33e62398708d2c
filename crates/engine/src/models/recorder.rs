//! [`Recorder`]: what a family file writes its model through: the graph, and where each weight comes from.
//!
//! Families name modules as Hugging Face does (`model.layers.3.self_attn.q_proj`); the recorder finds the tensor
//! under the name and in the form that the checkpoint has it. Recording reads no weights, so sizes and plans of a
//! model cost nothing; [`Model::load`] reads the resident ones afterwards.

mod biased_experts;

use std::path::PathBuf;
use std::sync::Arc;

use moeflux_compute::graph::{
    ExpertSet, ExpertSetId, Graph, GraphBuilder, MatrixSpec, Precision, Value, WeightId,
};
use moeflux_compute::quant::{dequantize, dequantize_row};
use moeflux_compute::{Bytes, Tensor};

use crate::checkpoint::{Checkpoint, Format, StoredWeight};
use crate::experts::{ExpertForm, ExpertLocation, ExpertStore};
use crate::io::buffer::HostBuffer;
use crate::{Error, Result};

/// A recorded model: what it computes and where its weights are.
#[derive(Debug)]
pub struct Model {
    /// What it computes.
    pub graph: Graph,
    /// Where its routed experts are.
    pub experts: ExpertStore,
    /// Positions it was made for.
    pub context_length: usize,
    checkpoint: Arc<Checkpoint>,
    sources: Vec<Source>,
}

/// Where a resident weight comes from.
#[derive(Debug)]
struct Source {
    stored: StoredWeight,
    /// Small vectors enter the graph as f32, whatever they are stored as.
    as_f32: bool,
    /// Of a small tensor only every second value, from this one on.
    every_second: Option<usize>,
}

impl Model {
    /// Bytes of all resident weights.
    pub fn trunk_bytes(&self) -> u64 {
        self.graph.weights().iter().filter_map(|w| w.matrix.bytes().ok()).map(|b| b as u64).sum()
    }

    /// The checkpoint that the model is in.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// Reads the resident weights, in the order of [`Graph::weights`]; `progress` gets the bytes of each.
    ///
    /// # Errors
    /// If a read fails, memory runs out, or a weight holds a value that is not a number where that is cheap to see
    /// (norm weights and biases).
    pub fn load(&self, mut progress: impl FnMut(u64)) -> Result<Vec<Tensor>> {
        let load = |source: &Source| {
            let tensor = self.read(&source.stored)?;
            progress(tensor.bytes() as u64);
            if !source.as_f32 {
                return Ok(tensor);
            }
            let mut values = dequantize(tensor.view())?;
            if let Some(first) = source.every_second {
                values = values.into_iter().skip(first).step_by(2).collect();
            }
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(tensor_error(
                    &self.checkpoint,
                    &source.stored,
                    "finite values",
                    format!("{} at {at}", values[at]),
                ));
            }
            Ok(Tensor::from_f32(1, values.len(), &values)?)
        };
        self.sources.iter().map(load).collect()
    }

    /// Says which resident weight holds a value that is not finite, reading them again.
    pub fn find_not_finite(&self) -> String {
        for source in &self.sources {
            let Ok(tensor) = self.read(&source.stored) else { continue };
            let mut row = vec![0.0; tensor.cols()];
            for r in 0..tensor.rows() {
                if dequantize_row(tensor.view(), r, &mut row).is_ok()
                    && let Some(c) = row.iter().position(|v| !v.is_finite())
                {
                    return format!("tensor {} holds {} at row {r}, column {c}", source.stored.name, row[c]);
                }
            }
        }
        "every resident weight is finite, so a routed expert holds a value that is not, or values overflow"
            .into()
    }

    fn read(&self, weight: &StoredWeight) -> Result<Tensor> {
        let mut planes = vec![];
        for range in &weight.planes {
            let path = || self.checkpoint.files()[range.file].path().to_path_buf();
            let buffer = HostBuffer::zeroed(range.len as usize);
            let mut buffer =
                buffer.map_err(|source| Error::Io { action: "find memory for", path: path(), source })?;
            self.checkpoint.read(range, buffer.as_mut_slice())?;
            planes.push(Bytes::new(buffer));
        }
        Ok(Tensor::new(weight.dtype, weight.rows(), weight.cols(), planes)?)
    }
}

fn tensor_error(checkpoint: &Checkpoint, weight: &StoredWeight, expected: &str, got: String) -> Error {
    let path = weight.planes.first().map_or(PathBuf::new(), |p| checkpoint.files()[p.file].path().into());
    Error::Tensor { path, tensor: weight.name.clone(), expected: expected.into(), got }
}

/// A Hugging Face name and its GGUF counterpart, both within a layer or both at the top.
pub type NameMap = &'static [(&'static str, &'static str)];

/// Names that (nearly) all families share.
const COMMON_NAMES: NameMap = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];

/// Where the routed experts of a family are, below a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    /// The module that holds them in Hugging Face checkpoints: `mlp.experts`.
    pub module: &'static str,
    /// Names of gate, up and down in the module's elements: `gate_proj`, or `w1` for Mixtral.
    pub projections: [&'static str; 3],
}

/// Records one model of a checkpoint.
#[derive(Debug)]
pub struct Recorder {
    /// The graph so far.
    pub graph: GraphBuilder,
    checkpoint: Arc<Checkpoint>,
    /// What stands for `model.` at the start of names.
    prefix: &'static str,
    /// The family's own GGUF names, before the common ones.
    gguf_names: NameMap,
    sources: Vec<Source>,
    experts: Vec<(ExpertSet, Vec<ExpertLocation>)>,
}

impl Recorder {
    /// Starts recording a model of `checkpoint`.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        // Multimodal checkpoints keep their text model one level down.
        let prefixes = ["model.", "model.language_model.", "language_model.model."];
        let has = |prefix: &&str| checkpoint.contains(&format!("{prefix}embed_tokens.weight"));
        let prefix = prefixes.into_iter().find(has).unwrap_or("model.");
        Self {
            graph: GraphBuilder::new(),
            checkpoint,
            prefix,
            gguf_names: &[],
            sources: vec![],
            experts: vec![],
        }
    }

    /// Sets GGUF names that differ from the common ones.
    pub fn gguf_names(&mut self, names: NameMap) {
        self.gguf_names = names;
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// If the experts' byte ranges do not fit their shapes.
    pub fn finish(self, logits: Value, context_length: usize) -> Result<Model> {
        let graph = self.graph.finish(logits);
        let files = self.checkpoint.files().to_vec();
        let experts = ExpertStore::new(files, self.experts)?;
        Ok(Model { graph, experts, context_length, checkpoint: self.checkpoint, sources: self.sources })
    }

    /// The name that the checkpoint has for a module.
    fn resolve(&self, module: &str) -> String {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        if self.checkpoint.format() == Format::Gguf {
            let gguf = |name: &str| {
                let known = self.gguf_names.iter().chain(COMMON_NAMES).find(|(hf, _)| *hf == name);
                known.map_or(name, |(_, gguf)| gguf).to_owned()
            };
            return match layer {
                Some((layer, name)) => format!("blk.{layer}.{}", gguf(name)),
                None => gguf(module),
            };
        }
        let head_prefix = if self.prefix == "language_model.model." { "language_model." } else { "" };
        match module.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.prefix),
            None => format!("{head_prefix}{module}"),
        }
    }

    /// The weight `module.part` if the checkpoint has it.
    fn find(&self, module: &str, part: &str) -> Result<Option<StoredWeight>> {
        self.checkpoint.weight(&format!("{}.{part}", self.resolve(module)))
    }

    fn missing(&self, module: &str, part: &str) -> Error {
        let tensor = format!("{}.{part}", self.resolve(module));
        Error::MissingTensor { path: self.checkpoint.path().into(), tensor }
    }

    fn add(&mut self, stored: StoredWeight, as_f32: bool) -> Result<WeightId> {
        let (rows, cols) = (stored.rows(), stored.cols());
        let matrix = match as_f32 {
            true => MatrixSpec::vector(rows * cols),
            false => MatrixSpec { dtype: stored.dtype, rows, cols },
        };
        matrix.bytes()?;
        let id = self.graph.weight(stored.name.clone(), matrix);
        self.sources.push(Source { stored, as_f32, every_second: None });
        Ok(id)
    }

    /// Whether the checkpoint has the module.
    pub fn has(&self, module: &str) -> bool {
        self.checkpoint.contains(&format!("{}.weight", self.resolve(module)))
    }

    /// A weight matrix of `cols` columns and, if given, `rows` rows.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn matrix(&mut self, module: &str, rows: Option<usize>, cols: usize) -> Result<WeightId> {
        let stored = self.find(module, "weight")?.ok_or_else(|| self.missing(module, "weight"))?;
        let fits =
            stored.shape.len() == 2 && stored.cols() == cols && rows.is_none_or(|r| stored.rows() == r);
        if !fits || stored.rows() == 0 {
            let rows = rows.map_or("any".to_owned(), |r| r.to_string());
            let expected = format!("shape [{rows}, {cols}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        self.add(stored, false)
    }

    /// A vector of `len` values, as f32; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has another length.
    pub fn optional_vector(&mut self, module: &str, part: &str, len: usize) -> Result<Option<WeightId>> {
        let Some(stored) = self.find(module, part)? else { return Ok(None) };
        if stored.shape != [len] {
            let expected = format!("shape [{len}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        self.add(stored, true).map(Some)
    }

    /// A norm of each of `groups` equal parts of x.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn rms_norm(&mut self, x: Value, module: &str, groups: usize, eps: f32) -> Result<Value> {
        let weight = self.optional_vector(module, "weight", x.width() / groups.max(1))?;
        let weight = weight.ok_or_else(|| self.missing(module, "weight"))?;
        Ok(self.graph.rms_norm(x, weight, groups, eps)?)
    }

    /// x through a linear layer of `rows` outputs, with its bias if the checkpoint has one.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn linear(&mut self, x: Value, module: &str, rows: usize, precision: Precision) -> Result<Value> {
        let weight = self.matrix(module, Some(rows), x.width())?;
        let bias = self.optional_vector(module, "bias", rows)?;
        Ok(self.graph.linear(x, weight, bias, precision)?)
    }

    /// The bias of `experts` scores that is kept in `module`, or in GGUF in the layer.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn correction_bias(&mut self, module: &str, experts: usize) -> Result<WeightId> {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (module, part) = match (self.checkpoint.format(), layer) {
            (Format::Gguf, Some((layer, _))) => (format!("model.layers.{layer}.exp_probs_b"), "bias"),
            _ => (module.to_owned(), "e_score_correction_bias"),
        };
        let bias = self.optional_vector(&module, part, experts)?;
        bias.ok_or_else(|| self.missing(&module, part))
    }

    /// Whether the checkpoint has attention sinks for a layer.
    pub fn has_sinks(&self, layer: usize) -> bool {
        let (module, part) = self.sinks_name(layer);
        self.checkpoint.contains(&format!("{}.{part}", self.resolve(&module)))
    }

    fn sinks_name(&self, layer: usize) -> (String, &'static str) {
        match self.checkpoint.format() {
            Format::Gguf => (format!("model.layers.{layer}.attn_sinks"), "weight"),
            _ => (format!("model.layers.{layer}.self_attn"), "sinks"),
        }
    }

    /// The attention sinks of a layer, one logit a head, if the checkpoint has them.
    ///
    /// # Errors
    /// [`Error::Tensor`] if there is another number.
    pub fn sinks(&mut self, layer: usize, heads: usize) -> Result<Option<WeightId>> {
        let (module, part) = self.sinks_name(layer);
        self.optional_vector(&module, part, heads)
    }

    /// A small tensor's values, read at once; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn values(&self, raw_name: &str) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.checkpoint.tensor(raw_name)? else { return Ok(None) };
        Ok(Some(dequantize(tensor.view())?))
    }

    /// Declares the routed experts of `layer`, which take `hidden` columns, in whichever form they are stored.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<ExpertSetId> {
        let projections = match self.stacked_experts(layer, count, names)? {
            Some(stacked) => stacked,
            None => self.separate_experts(layer, count, names)?,
        };
        let [gate, up, down] = &projections;
        let spec = |all: &[StoredWeight]| -> Result<MatrixSpec> {
            let first = &all[0];
            for other in all {
                if (&other.shape, other.dtype) != (&first.shape, first.dtype) || other.shape.len() != 2 {
                    let expected = format!("{} {:?} as for expert 0", first.dtype, first.shape);
                    let got = format!("{} {:?}", other.dtype, other.shape);
                    return Err(tensor_error(&self.checkpoint, other, &expected, got));
                }
            }
            Ok(MatrixSpec { dtype: first.dtype, rows: first.rows(), cols: first.cols() })
        };
        let set = ExpertSet { layer, experts: count, gate: spec(gate)?, up: spec(up)?, down: spec(down)? };
        if set.gate.cols != hidden {
            let (expected, got) = (format!("{hidden} columns"), format!("{}", set.gate.cols));
            return Err(tensor_error(&self.checkpoint, &gate[0], &expected, got));
        }
        let location = |e: usize| ExpertLocation {
            form: ExpertForm::Separate,
            gate: gate[e].planes.clone(),
            up: up[e].planes.clone(),
            down: down[e].planes.clone(),
        };
        let locations = (0..count).map(location).collect();
        let id = self.graph.expert_set(set)?;
        self.experts.push((set, locations));
        Ok(id)
    }

    /// Gate, up and down of every expert, from one tensor a projection (GGUF, MLX) or with gate and up in one
    /// (transformers 5).
    fn stacked_experts(
        &self,
        layer: usize,
        count: usize,
        names: &ExpertNames,
    ) -> Result<Option<[Vec<StoredWeight>; 3]>> {
        let base = format!("model.layers.{layer}");
        let split = |stored: &StoredWeight| -> Result<Vec<StoredWeight>> {
            let each = (0..count).map(|e| stored.stack_element(e)).collect::<Option<Vec<_>>>();
            each.filter(|_| stored.shape[0] == count).ok_or_else(|| {
                let expected = format!("shape [{count}, rows, columns]");
                tensor_error(&self.checkpoint, stored, &expected, format!("{:?}", stored.shape))
            })
        };
        let stack = |module: &str| self.checkpoint.weight(module)?.map(|s| split(&s)).transpose();
        let three = |name: &dyn Fn(usize) -> String| -> Result<Option<[Vec<StoredWeight>; 3]>> {
            let Some(gate) = stack(&name(0))? else { return Ok(None) };
            let rest = |i: usize| {
                stack(&name(i))?.ok_or_else(|| Error::MissingTensor {
                    path: self.checkpoint.path().into(),
                    tensor: name(i),
                })
            };
            Ok(Some([gate, rest(1)?, rest(2)?]))
        };
        if self.checkpoint.format() == Format::Gguf {
            return three(&|i| format!("blk.{layer}.ffn_{}_exps.weight", ["gate", "up", "down"][i]));
        }
        let parent = names.module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
        let switch = self.resolve(&format!("{base}.{parent}.switch_mlp"));
        if let Some(found) = three(&|i| format!("{switch}.{}_proj.weight", ["gate", "up", "down"][i]))? {
            return Ok(Some(found));
        }
        let module = self.resolve(&format!("{base}.{}", names.module));
        if let Some(found) = three(&|i| format!("{module}.{}_proj.weight", ["gate", "up", "down"][i]))? {
            return Ok(Some(found));
        }
        let Some(gate_up) = stack(&format!("{module}.gate_up_proj"))? else { return Ok(None) };
        let down = format!("{module}.down_proj");
        let down = stack(&down)?
            .ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor: down })?;
        let half = |which: usize| -> Result<Vec<StoredWeight>> {
            let cut = |both: &StoredWeight| {
                let rows = both.rows() / 2;
                both.row_range(which * rows..(which + 1) * rows)
            };
            let cut = |both: &StoredWeight| {
                cut(both).filter(|_| both.rows().is_multiple_of(2)).ok_or_else(|| {
                    let got = format!("{}", both.rows());
                    tensor_error(&self.checkpoint, both, "an even number of rows", got)
                })
            };
            gate_up.iter().map(cut).collect()
        };
        Ok(Some([half(0)?, half(1)?, down]))
    }

    /// Gate, up and down of every expert, from a tensor each.
    fn separate_experts(
        &self,
        layer: usize,
        count: usize,
        names: &ExpertNames,
    ) -> Result<[Vec<StoredWeight>; 3]> {
        let one = |expert: usize, which: usize| {
            let tensor = match self.checkpoint.format() {
                Format::Gguf => format!("blk.{layer}.ffn_{}.{expert}.weight", ["gate", "up", "down"][which]),
                _ => {
                    let module = self.resolve(&format!("model.layers.{layer}.{}", names.module));
                    format!("{module}.{expert}.{}.weight", names.projections[which])
                }
            };
            let found = self.checkpoint.weight(&tensor)?;
            found.ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor })
        };
        let all = |which| (0..count).map(|e| one(e, which)).collect::<Result<Vec<_>>>();
        Ok([all(0)?, all(1)?, all(2)?])
    }
}
