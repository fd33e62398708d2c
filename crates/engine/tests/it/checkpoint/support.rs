//! Raw files built field by field, so that any field can be wrong.

use std::path::{Path, PathBuf};

use moeflux::{Error, checkpoint::Checkpoint};

/// The error that `result` must be, which must name `file` and contain `expected`.
#[track_caller]
pub(crate) fn check_error<T>(case: &str, result: Result<T, Error>, file: &str, expected: &str) {
    match result {
        Ok(_) => panic!("{case}: accepted; expected an error with {expected:?}"),
        Err(e) => {
            let message = e.to_string();
            assert!(message.contains(expected), "{case}: {message:?} lacks {expected:?}");
            assert!(message.contains(file), "{case}: {message:?} does not name {file}");
        }
    }
}

/// A folder of the given files, removed with the value.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).expect("write a test file");
        }
        Self(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Opens the file `name` in it, or the folder itself if that is empty.
    pub(crate) fn open(&self, name: &str) -> Result<Checkpoint, Error> {
        Checkpoint::open(&if name.is_empty() { self.path().to_owned() } else { self.file(name) })
    }
}

/// A GGUF file by fields. Counts and ranks are those of the lists unless set.
#[derive(Clone)]
pub(crate) struct RawGguf {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) value_count: Option<u64>,
    /// Key, value type and encoded value.
    pub(crate) values: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub(crate) tensors: Vec<RawTensor>,
    /// Bytes after the padded header.
    pub(crate) data: usize,
}

#[derive(Clone)]
pub(crate) struct RawTensor {
    pub(crate) name: Vec<u8>,
    pub(crate) rank: Option<u32>,
    pub(crate) ne: Vec<u64>,
    pub(crate) ggml_type: u32,
    pub(crate) offset: u64,
}

pub(crate) fn raw_tensor(name: &str, ne: &[u64], ggml_type: u32, offset: u64) -> RawTensor {
    RawTensor { name: name.into(), rank: None, ne: ne.to_vec(), ggml_type, offset }
}

/// A string as GGUF stores it.
pub(crate) fn raw_string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

impl RawGguf {
    /// A valid file: two key-values, an F32 tensor of 4 × 3 at 0 and a Q8_0 one of 64 × 2 at 64.
    pub(crate) fn valid() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            value_count: None,
            values: vec![
                (b"general.architecture".to_vec(), 8, raw_string(b"qwen3moe")),
                (b"count".to_vec(), 4, 7u32.to_le_bytes().to_vec()),
            ],
            tensors: vec![raw_tensor("a", &[4, 3], 0, 0), raw_tensor("b", &[64, 2], 8, 64)],
            data: 64 + 136,
        }
    }

    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn value(self, key: &str, value_type: u32, value: &[u8]) -> Self {
        self.with(|raw| raw.values.push((key.into(), value_type, value.to_vec())))
    }

    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.value_count.unwrap_or(self.values.len() as u64).to_le_bytes());
        for (key, value_type, value) in &self.values {
            out.extend(raw_string(key));
            out.extend(value_type.to_le_bytes());
            out.extend(value);
        }
        for tensor in &self.tensors {
            out.extend(raw_string(&tensor.name));
            out.extend(tensor.rank.unwrap_or(tensor.ne.len() as u32).to_le_bytes());
            tensor.ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.ggml_type.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(32) + self.data, 0x5a);
        out
    }
}

/// A safetensors file with this JSON and `data` bytes behind it.
pub(crate) fn raw_safetensors(json: &str, data: usize) -> Vec<u8> {
    let mut out = raw_string(json.as_bytes());
    out.resize(out.len() + data, 0x5a);
    out
}
