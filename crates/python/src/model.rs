//! [`Model`]: everything that can be asked of an open model.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use numpy::PyArray2;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::answer::Answer;
use crate::chat::Chat;
use crate::convert::Prompt;
use crate::error::OrRaise;
use crate::host::Host;
use crate::options::GenerateOptions;
use crate::session::{RouterChoices, Session, Wanted};
use crate::stream::{Core, Stream};
use crate::tokenizer::Tokenizer;

/// Requests of a batch that are queued, for each that is evaluated at the same time: enough that the engine never waits for
/// Python.
const AHEAD: usize = 4;

/// An open model. It may be used from any number of threads and event loops at once.
#[pyclass(frozen, module = "moeflux")]
pub struct Model {
    host: Arc<Host>,
    path: PathBuf,
}

impl Model {
    /// The model of a checkpoint.
    pub fn new(host: Arc<Host>, path: PathBuf) -> Self {
        Self { host, path }
    }

    fn submit(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: &GenerateOptions,
    ) -> PyResult<Arc<Core>> {
        let encoded = self.host.encode(py, &Prompt::of(prompt)?, options)?;
        self.host.submit(py, encoded, options, None)
    }

    /// What is wanted of a prompt's tokens.
    fn array<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        wanted: Wanted,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = self.tokens(py, prompt)?;
        Session::empty(&self.host, py)?.array(py, &tokens, wanted, outputs)
    }

    /// Tokens of a prompt without options.
    fn tokens(&self, py: Python<'_>, prompt: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        Ok(self.host.encode(py, &Prompt::of(prompt)?, &GenerateOptions::of(None)?)?.tokens)
    }
}

