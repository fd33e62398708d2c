//! Python's meaning of string methods and of printed values, where minijinja's differs or is missing.

use minijinja::value::{Kwargs, StringInput, Tuple, ValueIter, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Nesting of values that is printed; Python's own limit is near 1000.
const MAX_DEPTH: usize = 500;

/// `str.isspace()` of one character: Unicode white space and the four ASCII separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1C}'..='\u{1F}')
}

/// `repr(float)`: shortest digits that read back the same, in exponent form outside [1e-4, 1e16).
pub(super) fn float_repr(value: f64) -> String {
    let shortest = format!("{value:?}");
    match shortest.split_once('e') {
        None => shortest,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// Prints a value as Python's `str()` does.
pub(super) fn print(output: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => output.write_str(text),
        None => output.write_str(&string(value)?),
    };
    written.map_err(|_| Error::from(ErrorKind::WriteFailure))
}

/// The `string` filter: Python's `str()`.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => {
            let mut output = String::new();
            repr(value, 0, &mut output)?;
            Ok(output)
        }
    }
}

/// Refuses values that are nested deeper than the stack bears.
pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    match depth {
        0..=MAX_DEPTH => Ok(()),
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a value is nested deeper than {MAX_DEPTH} levels"),
        )),
    }
}

/// Python's `repr()`, which is `str()` for whatever is no text.
fn repr(value: &Value, depth: usize, output: &mut String) -> Result<(), Error> {
    check_depth(depth)?;
    let list = |items: &mut dyn Iterator<Item = Value>, output: &mut String| {
        for (index, item) in items.enumerate() {
            output.push_str(if index > 0 { ", " } else { "" });
            repr(&item, depth + 1, output)?;
        }
        Ok::<(), Error>(())
    };
    match (value.kind(), value.try_iter()) {
        (ValueKind::String, _) => repr_text(value.as_str().unwrap_or_default(), output),
        (ValueKind::Number, _) if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) if number.is_finite() => output.push_str(&float_repr(number)),
            _ => output.push_str(&value.to_string().to_lowercase()),
        },
        (ValueKind::Seq, Ok(mut items)) if value.is_tuple() => {
            output.push('(');
            list(&mut items, output)?;
            output.push_str(if value.len() == Some(1) { ",)" } else { ")" });
        }
        (ValueKind::Seq, Ok(mut items)) => {
            output.push('[');
            list(&mut items, output)?;
            output.push(']');
        }
        (ValueKind::Map, Ok(keys)) => {
            output.push('{');
            for (index, key) in keys.enumerate() {
                output.push_str(if index > 0 { ", " } else { "" });
                repr(&key, depth + 1, output)?;
                output.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, output)?;
            }
            output.push('}');
        }
        _ => output.push_str(&value.to_string()),
    }
    Ok(())
}

/// `repr(str)`: in single quotes unless that means more escapes, unprintable characters by number.
fn repr_text(text: &str, output: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    output.push(quote);
    for c in text.chars() {
        match c {
            '\n' => output.push_str("\\n"),
            '\r' => output.push_str("\\r"),
            '\t' => output.push_str("\\t"),
            '\\' => output.push_str("\\\\"),
            c if c == quote => output.extend(['\\', c]),
            c if is_printable(c) => output.push(c),
            c => output.push_str(&match u32::from(c) {
                code @ 0..=0xFF => format!("\\x{code:02x}"),
                code @ 0x100..=0xFFFF => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    output.push(quote);
}

/// `str.isprintable()` of one character, but for characters that Unicode has not assigned.
fn is_printable(c: char) -> bool {
    let is_format = matches!(
        u32::from(c),
        0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x180E | 0x200B..=0x200F | 0x202A..=0x202E | 0x2060..=0x206F
            | 0xE000..=0xF8FF | 0xFEFF | 0xFFF9..=0xFFFB | 0xE0001 | 0xE0020..=0xE007F | 0xF0000..=0x10FFFF
    );
    c == ' ' || !(c.is_control() || c.is_whitespace() || is_format)
}

/// The `trim` filter: `str.strip()` of the printed value.
pub(super) fn trim(value: &Value, chars: Option<&str>) -> Result<String, Error> {
    Ok(strip(&string(value)?, chars, true, true).to_owned())
}

/// The `sequence` test: whatever has a length and items, so texts and mappings too.
pub(super) fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

/// The `iterable` test: texts and mappings too, but not none.
pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// The `callable` test.
pub(super) fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

/// The `length` filter, by which something undefined is empty.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value
        .len()
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("{} has no length", value.kind())))
}

/// The `first` filter, by which something undefined is empty.
pub(super) fn first(value: &Value) -> Result<Value, Error> {
    Ok(items_of(value)?.next().unwrap_or_default())
}

/// The `last` filter, by which something undefined is empty.
pub(super) fn last(value: &Value) -> Result<Value, Error> {
    Ok(items_of(value)?.last().unwrap_or_default())
}

/// The `list` filter.
pub(super) fn list(value: &Value) -> Result<Vec<Value>, Error> {
    Ok(items_of(value)?.collect())
}

fn items_of(value: &Value) -> Result<ValueIter, Error> {
    if value.is_none() {
        Err(Error::new(ErrorKind::InvalidOperation, "none is not iterable"))
    } else {
        value.try_iter()
    }
}

/// The `int` filter: texts are read in `base`, and `default` stands for what is no number.
pub(super) fn int(value: &Value, default: Option<Value>, base: Option<u32>) -> Value {
    let default = default.unwrap_or_else(|| Value::from(0));
    match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if number.abs() < 9e18 => Value::from(number as i64),
            _ => default,
        },
        ValueKind::String => {
            let text = strip(value.as_str().unwrap_or_default(), None, true, true).replace('_', "");
            let base = base.filter(|base| (2..=36).contains(base)).unwrap_or(10);
            let digits = match base {
                16 => text.strip_prefix("0x").unwrap_or(&text),
                8 => text.strip_prefix("0o").unwrap_or(&text),
                2 => text.strip_prefix("0b").unwrap_or(&text),
                _ => &text,
            };
            match (i64::from_str_radix(digits, base), text.parse::<f64>()) {
                (Ok(number), _) => Value::from(number),
                (Err(_), Ok(number)) if number.abs() < 9e18 => Value::from(number as i64),
                _ => default,
            }
        }
        _ => default,
    }
}

