//! Values from and to Python.

use moeflux::Result;
use moeflux::generation::ChatPrompt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyMapping, PyString};
use serde_json::Value;

use crate::host::Served;
use crate::options::GenerateOptions;

/// What Python calls JSON, by its own module.
pub fn to_json(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text: String = value.py().import("json")?.call_method1("dumps", (value,))?.extract()?;
    // Numbers that are none, which Python writes, are no JSON.
    serde_json::from_str(&text).map_err(|error| PyTypeError::new_err(error.to_string()))
}

/// The value that Python's own module makes of JSON.
pub fn from_json<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (value.to_string(),))
}

/// Bytes: a number, or a text such as `6GiB`.
pub fn to_bytes(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(text) = value.cast::<PyString>() {
        let text = text.to_str()?;
        return moeflux::memory::parse_size(text).map_err(crate::error::classes::OptionError::new_err);
    }
    value.extract()
}

/// Sizes: one, or several.
pub fn budgets(given: Option<Bound<'_, PyAny>>) -> PyResult<Vec<u64>> {
    let Some(given) = given else { return Ok(vec![]) };
    if given.cast::<PyString>().is_ok() {
        return Ok(vec![to_bytes(&given)?]);
    }
    match given.try_iter() {
        Ok(several) => several.map(|each| to_bytes(&each?)).collect(),
        Err(_) => Ok(vec![to_bytes(&given)?]),
    }
}

/// What is to be answered or continued.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Text as it stands.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Messages for the chat template.
    Messages(Vec<Value>),
}

/// A prompt as the model reads it.
#[derive(Debug)]
pub struct Encoded {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The text, if a chat template made it.
    pub chat: Option<String>,
}

impl Prompt {
    /// A text, token ids, or messages.
    pub fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(text) = value.cast::<PyString>() {
            return Ok(Self::Text(text.to_str()?.to_owned()));
        }
        let first = value.try_iter().ok().and_then(|mut items| items.next()).transpose()?;
        match first {
            Some(first) if first.cast::<PyMapping>().is_ok() => match to_json(value)? {
                Value::Array(messages) => Ok(Self::Messages(messages)),
                _ => Err(unfit(value)),
            },
            _ => value.extract().map(Self::Tokens).map_err(|_| unfit(value)),
        }
    }

    /// Its tokens. Takes a while for a long text.
    pub fn encode(&self, served: &Served, options: &GenerateOptions) -> Result<Encoded> {
        let Served { scheduler, constraints } = served;
        match self {
            Self::Text(text) => Ok(Encoded { tokens: scheduler.encode(text)?, chat: None }),
            Self::Tokens(tokens) => Ok(Encoded { tokens: tokens.clone(), chat: None }),
            Self::Messages(messages) => {
                let variables = &options.variables;
                let encoded = match &options.functions {
                    Some(functions) => constraints.render(messages, functions, variables)?,
                    None => scheduler.encode_chat(&ChatPrompt {
                        messages,
                        preface: None,
                        tools: None,
                        variables: Some(variables),
                        pictures: &[],
                    })?,
                };
                let chat = scheduler.template().is_some().then_some(encoded.text);
                Ok(Encoded { tokens: encoded.tokens, chat })
            }
        }
    }
}

fn unfit(value: &Bound<'_, PyAny>) -> PyErr {
    let kind = value.get_type();
    PyTypeError::new_err(format!(
        "a prompt is a text, token ids, or messages with role and content; got {kind}"
    ))
}
