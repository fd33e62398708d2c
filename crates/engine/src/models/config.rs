//! [`Config`]: a model's configuration by Hugging Face's key names, whatever the checkpoint's format.
//!
//! GGUF files name the same things differently (`qwen3moe.embedding_length` for `hidden_size`); [`Names`] is the
//! dictionary. Values are checked where they are read: an error names file, key, expected and got.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::names::Names;
use crate::checkpoint::{Checkpoint, Format, gguf};
use crate::{Error, Result};

/// The values of a Hugging Face configuration of the family `names` under GGUF's keys, without the architecture's prefix.
pub(crate) fn gguf_counterparts(config: &Value, names: &Names) -> Vec<(&'static str, Value)> {
    let places = |key| places(key, config, rope_parameters(config), false);
    let value = |key| {
        let type_alias = (key == "rope_type").then_some("type");
        let names = names.keys(key).chain(type_alias);
        let places = places(key).into_iter().flatten();
        places.flat_map(|place| names.clone().map(|name| &place[name])).find(|v| !v.is_null())
    };
    names.gguf_keys().filter_map(|(key, gguf)| Some((gguf, value(key)?.clone()))).collect()
}

/// Largest width, count of heads, experts or layers: far beyond any model's, and three of them multiply without overflow.
pub(crate) const MAX_SIZE: u64 = 1 << 20;

/// Most layers and most experts of a layer, each some ten times what any model has: they are not only multiplied, each
/// takes memory.
const MAX_LAYERS: u64 = 1 << 12;
const MAX_EXPERTS: u64 = 1 << 12;

/// The largest size that `key` may have.
fn largest(key: &str) -> u64 {
    match key {
        "num_hidden_layers" => MAX_LAYERS,
        "num_experts" => MAX_EXPERTS,
        _ => MAX_SIZE,
    }
}

/// Most positions: what a window that is none may be set to.
const MAX_POSITIONS: u64 = 1 << 32;

/// Objects that hold rotary parameters. The first that says anything is read, by itself, as transformers reads it: older
/// configurations have the first, and what is added to a newer one comes before its own.
const ROPE_OBJECTS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Keys of the rotary parameters, and whether the configuration around them may say so too.
const ROPE_KEYS: &[(&str, Around)] = &[
    ("rope_theta", Around::Otherwise),
    ("partial_rotary_factor", Around::Otherwise),
    ("original_max_position_embeddings", Around::First),
    ("rope_type", Around::Never),
    ("type", Around::Never),
    ("factor", Around::Never),
    ("alpha", Around::Never),
    ("attention_factor", Around::Never),
    ("short_mscale", Around::Never),
    ("long_mscale", Around::Never),
    ("beta_fast", Around::Never),
    ("beta_slow", Around::Never),
    ("mscale", Around::Never),
    ("mscale_all_dim", Around::Never),
    ("truncate", Around::Never),
    ("low_freq_factor", Around::Never),
    ("high_freq_factor", Around::Never),
    ("short_factor", Around::Never),
    ("long_factor", Around::Never),
    ("llama_4_scaling_beta", Around::Never),
    ("mrope_section", Around::Never),
];

/// Whether a rotary parameter may be given beside the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Around {
    /// It is not read there.
    Never,
    /// It is, where the parameters do not have it.
    Otherwise,
    /// It is, whatever the parameters have.
    First,
}

/// The rotary parameters of a Hugging Face configuration.
fn rope_parameters(config: &Value) -> Option<&Value> {
    let [scaling, parameters] = ROPE_OBJECTS.map(|name| config.get(name).filter(|value| !value.is_null()));
    scaling.filter(|value| value.as_object().is_none_or(|all| !all.is_empty())).or(parameters)
}

/// Where `key` is looked up, the first place first, in a configuration with the rotary parameters `rope`, which may be
/// `one_of_several` sets.
fn places<'v>(
    key: &str,
    config: &'v Value,
    rope: Option<&'v Value>,
    one_of_several: bool,
) -> [Option<&'v Value>; 2] {
    match ROPE_KEYS.iter().find(|(name, _)| *name == key).map(|(_, around)| around) {
        None => [Some(config), None],
        Some(Around::Never) => [rope, None],
        Some(Around::Otherwise) => [rope, Some(config)],
        Some(Around::First) if one_of_several => [rope, None],
        Some(Around::First) => [Some(config), rope],
    }
}

