//! Requests for embeddings: several inputs, each a sequence of its own, whose results go to one sink.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::embeddings::{Pooled, Pooling, no_tokens};
use crate::engine::Outputs;
use crate::{Error, Result};

/// Texts whose embeddings are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmbedRequest {
    /// Token ids of each text, at least one.
    pub inputs: Vec<Vec<u32>>,
    /// How hidden states become an embedding.
    pub pooling: Pooling,
}

impl EmbedRequest {
    /// Refuses what could not be embedded.
    pub(super) fn check(&self, vocab_size: usize, context: usize) -> Result<()> {
        if self.inputs.is_empty() || self.inputs.iter().any(Vec::is_empty) {
            return Err(no_tokens());
        }
        for input in &self.inputs {
            if input.len() > context {
                return Err(Error::ContextFull { wanted: input.len(), context });
            }
            if let Some(position) = input.iter().position(|token| *token as usize >= vocab_size) {
                return Err(Error::Token { token: input[position], position, vocab_size });
            }
        }
        Ok(())
    }
}

type EmbedSink = Box<dyn FnMut(usize, Result<Vec<f32>>) + Send>;

/// Where the embeddings of a request's inputs go.
pub(super) struct Results(Mutex<Open>);

struct Open {
    sink: EmbedSink,
    /// Inputs without a result.
    left: usize,
    /// It has failed or was given up, and is counted as that.
    over: bool,
}

impl Results {
    /// Gives an input's embedding; true if it completes the request.
    fn give(&self, input: usize, embedding: Vec<f32>) -> bool {
        let mut open = lock(&self.0);
        (open.sink)(input, Ok(embedding));
        open.left -= 1;
        open.left == 0 && !open.over
    }

    /// Says that an input failed; true if it is the request's first.
    fn fail(&self, input: usize, error: Error) -> bool {
        let mut open = lock(&self.0);
        (open.sink)(input, Err(error));
        open.left -= 1;
        !std::mem::replace(&mut open.over, true)
    }

    /// Notes that the client went away; true if that is what the request ends by.
    pub(super) fn give_up(&self) -> bool {
        !std::mem::replace(&mut lock(&self.0).over, true)
    }
}

/// Inputs that wait.
pub(super) struct Inputs {
    waiting: VecDeque<(usize, Vec<u32>)>,
    pooling: Pooling,
    pub(super) results: Arc<Results>,
}

impl Inputs {
    pub(super) fn new(request: EmbedRequest, sink: EmbedSink) -> Self {
        let results = Results(Mutex::new(Open { sink, left: request.inputs.len(), over: false }));
        let waiting = request.inputs.into_iter().enumerate().collect();
        Self { waiting, pooling: request.pooling, results: Arc::new(results) }
    }

    /// The first input's tokens and what is made of them.
    pub(super) fn take(&mut self) -> Option<(Vec<u32>, Embedding)> {
        let (input, tokens) = self.waiting.pop_front()?;
        let results = Arc::clone(&self.results);
        Some((tokens, Embedding { input, pooling: self.pooling, pooled: Pooled::default(), results }))
    }

    /// Tokens that wait.
    pub(super) fn tokens(&self) -> usize {
        self.waiting.iter().map(|(_, tokens)| tokens.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// An embedding in the making.
pub(super) struct Embedding {
    /// Number of the input in its request.
    input: usize,
    pooling: Pooling,
    pub(super) pooled: Pooled,
    results: Arc<Results>,
}

impl Embedding {
    /// The hidden states that it takes of a chunk, which may be the last.
    pub(super) fn outputs(&self, is_last: bool) -> Option<Outputs> {
        let outputs = self.pooling.outputs();
        (is_last || outputs == Outputs::All).then_some(outputs)
    }

    /// As [`Results::give`].
    pub(super) fn give(&self) -> bool {
        self.results.give(self.input, self.pooled.embedding())
    }

    /// As [`Results::fail`].
    pub(super) fn fail(&self, error: Error) -> bool {
        self.results.fail(self.input, error)
    }

    /// As [`Results::give_up`].
    pub(super) fn give_up(&self) -> bool {
        self.results.give_up()
    }
}
