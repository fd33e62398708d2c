//! [`Recorder`]: what a family file writes its model through: the graph, and where each weight comes from.
//!
//! Families name modules as Hugging Face does (`model.layers.3.self_attn.q_proj`); the recorder finds the tensor
//! under the name and in the form that the checkpoint has it. Recording reads no weights, so sizes and plans of a
//! model cost nothing; [`Model::load`] reads the resident ones afterwards.

mod biased_experts;
mod experts;
mod numbers;
pub mod outline;
mod parameters;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use moeflux_compute::DType;
use moeflux_compute::graph::{ExpertSet, GraphBuilder, MatrixSpec, Precision, Value, WeightId};

use super::draft::Draft;
pub use super::model::Form;
use super::model::{Model, Source, WeightPart, tensor_error};
use super::modules::Modules;
use super::names::Names;
use crate::checkpoint::elements::element_name;
use crate::checkpoint::{Checkpoint, Format, StoredWeight};
use crate::experts::{ExpertLocation, ExpertStore};
use crate::{Error, Result};
pub use experts::ExpertNames;
use outline::{Need, Outline, OutlinedWeight};

/// Whether these rows, one after the other, can have the scales that they are stored with: whole blocks, but at the end; or
/// one range of rows that have one scale.
fn whole_blocks(dtype: DType, parts: &[Range<usize>]) -> bool {
    (0..dtype.planes()).map(|plane| dtype.block_rows(plane)).all(|block| {
        if block == usize::MAX {
            return parts.len() == 1;
        }
        let (starts, ends) = (parts.iter().map(|p| p.start), parts.iter().map(|p| p.end));
        starts.chain(ends.rev().skip(1)).all(|row| row.is_multiple_of(block))
    })
}