/// Elements of an array that are looked at; longer ones are not configuration.
const MAX_ELEMENTS: usize = 4096;

/// A GGUF scalar, or a short list of finite numbers or truth values, as the JSON value that Hugging Face would have for
/// it. Anything else becomes an object, which no key expects, so that it is an error wherever it is read.
fn gguf_value(value: &gguf::Value) -> Value {
    let other = || serde_json::json!({ "value": value.describe() });
    match value {
        gguf::Value::U8(v) => (*v).into(),
        gguf::Value::I8(v) => (*v).into(),
        gguf::Value::U16(v) => (*v).into(),
        gguf::Value::I16(v) => (*v).into(),
        gguf::Value::U32(v) => (*v).into(),
        gguf::Value::I32(v) => (*v).into(),
        gguf::Value::U64(v) => (*v).into(),
        gguf::Value::I64(v) => (*v).into(),
        gguf::Value::F32(v) if v.is_finite() => (*v).into(),
        gguf::Value::F64(v) if v.is_finite() => (*v).into(),
        gguf::Value::Bool(v) => (*v).into(),
        gguf::Value::String(v) => v.clone().into(),
        gguf::Value::Array(gguf::Array::Bool(v)) if v.len() <= MAX_ELEMENTS => v.clone().into(),
        gguf::Value::Array(gguf::Array::I32(v)) if v.len() <= MAX_ELEMENTS => v.clone().into(),
        gguf::Value::Array(gguf::Array::U32(v)) if v.len() <= MAX_ELEMENTS => v.clone().into(),
        gguf::Value::Array(gguf::Array::U64(v)) if v.len() <= MAX_ELEMENTS => v.clone().into(),
        gguf::Value::Array(gguf::Array::I64(v)) if v.len() <= MAX_ELEMENTS => v.clone().into(),
        gguf::Value::Array(gguf::Array::F32(v))
            if v.len() <= MAX_ELEMENTS && v.iter().all(|v| v.is_finite()) =>
        {
            v.clone().into()
        }
        gguf::Value::F32(_) | gguf::Value::F64(_) | gguf::Value::Array(_) => other(),
    }
}

/// What a key says where a Hugging Face configuration does not have it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    /// A whole number.
    Count(u64),
    /// Another number.
    Number(f64),
    /// A truth value.
    Flag(bool),
}

impl From<DefaultValue> for Value {
    fn from(value: DefaultValue) -> Self {
        match value {
            DefaultValue::Count(n) => n.into(),
            DefaultValue::Number(n) => n.into(),
            DefaultValue::Flag(b) => b.into(),
        }
    }
}

