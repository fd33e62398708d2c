//! [`PlannedModel`]: the model that a plan is for, however little of it there is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::models::assumed::{self, Storage};
use crate::models::{self, Model};
use crate::synth::{Plan as SyntheticModel, Recipe};

/// A recorded model.
enum Recorded {
    Model(Box<Model>),
    Synthetic(Box<SyntheticModel>),
}

/// The model that a plan is for.
pub struct PlannedModel {
    name: String,
    recorded: Recorded,
    note: String,
    on_disk: bool,
}

impl std::fmt::Debug for PlannedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PlannedModel({} ({}))", self.name, self.note)
    }
}

impl PlannedModel {
    /// A model of which there is only a configuration, stored as `storage` or as the configuration says; `None` if `name` is
    /// no config.json and no folder that has one and no weights.
    ///
    /// # Errors
    /// If the configuration is not one of a model that can be run.
    pub fn configured(name: &str, storage: Option<Storage>) -> Result<Option<Self>> {
        let Some(config) = only_config(Path::new(name)) else { return Ok(None) };
        let (model, stored) = assumed::describe(&config, storage)?;
        let note = match storage {
            Some(_) => format!("configuration only, as {stored} (given)"),
            None => format!("configuration only, as {stored}"),
        };
        let recorded = Recorded::Model(Box::new(model));
        Ok(Some(Self { name: name.to_owned(), recorded, note, on_disk: false }))
    }

    /// What [`synth`](crate::synth) would write for a shape, as in `qwen3.5-397b-a17b:q4_k`.
    ///
    /// # Errors
    /// If there is no such shape.
    pub fn synthetic(name: &str, shape: &str) -> Result<Self> {
        let recipe = Recipe::whole(shape)?;
        let model = SyntheticModel::new(recipe)?;
        let note = format!("shape only, as {}", recipe.encoding.name());
        let recorded = Recorded::Synthetic(Box::new(model));
        Ok(Self { name: name.to_owned(), recorded, note, on_disk: false })
    }

    /// A checkpoint, of which there may be headers only: then its weights are not `on_disk`. `note` is what is said of it
    /// besides its name.
    ///
    /// # Errors
    /// If it is not one that can be run.
    pub fn stored(name: &str, checkpoint: &Path, note: &str, on_disk: bool) -> Result<Self> {
        let model = models::record(Arc::new(Checkpoint::open(checkpoint)?))?;
        let recorded = Recorded::Model(Box::new(model));
        Ok(Self { name: name.to_owned(), recorded, note: note.to_owned(), on_disk })
    }

    /// What is computed.
    pub fn model(&self) -> &Model {
        match &self.recorded {
            Recorded::Model(model) => model,
            Recorded::Synthetic(plan) => plan.model(),
        }
    }

    /// What it was called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What is said of it besides its name.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// Whether its weights can be read.
    pub fn is_on_disk(&self) -> bool {
        self.on_disk
    }
}

/// The configuration, if `path` is one or a folder that has one and no weights.
fn only_config(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|ending| ending == "json").then(|| path.to_owned());
    }
    let config = path.join("config.json");
    let is_weights = |entry: std::fs::DirEntry| {
        let ending = entry.path().extension().map(|e| e.to_string_lossy().into_owned());
        matches!(ending.as_deref(), Some("safetensors" | "gguf"))
    };
    let has_weights = std::fs::read_dir(path).ok()?.flatten().any(is_weights);
    (config.is_file() && !has_weights).then_some(config)
}
