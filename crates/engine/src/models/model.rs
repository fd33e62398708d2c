//! [`Model`]: what a recorded model computes, and the reading of its resident weights.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use moeflux_compute::graph::Graph;
use moeflux_compute::quant::{dequantize, dequantize_row, find_not_finite};
use moeflux_compute::{Bytes, Tensor};

use super::draft::Draft;
use super::modules::Modules;
use super::vision::Vision;
use crate::adapters::ModelAdapter;
use crate::checkpoint::{ByteRange, Checkpoint, StoredWeight};
use crate::experts::ExpertStore;
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
    /// What drafts tokens, if it was asked for and is there.
    pub draft: Option<Draft>,
    /// What reads pictures, if it was asked for.
    pub vision: Option<Box<Vision>>,
    /// The tensor that a checkpoint of a family with such layers lacks for it.
    pub(crate) no_draft: Option<String>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(super) sources: Vec<Source>,
    /// Where weights and experts are in Hugging Face's model.
    pub(crate) modules: Modules,
    /// In the order of their numbers.
    pub(crate) adapters: Vec<ModelAdapter>,
}

/// Where a resident weight comes from.
#[derive(Debug, PartialEq)]
pub(super) struct Source {
    pub stored: StoredWeight,
    pub part: WeightPart,
    pub form: Form,
}

/// Which part of a stored weight a weight of the graph is.
#[derive(Debug, PartialEq)]
pub(super) enum WeightPart {
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
    pub fn rows(&self) -> Vec<Range<usize>> {
        match &self.part {
            WeightPart::Rows(rows) => rows.clone(),
            WeightPart::Whole | WeightPart::EverySecond(_) => {
                std::iter::once(0..self.stored_rows()).collect()
            }
        }
    }

    /// The part of the stored weight that is read.
    fn read_part(&self) -> &WeightPart {
        if self.form == Form::Widened { &WeightPart::Whole } else { &self.part }
    }
}

/// What a weight is in the graph.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// As it is stored.
    Stored,
    /// f32 matrices: rows that cannot be cut out as they are stored.
    Widened,
    /// f32 matrices: columns that are stored as rows.
    Transposed,
    /// f32 matrices: of kernels of so many values, which rows hold one after the other, one value each.
    Tap {
        /// Which, the oldest first.
        tap: usize,
        /// Values of a kernel.
        taps: usize,
    },
    /// The same as `Transposed`, that matrix so many times below itself.
    TransposedEach {
        /// At least 1.
        times: usize,
    },
    /// f32, as small vectors are whatever they are stored as.
    F32,
    /// f32, one more than is stored: norm weights that are kept as their distance from one.
    F32PlusOne,
    /// f32 matrices: integers below `below` of so many 32-bit words each, least significant first.
    Ids {
        /// 1 or 2.
        words: usize,
        /// What all are smaller than.
        below: usize,
    },
    /// f32, each value so many times: what channels of a head share.
    Repeated {
        /// At least 1.
        times: usize,
    },
    /// f32, −exp of what is stored: A of a decay that is kept as its logarithm.
    F32NegativeExp,
    /// f32, the negative of what is stored: A of a decay that is kept without its sign.
    F32Negative,
    /// f32, 0 as many times as values are stored, which are not looked at: what no tensor has.
    Zeros,
    /// f32, 1 likewise.
    Ones,
    /// f32, 1 likewise, but 0 for the last ones.
    OnesBut {
        /// How many are 0.
        zeros: usize,
    },
    /// f32, kernels of convolutions likewise, one for each value, by which channels are what they were before.
    Delay {
        /// So many tokens before.
        by: usize,
    },
    /// f32, and behind them `count` numbers so large that a router chooses those first.
    Followed {
        /// How many.
        count: usize,
    },
    /// f32, 0 `count` times, whatever is stored: what no tensor has.
    NoneOf {
        /// At least 1.
        count: usize,
    },
    /// f32, what a residual gate takes of a block's result: σ(v / temperature).
    Taken {
        /// What gates are divided by.
        temperature: f32,
    },
    /// f32, what such a gate leaves of the residual stream: √max(1 − σ², 0.001) of the same σ.
    Kept {
        /// What gates are divided by.
        temperature: f32,
    },
    /// f32, A of lightning attention of each of as many heads as values are stored, which are not looked at: what no tensor has.
    Slopes {
        /// The layer it is in.
        layer: usize,
        /// Layers of the model.
        layers: usize,
    },
}

