//! The header of one GGUF file: a bounded reader and the checks on what it reads.
//!
//! Layout: `GGUF`, version u32, tensor count u64, key-value count u64, key-values, tensor directory, padding
//! to the alignment, data. Integers are little-endian; strings are a u64 length and bytes.

use std::{collections::HashSet, fmt::Display, io::Read, path::Path};

use super::{
    metadata::{Array, Metadata, Value},
    types,
};
use crate::{
    Error, Result,
    checkpoint::weight::{ByteRange, Encoding, TensorEntry},
};

/// Bytes that key-values and tensor directory may take. The largest vocabularies need about a tenth.
pub const MAX_HEADER_BYTES: u64 = 128 << 20;
/// Bytes of a key or tensor name.
const MAX_NAME_BYTES: u64 = u16::MAX as u64;
/// Arrays within arrays within … an array.
const MAX_ARRAY_DEPTH: usize = 4;
/// Dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Elements reserved ahead of reading them; larger arrays grow as their elements arrive.
const MAX_RESERVED: usize = 1 << 16;

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of tensor data in files that say nothing about it.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted, a huge page: padding costs this much a tensor when such a file is rewritten.
const MAX_ALIGNMENT: u64 = 1 << 21;
const ALIGNMENT_KEY: &str = "general.alignment";

/// Numbers of the value types.
pub(super) mod value_type {
    pub(crate) const U8: u32 = 0;
    pub(crate) const I8: u32 = 1;
    pub(crate) const U16: u32 = 2;
    pub(crate) const I16: u32 = 3;
    pub(crate) const U32: u32 = 4;
    pub(crate) const I32: u32 = 5;
    pub(crate) const F32: u32 = 6;
    pub(crate) const BOOL: u32 = 7;
    pub(crate) const STRING: u32 = 8;
    pub(crate) const ARRAY: u32 = 9;
    pub(crate) const U64: u32 = 10;
    pub(crate) const I64: u32 = 11;
    pub(crate) const F64: u32 = 12;
}

/// Everything in a GGUF file but the tensor data.
#[derive(Debug, Clone)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Key-values.
    pub metadata: Metadata,
    /// Tensor directory in file order.
    pub tensors: Vec<TensorInfo>,
    /// Alignment of tensor data, a power of two.
    pub alignment: u64,
    /// Where tensor data begins, from the start of the file.
    pub data_offset: u64,
}

/// A tensor of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// ggml's type number, possibly one that is not known here.
    pub ggml_type: u32,
    /// Row-major shape, slowest dimension first: the reverse of the file's `ne`.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes; `None` if the type is not known.
    pub len: Option<u64>,
}

impl Header {
    /// Reads the header from `source`, the first bytes of a file of `length` bytes at `path`.
    ///
    /// # Errors
    /// [`Error::Malformed`] or [`Error::Tensor`] naming what is wrong; [`Error::Read`] if `source` ends
    /// before `length`.
    pub fn read(source: impl Read, length: u64, path: &Path) -> Result<Self> {
        let mut r = Reader { source, path, length, position: 0, context: String::new() };
        let magic: [u8; 4] = r.bytes("magic")?;
        if magic != MAGIC {
            return Err(r.malformed("magic", "\"GGUF\"", format!("{:?}", magic.escape_ascii().to_string())));
        }
        let version = r.u32("version")?;
        if version != 2 && version != 3 {
            let swapped = version.swap_bytes();
            let hint = match version {
                1 => " (an obsolete layout; convert the model again)".to_owned(),
                _ if swapped == 2 || swapped == 3 => format!(" (version {swapped} in big-endian byte order)"),
                _ => String::new(),
            };
            return Err(r.malformed("version", "2 or 3, little-endian", format!("{version}{hint}")));
        }
        // Smallest tensor: name length, number of dimensions, type, offset. Smallest key-value: key length,
        // value type, one byte.
        let tensor_count = r.count("tensor count", 8 + 4 + 4 + 8)?;
        let value_count = r.count("key-value count", 8 + 4 + 1)?;

        let mut metadata = Metadata::new(path);
        for i in 0..value_count {
            r.context = format!("key-value {i} of {value_count}: ");
            let key = r.name("key")?;
            r.context = format!("key {key:?}: ");
            let value_type = r.u32("value type")?;
            let value = r.value(value_type)?;
            if metadata.get(&key).is_some() {
                return Err(r.malformed("", "a unique key", "a duplicate"));
            }
            metadata.insert(key, value);
        }
        r.context.clear();
        let alignment = alignment(&metadata, path)?;

        let mut tensors = Vec::with_capacity(tensor_count.min(MAX_RESERVED));
        for i in 0..tensor_count {
            r.context = format!("tensor {i} of {tensor_count}: ");
            tensors.push(r.tensor_info()?);
        }
        r.context.clear();
        let data_offset = r.position.next_multiple_of(alignment);
        let mut header = Self { version, metadata, tensors, alignment, data_offset };
        header.place_tensors(length, path)?;
        Ok(header)
    }

