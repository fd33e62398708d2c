//! [`Session`]: logits, hidden states and router choices of one sequence.
//!
//! Long inputs are evaluated a chunk at a time, each on a visit of its own, so that answers go on beside them and Ctrl-C is
//! heard between two.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use moeflux::scheduler::Visit;
use moeflux::session::Session as EngineSession;
use moeflux::{Outputs, RouterChoices as EngineChoices};
use numpy::PyArray2;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arrays::rows;
use crate::error::{OrRaise, option, raise};
use crate::host::Host;
use crate::inbox::lock;

/// What is computed of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Logits,
    Hidden,
    Routing,
}

/// What was computed.
struct Evaluated {
    /// Logits or hidden states.
    rows: Vec<f32>,
    /// Of each layer with experts.
    choices: Vec<EngineChoices>,
}

/// Which rows `outputs` names.
fn outputs(py: Python<'_>, name: &str) -> PyResult<Outputs> {
    match name {
        "last" => Ok(Outputs::Last),
        "all" => Ok(Outputs::All),
        _ => Err(raise(py, &option("outputs", "last or all", name))),
    }
}

/// What the router of one layer chose.
#[pyclass(frozen, module = "moeflux")]
pub struct RouterChoices {
    /// Number of the layer, from 0.
    #[pyo3(get)]
    layer: usize,
    /// Ids of the chosen experts, (tokens, num_experts_per_tok), in the router's order.
    #[pyo3(get)]
    experts: Py<PyArray2<u32>>,
}

#[pymethods]
impl RouterChoices {
    fn __repr__(&self) -> String {
        format!("RouterChoices(layer={})", self.layer)
    }
}

/// One sequence of tokens: what has been evaluated of it, to be evaluated further, branched off or saved.
#[pyclass(frozen, module = "moeflux")]
pub struct Session {
    host: Arc<Host>,
    /// `None` while it is evaluated.
    held: Mutex<Option<EngineSession>>,
    /// What was saved with it.
    note: String,
}

impl Session {
    /// A session of the engine.
    pub fn new(host: Arc<Host>, session: EngineSession, note: String) -> Self {
        Self { host, held: Mutex::new(Some(session)), note }
    }

    /// An empty one.
    pub fn empty(host: &Arc<Host>, py: Python<'_>) -> PyResult<Self> {
        let session = host.visit(py, |visit| visit.engine.session())?;
        Ok(Self::new(Arc::clone(host), session, String::new()))
    }

    /// Calls `look` with the session as it is.
    pub fn peek<T>(&self, look: impl FnOnce(&mut EngineSession) -> T) -> PyResult<T> {
        match &mut *lock(&self.held) {
            Some(session) => Ok(look(session)),
            None => Err(in_use()),
        }
    }

    /// Calls `task` on the engine's thread with the session.
    fn visit<T: Send + 'static>(
        &self,
        py: Python<'_>,
        task: impl FnOnce(&mut Visit<'_>, &mut EngineSession) -> moeflux::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let mut session = lock(&self.held).take().ok_or_else(in_use)?;
        let (session, result) = self.host.visit(py, move |visit| {
            let result = task(visit, &mut session);
            (session, result)
        })?;
        *lock(&self.held) = Some(session);
        result.or_raise(py)
    }

    /// Appends `tokens`; after an error, or Ctrl-C, the session is as it was before.
    fn evaluate(
        &self,
        py: Python<'_>,
        tokens: &[u32],
        wanted: Wanted,
        outputs: Outputs,
    ) -> PyResult<(Evaluated, usize)> {
        let before = self.peek(|session| session.position())?;
        let evaluated = self.evaluate_chunks(py, tokens, wanted, outputs);
        if evaluated.is_err() {
            // The first error is the one to tell of.
            let _ = self.visit(py, move |visit, session| visit.engine.truncate(session, before));
        }
        evaluated
    }

    /// Appends tokens.
    pub fn extend(&self, py: Python<'_>, tokens: &[u32]) -> PyResult<()> {
        self.evaluate(py, tokens, Wanted::Logits, Outputs::Last).map(drop)
    }

