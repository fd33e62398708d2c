//! From the model's text to what interfaces show: reasoning, text and function calls apart.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use moeflux::decoding::TokenLogprobs;
use moeflux::reasoning::take_until;
use moeflux::scheduler::{Done, Event, Ticket};
use moeflux::{Passage, ReasoningForm, ReasoningSplit, Request, Scheduler};
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::tools::{CLOSE, Call, OPEN, parse_call};

/// A step of an answer.
#[derive(Debug, PartialEq)]
pub(crate) enum Delta {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The answer.
    Text(String),
    /// A function call.
    Call(Call),
}

/// Which parts an answer may have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parts {
    /// Reasoning and text are to be told apart: how the model marks them, and the prompt.
    pub(crate) reasoning: Option<(ReasoningForm, String)>,
    /// Functions may be called.
    pub(crate) calls: bool,
}

impl Parts {
    /// Whether the prompt ends within the model's reasoning.
    pub(crate) fn thinking(&self) -> bool {
        self.reasoning.as_ref().is_some_and(|(form, prompt)| form.begun_by(prompt))
    }
}

/// Takes a text apart as it comes.
#[derive(Debug)]
pub(crate) struct Splitter {
    reasoning: Option<ReasoningSplit>,
    calls: bool,
    /// Whether the text stands within a call.
    calling: bool,
    /// Text that may be the beginning of a tag, or a call that is not complete.
    held: String,
    /// Whether a call has been made: white space between calls is no text.
    called: bool,
}

impl Splitter {
    pub(crate) fn new(parts: Parts) -> Self {
        let reasoning = parts.reasoning.map(|(form, prompt)| ReasoningSplit::new(form, &prompt));
        Self { reasoning, calls: parts.calls, calling: false, held: String::new(), called: false }
    }

    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut passages = vec![];
        match &mut self.reasoning {
            Some(split) => split.push(text, &mut passages),
            None => passages.push(Passage::Text(text.to_owned())),
        }
        self.take(passages, out);
    }

    /// Gives out what is held at the end of an answer.
    pub(crate) fn finish(&mut self, out: &mut Vec<Delta>) {
        let mut passages = vec![];
        if let Some(split) = &mut self.reasoning {
            split.finish(&mut passages);
        }
        self.take(passages, out);
        let held = std::mem::take(&mut self.held);
        match parse_call(&held).filter(|_| self.calling) {
            Some(call) => out.push(Delta::Call(call)),
            None if self.calling => text(format!("{OPEN}{held}"), out),
            None if self.called && held.trim().is_empty() => {}
            None => text(held, out),
        }
    }

    fn take(&mut self, passages: Vec<Passage>, out: &mut Vec<Delta>) {
        for passage in passages {
            match passage {
                Passage::Reasoning(text) => out.push(Delta::Reasoning(text)),
                Passage::Text(piece) if self.calls => {
                    self.held.push_str(&piece);
                    while self.step(out) {}
                }
                Passage::Text(piece) => text(piece, out),
            }
        }
    }

    /// Goes on as far as the next tag of a call; false if more text is needed.
    fn step(&mut self, out: &mut Vec<Delta>) -> bool {
        let (before, found) = match self.calling {
            false => take_until(&mut self.held, OPEN),
            true if self.held.contains(CLOSE) => take_until(&mut self.held, CLOSE),
            true => return false,
        };
        if !self.calling {
            if !(self.called && before.trim().is_empty()) {
                text(before, out);
            }
            self.calling = found;
            return found;
        }
        match parse_call(&before) {
            Some(call) => {
                self.called = true;
                out.push(Delta::Call(call));
            }
            None => text(format!("{OPEN}{before}{CLOSE}"), out),
        }
        self.calling = false;
        true
    }
}

fn text(text: String, out: &mut Vec<Delta>) {
    if !text.is_empty() {
        out.push(Delta::Text(text));
    }
}

/// What a request's answers are made of.
#[derive(Debug)]
pub(crate) enum Update {
    /// Something to show.
    Delta(Delta),
    /// A token's log-probabilities.
    Logprobs(TokenLogprobs),
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
    _tickets: Vec<Ticket>,
}

