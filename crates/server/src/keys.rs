//! [`KeyWatch`]: keeps an answer in JSON from naming the same property of an object twice.
//!
//! A grammar cannot remember names that its schema does not list. This reads along, and tells which tokens would end a
//! name that the object has already, and which leave open whether they do. Text that is no JSON makes it start afresh.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

/// Names that an object has, as [`canonical`] writes them.
type Names = Arc<BTreeSet<Vec<u8>>>;

/// An object or a list that has begun.
#[derive(Debug, Clone)]
enum Level {
    Object(Names),
    List,
}

/// Where in an object a text is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// A name comes next, or is being written.
    name: bool,
    in_text: bool,
    escape: bool,
}

/// Reads JSON as it is written.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeyWatch {
    levels: Vec<Level>,
    place: Place,
    /// The name that is being written.
    name: Vec<u8>,
}

/// What becomes of an object's names with a token.
#[derive(Debug)]
pub(crate) enum Outlook {
    /// None is repeated, or can be before there is another new one.
    New,
    /// A name comes next, or is begun, that the object may have already.
    Open(KeyWatch),
    /// A name is repeated.
    Repeats,
}

/// How far the text is, to tell apart those that have the same beginning.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position(usize, Place, Vec<u8>);

impl KeyWatch {
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Says whether a name was repeated.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> bool {
        bytes.iter().filter(|byte| self.step(**byte)).count() > 0
    }

    /// Says whether this ends a name that the object has.
    fn step(&mut self, byte: u8) -> bool {
        let place = &mut self.place;
        if place.in_text {
            match byte {
                _ if place.escape => place.escape = false,
                b'\\' => place.escape = true,
                b'"' => {
                    place.in_text = false;
                    if let (true, Some(Level::Object(names))) = (place.name, self.levels.last_mut()) {
                        place.name = false;
                        return !Arc::make_mut(names).insert(canonical(&std::mem::take(&mut self.name)));
                    }
                    return false;
                }
                0..0x20 => {
                    self.reset();
                    return false;
                }
                _ => {}
            }
            if place.name {
                self.name.push(byte);
            }
            return false;
        }
        match byte {
            b'{' => {
                self.levels.push(Level::Object(Names::default()));
                place.name = true;
            }
            b'[' => {
                self.levels.push(Level::List);
                place.name = false;
            }
            b'}' | b']' => {
                self.levels.pop();
                place.name = false;
            }
            b',' => place.name = matches!(self.levels.last(), Some(Level::Object(_))),
            b':' => place.name = false,
            b'"' => {
                place.in_text = !self.levels.is_empty();
                self.name.clear();
            }
            b' ' | b'\n' | b'\r' | b'\t' | b'0'..=b'9' | b'a'..=b'z' | b'+' | b'-' | b'.' | b'E' => {}
            _ => self.reset(),
        }
        false
    }

    /// The names of an object in which a next token may begin or end a name.
    fn names(&self) -> Option<&Names> {
        match self.levels.last() {
            Some(Level::Object(names)) if !names.is_empty() => Some(names),
            _ => None,
        }
    }

    /// Whether a name may end soon that could be there already.
    pub(crate) fn is_watching(&self) -> bool {
        self.place.name && self.names().is_some()
    }

    /// Whether `bytes` would end a name that the object has already.
    pub(crate) fn repeats(&self, bytes: &[u8]) -> bool {
        self.is_watching() && bytes.contains(&b'"') && self.clone().read(bytes)
    }

    /// What becomes of the names of objects with a token of these bytes.
    pub(crate) fn outlook(&self, bytes: &[u8]) -> Outlook {
        let has = |byte| bytes.contains(&byte);
        let Place { name, in_text, .. } = self.place;
        // Most tokens that may come next need not be read: texts have many.
        let matters = match (name, in_text) {
            (true, true) => has(b'"') || self.may_become_one_of_its(&[&self.name, bytes].concat()),
            (true, false) => true,
            (false, true) => has(b'"') && has(b','),
            (false, false) => has(b','),
        };
        if !matters {
            return Outlook::New;
        }
        let mut next = self.clone();
        if next.read(bytes) {
            return Outlook::Repeats;
        }
        let open = next.is_watching() && (!next.place.in_text || next.may_become_one_of_its(&next.name));
        if open { Outlook::Open(next) } else { Outlook::New }
    }

