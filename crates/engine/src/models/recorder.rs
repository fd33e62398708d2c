//! [`Recorder`]: what a family file writes its model through: the graph, and where each weight comes from.
//!
//! Families name modules as Hugging Face does (`model.layers.3.self_attn.q_proj`); the recorder finds the tensor
//! under the name and in the form that the checkpoint has it. Recording reads no weights, so sizes and plans of a
//! model cost nothing; [`Model::load`] reads the resident ones afterwards.

mod biased_experts;
pub mod outline;

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use moeflux_compute::graph::{
    ExpertSet, ExpertSetId, Graph, GraphBuilder, MatrixSpec, Precision, Value, WeightId,
};
use moeflux_compute::quant::{dequantize, dequantize_row, find_not_finite};
use moeflux_compute::{Bytes, DType, Tensor};

use crate::checkpoint::{ByteRange, Checkpoint, Format, StoredWeight};
use crate::experts::{ExpertForm, ExpertLocation, ExpertStore};
use crate::io::buffer::HostBuffer;
use crate::{Error, Result};
use outline::{Need, Outline, OutlinedWeight};

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
    part: Part,
    form: Form,
}

/// Which part of a stored weight a weight of the graph is.
#[derive(Debug)]
enum Part {
    Whole,
    /// These rows, in this order. Vectors have rows of one element.
    Rows(Vec<Range<usize>>),
    /// Every second value from this one on; of small weights that enter the graph as f32.
    EverySecond(usize),
}

impl Source {
    /// Rows of the stored weight.
    fn stored_rows(&self) -> usize {
        if let [n] = self.stored.shape[..] { n } else { self.stored.rows() }
    }

    /// The rows that are read, in this order.
    fn rows(&self) -> Vec<Range<usize>> {
        match &self.part {
            Part::Rows(rows) => rows.clone(),
            Part::Whole | Part::EverySecond(_) => std::iter::once(0..self.stored_rows()).collect(),
        }
    }

    /// The part of the stored weight that is read.
    fn read_part(&self) -> &Part {
        if self.form == Form::Widened { &Part::Whole } else { &self.part }
    }
}

/// What a weight is in the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As it is stored.
    Stored,
    /// f32 matrices: rows that cannot be cut out as they are stored.
    Widened,
    /// f32, as small vectors are whatever they are stored as.
    F32,
    /// f32, one more than is stored: norm weights that are kept as their distance from one.
    F32PlusOne,
    /// f32, −exp of what is stored: A of a decay that is kept as its logarithm.
    F32NegativeExp,
}

impl Form {
    fn of(self, value: f32) -> f32 {
        match self {
            Self::Stored | Self::Widened | Self::F32 => value,
            Self::F32PlusOne => value + 1.0,
            Self::F32NegativeExp => -value.exp(),
        }
    }
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
            let tensor = self.read(source)?;
            progress(tensor.bytes() as u64);
            if source.form == Form::Stored {
                return Ok(tensor);
            }
            if source.form == Form::Widened {
                return widened(&tensor, &source.rows());
            }
            let (first, step) = match source.part {
                Part::EverySecond(first) => (first, 2),
                Part::Whole | Part::Rows(_) => (0, 1),
            };
            let stored = dequantize(tensor.view())?;
            let values: Vec<f32> =
                stored.into_iter().skip(first).step_by(step).map(|v| source.form.of(v)).collect();
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

    /// Says which resident weight holds a value that is not finite, if any does, reading them again.
    pub fn find_not_finite(&self) -> Option<String> {
        for source in &self.sources {
            let Ok(tensor) = self.read(source) else { continue };
            if let Ok(Some(at)) = find_not_finite(tensor.view()) {
                return Some(format!("tensor {} holds {at}", source.stored.name));
            }
        }
        None
    }

