//! [`Section`]: an object of a JSON configuration, whose values are read with typed errors.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Filter;
use crate::checkpoint::Checkpoint;
use crate::{Error, Result};

/// Largest size that is taken for one.
const MOST: u64 = 1 << 40;

/// An object of a configuration file.
#[derive(Debug, Clone)]
pub(super) struct Section {
    path: PathBuf,
    /// What stands before keys in errors.
    prefix: String,
    value: Value,
}

impl Section {
    /// The whole configuration of a checkpoint.
    pub(super) fn of_checkpoint(checkpoint: &Checkpoint) -> Self {
        Self { path: checkpoint.config_path(), prefix: String::new(), value: checkpoint.config().clone() }
    }

    /// What a folder says of its image processor: `preprocessor_config.json`, or `image_processor` of
    /// `processor_config.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if neither can be read, [`Error::Malformed`] if it is not JSON.
    pub(super) fn of_image_processor(folder: &Path) -> Result<Self> {
        let joint = folder.join("processor_config.json");
        if joint.exists() {
            let whole = Self::read(joint)?;
            if whole.value.get("image_processor").is_some_and(Value::is_object) {
                return whole.within("image_processor");
            }
        }
        Self::read(folder.join("preprocessor_config.json"))
    }

    fn read(path: PathBuf) -> Result<Self> {
        let io = |source| Error::Io { action: "read", path: path.clone(), source };
        let bytes = std::fs::read(&path).map_err(io)?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|error| Error::Malformed {
            path: path.clone(),
            what: "image processor".into(),
            expected: "JSON".into(),
            got: error.to_string(),
        })?;
        Ok(Self { path, prefix: String::new(), value })
    }

    /// That a value is not as `expected`.
    pub(super) fn unsupported(&self, key: &str, expected: &str) -> Error {
        let got = self.value.get(key).map_or("nothing".to_owned(), Value::to_string);
        let key = format!("{}{key}", self.prefix);
        Error::Config { path: self.path.clone(), key, expected: expected.into(), got }
    }

    /// Reads a value that may be absent or null.
    fn optional<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.unsupported(key, expected)),
        }
    }

    /// The object at `key`.
    pub(super) fn within(&self, key: &str) -> Result<Self> {
        let value = self.optional(key, "an object", |v| v.is_object().then(|| v.clone()))?;
        let value = value.ok_or_else(|| self.unsupported(key, "an object"))?;
        Ok(Self { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), value })
    }

    /// The object at `key`, empty if it is absent.
    pub(super) fn within_or_empty(&self, key: &str) -> Result<Self> {
        let value = self.optional(key, "an object", |v| v.is_object().then(|| v.clone()))?;
        let value = value.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
        Ok(Self { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), value })
    }

    /// A positive whole number, if it is there.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let size = |v: &Value| v.as_u64().filter(|n| (1..=MOST).contains(n)).map(|n| n as usize);
        self.optional(key, "a positive whole number", size)
    }

    /// A positive whole number.
    pub(super) fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.unsupported(key, "a positive whole number"))
    }

    /// A list of whole numbers, if it is there.
    pub(super) fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let size = |v: &Value| v.as_u64().filter(|n| *n <= MOST).map(|n| n as usize);
        self.optional(key, "a list of whole numbers", |v| v.as_array()?.iter().map(size).collect())
    }

    /// A finite number, if it is there.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.optional(key, "a number", |v| v.as_f64().filter(|n| n.is_finite()))
    }

    /// Three finite numbers.
    pub(super) fn three(&self, key: &str) -> Result<[f64; 3]> {
        let expected = "three numbers";
        let number = |v: &Value| v.as_f64().filter(|n| n.is_finite());
        let read =
            |v: &Value| v.as_array()?.iter().map(number).collect::<Option<Vec<f64>>>()?.try_into().ok();
        self.optional(key, expected, read)?.ok_or_else(|| self.unsupported(key, expected))
    }

    /// A word, if it is there.
    pub(super) fn word(&self, key: &str) -> Result<Option<String>> {
        self.optional(key, "a word", |v| v.as_str().map(str::to_owned))
    }

    /// The id of a token, if it is there.
    pub(super) fn token(&self, key: &str) -> Result<Option<u32>> {
        self.optional(key, "a token id", |v| v.as_u64().and_then(|id| u32::try_from(id).ok()))
    }

    /// A truth value, or `default`.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.optional(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Refuses anything but `false`, which is what nothing means.
    pub(super) fn must_not(&self, key: &str) -> Result<()> {
        if self.flag(key, false)? { Err(self.unsupported(key, "false")) } else { Ok(()) }
    }

    /// Mean and deviation of an image processor's channels, or the given ones.
    pub(super) fn mean_and_std(&self, mean: [f64; 3], std: [f64; 3]) -> Result<([f64; 3], [f64; 3])> {
        let (mean_key, std_key) = ("image_mean", "image_std");
        let three = |key: &str, default: [f64; 3]| match self.value.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.three(key),
        };
        let (mean, std) = (three(mean_key, mean)?, three(std_key, std)?);
        if std.iter().any(|std| *std <= 0.0) {
            return Err(self.unsupported(std_key, "numbers above 0"));
        }
        Ok((mean, std))
    }

    /// How an image processor resamples pictures, or the given way.
    pub(super) fn filter(&self, default: Filter) -> Result<Filter> {
        match self.number("resample")? {
            None => Ok(default),
            Some(2.0) => Ok(Filter::Bilinear),
            Some(3.0) => Ok(Filter::Bicubic),
            Some(_) => Err(self.unsupported("resample", "2, bilinear, or 3, bicubic")),
        }
    }

    /// Refuses anything but `true`, which is what nothing means.
    pub(super) fn must(&self, key: &str) -> Result<()> {
        match self.optional(key, "true", Value::as_bool)? {
            None | Some(true) => Ok(()),
            Some(false) => Err(self.unsupported(key, "true")),
        }
    }
}
