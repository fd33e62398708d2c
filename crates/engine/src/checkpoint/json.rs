//! JSON as Python writes it: `NaN` and `Infinity` are numbers there.
//!
//! They are read as what transformers 5 writes in their place, the object `{"__float__": "Infinity"}`, which no key expects
//! that is not known to be infinite.

use serde::Deserialize;
use serde_json::{Result, Value};

/// Python's words for numbers that JSON has not.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Parses a document.
///
/// # Errors
/// If it is neither JSON nor what Python takes for it.
pub fn from_slice<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).or_else(|error| match standard(bytes) {
        Some(text) => serde_json::from_slice(&text),
        None => Err(error),
    })
}

/// Whether a value stands for infinity.
pub(crate) fn is_infinity(value: &Value) -> bool {
    value.get("__float__").is_some_and(|word| word == "Infinity")
}

/// `bytes` with objects in place of Python's words; `None` if it has none of these.
fn standard(bytes: &[u8]) -> Option<Vec<u8>> {
    let (mut out, mut rest, mut found) = (vec![], bytes, false);
    let (mut in_string, mut escaped) = (false, false);
    while let Some((byte, after)) = rest.split_first() {
        let word = WORDS.into_iter().find(|word| !in_string && rest.starts_with(word.as_bytes()));
        if let Some(word) = word {
            out.extend_from_slice(format!("{{\"__float__\":\"{word}\"}}").as_bytes());
            rest = &rest[word.len()..];
            found = true;
            continue;
        }
        in_string ^= *byte == b'"' && !escaped;
        escaped = in_string && *byte == b'\\' && !escaped;
        out.push(*byte);
        rest = after;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_that_json_has_not() {
        let text = br#"{"a": [0.0, Infinity], "NaN \" Infinity": "-Infinity \\", "b": -Infinity, "c":NaN}"#;
        let word = |word: &str| json!({ "__float__": word });
        let expected = json!({
            "a": [0.0, word("Infinity")],
            "NaN \" Infinity": "-Infinity \\",
            "b": word("-Infinity"),
            "c": word("NaN"),
        });
        let value: Value = from_slice(text).unwrap();
        assert_eq!(value, expected);
        assert!(is_infinity(&value["a"][1]) && !is_infinity(&value["b"]) && !is_infinity(&value["a"][0]));
    }

    #[test]
    fn what_is_wrong_stays_wrong() {
        for text in ["{", "[Infinit]", "[nan]", "\"NaN", "[Infinity", ""] {
            assert!(from_slice::<Value>(text.as_bytes()).is_err(), "{text}");
        }
    }
}