/// A tensor's name without numbers.
fn without_layer(name: &str) -> String {
    name.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// What becomes of the part of a checkpoint that drafts tokens.
#[derive(Debug)]
enum Drafting {
    Unwanted,
    /// The family has not recorded it, or not yet.
    Wanted,
    /// It is being recorded.
    Under {
        layer: usize,
    },
    /// The checkpoint lacks this tensor.
    Missing(String),
    Recorded(Box<Draft>),
}

/// Records one model of a checkpoint.
#[derive(Debug)]
pub struct Recorder {
    /// The graph so far.
    pub graph: GraphBuilder,
    checkpoint: Arc<Checkpoint>,
    names: &'static Names,
    /// What stands for `model.` at the start of names.
    prefix: &'static str,
    /// How norm weights are stored.
    norms: Form,
    /// Names of all biases without the number of their layer.
    biases: HashSet<String>,
    sources: Vec<Source>,
    /// Where weights and experts are in Hugging Face's model.
    modules: Modules,
    experts: Vec<(ExpertSet, Vec<ExpertLocation>)>,
    /// Experts that stacks may hold beyond those of the model.
    unused_experts: usize,
    /// What drafts tokens, if that is to be recorded.
    draft: Drafting,
    /// What the weights would be, for a checkpoint that has none.
    outline: Option<Outline>,
    /// Positions that the model is right for, if fewer than it is made for.
    context_limit: Option<usize>,
    /// Parts of what stands for a token of a picture: the embedding, then what layers add; none without pictures.
    picture_levels: usize,
}

impl Recorder {
    /// Starts recording a model of `checkpoint`, whose family has `names`. A checkpoint that has a configuration only has
    /// the weights that `outline` says.
    pub fn new(checkpoint: Arc<Checkpoint>, names: &'static Names, outline: Option<Outline>) -> Self {
        let top = |prefix: &&&str| {
            names.top.iter().any(|name| checkpoint.contains(&format!("{prefix}{name}.weight")))
        };
        let prefix = names.prefixes.iter().find(top).or(names.prefixes.first()).copied().unwrap_or_default();
        let biases = checkpoint.names().filter(|name| name.ends_with(".bias")).map(without_layer).collect();
        Self {
            graph: GraphBuilder::new(),
            biases,
            checkpoint,
            names,
            prefix,
            norms: Form::F32,
            sources: vec![],
            modules: Modules::new(names),
            experts: vec![],
            unused_experts: 0,
            draft: Drafting::Unwanted,
            outline,
            context_limit: None,
            picture_levels: 0,
        }
    }

    /// Says that the model is right for so many positions only.
    pub fn limit_context(&mut self, positions: Option<usize>) {
        self.context_limit = positions;
    }

    /// Has the family add what comes with pictures after its first layers: so many parts, with the embedding.
    pub fn want_picture_levels(&mut self, levels: usize) {
        self.picture_levels = levels;
    }

    /// Whether the model is to read pictures.
    pub fn reads_pictures(&self) -> bool {
        self.picture_levels > 0
    }

    /// Embeddings x, with what comes with pictures in their places.
    pub fn with_embeddings(&mut self, x: Value) -> Value {
        if self.reads_pictures() { self.graph.given_embeddings(x, 0) } else { x }
    }

    /// x after `layer`, plus what comes with pictures for there (DeepStack, Meng et al. 2024).
    pub fn with_pictures(&mut self, layer: usize, x: Value) -> Value {
        if layer + 1 < self.picture_levels { self.graph.given_embeddings(x, layer + 1) } else { x }
    }

    /// Has the family record what drafts tokens, if the checkpoint has that.
    pub fn want_draft(&mut self) {
        self.draft = Drafting::Wanted;
    }

    /// Records what drafts tokens, as `record` does, which returns its logits, if that is wanted and the checkpoint has it: layer
    /// `layer`, the one after the last. Its graph, with rotations of its own, is another than the model's; weights that both have
    /// are loaded once.
    ///
    /// # Errors
    /// Those of `record`.
    pub fn draft(
        &mut self,
        layer: usize,
        record: impl FnOnce(&mut Self, usize) -> Result<Value>,
    ) -> Result<()> {
        if !matches!(self.draft, Drafting::Wanted) {
            return Ok(());
        }
        self.draft = Drafting::Under { layer };
        let projection = format!("model.layers.{layer}.eh_proj");
        if !self.contains(&projection, "weight") {
            self.draft = Drafting::Missing(format!("{}.weight", self.resolve(&projection)));
            return Ok(());
        }
        let (graph, sources) = (std::mem::take(&mut self.graph), std::mem::take(&mut self.sources));
        let modules = self.modules.clone();
        let first_set = self.experts.len();
        let logits = record(self, layer)?;
        let drafting = std::mem::replace(&mut self.graph, graph).finish(logits);
        let own = std::mem::replace(&mut self.sources, sources);
        // Adapters are of the model alone: what drafts only guesses.
        self.modules = modules;
        self.draft = Drafting::Recorded(Box::new(Draft::new(drafting, first_set, own, &self.sources)));
        Ok(())
    }

    /// `positions`, or those that the model is right for if they are fewer.
    pub(super) fn limited(&self, positions: usize) -> usize {
        self.context_limit.map_or(positions, |limit| limit.min(positions))
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
        let Self { checkpoint, sources, draft, modules, .. } = self;
        let (draft, no_draft) = match draft {
            Drafting::Recorded(draft) => (Some(*draft), None),
            Drafting::Missing(tensor) => (None, Some(tensor)),
            _ => (None, None),
        };
        let (adapters, vision) = (vec![], None);
        let model = Model {
            graph,
            experts,
            draft,
            vision,
            no_draft,
            context_length,
            checkpoint,
            sources,
            modules,
            adapters,
        };
        Ok((model, outlined))
    }

    /// The name that the checkpoint has for a module or tensor.
    fn resolve(&self, module: &str) -> String {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        // A packed copy has stacks of experts in elements.
        let has = |name: &String| {
            let element = element_name(self.checkpoint.format(), name, 0);
            let outlined =
                self.outline.as_ref().is_some_and(|outline| outline.has(&format!("{name}.weight")));
            let names = [format!("{name}.weight"), name.clone(), element];
            outlined || names.iter().any(|name| self.checkpoint.contains(name))
        };
        if self.checkpoint.format() == Format::Gguf {
            let (prefix, name) = match layer {
                Some((layer, name)) => (format!("blk.{layer}."), name),
                None => (String::new(), module),
            };
            let known = self.names.gguf_tensors(name);
            let mut names = known.map(|gguf| format!("{prefix}{gguf}")).peekable();
            let first = names.peek().cloned().unwrap_or_else(|| format!("{prefix}{name}"));
            return names.find(has).unwrap_or(first);
        }
        if let Some((layer, name)) = layer {
            if matches!(self.draft, Drafting::Under { layer: own } if layer.parse() == Ok(own))
                && let Some(name) = self.names.draft(name)
            {
                return name;
            }
            let prefix = format!("{}{}.{layer}.", self.prefix, self.names.layers);
            let own = format!("{prefix}{name}");
            let mut others = self.names.other_tensors(name).map(|other| format!("{prefix}{other}"));
            return others.find(|other| has(other) && !has(&own)).unwrap_or(own);
        }
        let around = self.prefix.strip_suffix("model.").filter(|around| around.ends_with('.'));
        let head_prefix = around.unwrap_or_default();
        match module.strip_prefix("model.") {
            Some(rest) => {
                let own = format!("{}{rest}", self.prefix);
                let renamed = self.names.renamed.iter().find(|(name, _)| *name == rest);
                let renamed = renamed.filter(|_| !has(&own));
                renamed.map_or(own, |(_, to)| format!("{}{to}", self.prefix))
            }
            None => {
                let own = format!("{head_prefix}{module}");
                let renamed = self.names.renamed.iter().find(|(name, _)| *name == module);
                let renamed = renamed.map(|(_, to)| format!("{head_prefix}{to}"));
                renamed.filter(|other| has(other) && !has(&own)).unwrap_or(own)
            }
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

    fn add(&mut self, stored: StoredWeight, part: WeightPart, form: Form) -> Result<WeightId> {
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
            Form::Transposed => MatrixSpec { dtype: DType::F32, rows: cols, cols: rows },
            Form::TransposedEach { times } => {
                MatrixSpec { dtype: DType::F32, rows: cols.saturating_mul(times), cols: rows }
            }
            Form::Tap { taps, .. } => MatrixSpec { dtype: DType::F32, rows, cols: cols / taps },
            Form::Delay { by } => MatrixSpec::vector((rows * cols).saturating_mul(by.saturating_add(1))),
            Form::Followed { count } => MatrixSpec::vector((rows * cols).saturating_add(count)),
            Form::Ids { words, .. } => MatrixSpec { dtype: DType::F32, rows, cols: cols / words },
            Form::Repeated { times } => MatrixSpec::vector((rows * cols).saturating_mul(times)),
            Form::NoneOf { count } => MatrixSpec::vector(count),
            _ => match source.part {
                WeightPart::EverySecond(first) => {
                    MatrixSpec::vector((rows * cols).saturating_sub(first).div_ceil(2))
                }
                WeightPart::Whole | WeightPart::Rows(_) => MatrixSpec::vector(rows * cols),
            },
        };
        matrix.bytes()?;
        let id = self.graph.weight(stored.name.clone(), matrix);
        self.sources.push(source);
        Ok(id)
    }

    /// Whether there is only an outline of the checkpoint, which knows names by their endings, whatever the layer.
    pub fn is_outline(&self) -> bool {
        self.outline.is_some()
    }

    /// Whether the checkpoint has the module.
    pub fn has(&self, module: &str) -> bool {
        self.contains(module, "weight")
    }

    /// Rows of the module's weight, if the checkpoint has it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if its encoding cannot be used.
    pub fn rows(&self, module: &str) -> Result<Option<usize>> {
        let stored = self.checkpoint.weight(&format!("{}.weight", self.resolve(module)))?;
        Ok(stored.map(|stored| stored.rows()))
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
        let rows = stored.rows();
        let weight = self.add(stored, WeightPart::Whole, Form::Stored)?;
        self.modules.note(weight, module, rows, std::iter::once(0..rows).collect());
        Ok(weight)
    }

    /// A matrix of `rows` rows, `module.part`, whose columns are stored in the dimensions of `shape`, as kernels of convolutions
    /// are, of which those of 1 may be left out.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn kernel(&mut self, module: &str, part: &str, rows: usize, shape: &[usize]) -> Result<WeightId> {
        let (cols, whole) = (shape.iter().product(), [&[rows], shape].concat());
        let stored = self.find(module, part, &[rows, cols], Need::Required)?;
        let mut stored = stored.ok_or_else(|| self.missing(module, part))?;
        let wide = |shape: &[usize]| shape.iter().copied().filter(|side| *side != 1).collect::<Vec<_>>();
        if wide(&stored.shape) != wide(&whole) || stored.planes.len() != 1 {
            let expected = format!("plain values of shape {whole:?}");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        stored.shape = vec![rows, cols];
        self.add(stored, WeightPart::Whole, Form::Stored)
    }

    /// A (rows, cols) matrix, as f32: one of the `taps` values of each kernel of a convolution that `module` is, of shape (rows,
    /// cols, taps).
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn kernel_tap(
        &mut self,
        module: &str,
        [rows, cols]: [usize; 2],
        [tap, taps]: [usize; 2],
    ) -> Result<WeightId> {
        let shape = [rows, cols, taps];
        let stored = self.find(module, "weight", &shape, Need::Required)?;
        let mut stored = stored.ok_or_else(|| self.missing(module, "weight"))?;
        if stored.shape != shape || stored.planes.len() != 1 {
            let expected = format!("plain values of shape {shape:?}");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        stored.shape = vec![rows, cols * taps];
        self.add(stored, WeightPart::Whole, Form::Tap { tap, taps })
    }

    /// A (rows, cols) matrix that is stored with its columns as rows, as f32.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn transposed(&mut self, module: &str, rows: usize, cols: usize) -> Result<WeightId> {
        let stored = self.stored_matrix(module, Some(cols), rows)?;
        self.add(stored, WeightPart::Whole, Form::Transposed)
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
        self.add(stored, WeightPart::Whole, Form::Stored)
    }

    /// A vector of `len` values, as f32.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] or [`Error::Tensor`].
    pub fn vector(&mut self, module: &str, part: &str, len: usize) -> Result<WeightId> {
        let stored = self.stored_vector(module, part, len, Need::Required)?;
        let stored = stored.ok_or_else(|| self.missing(module, part))?;
        self.add(stored, WeightPart::Whole, Form::F32)
    }

    /// A vector of `len` values, as f32; `None` if the checkpoint lacks it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it has another length.
    pub fn optional_vector(&mut self, module: &str, part: &str, len: usize) -> Result<Option<WeightId>> {
        let stored = self.stored_vector(module, part, len, Need::Optional)?;
        stored.map(|stored| self.add(stored, WeightPart::Whole, Form::F32)).transpose()
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
        self.add(stored, WeightPart::Whole, form)
    }

    /// As [`Recorder::constants`], of a tensor that may have more values than those first `len`.
    ///
    /// # Errors
    /// As [`Recorder::constants`].
    pub fn first_constants(&mut self, name: &str, len: usize, form: Form) -> Result<WeightId> {
        let tensor = self.resolve(name);
        let longer = match &self.outline {
            Some(_) => None,
            None => self.checkpoint.weight(&tensor)?.filter(|stored| stored.rows() * stored.cols() > len),
        };
        let Some(mut stored) = longer.filter(|stored| stored.planes.len() == 1) else {
            return self.constants(name, &[len, 1], form);
        };
        stored.shape = vec![stored.rows() * stored.cols(), 1];
        self.add(stored, WeightPart::Rows(std::iter::once(0..len).collect()), form)
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

    /// Rows `part` of (rows, columns) values that enter the graph as f32.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn constants_part(
        &mut self,
        name: &str,
        [rows, cols]: [usize; 2],
        part: Range<usize>,
    ) -> Result<WeightId> {
        let tensor = self.resolve(name);
        let stored = self.find_tensor(name, &tensor, &[rows, cols], Need::Required)?;
        let stored =
            stored.ok_or_else(|| Error::MissingTensor { path: self.checkpoint.path().into(), tensor })?;
        if stored.rows() != rows || stored.cols() != cols {
            let expected = format!("{rows} rows of {cols} values");
            return Err(tensor_error(&self.checkpoint, &stored, &expected, format!("{:?}", stored.shape)));
        }
        self.add(stored, WeightPart::Rows(vec![part]), Form::F32)
    }

    /// A layer norm, whose bias is zero if the checkpoint has none.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn layer_norm(&mut self, x: Value, module: &str, eps: f32) -> Result<Value> {
        let weight = self.vector(module, "weight", x.width())?;
        let bias = match self.optional_vector(module, "bias", x.width())? {
            Some(bias) => bias,
            None => self.made_up(&format!("{module}.weight"), [x.width(); 2], Form::Zeros)?,
        };
        Ok(self.graph.layer_norm(x, weight, bias, eps)?)
    }

    /// `count` values in a form that does not look at what is stored, beside the tensor `name` (with what stands behind the
    /// module's name) of `len` values, of which there must be as many.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn made_up(&mut self, name: &str, [len, count]: [usize; 2], form: Form) -> Result<WeightId> {
        let (module, part) = name.rsplit_once('.').unwrap_or((name, "weight"));
        let stored = self.stored_vector(module, part, len, Need::Required)?;
        let stored = stored.ok_or_else(|| self.missing(module, part))?;
        self.add(stored, WeightPart::Rows(std::iter::once(0..count).collect()), form)
    }

    /// As [`Recorder::rms_norm`], with weights of its own for each part.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn rms_norm_each(&mut self, x: Value, module: &str, groups: usize, eps: f32) -> Result<Value> {
        let weight = self.constants(&format!("{module}.weight"), &[x.width()], self.norms)?;
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
        let bias = bias.map(|bias| self.add(bias, WeightPart::Whole, Form::F32)).transpose()?;
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
        let weight = self.add(weight, WeightPart::Rows(parts.to_vec()), form)?;
        self.modules.note(weight, module, rows, parts.to_vec());
        let bias = self.stored_bias(module, rows)?;
        let bias =
            bias.map(|bias| self.add(bias, WeightPart::Rows(parts.to_vec()), Form::F32)).transpose()?;
        Ok(self.graph.linear(x, weight, bias, precision)?)
    }

    /// The bias of `experts` scores that is kept in `module`, or in GGUF in the layer.
    ///
    /// # Errors
    /// As [`Recorder::matrix`].
    pub fn correction_bias(&mut self, module: &str, experts: usize) -> Result<WeightId> {
        self.constants(&self.correction_bias_name(module), &[experts], Form::F32)
    }

    /// Whether the checkpoint has that bias.
    pub fn has_correction_bias(&self, module: &str) -> bool {
        self.has_parameter(&self.correction_bias_name(module))
    }

    fn correction_bias_name(&self, module: &str) -> String {
        let layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        match (self.checkpoint.format(), layer) {
            (Format::Gguf, Some((layer, _))) => {
                // Some families' files have it without a suffix.
                let bare = format!("model.layers.{layer}.exp_probs_b");
                if self.has_parameter(&bare) { bare } else { format!("{bare}.bias") }
            }
            _ => format!("{module}.e_score_correction_bias"),
        }
    }

    /// Checks that a linear layer has a bias.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn require_bias(&self, module: &str) -> Result<()> {
        if self.contains(module, "bias") { Ok(()) } else { Err(self.missing(module, "bias")) }
    }

    /// Lets stacks of experts hold so many more than the model has, which are not read.
    pub fn leave_out_experts(&mut self, count: usize) {
        self.unused_experts = count;
    }

    /// Channels of the experts that were declared last, between their projections.
    pub fn expert_width(&self) -> Option<usize> {
        self.experts.last().map(|(set, _)| set.width())
    }

    /// Checks that the checkpoint has attention sinks for a layer.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn require_sinks(&self, layer: usize) -> Result<()> {
        let (module, part) = self.sinks_name(layer);
        if self.contains(&module, part) { Ok(()) } else { Err(self.missing(&module, part)) }
    }

    fn sinks_name(&self, layer: usize) -> (String, &'static str) {
        match self.checkpoint.format() {
            Format::Gguf => (format!("model.layers.{layer}.attn_sinks"), "weight"),
            _ => {
                let module = format!("model.layers.{layer}.self_attn");
                let mut others = self.names.other_tensors("self_attn.sinks");
                let other = others.find_map(|name| name.strip_prefix("self_attn."));
                let part = other.filter(|part| self.contains(&module, part)).unwrap_or("sinks");
                (module, part)
            }
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

    /// The path of the checkpoint.
    pub fn path(&self) -> &std::path::Path {
        self.checkpoint.path()
    }
}
