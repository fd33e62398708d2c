//! Adapters: LoRA as PEFT saves it, in folders of `adapter_config.json` and `adapter_model.safetensors`.
//!
//! An adapter's matrices are resident weights of the graph beside the model's own, which stay as they are in the file; experts
//! are streamed as without. What an adapter adds is computed beside the product that it is for
//! ([`moeflux_compute::graph::LowRank`]), for the rows of sequences that have it. Modules are found by their names in Hugging
//! Face's model, which families use for every format, so that one folder fits GGUF and MLX files of the model too.
//!
//! What is not understood is refused by name: an adapter that is applied in part would be another adapter.

mod attach;
mod config;
mod file;
mod weights;

use std::path::PathBuf;

use moeflux_compute::Tensor;
use moeflux_compute::graph::Graph;
use xxhash_rust::xxh3::Xxh3;

use crate::fingerprint::{hex, sample};
use crate::models::Model;
use crate::{Error, Result};
use file::AdapterFile;
use weights::AdapterWeight;

/// An adapter to open with a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterSource {
    /// What requests call it.
    pub name: String,
    /// Where `adapter_config.json` and `adapter_model.safetensors` are.
    pub folder: PathBuf,
}

/// An adapter of a model.
#[derive(Debug)]
pub(crate) struct ModelAdapter {
    pub(crate) name: String,
    file: AdapterFile,
    /// In the order of the graph's, which has them from `first` on.
    weights: Vec<AdapterWeight>,
    first: usize,
    /// Modules and scales.
    described: String,
}

impl ModelAdapter {
    /// Reads its weights behind those that are `loaded`; `progress` gets the bytes of each.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Tensor`] if a value is not finite.
    pub(crate) fn load(&self, loaded: &mut Vec<Tensor>, progress: &mut dyn FnMut(u64)) -> Result<()> {
        for weight in &self.weights {
            let tensor = weight.load(&self.file)?;
            progress(tensor.bytes() as u64);
            loaded.push(tensor);
        }
        Ok(())
    }

    /// Says which weight holds a value that is not finite, if any does, reading them again.
    pub(crate) fn find_not_finite(&self) -> Option<String> {
        self.weights.iter().find_map(|weight| weight.load(&self.file).err()).map(|error| error.to_string())
    }

    /// What keys and values depend on besides the model; `weights` are the graph's.
    pub(crate) fn fingerprint(&self, weights: &[Tensor]) -> AdapterPrint {
        let mut hash = Xxh3::new();
        hash.update(self.described.as_bytes());
        for weight in &weights[self.first..self.first + self.weights.len()] {
            sample(weight.view().plane(0), &mut hash);
        }
        AdapterPrint { text: hex(&hash), root: hash.digest() }
    }
}

/// What tells an adapter from others.
#[derive(Debug, Clone)]
pub(crate) struct AdapterPrint {
    /// For files.
    pub(crate) text: String,
    /// For hashes of prefixes.
    pub(crate) root: u64,
}

impl Model {
    /// Adds adapters, whose numbers are their places in `sources`; only headers are read.
    ///
    /// # Errors
    /// [`Error::Option`] for a name that is there twice; [`Error::Io`], [`Error::Malformed`], [`Error::Config`],
    /// [`Error::Tensor`] or [`Error::MissingTensor`] for a folder that is no adapter of this model, or of a kind that is not
    /// supported.
    pub fn adapt(&mut self, sources: &[AdapterSource]) -> Result<()> {
        for AdapterSource { name, folder } in sources {
            if name.is_empty() || self.adapters.iter().any(|other| other.name == *name) {
                let expected = "a name of its own for each adapter".to_owned();
                return Err(Error::Option { option: "adapters", expected, got: format!("{name:?}") });
            }
            let adapter = attach::attach(self, name, folder)?;
            self.adapters.push(adapter);
        }
        Ok(())
    }

    /// Names of the adapters, in the order of their numbers.
    pub fn adapter_names(&self) -> impl Iterator<Item = &str> {
        self.adapters.iter().map(|adapter| adapter.name.as_str())
    }

    /// The graph without adapters, and how many weights it has.
    pub(crate) fn own_graph(&self) -> (Graph, usize) {
        let weights = self.adapters.first().map_or(self.graph.weights().len(), |adapter| adapter.first);
        (self.graph.without_adapters(weights), weights)
    }
}
