//! [`Checkpoint`]: a model's files as one directory of named weights, whatever the format.
//!
//! Opening reads headers only; weights stay where they are and are described as byte ranges
//! ([`StoredWeight`]), which is what lets experts be streamed straight from the files people already have.
//! The price: weights keep the layout of their format, and everything above works on encodings
//! ([`DType`](moeflux_compute::DType)), not on floats.
//!
//! Names are those of the files. Mapping them to a model's parts is the architectures' business.

pub(crate) mod elements;
mod fp8;
pub mod gguf;
mod gptq;
mod integers;
pub mod json;
pub mod mlx;
mod mxfp4;
mod nvfp4;
pub(crate) mod quantization;
pub mod safetensors;
mod stream;
mod weight;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux_compute::{Bytes, Tensor};
use serde_json::Value;

pub use self::weight::{ByteRange, Encoding, StoredWeight, TensorEntry};
pub use crate::io::file::CheckpointFile;
use crate::{Error, Result};

/// What the names of packed weights end with in compressed-tensors' files.
const PACKED: &str = ".weight_packed";

/// Where a checkpoint comes from, which decides tensor names and stored conventions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// GGUF, one file or shards.
    Gguf,
    /// Safetensors folder as transformers writes it.
    HuggingFace,
    /// Safetensors folder as MLX writes it, quantised or not.
    Mlx,
}

