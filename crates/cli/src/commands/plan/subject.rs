//! The model that `plan` is asked about: found on disk, described, or by its headers on the hub.

use std::path::Path;

use anyhow::{Result, bail};
use moeflux::cost::PlannedModel;
use moeflux::models::assumed::Storage;
use moeflux::synth::SHAPES;

use crate::hub::{Headers, HubId, Settings, headers};
use crate::model::ModelArg;

/// What is planned for.
pub struct Subject {
    pub planned: PlannedModel,
    /// Files of headers that the model refers to.
    _headers: Option<Headers>,
}

impl From<PlannedModel> for Subject {
    fn from(planned: PlannedModel) -> Self {
        Self { planned, _headers: None }
    }
}

impl Subject {
    /// Finds out what `model` is; `quant` or `bits` are for models that there is only a configuration of.
    pub fn new(model: &ModelArg, quant: Option<&str>, bits: Option<u8>) -> Result<Self> {
        let name = model.to_string();
        let bits = bits.map(|bits| format!("{bits}bit"));
        let storage = quant.or(bits.as_deref()).map(Storage::by_name).transpose()?;
        if let Some(planned) = PlannedModel::configured(&name, storage)? {
            return Ok(planned.into());
        }
        if storage.is_some() {
            bail!("--quant and --bits apply to a config.json only; {name} states its own encoding");
        }
        if let Some(shape) = name.strip_prefix("synth:") {
            return Ok(PlannedModel::synthetic(&name, shape)?.into());
        }
        if !Path::new(&name).exists() && name != "demo" {
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
            let note = if complete { "downloaded" } else { "headers only" };
            let planned = PlannedModel::stored(&name, headers.path(), note, complete)?;
            return Ok(Self { planned, _headers: Some(headers) });
        }
        Ok(PlannedModel::stored(&name, &model.path()?, "on disk", true)?.into())
    }
}
