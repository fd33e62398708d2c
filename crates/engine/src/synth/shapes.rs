//! Shapes of published models, by name: each is its `config.json`, with what the formats need to know besides.

use std::path::Path;

use serde_json::Value;

use crate::checkpoint::gguf::{self, Array};
use crate::models::config::gguf_counterparts;
use crate::models::{Names, names_of};
use crate::{Error, Result};

/// A published model's sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    /// `config`: the published `config.json`; `optional`: endings of the names of optional tensors that the model has;
    /// `gguf` and `mlx`: what these formats have besides. Without `gguf` there are no such files.
    text: &'static str,
}

macro_rules! shapes {
    ($($name:literal),+ $(,)?) => {
        &[$(Shape { name: $name, text: include_str!(concat!("shapes/", $name, ".json")) }),+]
    };
}

/// Every shape. `tiny` has rows of at least 256 columns, so that every encoding can store it.
pub const SHAPES: &[Shape] = shapes![
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
    "qwen3.5-397b-a17b",
    "mixtral-8x7b",
    "deepseek-v3-671b",
    "kimi-k2",
    "glm-4.5-air",
    "minimax-m2",
    "minimax-m3",
    "gpt-oss-120b",
    "nemotron-3-nano-30b-a3b",
    "step-3.5-flash",
    "qwen3-vl-30b-a3b",
    "lfm2-8b-a1b",
    "trinity-mini",
    "ling-mini-2.0",
    "dbrx",
    "jamba-1.5-mini",
    "laguna-xs-2.1",
    "phi-3.5-moe",
    "ernie-4.5-21b-a3b",
    "hunyuan-a13b",
    "kimi-linear-48b-a3b",
    "gemma-4-26b-a4b",
    "granite-4.0-h-small",
    "llama-4-scout-17b-16e",
    "llama-4-maverick-17b-128e",
    "olmoe-1b-7b",
    "deepseek-v2-lite",
    "glm-4.7-flash",
    "minimax-text-01",
    "dots.llm1",
    "k-exaone-236b-a23b",
    "ernie-4.5-300b-a47b",
    "qwen3-coder-480b-a35b",
    "longcat-flash-560b",
    "ling-3.0-flash",
    "beam-1.0-501b-a23b",
    "mistral-large-4-1t-a52b",
    "deepseek-v4.1-flash",
    "kimi-k3",
    "muse-spark-816b-a42b",
    "north-mini-code-1.0",
    "tiny",
];

impl Shape {
    /// The shape called `name`.
    ///
    /// # Errors
    /// [`Error::Option`] listing the names there are.
    pub fn by_name(name: &str) -> Result<Self> {
        SHAPES.iter().find(|shape| shape.name == name).copied().ok_or_else(|| {
            let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            Error::Option { option: "shape", expected: names.join(", "), got: name.to_owned() }
        })
    }

    /// Decoder layers.
    pub fn layers(&self) -> usize {
        self.parsed().size("num_hidden_layers")
    }

    /// Token ids.
    pub fn vocab_size(&self) -> usize {
        self.parsed().size("vocab_size")
    }

    /// Whether GGUF files of the model can be made.
    pub fn has_gguf(&self) -> bool {
        !self.parsed().0["gguf"].is_null()
    }

    /// The published `config.json`.
    pub fn config(&self) -> Value {
        self.parsed().config().clone()
    }

    /// The same with another number of token ids.
    #[cfg(test)]
    pub(crate) fn with_vocabulary(self, size: usize) -> Self {
        let mut all: Value = serde_json::from_str(self.text).expect("tests parse every shape");
        all["config"]["vocab_size"] = size.into();
        Self { text: all.to_string().leak(), ..self }
    }

    pub(super) fn parsed(&self) -> Parsed {
        Parsed(serde_json::from_str(self.text).expect("tests parse every shape"))
    }
}