/// Added to scores of what a router always chooses.
const CHOSEN_FIRST: f32 = 1e9;

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl Form {
    fn of(self, value: f32) -> f32 {
        match self {
            Self::Stored
            | Self::Widened
            | Self::Transposed
            | Self::Tap { .. }
            | Self::TransposedEach { .. }
            | Self::Followed { .. }
            | Self::F32
            | Self::Ids { .. }
            | Self::Repeated { .. } => value,
            Self::F32PlusOne => value + 1.0,
            Self::F32NegativeExp => -value.exp(),
            Self::Taken { temperature } => sigmoid(value / temperature),
            Self::Kept { temperature } => {
                let gate = value / temperature;
                (sigmoid(-gate) * (1.0 + sigmoid(gate))).max(1e-3).sqrt()
            }
            Self::F32Negative => -value,
            Self::Ones | Self::OnesBut { .. } | Self::Delay { .. } => 1.0,
            Self::Zeros | Self::NoneOf { .. } | Self::Slopes { .. } => 0.0,
        }
    }
}

impl Model {
    /// Bytes of all resident weights.
    pub fn trunk_bytes(&self) -> u64 {
        let own = self.graph.weights().iter().filter_map(|w| w.matrix.bytes().ok()).map(|b| b as u64);
        let vision = self.vision.as_ref().map_or(0, |vision| vision.encoder.trunk_bytes());
        own.sum::<u64>() + self.draft.as_ref().map_or(0, Draft::own_bytes) + vision
    }

    /// Whether tokens of pictures attend to later ones of the same picture.
    pub fn looks_ahead(&self) -> bool {
        self.graph.caches().iter().any(|shape| shape.ahead)
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
        let own = self.sources.iter().map(|source| self.load_source(source, &mut progress));
        let mut weights: Vec<Tensor> = own.collect::<Result<_>>()?;
        for adapter in &self.adapters {
            adapter.load(&mut weights, &mut progress)?;
        }
        Ok(weights)
    }