    /// Whether the next token may matter to names at all.
    pub(crate) fn may_repeat(&self) -> bool {
        match (self.place.name, self.place.in_text) {
            // A character may be escaped in several ways.
            (true, true) => self.name.contains(&b'\\') || self.may_become_one_of_its(&self.name),
            (true, false) => self.names().is_some(),
            (false, _) => {
                self.levels.iter().any(|level| matches!(level, Level::Object(names) if !names.is_empty()))
            }
        }
    }

    fn may_become_one_of_its(&self, begun: &[u8]) -> bool {
        self.names().is_some_and(|names| {
            let next = names.range::<[u8], _>((Bound::Included(begun), Bound::Unbounded)).next();
            next.is_some_and(|name| name.starts_with(begun))
        })
    }

    pub(crate) fn position(&self) -> Position {
        Position(self.levels.len(), self.place, self.name.clone())
    }
}

/// A name with the escapes that JSON needs.
fn canonical(name: &[u8]) -> Vec<u8> {
    let read = serde_json::from_slice::<String>(&[b"\"", name, b"\""].concat());
    let written = read.ok().and_then(|name| serde_json::to_vec(&name).ok());
    written.map_or_else(|| name.to_vec(), |quoted| quoted[1..quoted.len() - 1].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_not_repeated_within_an_object() {
        for (text, token, repeats) in [
            (r#"{"a": 1, "a"#, "\"", true),
            (r#"{"a": 1, "a"#, "b\"", false),
            (r#"{"a": 1, "#, "\"a\": ", true),
            (r#"{"a": 1,"#, " \"a\"", true),
            (r#"{"ab": 1, "a"#, "b\": 2", true),
            (r#"{"ab": 1, "a"#, "\": 2", false),
            (r#"{"a": {"a": 1, "b": [{"a": 2}], "b"#, "\"", true),
            (r#"{"a": {"b": 1}, "b"#, "\"", false),
            (r#"{"a": {"b": 1}, "a"#, "\"", true),
            (r#"{"a\"": 1, "a\"#, "\"", false),
            (r#"{"a\"": 1, "a\""#, "\"", true),
            (r#"{"a": "x, \"a"#, "\"", false),
            (r#"{"a": "a"#, "\"", false),
            (r#"{"\t": 1, "\u0009"#, "\"", true),
            (r#"{"a": 1, "#, "\"b\": 2, \"a\"", true),
            ("{\"a\": 1} \"a", "\"", false),
            // What came before was no JSON.
            ("Let {\"a\" be <b> {\"c\": 1, \"a", "\"", false),
            ("so {\"a\": \"\n{\"a", "\"", false),
        ] {
            let mut watch = KeyWatch::default();
            watch.read(text.as_bytes());
            assert_eq!(watch.may_repeat() && watch.repeats(token.as_bytes()), repeats, "{text} {token}");
        }
    }

    #[test]
    fn it_is_open_as_long_as_a_name_may_become_one_that_is_there() {
        for (text, token, expected) in [
            (r#"{"ab": 1"#, ", ", "open"),
            (r#"{"ab": 1"#, ", \"", "open"),
            (r#"{"ab": 1"#, ", \"a", "open"),
            (r#"{"ab": 1"#, ", \"b", "new"),
            (r#"{"ab": 1"#, ", \"ab\"", "repeats"),
            (r#"{"ab": 1"#, ", \"a\"", "new"),
            (r#"{"ab": 1"#, "}", "new"),
            (r#"{"ab": 1"#, "2", "new"),
            (r#"{"ab": "x"#, "\", \"", "open"),
            (r#"{"ab": "x"#, ", ", "new"),
            (r#"{"ab": "#, "[1, ", "new"),
            (r#"{"ab": 1, "a"#, "b", "open"),
            (r#"{"ab": 1, "a"#, "bc", "new"),
            (r#"{"ab": 1, "cd": {"x": 1"#, "}, ", "open"),
            (r#"{"ab": 1, "cd": "#, "{", "new"),
        ] {
            let mut watch = KeyWatch::default();
            watch.read(text.as_bytes());
            let outlook = match watch.outlook(token.as_bytes()) {
                Outlook::New => "new",
                Outlook::Open(_) => "open",
                Outlook::Repeats => "repeats",
            };
            assert_eq!(outlook, expected, "{text} {token}");
        }
    }
}
