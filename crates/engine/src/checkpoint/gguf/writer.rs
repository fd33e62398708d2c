//! [`Writer`]: GGUF v3 as a stream, so that files bigger than memory can be written.

use std::{collections::HashSet, io::Write, path::Path};

use super::{
    header::{self, MAGIC, value_type},
    metadata::{Array, Metadata, Value},
    types::{self, GgmlType},
};
use crate::{
    Error, Result,
    checkpoint::{Encoding, stream::TensorStream},
};

const VERSION: u32 = 3;

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Encoding; GGUF has none of the affine ones. Others than weights are called as GGUF calls them: `I32`.
    pub encoding: Encoding,
    /// Row-major shape, slowest dimension first; 1 to 4 dimensions, none of them 0.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of its data; `None` if GGUF cannot store it.
    pub fn bytes(&self) -> Option<u64> {
        let ggml_type = self.ggml_type()?;
        let (&cols, outer) = self.shape.split_last()?;
        let rows = outer.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
        let fits = self.shape.len() <= 4 && cols > 0 && rows > 0;
        let bytes = ggml_type.matrix_bytes(rows, cols).filter(|_| fits)?;
        i64::try_from(bytes).is_ok().then_some(bytes)
    }

    fn ggml_type(&self) -> Option<&'static GgmlType> {
        match &self.encoding {
            Encoding::Weight(dtype) => types::by_dtype(*dtype),
            Encoding::Other(name) => types::by_name(name),
        }
    }
}

/// Writes a GGUF file: key-values and directory at once, then tensor data in the directory's order.
///
/// The alignment is that of `general.alignment` in the key-values, or 32. Nothing is buffered; give it a sink
/// that takes small writes well if the data comes in small pieces.
#[derive(Debug)]
pub struct Writer<W> {
    stream: TensorStream<W>,
}

impl<W: Write> Writer<W> {
    /// Writes everything before the tensor data to `out`; `path` is the file that errors name.
    ///
    /// # Errors
    /// [`Error::Tensor`] if GGUF cannot store a tensor as specified, [`Error::Config`] for a bad alignment,
    /// [`Error::Io`] if writing fails.
    pub fn new(out: W, path: &Path, metadata: &Metadata, tensors: &[TensorSpec]) -> Result<Self> {
        let alignment = header::alignment(metadata, path)?;
        let mut header = Encoder::default();
        header.bytes(&MAGIC);
        header.bytes(&VERSION.to_le_bytes());
        header.bytes(&(tensors.len() as u64).to_le_bytes());
        header.bytes(&(metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata.iter() {
            header.string(key);
            header.value(value);
        }
        let mut offset = 0u64;
        let mut sizes = Vec::with_capacity(tensors.len());
        let mut names = HashSet::with_capacity(tensors.len());
        for spec in tensors {
            let fault = |expected: &str, got: String| Error::Tensor {
                path: path.to_owned(),
                tensor: spec.name.clone(),
                expected: expected.to_owned(),
                got,
            };
            if !names.insert(spec.name.as_str()) {
                return Err(fault("a unique name", "a duplicate".into()));
            }
            let stored_as = spec.ggml_type().zip(spec.bytes());
            let end = stored_as.and_then(|(_, n)| n.checked_next_multiple_of(alignment)?.checked_add(offset));
            let (Some((ggml_type, bytes)), Some(end)) = (stored_as, end) else {
                let got = format!("{} of shape {:?}", spec.encoding, spec.shape);
                return Err(fault("an encoding and a shape that GGUF can store", got));
            };
            header.string(&spec.name);
            header.bytes(&(spec.shape.len() as u32).to_le_bytes());
            for &dim in spec.shape.iter().rev() {
                header.bytes(&(dim as u64).to_le_bytes());
            }
            header.bytes(&ggml_type.id.to_le_bytes());
            header.bytes(&offset.to_le_bytes());
            sizes.push((spec.name.clone(), bytes));
            offset = end;
        }
        let mut header = header.out;
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        Ok(Self { stream: TensorStream::new(out, path, &header, sizes, alignment)? })
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

/// The header as it will be in the file.
#[derive(Default)]
struct Encoder {
    out: Vec<u8>,
}

impl Encoder {
    fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    fn string(&mut self, text: &str) {
        self.bytes(&(text.len() as u64).to_le_bytes());
        self.bytes(text.as_bytes());
    }

    fn tagged(&mut self, value_type: u32, bytes: &[u8]) {
        self.bytes(&value_type.to_le_bytes());
        self.bytes(bytes);
    }

    fn value(&mut self, value: &Value) {
        match value {
            Value::U8(v) => self.tagged(value_type::U8, &v.to_le_bytes()),
            Value::I8(v) => self.tagged(value_type::I8, &v.to_le_bytes()),
            Value::U16(v) => self.tagged(value_type::U16, &v.to_le_bytes()),
            Value::I16(v) => self.tagged(value_type::I16, &v.to_le_bytes()),
            Value::U32(v) => self.tagged(value_type::U32, &v.to_le_bytes()),
            Value::I32(v) => self.tagged(value_type::I32, &v.to_le_bytes()),
            Value::F32(v) => self.tagged(value_type::F32, &v.to_le_bytes()),
            Value::Bool(v) => self.tagged(value_type::BOOL, &[u8::from(*v)]),
            Value::String(v) => {
                self.tagged(value_type::STRING, &[]);
                self.string(v);
            }
            Value::Array(v) => {
                self.tagged(value_type::ARRAY, &[]);
                self.array(v);
            }
            Value::U64(v) => self.tagged(value_type::U64, &v.to_le_bytes()),
            Value::I64(v) => self.tagged(value_type::I64, &v.to_le_bytes()),
            Value::F64(v) => self.tagged(value_type::F64, &v.to_le_bytes()),
        }
    }

    fn array(&mut self, array: &Array) {
        match array {
            Array::U8(v) => self.elements(value_type::U8, v, |v| v.to_le_bytes()),
            Array::I8(v) => self.elements(value_type::I8, v, |v| v.to_le_bytes()),
            Array::U16(v) => self.elements(value_type::U16, v, |v| v.to_le_bytes()),
            Array::I16(v) => self.elements(value_type::I16, v, |v| v.to_le_bytes()),
            Array::U32(v) => self.elements(value_type::U32, v, |v| v.to_le_bytes()),
            Array::I32(v) => self.elements(value_type::I32, v, |v| v.to_le_bytes()),
            Array::F32(v) => self.elements(value_type::F32, v, |v| v.to_le_bytes()),
            Array::Bool(v) => self.elements(value_type::BOOL, v, |v| [u8::from(v)]),
            Array::String(v) => {
                self.tagged(value_type::STRING, &(v.len() as u64).to_le_bytes());
                v.iter().for_each(|text| self.string(text));
            }
            Array::Array(v) => {
                self.tagged(value_type::ARRAY, &(v.len() as u64).to_le_bytes());
                v.iter().for_each(|array| self.array(array));
            }
            Array::U64(v) => self.elements(value_type::U64, v, |v| v.to_le_bytes()),
            Array::I64(v) => self.elements(value_type::I64, v, |v| v.to_le_bytes()),
            Array::F64(v) => self.elements(value_type::F64, v, |v| v.to_le_bytes()),
        }
    }

    fn elements<T: Copy, const N: usize>(
        &mut self,
        value_type: u32,
        values: &[T],
        encode: impl Fn(T) -> [u8; N],
    ) {
        self.tagged(value_type, &(values.len() as u64).to_le_bytes());
        values.iter().for_each(|&v| self.bytes(&encode(v)));
    }
}
