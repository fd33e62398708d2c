//! [`Listing`]: the files of a repository at one commit, and which of them make up a model.

use std::collections::BTreeMap;
use std::path::Path;

use super::id::HubId;
use crate::error::size;
use crate::models::vision::projector::{self, is_projector};
use crate::{Error, Result};

/// Files of a safetensors model besides its weights, as far as a repository has them.
const COMPANIONS: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "tokenization_kimi.py",
    "hf_quant_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];
const INDEX: &str = "model.safetensors.index.json";

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Within the repository, with `/` between folders.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 of a large file, git's blob id of a small one, in hexadecimal.
    pub checksum: String,
}

/// Files at one commit.
#[derive(Debug)]
pub struct Listing {
    /// The commit.
    pub commit: String,
    files: Vec<RemoteFile>,
}

/// The files that make up a model.
#[derive(Debug)]
pub struct Selection {
    /// What is needed.
    pub files: Vec<RemoteFile>,
    /// What reads pictures with a GGUF file, if the repository has that.
    pub projector: Option<RemoteFile>,
    /// What is opened, within the snapshot: a GGUF file, or nothing for the snapshot itself.
    pub opens: String,
}

impl Listing {
    /// Files of a repository at a commit.
    pub fn new(commit: String, files: Vec<RemoteFile>) -> Self {
        Self { commit, files }
    }

    /// What is in the snapshot folder of `commit`; without checksums, and without links that lead nowhere.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be read.
    pub fn of_folder(commit: &str, folder: &Path) -> Result<Self> {
        let mut files = vec![];
        let mut folders = vec![String::new()];
        while let Some(inner) = folders.pop() {
            let path = folder.join(&inner);
            let cannot = |source| Error::Io { action: "read", path: path.clone(), source };
            for entry in std::fs::read_dir(&path).map_err(cannot)? {
                let entry = entry.map_err(cannot)?;
                let (Ok(found), Ok(name)) =
                    (std::fs::metadata(entry.path()), entry.file_name().into_string())
                else {
                    continue;
                };
                let path = if inner.is_empty() { name } else { format!("{inner}/{name}") };
                if found.is_dir() {
                    folders.push(path)
                } else {
                    files.push(RemoteFile { path, size: found.len(), checksum: String::new() })
                }
            }
        }
        Ok(Self { commit: commit.to_owned(), files })
    }

    /// The files that `id` asks for.
    ///
    /// # Errors
    /// [`Error::Hub`] if the repository has no such model, or several.
    pub fn select(&self, id: &HubId) -> Result<Selection> {
        let sets = self.gguf_sets();
        let has_safetensors = self.files.iter().any(is_weights);
        let choices = || {
            let lines = sets.iter().map(|(name, files)| {
                format!("\n  {}:{name}  {}", id.repo, size(files.iter().map(|file| file.size).sum()))
            });
            lines.collect::<String>()
        };
        let chosen: Vec<_> = match &id.choice {
            Some(choice) => match sets.get(choice.as_str()) {
                Some(set) => vec![set],
                None => sets.iter().filter(|(name, _)| matches(name, choice)).map(|(_, set)| set).collect(),
            },
            None if has_safetensors => return Ok(self.safetensors()),
            None => sets.values().collect(),
        };
        let refuse = |model: String, reason: String| Err(Error::Hub { model, reason });
        match (chosen.as_slice(), &id.choice) {
            ([], None) => refuse(id.to_string(), "has neither GGUF nor safetensors files".into()),
            ([], Some(choice)) => refuse(id.repo.clone(), format!("has no {choice}; it has:{}", choices())),
            ([set], _) => {
                let files: Vec<RemoteFile> = set.iter().map(|file| (*file).clone()).collect();
                Ok(Selection { opens: files[0].path.clone(), files, projector: self.projector() })
            }
            _ => refuse(id.to_string(), format!("has several models; name one:{}", choices())),
        }
    }

    /// Everything that can be opened: GGUF models by name, and the folder if it has safetensors.
    pub fn models(&self) -> Vec<(Option<String>, Selection)> {
        let of_set = |(name, set): (String, Vec<&RemoteFile>)| {
            let files: Vec<RemoteFile> = set.into_iter().cloned().collect();
            (Some(name), Selection { opens: files[0].path.clone(), files, projector: self.projector() })
        };
        let mut models: Vec<_> = self.gguf_sets().into_iter().map(of_set).collect();
        if self.files.iter().any(is_weights) {
            models.push((None, self.safetensors()));
        }
        models
    }

    /// Models in GGUF files by name, the parts of each in order.
    fn gguf_sets(&self) -> BTreeMap<String, Vec<&RemoteFile>> {
        let mut sets: BTreeMap<String, Vec<&RemoteFile>> = BTreeMap::new();
        for file in &self.files {
            let Some(stem) = file.path.strip_suffix(".gguf") else { continue };
            // Projectors of images and calibration data are no models.
            let lower = stem.to_lowercase();
            if !is_projector(&file.path) && !lower.contains("imatrix") {
                let name = part(stem).map_or(file.path.clone(), |(name, _)| format!("{name}.gguf"));
                sets.entry(name).or_default().push(file);
            }
        }
        sets.values_mut().for_each(|files| files.sort_by(|a, b| a.path.cmp(&b.path)));
        sets
    }

