//! [`Writer`]: safetensors as a stream, so that files bigger than memory can be written.

use std::{collections::HashSet, io::Write, path::Path};

use serde_json::{Map, json};

use super::{ElementType, MAX_HEADER_BYTES};
use crate::{Error, Result, checkpoint::stream::TensorStream};

/// Where tensor data begins is a multiple of this: a cache line, and any element type's alignment.
const DATA_ALIGNMENT: usize = 64;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: ElementType,
    /// Row-major shape, slowest dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of its data; `None` if that overflows or is not whole.
    pub fn bytes(&self) -> Option<u64> {
        let bits =
            self.shape.iter().try_fold(self.dtype.bitsize() as u64, |n, &d| n.checked_mul(d as u64))?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Writes a safetensors file: the header at once, then tensor data in the order of the specifications.
///
/// Nothing is buffered; give it a sink that takes small writes well if the data comes in small pieces.
#[derive(Debug)]
pub struct Writer<W> {
    stream: TensorStream<W>,
}

impl<W: Write> Writer<W> {
    /// Writes the header to `out` with `metadata` as `__metadata__`; `path` is the file that errors name.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a name given twice or a size that overflows, [`Error::Malformed`] for a header
    /// beyond the format's bound, [`Error::Io`] if writing fails.
    pub fn new(out: W, path: &Path, metadata: &[(&str, &str)], tensors: &[TensorSpec]) -> Result<Self> {
        let mut header = Map::new();
        if !metadata.is_empty() {
            let entries: Map<_, _> = metadata.iter().map(|&(k, v)| (k.to_owned(), v.into())).collect();
            header.insert("__metadata__".to_owned(), entries.into());
        }
        let mut names = HashSet::from(["__metadata__"]);
        let mut sizes = Vec::with_capacity(tensors.len());
        let mut offset = 0u64;
        for spec in tensors {
            let fault = |expected: &str, got: String| Error::Tensor {
                path: path.to_owned(),
                tensor: spec.name.clone(),
                expected: expected.to_owned(),
                got,
            };
            if !names.insert(&spec.name) {
                return Err(fault("a unique name", "a duplicate".into()));
            }
            let bytes = spec.bytes();
            let (Some(bytes), Some(end)) = (bytes, bytes.and_then(|n| offset.checked_add(n))) else {
                let got = format!("{:?} of shape {:?}", spec.dtype, spec.shape);
                return Err(fault("whole bytes, fewer than 2^64", got));
            };
            let entry = json!({ "dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end] });
            header.insert(spec.name.clone(), entry);
            sizes.push((spec.name.clone(), bytes));
            offset = end;
        }
        let json = serde_json::Value::Object(header).to_string();
        let json_len = (8 + json.len()).next_multiple_of(DATA_ALIGNMENT) - 8;
        if json_len as u64 > MAX_HEADER_BYTES {
            return Err(Error::Malformed {
                path: path.to_owned(),
                what: "safetensors header length".to_owned(),
                expected: format!("at most {MAX_HEADER_BYTES} bytes"),
                got: json_len.to_string(),
            });
        }
        let mut bytes = (json_len as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(8 + json_len, b' ');
        Ok(Self { stream: TensorStream::new(out, path, &bytes, sizes, 1)? })
    }

    /// Name of the tensor that the next bytes belong to; `None` when all are complete.
    pub fn current(&self) -> Option<&str> {
        self.stream.current()
    }

    /// Appends `bytes` to the current tensor's data; the next tensor's turn comes when it is complete.
    ///
    /// # Errors
    /// [`Error::Tensor`] if these are more bytes than the tensor still takes, [`Error::Io`] if writing fails.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.append(bytes)
    }

    /// Flushes and returns the sink.
    ///
    /// # Errors
    /// [`Error::Tensor`] naming the first incomplete tensor, [`Error::Io`] if flushing fails.
    pub fn finish(self) -> Result<W> {
        self.stream.finish()
    }
}
