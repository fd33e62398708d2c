//! [`KeyWatch`]: keeps an answer in JSON from naming the same property of an object twice.
//!
//! A grammar cannot remember names that its schema does not list. This reads along, and tells which tokens would end a
//! name that the object has already. Text that is no JSON makes it start afresh. It does not look ahead: a name that has
//! been begun and, by its schema, can only become one that is there is let through.

use std::collections::HashSet;

/// An object or a list that has begun.
#[derive(Debug, Clone)]
enum Level {
    Object(HashSet<Vec<u8>>),
    List,
}

/// Where in an object a text is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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

impl KeyWatch {
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.step(*byte);
        }
    }

    fn step(&mut self, byte: u8) {
        let place = &mut self.place;
        if place.in_text {
            match byte {
                _ if place.escape => place.escape = false,
                b'\\' => place.escape = true,
                b'"' => {
                    place.in_text = false;
                    if let (true, Some(Level::Object(names))) = (place.name, self.levels.last_mut()) {
                        names.insert(std::mem::take(&mut self.name));
                    }
                    return;
                }
                0..0x20 => return self.reset(),
                _ => {}
            }
            if place.name {
                self.name.push(byte);
            }
            return;
        }
        match byte {
            b'{' => {
                self.levels.push(Level::Object(HashSet::new()));
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
    }

    /// Whether a name may end soon that could be there already.
    pub(crate) fn is_watching(&self) -> bool {
        self.place.name && matches!(self.levels.last(), Some(Level::Object(names)) if !names.is_empty())
    }

    /// Whether `bytes` would end a name that the object has already.
    pub(crate) fn repeats(&self, bytes: &[u8]) -> bool {
        let Some(Level::Object(names)) = self.levels.last() else { return false };
        let Place { name, mut in_text, mut escape } = self.place;
        let mut written = self.name.clone();
        for byte in bytes {
            match byte {
                _ if escape => escape = false,
                b'\\' if in_text => escape = true,
                b'"' if in_text => return name && names.contains(&written),
                b'"' => {
                    in_text = true;
                    written.clear();
                    continue;
                }
                // The object ends, or a value begins.
                b'}' | b':' if !in_text => return false,
                _ => {}
            }
            if in_text {
                written.push(*byte);
            }
        }
        false
    }
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
            ("{\"a\": 1} \"a", "\"", false),
            // What came before was no JSON.
            ("Let {\"a\" be <b> {\"c\": 1, \"a", "\"", false),
            ("so {\"a\": \"\n{\"a", "\"", false),
        ] {
            let mut watch = KeyWatch::default();
            watch.read(text.as_bytes());
            assert_eq!(watch.is_watching() && watch.repeats(token.as_bytes()), repeats, "{text} {token}");
        }
    }
}
