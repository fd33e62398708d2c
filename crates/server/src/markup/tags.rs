//! Tool calls between tags: how each family writes them, and parsing them.
//!
//! Sources: the chat templates that the models' makers publish. A parameter's value that stands between tags by itself is
//! text if the function's schema says so, otherwise JSON.

use serde_json::{Map, Value};

use super::calls::{Call, Tools};

/// How calls are written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tags {
    /// Around all calls of an answer.
    pub(crate) section: Option<[&'static str; 2]>,
    /// Around each call.
    pub(crate) call: [&'static str; 2],
    /// Between two calls.
    pub(crate) between: &'static str,
    /// What a call says.
    pub(crate) body: Body,
}

/// What stands between the tags of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// `{"name": NAME, "arguments": {…}}`
    Object,
    /// NAME and its arguments as JSON: `[before]NAME[between]{…}[after]`. A name may be followed by `:` and a number.
    NameAndObject { before: &'static str, numbered: bool, between: &'static str, after: &'static str },
    /// NAME and a pair of tags for each parameter: `[before]NAME[between]`, then for each `[key]KEY[value]VALUE[end]`,
    /// then `[after]`.
    Parameters {
        before: &'static str,
        between: &'static str,
        key: &'static str,
        value: &'static str,
        end: &'static str,
        after: &'static str,
    },
}

/// All ways that are known.
pub(crate) const ALL: [Tags; 7] = [
    // Hermes, Qwen2.5, Qwen3.
    Tags { section: None, call: ["<tool_call>", "</tool_call>"], between: "\n", body: Body::Object },
    // Qwen3-Coder, Qwen3.5.
    Tags {
        section: None,
        call: ["<tool_call>", "</tool_call>"],
        between: "\n",
        body: Body::Parameters {
            before: "\n<function=",
            between: ">\n",
            key: "<parameter=",
            value: ">\n",
            end: "\n</parameter>\n",
            after: "</function>\n",
        },
    },
    // GLM-4.5.
    Tags {
        section: None,
        call: ["<tool_call>", "</tool_call>"],
        between: "\n",
        body: Body::Parameters {
            before: "",
            between: "\n",
            key: "<arg_key>",
            value: "</arg_key>\n<arg_value>",
            end: "</arg_value>\n",
            after: "",
        },
    },
    // MiniMax-M2.
    Tags {
        section: Some(["<minimax:tool_call>", "</minimax:tool_call>"]),
        call: ["<invoke name=\"", "</invoke>"],
        between: "\n",
        body: Body::Parameters {
            before: "",
            between: "\">\n",
            key: "<parameter name=\"",
            value: "\">",
            end: "</parameter>\n",
            after: "",
        },
    },
    // DeepSeek-V3, DeepSeek-R1.
    Tags {
        section: Some(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
        call: ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"],
        between: "\n",
        body: Body::NameAndObject {
            before: "function<｜tool▁sep｜>",
            numbered: false,
            between: "\n```json\n",
            after: "\n```",
        },
    },
    // DeepSeek-V3.1.
    Tags {
        section: Some(["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
        call: ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"],
        between: "",
        body: Body::NameAndObject { before: "", numbered: false, between: "<｜tool▁sep｜>", after: "" },
    },
    // Kimi-K2.
    Tags {
        section: Some(["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]),
        call: ["<|tool_call_begin|>", "<|tool_call_end|>"],
        between: "",
        body: Body::NameAndObject {
            before: "functions.",
            numbered: true,
            between: "<|tool_call_argument_begin|>",
            after: "",
        },
    },
];

impl Tags {
    /// The tag that the first call of an answer begins with.
    pub(crate) fn open(&self) -> &'static str {
        self.section.map_or(self.call[0], |section| section[0])
    }

    /// Whether `text` is the beginning of the tag that calls begin with.
    pub(super) fn begins_with(&self, text: &str) -> bool {
        text.len() > 1 && self.open().starts_with(text)
    }

    /// Every piece of markup.
    pub(crate) fn texts(&self) -> Vec<&'static str> {
        let mut texts: Vec<_> = self.section.into_iter().flatten().chain(self.call).collect();
        match self.body {
            Body::Object => {}
            Body::NameAndObject { before, between, after, .. } => texts.extend([before, between, after]),
            Body::Parameters { before, between, key, value, end, after } => {
                texts.extend([before, between, key, value, end, after]);
            }
        }
        texts
    }

    /// How a call looks.
    pub(crate) fn example(&self) -> String {
        let body = match self.body {
            Body::Object => "{\"name\": \"NAME\", \"arguments\": {…}}".into(),
            Body::NameAndObject { before, numbered, between, after } => {
                format!("{before}NAME{}{between}{{…}}{after}", if numbered { ":0" } else { "" })
            }
            Body::Parameters { before, between, key, value, end, after } => {
                format!("{before}NAME{between}{key}PARAMETER{value}VALUE{end}{after}")
            }
        };
        let [open, close] = self.call;
        let [begin, end] = self.section.unwrap_or_default();
        format!("{begin}{open}{body}{close}{end}")
    }

    /// Reads what stands between the tags of a call; `None` if it is none.
    pub(crate) fn parse(&self, text: &str, tools: &Tools) -> Option<Call> {
        match self.body {
            Body::Object => object(text),
            Body::NameAndObject { before, numbered, between, after } => {
                let (name, rest) = after_word(text, before)?.split_once(between.trim())?;
                let arguments = rest.trim().strip_suffix(after.trim()).unwrap_or(rest).trim();
                let name = match (numbered, name.rsplit_once(':')) {
                    (true, Some((name, number))) if number.trim().bytes().all(|b| b.is_ascii_digit()) => name,
                    _ => name,
                };
                let _: Value = serde_json::from_str(arguments).ok()?;
                Some(Call { name: is_name(name.trim())?.into(), arguments: arguments.into(), complete: true })
            }
            Body::Parameters { before, between, key, value, end, .. } => {
                let rest = after_word(text, before)?;
                let mark = between.trim();
                let at = match mark {
                    // The name ends where its line does, or where the first parameter begins.
                    "" => rest.find(['\n', '<']).unwrap_or(rest.len()),
                    mark => rest.find(mark)?,
                };
                let (name, mut rest) = (is_name(rest[..at].trim())?, &rest[at + mark.len()..]);
                let tool = tools.tools.iter().find(|tool| tool.name == name);
                let mut arguments = Map::new();
                while let Some((_, pair)) = rest.split_once(key) {
                    let (middle, close) = (value.trim_end_matches('\n'), end.trim());
                    let (name, written) = split_loosely(pair, middle)?;
                    let (written, others) = written.split_once(close)?;
                    // Only where the form itself begins a new line.
                    let written = if value.ends_with('\n') {
                        written.strip_prefix('\n').unwrap_or(written)
                    } else {
                        written
                    };
                    let written = if end.starts_with('\n') {
                        written.strip_suffix('\n').unwrap_or(written)
                    } else {
                        written
                    };
                    let name = name.trim();
                    let schema = tool.and_then(|tool| tool.property(name));
                    arguments.insert(name.into(), typed(written, schema));
                    rest = others;
                }
                let arguments = Value::Object(arguments).to_string();
                Some(Call { name: name.into(), arguments, complete: true })
            }
        }
    }
}

/// What follows `word` at the beginning of `text`; white space does not matter.
pub(super) fn after_word<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.trim_start().strip_prefix(word.trim_start())
}

/// Splits at `mark`, between whose lines there may be white space or none.
fn split_loosely<'a>(text: &'a str, mark: &str) -> Option<(&'a str, &'a str)> {
    let mut lines = mark.lines();
    let (before, mut rest) = text.split_once(lines.next()?)?;
    for line in lines {
        rest = after_word(rest, line)?;
    }
    Some((before, rest))
}

pub(super) fn is_name(name: &str) -> Option<&str> {
    (!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))).then_some(name)
}