/// The `float` filter: `default` stands for what is no number.
pub(super) fn float(value: &Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => strip(text, None, true, true).parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    number.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0))
}

fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let is_stripped = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if start { text.trim_start_matches(is_stripped) } else { text };
    if end { text.trim_end_matches(is_stripped) } else { text }
}

/// Methods that minijinja does not know. Those not here either are looked up in minijinja-contrib.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)?
    {
        return Ok(result);
    }
    if let ("copy", ValueKind::Map | ValueKind::Seq) = (method, value.kind()) {
        let () = from_args(args)?;
        return Ok(value.clone());
    }
    if let ("index", ValueKind::Seq) = (method, value.kind()) {
        let (wanted,): (&Value,) = from_args(args)?;
        return match value.try_iter()?.position(|item| item == *wanted) {
            Some(at) => Ok(Value::from(at)),
            None => Err(Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in the list"))),
        };
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// What a string's method returns, if it has one of this name that is not the template engine's own.
fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    for methods in [parts_method, search_method, padding_method, case_method] {
        if let Some(value) = methods(text, method, args)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// As [`string_method`], of methods that return parts of a string.
fn parts_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let (separator, limit, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.or(named.get("sep")?);
            let limit = limit.or(named.get("maxsplit")?);
            named.assert_all_used()?;
            let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
            Value::from(split(text, separator, limit, method == "rsplit")?)
        }
        "splitlines" => {
            let (keep_ends, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keep_ends = keep_ends.or(named.get("keepends")?);
            named.assert_all_used()?;
            Value::from(split_lines(text, keep_ends.unwrap_or(false)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let found =
                if method == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match (found, method) {
                (Some((head, tail)), _) => [head, separator, tail],
                (None, "partition") => [text, "", ""],
                (None, _) => ["", "", text],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        _ => return Ok(None),
    }))
}

/// As [`string_method`], of methods that look for something.
fn search_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "find" | "rfind" | "index" | "rindex" => {
            let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
            let (skipped, text) = section(text, start, end);
            let found = if method.starts_with('r') { text.rfind(part) } else { text.find(part) };
            match found.map(|at| skipped + text[..at].chars().count()) {
                Some(at) => Value::from(at),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
            }
        }
        "startswith" | "endswith" => {
            let (parts, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            let (_, text) = section(text, start, end);
            let matches = |part: &Value| match part.as_str() {
                Some(part) if method == "startswith" => Ok(text.starts_with(part)),
                Some(part) => Ok(text.ends_with(part)),
                None => {
                    let detail =
                        format!("{method}: expected a string or a tuple of strings, got {}", part.kind());
                    Err(Error::new(ErrorKind::InvalidOperation, detail))
                }
            };
            let mut any = false;
            if parts.is_tuple() {
                for part in parts.try_iter()? {
                    any |= matches(&part)?;
                }
            } else {
                any = matches(parts)?
            }
            Value::from(any)
        }
        "isspace" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(is_space))
        }
        "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(|c| c.is_ascii_digit()))
        }
        _ => return Ok(None),
    }))
}

