//! [`Outline`]: a checkpoint that is described instead of stored. Families ask for weights with the shapes that they need;
//! an outline says yes and remembers what was asked for. So a model can be sized, planned or made up from its
//! configuration alone, and the list of a family's weights is written down once, in the family's file.

use std::collections::HashMap;

use moeflux_compute::DType;
use moeflux_compute::graph::MatrixSpec;

use crate::Result;
use crate::checkpoint::{ByteRange, Format, StoredWeight};

/// A weight that a family asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct OutlinedWeight {
    /// The family's name: `model.layers.3.self_attn.q_proj.weight`. Stacked experts are `….experts.gate_proj.weight`.
    pub name: String,
    /// The checkpoint's name of the tensor, or of the first of those that store it; of experts that are stored one by one with
    /// `*` for their number.
    pub stored: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// Encoding.
    pub dtype: DType,
    /// What it holds, if the family says so.
    pub values: Option<Vec<f32>>,
    /// Where it would be in a file that holds all of them one after the other.
    offset: u64,
}

impl OutlinedWeight {
    /// Names of the tensors that store a stack of experts one by one; `None` if one tensor stores the weight.
    pub fn elements(&self) -> Option<impl Iterator<Item = String>> {
        let &[count, _, _] = &self.shape[..] else { return None };
        let (before, after) = self.stored.split_once('*')?;
        let (before, after) = (before.to_owned(), after.to_owned());
        Some((0..count).map(move |expert| format!("{before}{expert}{after}")))
    }

    /// Decoder layer; 0 for weights of no layer.
    pub fn layer(&self) -> usize {
        let layer = self.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        layer.and_then(|(layer, _)| layer.parse().ok()).unwrap_or(0)
    }
}

/// What an [`Outline`] cannot know from the family.
pub trait Layout: std::fmt::Debug {
    /// Whether there is the optional tensor that families call `name`.
    fn has(&self, name: &str) -> bool;
    /// The encoding of a weight, whose own encoding is not set yet.
    fn dtype(&self, weight: &OutlinedWeight) -> DType;
    /// Rows of the embedding.
    fn vocab_size(&self) -> usize;
    /// Width of a routed expert.
    fn expert_width(&self) -> usize;
}

/// Whether a family can do without a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    Required,
    Optional,
}

/// The weights asked for so far.
#[derive(Debug)]
pub struct Outline {
    format: Format,
    layout: Box<dyn Layout>,
    weights: Vec<OutlinedWeight>,
    /// Where each of them is, by the family's name.
    places: HashMap<String, usize>,
    /// Bytes of all of them.
    bytes: u64,
}

impl Outline {
    /// Nothing yet; tensors are named and shaped as in `format`.
    pub fn new(format: Format, layout: Box<dyn Layout>) -> Self {
        Self { format, layout, weights: vec![], places: HashMap::new(), bytes: 0 }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.layout.has(name)
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.layout.vocab_size()
    }

    pub(super) fn expert_width(&self) -> usize {
        self.layout.expert_width()
    }

    pub(super) fn into_weights(self) -> Vec<OutlinedWeight> {
        self.weights
    }

    /// The weight `name` of `shape`: if it is asked for again, for another part of it, the same one.
    pub(super) fn find(
        &mut self,
        name: &str,
        stored: &str,
        shape: &[usize],
        need: Need,
    ) -> Result<Option<StoredWeight>> {
        if need == Need::Optional && !self.has(name) {
            return Ok(None);
        }
        let weight = match self.places.get(name) {
            Some(place) => &self.weights[*place],
            None => {
                let shape = self.stored_shape(name, shape);
                let (name, stored) = (name.to_owned(), stored.to_owned());
                let offset = self.bytes;
                let mut weight =
                    OutlinedWeight { name, stored, shape, dtype: DType::F32, values: None, offset };
                weight.dtype = self.layout.dtype(&weight);
                let bytes = planes(&weight)?.iter().fold(0u64, |sum, plane| sum.saturating_add(plane.len));
                self.bytes = self.bytes.saturating_add(bytes);
                self.places.insert(weight.name.clone(), self.weights.len());
                self.weights.push(weight);
                self.weights.last().expect("just pushed")
            }
        };
        Ok(Some(StoredWeight {
            name: weight.stored.clone(),
            dtype: weight.dtype,
            shape: weight.shape.clone(),
            planes: planes(weight)?,
        }))
    }

    /// Says that the weight `name`, which has been asked for, holds `values`.
    pub(super) fn set_values(&mut self, name: &str, values: &[f32]) {
        if let Some(place) = self.places.get(name) {
            self.weights[*place].values = Some(values.to_vec());
        }
    }

    fn stored_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        match shape {
            // GGUF writes matrices of one row as vectors.
            [1, cols] if self.format == Format::Gguf => vec![*cols],
            // llama.cpp has a dimension for the channels of kernels of queries, keys and values.
            [rows, taps] if self.format == Format::Gguf && name.ends_with("_conv1d.weight") => {
                vec![*rows, 1, *taps]
            }
            // MLX has a dimension for the channels of a kernel, last.
            [..] if self.format == Format::Mlx && name.ends_with("conv1d.weight") => [shape, &[1]].concat(),
            [..] => shape.to_vec(),
        }
    }
}

/// Where the planes of `weight` would be, one after the other.
fn planes(weight: &OutlinedWeight) -> Result<Vec<ByteRange>> {
    let (&cols, outer) = weight.shape.split_last().unwrap_or((&1, &[]));
    let rows = outer.iter().fold(1, |rows: usize, n| rows.saturating_mul(*n));
    // More than any file holds is refused here.
    MatrixSpec { dtype: weight.dtype, rows, cols }.bytes()?;
    let mut offset = weight.offset;
    let plane = |plane| -> Result<ByteRange> {
        let rows = rows.div_ceil(weight.dtype.block_rows(plane)) as u64;
        let len = rows * weight.dtype.row_bytes(plane, cols)? as u64;
        let at = offset;
        offset = offset.saturating_add(len);
        Ok(ByteRange { file: 0, offset: at, len, by_columns: None })
    };
    (0..weight.dtype.planes()).map(plane).collect()
}
