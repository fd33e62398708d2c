//! What a packed copy holds, in which order: the resident weights as they come, then expert after expert.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use moeflux_compute::graph::ExpertSetId;
use moeflux_compute::{DType, Half};

use super::requantise;
use crate::checkpoint::elements::{element_name, stack_of};
use crate::checkpoint::mlx::affine_specs;
use crate::checkpoint::safetensors::ElementType;
use crate::checkpoint::{ByteRange, Checkpoint, Encoding, Format, StoredWeight, TensorEntry};
use crate::experts::{ExpertForm, ExpertStore};
use crate::{Error, Result};

/// A tensor of the copy.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) encoding: Encoding,
    pub(super) shape: Vec<usize>,
}

/// Where the bytes of tensors come from.
#[derive(Debug)]
pub(super) enum Source {
    /// As they are stored.
    Stored(Vec<ByteRange>),
    /// A matrix in another encoding.
    Requantised(StoredWeight, DType),
}

/// Tensors that belong together: a resident one, or the planes of an expert's matrix.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) tensors: Vec<Tensor>,
    pub(super) source: Source,
    pub(super) bytes: u64,
}

/// Everything that is written.
#[derive(Debug, Default)]
pub(super) struct PackLayout {
    pub(super) items: Vec<Item>,
    /// Modules in the configuration that get another encoding.
    pub(super) encodings: BTreeMap<String, DType>,
    /// Whether the original has stacks, which are taken apart.
    pub(super) stacked: bool,
}

/// A checkpoint's entries by where they are.
struct Directory<'a> {
    checkpoint: &'a Checkpoint,
    /// (file, offset, number) of those that have bytes, ascending.
    by_place: Vec<(usize, u64, usize)>,
}

impl<'a> Directory<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        let entries = checkpoint.entries().iter().enumerate().filter(|(_, entry)| entry.range.len > 0);
        let mut by_place: Vec<_> = entries.map(|(i, e)| (e.range.file, e.range.offset, i)).collect();
        by_place.sort_unstable();
        Self { checkpoint, by_place }
    }

    /// The number of the entry that `range` begins in.
    fn find(&self, range: &ByteRange) -> Option<usize> {
        let after = self.by_place.partition_point(|(file, at, _)| (*file, *at) <= (range.file, range.offset));
        let (.., index) = *self.by_place.get(after.checked_sub(1)?)?;
        let found = self.checkpoint.entries()[index].range;
        (found.file == range.file && range.offset < found.offset + found.len).then_some(index)
    }
}

impl PackLayout {
    /// The copy of `checkpoint`, whose experts are `store`'s, with `bits` in experts of so many bits.
    pub(super) fn new(checkpoint: &Checkpoint, store: &ExpertStore, bits: Option<u8>) -> Result<Self> {
        let directory = Directory::new(checkpoint);
        let mut layout = Self::default();
        let mut of_experts = HashSet::new();
        let mut experts = vec![];
        for set in (0..store.sets()).map(ExpertSetId) {
            for expert in 0..store.set(set).experts as u32 {
                let location = store.location(set, expert);
                if location.form != ExpertForm::Separate {
                    let got = if location.form.is_apart() { "transposed ones" } else { "interleaved ones" };
                    return Err(refused(checkpoint, "experts whose gate and up are apart", got));
                }
                let mut seen = vec![];
                for first in [&location.gate, &location.up, &location.down].iter().filter_map(|r| r.first()) {
                    let matrix = Matrix::new(&directory, first)?;
                    // Gate and up may be halves of one matrix.
                    if !seen.contains(&matrix.weight.planes[0]) {
                        seen.push(matrix.weight.planes[0]);
                        layout.stacked |= matrix.stacked;
                        of_experts.extend(matrix.entries.iter().copied());
                        experts.push(layout.item(checkpoint, matrix, bits));
                    }
                }
            }
        }
        let trunk = checkpoint.entries().iter().enumerate().filter(|(i, _)| !of_experts.contains(i));
        layout.items = trunk.map(|(_, entry)| stored(entry)).collect();
        if checkpoint.format() != Format::Gguf {
            // So that every tensor begins at a multiple of its elements' size.
            layout.items.sort_by_key(|item| std::cmp::Reverse(element_bytes(&item.tensors[0].encoding)));
        }
        layout.items.extend(experts);
        Ok(layout)
    }