fn object(text: &str) -> Option<Call> {
    let call: Value = serde_json::from_str(text.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    Some(Call { name, arguments, complete: true })
}

/// A value that was written without quotes: text if `schema` takes nothing else, or if it is no JSON of a type that it
/// takes.
pub(super) fn typed(written: &str, schema: Option<&Value>) -> Value {
    let text = || Value::String(written.to_owned());
    if schema.is_some_and(is_text) {
        return text();
    }
    // Some templates show what was said before as Python would.
    let json = match written.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match serde_json::from_str::<Value>(json) {
        Ok(value) if takes(schema, &value) => value,
        _ => text(),
    }
}

/// Whether a value by this schema is a text and nothing else.
pub(crate) fn is_text(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(_) => false,
        None => schema
            .get("enum")
            .and_then(Value::as_array)
            .is_some_and(|values| values.iter().all(Value::is_string)),
    }
}

/// Whether the types of `schema` include that of `value`.
fn takes(schema: Option<&Value>, value: &Value) -> bool {
    let Some(kind) = schema.and_then(|schema| schema.get("type")) else { return true };
    let own: &[&str] = match value {
        Value::Null => &["null"],
        Value::Bool(_) => &["boolean"],
        Value::Number(number) if number.is_f64() => &["number"],
        Value::Number(_) => &["number", "integer"],
        Value::String(_) => &["string"],
        Value::Array(_) => &["array"],
        Value::Object(_) => &["object"],
    };
    match kind {
        Value::String(kind) => own.contains(&kind.as_str()),
        Value::Array(kinds) => kinds.iter().any(|kind| kind.as_str().is_some_and(|kind| own.contains(&kind))),
        _ => true,
    }
}