    /// The directory as entries of file number `file`.
    pub(crate) fn entries(self, file: usize) -> impl Iterator<Item = TensorEntry> {
        self.tensors.into_iter().map(move |t| {
            let encoding = match types::by_id(t.ggml_type) {
                Some(ggml) => {
                    ggml.dtype.map_or_else(|| Encoding::Other(ggml.name.to_owned()), Encoding::Weight)
                }
                None => Encoding::Other(format!("unknown ggml type {}", t.ggml_type)),
            };
            let range = ByteRange { file, offset: t.offset, len: t.len.unwrap_or(0), by_columns: None };
            TensorEntry { name: t.name, encoding, shape: t.shape, range }
        })
    }

    /// Makes offsets absolute and checks that tensors are aligned, in the file, apart and named once.
    fn place_tensors(&mut self, length: u64, path: &Path) -> Result<()> {
        let fault = |tensor: &TensorInfo, expected: String, got: String| Error::Tensor {
            path: path.to_owned(),
            tensor: tensor.name.clone(),
            expected,
            got,
        };
        for tensor in &mut self.tensors {
            if !tensor.offset.is_multiple_of(self.alignment) {
                let expected = format!("a data offset that is a multiple of {}", self.alignment);
                return Err(fault(tensor, expected, tensor.offset.to_string()));
            }
            let relative = tensor.offset;
            let start = self.data_offset.checked_add(relative);
            let end = start.and_then(|s| s.checked_add(tensor.len.unwrap_or(0)));
            match (start, end) {
                (Some(start), Some(end)) if end <= length => tensor.offset = start,
                _ => {
                    let expected = format!("data within the {length} bytes of the file");
                    let len = tensor.len.map_or("some".to_owned(), |n| n.to_string());
                    let got = format!("{len} bytes at {} + {relative}", self.data_offset);
                    return Err(fault(tensor, expected, got));
                }
            }
        }
        let mut by_offset: Vec<&TensorInfo> = self.tensors.iter().collect();
        by_offset.sort_unstable_by_key(|t| t.offset);
        for pair in by_offset.windows(2) {
            // At least one byte each, so that tensors of unknown size do not share a start either.
            let end = pair[0].offset.saturating_add(pair[0].len.unwrap_or(1));
            if pair[1].offset < end {
                let expected = format!("data after tensor {}, which ends at {end}", pair[0].name);
                return Err(fault(pair[1], expected, format!("data at {}", pair[1].offset)));
            }
        }
        let mut names = HashSet::with_capacity(self.tensors.len());
        match self.tensors.iter().find(|t| !names.insert(t.name.as_str())) {
            Some(twice) => Err(fault(twice, "a unique name".into(), "a duplicate".into())),
            None => Ok(()),
        }
    }
}

/// Alignment that the key-values of the file at `path` ask for.
pub(super) fn alignment(metadata: &Metadata, path: &Path) -> Result<u64> {
    match metadata.u64(ALIGNMENT_KEY)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(a) if a.is_power_of_two() && a <= MAX_ALIGNMENT => Ok(a),
        Some(a) => Err(Error::Config {
            path: path.to_owned(),
            key: ALIGNMENT_KEY.to_owned(),
            expected: format!("a power of two up to {MAX_ALIGNMENT}"),
            got: a.to_string(),
        }),
    }
}

/// Reads little-endian fields, never past the file's end or the header bound.
struct Reader<'a, R> {
    source: R,
    path: &'a Path,
    length: u64,
    position: u64,
    /// Prefix of every message: which key or tensor is being read.
    context: String,
}

macro_rules! number_readers {
    ($($name:ident: $type:ty),*) => {$(
        fn $name(&mut self, what: &str) -> Result<$type> {
            Ok(<$type>::from_le_bytes(self.bytes(what)?))
        }
    )*};
}

