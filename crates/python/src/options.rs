//! [`GenerateOptions`]: how an answer is made, in the words of the command line.

use std::collections::BTreeMap;

use moeflux::DecodingOptions;
use moeflux::sampler::{SAMPLER_NUMBERS, SamplerOptions};
use moeflux_server::{AnswerForm, Functions};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use serde_json::{Map, Value};

use crate::convert::to_json;
use crate::error::OrRaise;

/// As `moeflux run` and `chat` have it.
const MAX_TOKENS: usize = 1024;

/// Keyword arguments of everything that generates.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Sampling, limits, stop texts.
    pub decoding: DecodingOptions,
    /// What the answer must be.
    pub form: Option<AnswerForm>,
    /// Functions that may be called.
    pub functions: Option<Functions>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    /// Further variables of the chat template.
    pub variables: Map<String, Value>,
    /// Name of the adapter to answer with.
    pub adapter: Option<String>,
}

impl GenerateOptions {
    /// Those of a call.
    ///
    /// # Errors
    /// `TypeError` for names that mean nothing and values of the wrong type. What values mean is the engine's to judge.
    pub fn of(given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let decoding = DecodingOptions {
            sampler: SamplerOptions::of_chats(),
            max_tokens: MAX_TOKENS,
            ..DecodingOptions::default()
        };
        let (form, functions, variables) = (None, None, Map::new());
        let mut options =
            Self { decoding, form, functions, tools: None, tool_choice: None, variables, adapter: None };
        let Some(given) = given else { return Ok(options) };
        for (name, value) in given {
            options.set(&name.extract::<String>()?, &value)?;
        }
        if let Some(tools) = &options.tools {
            let functions = Functions::new(tools, options.tool_choice.as_ref(), true);
            options.functions = functions.or_raise(given.py())?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let DecodingOptions { sampler, max_tokens, stop, logprobs, .. } = &mut self.decoding;
        // `None` is the default everywhere.
        if value.is_none() && names().any(|known| known == name) {
            return Ok(());
        }
        if let Some(number) = sampler.number_mut(name) {
            *number = value.extract()?;
            return Ok(());
        }
        match name {
            "max_tokens" => *max_tokens = value.extract()?,
            "top_k" => sampler.top_k = value.extract()?,
            "penalty_window" => sampler.penalty_window = value.extract()?,
            "logit_bias" => sampler.logit_bias = value.extract::<BTreeMap<u32, f32>>()?,
            "adapter" => self.adapter = Some(value.extract()?),
            "seed" => sampler.seed = Some(value.extract()?),
            "stop" => *stop = texts(value)?,
            "logprobs" => *logprobs = Some(value.extract()?),
            "json_schema" => return self.set_form(AnswerForm::JsonSchema(to_json(value)?)),
            "regex" => return self.set_form(AnswerForm::Regex(value.extract()?)),
            "choice" => return self.set_form(AnswerForm::Choice(value.extract()?)),
            "grammar" => return self.set_form(AnswerForm::Lark(value.extract()?)),
            "tools" => self.tools = Some(to_json(value)?),
            "tool_choice" => self.tool_choice = Some(to_json(value)?),
            "template" => match to_json(value)? {
                Value::Object(variables) => self.variables = variables,
                _ => return Err(PyTypeError::new_err("template: expected a dict of variables")),
            },
            _ => {
                let names = names().collect::<Vec<_>>().join(", ");
                let message = format!("unexpected keyword argument {name:?}; there are {names}");
                return Err(PyTypeError::new_err(message));
            }
        }
        Ok(())
    }

    fn set_form(&mut self, form: AnswerForm) -> PyResult<()> {
        match self.form.replace(form) {
            None => Ok(()),
            Some(_) => Err(PyTypeError::new_err("only one of json_schema, regex, choice and grammar")),
        }
    }
}

/// What [`GenerateOptions::set`] knows.
fn names() -> impl Iterator<Item = &'static str> {
    SAMPLER_NUMBERS.into_iter().chain(OTHERS)
}

/// Options that are no numbers of the sampler's.
const OTHERS: [&str; 15] = [
    "adapter",
    "max_tokens",
    "top_k",
    "penalty_window",
    "logit_bias",
    "seed",
    "stop",
    "logprobs",
    "json_schema",
    "regex",
    "choice",
    "grammar",
    "tools",
    "tool_choice",
    "template",
];

/// One text, or several.
fn texts(value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    match value.cast::<PyString>() {
        Ok(text) => Ok(vec![text.to_str()?.to_owned()]),
        Err(_) => value.extract(),
    }
}