    fn evaluate_chunks(
        &self,
        py: Python<'_>,
        tokens: &[u32],
        wanted: Wanted,
        outputs: Outputs,
    ) -> PyResult<(Evaluated, usize)> {
        let all = tokens.to_vec();
        let (chunk, width) = self.visit(py, move |visit, session| {
            visit.engine.check_tokens(session.position(), &all)?;
            let width = match wanted {
                Wanted::Hidden => visit.engine.hidden_size(),
                Wanted::Logits | Wanted::Routing => visit.engine.model().graph.vocab_size(),
            };
            Ok((visit.engine.chunk(), width))
        })?;
        let mut evaluated = Evaluated { rows: vec![], choices: vec![] };
        for part in tokens.chunks(chunk) {
            py.check_signals()?;
            let part = part.to_vec();
            let mut next = self.visit(py, move |visit, session| {
                visit.with_room(session, part.len(), |engine, session| {
                    let (rows, choices) = match wanted {
                        Wanted::Logits => (engine.eval(session, &part, outputs)?, vec![]),
                        Wanted::Hidden => (engine.eval_hidden(session, &part, outputs)?, vec![]),
                        Wanted::Routing => engine.eval_with_routing(session, &part, outputs)?,
                    };
                    Ok(Evaluated { rows, choices })
                })
            })?;
            if outputs == Outputs::Last || evaluated.rows.is_empty() {
                evaluated.rows = next.rows;
            } else {
                evaluated.rows.append(&mut next.rows);
            }
            if evaluated.choices.is_empty() {
                evaluated.choices = next.choices;
            } else {
                for (layer, more) in evaluated.choices.iter_mut().zip(next.choices) {
                    layer.experts.extend(more.experts);
                }
            }
        }
        Ok((evaluated, width))
    }
}

impl Session {
    /// Appends tokens and returns what is wanted of them, (1 or tokens, width).
    pub fn array<'py>(
        &self,
        py: Python<'py>,
        tokens: &[u32],
        wanted: Wanted,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (evaluated, width) = self.evaluate(py, tokens, wanted, self::outputs(py, outputs)?)?;
        rows(py, evaluated.rows, width)
    }
}

fn in_use() -> PyErr {
    PyRuntimeError::new_err("the session is being evaluated by another thread, or its model is closed")
}

#[pymethods]
impl Session {
    /// Appends tokens and returns logits, (1 or tokens, vocab_size).
    #[pyo3(signature = (tokens, outputs="last"))]
    fn eval<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        self.array(py, &tokens, Wanted::Logits, outputs)
    }

    /// Appends tokens and returns hidden states after the final norm, (1 or tokens, hidden_size).
    #[pyo3(signature = (tokens, outputs="last"))]
    fn eval_hidden<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        outputs: &str,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        self.array(py, &tokens, Wanted::Hidden, outputs)
    }

    /// As `eval`, and which experts every layer's router chose for each token. Only on the processor.
    #[pyo3(signature = (tokens, outputs="last"))]
    pub fn eval_with_routing<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        outputs: &str,
    ) -> PyResult<(Bound<'py, PyArray2<f32>>, Vec<RouterChoices>)> {
        let (evaluated, width) = self.evaluate(py, &tokens, Wanted::Routing, self::outputs(py, outputs)?)?;
        let choices = evaluated.choices.into_iter().map(|choices| {
            let experts = rows(py, choices.experts, choices.num_experts_per_tok)?.unbind();
            Ok(RouterChoices { layer: choices.layer, experts })
        });
        let choices = choices.collect::<PyResult<_>>()?;
        Ok((rows(py, evaluated.rows, width)?, choices))
    }

    /// A session with the first tokens of this one; nothing is evaluated or copied. Where the model has recurrent states, it
    /// begins at the last checkpoint up to `position`.
    #[pyo3(signature = (position=None))]
    fn fork(&self, position: Option<usize>) -> PyResult<Self> {
        let fork = self.peek(|session| session.fork(position.unwrap_or(session.position())))?;
        Ok(Self::new(Arc::clone(&self.host), fork, String::new()))
    }

    /// Forgets the tokens from `position` on.
    fn truncate(&self, py: Python<'_>, position: usize) -> PyResult<()> {
        self.visit(py, move |visit, session| visit.engine.truncate(session, position))
    }

    /// Keeps the present position, so that `truncate` and `fork` need not evaluate again what is before it.
    fn checkpoint(&self) -> PyResult<()> {
        self.peek(EngineSession::checkpoint)
    }

    /// Writes the session to a file, which is complete or not there, with a note for whoever loads it.
    #[pyo3(signature = (path, note=""))]
    pub fn save(&self, py: Python<'_>, path: PathBuf, note: &str) -> PyResult<()> {
        let note = note.to_owned();
        self.visit(py, move |visit, session| visit.engine.save(session, &path, &note))
    }

    /// Tokens evaluated so far.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        self.peek(|session| session.tokens().to_vec())
    }

    /// How many tokens have been evaluated.
    #[getter]
    fn position(&self) -> PyResult<usize> {
        self.peek(|session| session.position())
    }

    /// What was saved with it.
    #[getter]
    fn note(&self) -> &str {
        &self.note
    }
}