impl<R: Read> Reader<'_, R> {
    number_readers!(u32: u32, u64: u64);

    fn malformed(&self, what: &str, expected: impl Display, got: impl Display) -> Error {
        let what = format!("{}{what}", self.context);
        let what = what.trim_end_matches([':', ' ']).to_owned();
        let (expected, got) = (expected.to_string(), got.to_string());
        Error::Malformed { path: self.path.to_owned(), what, expected, got }
    }

    /// Bytes that the header may still take.
    fn remaining(&self) -> u64 {
        self.length.min(MAX_HEADER_BYTES).saturating_sub(self.position)
    }

    /// Fails unless `len` more bytes may be read.
    fn ensure(&self, what: &str, len: Option<u64>) -> Result<usize> {
        let remaining = self.remaining();
        let fits = len.filter(|&len| len <= remaining).and_then(|len| usize::try_from(len).ok());
        fits.ok_or_else(|| {
            let wanted = len.map_or("more than 2^64".to_owned(), |n| n.to_string());
            let bound = if self.length <= MAX_HEADER_BYTES { "the file" } else { "the largest header" };
            let got = format!("{remaining} left of {bound} at offset {}", self.position);
            self.malformed(what, format!("{wanted} bytes"), got)
        })
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.source.read_exact(out).map_err(|source| Error::Read {
            path: self.path.to_owned(),
            offset: self.position,
            wanted: out.len() as u64,
            got: 0,
            source,
        })?;
        self.position += out.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        self.ensure(what, Some(N as u64))?;
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    /// A u64 number of things that take at least `each` bytes.
    fn count(&mut self, what: &str, each: u64) -> Result<usize> {
        let count = self.u64(what)?;
        let room = self.remaining() / each;
        if count > room {
            return Err(self.malformed(what, format!("at most {room}, by the file's length"), count as i64));
        }
        usize::try_from(count).map_err(|_| self.malformed(what, "a count that fits in memory", count))
    }

    fn string_bytes(&mut self, what: &str, max: u64) -> Result<Vec<u8>> {
        let len = self.u64(what)?;
        if len > max {
            return Err(self.malformed(what, format!("at most {max} bytes"), len as i64));
        }
        let len = self.ensure(what, Some(len))?;
        let mut out = vec![0; len];
        self.fill(&mut out)?;
        Ok(out)
    }

    /// A key or tensor name, which must be UTF-8.
    fn name(&mut self, what: &str) -> Result<String> {
        let bytes = self.string_bytes(what, MAX_NAME_BYTES)?;
        String::from_utf8(bytes).map_err(|e| {
            self.malformed(what, "UTF-8", format!("{:?}", e.as_bytes().escape_ascii().to_string()))
        })
    }

    /// A string value. Vocabularies hold byte fragments, so invalid UTF-8 is replaced, not refused.
    fn string(&mut self) -> Result<String> {
        let bytes = self.string_bytes("string", u64::MAX)?;
        Ok(String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
    }

    fn flag(&self, byte: u8) -> Result<bool> {
        match byte {
            0 | 1 => Ok(byte == 1),
            other => Err(self.malformed("boolean", "0 or 1", other)),
        }
    }

    fn value(&mut self, value_type: u32) -> Result<Value> {
        Ok(match value_type {
            value_type::U8 => Value::U8(u8::from_le_bytes(self.bytes("value")?)),
            value_type::I8 => Value::I8(i8::from_le_bytes(self.bytes("value")?)),
            value_type::U16 => Value::U16(u16::from_le_bytes(self.bytes("value")?)),
            value_type::I16 => Value::I16(i16::from_le_bytes(self.bytes("value")?)),
            value_type::U32 => Value::U32(self.u32("value")?),
            value_type::I32 => Value::I32(i32::from_le_bytes(self.bytes("value")?)),
            value_type::F32 => Value::F32(f32::from_le_bytes(self.bytes("value")?)),
            value_type::BOOL => {
                let [byte] = self.bytes("value")?;
                Value::Bool(self.flag(byte)?)
            }
            value_type::STRING => Value::String(self.string()?),
            value_type::ARRAY => Value::Array(self.array(1)?),
            value_type::U64 => Value::U64(self.u64("value")?),
            value_type::I64 => Value::I64(i64::from_le_bytes(self.bytes("value")?)),
            value_type::F64 => Value::F64(f64::from_le_bytes(self.bytes("value")?)),
            other => return Err(self.malformed("value type", "a number up to 12", other)),
        })
    }

    /// Elements of `N` bytes each.
    fn elements<T, const N: usize>(&mut self, convert: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let count = self.count("array length", N as u64)?;
        let mut out = Vec::with_capacity(count.min(MAX_RESERVED));
        let mut chunk = [0u8; 8192];
        while out.len() < count {
            let bytes = &mut chunk[..((count - out.len()) * N).min(8192)];
            self.fill(bytes)?;
            out.extend(bytes.as_chunks::<N>().0.iter().map(|&element| convert(element)));
        }
        Ok(out)
    }

    fn array(&mut self, depth: usize) -> Result<Array> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(self.malformed("array", format!("nesting up to {MAX_ARRAY_DEPTH} deep"), "deeper"));
        }
        Ok(match self.u32("array element type")? {
            value_type::U8 => Array::U8(self.elements(u8::from_le_bytes)?),
            value_type::I8 => Array::I8(self.elements(i8::from_le_bytes)?),
            value_type::U16 => Array::U16(self.elements(u16::from_le_bytes)?),
            value_type::I16 => Array::I16(self.elements(i16::from_le_bytes)?),
            value_type::U32 => Array::U32(self.elements(u32::from_le_bytes)?),
            value_type::I32 => Array::I32(self.elements(i32::from_le_bytes)?),
            value_type::F32 => Array::F32(self.elements(f32::from_le_bytes)?),
            value_type::BOOL => {
                let bytes = self.elements(u8::from_le_bytes)?;
                Array::Bool(bytes.into_iter().map(|b| self.flag(b)).collect::<Result<_>>()?)
            }
            value_type::STRING => {
                let count = self.count("array length", 8)?;
                let mut strings = Vec::with_capacity(count.min(MAX_RESERVED));
                for _ in 0..count {
                    strings.push(self.string()?);
                }
                Array::String(strings)
            }
            value_type::ARRAY => {
                let count = self.count("array length", 4 + 8)?;
                let mut arrays = Vec::with_capacity(count.min(MAX_RESERVED));
                for _ in 0..count {
                    arrays.push(self.array(depth + 1)?);
                }
                Array::Array(arrays)
            }
            value_type::U64 => Array::U64(self.elements(u64::from_le_bytes)?),
            value_type::I64 => Array::I64(self.elements(i64::from_le_bytes)?),
            value_type::F64 => Array::F64(self.elements(f64::from_le_bytes)?),
            other => return Err(self.malformed("array element type", "a number up to 12", other)),
        })
    }

    /// One directory entry, its offset still relative to the data section.
    fn tensor_info(&mut self) -> Result<TensorInfo> {
        let name = self.name("name")?;
        self.context = format!("tensor {name:?}: ");
        let dims = self.u32("number of dimensions")?;
        if dims > MAX_DIMS {
            return Err(self.malformed("number of dimensions", format!("at most {MAX_DIMS}"), dims));
        }
        let mut shape = Vec::with_capacity(dims as usize);
        let mut elements = Some(1u64);
        for _ in 0..dims {
            let dim = self.u64("dimension")?;
            elements = elements.and_then(|n| n.checked_mul(dim));
            match usize::try_from(dim) {
                Ok(dim) if dim > 0 && i64::try_from(dim).is_ok() => shape.push(dim),
                _ => return Err(self.malformed("dimension", "a positive number", dim as i64)),
            }
        }
        let ne = format!("{shape:?}");
        shape.reverse();
        let Some(elements) = elements.filter(|&n| i64::try_from(n).is_ok()) else {
            return Err(self.malformed("dimensions", "fewer than 2^63 elements", ne));
        };
        let ggml_type = self.u32("type")?;
        let len = match types::by_id(ggml_type) {
            None => None,
            Some(ggml) => {
                let cols = shape.last().map_or(1, |&c| c as u64);
                if !cols.is_multiple_of(ggml.block_len) {
                    let expected = format!("a multiple of {} columns for {}", ggml.block_len, ggml.name);
                    return Err(self.malformed("dimensions", expected, ne));
                }
                let bytes = (elements / ggml.block_len).checked_mul(ggml.block_bytes);
                let Some(bytes) = bytes else {
                    return Err(self.malformed("dimensions", "a size below 2^64 bytes", ne));
                };
                Some(bytes)
            }
        };
        let offset = self.u64("offset")?;
        Ok(TensorInfo { name, ggml_type, shape, offset, len })
    }
}