    /// The tensors of an expert's matrix.
    fn item(&mut self, checkpoint: &Checkpoint, matrix: Matrix, bits: Option<u8>) -> Item {
        let Matrix { weight, tensors, .. } = matrix;
        let format = checkpoint.format();
        if let Some(to) = bits.and_then(|bits| requantise::encoding(&weight, bits, format))
            && let Some(renamed) = requantised(format, &tensors[0].name, to, &weight.shape)
        {
            let bytes = to.matrix_bytes(weight.rows(), weight.cols()).unwrap_or_default() as u64;
            let module = tensors[0].name.strip_suffix(".weight").unwrap_or(&tensors[0].name);
            self.encodings.insert(stack_of(module).unwrap_or(module).to_owned(), to);
            return Item { tensors: renamed, source: Source::Requantised(weight, to), bytes };
        }
        let bytes = weight.bytes();
        Item { tensors, source: Source::Stored(weight.planes), bytes }
    }

    /// Whether anything is not copied as it is.
    pub(super) fn is_lossy(&self) -> bool {
        !self.encodings.is_empty()
    }
}

/// An expert's matrix by itself.
struct Matrix {
    weight: StoredWeight,
    /// What its planes are to be called.
    tensors: Vec<Tensor>,
    /// Numbers of the entries that they are in.
    entries: Vec<usize>,
    /// Whether it is an element of a stack.
    stacked: bool,
}

impl Matrix {
    /// The matrix whose first plane `range` is in.
    fn new(directory: &Directory<'_>, range: &ByteRange) -> Result<Self> {
        let checkpoint = directory.checkpoint;
        let lost = || refused(checkpoint, "experts in tensors", "bytes outside of any");
        let entry = &checkpoint.entries()[directory.find(range).ok_or_else(lost)?];
        let stored = checkpoint.weight(&entry.name)?.ok_or_else(lost)?;
        let element = match stored.shape[..] {
            [count, _, _] => {
                let each = (stored.planes[0].len / count.max(1) as u64).max(1);
                Some(((range.offset - stored.planes[0].offset) / each) as usize)
            }
            _ => None,
        };
        let (mut tensors, mut entries) = (vec![], vec![]);
        for plane in &stored.planes {
            let index = directory.find(plane).ok_or_else(lost)?;
            let TensorEntry { name, encoding, shape, .. } = &checkpoint.entries()[index];
            let (name, shape) = match element {
                Some(e) => (element_name(checkpoint.format(), name, e), shape[1..].to_vec()),
                None => (name.clone(), shape.clone()),
            };
            tensors.push(Tensor { name, encoding: encoding.clone(), shape });
            entries.push(index);
        }
        let weight = match element {
            Some(e) => stored.stack_element(e).ok_or_else(lost)?,
            None => stored,
        };
        Ok(Self { weight, tensors, entries, stacked: element.is_some() })
    }
}

/// A tensor as it is.
fn stored(entry: &TensorEntry) -> Item {
    let TensorEntry { name, encoding, shape, range } = entry.clone();
    let bytes = range.len;
    Item { tensors: vec![Tensor { name, encoding, shape }], source: Source::Stored(vec![range]), bytes }
}

/// The tensors of a matrix of `shape` in the encoding `to` that is now called `name`; `None` if the format cannot name
/// them.
fn requantised(format: Format, name: &str, to: DType, shape: &[usize]) -> Option<Vec<Tensor>> {
    if format == Format::Gguf {
        let encoding = Encoding::Weight(to);
        return Some(vec![Tensor { name: name.to_owned(), encoding, shape: shape.to_vec() }]);
    }
    let DType::Affine { scale, .. } = to else { return None };
    let half = if scale == Half::F16 { DType::F16 } else { DType::BF16 };
    let specs = affine_specs(name.strip_suffix(".weight")?, to, shape)?;
    let tensor = |spec: crate::checkpoint::safetensors::TensorSpec| {
        let packed = spec.dtype == ElementType::U32;
        let encoding = if packed { Encoding::Other("U32".into()) } else { Encoding::Weight(half) };
        Tensor { name: spec.name, encoding, shape: spec.shape }
    };
    Some(specs.map(tensor).into())
}

/// The element type of a safetensors file; `None` for encodings that it lacks.
pub(super) fn element_type(encoding: &Encoding) -> Option<ElementType> {
    let name = match encoding {
        Encoding::Weight(DType::F32) => "F32",
        Encoding::Weight(DType::F16) => "F16",
        Encoding::Weight(DType::BF16) => "BF16",
        Encoding::Weight(_) => return None,
        Encoding::Other(name) => name,
    };
    serde_json::from_value(name.into()).ok()
}

fn element_bytes(encoding: &Encoding) -> usize {
    element_type(encoding).map_or(0, |element| element.bitsize() / 8)
}

/// That `checkpoint` cannot be packed.
pub(super) fn refused(checkpoint: &Checkpoint, expected: &str, got: &str) -> Error {
    let (path, what): (PathBuf, _) = (checkpoint.path().into(), "checkpoint to pack".to_owned());
    Error::Malformed { path, what, expected: expected.into(), got: got.into() }
}
