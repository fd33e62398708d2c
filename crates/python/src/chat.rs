//! [`Chat`]: a conversation, whose turns evaluate only what is new.
//!
//! It is messages; what has been evaluated of them is among the scheduler's cached sessions. Should it have been evicted, it is
//! evaluated again.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use moeflux::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Value, json};

use crate::answer::Answer;
use crate::convert::{Prompt, from_json};
use crate::error::OrRaise;
use crate::host::Host;
use crate::inbox::lock;
use crate::options::GenerateOptions;
use crate::session::Session;
use crate::stream::{AtEnd, Core, Stream};

#[derive(Debug, Default)]
struct State {
    messages: Vec<Value>,
    /// What the model has read and written last.
    tokens: Vec<u32>,
    /// Whether an answer is under way.
    answering: bool,
    /// Messages that there were before it.
    asked: usize,
}

impl State {
    /// There is no answer: what asked for it goes, too.
    fn give_up(&mut self) {
        self.answering = false;
        self.messages.truncate(self.asked);
    }
}

/// A conversation.
#[pyclass(frozen, module = "moeflux")]
pub struct Chat {
    host: Arc<Host>,
    state: Arc<Mutex<State>>,
}

impl Chat {
    /// A conversation that begins with `system`, if there is such a message.
    pub fn new(host: Arc<Host>, system: Option<&str>) -> Self {
        let system = system.filter(|text| !text.is_empty());
        let messages = system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
        Self { host, state: Arc::new(Mutex::new(State { messages, ..State::default() })) }
    }

    /// What is in a file.
    pub fn load(host: &Arc<Host>, py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let loaded = host.visit(py, move |visit| {
            let (session, note) = visit.load(&path)?;
            let messages: Vec<Value> = serde_json::from_str(&note).map_err(|error| Error::SessionFile {
                path,
                what: "note",
                expected: "messages beside the session".to_owned(),
                got: error.to_string(),
            })?;
            let tokens = session.tokens().to_vec();
            visit.keep(session);
            Ok((messages, tokens))
        });
        let (messages, tokens) = loaded?.or_raise(py)?;
        let state = State { messages, tokens, ..State::default() };
        Ok(Self { host: Arc::clone(host), state: Arc::new(Mutex::new(state)) })
    }

    fn begin(
        &self,
        py: Python<'_>,
        text: Option<&str>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Arc<Core>> {
        let options = GenerateOptions::of(options)?;
        let messages = {
            let mut state = lock(&self.state);
            if state.answering {
                return Err(PyRuntimeError::new_err("the last message is still being answered"));
            }
            state.answering = true;
            state.asked = state.messages.len();
            state.messages.extend(text.map(|text| json!({"role": "user", "content": text})));
            state.messages.clone()
        };
        self.submit(py, messages, &options).inspect_err(|_| lock(&self.state).give_up())
    }

    fn submit(&self, py: Python<'_>, messages: Vec<Value>, options: &GenerateOptions) -> PyResult<Arc<Core>> {
        let encoded = self.host.encode(py, &Prompt::Messages(messages), options)?;
        let (state, prompt) = (Arc::clone(&self.state), encoded.tokens.clone());
        let at_end: AtEnd = Box::new(move |answer, error| {
            let mut state = lock(&state);
            if error.is_some() || answer.tokens().is_empty() {
                return state.give_up();
            }
            state.answering = false;
            state.messages.push(answer.message());
            state.tokens = [&prompt, answer.tokens()].concat();
        });
        self.host.submit(py, encoded, options, Some(at_end))
    }

    /// What `change` does, unless an answer is under way.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> PyResult<T> {
        let mut state = lock(&self.state);
        if state.answering {
            return Err(PyRuntimeError::new_err("the last message is still being answered"));
        }
        Ok(change(&mut state))
    }
}

#[pymethods]
impl Chat {
    /// Answers `text` as the next message of the user; without it, the messages that there are, such as results of functions.
    #[pyo3(signature = (text=None, **options))]
    fn ask(
        &self,
        py: Python<'_>,
        text: Option<&str>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answer> {
        self.begin(py, text, options)?.answer(py)
    }

    /// As `ask`, a piece at a time; functions that are called are part of the whole answer only. If the stream is stopped or dropped, what was said
    /// until then stays part of the conversation; if nothing was said, the message is no part of it.
    #[pyo3(signature = (text=None, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        text: Option<&str>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Stream> {
        Ok(Stream(self.begin(py, text, options)?))
    }

    /// All messages.
    #[getter]
    fn messages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let messages = lock(&self.state).messages.clone();
        from_json(py, &Value::Array(messages))
    }

    /// Appends a message without answering it; the result of a function, with role `tool`, says which call it is of.
    #[pyo3(signature = (role, content, tool_call_id=None))]
    fn push(&self, role: &str, content: &str, tool_call_id: Option<&str>) -> PyResult<()> {
        let mut message = json!({"role": role, "content": content});
        if let Some(id) = tool_call_id {
            message["tool_call_id"] = json!(id);
        }
        self.change(|state| state.messages.push(message))
    }

    /// Takes back the user's last message and what followed it; returns the message, or None if there is none.
    fn take_back(&self) -> PyResult<Option<String>> {
        self.change(|state| {
            let last = state.messages.iter().rposition(|message| message["role"] == "user")?;
            let taken = state.messages.split_off(last);
            taken[0]["content"].as_str().map(str::to_owned)
        })
    }

    /// Writes messages and what has been evaluated of them to a file, as `/save` of `moeflux chat` does; each can open the other's.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let (tokens, note) =
            self.change(|state| (state.tokens.clone(), Value::Array(state.messages.clone()).to_string()))?;
        let known = tokens.clone();
        let cached = self.host.visit(py, move |visit| visit.recall(&known))?;
        let rest = cached.position();
        let session = Session::new(Arc::clone(&self.host), cached, String::new());
        session.extend(py, &tokens[rest..])?;
        session.save(py, path, &note)
    }
}
