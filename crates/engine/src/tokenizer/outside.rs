//! Text from outside within a text that may steer the model, as a conversation that a chat template renders.
//!
//! Special tokens that are written out in it must stay text. What would become one is marked before it is rendered, so
//! that it can be told from what the template writes, and encoded by itself as plain text. The marks are two code points
//! that Unicode keeps free of characters.

use std::borrow::Cow;

use serde_json::Value;

use super::{AddSpecial, Tokenizer};
use crate::Result;

const BEGIN: char = '\u{FDD0}';
const END: char = '\u{FDD1}';

/// The texts of special tokens, by their first byte, longer ones first.
#[derive(Debug)]
pub(super) struct Controls(Vec<Vec<Box<str>>>);

impl Controls {
    pub(super) fn new(texts: impl Iterator<Item = String>) -> Self {
        let mut by_first: Vec<Vec<Box<str>>> = (0..256).map(|_| Vec::new()).collect();
        for text in texts {
            if let Some(first) = text.bytes().next() {
                by_first[usize::from(first)].push(text.into());
            }
        }
        by_first.iter_mut().for_each(|texts| texts.sort_by_key(|text| std::cmp::Reverse(text.len())));
        Self(by_first)
    }

    /// The special token that `text` begins with.
    fn at_start(&self, text: &str) -> Option<&str> {
        let first = text.bytes().next()?;
        self.0[usize::from(first)].iter().map(|control| &**control).find(|control| text.starts_with(control))
    }

    /// `text` with marks around what would become special tokens.
    fn mark<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut marked = String::new();
        let mut from = 0;
        let mut at = 0;
        while at < text.len() {
            match self.at_start(&text[at..]) {
                Some(control) => {
                    marked.push_str(&text[from..at]);
                    marked.push(BEGIN);
                    marked.push_str(control);
                    marked.push(END);
                    at += control.len();
                    from = at;
                }
                None => at = text.ceil_char_boundary(at + 1),
            }
        }
        if from == 0 {
            return Cow::Borrowed(text);
        }
        marked.push_str(&text[from..]);
        Cow::Owned(marked)
    }

    /// Marks every text in `value`, but for keys of objects.
    pub(super) fn mark_all(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(marked) = self.mark(text) {
                    *text = marked;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.mark_all(value)),
            Value::Object(fields) => fields.values_mut().for_each(|value| self.mark_all(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Cuts `text` at what is marked; says of each part whether it is from outside. A template may have cut a text within
    /// its marks: those are dropped.
    fn parts(&self, text: &str) -> Vec<(String, bool)> {
        let mut parts: Vec<(String, bool)> = vec![];
        let mut append = |text: &str, outside: bool| match parts.last_mut().filter(|last| last.1 == outside) {
            Some(last) => last.0.push_str(text),
            None if text.is_empty() => {}
            None => parts.push((text.to_owned(), outside)),
        };
        let mut rest = text;
        while let Some(at) = rest.find([BEGIN, END]) {
            append(&rest[..at], false);
            let begins = rest[at..].starts_with(BEGIN);
            rest = &rest[at + BEGIN.len_utf8()..];
            if let Some(control) = self.at_start(rest).filter(|_| begins)
                && let Some(after) = rest[control.len()..].strip_prefix(END)
            {
                append(control, true);
                rest = after;
            }
        }
        append(rest, false);
        parts
    }
}

impl Tokenizer {
    /// Marks what in the texts of `value` would become special tokens, so that
    /// [`encode_chat`](crate::generation::encode_chat) takes it for text. That marks messages itself; this is for what
    /// else comes from outside.
    pub fn mark_outside(&self, value: &mut Value) {
        self.controls().mark_all(value);
    }

    /// Encodes a text with marks, as [`Tokenizer::encode_within`] does one without; also gives the text without them.
    pub(crate) fn encode_marked_within(
        &self,
        text: String,
        add_special: AddSpecial,
        context: usize,
    ) -> Result<(Vec<u32>, String)> {
        if !text.contains([BEGIN, END]) {
            return Ok((self.encode_within(&text, add_special, context)?, text));
        }
        let mut tokens = match add_special {
            AddSpecial::Yes => {
                self.bos_id().filter(|_| self.encode("", add_special).is_ok_and(|ids| !ids.is_empty()))
            }
            AddSpecial::No => None,
        }
        .into_iter()
        .collect::<Vec<_>>();
        let mut whole = String::new();
        for (part, outside) in self.controls().parts(&text) {
            tokens.extend(if outside {
                self.encode_plain(&part)?
            } else {
                self.encode_within(&part, AddSpecial::No, context)?
            });
            whole += &part;
        }
        Ok((tokens, whole))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_would_steer_is_told_from_what_does() {
        let controls = Controls::new(["<a>", "<a><b>", "é|"].into_iter().map(str::to_owned));
        for (text, outside) in [
            ("plain <b> text", &[][..]),
            ("<a>", &["<a>"]),
            ("x<a><b><a>éé|", &["<a><b><a>", "é|"]),
            ("\u{FDD0}<a>\u{FDD1}\u{FDD1}", &["<a>"]),
        ] {
            let mut value = json!({"content": [text]});
            controls.mark_all(&mut value);
            let rendered = format!("<a>{}<a>", value["content"][0].as_str().unwrap());
            let parts = controls.parts(&rendered);
            let found: Vec<&str> = parts.iter().filter(|part| part.1).map(|part| &*part.0).collect();
            assert_eq!(found, outside, "{text:?}");
            let whole: String = parts.iter().map(|part| &*part.0).collect();
            assert_eq!(whole, format!("<a>{}<a>", text.replace([BEGIN, END], "")), "{text:?}");
        }
        // A template that cuts at such a text.
        assert_eq!(controls.parts("x\u{FDD0}"), [("x".into(), false)]);
        assert_eq!(controls.parts("\u{FDD1}y\u{FDD0}<b>"), [("y<b>".into(), false)]);
    }
}
