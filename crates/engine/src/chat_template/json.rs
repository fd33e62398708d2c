//! The `tojson` filter of transformers' templates: Python's `json.dumps` with its options.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python::{check_depth, float_repr};

/// Options of `json.dumps` that templates may set.
struct Style {
    ensure_ascii: bool,
    /// Text that one level is indented by; everything is on one line without it.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    /// Bytes that the text may have.
    most: usize,
}

/// `value|tojson(ensure_ascii=…, indent=…, separators=…, sort_keys=…)`, a text of at most `most` bytes.
pub(super) fn tojson(
    value: &Value,
    arguments: Rest<Value>,
    kwargs: Kwargs,
    most: usize,
) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if arguments.len() > names.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let [ensure_ascii, indent, separators, sort_keys] = {
        let mut values = names.map(|name| kwargs.get::<Option<Value>>(name));
        for (place, argument) in values.iter_mut().zip(arguments.iter()) {
            *place = Ok(Some(argument.clone()));
        }
        let [ensure_ascii, indent, separators, sort_keys] = values;
        [ensure_ascii?, indent?, separators?, sort_keys?].map(|value| value.filter(|value| !value.is_none()))
    };
    kwargs.assert_all_used()?;
    let indent = match indent {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_i64()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) => " ".repeat(usize::try_from(width.min(64)).unwrap_or(0)),
            (None, None) => {
                return Err(invalid(format!("indent: expected a number or a string, got {indent}")));
            }
        }),
    };
    let separators = match separators {
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => Some((item.to_string(), key.to_string())),
                _ => return Err(invalid(format!("separators: expected two strings, got {}", pair.len()))),
            }
        }
        None => None,
    };
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (default_item.to_owned(), ": ".to_owned()));
    let style = Style {
        ensure_ascii: ensure_ascii.is_some_and(|value| value.is_true()),
        indent,
        item_separator,
        key_separator,
        sort_keys: sort_keys.is_some_and(|value| value.is_true()),
        most,
    };
    let mut output = String::new();
    style.value(value, 0, &mut output)?;
    Ok(Value::from(output))
}

fn invalid(detail: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail)
}

impl Style {
    fn value(&self, value: &Value, depth: usize, output: &mut String) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.container(items.collect(), '[', ']', depth, output)
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((Some(key), item));
                }
                if self.sort_keys {
                    items.sort_by(|(left, _), (right, _)| left.cmp(right));
                }
                self.container(items, '{', '}', depth, output)
            }
            ValueKind::String => {
                self.string(value.as_str().unwrap_or_default(), output);
                Ok(())
            }
            _ => {
                output.push_str(&scalar(value)?);
                Ok(())
            }
        }
    }

    fn container(
        &self,
        items: Vec<(Option<Value>, Value)>,
        open: char,
        close: char,
        depth: usize,
        output: &mut String,
    ) -> Result<(), Error> {
        output.push(open);
        let is_empty = items.is_empty();
        for (index, (key, item)) in items.into_iter().enumerate() {
            if index > 0 {
                output.push_str(&self.item_separator);
            }
            self.line(depth + 1, output)?;
            if let Some(key) = key {
                match key.as_str() {
                    Some(key) => self.string(key, output),
                    None => self.string(&scalar(&key)?, output),
                }
                output.push_str(&self.key_separator);
            }
            self.value(&item, depth + 1, output)?;
        }
        if !is_empty {
            self.line(depth, output)?;
        }
        output.push(close);
        Ok(())
    }

    /// Begins an item, on a line of its own if there is an indent.
    fn line(&self, depth: usize, output: &mut String) -> Result<(), Error> {
        let indent = self.indent.as_deref().unwrap_or_default();
        if output.len().saturating_add(indent.len().saturating_mul(depth)) > self.most {
            return Err(invalid(format!("tojson: the text takes more than {} bytes", self.most)));
        }
        if self.indent.is_some() {
            output.push('\n');
            output.extend(std::iter::repeat_n(indent, depth));
        }
        Ok(())
    }

    fn string(&self, text: &str, output: &mut String) {
        output.push('"');
        for c in text.chars() {
            match c {
                '"' => output.push_str("\\\""),
                '\\' => output.push_str("\\\\"),
                '\n' => output.push_str("\\n"),
                '\r' => output.push_str("\\r"),
                '\t' => output.push_str("\\t"),
                '\u{8}' => output.push_str("\\b"),
                '\u{C}' => output.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a String cannot fail.
                        let _ = write!(output, "\\u{unit:04x}");
                    }
                }
                c => output.push(c),
            }
        }
        output.push('"');
    }
}

/// A number, boolean or null.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if value.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            Ok(match number {
                n if n.is_nan() => "NaN".to_owned(),
                n if n.is_infinite() => if n > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
                n => float_repr(n),
            })
        }
        kind => Err(invalid(format!("a value of type {kind} is not JSON serializable"))),
    }
}
