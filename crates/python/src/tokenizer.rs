//! [`Tokenizer`]: text and token ids.

use std::sync::Arc;

use moeflux::AddSpecial;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::host::Host;

/// A model's tokenizer.
#[pyclass(frozen, module = "moeflux")]
pub struct Tokenizer {
    host: Arc<Host>,
}

impl Tokenizer {
    /// That of a model.
    pub fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    /// What `ask` says.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&moeflux::tokenizer::Tokenizer) -> T + Send,
    ) -> PyResult<T> {
        let served = self.host.served(py)?;
        Ok(py.detach(|| ask(served.scheduler.tokenizer())))
    }
}

#[pymethods]
impl Tokenizer {
    /// Token ids of a text. Special tokens that are written out in it are such; those that the tokenizer puts around a text, such
    /// as BOS, come with `add_special`.
    #[pyo3(signature = (text, add_special=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        let special = if add_special { AddSpecial::Yes } else { AddSpecial::No };
        self.ask(py, |tokenizer| tokenizer.encode(text, special))?.or_raise(py)
    }

    /// The text of token ids.
    #[pyo3(signature = (tokens, skip_special=true))]
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        self.ask(py, |tokenizer| tokenizer.decode(&tokens, skip_special))?.or_raise(py)
    }

    /// The id of a token, None if there is no such token.
    fn token_to_id(&self, py: Python<'_>, token: &str) -> PyResult<Option<u32>> {
        self.ask(py, |tokenizer| tokenizer.token_to_id(token))
    }

    /// The token of an id, as the vocabulary writes it.
    fn id_to_token(&self, py: Python<'_>, token: u32) -> PyResult<Option<String>> {
        self.ask(py, |tokenizer| tokenizer.id_to_token(token).map(|token| token.into_owned()))
    }

    /// Number of tokens; the model may have more.
    #[getter]
    fn vocab_size(&self, py: Python<'_>) -> PyResult<usize> {
        self.ask(py, moeflux::tokenizer::Tokenizer::vocab_size)
    }

    /// Tokens that end texts.
    #[getter]
    fn eos_ids(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.ask(py, |tokenizer| tokenizer.eos_ids().to_vec())
    }

    /// The token that begins texts, if there is one.
    #[getter]
    fn bos_id(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        self.ask(py, moeflux::tokenizer::Tokenizer::bos_id)
    }
}
