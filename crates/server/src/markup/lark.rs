//! Grammars, in llguidance's dialect of Lark, for answers in a model's markup.

use std::fmt::Write;

use llguidance::api::TopLevelGrammar;
use llguidance::derivre::RegexBuilder;
use moeflux::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::channels;
use super::splitter::{END_THINK, THINK};
use super::tags::{Body, Tags, is_text};
use super::{Calls, Choice, Markup, Tool, Tools};
use crate::error::ApiError;
use crate::prompt::Form;
use crate::schema::{Origin, Schemas};

/// What an answer is held to.
pub(crate) struct Wanted<'a> {
    /// What the answer's text must be.
    pub(crate) form: &'a Form,
    /// Functions that may be called.
    pub(crate) tools: Option<&'a Tools>,
}

impl Markup {
    /// A grammar for answers to `prompt`.
    pub(crate) fn grammar(
        &self,
        tokenizer: &Tokenizer,
        prompt: &str,
        wanted: &Wanted<'_>,
        schemas: &mut Schemas<'_>,
    ) -> Result<TopLevelGrammar, ApiError> {
        let mut lark = Lark { tokenizer, schemas, rules: String::new(), count: 0 };
        let answer = match wanted.form {
            Form::Text => None,
            Form::Json { schema, param, strict } => {
                Some(lark.json(schema, &Origin { param, function: None, strict: *strict })?)
            }
            Form::Regex { pattern, param } => Some(lark.regex(pattern, param)?),
            Form::Choice { texts, .. } => {
                let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
                Some(lark.rule(&texts.join(" | ")))
            }
        };
        let start = if self.channels {
            lark.on_channels(answer, wanted.tools)?
        } else {
            let start = match (wanted.tools, self.calls) {
                (Some(tools), Some(Calls::Tagged(tags))) => lark.tagged(tags, answer, tools)?,
                _ => answer.unwrap_or_else(|| lark.rule("/(.|\\n)+/")),
            };
            match (prompt.trim_end().ends_with(THINK), self.may_think(prompt)) {
                (true, _) => format!("{} BLANK? ({start})", lark.until(END_THINK)),
                (false, true) => {
                    let think = lark.text(THINK);
                    format!("({think} {} BLANK?)? ({start})", lark.until(END_THINK))
                }
                (false, false) => start,
            }
        };
        Ok(TopLevelGrammar::from_lark(format!("start: {start}\nBLANK: /\\n{{1,3}}/\n{}", lark.rules)))
    }
}

struct Lark<'t, 's> {
    tokenizer: &'t Tokenizer,
    schemas: &'t mut Schemas<'s>,
    rules: String,
    count: usize,
}

impl Lark<'_, '_> {
    /// Makes a rule and gives its name.
    fn rule(&mut self, body: &str) -> String {
        self.named("", body)
    }

    fn named(&mut self, attributes: &str, body: &str) -> String {
        self.count += 1;
        let name = format!("rule_{}", self.count);
        // Writing to a text does not fail.
        let _ = writeln!(self.rules, "{name}{attributes}: {body}");
        name
    }

    /// The id of a text that is a special token.
    fn special(&self, text: &str) -> Option<u32> {
        self.tokenizer.token_to_id(text).filter(|id| self.tokenizer.is_special(*id))
    }

