//! Channels, as gpt-oss writes them (the Harmony format): an answer is a series of messages, each with a header that says
//! on which channel it is and to whom: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.
//!
//! What is on the channel `analysis` is reasoning, what goes to a function is its call, everything else is the answer.

use super::calls::Call;
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
    /// A call of the function with this name.
    Call(String),
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
}

impl Channels {
    pub(crate) fn new() -> Self {
        Self { state: State::Header, held: String::new(), begun: false }
    }

    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        self.held.push_str(text);
        while self.step(out) {}
    }

    pub(crate) fn finish(&mut self, out: &mut Vec<Delta>) {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Header) {
            State::Header if !self.begun && !held.starts_with(['<', ' ']) => Delta::text(held, out),
            // A header that was cut off says nothing.
            State::Header => {}
            State::Message(Message::Reasoning) => Delta::reasoning(held, out),
            State::Message(Message::Text) => Delta::text(held, out),
            State::Message(Message::Call(name)) => call(name, &held, out),
        }
    }

    fn step(&mut self, out: &mut Vec<Delta>) -> bool {
        match &self.state {
            State::Header => {
                if let Some(at) = self.held.find(MESSAGE) {
                    self.state = State::Message(header(&self.held[..at]));
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
                if let Message::Call(name) = message {
                    let ends =
                        [CALL, END, START].iter().filter_map(|end| Some((self.held.find(end)?, end.len())));
                    let Some((at, len)) = ends.min() else { return false };
                    call(name, &self.held[..at], out);
                    self.held.drain(..at + len);
                    self.state = State::Header;
                    return true;
                }
                let (before, end) = take_until(&mut self.held, &[END, RETURN, CALL, START]);
                match message {
                    Message::Reasoning => Delta::reasoning(before, out),
                    _ => Delta::text(before, out),
                }
                if end.is_some() {
                    self.state = State::Header;
                }
                end.is_some()
            }
        }
    }
}

fn call(name: String, arguments: &str, out: &mut Vec<Delta>) {
    let arguments = match arguments.trim() {
        "" => "{}".into(),
        other => other.into(),
    };
    out.push(Delta::Call(Call { name, arguments }));
}

/// What a header like `<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json` begins.
fn header(header: &str) -> Message {
    let word = |mark: &str| {
        let rest = &header[header.find(mark)? + mark.len()..];
        let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
        Some(&rest[..end])
    };
    match (word(" to="), word(CHANNEL)) {
        (Some(to), _) => Message::Call(to.strip_prefix("functions.").unwrap_or(to).into()),
        (None, Some("analysis")) => Message::Reasoning,
        _ => Message::Text,
    }
}