/// Defaults of a family's configuration class in transformers, by key.
pub type KeyDefaults = [(&'static str, DefaultValue)];

/// Configuration of one model.
#[derive(Debug, Clone, Copy)]
pub struct Config<'a> {
    checkpoint: &'a Checkpoint,
    /// Prefix of GGUF keys.
    gguf_prefix: &'a str,
    names: &'a Names,
    /// Maximum positions of a sequence, if known.
    context: Option<usize>,
    /// A flag with another default than the usual one.
    assumed: Option<(&'static str, bool)>,
    /// What keys say that a Hugging Face configuration does not have.
    defaults: &'a KeyDefaults,
    /// The only object that holds rotary parameters, if it is not as usual; none has an empty name.
    rope_object: Option<&'static str>,
    /// The rotary parameters of a configuration that has none.
    default_rope: Option<&'a Value>,
    /// The one of several sets of rotary parameters that is read in place of all.
    rope: Option<&'static str>,
    /// Whether nothing beside sets of rotary parameters is read.
    rope_sets_only: bool,
    /// The object whose keys are read in place of the model's.
    within: Option<&'static str>,
}

impl<'a> Config<'a> {
    /// The configuration of `checkpoint`, for sequences of `context` positions if that is known; GGUF keys start with
    /// `gguf_prefix`, and the family has `names`.
    pub fn new(
        checkpoint: &'a Checkpoint,
        gguf_prefix: &'a str,
        names: &'a Names,
        context: Option<usize>,
    ) -> Self {
        Self {
            checkpoint,
            gguf_prefix,
            names,
            context,
            assumed: None,
            defaults: &[],
            rope_object: None,
            default_rope: None,
            rope: None,
            rope_sets_only: false,
            within: None,
        }
    }

    /// The architecture's name: `model_type` or `general.architecture`.
    pub fn architecture(&self) -> &'a str {
        self.gguf_prefix
    }

    /// Maximum positions of a sequence, if known.
    pub fn context(&self) -> Option<usize> {
        self.context
    }

    /// The same configuration with `value` for the flag `key` where it is absent.
    pub fn assuming(self, key: &'static str, value: bool) -> Self {
        Self { assumed: Some((key, value)), ..self }
    }

    /// The same configuration with `defaults` for keys that a Hugging Face configuration does not have; null is no default.
    pub fn with_defaults(self, defaults: &'a KeyDefaults) -> Self {
        Self { defaults, ..self }
    }

    /// The same configuration with the object `rope` for its rotary parameters where it has none.
    pub fn assuming_rope(self, rope: &'a Value) -> Self {
        Self { default_rope: Some(rope), ..self }
    }

    /// The same configuration with rotary parameters in the object `name` only, or beside it.
    pub fn with_rope_in(self, name: &'static str) -> Self {
        Self { rope_object: Some(name), ..self }
    }

    /// The same configuration with those rotary parameters only that are beside the others.
    pub fn without_rope_objects(self) -> Self {
        Self { rope_object: Some(""), ..self }
    }

    /// The rotary parameters, of which there may be several sets.
    fn rope_parameters(&self) -> Option<&'a Value> {
        match self.rope_object {
            Some(name) => self.text().get(name).filter(|value| !value.is_null()),
            None => rope_parameters(self.text()).or(self.default_rope),
        }
    }

    /// The same configuration with the rotary parameters that are kept under `name`; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Config`] if they are no object.
    pub fn with_rope(self, name: &'static str) -> Result<Option<Self>> {
        let found = self.rope_parameters().and_then(|all| all.get(name));
        match found.filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) if value.is_object() => Ok(Some(Self { rope: Some(name), ..self })),
            Some(value) => {
                let key = format!("rope_parameters.{name}");
                Err(self.error(&key, "an object", Some(&(key.clone(), value.clone()))))
            }
        }
    }

    /// Without what [`Config::with_rope`] put first.
    pub fn without_rope(self) -> Self {
        Self { rope: None, ..self }
    }

    /// The same configuration, of whose rotary parameters transformers keeps a set for each kind of layers and nothing
    /// beside them.
    pub fn with_rope_sets_only(self) -> Self {
        Self { rope_sets_only: true, ..self }
    }

    /// Whether YaRN's ramp ends at whole channels. transformers looks for this key beside sets of rotary parameters, never
    /// in them.
    ///
    /// # Errors
    /// [`Error::Config`] if the key is neither true nor false.
    pub fn rope_truncates(&self) -> Result<bool> {
        let all = self.without_rope();
        Ok(self.rope_sets_only || all.flag("truncate", !all.is_null("truncate"))?)
    }

    /// The object `key` of the configuration, to be read as it is; `None` if it is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn within(self, key: &'static str) -> Result<Option<Self>> {
        let found = self.read(key, "an object", |v| v.is_object().then_some(()))?;
        Ok(found.map(|()| Self { within: Some(key), ..self }))
    }

    /// The configuration of the text model, or the object in it that is read.
    fn text(&self) -> &'a Value {
        let root = self.checkpoint.config();
        // Of models that speak, the part that thinks.
        let root = root.get("thinker_config").filter(|c| c.is_object()).unwrap_or(root);
        let text = root.get("text_config").filter(|c| c.is_object()).unwrap_or(root);
        self.within.and_then(|key| text.get(key)).unwrap_or(text)
    }

    /// The checkpoint's path, for errors.
    pub fn path(&self) -> &'a std::path::Path {
        self.checkpoint.path()
    }

    /// Storage format, for what differs by it.
    pub fn format(&self) -> Format {
        self.checkpoint.format()
    }

    /// Where a key of a Hugging Face configuration is looked up, the first place first.
    fn places(&self, key: &str) -> impl Iterator<Item = &'a Value> {
        let all = self.rope_parameters();
        let rope = match self.rope {
            None => all,
            Some(name) => all.and_then(|all| all.get(name)),
        };
        places(key, self.text(), rope, self.rope.is_some()).into_iter().flatten()
    }

    /// The key's value and the name under which it was found, in whichever form the configuration has.
    fn lookup(&self, key: &str) -> Option<(String, Value)> {
        if self.format() == Format::Gguf {
            let name = format!("{}.{}", self.gguf_prefix, self.names.gguf_key(key)?);
            let value = gguf_value(self.checkpoint.metadata().get(&name)?);
            return Some((name, value));
        }
        let names = self.names.keys(key);
        let found: Vec<(String, Value)> = self
            .places(key)
            .flat_map(|place| {
                names.clone().filter_map(move |name| Some((name.to_owned(), place.get(name)?.clone())))
            })
            .collect();
        if found.is_empty() && self.format() == Format::HuggingFace {
            let default = self.defaults.iter().find(|(name, _)| *name == key);
            return default.map(|(name, value)| ((*name).to_owned(), (*value).into()));
        }
        found.into_iter().find(|(_, value)| !value.is_null())
    }

    fn error(&self, key: &str, expected: &str, got: Option<&(String, Value)>) -> Error {
        let key = match (got, self.names.gguf_key(key)) {
            (Some((name, _)), _) => name.clone(),
            (None, Some(name)) if self.format() == Format::Gguf => {
                format!("{}.{name}", self.gguf_prefix)
            }
            (None, _) => key.to_owned(),
        };
        Error::Config {
            path: self.checkpoint.config_path(),
            key,
            expected: expected.into(),
            got: got.map_or("nothing".into(), |(_, value)| value.to_string()),
        }
    }

    /// What `convert` makes of the key's value, or nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] saying what is `expected` if it makes nothing of it.
    pub fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(found) = self.lookup(key) else { return Ok(None) };
        convert(&found.1).map(Some).ok_or_else(|| self.error(key, expected, Some(&found)))
    }

    /// An integer within `range`, or nothing if the key is absent.
    fn whole(&self, key: &str, range: RangeInclusive<u64>) -> Result<Option<usize>> {
        let expected = format!("an integer from {} to {}", range.start(), range.end());
        self.read(key, &expected, |v| Some(v.as_u64().filter(|n| range.contains(n))? as usize))
    }

    /// A width or a number of layers, heads, experts: positive and below a million or so. Nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.whole(key, 1..=largest(key))
    }

    /// As [`Config::optional_size`], or zero.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        self.whole(key, 0..=largest(key))
    }

    /// A number of positions, which may be much larger than a size. Nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn positions(&self, key: &str) -> Result<Option<usize>> {
        self.whole(key, 1..=MAX_POSITIONS)
    }

    /// As [`Config::optional_size`], for what must be there.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "a positive integer", None))
    }

    /// Decoder layers, also where only the list of their kinds says how many there are.
    ///
    /// # Errors
    /// [`Error::Config`] if nothing says it, or something else is there.
    pub fn num_hidden_layers(&self) -> Result<usize> {
        let key = "num_hidden_layers";
        if let Some(layers) = self.optional_size(key)? {
            return Ok(layers);
        }
        let Names { layer_kinds, layer_letters, .. } = *self.names;
        let listed = match (self.words(layer_kinds)?, layer_letters) {
            (Some(kinds), _) => kinds.len(),
            (None, Some(key)) => self.letters(key)?.map_or(0, |letters| letters.len()),
            (None, None) => 0,
        };
        match listed {
            0 => self.size(key),
            listed if listed as u64 <= MAX_LAYERS => Ok(listed),
            _ => Err(self.unsupported(layer_kinds, &format!("at most {MAX_LAYERS} layers"))),
        }
    }

    /// A number that f32 can hold, or nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number that f32 can hold", |v| v.as_f64().filter(|n| (*n as f32).is_finite()))
    }

    /// As [`Config::number`], of the rotary parameters that [`Config::with_rope`] put first only, if it did.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn rope_number(&self, key: &str) -> Result<Option<f64>> {
        let set = self.rope.and_then(|name| self.rope_parameters()?.get(name));
        if set.is_some_and(|set| set.get(key).is_none_or(Value::is_null)) {
            return Ok(None);
        }
        self.number(key)
    }

    /// As [`Config::number`], for what must not be negative.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn magnitude(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(number) if number < 0.0 => Err(self.unsupported(key, "a number that is not negative")),
            other => Ok(other),
        }
    }

    /// A truth value; `default` if the key is absent, and false if it is null, as Python has it.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let assumed = self.assumed.filter(|(assumed, _)| *assumed == key).map(|(_, value)| value);
        let found = self.read(key, "true or false", Value::as_bool)?;
        let default = !self.is_null(key) && assumed.unwrap_or(default);
        Ok(found.unwrap_or(default))
    }

    /// A word, or nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn word(&self, key: &str) -> Result<Option<String>> {
        self.read(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// A word's letters, or a list of them; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn letters(&self, key: &str) -> Result<Option<Vec<char>>> {
        let letter = |text: &str| {
            let mut letters = text.chars();
            letters.next().filter(|_| letters.next().is_none())
        };
        self.read(key, "a string or a list of letters", |v| match v {
            Value::String(text) => Some(text.chars().collect()),
            Value::Array(all) => all.iter().map(|v| letter(v.as_str()?)).collect(),
            _ => None,
        })
    }

    /// Whether the key is there without a value, which is something else than not being there.
    pub fn is_null(&self, key: &str) -> bool {
        let names = self.names.keys(key);
        let mut found =
            self.places(key).flat_map(|place| names.clone().filter_map(move |name| place.get(name)));
        found.next().is_some_and(Value::is_null)
    }

    /// Checks what no family asks for by itself: objects that are none, and an activation other than those that its
    /// configurations may name.
    ///
    /// # Errors
    /// [`Error::Config`] for these.
    pub fn check_common(&self, activations: &[&str]) -> Result<()> {
        let root = self.checkpoint.config();
        let places = [(root, "text_config", "text_config"), (root, "thinker_config", "thinker_config")];
        let inner = [(&root["thinker_config"], "text_config", "thinker_config.text_config")];
        for (place, key, path) in places.into_iter().chain(inner) {
            if let Some(value) = place.get(key).filter(|value| !value.is_null() && !value.is_object()) {
                return Err(self.error(key, "an object", Some(&(path.into(), value.clone()))));
            }
        }
        for key in ROPE_OBJECTS {
            self.read(key, "an object", |v| v.is_object().then_some(()))?;
        }
        match self.word("hidden_act")? {
            Some(word) if !activations.contains(&word.as_str()) => {
                Err(self.unsupported("hidden_act", activations[0]))
            }
            _ => Ok(()),
        }
    }

    /// An integer in the object `key`; nothing if either is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn size_in(&self, key: &str, name: &str) -> Result<Option<usize>> {
        let Some(found) = self.read(key, "an object", |v| v.as_object().cloned())? else {
            return Ok(None);
        };
        let Some(value) = found.get(name).filter(|v| !v.is_null()) else { return Ok(None) };
        match value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => {
                let expected = format!("an integer from 1 to {MAX_SIZE}");
                Err(self.error(key, &expected, Some(&(format!("{key}.{name}"), value.clone()))))
            }
        }
    }

    /// A list of integers in the object `key`; nothing if either is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn sizes_in(&self, key: &str, name: &str) -> Result<Option<Vec<usize>>> {
        let Some(found) = self.read(key, "an object", |v| v.as_object().cloned())? else {
            return Ok(None);
        };
        let Some(value) = found.get(name).filter(|v| !v.is_null()) else { return Ok(None) };
        let number = |v: &Value| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
        match value.as_array().and_then(|all| all.iter().map(number).collect()) {
            Some(numbers) => Ok(Some(numbers)),
            None => {
                let expected = format!("integers up to {MAX_SIZE}");
                Err(self.error(key, &expected, Some(&(format!("{key}.{name}"), value.clone()))))
            }
        }
    }

    /// A list of integers, which may be zero; empty if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn sizes(&self, key: &str) -> Result<Vec<usize>> {
        let item = |v: &Value| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
        let convert = |v: &Value| v.as_array()?.iter().map(item).collect();
        let expected = format!("a list of integers up to {MAX_SIZE}");
        Ok(self.read(key, &expected, convert)?.unwrap_or_default())
    }

    /// A list of integers, which may be zero, of each of `layers` layers; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else, or a list of fewer.
    pub fn per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>> {
        let number = |v: &Value| v.as_u64().filter(|n| *n <= MAX_SIZE).map(|n| n as usize);
        let expected = format!("a list of integers up to {MAX_SIZE}, one for each of {layers} layers");
        self.read(key, &expected, |v| {
            let numbers: Option<Vec<usize>> = v.as_array()?.iter().map(number).collect();
            numbers.filter(|numbers| numbers.len() >= layers)
        })
    }

    /// A number that is not negative of each of `layers` layers: one for all, or in GGUF files a list; nothing if the key is
    /// absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else, or a list of fewer.
    pub fn magnitude_per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<f64>>> {
        let number = |v: &Value| v.as_f64().filter(|n| (*n as f32).is_finite() && *n >= 0.0);
        if self.format() != Format::Gguf {
            let one = self.read(key, "a number that is not negative", number)?;
            return Ok(one.map(|number| vec![number; layers]));
        }
        let expected = format!("a list of non-negative numbers, one for each of {layers} layers");
        self.read(key, &expected, |v| {
            let numbers: Option<Vec<f64>> = v.as_array()?.iter().map(number).collect();
            numbers.filter(|numbers| numbers.len() >= layers)
        })
    }

    /// A list of finite numbers; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let item = |v: &Value| v.as_f64().filter(|n| n.is_finite());
        self.read(key, "a list of numbers", |v| v.as_array()?.iter().map(item).collect())
    }

    /// A number for each of several layers, or one for all, which is repeated; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else, or there are too few.
    pub fn number_by_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<f64>>> {
        let item = |v: &Value| v.as_f64().filter(|n| (*n as f32).is_finite());
        let expected = format!("a number, or one for each of {layers} layers");
        self.read(key, &expected, |v| match v {
            Value::Array(all) if all.len() >= layers => all.iter().map(item).collect(),
            Value::Array(_) => None,
            one => Some(vec![item(one)?; layers]),
        })
    }

    /// A flag of the outermost configuration, of which the text model's may be a part.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn outer_flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.checkpoint.config().get(key).filter(|v| !v.is_null()) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(self.error(key, "true or false", Some(&(key.into(), other.clone())))),
        }
    }

    /// A list of truth values, in GGUF files also of numbers of which 0 is false; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        let gguf = self.format() == Format::Gguf;
        let flag = |v: &Value| v.as_bool().or(v.as_u64().filter(|_| gguf).map(|number| number != 0));
        self.read(key, "a list of true and false", |v| v.as_array()?.iter().map(flag).collect())
    }

    /// A list of words; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn words(&self, key: &str) -> Result<Option<Vec<String>>> {
        let word = |v: &Value| v.as_str().map(str::to_owned);
        self.read(key, "a list of strings", |v| v.as_array()?.iter().map(word).collect())
    }

    /// Kinds of layers, by the names that transformers has for them now; nothing if the key is absent.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn layer_kinds(&self, key: &str) -> Result<Option<Vec<String>>> {
        let now = |kind: String| match kind.as_str() {
            "mamba" => String::from("linear_attention"),
            "attention" => "full_attention".into(),
            "deepseek_sparse_attention" | "qwen_sparse_attention" => "indexed_attention".into(),
            _ => kind,
        };
        Ok(self.words(key)?.map(|kinds| kinds.into_iter().map(now).collect()))
    }

    /// An error about this configuration's `key`.
    pub fn unsupported(&self, key: &str, expected: &str) -> Error {
        self.error(key, expected, self.lookup(key).as_ref())
    }
}
