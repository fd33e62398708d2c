//! `adapter_model.safetensors`: the pairs of matrices that an adapter has, by module.

use std::collections::BTreeMap;
use std::path::Path;

use moeflux_compute::quant::find_not_finite;
use moeflux_compute::{Bytes, DType, Tensor};

use super::config::AdapterConfig;
use crate::checkpoint::safetensors::open_file;
use crate::checkpoint::{CheckpointFile, Encoding, TensorEntry};
use crate::{Error, Result};

/// Name of the file in an adapter's folder.
const WEIGHTS: &str = "adapter_model.safetensors";
/// What stands before modules' names.
const PREFIX: &str = "base_model.model.";

/// A matrix of the file.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    entry: TensorEntry,
}

/// A and B of a module.
#[derive(Debug, Clone)]
pub(crate) struct Pair {
    /// As the model's modules are called in Python.
    pub(crate) module: String,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
}

/// An adapter's open file.
#[derive(Debug)]
pub(crate) struct AdapterFile {
    file: CheckpointFile,
}

impl AdapterFile {
    /// Opens the file in `folder`; its pairs are in the order of their names.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Malformed`] or [`Error::Tensor`] for what is not an adapter's file, [`Error::MissingTensor`] for an
    /// A without B or a B without A.
    pub(crate) fn open(folder: &Path) -> Result<(Self, Vec<Pair>)> {
        let path = folder.join(WEIGHTS);
        let (file, header) = open_file(&path)?;
        let mut halves: BTreeMap<String, [Option<Matrix>; 2]> = BTreeMap::new();
        let mut copies = vec![];
        for entry in header.entries(0) {
            // Of heads PEFT saves the model's own weights too.
            if let Some(module) = copied(&entry.name) {
                copies.push((module.to_owned(), entry));
                continue;
            }
            let (module, half) = split(&entry.name).map_err(|expected| Error::Tensor {
                path: path.clone(),
                tensor: entry.name.clone(),
                expected: expected.into(),
                got: "something else".into(),
            })?;
            let place = &mut halves.entry(module).or_default()[half];
            if let Some(other) = place {
                return Err(Error::Tensor {
                    path,
                    tensor: entry.name,
                    expected: "one matrix of each kind a module".into(),
                    got: format!("{} too", other.name),
                });
            }
            *place = Some(matrix(entry, &path)?);
        }
        if halves.is_empty() {
            return Err(Error::Malformed {
                path,
                what: "adapter".into(),
                expected: "matrices lora_A and lora_B".into(),
                got: "no tensors".into(),
            });
        }
        let pair = |(module, [a, b]): (String, [Option<Matrix>; 2])| {
            let missing = |half: &str| Error::MissingTensor {
                path: path.clone(),
                tensor: format!("{PREFIX}{module}.{half}.weight"),
            };
            let (a, b) = (a.ok_or_else(|| missing("lora_A"))?, b.ok_or_else(|| missing("lora_B"))?);
            Ok(Pair { module, a, b })
        };
        let pairs: Vec<Pair> = halves.into_iter().map(pair).collect::<Result<_>>()?;
        for (module, entry) in copies {
            let pair = pairs.iter().find(|pair| pair.module == module);
            if pair.is_none_or(|pair| entry.shape != [pair.b.rows, pair.a.cols]) {
                return Err(Error::Tensor {
                    path,
                    tensor: entry.name,
                    expected: "lora_A or lora_B of a module, or a copy of the weight that they are for"
                        .into(),
                    got: format!("{} {:?}", entry.encoding, entry.shape),
                });
            }
        }
        Ok((Self { file }, pairs))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// That `matrix` is not what is needed.
    pub(crate) fn fault(&self, matrix: &Matrix, expected: String, got: String) -> Error {
        Error::Tensor { path: self.path().into(), tensor: matrix.name.clone(), expected, got }
    }

    /// Reads a matrix.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Tensor`] if a value is not finite.
    pub(crate) fn read(&self, matrix: &Matrix) -> Result<Tensor> {
        let mut bytes = vec![0; matrix.entry.range.len as usize];
        self.file.read_exact_at(matrix.entry.range.offset, &mut bytes)?;
        let tensor = Tensor::new(matrix.dtype, matrix.rows, matrix.cols, vec![Bytes::new(bytes)])?;
        match find_not_finite(tensor.view())? {
            Some(at) => Err(self.fault(matrix, "finite values".into(), at.to_string())),
            None => Ok(tensor),
        }
    }
}

/// The module whose own weight a tensor is a copy of.
fn copied(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(".base_layer.weight")
}

/// The module that a tensor belongs to, and whether it is its A (0) or its B (1); else what there should be.
fn split(name: &str) -> Result<(String, usize), &'static str> {
    const EXPECTED: &str = "lora_A or lora_B of a module";
    let module = name.strip_prefix(PREFIX).ok_or(EXPECTED)?;
    if name.contains("lora_embedding_") {
        return Err("modules that are not embeddings");
    }
    if name.contains("lora_magnitude_vector") {
        return Err("no magnitudes: DoRA is not supported");
    }
    for (half, kind) in [".lora_A", ".lora_B"].into_iter().enumerate() {
        // The name that PEFT gives adapters by default may stand behind the kind.
        for ending in [".weight", ".default.weight"] {
            if let Some(module) = module.strip_suffix(ending).and_then(|own| own.strip_suffix(kind)) {
                return Ok((module.to_owned(), half));
            }
        }
    }
    Err(EXPECTED)
}

fn matrix(entry: TensorEntry, path: &Path) -> Result<Matrix> {
    match (&entry.encoding, &entry.shape[..]) {
        (Encoding::Weight(dtype @ (DType::F32 | DType::F16 | DType::BF16)), &[rows, cols])
            if rows > 0 && cols > 0 =>
        {
            Ok(Matrix { name: entry.name.clone(), dtype: *dtype, rows, cols, entry })
        }
        (encoding, shape) => Err(Error::Tensor {
            path: path.into(),
            tensor: entry.name.clone(),
            expected: "a matrix of F32, F16 or BF16".into(),
            got: format!("{encoding} {shape:?}"),
        }),
    }
}

/// Checks that a pair's rank is what the configuration says of its module, or of the parameter of it that the pair is for, as
/// in `.down_proj`; returns the rank and the factor on what the pair adds.
///
/// # Errors
/// [`Error::Tensor`] naming the matrix that has another.
pub(super) fn check_rank(
    file: &AdapterFile,
    config: &AdapterConfig,
    (pair, parameter): (&Pair, &str),
    experts: usize,
) -> Result<(usize, f32)> {
    // Modules of which several parameters have adapters are wrapped once for each.
    let name = format!("{}{parameter}", pair.module.replace(".base_layer", ""));
    let rank = config.rank(&name);
    for (matrix, which, got) in [(&pair.a, "rows", pair.a.rows), (&pair.b, "columns", pair.b.cols)] {
        if got != rank * experts {
            let of = if experts > 1 { format!(" for each of {experts} experts") } else { String::new() };
            let expected = format!("{rank} {which}{of}, the rank that {} says", config.path().display());
            return Err(file.fault(matrix, expected, format!("[{}, {}]", matrix.rows, matrix.cols)));
        }
    }
    Ok((rank, config.scale(&name, rank)))
}