    /// The projector at the top of the repository.
    fn projector(&self) -> Option<RemoteFile> {
        let names = self.files.iter().map(|file| file.path.as_str());
        let name = projector::preferred(names.filter(|path| !path.contains('/') && is_projector(path)))?;
        self.files.iter().find(|file| file.path == name).cloned()
    }

    fn safetensors(&self) -> Selection {
        let wanted = |file: &&RemoteFile| is_weights(file) || COMPANIONS.contains(&file.path.as_str());
        let files = self.files.iter().filter(wanted).cloned().collect();
        Selection { files, projector: None, opens: String::new() }
    }
}

impl Selection {
    /// Whether all that belongs together is in `folder`, the snapshot that it was selected from.
    pub fn is_complete(&self, folder: &Path) -> bool {
        let has = |path: &str| self.files.iter().any(|file| file.path == path);
        if let Some(stem) = self.opens.strip_suffix(".gguf") {
            return part(stem).is_none_or(|(_, count)| self.files.len() == count);
        }
        let parts = || -> Option<Vec<String>> {
            let index: serde_json::Value =
                serde_json::from_slice(&std::fs::read(folder.join(INDEX)).ok()?).ok()?;
            let files = index.get("weight_map")?.as_object()?.values();
            files.map(|file| file.as_str().map(str::to_owned)).collect()
        };
        has("config.json") && (!has(INDEX) || parts().is_some_and(|parts| parts.iter().all(|file| has(file))))
    }
}

fn is_weights(file: &RemoteFile) -> bool {
    file.path.ends_with(".safetensors") && !file.path.contains('/')
}

/// Name and number of parts of one of several files, `name-00001-of-00003`.
fn part(stem: &str) -> Option<(&str, usize)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.chars().all(|c| c.is_ascii_digit());
    (digits(number) && digits(count)).then(|| count.parse().ok().map(|count| (name, count)))?
}

/// Whether `choice` stands between separators in `name`: `Q4_K_M` in `model-Q4_K_M.gguf`, not in `model-IQ4_K_M.gguf`.
fn matches(name: &str, choice: &str) -> bool {
    let (name, choice) = (name.to_lowercase(), choice.to_lowercase());
    let edge = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.' | '/'));
    name.match_indices(&choice)
        .any(|(at, _)| edge(name[..at].chars().next_back()) && edge(name[at + choice.len()..].chars().next()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(files: &[&str], id: &str) -> Result<Vec<String>, String> {
        let file =
            |path: &&str| RemoteFile { path: (*path).to_owned(), size: 1 << 30, checksum: "0".repeat(40) };
        let listing = Listing { commit: "0".repeat(40), files: files.iter().map(file).collect() };
        let selected = listing.select(&HubId::parse(id).unwrap()).map_err(|error| error.to_string())?;
        Ok(selected.files.into_iter().map(|file| file.path).collect())
    }

    #[test]
    fn what_belongs_together_is_selected() {
        let check = |files: &[&str], id: &str, expected: &[&str]| {
            assert_eq!(select(files, id).unwrap(), expected, "{id}");
        };
        check(&["x.gguf", "README.md", "mmproj-F16.gguf"], "a/b", &["x.gguf"]);
        check(&["m-Q8_0.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf"], "a/b:q4_k_m", &["m-Q4_K_M.gguf"]);
        let split = ["BF16/m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf", "m-Q8_0.gguf"];
        check(&split, "a/b:BF16", &[split[1], split[0]]);
        check(&split, "a/b:m-Q8_0.gguf", &["m-Q8_0.gguf"]);
        let folder = ["config.json", "m-1.safetensors", "m-2.safetensors", "x/y.safetensors", "a.png"];
        check(&folder, "a/b", &folder[..3]);
    }

    #[test]
    fn a_projector_comes_with_gguf_files() {
        let check = |files: &[&str], expected: Option<&str>| {
            let file =
                |path: &&str| RemoteFile { path: (*path).to_owned(), size: 1, checksum: "0".repeat(40) };
            let listing = Listing { commit: "0".repeat(40), files: files.iter().map(file).collect() };
            let selected = listing.select(&HubId::parse("a/b").unwrap()).unwrap();
            assert_eq!(selected.projector.map(|file| file.path).as_deref(), expected, "{files:?}");
        };
        check(
            &["m.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"],
            Some("mmproj-BF16.gguf"),
        );
        check(&["m.gguf", "m.mmproj-Q8_0.gguf", "other/mmproj-BF16.gguf"], Some("m.mmproj-Q8_0.gguf"));
        check(&["m.gguf", "m-imatrix.gguf"], None);
        check(&["config.json", "m.safetensors", "mmproj-F16.gguf"], None);
    }

    #[test]
    fn choices_are_listed() {
        let check = |files: &[&str], id: &str, expected: &[&str]| {
            let message = select(files, id).unwrap_err();
            assert!(expected.iter().all(|part| message.contains(part)), "{message}");
        };
        let both = ["m-Q8_0.gguf", "m-Q4_K_M.gguf"];
        check(&both, "a/b", &["has several models", "\n  a/b:m-Q4_K_M.gguf  1.0 GiB", "m-Q8_0.gguf"]);
        check(&both, "a/b:Q2_K", &["has no Q2_K", "m-Q8_0.gguf"]);
        check(&["README.md"], "a/b", &["neither"]);
    }
}