impl Answers {
    /// Queues `requests`, all or none.
    pub(crate) fn submit(
        scheduler: &Arc<Scheduler>,
        requests: Vec<Request>,
        parts: Parts,
    ) -> Result<Self, ApiError> {
        // As many events as tokens can wait for a slow client; no more than the limits of its request allow.
        let (sender, events) = mpsc::unbounded_channel();
        let left = requests.len();
        let mut tickets = vec![];
        for (index, request) in requests.into_iter().enumerate() {
            let sender = sender.clone();
            tickets.push(scheduler.submit_to(request, move |event| drop(sender.send((index, event))))?);
        }
        let splitters = (0..left).map(|_| Splitter::new(parts.clone())).collect();
        Ok(Self { events, splitters, ready: VecDeque::new(), left, _tickets: tickets })
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
                    self.ready.push_back((0, Update::Failed(error)));
                }
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) {
        let mut deltas = vec![];
        let last = match event {
            Event::Piece(piece) => {
                self.ready.extend(piece.logprobs.map(|l| (index, Update::Logprobs(l))));
                self.splitters[index].push(&piece.text, &mut deltas);
                None
            }
            Event::Done(done) => {
                if let Some(warning) = &done.warning {
                    eprintln!("warning: {warning}");
                }
                self.splitters[index].finish(&mut deltas);
                Some(Update::Done(done))
            }
            Event::Failed(error) => Some(Update::Failed(ApiError::from(error))),
        };
        self.ready.extend(deltas.into_iter().map(|delta| (index, Update::Delta(delta))));
        if let Some(last) = last {
            self.left -= 1;
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
                Update::Delta(Delta::Text(text)) => wholes[index].text.push_str(&text),
                Update::Delta(Delta::Reasoning(text)) => wholes[index].reasoning.push_str(&text),
                Update::Delta(Delta::Call(call)) => wholes[index].calls.push(call),
                Update::Logprobs(logprobs) => wholes[index].logprobs.push(logprobs),
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
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Set by the last update of every answer.
    pub(crate) done: Option<Done>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits `text` in pieces of every size; all must say the same.
    fn check(parts: &Parts, text: &str, reasoning: &str, answer: &str, calls: &[&str]) {
        for size in 1..=text.len() {
            let mut splitter = Splitter::new(parts.clone());
            let mut deltas = vec![];
            let chars: Vec<char> = text.chars().collect();
            chars
                .chunks(size)
                .for_each(|piece| splitter.push(&piece.iter().collect::<String>(), &mut deltas));
            splitter.finish(&mut deltas);
            let (mut thought, mut said, mut made) = (String::new(), String::new(), vec![]);
            for delta in deltas {
                match delta {
                    Delta::Reasoning(text) => thought += &text,
                    Delta::Text(text) => said += &text,
                    Delta::Call(call) => made.push(call.name),
                }
            }
            assert_eq!(
                (&*thought, &*said, &made),
                (reasoning, answer, &calls.iter().map(|c| (*c).to_owned()).collect()),
                "{text:?} by {size}"
            );
        }
    }

    #[test]
    fn texts_are_taken_apart() {
        let after = |prompt: &str| Parts {
            reasoning: Some((ReasoningForm::default(), prompt.to_owned())),
            calls: true,
        };
        let (all, begun) = (&after("?"), &after("?<think>\n"));
        check(all, "plain text", "", "plain text", &[]);
        check(all, "<think>\na < b</think>\n\nyes", "\na < b", "yes", &[]);
        check(begun, "hm</think>yes", "hm", "yes", &[]);
        check(begun, "for ever </thin", "for ever </thin", "", &[]);
        check(
            &Parts::default(),
            "<think>x</think><tool_call>{}</tool_call>",
            "",
            "<think>x</think><tool_call>{}</tool_call>",
            &[],
        );
        let call =
            |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
        check(all, &call("f"), "", "", &["f"]);
        check(all, &format!("Let me see.{}\n{}\n", call("f"), call("g")), "", "Let me see.", &["f", "g"]);
        check(all, "<tool_call>{\"name\": \"f\"}", "", "", &["f"]);
        check(all, "<tool_call>{broken", "", "<tool_call>{broken", &[]);
        check(all, "<tool_call>what</tool_call>é", "", "<tool_call>what</tool_call>é", &[]);
        check(begun, &format!("so</think>{}", call("f")), "so", "", &["f"]);
    }
}
