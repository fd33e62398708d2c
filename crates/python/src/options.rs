//! [`GenerateOptions`]: how an answer is made, in the words of the command line.

use std::collections::BTreeMap;

use moeflux::DecodingOptions;
use moeflux::sampler::SamplerOptions;
use moeflux_server::AnswerForm;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use serde_json::{Map, Value};

use crate::convert::to_json;

/// As `moeflux run` and `chat` have it.
const MAX_TOKENS: usize = 1024;
const TEMPERATURE: f32 = 0.7;
const TOP_P: f32 = 0.95;

/// Keyword arguments of everything that generates.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Sampling, limits, stop texts.
    pub decoding: DecodingOptions,
    /// What the answer must be.
    pub form: Option<AnswerForm>,
    /// Functions that the chat template shows.
    pub tools: Option<Value>,
    /// Further variables of the chat template.
    pub variables: Map<String, Value>,
}

impl GenerateOptions {
    /// Those of a call.
    ///
    /// # Errors
    /// `TypeError` for names that mean nothing and values of the wrong type. What values mean is the engine's to judge.
    pub fn of(given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let sampler = SamplerOptions { temperature: TEMPERATURE, top_p: TOP_P, ..SamplerOptions::default() };
        let decoding = DecodingOptions { sampler, max_tokens: MAX_TOKENS, ..DecodingOptions::default() };
        let mut options = Self { decoding, form: None, tools: None, variables: Map::new() };
        for (name, value) in given.into_iter().flatten() {
            options.set(&name.extract::<String>()?, &value)?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let DecodingOptions { sampler, max_tokens, stop, logprobs, .. } = &mut self.decoding;
        // `None` is the default everywhere.
        if value.is_none() && NAMES.contains(&name) {
            return Ok(());
        }
        match name {
            "max_tokens" => *max_tokens = value.extract()?,
            "temperature" => sampler.temperature = value.extract()?,
            "top_k" => sampler.top_k = value.extract()?,
            "top_p" => sampler.top_p = value.extract()?,
            "min_p" => sampler.min_p = value.extract()?,
            "repetition_penalty" => sampler.repetition_penalty = value.extract()?,
            "presence_penalty" => sampler.presence_penalty = value.extract()?,
            "frequency_penalty" => sampler.frequency_penalty = value.extract()?,
            "penalty_window" => sampler.penalty_window = value.extract()?,
            "logit_bias" => sampler.logit_bias = value.extract::<BTreeMap<u32, f32>>()?,
            "seed" => sampler.seed = Some(value.extract()?),
            "stop" => *stop = texts(value)?,
            "logprobs" => *logprobs = Some(value.extract()?),
            "json_schema" => return self.set_form(AnswerForm::JsonSchema(to_json(value)?)),
            "regex" => return self.set_form(AnswerForm::Regex(value.extract()?)),
            "choice" => return self.set_form(AnswerForm::Choice(value.extract()?)),
            "grammar" => return self.set_form(AnswerForm::Lark(value.extract()?)),
            "tools" => self.tools = Some(to_json(value)?),
            "template" => match to_json(value)? {
                Value::Object(variables) => self.variables = variables,
                _ => return Err(PyTypeError::new_err("template: expected a dict of variables")),
            },
            _ => {
                let names = NAMES.join(", ");
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
const NAMES: [&str; 19] = [
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
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
    "template",
];

/// One text, or several.
fn texts(value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    match value.cast::<PyString>() {
        Ok(text) => Ok(vec![text.to_str()?.to_owned()]),
        Err(_) => value.extract(),
    }
}
