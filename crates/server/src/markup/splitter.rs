//! Splits a text into reasoning, answer and tool calls while it is generated.

use std::sync::Arc;

use moeflux::{Passage, ReasoningForm, ReasoningSplit};

use super::calls::{Call, Tools};
use super::channels::Channels;
use super::reader::{CallReader, Step};
use super::tags::Tags;

pub(crate) const THINK: &str = "<think>";
pub(crate) const END_THINK: &str = "</think>";

/// A step of an answer.
#[derive(Debug, PartialEq)]
pub(crate) enum Delta {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The answer.
    Text(String),
    /// A function's call begins.
    CallBegin(String),
    /// More of that call's arguments, as JSON text.
    Arguments(String),
    /// That call is complete.
    CallEnd,
}

impl Delta {
    pub(super) fn text(text: String, out: &mut Vec<Self>) {
        if !text.is_empty() {
            out.push(Self::Text(text));
        }
    }

    pub(super) fn reasoning(text: String, out: &mut Vec<Self>) {
        if !text.is_empty() {
            out.push(Self::Reasoning(text));
        }
    }
}

/// The parts of an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parts {
    /// The prompt ends within the model's reasoning.
    pub(crate) thinking: bool,
    /// Reasoning and text are to be told apart at all.
    pub(crate) split: bool,
    /// Messages stand on channels.
    pub(crate) channels: bool,
    /// Functions that may be called, and how calls are written.
    pub(crate) calls: Option<(&'static Tags, Arc<Tools>)>,
}

/// Takes a text apart.
#[derive(Debug)]
pub(crate) enum Splitter {
    /// By tags.
    Tagged(Box<Tagged>),
    /// By channels.
    Channels(Channels),
}

impl Splitter {
    pub(crate) fn new(parts: Parts) -> Self {
        if parts.channels {
            Self::Channels(Channels::new())
        } else {
            Self::Tagged(Box::new(Tagged::new(parts)))
        }
    }

    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        match self {
            Self::Tagged(tagged) => tagged.push(text, out),
            Self::Channels(channels) => channels.push(text, out),
        }
    }

    /// Gives out what is held at the end of an answer, which may have been `cut` off.
    pub(crate) fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) {
        match self {
            Self::Tagged(tagged) => tagged.finish(cut, out),
            Self::Channels(channels) => channels.finish(cut, out),
        }
    }
}

#[derive(Debug)]
enum State {
    Text,
    /// Between the calls of a section.
    Section,
    Calling(CallReader),
}

/// See [`Splitter::Tagged`].
#[derive(Debug)]
pub(crate) struct Tagged {
    reasoning: Option<ReasoningSplit>,
    calls: Option<(&'static Tags, Arc<Tools>)>,
    state: State,
    /// Text that may be the beginning of a tag, or part of a call that cannot be told yet.
    held: String,
    /// Whether a call has been made: white space between calls is no text.
    called: bool,
}

impl Tagged {
    fn new(parts: Parts) -> Self {
        let Parts { thinking, split, calls, .. } = parts;
        let reasoning = split.then(|| ReasoningSplit::new(ReasoningForm::default(), thinking));
        Self { reasoning, calls, state: State::Text, held: String::new(), called: false }
    }

    fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut passages = vec![];
        match &mut self.reasoning {
            Some(split) => split.push(text, &mut passages),
            None => passages.push(Passage::Text(text.to_owned())),
        }
        self.take(passages, out);
    }

    fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) {
        let mut passages = vec![];
        if let Some(split) = &mut self.reasoning {
            split.finish(&mut passages);
        }
        self.take(passages, out);
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Calling(reader) => reader.finish(&held, cut, out),
            State::Section if cut => {}
            _ if self.called && held.trim().is_empty() => {}
            // The beginning of a tag, not of a text.
            _ if cut && self.calls.as_ref().is_some_and(|(tags, _)| tags.begins_with(&held)) => {}
            _ => Delta::text(held, out),
        }
    }

    fn take(&mut self, passages: Vec<Passage>, out: &mut Vec<Delta>) {
        for passage in passages {
            match passage {
                Passage::Reasoning(text) => Delta::reasoning(text, out),
                Passage::Text(text) => {
                    self.held.push_str(&text);
                    while self.step(out) {}
                }
            }
        }
    }

    /// Goes on as far as the next tag; false if more text is needed.
    fn step(&mut self, out: &mut Vec<Delta>) -> bool {
        let Some((tags, tools)) = &self.calls else {
            Delta::text(std::mem::take(&mut self.held), out);
            return false;
        };
        let tags = *tags;
        match &mut self.state {
            State::Text => {
                let (before, open) = take_until(&mut self.held, &[tags.open()]);
                if !(self.called && before.trim().is_empty()) {
                    Delta::text(before, out);
                }
                if open.is_some() {
                    self.state = match tags.section {
                        Some(_) => State::Section,
                        None => State::Calling(CallReader::new(tags, Arc::clone(tools))),
                    };
                }
                open.is_some()
            }
            State::Section => self.step_section(tags, out),
            State::Calling(reader) => {
                match reader.read(&mut self.held, out) {
                    Step::More => return false,
                    Step::Ended => self.called = true,
                    Step::NoCall(text) => Delta::text(text, out),
                }
                self.state = if tags.section.is_some() { State::Section } else { State::Text };
                true
            }
        }
    }

    /// Goes on to the next call of a section, or out of it.
    fn step_section(&mut self, tags: &'static Tags, out: &mut Vec<Delta>) -> bool {
        let [open, close] = [tags.call[0], tags.section.map_or("", |section| section[1])];
        let rest = self.held.trim_start();
        if rest.is_empty() || [open, close].iter().any(|tag| tag.starts_with(rest) && tag.len() > rest.len())
        {
            return false;
        }
        let begins = rest.starts_with(open);
        let known = [open, close].into_iter().find(|tag| rest.starts_with(tag));
        if known.is_none() && !self.called {
            // No calls at all: all of it is text.
            Delta::text(tags.open().to_owned(), out);
        }
        self.held = rest[known.map_or(0, str::len)..].to_owned();
        self.state = match &self.calls {
            Some((_, tools)) if begins => State::Calling(CallReader::new(tags, Arc::clone(tools))),
            _ => State::Text,
        };
        true
    }
}

/// What the deltas of an answer make together.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
}

impl Collected {
    /// Whether there are calls, and all are complete.
    pub(crate) fn called(&self) -> bool {
        !self.calls.is_empty() && self.calls.iter().all(|call| call.complete)
    }

    pub(crate) fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(&text),
            Delta::Text(text) => self.text.push_str(&text),
            Delta::CallBegin(name) => {
                self.calls.push(Call { name, arguments: String::new(), complete: false });
            }
            Delta::Arguments(text) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            Delta::CallEnd => {
                if let Some(call) = self.calls.last_mut() {
                    call.complete = true;
                }
            }
        }
    }
}

/// Takes the text before the first of `tags` out of `held`, and the tag; without one, all that cannot be the beginning of
/// one.
pub(super) fn take_until<'t>(held: &mut String, tags: &[&'t str]) -> (String, Option<&'t str>) {
    let found = tags.iter().filter_map(|tag| Some((held.find(tag)?, *tag)));
    if let Some((at, tag)) = found.min_by_key(|(at, _)| *at) {
        let before = held[..at].to_owned();
        held.drain(..at + tag.len());
        return (before, Some(tag));
    }
    let beginning = |tag: &&'t str| {
        let longest = held.len().min(tag.len() - 1);
        (1..=longest).rev().find(|n| held.as_bytes().ends_with(&tag.as_bytes()[..*n]))
    };
    let keep = tags.iter().filter_map(beginning).max().unwrap_or(0);
    let rest = held.split_off(held.len() - keep);
    (std::mem::replace(held, rest), None)
}