/// A shape's JSON.
#[derive(Debug)]
pub(super) struct Parsed(Value);

impl Parsed {
    /// The published configuration.
    pub(super) fn config(&self) -> &Value {
        &self.0["config"]
    }

    /// What the family calls things.
    fn names(&self) -> &'static Names {
        names_of(self.config()["model_type"].as_str().unwrap_or_default())
    }

    /// The configuration's number `key` under any of its names, which may be in an object of the configuration, or 0.
    pub(super) fn size(&self, key: &str) -> usize {
        let config = self.config();
        let within =
            config.as_object().into_iter().flat_map(|all| all.values()).filter(|value| value.is_object());
        let found = std::iter::once(config).chain(within).find_map(|place| {
            let mut names = self.names().keys(key);
            names.find_map(|name| place[name].as_u64())
        });
        found.unwrap_or(0) as usize
    }

    /// The first of `keys` that the configuration has.
    pub(super) fn first_size(&self, keys: &[&str]) -> usize {
        keys.iter().map(|key| self.size(key)).find(|n| *n > 0).unwrap_or(0)
    }

    /// Routed experts of a layer.
    pub(super) fn experts(&self) -> usize {
        self.size("num_experts")
    }

    /// Endings of the names of optional tensors.
    pub(super) fn optional(&self, gguf: bool) -> Vec<String> {
        let own = if gguf { self.0["gguf"]["optional"].as_array() } else { None };
        let all = self.0["optional"].as_array().into_iter().chain(own).flatten();
        all.filter_map(|name| name.as_str().map(str::to_owned)).collect()
    }

    /// Bits to which mlx-lm quantises routers; `None` where it leaves them.
    pub(super) fn router_bits(&self) -> Option<u8> {
        self.0["mlx"]["router_bits"].as_u64().map(|bits| bits as u8)
    }

    /// GGUF's keys for the architecture, with `layers` decoder layers.
    pub(super) fn gguf_metadata(&self, path: &Path, layers: usize) -> gguf::Metadata {
        let gguf = &self.0["gguf"];
        let architecture = gguf["architecture"].as_str().unwrap_or_default();
        let mut config = self.config().clone();
        config["num_hidden_layers"] = layers.into();
        let mut metadata = gguf::Metadata::new(path);
        drop(metadata.insert("general.architecture", gguf::Value::String(architecture.to_owned())));
        let own = gguf["keys"].as_object().into_iter().flatten();
        let own = own.map(|(key, value)| (key.as_str(), value.clone()));
        // What is null there is in no file.
        let counterparts = gguf_counterparts(&config, self.names());
        let counterparts = counterparts.into_iter().filter(|(key, _)| gguf["keys"].get(key).is_none());
        let whole = self.size("num_hidden_layers");
        for (key, mut value) in counterparts.chain(own) {
            // A value for each layer.
            if let Value::Array(each) = &mut value
                && each.len() == whole
            {
                each.truncate(layers);
            }
            if let Some(value) = gguf_value(&value) {
                drop(metadata.insert(format!("{architecture}.{key}"), value));
            }
        }
        metadata
    }
}

/// A JSON value as converters write it.
fn gguf_value(value: &Value) -> Option<gguf::Value> {
    Some(match value {
        Value::Bool(v) => gguf::Value::Bool(*v),
        Value::String(v) => gguf::Value::String(v.clone()),
        Value::Number(v) if v.is_f64() => gguf::Value::F32(v.as_f64()? as f32),
        Value::Number(v) => gguf::Value::U32(v.as_u64()? as u32),
        Value::Array(v) if v.iter().all(Value::is_boolean) => {
            gguf::Value::Array(Array::Bool(v.iter().map(|v| v == true).collect()))
        }
        Value::Array(v) => gguf::Value::Array(Array::I32(
            v.iter().map(|v| v.as_i64().map(|v| v as i32)).collect::<Option<_>>()?,
        )),
        _ => return None,
    })
}
