//! Checkpoint files taken apart, to be put together again otherwise.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moeflux::checkpoint::gguf::{self, Metadata};
use moeflux::checkpoint::safetensors::{self, ElementType};
use moeflux::checkpoint::{Checkpoint, Encoding};

use crate::support::{Copied, replace};

/// A file's tensors and what else its header says.
pub(crate) struct Parts {
    pub(crate) path: PathBuf,
    pub(crate) metadata: Vec<(String, gguf::Value)>,
    pub(crate) tensors: Vec<Part>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Gguf,
    Safetensors,
}

/// A tensor with its bytes.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) encoding: Encoding,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
    /// Whether it is of a safetensors file.
    pub(crate) safetensors: bool,
}

/// Places of the tensors to be tried: of those whose names differ in numbers only, as layers and experts do, the first or the
/// last one, in turns; of experts up to the second.
pub(crate) fn sampled(tensors: &[Part]) -> Vec<usize> {
    let expert = |name: &str| name.split_once(".experts.")?.1.split('.').next()?.parse::<usize>().ok();
    let mut found: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (i, part) in tensors.iter().enumerate().filter(|(_, part)| expert(&part.name).is_none_or(|n| n < 2)) {
        let role = part.name.replace(|c: char| c.is_ascii_digit(), "");
        found.entry(role).or_insert((i, i)).1 = i;
    }
    found.values().enumerate().map(|(n, (first, last))| if n % 2 == 0 { *first } else { *last }).collect()
}

/// The weight files of a folder.
pub(crate) fn files(copy: &Copied) -> Vec<Parts> {
    let checkpoint = Checkpoint::open(copy.path()).expect("an undamaged checkpoint");
    let mut files: Vec<Parts> = checkpoint.files().iter().map(|f| Parts::read(f.path())).collect();
    for entry in checkpoint.entries() {
        let mut data = vec![0; entry.range.len as usize];
        checkpoint.read(&entry.range, &mut data).expect("undamaged data");
        let (name, encoding, shape) = (entry.name.clone(), entry.encoding.clone(), entry.shape.clone());
        let file = &mut files[entry.range.file];
        let safetensors = file.kind == Kind::Safetensors;
        file.tensors.push(Part { name, encoding, shape, data, safetensors });
    }
    files
}

impl Parts {
    /// Everything but the tensors.
    fn read(path: &Path) -> Self {
        let mut parts =
            Self { path: path.into(), metadata: vec![], tensors: vec![], kind: Kind::Safetensors };
        if path.extension().is_some_and(|e| e == "gguf") {
            parts.kind = Kind::Gguf;
            let bytes = std::fs::read(path).expect("a file");
            let header = gguf::Header::read(&bytes[..], bytes.len() as u64, path).expect("a header");
            parts.metadata = header.metadata.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
        }
        parts
    }

    /// Writes the file anew.
    pub(crate) fn write(&self) {
        self.write_with(&self.metadata);
    }

    /// Writes the file anew, with this GGUF metadata.
    pub(crate) fn write_with(&self, key_values: &[(String, gguf::Value)]) {
        let data = self.tensors.iter().map(|t| &t.data);
        let bytes = match self.kind {
            Kind::Gguf => {
                let mut metadata = Metadata::new(&self.path);
                key_values.iter().for_each(|(k, v)| drop(metadata.insert(k.clone(), v.clone())));
                let spec = |t: &Part| gguf::TensorSpec {
                    name: t.name.clone(),
                    encoding: t.encoding.clone(),
                    shape: t.shape.clone(),
                };
                let specs: Vec<_> = self.tensors.iter().map(spec).collect();
                let mut writer = gguf::Writer::new(vec![], &self.path, &metadata, &specs).expect("a header");
                data.for_each(|data| writer.append(data).expect("data of this length"));
                writer.finish().expect("complete data")
            }
            Kind::Safetensors => {
                let spec = |t: &Part| {
                    let name = match &t.encoding {
                        Encoding::Weight(dtype) => dtype.to_string(),
                        Encoding::Other(name) => name.clone(),
                    };
                    let dtype: ElementType = serde_json::from_value(name.into()).expect("an element type");
                    safetensors::TensorSpec { name: t.name.clone(), dtype, shape: t.shape.clone() }
                };
                let specs: Vec<_> = self.tensors.iter().map(spec).collect();
                let mut writer = safetensors::Writer::new(vec![], &self.path, &[], &specs).expect("a header");
                data.for_each(|data| writer.append(data).expect("data of this length"));
                writer.finish().expect("complete data")
            }
        };
        replace(&self.path, bytes);
    }
}

impl Part {
    /// Another shape, with as many bytes as it takes.
    pub(crate) fn reshape(&mut self, shape: Vec<usize>) {
        let elements = |shape: &[usize]| shape.iter().product::<usize>();
        let bytes = self.data.len() * elements(&shape) / elements(&self.shape);
        self.data.resize(bytes, 0);
        self.shape = shape;
    }
}
