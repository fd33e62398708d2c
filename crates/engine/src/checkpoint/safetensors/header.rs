//! The header of one safetensors file: u64 length, then JSON `{name: {dtype, shape, data_offsets}}` and
//! optionally `__metadata__: {string: string}`; data offsets count from the end of the JSON.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    io::Read,
    path::Path,
};

use moeflux_compute::DType;
use safetensors::Dtype as ElementType;
use serde::{
    Deserialize,
    de::{Deserializer, Error as _, MapAccess, Visitor},
};

use crate::{
    Error, Result,
    checkpoint::weight::{ByteRange, Encoding, TensorEntry},
};

/// Bytes that the JSON may take: the bound that the format's own library sets.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Everything in a safetensors file but the tensor data.
#[derive(Debug, Clone)]
pub struct Header {
    /// The `__metadata__` entry.
    pub metadata: BTreeMap<String, String>,
    /// Tensors in the header's order.
    pub tensors: Vec<TensorInfo>,
}

/// A tensor of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Element type by its name in the file, possibly one that is not known here.
    pub dtype: String,
    /// Row-major shape, slowest dimension first.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Header {
    /// Reads the header from `source`, the first bytes of a file of `length` bytes at `path`.
    ///
    /// # Errors
    /// [`Error::Malformed`] or [`Error::Tensor`] naming what is wrong; [`Error::Read`] if `source` ends
    /// before `length`.
    pub fn read(mut source: impl Read, length: u64, path: &Path) -> Result<Self> {
        let malformed = |what: &str, expected: String, got: String| Error::Malformed {
            path: path.to_owned(),
            what: what.to_owned(),
            expected,
            got,
        };
        let mut read = |offset: u64, out: &mut [u8]| {
            let wanted = out.len() as u64;
            source.read_exact(out).map_err(|source| Error::Read {
                path: path.to_owned(),
                offset,
                wanted,
                got: 0,
                source,
            })
        };
        if length < 8 {
            return Err(malformed("safetensors header", "8 bytes".into(), format!("{length} bytes of file")));
        }
        let mut prefix = [0; 8];
        read(0, &mut prefix)?;
        let header_len = u64::from_le_bytes(prefix);
        let most = MAX_HEADER_BYTES.min(length - 8);
        let Some(json_len) = usize::try_from(header_len).ok().filter(|_| header_len <= most) else {
            let expected = format!("at most {most} bytes");
            return Err(malformed("safetensors header length", expected, header_len.to_string()));
        };
        let mut json = vec![0; json_len];
        read(8, &mut json)?;
        let raw: RawHeader = serde_json::from_slice(&json)
            .map_err(|e| malformed("safetensors header", "a JSON tensor directory".into(), e.to_string()))?;
        let data_offset = 8 + header_len;
        let mut tensors = Vec::with_capacity(raw.tensors.len());
        for (name, raw) in raw.tensors {
            tensors.push(place_tensor(name, raw, data_offset, length, path)?);
        }
        check_apart(&tensors, path)?;
        Ok(Self { metadata: raw.metadata, tensors })
    }

    /// The directory as entries of file number `file`.
    pub(crate) fn entries(self, file: usize) -> impl Iterator<Item = TensorEntry> {
        self.tensors.into_iter().map(move |t| {
            let encoding = match t.dtype.as_str() {
                "F32" => Encoding::Weight(DType::F32),
                "F16" => Encoding::Weight(DType::F16),
                "BF16" => Encoding::Weight(DType::BF16),
                _ => Encoding::Other(t.dtype),
            };
            let range = ByteRange { file, offset: t.offset, len: t.len, by_columns: None };
            TensorEntry { name: t.name, encoding, shape: t.shape, range }
        })
    }
}

/// Makes the offsets of a tensor absolute and checks them against the file and the shape.
fn place_tensor(
    name: String,
    raw: RawTensor,
    data_offset: u64,
    length: u64,
    path: &Path,
) -> Result<TensorInfo> {
    let [start, end] = raw.data_offsets;
    let fault = |expected: String, got: String| Error::Tensor {
        path: path.to_owned(),
        tensor: name.clone(),
        expected,
        got,
    };
    let data_len = length - data_offset;
    if start > end || end > data_len {
        let expected = format!("data offsets within the {data_len} bytes of data");
        return Err(fault(expected, format!("{start}..{end}")));
    }
    let elements = raw.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|&dim| usize::try_from(dim).ok()).collect();
    let (Some(elements), Some(shape)) = (elements, shape) else {
        return Err(fault("fewer than 2^64 elements".into(), format!("shape {:?}", raw.shape)));
    };
    // Bytes of an element type that is not known here cannot be checked; it cannot be used either.
    if let Some(bits) = element_bits(&raw.dtype) {
        let bytes = elements.checked_mul(bits).map(|bits| bits.div_ceil(8));
        if bytes != Some(end - start) {
            let bytes = bytes.map_or("more than 2^61".to_owned(), |n| n.to_string());
            let expected = format!("{bytes} bytes for {} of shape {shape:?}", raw.dtype);
            return Err(fault(expected, format!("{} bytes", end - start)));
        }
    }
    Ok(TensorInfo { name, dtype: raw.dtype, shape, offset: data_offset + start, len: end - start })
}

/// Checks that tensors do not overlap and are named once.
fn check_apart(tensors: &[TensorInfo], path: &Path) -> Result<()> {
    let fault = |tensor: &TensorInfo, expected: String, got: String| Error::Tensor {
        path: path.to_owned(),
        tensor: tensor.name.clone(),
        expected,
        got,
    };
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().filter(|t| t.len > 0).collect();
    by_offset.sort_unstable_by_key(|t| t.offset);
    for pair in by_offset.windows(2) {
        let end = pair[0].offset + pair[0].len;
        if pair[1].offset < end {
            let expected = format!("data after tensor {}, which ends at {end}", pair[0].name);
            return Err(fault(pair[1], expected, format!("data at {}", pair[1].offset)));
        }
    }
    let mut names = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|t| !names.insert(t.name.as_str())) {
        Some(twice) => Err(fault(twice, "a unique name".into(), "a duplicate".into())),
        None => Ok(()),
    }
}

/// Bits of one element, for the types that the format's own library knows.
fn element_bits(dtype: &str) -> Option<u64> {
    let name = serde_json::Value::String(dtype.to_owned());
    ElementType::deserialize(name).ok().map(|d| d.bitsize() as u64)
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The JSON object. Not a map type: those keep the last of two equal names and say nothing.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, RawTensor)>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let (mut metadata, mut tensors) = (None, Vec::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name != "__metadata__" {
                        tensors.push((name, map.next_value()?));
                    } else if metadata.replace(map.next_value()?).is_some() {
                        return Err(A::Error::duplicate_field("__metadata__"));
                    }
                }
                Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
