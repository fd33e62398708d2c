//! Reads a tool call between its tags while it is generated: its name, then its arguments piece by piece.
//!
//! Arguments that are a JSON object pass through as they were written. Arguments between tags become an object: texts are
//! passed on as they come, other values when they are complete. A call that is written in another order than its form
//! says is held until it is complete.

use std::sync::Arc;

use serde_json::Value;

use super::calls::{Call, Tools};
use super::splitter::{Delta, take_until};
use super::tags::{Body, Tags, after_word, is_name, is_text, typed};

/// How far a call has been read.
#[derive(Debug)]
enum Stage {
    /// Up to the arguments.
    Head,
    /// In arguments that are a JSON object.
    Object(Nesting),
    /// Between parameters; their names so far.
    Between(Vec<String>),
    /// In a parameter's value.
    Value { names: Vec<String>, kind: Kind },
    /// After the arguments.
    Tail,
    /// All of it is held until the closing tag.
    Held,
}

/// What is made of a parameter's value.
#[derive(Debug)]
enum Kind {
    /// A text, passed on as it comes.
    Text,
    /// A value by this schema.
    Typed(Option<Value>),
    /// Nothing: it was given before.
    Again,
}

/// A head that was looked at.
enum Head {
    /// It may become one.
    Begun,
    /// The function's name, and where its arguments begin.
    Complete(String, usize),
    /// It is none.
    Other,
}

/// What becomes of a call after some text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More text is needed.
    More,
    /// It has ended.
    Ended,
    /// It was none; this is its text.
    NoCall(String),
}

/// A call that is being read.
#[derive(Debug)]
pub(super) struct CallReader {
    tags: &'static Tags,
    tools: Arc<Tools>,
    name: String,
    stage: Stage,
}

impl CallReader {
    pub(super) fn new(tags: &'static Tags, tools: Arc<Tools>) -> Self {
        Self { tags, tools, name: String::new(), stage: Stage::Head }
    }

    /// Reads what `held` has of the call, and takes it out.
    pub(super) fn read(&mut self, held: &mut String, out: &mut Vec<Delta>) -> Step {
        loop {
            let close = self.tags.call[1];
            match &mut self.stage {
                Stage::Head => match self.head(held) {
                    Head::Complete(name, at) => {
                        held.drain(..at);
                        out.push(Delta::CallBegin(name.clone()));
                        self.name = name;
                        self.stage = match self.tags.body {
                            Body::Parameters { .. } => Stage::Between(vec![]),
                            _ => Stage::Object(Nesting::default()),
                        };
                    }
                    Head::Begun if !held.contains(close) => return Step::More,
                    _ => self.stage = Stage::Held,
                },
                Stage::Object(nesting) => {
                    let (end, complete) = nesting.read(held);
                    Delta::arguments(held.drain(..end).collect(), out);
                    if !complete {
                        return Step::More;
                    }
                    self.stage = Stage::Tail;
                }
                Stage::Tail => {
                    let Some(at) = held.find(close) else { return Step::More };
                    held.drain(..at + close.len());
                    out.push(Delta::CallEnd);
                    return Step::Ended;
                }
                Stage::Held => {
                    let Some(at) = held.find(close) else { return Step::More };
                    let text = held[..at].to_owned();
                    held.drain(..at + close.len());
                    return match self.tags.parse(&text, &self.tools) {
                        Some(call) => {
                            Delta::call(call, out);
                            Step::Ended
                        }
                        None => Step::NoCall(format!("{}{text}{close}", self.tags.call[0])),
                    };
                }
                Stage::Between(_) | Stage::Value { .. } => {
                    if !self.parameters(held, out) {
                        return Step::More;
                    }
                }
            }
        }
    }

    /// At the end of an answer: what `held` has of a call. If it was `cut` off, what is not complete is none.
    pub(super) fn finish(self, held: &str, cut: bool, out: &mut Vec<Delta>) {
        match self.stage {
            Stage::Tail => out.push(Delta::CallEnd),
            Stage::Head | Stage::Held => match self.tags.parse(held, &self.tools) {
                Some(call) => Delta::call(call, out),
                None if cut => {}
                None => Delta::text(format!("{}{held}", self.tags.call[0]), out),
            },
            Stage::Object(_) | Stage::Between(_) | Stage::Value { .. } => {}
        }
    }