    /// `text` as it stands, special tokens as such.
    fn text(&self, text: &str) -> String {
        let mut terms = vec![];
        let mut plain = String::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let special = rest.find('>').map(|end| &rest[..=end]).filter(|_| first == '<');
            match special.and_then(|token| Some((token, self.special(token)?))) {
                Some((token, id)) => {
                    if !plain.is_empty() {
                        terms.push(json!(std::mem::take(&mut plain)).to_string());
                    }
                    terms.push(format!("<[{id}]>"));
                    rest = &rest[token.len()..];
                }
                None => {
                    plain.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        if !plain.is_empty() {
            terms.push(json!(plain).to_string());
        }
        terms.join(" ")
    }

    /// Any text up to `end`, and that.
    fn until(&mut self, end: &str) -> String {
        let token = end.trim();
        match self.special(token) {
            Some(id) => {
                format!("/(.|\\n)*/ <[{id}]> {}", self.text(end.split_once(token).map_or("", |e| e.1)))
            }
            None => self.named("[lazy]", &format!("/(.|\\n)*{}/", escaped(end))),
        }
    }

    fn json(&mut self, schema: &Value, origin: &Origin<'_>) -> Result<String, ApiError> {
        let schema = self.schemas.read(schema, origin)?;
        Ok(self.rule(&format!("%json {schema}")))
    }

    fn regex(&mut self, pattern: &str, param: &str) -> Result<String, ApiError> {
        if RegexBuilder::new().mk_regex(pattern).is_err() {
            let message = format!("{pattern:?}: expected a regular expression without look-around");
            return Err(ApiError::invalid(param, message));
        }
        // Between slashes, on one line.
        let mut between = String::new();
        let mut escape = false;
        for c in pattern.chars() {
            match c {
                '\n' => between.push_str("\\n"),
                '/' if !escape => between.push_str("\\/"),
                c => between.push(c),
            }
            escape = c == '\\' && !escape;
        }
        Ok(self.rule(&format!("/{between}/")))
    }

    /// Answers with calls between tags; `answer` is what the text must be otherwise.
    fn tagged(&mut self, tags: &Tags, answer: Option<String>, tools: &Tools) -> Result<String, ApiError> {
        let bodies = tools.usable().map(|tool| self.body(tags, tool)).collect::<Result<Vec<_>, _>>()?;
        let bodies = self.rule(&bodies.join(" | "));
        let [open, close] = tags.call.map(|tag| self.text(tag));
        let call = self.rule(&format!("{open} {bodies} {close}"));
        let between = match tags.between {
            "" => String::new(),
            between => self.text(between),
        };
        let more = if tools.parallel { format!("({between} {call})*") } else { String::new() };
        // All that follows the tag which the calls begin with.
        let (calls, rest) = match tags.section {
            None => (format!("{call} {more}"), format!("{bodies} {close} {more}")),
            Some(section) => {
                let [begin, end] = section.map(|tag| self.text(tag));
                let rest = format!("BLANK? {call} {more} BLANK? {end}");
                (format!("{begin} {rest}"), rest)
            }
        };
        if tools.choice != Choice::Auto {
            return Ok(calls);
        }
        match answer {
            Some(answer) => Ok(format!("{answer} | {calls}")),
            None => {
                let begin = self.until(tags.open());
                // Text in which no call begins, or text up to a call.
                let text = match self.special(tags.open()) {
                    Some(_) => self.rule("/(.|\\n)+/"),
                    None => {
                        let any = "/(.|\\n)+/";
                        let _ =
                            writeln!(self.rules, "TEXT: {any} & ~/(.|\\n)*{}(.|\\n)*/", escaped(tags.open()));
                        "TEXT".into()
                    }
                };
                Ok(format!("{text} | {begin} {rest}"))
            }
        }
    }

    /// What stands between the tags of a call of `tool`.
    fn body(&mut self, tags: &Tags, tool: &Tool) -> Result<String, ApiError> {
        let name = &tool.name;
        match tags.body {
            Body::Object => {
                let arguments = self.json(&tool.parameters, &tool.origin())?;
                let head = self.text(&format!("{{\"name\": \"{name}\", \"arguments\": "));
                Ok(self.rule(&format!("/\\n?/ {head} {arguments} \"}}\" /\\n?/")))
            }
            Body::NameAndObject { before, numbered, between, after } => {
                let arguments = self.json(&tool.parameters, &tool.origin())?;
                let head = self.text(&format!("{before}{name}"));
                let number = if numbered { "/:[0-9]{1,3}/" } else { "" };
                let (between, after) = (self.text(between), self.text(after));
                Ok(self.rule(&format!("{head} {number} {between} {arguments} {after}")))
            }
            Body::Parameters { before, between, key, value, end, after } => {
                let mut terms = vec![self.text(&format!("{before}{name}{between}"))];
                let required: Vec<&str> = tool.parameters["required"]
                    .as_array()
                    .map(|names| names.iter().filter_map(Value::as_str).collect())
                    .unwrap_or_default();
                let properties = tool.parameters["properties"].as_object();
                for (name, schema) in properties.into_iter().flatten() {
                    let head = self.text(&format!("{key}{name}{value}"));
                    let written = self.value(schema, tool, end)?;
                    let pair = self.rule(&format!("{head} {written}"));
                    let optional = if required.contains(&name.as_str()) { "" } else { "?" };
                    terms.push(format!("{pair}{optional}"));
                }
                if properties.is_none_or(serde_json::Map::is_empty)
                    && tool.parameters["additionalProperties"] != false
                {
                    let (key, value, end) = (self.text(key), self.text(value), self.until(end));
                    let pair = self.rule(&format!("{key} /[A-Za-z0-9_]+/ {value} {end}"));
                    terms.push(format!("{pair}*"));
                }
                terms.push(self.text(after));
                Ok(self.rule(&terms.join(" ")))
            }
        }
    }

    /// A value that is not quoted, and the tag after it. Of texts by a schema only a list of values is enforced.
    fn value(&mut self, schema: &Value, tool: &Tool, end: &str) -> Result<String, ApiError> {
        let texts: Option<Vec<String>> = schema["enum"]
            .as_array()
            .map(|values| values.iter().filter_map(Value::as_str).map(|text| self.text(text)).collect());
        match texts.filter(|texts| !texts.is_empty()) {
            Some(texts) if is_text(schema) => Ok(format!("({}) {}", texts.join(" | "), self.text(end))),
            _ if is_text(schema) => Ok(self.until(end)),
            _ => {
                let schema = self.schemas.read_part(schema, &tool.parameters, &tool.origin())?;
                let value = self.rule(&format!("%json {schema}"));
                Ok(format!("{value} {}", self.text(end)))
            }
        }
    }

    /// Messages on channels: first reasoning, then calls or an answer.
    fn on_channels(&mut self, answer: Option<String>, tools: Option<&Tools>) -> Result<String, ApiError> {
        use channels::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START};
        let again = self.text(&format!("{START}assistant"));
        let thought = self.text(&format!("{CHANNEL}analysis{MESSAGE}"));
        let end = self.text(END);
        let answer = answer.unwrap_or_else(|| self.rule("/(.|\\n)*/"));
        let last = format!("{} {answer}", self.text(&format!("{CHANNEL}final{MESSAGE}")));
        let rest = match tools {
            None => last,
            Some(tools) => {
                let mut calls = vec![];
                for tool in tools.usable() {
                    let arguments = self.json(&tool.parameters, &tool.origin())?;
                    let head = self.text(&format!("{CHANNEL}commentary to=functions.{} ", tool.name));
                    let kind = self.text(&format!("{CONSTRAIN}json"));
                    calls.push(format!("{head} ({kind} | \"json\") {} {arguments}", self.text(MESSAGE)));
                }
                // The token after a call ends the answer: there is one a turn.
                let call = self.rule(&calls.join(" | "));
                let call = match self.special(CALL).filter(|id| !self.tokenizer.eos_ids().contains(id)) {
                    Some(id) => format!("{call} <[{id}]>"),
                    None => call,
                };
                match tools.choice {
                    Choice::Auto => format!("{last} | {call}"),
                    _ => call,
                }
            }
        };
        Ok(format!("({thought} /(.|\\n)*/ {end} {again})? ({rest})"))
    }
}

/// `text` within a regular expression between slashes.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            c if "\\/|.*+?()[]{}^$&~#-".contains(c) => escaped.extend(['\\', c]),
            c => escaped.push(c),
        }
    }
    escaped
}
