//! From the scheduler's events to what the APIs return.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use moeflux::Finish;
use moeflux::decoding::TokenLogprobs;
use moeflux::scheduler::{Done, Event, ManyRequest, Progress, Ticket};
use tokio::sync::mpsc;

use crate::App;
use crate::error::ApiError;
use crate::log::Tally;
use crate::markup::{Collected, Delta, Parts, Splitter};

/// What a request's answers are made of.
#[derive(Debug)]
pub(crate) enum Update {
    /// Something to show.
    Delta(Delta),
    /// A token's log-probabilities.
    Logprobs(TokenLogprobs),
    /// More of the prompt is evaluated.
    Progress(Progress),
    /// The answer is complete.
    Done(Done),
    /// The answer failed.
    Failed(ApiError),
}

/// Answers under way: several to one request if it asks for that. Dropping them cancels them.
pub(crate) struct Answers {
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    splitters: Vec<Splitter>,
    ready: VecDeque<(usize, Update)>,
    left: usize,
    prompt_tokens: usize,
    tally: Arc<Tally>,
    _ticket: Ticket,
    /// Keeps the model loaded.
    _app: Arc<App>,
}

impl Answers {
    /// Queues a request, all of its answers or none.
    pub(crate) fn submit(
        app: &Arc<App>,
        request: ManyRequest,
        parts: Parts,
        tally: Arc<Tally>,
    ) -> Result<Self, ApiError> {
        // As many events as tokens can wait for a slow client; no more than the limits of its request allow.
        let (sender, events) = mpsc::unbounded_channel();
        let left = request.prompts.len() * request.answers;
        tally.prompt(request.prompts.iter().map(Vec::len).sum::<usize>() * request.answers);
        let prompt_tokens = request.prompts.first().map_or(0, Vec::len);
        let sink = move |index, event| drop(sender.send((index, event)));
        let ticket = app.scheduler.submit_many_to(request, sink)?;
        let splitters = (0..left).map(|_| Splitter::new(parts.clone())).collect();
        Ok(Self {
            events,
            splitters,
            ready: VecDeque::new(),
            left,
            prompt_tokens,
            tally,
            _ticket: ticket,
            _app: Arc::clone(app),
        })
    }

    /// Tokens of the first answer's prompt.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// The next update and which answer it belongs to; `None` after all answers.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return Poll::Ready(Some(update));
            }
            if self.left == 0 {
                return Poll::Ready(None);
            }
            match self.events.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some((index, event))) => self.take(index, event),
                Poll::Ready(None) => {
                    self.left = 0;
                    let error = ApiError::from(moeflux::Error::ShuttingDown);
                    self.tally.failed(&error.message);
                    self.ready.push_back((0, Update::Failed(error)));
                }
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) {
        let mut deltas = vec![];
        let last = match event {
            Event::Piece(piece) => {
                if piece.token.is_some() {
                    self.tally.token();
                }
                self.ready.extend(piece.logprobs.map(|l| (index, Update::Logprobs(l))));
                self.splitters[index].push(&piece.text, &mut deltas);
                None
            }
            // All answers have the same prompt, or nearly so.
            Event::Progress(progress) => (index == 0).then_some(Update::Progress(progress)),
            Event::Done(done) => {
                if let Some(warning) = &done.warning {
                    tracing::warn!("{warning}");
                }
                self.tally.done(&done.usage);
                let cut = matches!(done.finish, Finish::MaxTokens | Finish::ContextFull);
                self.splitters[index].finish(cut, &mut deltas);
                Some(Update::Done(done))
            }
            Event::Failed(error) => {
                self.tally.failed(&error.to_string());
                Some(Update::Failed(ApiError::from(error)))
            }
        };
        self.ready.extend(deltas.into_iter().map(|delta| (index, Update::Delta(delta))));
        if let Some(last) = last {
            self.left -= usize::from(!matches!(last, Update::Progress(_)));
            self.ready.push_back((index, last));
        }
    }

    /// Waits for the next update.
    pub(crate) async fn next(&mut self) -> Option<(usize, Update)> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    /// Waits for all answers.
    pub(crate) async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut wholes: Vec<Whole> = self.splitters.iter().map(|_| Whole::default()).collect();
        while let Some((index, update)) = self.next().await {
            match update {
                Update::Delta(delta) => wholes[index].said.add(delta),
                Update::Logprobs(logprobs) => wholes[index].logprobs.push(logprobs),
                Update::Progress(_) => {}
                Update::Done(done) => wholes[index].done = Some(done),
                Update::Failed(error) => return Err(error),
            }
        }
        Ok(wholes)
    }
}

/// A complete answer.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) said: Collected,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Set by the last update of every answer.
    pub(crate) done: Option<Done>,
}
