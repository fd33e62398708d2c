//! `adapter_config.json`: rank and scale of every module, and the refusal of what adapters cannot have here.
//!
//! Source: PEFT's `LoraConfig` and `get_pattern_key`.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::utils::SysRegex;

use crate::checkpoint::safetensors::read_json;
use crate::{Error, Result};

/// Name of the file in an adapter's folder.
pub(super) const CONFIG: &str = "adapter_config.json";

/// Settings that say nothing about what is computed once an adapter is trained.
const OF_TRAINING: [&str; 27] = [
    "alora_invocation_string",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
];

/// Others that are read here.
const READ: [&str; 3] = ["alpha_pattern", "bias", "use_rslora"];

/// Ways to begin training that leave the model's own weights as they are.
const INITIALISATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// What an adapter says of its modules' ranks and scales.
#[derive(Debug)]
pub(super) struct AdapterConfig {
    path: PathBuf,
    r: f64,
    lora_alpha: f64,
    /// Scales are `lora_alpha` / √r.
    use_rslora: bool,
    rank_pattern: Vec<(SysRegex, f64)>,
    alpha_pattern: Vec<(SysRegex, f64)>,
}

impl AdapterConfig {
    /// Reads the configuration in `folder`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Malformed`] if there is none; [`Error::Config`] naming what is not supported.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let json: Value = read_json(&path)?;
        let fault = |key: &str, expected: &str, got: &Value| Error::Config {
            path: path.clone(),
            key: key.into(),
            expected: expected.into(),
            got: got.to_string(),
        };
        let Some(settings) = json.as_object() else {
            return Err(fault("adapter", "an object", &json));
        };
        let get = |key: &str| settings.get(key).filter(|value| !value.is_null());
        let nothing = Value::Null;
        if get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return Err(fault("peft_type", "\"LORA\"", get("peft_type").unwrap_or(&nothing)));
        }
        if let Some(bias) = get("bias").filter(|bias| bias.as_str() != Some("none")) {
            return Err(fault("bias", "\"none\": adapters with biases are not supported", bias));
        }
        match get("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(kind)) if INITIALISATIONS.contains(&kind.as_str()) => {}
            Some(other) => {
                let expected = "true, false, \"gaussian\", \"eva\" or \"orthogonal\": others change the model's own weights";
                return Err(fault("init_lora_weights", expected, other));
            }
        }
        for (key, value) in settings {
            let known = OF_TRAINING.contains(&key.as_str()) || READ.contains(&key.as_str());
            if !known && !is_nothing(value) {
                return Err(fault(key, "nothing: this is not supported in adapters", value));
            }
        }
        let positive = |key: &str, value: &Value| {
            let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
            number.ok_or_else(|| fault(key, "a positive number", value))
        };
        let number = |key: &str| positive(key, get(key).unwrap_or(&nothing));
        let pattern = |key: &str| -> Result<Vec<(SysRegex, f64)>> {
            let Some(value) = get(key) else { return Ok(vec![]) };
            let all = value.as_object().ok_or_else(|| fault(key, "an object", value))?;
            let one = |(pattern, value): (&String, &Value)| {
                let regex = SysRegex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
                let regex =
                    regex.map_err(|_| fault(key, "regular expressions", &Value::from(pattern.as_str())))?;
                Ok((regex, positive(key, value)?))
            };
            all.iter().map(one).collect()
        };
        let use_rslora = match get("use_rslora") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| fault("use_rslora", "true or false", value))?,
        };
        let (r, lora_alpha) = (number("r")?, number("lora_alpha")?);
        let (rank_pattern, alpha_pattern) = (pattern("rank_pattern")?, pattern("alpha_pattern")?);
        Ok(Self { path, r, lora_alpha, use_rslora, rank_pattern, alpha_pattern })
    }

    /// Rank of the module that PEFT calls `name`.
    pub(super) fn rank(&self, name: &str) -> usize {
        matching(&self.rank_pattern, name).unwrap_or(self.r) as usize
    }

    /// Factor on what a module of rank `rank` adds.
    pub(super) fn scale(&self, name: &str, rank: usize) -> f32 {
        let alpha = matching(&self.alpha_pattern, name).unwrap_or(self.lora_alpha);
        let divisor = if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        (alpha / divisor) as f32
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// What the first pattern that is the end of `name` says.
fn matching(patterns: &[(SysRegex, f64)], name: &str) -> Option<f64> {
    let first = |name: &str| {
        patterns.iter().find(|(regex, _)| regex.find_iter(name).next().is_some()).map(|(_, value)| *value)
    };
    // Of routers that are a parameter and no module PEFT has the parameter's name.
    first(name).or_else(|| first(&format!("{name}.weight")))
}

/// Whether a setting is off.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty(),
        _ => false,
    }
}