#[pymethods]
impl Model {
    /// Answers messages, or continues a text or token ids; waits for the answer.
    #[pyo3(signature = (prompt, **options))]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answer> {
        self.submit(py, prompt, &GenerateOptions::of(options)?)?.answer(py)
    }

    /// As `generate`, but returns at once: what it returns is iterated over, also asynchronously, or awaited.
    #[pyo3(signature = (prompt, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Stream> {
        Ok(Stream(self.submit(py, prompt, &GenerateOptions::of(options)?)?))
    }

    /// The answers to many prompts, evaluated together, in their order. With `return_exceptions` an answer that failed is its
    /// exception; otherwise the first is raised and the others are given up.
    #[pyo3(signature = (prompts, *, return_exceptions=false, **options))]
    fn generate_batch<'py>(
        &self,
        py: Python<'py>,
        prompts: &Bound<'py, PyAny>,
        return_exceptions: bool,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let options = GenerateOptions::of(options)?;
        let ahead = AHEAD * self.host.served(py)?.scheduler.description().sequences;
        let answers = PyList::empty(py);
        let settle = |outcome: PyResult<Answer>| match outcome {
            Ok(answer) => answers.append(answer),
            Err(error) if return_exceptions && error.is_instance_of::<PyException>(py) => {
                answers.append(error.value(py))
            }
            Err(error) => Err(error),
        };
        let mut queued: VecDeque<PyResult<Arc<Core>>> = VecDeque::new();
        for prompt in prompts.try_iter()? {
            if queued.len() == ahead
                && let Some(first) = queued.pop_front()
            {
                settle(first.and_then(|core| core.answer(py)))?;
            }
            let submitted = self.submit(py, &prompt?, &options);
            if !return_exceptions && submitted.is_err() {
                submitted.as_ref().map(drop).map_err(|error| error.clone_ref(py))?;
            }
            queued.push_back(submitted);
        }
        for core in queued {
            settle(core.and_then(|core| core.answer(py)))?;
        }
        Ok(answers)
    }

    /// A conversation, which begins with a system message if there is one.
    #[pyo3(signature = (system=None))]
    fn chat(&self, system: Option<&str>) -> Chat {
        Chat::new(Arc::clone(&self.host), system)
    }

    /// A conversation that was saved, here or by `moeflux chat`.
    fn load_chat(&self, py: Python<'_>, path: PathBuf) -> PyResult<Chat> {
        Chat::load(&self.host, py, path)
    }

    /// An empty session.
    fn session(&self, py: Python<'_>) -> PyResult<Session> {
        Session::empty(&self.host, py)
    }

    /// A session that was saved.
    fn load_session(&self, py: Python<'_>, path: PathBuf) -> PyResult<Session> {
        let (session, note) = self.host.visit(py, move |visit| visit.load(&path))?.or_raise(py)?;
        Ok(Session::new(Arc::clone(&self.host), session, note))
    }

    /// Keeps what a session has evaluated, so that prompts which begin with its tokens skip that.
    fn keep(&self, py: Python<'_>, session: &Session) -> PyResult<()> {
        let fork = session.peek(|session| session.fork(session.position()))?;
        self.host.visit(py, move |visit| visit.keep(fork))
    }

    /// Logits of a prompt's tokens, (tokens, vocab_size), or of the last with `outputs="last"`.
    #[pyo3(signature = (prompt, outputs="all"))]
    fn logits<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        self.array(py, prompt, Wanted::Logits, outputs)
    }

    /// Hidden states of a prompt's tokens after the final norm, (tokens, hidden_size), or of the last with `outputs="last"`.
    #[pyo3(signature = (prompt, outputs="all"))]
    fn hidden_states<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        self.array(py, prompt, Wanted::Hidden, outputs)
    }

    /// Which experts every layer's router chooses for each token of a prompt. Only on the processor.
    fn routing(&self, py: Python<'_>, prompt: &Bound<'_, PyAny>) -> PyResult<Vec<RouterChoices>> {
        let tokens = self.tokens(py, prompt)?;
        Ok(Session::empty(&self.host, py)?.eval_with_routing(py, tokens, "last")?.1)
    }

    /// Embeddings of several texts, (texts, hidden_size), each of length 1: the hidden state of the last token, or with
    /// `pooling="mean"` the mean over all.
    #[pyo3(signature = (texts, pooling="last"))]
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: &Bound<'py, PyAny>,
        pooling: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let inputs = texts.try_iter()?.map(|text| self.tokens(py, &text?)).collect::<PyResult<_>>()?;
        crate::embed::embed(py, &self.host, inputs, pooling)
    }

    /// Token ids of a prompt, as `generate` reads it.
    #[pyo3(signature = (prompt, **options))]
    fn encode(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<u32>> {
        Ok(self.host.encode(py, &Prompt::of(prompt)?, &GenerateOptions::of(options)?)?.tokens)
    }

    /// The text that the chat template makes of messages, ready for the model's answer; None if the model has no template.
    #[pyo3(signature = (messages, **options))]
    fn apply_chat_template(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Option<String>> {
        Ok(self.host.encode(py, &Prompt::of(messages)?, &GenerateOptions::of(options)?)?.chat)
    }

    /// The model's tokenizer.
    #[getter]
    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::new(Arc::clone(&self.host))
    }

    /// The source of its chat template, if it has one.
    #[getter]
    fn chat_template(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let served = self.host.served(py)?;
        Ok(served.scheduler.template().map(|template| template.source().to_owned()))
    }

    /// The checkpoint.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// What it runs on.
    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.host.served(py)?.scheduler.description().backend.clone())
    }

    /// Maximum positions of a sequence.
    #[getter]
    fn context(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.host.served(py)?.scheduler.description().context)
    }

    /// Sequences evaluated at the same time.
    #[getter]
    fn sequences(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.host.served(py)?.scheduler.description().sequences)
    }

    /// Tokens that the model knows; its tokenizer may have fewer.
    #[getter]
    fn vocab_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.host.served(py)?.scheduler.description().vocab_size)
    }

    /// Width of hidden states and embeddings.
    #[getter]
    fn hidden_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.host.served(py)?.scheduler.description().hidden_size)
    }

    /// What has been done so far, and how things stand.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let figures = self.host.served(py)?.scheduler.figures();
        let stats = PyDict::new(py);
        stats.set_item("waiting", figures.waiting)?;
        stats.set_item("running", figures.running)?;
        stats.set_item("finished", figures.finished)?;
        stats.set_item("cancelled", figures.cancelled)?;
        stats.set_item("failed", figures.failed)?;
        stats.set_item("prompt_tokens", figures.prompt_tokens)?;
        stats.set_item("cached_tokens", figures.cached_tokens)?;
        stats.set_item("generated_tokens", figures.generated_tokens)?;
        stats.set_item("busy_seconds", figures.busy_seconds)?;
        stats.set_item("expert_hits", figures.experts.hits)?;
        stats.set_item("expert_misses", figures.experts.misses)?;
        stats.set_item("bytes_read", figures.experts.bytes_read)?;
        stats.set_item("stall_seconds", figures.experts.stall.as_secs_f64())?;
        Ok(stats)
    }

    /// Gives up all requests and frees the memory.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.host.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state =
            if self.host.is_closed() { "closed".to_owned() } else { self.backend(py).unwrap_or_default() };
        format!("Model({:?}, {state})", self.path.display().to_string())
    }
}
