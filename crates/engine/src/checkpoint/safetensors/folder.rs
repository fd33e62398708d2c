//! A model folder: `config.json` and `model.safetensors`, or the shards of `model.safetensors.index.json`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::BufReader,
    path::{Component, Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

use super::header::Header;
use crate::{
    Error, Result,
    checkpoint::{io_error, json, weight::TensorEntry},
    io::file::CheckpointFile,
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
/// Maximum bytes of a JSON file beside the weights. Indices of the largest models have about a tenth.
const MAX_JSON_BYTES: u64 = 100_000_000;

/// A whole model: its files, configuration and tensors.
pub(crate) struct Folder {
    pub(crate) files: Vec<CheckpointFile>,
    pub(crate) config: Value,
    pub(crate) entries: Vec<TensorEntry>,
    /// `__metadata__` of the first file.
    pub(crate) metadata: BTreeMap<String, String>,
}

/// Whether `folder` holds a model under one of the usual names.
pub(crate) fn has_model(folder: &Path) -> bool {
    folder.join(SINGLE).exists() || folder.join(INDEX).exists()
}

/// Whether `folder` holds safetensors files of any name.
pub(crate) fn has_files(folder: &Path) -> Result<bool> {
    Ok(!safetensors_files(folder)?.is_empty())
}

/// Opens the model in `folder`.
pub(crate) fn open(folder: &Path) -> Result<Folder> {
    let config = read_json(&folder.join(CONFIG))?;
    let index_path = folder.join(INDEX);
    let single = folder.join(SINGLE);
    let (mut files, mut entries, mut metadata) = (Vec::new(), Vec::new(), None);
    if single.exists() || !index_path.exists() {
        let path = if single.exists() { single } else { only_file(folder)? };
        let (file, header) = open_file(&path)?;
        metadata = Some(header.metadata.clone());
        entries.extend(header.entries(0));
        files.push(file);
    } else {
        let index: Index = read_json(&index_path)?;
        let shards: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
        for shard in shards {
            let (file, header) = open_file(&shard_path(folder, &index_path, shard)?)?;
            metadata.get_or_insert_with(|| header.metadata.clone());
            // The index decides: what it does not place in this file is no part of the model.
            let placed_here = |e: &TensorEntry| index.weight_map.get(&e.name).is_some_and(|s| s == shard);
            entries.extend(header.entries(files.len()).filter(placed_here));
            files.push(file);
        }
        let found: BTreeSet<&str> = entries.iter().map(|e| e.name.as_str()).collect();
        if let Some((name, shard)) = index.weight_map.iter().find(|(name, _)| !found.contains(name.as_str()))
        {
            return Err(Error::MissingTensor { path: folder.join(shard), tensor: name.clone() });
        }
    }
    Ok(Folder { files, config, entries, metadata: metadata.unwrap_or_default() })
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// Reads and parses a JSON file of bounded size.
pub(crate) fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let malformed = |expected: &str, got: String| Error::Malformed {
        path: path.to_owned(),
        what: "JSON".into(),
        expected: expected.to_owned(),
        got,
    };
    let file = CheckpointFile::open(path)?;
    if file.length() > MAX_JSON_BYTES {
        return Err(malformed("at most 100 MB", format!("{} bytes", file.length())));
    }
    let mut bytes = vec![0; file.length() as usize];
    file.read_exact_at(0, &mut bytes)?;
    json::from_slice(&bytes).map_err(|e| malformed("a valid document", e.to_string()))
}

/// Path of the shard that an index calls `name`: a plain name, because indices come from strangers and must
/// not lead out of the folder.
fn shard_path(folder: &Path, index: &Path, name: &str) -> Result<PathBuf> {
    let mut components = Path::new(name).components();
    let plain = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    if !plain || name.contains(['/', '\\', '\0']) {
        return Err(Error::Malformed {
            path: index.to_owned(),
            what: "weight_map".into(),
            expected: "names of files in the same folder".into(),
            got: format!("{name:?}"),
        });
    }
    Ok(folder.join(name))
}

fn safetensors_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for item in std::fs::read_dir(folder).map_err(io_error("list", folder))? {
        let path = item.map_err(io_error("list", folder))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The only safetensors file of a folder without an index.
fn only_file(folder: &Path) -> Result<PathBuf> {
    let mut files = safetensors_files(folder)?;
    match (files.pop(), files.len()) {
        (Some(file), 0) => Ok(file),
        (last, rest) => Err(Error::Malformed {
            path: folder.to_owned(),
            what: "safetensors files".into(),
            expected: format!("{SINGLE}, one file, or shards with {INDEX}"),
            got: format!("{} files and no index", rest + usize::from(last.is_some())),
        }),
    }
}

pub(crate) fn open_file(path: &Path) -> Result<(CheckpointFile, Header)> {
    let file = CheckpointFile::open(path)?;
    let header = Header::read(BufReader::new(file.reader()), file.length(), path)?;
    Ok((file, header))
}
