//! [`Subject`]: the model that `plan` is asked about, however little of it there is.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use moeflux::checkpoint::Checkpoint;
use moeflux::models::assumed::{self, Storage};
use moeflux::models::{self, Model};
use moeflux::synth::{Plan, Recipe, SHAPES};

use crate::hub::{Headers, HubId, Settings, headers};
use crate::model::ModelArg;

/// A recorded model.
enum Recorded {
    Model(Box<Model>),
    Synthetic(Box<Plan>),
}

/// What is planned for.
pub struct Subject {
    name: String,
    recorded: Recorded,
    /// What is said of it besides its name.
    note: String,
    on_disk: bool,
    /// Files of headers that the model refers to.
    _headers: Option<Headers>,
}

impl Subject {
    /// Finds out what `model` is; `quant` or `bits` are for models that there is only a configuration of.
    pub fn new(model: &ModelArg, quant: Option<&str>, bits: Option<u8>) -> Result<Self> {
        let name = model.to_string();
        let bits = bits.map(|bits| format!("{bits}bit"));
        let storage = quant.or(bits.as_deref()).map(Storage::by_name).transpose()?;
        let path = Path::new(&name);
        if let Some(config) = only_config(path) {
            let (model, stored) = assumed::describe(&config, storage)?;
            let note = match storage {
                Some(_) => format!("configuration only, as {stored} (given)"),
                None => format!("configuration only, as {stored}"),
            };
            return Ok(Self::of(name, model, note, false, None));
        }
        if storage.is_some() {
            bail!("--quant and --bits apply to a config.json only; {name} states its own encoding");
        }
        if let Some(shape) = name.strip_prefix("synth:") {
            return Self::synthetic(&name, shape);
        }
        if !path.exists() && name != "demo" {
            let Some(id) = HubId::parse(&name) else {
                let shapes: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
                bail!(
                    "{name}: there is no such file; expected a path, a config.json, demo, a model of the hub such as \
                     org/name:Q4_K_M, or synth:SHAPE with a shape of {}",
                    shapes.join(", ")
                );
            };
            let headers = headers(&id, &Settings::from_environment())?;
            let complete = headers.is_complete();
            let note = if complete { "downloaded" } else { "headers only" }.to_owned();
            let model = models::record(Arc::new(Checkpoint::open(headers.path())?))?;
            return Ok(Self::of(name, model, note, complete, Some(headers)));
        }
        let checkpoint = Checkpoint::open(&model.path()?)?;
        Ok(Self::of(name, models::record(Arc::new(checkpoint))?, "on disk".into(), true, None))
    }

    fn of(name: String, model: Model, note: String, on_disk: bool, headers: Option<Headers>) -> Self {
        Self { name, recorded: Recorded::Model(Box::new(model)), note, on_disk, _headers: headers }
    }

    /// What `synth` would write.
    fn synthetic(name: &str, shape: &str) -> Result<Self> {
        let recipe = Recipe::whole(shape)?;
        let plan = Plan::new(recipe)?;
        let note = format!("shape only, as {}", recipe.encoding.name());
        let recorded = Recorded::Synthetic(Box::new(plan));
        Ok(Self { name: name.to_owned(), recorded, note, on_disk: false, _headers: None })
    }

    pub fn model(&self) -> &Model {
        match &self.recorded {
            Recorded::Model(model) => model,
            Recorded::Synthetic(plan) => plan.model(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn note(&self) -> &str {
        &self.note
    }

    /// Whether its weights can be read.
    pub fn is_on_disk(&self) -> bool {
        self.on_disk
    }
}

/// The configuration, if `path` is one or a folder that has one and no weights.
fn only_config(path: &Path) -> Option<std::path::PathBuf> {
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