    fn read(&self, source: &Source) -> Result<Tensor> {
        let weight = &source.stored;
        let stored_rows = source.stored_rows();
        let rows: usize = match source.read_part() {
            Part::Rows(rows) => rows.iter().map(Range::len).sum(),
            Part::Whole | Part::EverySecond(_) => stored_rows,
        };
        let mut planes = vec![];
        for (index, plane) in weight.planes.iter().enumerate() {
            let path = || self.checkpoint.files().get(plane.file).map_or(PathBuf::new(), |f| f.path().into());
            // A plane's row may stand for several rows of the weight.
            let block = weight.dtype.block_rows(index);
            let each = plane.len.checked_div(stored_rows.div_ceil(block) as u64).unwrap_or(0);
            let parts: Vec<ByteRange> = match source.read_part() {
                Part::Whole | Part::EverySecond(_) => vec![*plane],
                Part::Rows(chosen) => {
                    let part = |rows: &Range<usize>| {
                        let blocks = rows.start / block..rows.end.div_ceil(block);
                        let offset = plane.offset + each * blocks.start as u64;
                        ByteRange { offset, len: each * blocks.len() as u64, ..*plane }
                    };
                    chosen.iter().map(part).collect()
                }
            };
            let bytes: u64 = parts.iter().map(|part| part.len).sum();
            let mut buffer = HostBuffer::zeroed(bytes as usize).map_err(|source| Error::Io {
                action: "find memory for",
                path: path(),
                source,
            })?;
            let mut rest = buffer.as_mut_slice();
            for part in &parts {
                let (to, after) = rest.split_at_mut(part.len as usize);
                self.checkpoint.read(part, to)?;
                rest = after;
            }
            planes.push(Bytes::new(buffer));
        }
        let (rows, cols) = if weight.shape.len() == 1 { (1, rows) } else { (rows, weight.cols()) };
        Ok(Tensor::new(weight.dtype, rows, cols, planes)?)
    }
}

/// Rows `rows` of `tensor` as f32.
fn widened(tensor: &Tensor, rows: &[Range<usize>]) -> Result<Tensor> {
    let chosen: Vec<usize> = rows.iter().cloned().flatten().collect();
    let mut values = vec![0.0; chosen.len() * tensor.cols()];
    for (row, out) in chosen.iter().zip(values.chunks_exact_mut(tensor.cols())) {
        dequantize_row(tensor.view(), *row, out)?;
    }
    Ok(Tensor::from_f32(chosen.len(), tensor.cols(), &values)?)
}

/// Whether these rows, one after the other, can have the scales that they are stored with: whole blocks, but at the end.
fn whole_blocks(dtype: DType, parts: &[Range<usize>]) -> bool {
    (0..dtype.planes()).map(|plane| dtype.block_rows(plane)).all(|block| {
        let (starts, ends) = (parts.iter().map(|p| p.start), parts.iter().map(|p| p.end));
        starts.chain(ends.rev().skip(1)).all(|row| row.is_multiple_of(block))
    })
}

fn tensor_error(checkpoint: &Checkpoint, weight: &StoredWeight, expected: &str, got: String) -> Error {
    let file = weight.planes.first().and_then(|plane| checkpoint.files().get(plane.file));
    let path = file.map_or_else(|| checkpoint.path().into(), |file| file.path().into());
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
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
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
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.embed_q", "attn_k_b"),
    ("self_attn.unembed_out", "attn_v_b"),
];

/// Where the routed experts of a family are, below a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNames {
    /// The module that holds them in Hugging Face checkpoints: `mlp.experts`.
    pub module: &'static str,
    /// Names of gate, up and down in the module's elements: `gate_proj`, or `w1` for Mixtral.
    pub projections: [&'static str; 3],
}

