//! A GGUF model in one file or in shards `PREFIX-00001-of-0000N.gguf`, found from any one of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::BufReader,
    path::{Path, PathBuf},
};

use super::{header::Header, metadata::Metadata};
use crate::{
    Error, Result,
    checkpoint::{io_error, weight::TensorEntry},
    io::file::CheckpointFile,
    models::vision::projector::is_projector,
};

const SPLIT_COUNT: &str = "split.count";
const SPLIT_NO: &str = "split.no";
const SPLIT_TENSORS: &str = "split.tensors.count";
const MAX_SHARDS: u64 = 99_999;
/// Bytes read ahead while parsing a header.
const READ_BUFFER: usize = 1 << 18;

/// A whole model: its files, key-values of the first, tensors of all.
pub(crate) struct GgufFiles {
    pub(crate) files: Vec<CheckpointFile>,
    pub(crate) metadata: Metadata,
    pub(crate) entries: Vec<TensorEntry>,
}

/// Opens the model that `path`, its only file or any of its shards, belongs to.
pub(crate) fn open(path: &Path) -> Result<GgufFiles> {
    let (file, header) = open_file(path)?;
    let count = header.metadata.u64(SPLIT_COUNT)?.unwrap_or(1);
    if count <= 1 {
        let metadata = header.metadata.clone();
        return Ok(GgufFiles { files: vec![file], metadata, entries: header.entries(0).collect() });
    }
    let malformed = |path: &Path, what: &str, expected: String, got: String| Error::Malformed {
        path: path.to_owned(),
        what: what.to_owned(),
        expected,
        got,
    };
    let name = ShardName::parse(path).filter(|name| name.count == count && count <= MAX_SHARDS);
    let Some(name) = name else {
        let expected = format!("PREFIX-0000n-of-{count:05}.gguf for a model of {count} shards");
        return Err(malformed(path, "file name", expected, path.display().to_string()));
    };

    let mut opened = Some((file, header));
    let (mut files, mut entries, mut metadata) = (Vec::new(), Vec::new(), Metadata::default());
    let mut declared = None;
    for no in 0..count {
        let shard = if no + 1 == name.number { opened.take() } else { None };
        let (file, header) = match shard {
            Some(shard) => shard,
            None => open_file(&name.sibling(path, no + 1))?,
        };
        for (key, expected) in [(SPLIT_COUNT, count), (SPLIT_NO, no)] {
            let got = header.metadata.u64(key)?;
            if got != Some(expected) {
                let got = got.map_or("none".to_owned(), |n| n.to_string());
                return Err(malformed(file.path(), key, expected.to_string(), got));
            }
        }
        declared = declared.or(header.metadata.u64(SPLIT_TENSORS)?);
        if no == 0 {
            metadata = header.metadata.clone();
        }
        entries.extend(header.entries(files.len()));
        files.push(file);
    }
    if let Some(expected) = declared.filter(|&n| n != entries.len() as u64) {
        return Err(malformed(
            files[0].path(),
            SPLIT_TENSORS,
            expected.to_string(),
            entries.len().to_string(),
        ));
    }
    Ok(GgufFiles { files, metadata, entries })
}

/// The model in a file that is its only one.
pub(crate) fn of_file(file: CheckpointFile) -> Result<GgufFiles> {
    let header = header_of(&file)?;
    let metadata = header.metadata.clone();
    Ok(GgufFiles { files: vec![file], metadata, entries: header.entries(0).collect() })
}

/// One file of every GGUF model in the folder, leaving out projectors of pictures.
pub(crate) fn models_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut single = BTreeSet::new();
    let mut split = BTreeMap::new();
    for item in std::fs::read_dir(folder).map_err(io_error("list", folder))? {
        let path = item.map_err(io_error("list", folder))?.path();
        let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        let name = path.file_name().unwrap_or_default();
        if !is_gguf || is_projector(&name.to_string_lossy()) {
            continue;
        }
        match ShardName::parse(&path) {
            None => _ = single.insert(path),
            Some(name) => {
                let first: &mut PathBuf = split.entry((name.prefix, name.count)).or_insert(path.clone());
                if path < *first {
                    *first = path;
                }
            }
        }
    }
    Ok(single.into_iter().chain(split.into_values()).collect())
}

fn open_file(path: &Path) -> Result<(CheckpointFile, Header)> {
    let file = CheckpointFile::open(path)?;
    let header = header_of(&file)?;
    Ok((file, header))
}

fn header_of(file: &CheckpointFile) -> Result<Header> {
    let reader = BufReader::with_capacity(READ_BUFFER, file.reader());
    Header::read(reader, file.length(), file.path())
}

/// `PREFIX-NNNNN-of-NNNNN.gguf`, numbered from 1.
#[derive(Debug, PartialEq, Eq)]
struct ShardName {
    prefix: String,
    number: u64,
    count: u64,
}

impl ShardName {
    fn parse(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let all_digits = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
            all_digits.then(|| digits.parse().ok()).flatten()
        };
        Some(Self { prefix: prefix.to_owned(), number: parse(number)?, count: parse(count)? })
    }

    /// Path of shard `number` beside `path`.
    fn sibling(&self, path: &Path, number: u64) -> PathBuf {
        path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names() {
        let check = |name: &str, expected: Option<(&str, u64, u64)>| {
            let expected = expected.map(|(prefix, number, count)| ShardName {
                prefix: prefix.to_owned(),
                number,
                count,
            });
            assert_eq!(ShardName::parse(Path::new(name)), expected, "{name}");
        };
        check("dir/m-Q4_K_M-00002-of-00012.gguf", Some(("m-Q4_K_M", 2, 12)));
        check("m-00002-of-00012-00001-of-00003.gguf", Some(("m-00002-of-00012", 1, 3)));
        check("m.gguf", None);
        check("m-2-of-3.gguf", None);
        check("m-00002-of-00012.safetensors", None);
        check("m-0000x-of-00012.gguf", None);
    }
}