/// As [`string_method`], of methods that add characters.
fn padding_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let fill = fill.unwrap_or(' ');
            let missing = padding(text, width)?;
            let left = match method {
                "ljust" => 0,
                "rjust" => missing,
                // Python puts the odd one left of texts of even length, right of the others.
                _ => missing / 2 + (missing & width & 1),
            };
            let pad = |count: usize| std::iter::repeat_n(fill, count);
            Value::from(pad(left).chain(text.chars()).chain(pad(missing - left)).collect::<String>())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let sign = usize::from(text.starts_with(['+', '-']));
            let zeros = "0".repeat(padding(text, width)?);
            Value::from(format!("{}{zeros}{}", &text[..sign], &text[sign..]))
        }
        _ => return Ok(None),
    }))
}

/// As [`string_method`], of methods that change letters.
fn case_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "swapcase" => {
            let () = from_args(args)?;
            let swap = |c: char| {
                if c.is_uppercase() {
                    c.to_lowercase().collect::<String>()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "title" => {
            let () = from_args(args)?;
            let mut in_word = false;
            let title = |c: char| {
                let cased =
                    if in_word { c.to_lowercase().collect::<String>() } else { c.to_uppercase().collect() };
                in_word = c.is_alphabetic();
                cased
            };
            Value::from(text.chars().map(title).collect::<String>())
        }
        "capitalize" => {
            let () = from_args(args)?;
            let mut chars = text.chars();
            let first: String = chars.next().into_iter().flat_map(char::to_uppercase).collect();
            Value::from(first + &chars.as_str().to_lowercase())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase().replace('ß', "ss"))
        }
        _ => return Ok(None),
    }))
}

/// The characters of `text` from `start` to `end`, which count from the end if negative, and how many are before.
fn section(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    let count = text.chars().count();
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at.min(count),
        Err(_) => count.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX)),
    };
    let (start, end) = (start.map_or(0, place), end.map_or(count, place));
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    (start, &text[byte(start)..byte(end.max(start))])
}

/// Characters missing to `width`, which a template must not make huge.
fn padding(text: &str, width: usize) -> Result<usize, Error> {
    match width {
        0..=100_000 => Ok(width.saturating_sub(text.chars().count())),
        _ => Err(Error::new(ErrorKind::InvalidOperation, format!("a text of width {width} is too large"))),
    }
}

/// `str.split` and `str.rsplit`: at white space without a separator, then dropping empty parts.
fn split(text: &str, separator: Option<&str>, limit: usize, from_right: bool) -> Result<Vec<String>, Error> {
    let mut parts: Vec<String> = Vec::new();
    match (separator, from_right) {
        (Some(""), _) => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        (Some(separator), false) => {
            parts.extend(text.splitn(limit.saturating_add(1), separator).map(str::to_owned));
        }
        (Some(separator), true) => {
            parts.extend(text.rsplitn(limit.saturating_add(1), separator).map(str::to_owned));
            parts.reverse();
        }
        (None, false) => {
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                let end = rest.find(is_space).filter(|_| parts.len() < limit);
                let (part, tail) = rest.split_at(end.unwrap_or(rest.len()));
                parts.push(part.to_owned());
                rest = tail.trim_start_matches(is_space);
            }
        }
        (None, true) => {
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                let begin = rest
                    .char_indices()
                    .rev()
                    .find(|(_, c)| is_space(*c))
                    .map_or(0, |(at, c)| at + c.len_utf8());
                let begin = if parts.len() < limit { begin } else { 0 };
                parts.push(rest[begin..].to_owned());
                rest = rest[..begin].trim_end_matches(is_space);
            }
            parts.reverse();
        }
    }
    Ok(parts)
}

/// `str.splitlines`, which knows more line ends than `\n`.
fn split_lines(text: &str, keep_ends: bool) -> Vec<String> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{B}' | '\u{C}' | '\u{1C}'..='\u{1E}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, end) = match rest.find(is_end) {
            None => (rest.len(), rest.len()),
            Some(at) if rest[at..].starts_with("\r\n") => (at, at + 2),
            Some(at) => (at, at + rest[at..].chars().next().map_or(0, char::len_utf8)),
        };
        lines.push(rest[..if keep_ends { end } else { line }].to_owned());
        rest = &rest[end..];
    }
    lines
}

/// The `title` filter of Jinja: words begin after white space or one of `-({[<`.
pub(super) fn title(text: StringInput) -> String {
    let mut in_word = false;
    let title = |c: char| {
        let cased: String = if in_word { c.to_lowercase().collect() } else { c.to_uppercase().collect() };
        in_word = !(is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<'));
        cased
    };
    text.as_str().chars().map(title).collect()
}