/// A tensor's name without numbers.
fn without_layer(name: &str) -> String {
    name.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Records one model of a checkpoint.
#[derive(Debug)]
pub struct Recorder {
    /// The graph so far.
    pub graph: GraphBuilder,
    checkpoint: Arc<Checkpoint>,
    /// What stands for `model.` at the start of names.
    prefix: &'static str,
    /// How norm weights are stored.
    norms: Form,
    /// Names of all biases without the number of their layer.
    biases: HashSet<String>,
    sources: Vec<Source>,
    experts: Vec<(ExpertSet, Vec<ExpertLocation>)>,
    /// What the weights would be, for a checkpoint that has none.
    outline: Option<Outline>,
}

impl Recorder {
    /// Starts recording a model of `checkpoint`, which has a configuration only: weights are as `outline` says.
    pub fn outlined(checkpoint: Arc<Checkpoint>, outline: Outline) -> Self {
        Self { outline: Some(outline), ..Self::new(checkpoint) }
    }

    /// Starts recording a model of `checkpoint`.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        // Multimodal checkpoints keep their text model one level down.
        let prefixes = ["model.", "model.language_model.", "language_model.model."];
        let has = |prefix: &&str| checkpoint.contains(&format!("{prefix}embed_tokens.weight"));
        let prefix = prefixes.into_iter().find(has).unwrap_or("model.");
        let biases = checkpoint.names().filter(|name| name.ends_with(".bias")).map(without_layer).collect();
        Self {
            graph: GraphBuilder::new(),
            biases,
            checkpoint,
            prefix,
            norms: Form::F32,
            sources: vec![],
            experts: vec![],
            outline: None,
        }
    }

    /// Storage format, for what differs by it.
    pub fn format(&self) -> Format {
        self.checkpoint.format()
    }

    /// Says how the norms that follow store their weights: [`Form::F32`] unless said otherwise.
    pub fn norms_are(&mut self, form: Form) {
        self.norms = form;
    }

    /// Ends the recording; the weights of an outline come with it, in the order in which they were asked for.
    ///
    /// # Errors
    /// If the experts' byte ranges do not fit their shapes.
    pub fn finish(self, logits: Value, context_length: usize) -> Result<(Model, Vec<OutlinedWeight>)> {
        let graph = self.graph.finish(logits);
        let (experts, outlined) = match self.outline {
            Some(outline) => (ExpertStore::outlined(vec![], self.experts), outline.into_weights()),
            None => (ExpertStore::new(self.checkpoint.files().to_vec(), self.experts)?, vec![]),
        };
        let (checkpoint, sources) = (self.checkpoint, self.sources);
        Ok((Model { graph, experts, context_length, checkpoint, sources }, outlined))
    }

    /// The name that the checkpoint has for a module.
    fn resolve(&self, module: &str) -> String {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        if self.checkpoint.format() == Format::Gguf {
            let (prefix, name) = match layer {
                Some((layer, name)) => (format!("blk.{layer}."), name),
                None => (String::new(), module),
            };
            let known = COMMON_NAMES.iter().filter(|(hf, _)| *hf == name);
            let mut names = known.map(|(_, gguf)| format!("{prefix}{gguf}")).peekable();
            let first = names.peek().cloned().unwrap_or_else(|| format!("{prefix}{name}"));
            let stored = names.find(|name| self.checkpoint.contains(&format!("{name}.weight")));
            return stored.unwrap_or(first);
        }
        let head_prefix = if self.prefix == "language_model.model." { "language_model." } else { "" };
        match module.strip_prefix("model.") {
            Some(rest) => format!("{}{rest}", self.prefix),
            None => format!("{head_prefix}{module}"),
        }
    }

    /// The weight `module.part` if the checkpoint has it; an outline gives it `shape`.
    fn find(
        &mut self,
        module: &str,
        part: &str,
        shape: &[usize],
        need: Need,
    ) -> Result<Option<StoredWeight>> {
        self.find_tensor(
            &format!("{module}.{part}"),
            &format!("{}.{part}", self.resolve(module)),
            shape,
            need,
        )
    }

    /// As [`Recorder::find`], for the tensor that the checkpoint calls `stored` and families `name`.
    fn find_tensor(
        &mut self,
        name: &str,
        stored: &str,
        shape: &[usize],
        need: Need,
    ) -> Result<Option<StoredWeight>> {
        match &mut self.outline {
            Some(outline) => outline.find(name, stored, shape, need),
            None => self.checkpoint.weight(stored),
        }
    }

    /// Whether the checkpoint has the tensor `module.part`.
    fn contains(&self, module: &str, part: &str) -> bool {
        match &self.outline {
            Some(outline) => outline.has(&format!("{module}.{part}")),
            None => self.checkpoint.contains(&format!("{}.{part}", self.resolve(module))),
        }
    }

    fn missing(&self, module: &str, part: &str) -> Error {
        let tensor = format!("{}.{part}", self.resolve(module));
        Error::MissingTensor { path: self.checkpoint.path().into(), tensor }
    }

    fn add(&mut self, stored: StoredWeight, part: Part, form: Form) -> Result<WeightId> {
        let source = Source { stored, part, form };
        let rows: usize = source.rows().iter().map(Range::len).sum();
        let stored = &source.stored;
        let cols = if stored.shape.len() == 1 { 1 } else { stored.cols() };
        let matrix = match form {
            Form::Stored if stored.shape.len() == 1 => {
                MatrixSpec { dtype: stored.dtype, rows: 1, cols: rows }
            }
            Form::Stored => MatrixSpec { dtype: stored.dtype, rows, cols },
            Form::Widened => MatrixSpec { dtype: DType::F32, rows, cols },
            _ => match source.part {
                Part::EverySecond(first) => MatrixSpec::vector((rows * cols - first).div_ceil(2)),
                Part::Whole | Part::Rows(_) => MatrixSpec::vector(rows * cols),
            },
        };
        matrix.bytes()?;
        let id = self.graph.weight(stored.name.clone(), matrix);
        self.sources.push(source);
        Ok(id)
    }

    /// Whether the checkpoint has the module.
    pub fn has(&self, module: &str) -> bool {
        self.contains(module, "weight")
    }

    fn stored_matrix(&mut self, module: &str, rows: Option<usize>, cols: usize) -> Result<StoredWeight> {
        let unknown = || self.outline.as_ref().map_or(0, Outline::vocab_size);
        let shape = [rows.unwrap_or_else(unknown), cols];
        let stored = self.find(module, "weight", &shape, Need::Required)?;
        let stored = stored.ok_or_else(|| self.missing(module, "weight"))?;
        // GGUF writes matrices of one row as vectors.
        let flat = stored.shape.len() == 1 && rows == Some(1);
        let fits = (stored.shape.len() == 2 || flat)
            && stored.cols() == cols
            && rows.is_none_or(|r| stored.rows() == r);
        if !fits || stored.rows() == 0 {
            let rows = rows.map_or("any".to_owned(), |r| r.to_string());
            let expected = format!("shape [{rows}, {cols}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        Ok(stored)
    }

    /// A weight matrix of `cols` columns and, if given, `rows` rows.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn matrix(&mut self, module: &str, rows: Option<usize>, cols: usize) -> Result<WeightId> {
        let stored = self.stored_matrix(module, rows, cols)?;
        self.add(stored, Part::Whole, Form::Stored)
    }

    fn stored_vector(
        &mut self,
        module: &str,
        part: &str,
        len: usize,
        need: Need,
    ) -> Result<Option<StoredWeight>> {
        let Some(stored) = self.find(module, part, &[len], need)? else { return Ok(None) };
        if stored.shape != [len] {
            let expected = format!("shape [{len}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        Ok(Some(stored))
    }

    /// A (rows, cols) matrix of each of `heads` heads, stored as one tensor with or without a dimension of its own for
    /// heads.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn head_matrices(
        &mut self,
        module: &str,
        heads: usize,
        rows: usize,
        cols: usize,
    ) -> Result<WeightId> {
        let stored = self.find(module, "weight", &[heads, rows, cols], Need::Required)?;
        let stored = stored.ok_or_else(|| self.missing(module, "weight"))?;
        if stored.shape != [heads, rows, cols] && stored.shape != [heads * rows, cols] {
            let expected = format!("shape [{heads}, {rows}, {cols}]");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        self.add(stored, Part::Whole, Form::Stored)
    }

    /// A vector of `len` values, as f32.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn vector(&mut self, module: &str, part: &str, len: usize) -> Result<WeightId> {
        let stored = self.stored_vector(module, part, len, Need::Required)?;
        let stored = stored.ok_or_else(|| self.missing(module, part))?;
        self.add(stored, Part::Whole, Form::F32)
    }

    /// A vector of `len` values, as f32; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has another length.
    pub fn optional_vector(&mut self, module: &str, part: &str, len: usize) -> Result<Option<WeightId>> {
        let stored = self.stored_vector(module, part, len, Need::Optional)?;
        stored.map(|stored| self.add(stored, Part::Whole, Form::F32)).transpose()
    }

    /// The values of the tensor `name` (with what stands behind the module's name), which usually has `shape`, in any
    /// shape that has as many.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], or [`Error::Tensor`] if it has another number of values.
    pub fn constants(&mut self, name: &str, shape: &[usize], form: Form) -> Result<WeightId> {
        let len: usize = shape.iter().product();
        let (module, suffix) = match name.strip_suffix(".weight") {
            Some(module) => (module, ".weight"),
            None => (name, ""),
        };
        let tensor = format!("{}{suffix}", self.resolve(module));
        let stored = self.find_tensor(name, &tensor, shape, Need::Required)?;
        let stored = stored.ok_or_else(|| Error::MissingTensor {
            path: self.checkpoint.path().into(),
            tensor: tensor.clone(),
        })?;
        if stored.rows() * stored.cols() != len {
            let expected = format!("{len} values");
            return Err(tensor_error(
                &self.checkpoint,
                &stored,
                &expected,
                format!("shape {:?}", stored.shape),
            ));
        }
        self.add(stored, Part::Whole, form)
    }

    /// A norm of each of `groups` equal parts of x.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn rms_norm(&mut self, x: Value, module: &str, groups: usize, eps: f32) -> Result<Value> {
        self.rms_norm_of(x, module, groups, eps, self.norms)
    }

    /// As [`Recorder::rms_norm`], with weights stored in `form`.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn rms_norm_of(
        &mut self,
        x: Value,
        module: &str,
        groups: usize,
        eps: f32,
        form: Form,
    ) -> Result<Value> {
        let weight = self.constants(&format!("{module}.weight"), &[x.width() / groups.max(1)], form)?;
        Ok(self.graph.rms_norm(x, weight, groups, eps)?)
    }

    /// The bias of a linear layer of `rows` outputs, if the checkpoint has one for such layers.
    fn stored_bias(&mut self, module: &str, rows: usize) -> Result<Option<StoredWeight>> {
        let found = self.stored_vector(module, "bias", rows, Need::Optional)?;
        if found.is_none() && self.biases.contains(&without_layer(&format!("{}.bias", self.resolve(module))))
        {
            return Err(self.missing(module, "bias"));
        }
        Ok(found)
    }

    /// x through a linear layer of `rows` outputs, with its bias if the checkpoint has them.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn linear(&mut self, x: Value, module: &str, rows: usize, precision: Precision) -> Result<Value> {
        let weight = self.matrix(module, Some(rows), x.width())?;
        let bias = self.stored_bias(module, rows)?;
        let bias = bias.map(|bias| self.add(bias, Part::Whole, Form::F32)).transpose()?;
        Ok(self.graph.linear(x, weight, bias, precision)?)
    }

    /// As [`Recorder::linear`], keeping of its `rows` outputs only `parts`, side by side in this order.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn linear_part(
        &mut self,
        x: Value,
        module: &str,
        rows: usize,
        parts: &[Range<usize>],
        precision: Precision,
    ) -> Result<Value> {
        let weight = self.stored_matrix(module, Some(rows), x.width())?;
        let form = if whole_blocks(weight.dtype, parts) { Form::Stored } else { Form::Widened };
        let weight = self.add(weight, Part::Rows(parts.to_vec()), form)?;
        let bias = self.stored_bias(module, rows)?;
        let bias = bias.map(|bias| self.add(bias, Part::Rows(parts.to_vec()), Form::F32)).transpose()?;
        Ok(self.graph.linear(x, weight, bias, precision)?)
    }

    /// The bias of `experts` scores that is kept in `module`, or in GGUF in the layer.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn correction_bias(&mut self, module: &str, experts: usize) -> Result<WeightId> {
        let (module, part) = self.correction_bias_name(module);
        self.constants(&format!("{module}.{part}"), &[experts], Form::F32)
    }

    /// Whether the checkpoint has that bias.
    pub fn has_correction_bias(&self, module: &str) -> bool {
        let (module, part) = self.correction_bias_name(module);
        self.contains(&module, part)
    }

    fn correction_bias_name(&self, module: &str) -> (String, &'static str) {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        match (self.checkpoint.format(), layer) {
            (Format::Gguf, Some((layer, _))) => (format!("model.layers.{layer}.exp_probs_b"), "bias"),
            _ if self.contains(module, "expert_bias") => (module.to_owned(), "expert_bias"),
            _ => (module.to_owned(), "e_score_correction_bias"),
        }
    }

    /// Checks that the checkpoint has attention sinks for a layer.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn require_sinks(&self, layer: usize) -> Result<()> {
        let (module, part) = self.sinks_name(layer);
        match self.contains(&module, part) {
            true => Ok(()),
            false => Err(self.missing(&module, part)),
        }
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
        let projections = if self.outline.is_some() {
            self.outlined_experts(layer, count, hidden, names)?
        } else if let Some(stacked) = self.stacked_experts(layer, count, names)? {
            stacked
        } else {
            self.separate_experts(layer, count, names)?
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

    /// Gate, up and down of every expert, from one tensor a projection that does not exist yet.
    fn outlined_experts(
        &mut self,
        layer: usize,
        count: usize,
        hidden: usize,
        names: &ExpertNames,
    ) -> Result<[Vec<StoredWeight>; 3]> {
        let base = format!("model.layers.{layer}");
        let parent = names.module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
        let inner = self.outline.as_ref().map_or(0, Outline::expert_width);
        let mut stack = |part: &str, rows, cols| -> Result<Vec<StoredWeight>> {
            let name = format!("{base}.mlp.experts.{part}_proj.weight");
            let module = if self.contains(&format!("{base}.{}.gate_proj", names.module), "weight") {
                format!("{base}.{}", names.module)
            } else {
                format!("{base}.{parent}.switch_mlp")
            };
            let stored = match self.checkpoint.format() {
                Format::Gguf => format!("blk.{layer}.ffn_{part}_exps.weight"),
                _ => format!("{}.{part}_proj.weight", self.resolve(&module)),
            };
            let stored = self.find_tensor(&name, &stored, &[count, rows, cols], Need::Required)?;
            Ok(stored.iter().flat_map(|s| (0..count).filter_map(|e| s.stack_element(e))).collect())
        };
        Ok([stack("gate", inner, hidden)?, stack("up", inner, hidden)?, stack("down", hidden, inner)?])
    }

    /// Gate, up and down of every expert, from one tensor a projection (GGUF, MLX) or with gate and up in one
    /// (transformers 5, some GGUF files).
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
        let (gate_up, down) = if self.checkpoint.format() == Format::Gguf {
            let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
            if let Some(found) = three(&|i| name(["gate", "up", "down"][i]))? {
                return Ok(Some(found));
            }
            (name("gate_up"), name("down"))
        } else {
            let parent = names.module.rsplit_once('.').map_or("mlp", |(parent, _)| parent);
            let switch = self.resolve(&format!("{base}.{parent}.switch_mlp"));
            let module = self.resolve(&format!("{base}.{}", names.module));
            for module in [&switch, &module] {
                let name = |i| format!("{module}.{}_proj.weight", ["gate", "up", "down"][i]);
                if let Some(found) = three(&name)? {
                    return Ok(Some(found));
                }
            }
            (format!("{module}.gate_up_proj"), format!("{module}.down_proj"))
        };
        let Some(gate_up) = stack(&gate_up)? else { return Ok(None) };
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
                    tensor_error(&self.checkpoint, both, "rows that can be halved", got)
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
