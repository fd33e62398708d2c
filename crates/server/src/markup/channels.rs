//! Channels, as gpt-oss writes them (the Harmony format): an answer is a series of messages, each with a header that says
//! on which channel it is and to whom: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.
//!
//! What is on the channel `analysis` is reasoning, what goes to a function is its call, everything else is the answer.

use super::reader::Nesting;
use super::splitter::{Delta, take_until};

pub(crate) const CHANNEL: &str = "<|channel|>";
pub(crate) const MESSAGE: &str = "<|message|>";
pub(crate) const START: &str = "<|start|>";
pub(crate) const END: &str = "<|end|>";
pub(crate) const CALL: &str = "<|call|>";
pub(crate) const RETURN: &str = "<|return|>";
pub(crate) const CONSTRAIN: &str = "<|constrain|>";
/// Every token that is part of the form.
pub(crate) const TOKENS: [&str; 7] = [CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN];

/// What a message is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Message {
    Reasoning,
    Text,
    /// A call of a function.
    Call,
}

#[derive(Debug)]
enum State {
    Header,
    Message(Message),
}

/// Takes a text in channels apart as it comes. It begins with the header of a message, after `<|start|>assistant`.
#[derive(Debug)]
pub(crate) struct Channels {
    state: State,
    held: String,
    /// Inside a message.
    begun: bool,
    /// The arguments of the call that is being read.
    nesting: Nesting,
    /// What is known of them.
    arguments: Arguments,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    None,
    Begun,
    Complete,
}

impl Channels {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Header,
            held: String::new(),
            begun: false,
            nesting: Nesting::default(),
            arguments: Arguments::None,
        }
    }

    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    pub(crate) fn finish(&mut self, cut: bool, out: &mut Vec<Delta>) {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Header) {
            State::Header if !self.begun && !held.starts_with(['<', ' ']) => Delta::text(held, out),
            // A header that was cut off says nothing.
            State::Header => {}
            State::Message(Message::Reasoning) => Delta::reasoning(held, out),
            State::Message(Message::Text) => Delta::text(held, out),
            State::Message(Message::Call) => {
                self.arguments(&held, out);
                if !cut || self.arguments == Arguments::Complete {
                    self.end_call(out);
                }
            }
        }
    }

    /// Passes on more of a call's arguments.
    fn arguments(&mut self, text: &str, out: &mut Vec<Delta>) {
        if self.arguments == Arguments::Complete {
            return;
        }
        let text = if self.arguments == Arguments::None { text.trim_start() } else { text };
        let (end, complete) = self.nesting.read(text);
        if !text.is_empty() {
            self.arguments = if complete { Arguments::Complete } else { Arguments::Begun };
        }
        Delta::arguments(text[..end].to_owned(), out);
    }

    fn end_call(&mut self, out: &mut Vec<Delta>) {
        if self.arguments == Arguments::None {
            Delta::arguments("{}".into(), out);
        }
        out.push(Delta::CallEnd);
    }

    fn step(&mut self, out: &mut Vec<Delta>) -> bool {
        match &self.state {
            State::Header => {
                if let Some(at) = self.held.find(MESSAGE) {
                    let (message, function) = header(&self.held[..at]);
                    if let Some(name) = function {
                        (self.nesting, self.arguments) = (Nesting::default(), Arguments::None);
                        out.push(Delta::CallBegin(name));
                    }
                    self.state = State::Message(message);
                    self.held.drain(..at + MESSAGE.len());
                    self.begun = true;
                    return true;
                }
                // A model that knows no channels: its text is the answer.
                let begins = [CHANNEL, START, "assistant", " to="];
                let possible = |begin: &str| self.held.starts_with(begin) || begin.starts_with(&self.held);
                if !self.begun && !begins.into_iter().any(possible) {
                    self.begun = true;
                    self.state = State::Message(Message::Text);
                    return true;
                }
                false
            }
            State::Message(message) => {
                let message = message.clone();
                let ends: &[&'static str] =
                    if message == Message::Call { &[CALL, END, START] } else { &[END, RETURN, CALL, START] };
                let (before, end) = take_until(&mut self.held, ends);
                match message {
                    Message::Reasoning => Delta::reasoning(before, out),
                    Message::Text => Delta::text(before, out),
                    Message::Call => {
                        self.arguments(&before, out);
                        if end.is_some() {
                            self.end_call(out);
                        }
                    }
                }
                if end.is_some() {
                    self.state = State::Header;
                }
                end.is_some()
            }
        }
    }
}

/// What a header like `<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json` begins, and the function that it calls.
fn header(header: &str) -> (Message, Option<String>) {
    let word = |mark: &str| {
        let rest = &header[header.find(mark)? + mark.len()..];
        let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
        Some(&rest[..end])
    };
    match (word(" to="), word(CHANNEL)) {
        (Some(to), _) => (Message::Call, Some(to.strip_prefix("functions.").unwrap_or(to).into())),
        (None, Some("analysis")) => (Message::Reasoning, None),
        _ => (Message::Text, None),
    }
}