    fn head(&self, held: &str) -> Head {
        match self.tags.body {
            Body::Object => object_head(held),
            Body::NameAndObject { before, numbered, between, .. } => {
                let rest = match Cursor(held.trim_start()).word(before.trim_start()) {
                    Ok(rest) => rest.0,
                    Err(head) => return head,
                };
                let Some((name, arguments)) = rest.split_once(between.trim()) else { return Head::Begun };
                let name = match name.rsplit_once(':') {
                    Some((name, number)) if numbered && number.bytes().all(|b| b.is_ascii_digit()) => name,
                    _ => name,
                };
                named(name, held, arguments.trim_start(), Some('{'))
            }
            Body::Parameters { before, between, .. } => {
                let rest = match Cursor(held.trim_start()).word(before.trim_start()) {
                    Ok(rest) => rest.0,
                    Err(head) => return head,
                };
                let mark = between.trim();
                let at = match mark {
                    // The name ends where its line does, or where the first parameter begins.
                    "" => rest
                        .trim_start()
                        .find(['\n', '<'])
                        .map(|at| at + rest.len() - rest.trim_start().len()),
                    mark => rest.find(mark),
                };
                let Some(at) = at else { return Head::Begun };
                named(&rest[..at], held, &rest[at + mark.len()..], None)
            }
        }
    }

    /// Reads parameters between tags; false if more text is needed.
    fn parameters(&mut self, held: &mut String, out: &mut Vec<Delta>) -> bool {
        let Body::Parameters { key, value, end, .. } = self.tags.body else { return false };
        match std::mem::replace(&mut self.stage, Stage::Tail) {
            Stage::Between(mut names) => {
                let close = held.find(self.tags.call[1]);
                let Some(at) = held.find(key).filter(|at| close.is_none_or(|close| *at < close)) else {
                    if close.is_some() {
                        Delta::arguments(if names.is_empty() { "{}" } else { "}" }.into(), out);
                        return true;
                    }
                    self.stage = Stage::Between(names);
                    return false;
                };
                let pair = &held[at + key.len()..];
                let Some((name, rest)) = pair_head(pair, value) else {
                    self.stage = Stage::Between(names);
                    return false;
                };
                let name = name.trim().to_owned();
                let from = held.len() - rest.len();
                held.drain(..from);
                let tool = self.tools.tools.iter().find(|tool| tool.name == self.name);
                let schema = tool.and_then(|tool| tool.property(&name)).cloned();
                let kind = match schema {
                    _ if names.contains(&name) => Kind::Again,
                    Some(schema) if is_text(&schema) => Kind::Text,
                    schema => Kind::Typed(schema),
                };
                if !matches!(kind, Kind::Again) {
                    let comma = if names.is_empty() { '{' } else { ',' };
                    let quote = if matches!(kind, Kind::Text) { "\"" } else { "" };
                    Delta::arguments(format!("{comma}{}:{quote}", Value::from(&*name)), out);
                    names.push(name);
                }
                self.stage = Stage::Value { names, kind };
                true
            }
            Stage::Value { names, kind } => {
                let mark = end.trim();
                let line = end.starts_with('\n').then(|| format!("\n{mark}"));
                let found = match &kind {
                    Kind::Text => {
                        let marks: Vec<&str> = line.as_deref().into_iter().chain([mark]).collect();
                        let (text, found) = take_until(held, &marks);
                        let found = found.is_some();
                        Delta::arguments(escaped(&text), out);
                        if found {
                            Delta::arguments("\"".into(), out);
                        }
                        found
                    }
                    Kind::Typed(_) | Kind::Again => match held.find(mark) {
                        Some(at) => {
                            let written = &held[..at];
                            let written = if line.is_some() {
                                written.strip_suffix('\n').unwrap_or(written)
                            } else {
                                written
                            };
                            if let Kind::Typed(schema) = &kind {
                                Delta::arguments(typed(written, schema.as_ref()).to_string(), out);
                            }
                            held.drain(..at + mark.len());
                            true
                        }
                        None => false,
                    },
                };
                self.stage = if found { Stage::Between(names) } else { Stage::Value { names, kind } };
                found
            }
            other => {
                self.stage = other;
                true
            }
        }
    }
}

