//! [`Answer`], and the [`Piece`]s that it comes in.

use moeflux::scheduler::{Done, Usage as EngineUsage};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use moeflux::Finish;
use moeflux_server::AnswerPart;
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::convert::from_json;

/// A piece of an answer's text.
#[pyclass(frozen, module = "moeflux", eq)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    #[pyo3(get)]
    text: String,
    /// Whether the model is thinking, not answering.
    #[pyo3(get)]
    reasoning: bool,
}

#[pymethods]
impl Piece {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        let reasoning = if self.reasoning { ", reasoning=True" } else { "" };
        format!("Piece({:?}{reasoning})", self.text)
    }
}

/// A call of a function.
#[pyclass(frozen, module = "moeflux")]
#[derive(Debug, Clone)]
pub struct ToolCall {
    /// What the result refers to.
    #[pyo3(get)]
    id: String,
    /// The function.
    #[pyo3(get)]
    name: String,
    text: String,
    complete: bool,
}

#[pymethods]
impl ToolCall {
    /// Its arguments; `None` if the answer was cut off within them.
    #[getter]
    fn arguments<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let arguments = self.complete.then(|| serde_json::from_str::<Value>(&self.text).ok()).flatten();
        arguments.map(|arguments| from_json(py, &arguments)).transpose()
    }

    fn __repr__(&self) -> String {
        format!("ToolCall({}({}))", self.name, self.text)
    }
}

impl ToolCall {
    fn new(name: String) -> Self {
        // Nine letters or digits are what every template takes.
        let id = format!("c{:08x}", RandomState::new().hash_one(&name) as u32);
        Self { id, name, text: String::new(), complete: false }
    }

    fn message(&self) -> Value {
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}})
    }
}

/// Log-probabilities where a token was chosen.
#[pyclass(frozen, module = "moeflux")]
#[derive(Debug, Clone)]
pub struct TokenLogprobs {
    /// The token.
    #[pyo3(get)]
    token: u32,
    /// Its log-probability.
    #[pyo3(get)]
    logprob: f32,
    /// The most likely tokens with theirs, the likeliest first.
    #[pyo3(get)]
    top: Vec<(u32, f32)>,
}

impl From<moeflux::decoding::TokenLogprobs> for TokenLogprobs {
    fn from(from: moeflux::decoding::TokenLogprobs) -> Self {
        let top = from.top.iter().map(|each| (each.token, each.logprob)).collect();
        Self { token: from.chosen.token, logprob: from.chosen.logprob, top }
    }
}

#[pymethods]
impl TokenLogprobs {
    fn __repr__(&self) -> String {
        format!("TokenLogprobs(token={}, logprob={})", self.token, self.logprob)
    }
}

/// What an answer took.
#[pyclass(frozen, get_all, module = "moeflux")]
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    prompt_tokens: usize,
    /// Of these, tokens that an earlier request had left evaluated.
    cached_tokens: usize,
    /// Tokens of the answer, without the one that ends texts.
    completion_tokens: usize,
    /// From submission to admission.
    queued_seconds: f64,
    /// From submission to the first token.
    first_token_seconds: f64,
    /// From submission to the end.
    total_seconds: f64,
    /// The answer's share of experts that were in memory.
    expert_hits: u64,
    /// Of experts that were not.
    expert_misses: u64,
    /// Of bytes read.
    bytes_read: u64,
    /// Of the time that computing stood still waiting for reads.
    stall_seconds: f64,
}

impl From<&EngineUsage> for Usage {
    fn from(usage: &EngineUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            queued_seconds: usage.queued.as_secs_f64(),
            first_token_seconds: usage.first_token.as_secs_f64(),
            total_seconds: usage.total.as_secs_f64(),
            expert_hits: usage.experts.hits,
            expert_misses: usage.experts.misses,
            bytes_read: usage.experts.bytes_read,
            stall_seconds: usage.experts.stall.as_secs_f64(),
        }
    }
}

#[pymethods]
impl Usage {
    fn __repr__(&self) -> String {
        format!("{self:?}")
    }
}

/// A complete answer.
#[pyclass(frozen, get_all, module = "moeflux")]
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// What was answered, without reasoning.
    text: String,
    /// What the model thought.
    reasoning: String,
    /// Functions that it calls.
    tool_calls: Vec<ToolCall>,
    /// Tokens, without the one that ended the answer.
    tokens: Vec<u32>,
    /// Why it ended: `end_of_text`, `max_tokens`, `context_full` or `stopped`.
    finish: &'static str,
    /// The stop text that was found.
    stopped_by: Option<String>,
    /// If they were asked for, those of each token.
    logprobs: Option<Vec<TokenLogprobs>>,
    /// The seed in use, which repeats the answer; `None` if it was stopped.
    seed: Option<u64>,
    /// What it took; `None` if it was stopped by the caller.
    usage: Option<Usage>,
}

#[pymethods]
impl Answer {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("Answer({:?}, {} tokens, finish={:?})", self.text, self.tokens.len(), self.finish)
    }
}

impl Answer {
    /// Tokens, without the one that ended the answer.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The message that it is.
    pub fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.text});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.tool_calls.is_empty() {
            message["tool_calls"] = self.tool_calls.iter().map(ToolCall::message).collect();
        }
        message
    }

    /// Adds a part; gives its text if it is one of the pieces that streams have.
    pub fn push(&mut self, part: AnswerPart) -> Option<Piece> {
        match part {
            AnswerPart::Text(text) => {
                self.text.push_str(&text);
                return Some(Piece { text, reasoning: false });
            }
            AnswerPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                return Some(Piece { text, reasoning: true });
            }
            AnswerPart::CallBegin(name) => self.tool_calls.push(ToolCall::new(name)),
            AnswerPart::Arguments(text) => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.text.push_str(&text);
                }
            }
            AnswerPart::CallEnd => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.complete = true;
                }
            }
        }
        None
    }

    /// Adds a token.
    pub fn push_token(&mut self, token: Option<u32>, logprobs: Option<moeflux::decoding::TokenLogprobs>) {
        self.tokens.extend(token);
        if let Some(logprobs) = logprobs {
            self.logprobs.get_or_insert_default().push(logprobs.into());
        }
    }

    /// Says how it ended; without `done` the caller stopped it.
    pub fn end(&mut self, done: Option<Done>) {
        self.finish = match done.as_ref().map(|done| done.finish) {
            Some(Finish::EndOfText) => "end_of_text",
            Some(Finish::MaxTokens) => "max_tokens",
            Some(Finish::ContextFull) => "context_full",
            Some(Finish::Stopped) | None => "stopped",
        };
        self.usage = done.as_ref().map(|done| Usage::from(&done.usage));
        self.seed = done.as_ref().map(|done| done.usage.seed);
        self.stopped_by = done.and_then(|done| done.stopped_by);
    }
}
