//! Requests for answers: several of them to one prompt or more, that wait as one.

use std::sync::{Arc, Mutex};

use super::{Event, Request, Sink, lock};
use crate::decoding::{Constraint, DecodingOptions};
use crate::pictures::Picture;

/// Prompts that are answered the same way, each several times. In the queue they count as one request.
#[derive(Default)]
pub struct ManyRequest {
    /// Token ids of each prompt, at least one.
    pub prompts: Vec<Vec<u32>>,
    /// Answers to each prompt.
    pub answers: usize,
    /// How answers are generated; the second to a prompt has the seed after that of the first, and so on.
    pub options: DecodingOptions,
    /// Limits every answer, as a grammar does.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Names a conversation that is kept on disk; the first answer to each prompt continues it.
    pub conversation: Option<String>,
    /// The adapter to answer with, by its name; by default that of [`Engine::set_adapter`](crate::Engine::set_adapter).
    pub adapter: Option<String>,
    /// What each prompt shows.
    pub pictures: Vec<Arc<Picture>>,
}

impl std::fmt::Debug for ManyRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ManyRequest({} prompts, {} answers, {:?})", self.prompts.len(), self.answers, self.options)
    }
}

impl From<Request> for ManyRequest {
    fn from(request: Request) -> Self {
        let Request { prompt, options, constraint, conversation, adapter, pictures } = request;
        Self { prompts: vec![prompt], answers: 1, options, constraint, conversation, adapter, pictures }
    }
}

/// Where the events of a request's answers go, with the number of the answer.
pub(super) type ManySink = Box<dyn FnMut(usize, Event) + Send>;

/// Answers that have not begun.
pub(super) struct Waiting {
    request: ManyRequest,
    /// Number of the next answer: all those to the first prompt come first.
    next: usize,
    sink: Arc<Mutex<ManySink>>,
}

impl Waiting {
    /// Those of a request with at least one prompt and one answer.
    pub(super) fn new(request: ManyRequest, sink: ManySink) -> Self {
        Self { request, next: 0, sink: Arc::new(Mutex::new(sink)) }
    }

    pub(super) fn left(&self) -> usize {
        self.request.prompts.len() * self.request.answers - self.next
    }

    /// Tokens that it keeps.
    pub(super) fn tokens(&self) -> usize {
        self.request.prompts.iter().map(Vec::len).sum()
    }

    /// The prompt of the next answer.
    pub(super) fn prompt(&self) -> &[u32] {
        self.request.prompts.get(self.next / self.request.answers).map_or(&[], Vec::as_slice)
    }

    /// The adapter that it asks for.
    pub(super) fn adapter(&self) -> Option<&str> {
        self.request.adapter.as_deref()
    }

    /// The next answer; its prompt and the constraint are copied if others need them.
    ///
    /// # Panics
    /// If none is left.
    pub(super) fn take(&mut self) -> (Request, Sink) {
        let is_last = self.left() == 1;
        let ManyRequest { prompts, answers, options, constraint, conversation, adapter, pictures } =
            &mut self.request;
        let (number, prompt, of_prompt) = (self.next, self.next / *answers, self.next % *answers);
        let mut options = options.clone();
        options.sampler.seed = options.sampler.seed.map(|seed| seed.wrapping_add(of_prompt as u64));
        let prompt = &mut prompts[prompt];
        let request = Request {
            prompt: if of_prompt + 1 == *answers { std::mem::take(prompt) } else { prompt.clone() },
            options,
            constraint: if is_last { constraint.take() } else { constraint.as_ref().map(|c| c.fork()) },
            conversation: conversation.clone().filter(|_| of_prompt == 0),
            adapter: adapter.clone(),
            pictures: pictures.clone(),
        };
        self.next += 1;
        let sink = Arc::clone(&self.sink);
        (request, Box::new(move |event| (lock(&sink))(number, event)))
    }
}
