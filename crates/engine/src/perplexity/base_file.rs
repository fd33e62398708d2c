//! Predictions of a run in a safetensors file, for other runs to be compared with.
//!
//! `tokens` u32 \[windows · length\] are those of the text, `log_probabilities` f32 \[scored, vocab_size\] the predictions
//! in order. They are kept exactly, so that a run compared with itself diverges by nothing; the price is four bytes
//! for every entry of the vocabulary and scored token.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::{Prediction, Windows};
use crate::checkpoint::CheckpointFile;
use crate::checkpoint::safetensors::{ElementType, Header, TensorSpec, Writer};
use crate::{Error, Result};

/// What `format` in the metadata says.
const FORMAT: &str = "moeflux predictions 1";

/// Writes predictions as they are made; the file is complete or not there.
#[derive(Debug)]
pub struct BaseWriter {
    path: PathBuf,
    writer: Writer<BufWriter<NamedTempFile>>,
    bytes: Vec<u8>,
}

impl BaseWriter {
    /// Begins the file that will be at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written there.
    pub fn create(path: &Path, windows: &Windows, vocab_size: usize) -> Result<Self> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = NamedTempFile::new_in(folder).map_err(|source| io_error(path, source))?;
        let spec = |name: &str, dtype, shape| TensorSpec { name: name.to_owned(), dtype, shape };
        let specs = [
            spec("tokens", ElementType::U32, vec![windows.tokens().len()]),
            spec("log_probabilities", ElementType::F32, vec![windows.scored(), vocab_size]),
        ];
        let length = windows.length().to_string();
        let metadata = [("format", FORMAT), ("window", &length)];
        let mut writer = Writer::new(BufWriter::new(file), path, &metadata, &specs)?;
        for token in windows.tokens() {
            writer.append(&token.to_le_bytes())?;
        }
        Ok(Self { path: path.to_owned(), writer, bytes: vec![] })
    }

    /// Appends the next prediction.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written; [`Error::Tensor`] for more predictions than the windows have.
    pub fn append(&mut self, prediction: Prediction<'_>) -> Result<()> {
        self.bytes.clear();
        self.bytes.extend(prediction.log_probabilities.iter().flat_map(|l| l.to_le_bytes()));
        self.writer.append(&self.bytes)
    }

    /// Moves the complete file to its place.
    ///
    /// # Errors
    /// [`Error::Tensor`] if predictions are missing, [`Error::Io`] if the file cannot be moved.
    pub fn finish(self) -> Result<()> {
        let mut out = self.writer.finish()?;
        out.flush().map_err(|source| io_error(&self.path, source))?;
        let file = out.into_inner().map_err(|error| io_error(&self.path, error.into_error()))?;
        file.as_file().sync_all().map_err(|source| io_error(&self.path, source))?;
        file.persist(&self.path).map_err(|error| io_error(&self.path, error.error))?;
        Ok(())
    }
}

fn io_error(path: &Path, source: std::io::Error) -> Error {
    Error::Io { action: "write", path: path.to_owned(), source }
}

/// Reads predictions in the order in which they were written.
#[derive(Debug)]
pub struct BaseReader {
    file: CheckpointFile,
    offset: u64,
    end: u64,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl BaseReader {
    /// Opens the predictions of `windows` at `path`.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the file holds something else, or predictions of another text, window or vocabulary.
    pub fn open(path: &Path, windows: &Windows, vocab_size: usize) -> Result<Self> {
        let file = CheckpointFile::open(path)?;
        let header = Header::read(file.reader(), file.length(), path)?;
        let fault = |what: &str, expected: String, got: String| Error::Malformed {
            path: path.to_owned(),
            what: what.to_owned(),
            expected,
            got,
        };
        let said = |key: &str| header.metadata.get(key).cloned().unwrap_or_default();
        for (key, expected) in [("format", FORMAT.to_owned()), ("window", windows.length().to_string())] {
            if said(key) != expected {
                return Err(fault(key, format!("{expected:?}"), format!("{:?}", said(key))));
            }
        }
        let tensor = |name: &str, dtype: &str, shape: &[usize]| {
            let found = header.tensors.iter().find(|t| t.name == name);
            match found.filter(|t| t.dtype == dtype && t.shape == shape) {
                Some(found) => Ok(found),
                None => {
                    let got = found.map_or("none".into(), |t| format!("{} {:?}", t.dtype, t.shape));
                    Err(fault(name, format!("{dtype} {shape:?}"), got))
                }
            }
        };
        let tokens = tensor("tokens", "U32", &[windows.tokens().len()])?;
        let mut bytes = vec![0; tokens.len as usize];
        file.read_exact_at(tokens.offset, &mut bytes)?;
        let same = bytes.chunks_exact(4).zip(windows.tokens()).all(|(b, token)| b == token.to_le_bytes());
        if !same {
            return Err(fault("tokens", "those of this text".into(), "those of another".into()));
        }
        let rows = tensor("log_probabilities", "F32", &[windows.scored(), vocab_size])?;
        let (offset, end) = (rows.offset, rows.offset + rows.len);
        Ok(Self { file, offset, end, bytes: vec![0; vocab_size * size_of::<f32>()], row: vec![] })
    }

    /// The next row of log probabilities, (vocab_size); `None` after the last.
    ///
    /// # Errors
    /// [`Error::Read`] if the file cannot be read.
    pub fn next_row(&mut self) -> Result<Option<&[f32]>> {
        if self.offset >= self.end {
            return Ok(None);
        }
        self.file.read_exact_at(self.offset, &mut self.bytes)?;
        self.offset += self.bytes.len() as u64;
        self.row.clear();
        self.row.extend(self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Ok(Some(&self.row))
    }
}