    /// Reads one resident weight.
    pub(super) fn load_source(&self, source: &Source, progress: &mut dyn FnMut(u64)) -> Result<Tensor> {
        let tensor = self.read(source)?;
        progress(tensor.bytes() as u64);
        if source.form == Form::Stored {
            return Ok(tensor);
        }
        if let Form::Ids { words, below } = source.form {
            return self.ids(&source.stored, &tensor, words, below);
        }
        if let Form::Tap { tap, taps } = source.form {
            let values = dequantize(tensor.view())?;
            let values: Vec<f32> = values.into_iter().skip(tap).step_by(taps).collect();
            return Ok(Tensor::from_f32(tensor.rows(), tensor.cols() / taps, &values)?);
        }
        if source.form == Form::Transposed {
            return transposed(&tensor, 1);
        }
        if let Form::TransposedEach { times } = source.form {
            return transposed(&tensor, times);
        }
        if source.form == Form::Widened {
            return widened(&tensor, &source.rows());
        }
        let (first, step) = match source.part {
            WeightPart::EverySecond(first) => (first, 2),
            WeightPart::Whole | WeightPart::Rows(_) => (0, 1),
        };
        let stored = dequantize(tensor.view())?;
        let mut values: Vec<f32> =
            stored.into_iter().skip(first).step_by(step).map(|v| source.form.of(v)).collect();
        if let Form::Slopes { layer, layers } = source.form {
            lightning_slopes(&mut values, layer, layers);
        }
        if let Form::OnesBut { zeros } = source.form {
            values.iter_mut().rev().take(zeros).for_each(|value| *value = 0.0);
        }
        if let Form::Delay { by } = source.form {
            let kernel = |value| std::iter::once(value).chain(std::iter::repeat_n(0.0, by));
            values = values.into_iter().flat_map(kernel).collect();
        }
        if let Form::Followed { count } = source.form {
            values.extend(std::iter::repeat_n(CHOSEN_FIRST, count));
        }
        if let Form::NoneOf { count } = source.form {
            values = vec![0.0; count];
        }
        if let Form::Repeated { times } = source.form {
            values = values.into_iter().flat_map(|value| std::iter::repeat_n(value, times)).collect();
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
    }

    /// The integers that `words` holds the words of.
    fn ids(&self, stored: &StoredWeight, words: &Tensor, each: usize, below: usize) -> Result<Tensor> {
        let words = dequantize(words.view())?;
        let number = |words: &[f32]| {
            let more = words[1..].iter().any(|word| word.to_bits() != 0);
            (!more && (words[0].to_bits() as usize) < below).then_some(words[0].to_bits() as f32)
        };
        let numbers: Option<Vec<f32>> = words.chunks_exact(each).map(number).collect();
        let numbers = numbers.ok_or_else(|| {
            let expected = format!("numbers below {below}");
            tensor_error(&self.checkpoint, stored, &expected, "others".into())
        })?;
        Ok(Tensor::from_f32(stored.rows(), stored.cols() / each, &numbers)?)
    }

    /// Says which resident weight holds a value that is not finite, if any does, reading them again.
    pub(crate) fn find_not_finite(&self) -> Option<String> {
        for source in &self.sources {
            let Ok(tensor) = self.read(source) else { continue };
            if let Ok(Some(at)) = find_not_finite(tensor.view()) {
                return Some(format!("tensor {} holds {at}", source.stored.name));
            }
        }
        self.adapters.iter().find_map(ModelAdapter::find_not_finite)
    }

    fn read(&self, source: &Source) -> Result<Tensor> {
        let weight = &source.stored;
        let stored_rows = source.stored_rows();
        let rows: usize = match source.read_part() {
            WeightPart::Rows(rows) => rows.iter().map(Range::len).sum(),
            WeightPart::Whole | WeightPart::EverySecond(_) => stored_rows,
        };
        let (mut planes, mut scratch) = (vec![], vec![]);
        for (index, plane) in weight.planes.iter().enumerate() {
            let path = || self.checkpoint.files().get(plane.file).map_or(PathBuf::new(), |f| f.path().into());
            // A plane's row may stand for several rows of the weight.
            let block = weight.dtype.block_rows(index);
            let each = plane.len.checked_div(stored_rows.div_ceil(block) as u64).unwrap_or(0);
            let parts: Vec<ByteRange> = match source.read_part() {
                WeightPart::Whole | WeightPart::EverySecond(_) => vec![*plane],
                WeightPart::Rows(chosen) => {
                    let part = |rows: &Range<usize>| {
                        let blocks = rows.start / block..rows.end.div_ceil(block);
                        let offset = plane.offset + each * blocks.start as u64;
                        ByteRange { offset, len: each * blocks.len() as u64, ..*plane }
                    };
                    chosen.iter().map(part).collect()
                }
            };
            // Rows of a plane that is stored by columns are cut out once it is whole.
            let (parts, cut) = match plane.by_columns {
                Some(columns) => (vec![*plane], Some((columns, parts))),
                None => (parts, None),
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
            let Some((columns, parts)) = cut else {
                planes.push(Bytes::new(buffer));
                continue;
            };
            columns.turn_to_rows(buffer.as_mut_slice(), &mut scratch);
            let whole = Bytes::new(buffer);
            let part = |part: &ByteRange| {
                let start = (part.offset - plane.offset) as usize;
                &whole.as_slice()[start..start + part.len as usize]
            };
            let is_whole = parts.iter().map(|part| part.len).eq([plane.len]);
            let rows = || Bytes::new(parts.iter().flat_map(part).copied().collect::<Vec<u8>>());
            planes.push(if is_whole { whole.clone() } else { rows() });
        }
        let (rows, cols) = if weight.shape.len() == 1 { (1, rows) } else { (rows, weight.cols()) };
        Ok(Tensor::new(weight.dtype, rows, cols, planes)?)
    }
}

/// A of each head of lightning attention: −2^(−8 (head + 1) / heads), less in later layers (transformers `modeling_minimax.py`).
fn lightning_slopes(a: &mut [f32], layer: usize, layers: usize) {
    let base = 2f64.powf(-8.0 / a.len() as f64);
    let depth = 1.0 - layer as f64 / (layers.saturating_sub(1) as f64 + 1e-5) + 1e-5;
    a.iter_mut().enumerate().for_each(|(head, a)| *a = -(base.powi(head as i32 + 1) * depth) as f32);
}

/// `tensor` as f32, with its columns as rows.
fn transposed(tensor: &Tensor, times: usize) -> Result<Tensor> {
    let (rows, cols) = (tensor.rows(), tensor.cols());
    let stored = dequantize(tensor.view())?;
    let values: Vec<f32> = (0..rows * cols).map(|i| stored[i % rows * cols + i / rows]).collect();
    Ok(Tensor::from_f32(cols * times, rows, &values.repeat(times))?)
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

/// That the checkpoint has `got` as `weight`, where `expected` is needed.
pub(super) fn tensor_error(
    checkpoint: &Checkpoint,
    weight: &StoredWeight,
    expected: &str,
    got: String,
) -> Error {
    let file = weight.planes.first().and_then(|plane| checkpoint.files().get(plane.file));
    let path = file.map_or_else(|| checkpoint.path().into(), |file| file.path().into());
    Error::Tensor { path, tensor: weight.name.clone(), expected: expected.into(), got }
}