/// A head with this name, after which `rest` of `held` follows; it must begin with `first`.
fn named(name: &str, held: &str, rest: &str, first: Option<char>) -> Head {
    match (is_name(name.trim()), first) {
        (None, _) => Head::Other,
        (Some(_), Some(_)) if rest.is_empty() => Head::Begun,
        (Some(_), Some(first)) if !rest.starts_with(first) => Head::Other,
        (Some(name), _) => Head::Complete(name.into(), held.len() - rest.len()),
    }
}

/// The head of `{"name": NAME, "arguments": {…}}`.
fn object_head(held: &str) -> Head {
    fn read(held: &str) -> Result<(String, usize), Head> {
        let cursor =
            Cursor(held).skip().word("{")?.skip().word("\"name\"")?.skip().word(":")?.skip().word("\"")?;
        let (name, rest) = cursor.0.split_once('"').ok_or(Head::Begun)?;
        let name = is_name(name).ok_or(Head::Other)?;
        let rest = Cursor(rest).skip().word(",")?.skip();
        let rest = match rest.word("\"arguments\"") {
            Err(Head::Other) => rest.word("\"parameters\"")?,
            other => other?,
        };
        let rest = rest.skip().word(":")?.skip();
        rest.word("{")?;
        Ok((name.to_owned(), held.len() - rest.0.len()))
    }
    match read(held) {
        Ok((name, at)) => Head::Complete(name, at),
        Err(head) => head,
    }
}

/// A place in a text.
#[derive(Clone, Copy)]
struct Cursor<'a>(&'a str);

impl Cursor<'_> {
    fn skip(self) -> Self {
        Self(self.0.trim_start())
    }

    /// Past `word`.
    fn word(self, word: &str) -> Result<Self, Head> {
        match self.0.strip_prefix(word) {
            Some(rest) => Ok(Self(rest)),
            None if word.starts_with(self.0) => Err(Head::Begun),
            None => Err(Head::Other),
        }
    }
}

/// A parameter's name and what follows the mark after it; `None` if more text is needed.
fn pair_head<'a>(pair: &'a str, value: &str) -> Option<(&'a str, &'a str)> {
    let mut lines = value.trim_end_matches('\n').lines();
    let (name, mut rest) = pair.split_once(lines.next()?)?;
    for line in lines {
        rest = after_word(rest, line)?;
    }
    if !value.ends_with('\n') {
        return Some((name, rest));
    }
    // Only where the form itself begins a new line; what follows tells.
    (!rest.is_empty()).then(|| (name, rest.strip_prefix('\n').unwrap_or(rest)))
}

/// `text` as it stands within a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Where in a JSON value a text is.
#[derive(Debug, Default)]
pub(super) struct Nesting {
    depth: usize,
    in_text: bool,
    escape: bool,
}

impl Nesting {
    /// Reads on; says how many bytes of `text` belong to the value, and whether it is complete after them.
    pub(super) fn read(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escape => self.escape = false,
                b'\\' if self.in_text => self.escape = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                // Part of a tag: a model that no grammar held has forgotten a bracket.
                b'<' => return (at, true),
                _ => {}
            }
        }
        (text.len(), false)
    }
}

impl Delta {
    /// A call that is complete.
    pub(super) fn call(call: Call, out: &mut Vec<Self>) {
        out.push(Self::CallBegin(call.name));
        Self::arguments(call.arguments, out);
        out.push(Self::CallEnd);
    }

    pub(super) fn arguments(text: String, out: &mut Vec<Self>) {
        if !text.is_empty() {
            out.push(Self::Arguments(text));
        }
    }
}