/// An open model: files, configuration, and where every tensor is.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    files: Vec<Arc<CheckpointFile>>,
    config: Value,
    metadata: gguf::Metadata,
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens a GGUF file, any shard of a split one, a safetensors file in its model folder, or a folder that
    /// holds exactly one model.
    ///
    /// # Errors
    /// [`Error::Io`] if files cannot be opened; [`Error::Malformed`], [`Error::Tensor`] or
    /// [`Error::MissingTensor`] if they are not what their format prescribes.
    pub fn open(path: &Path) -> Result<Self> {
        let is_folder = std::fs::metadata(path).map_err(io_error("open", path))?.is_dir();
        if !is_folder {
            if path.extension().is_some_and(|e| e == "safetensors") {
                let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
                return Self::open_safetensors(parent.unwrap_or(Path::new(".")));
            }
            return Self::open_gguf(path);
        }
        let ggufs = gguf::models_in(path)?;
        // Beside a GGUF, safetensors files of other names are something else: adapters, activations.
        let has_safetensors =
            safetensors::has_model(path) || (ggufs.is_empty() && safetensors::has_files(path)?);
        match (&ggufs[..], has_safetensors) {
            ([], true) => Self::open_safetensors(path),
            ([only], false) => Self::open_gguf(only),
            (several, _) => Err(Error::Malformed {
                path: path.to_owned(),
                what: "folder".into(),
                expected: "one model, or the name of a file in it".into(),
                got: format!(
                    "{} GGUF models and {} safetensors model",
                    several.len(),
                    if has_safetensors { "a" } else { "no" }
                ),
            }),
        }
    }

    /// A checkpoint of `format` whose bytes, those of one file, are made when they are read; `config` is its `config.json`.
    ///
    /// # Errors
    /// [`Error::Malformed`] or [`Error::Tensor`] if the header is not what the format prescribes.
    pub(crate) fn made(format: Format, file: CheckpointFile, config: Value) -> Result<Self> {
        let path = file.path().to_owned();
        if format == Format::Gguf {
            return Self::of_gguf(&path, gguf::of_file(file)?);
        }
        let reader = std::io::BufReader::new(file.reader());
        let header = safetensors::Header::read(reader, file.length(), &path)?;
        Self {
            metadata: gguf::Metadata::new(&path),
            path,
            format,
            files: vec![Arc::new(file)],
            config,
            entries: header.entries(0).collect(),
            by_name: HashMap::new(),
        }
        .index()
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        Self::of_gguf(path, gguf::open(path)?)
    }

    fn of_gguf(path: &Path, opened: gguf::GgufFiles) -> Result<Self> {
        let gguf::GgufFiles { files, metadata, entries } = opened;
        Self {
            path: path.to_owned(),
            format: Format::Gguf,
            files: files.into_iter().map(Arc::new).collect(),
            config: Value::Null,
            metadata,
            entries,
            by_name: HashMap::new(),
        }
        .index()
    }

    fn open_safetensors(folder: &Path) -> Result<Self> {
        let safetensors::Folder { files, config, entries, metadata } = safetensors::open(folder)?;
        let mlx = mlx::is_mlx(&config, &metadata, &entries);
        Self {
            path: folder.to_owned(),
            format: if mlx { Format::Mlx } else { Format::HuggingFace },
            files: files.into_iter().map(Arc::new).collect(),
            config,
            metadata: gguf::Metadata::new(folder),
            entries,
            by_name: HashMap::new(),
        }
        .index()
    }

    /// A checkpoint called `name` that has a configuration, but no files and no tensors.
    pub(crate) fn outlined(name: &Path, format: Format, config: Value, metadata: gguf::Metadata) -> Self {
        Self {
            path: name.to_owned(),
            format,
            files: vec![],
            config,
            metadata,
            entries: vec![],
            by_name: HashMap::new(),
        }
    }

    /// Fills the name index; a name may occur once over all files.
    fn index(mut self) -> Result<Self> {
        self.by_name.reserve(self.entries.len());
        for (i, entry) in self.entries.iter().enumerate() {
            if let Some(first) = self.by_name.insert(entry.name.clone(), i) {
                let other = self.file_path(&self.entries[first]);
                return Err(self.tensor_error(entry, "a unique name".into(), {
                    format!("the same name in {}", other.display())
                }));
            }
        }
        if self.format == Format::HuggingFace {
            self.index_packed();
        }
        Ok(self)
    }

    /// Lets what compressed-tensors calls `MODULE.weight_packed`, and GPTQ and AWQ `MODULE.qweight`, be found as
    /// `MODULE.weight` too.
    fn index_packed(&mut self) {
        for (i, entry) in self.entries.iter().enumerate() {
            let packed = [PACKED, gptq::QWEIGHT].iter().find_map(|ending| entry.name.strip_suffix(ending));
            if let Some(module) = packed {
                self.by_name.entry(format!("{module}.weight")).or_insert(i);
            }
        }
    }

    /// Format of the files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The folder, or the GGUF file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`; null for GGUF.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Refuses a folder whose weights are quantised in a way that cannot be read.
    ///
    /// # Errors
    /// [`Error::UnsupportedQuantization`] naming it; [`Error::Tensor`] for columns in another order than that of their groups.
    pub(crate) fn check_quantization(&self) -> Result<()> {
        match self.format {
            Format::HuggingFace => {
                quantization::method(&self.config, &self.path)?;
                gptq::check_order(self)
            }
            Format::Gguf | Format::Mlx => Ok(()),
        }
    }

    /// The file that holds the configuration, for error messages.
    pub(crate) fn config_path(&self) -> PathBuf {
        match self.format {
            Format::Gguf => self.metadata.path().to_owned(),
            Format::HuggingFace | Format::Mlx => self.path.join("config.json"),
        }
    }

    /// GGUF key-values (of the first shard); empty for the other formats.
    pub fn metadata(&self) -> &gguf::Metadata {
        &self.metadata
    }

    /// The files that weights lie in.
    pub fn files(&self) -> &[Arc<CheckpointFile>] {
        &self.files
    }

    /// Whether bytes of weights are made, so that none are read from a disk.
    pub fn is_made(&self) -> bool {
        self.files.iter().any(|file| file.is_made())
    }

    /// Names of all stored tensors, in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.name.as_str())
    }

    /// All stored tensors, in file order, usable as weights or not.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// The stored tensor `name`.
    pub fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    /// Whether a tensor is stored under `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Where the weight `name` lies and how it is encoded; `None` if there is none. For a quantised MLX
    /// module the name is that of its packed `.weight`, and the result has scales and biases with it; likewise the scales
    /// of FP8 and of packed weights, whose module's `.weight` may be `.weight_packed` or `.qweight` in the file.
    ///
    /// # Errors
    /// [`Error::Tensor`] if its encoding cannot be used or, for MLX, does not fit its scales and biases.
    pub fn weight(&self, name: &str) -> Result<Option<StoredWeight>> {
        let Some(entry) = self.entry(name) else { return Ok(None) };
        if self.format == Format::Mlx
            && let Some(weight) = mlx::affine(self, entry)?
        {
            return Ok(Some(weight));
        }
        if self.format != Format::Gguf
            && let Some(weight) = fp8::scaled(self, entry)?
        {
            return Ok(Some(weight));
        }
        for packed in [integers::weight, gptq::weight, nvfp4::weight] {
            if let Some(weight) = packed(self, entry)? {
                return Ok(Some(weight));
            }
        }
        if let Some(weight) = mxfp4::weight(self, entry)? {
            return Ok(Some(weight));
        }
        let Encoding::Weight(dtype) = entry.encoding else {
            let expected = "an encoding supported for weights".to_owned();
            return Err(self.tensor_error(entry, expected, entry.encoding.to_string()));
        };
        let (name, shape, planes) = (entry.name.clone(), entry.shape.clone(), vec![entry.range]);
        Ok(Some(StoredWeight { name, dtype, shape, planes }))
    }

    /// Fills `out` with the bytes of `range`.
    ///
    /// # Errors
    /// [`Error::Read`] naming file, offset, wanted and got if the read fails or comes back short, or if `out`
    /// is not as long as the range.
    pub fn read(&self, range: &ByteRange, out: &mut [u8]) -> Result<()> {
        let refuse = |path: &Path, why: String| {
            let (offset, wanted) = (range.offset, out.len() as u64);
            let source = std::io::Error::other(why);
            Err(Error::Read { path: path.to_owned(), offset, wanted, got: 0, source })
        };
        let Some(file) = self.files.get(range.file) else {
            return refuse(&self.path, "the checkpoint is only described".into());
        };
        if out.len() as u64 != range.len {
            return refuse(file.path(), format!("the range has {} bytes", range.len));
        }
        file.read_exact_at(range.offset, out)
    }

    /// The weight `name`, read whole into memory; `None` if there is none. All dimensions but the last become
    /// rows; one dimension is one row.
    ///
    /// # Errors
    /// As [`Checkpoint::weight`] and [`Checkpoint::read_weight`].
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.weight(name)?.map(|weight| self.read_weight(&weight)).transpose()
    }

    /// Reads `weight` whole into memory; see [`Checkpoint::tensor`] for its shape.
    ///
    /// # Errors
    /// [`Error::Read`] if the file no longer holds it.
    pub fn read_weight(&self, weight: &StoredWeight) -> Result<Tensor> {
        let mut planes = Vec::with_capacity(weight.planes.len());
        let mut scratch = vec![];
        for plane in &weight.planes {
            // Bounded by the file's length, which every range was checked against.
            let mut bytes = vec![0; plane.len as usize];
            self.read(plane, &mut bytes)?;
            if let Some(columns) = &plane.by_columns {
                columns.turn_to_rows(&mut bytes, &mut scratch);
            }
            planes.push(Bytes::new(bytes));
        }
        Ok(Tensor::new(weight.dtype, weight.rows(), weight.cols(), planes)?)
    }

    fn file_path(&self, entry: &TensorEntry) -> &Path {
        self.files[entry.range.file].path()
    }

    fn tensor_error(&self, entry: &TensorEntry, expected: String, got: String) -> Error {
        Error::Tensor { path: self.file_path(entry).to_owned(), tensor: entry.name.clone(), expected, got }
    }
}

/// Makes the [`Error::Io`] of `action` on `path`.
fn io_error(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Io { action, path: path.to_owned(), source }
}
