//! Finding special tokens in text the way llama.cpp does: longer tokens first, anywhere in the text.

use std::cmp::Reverse;

/// A stretch of text between special tokens, or a special token.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stretch<'a> {
    /// Ordinary text, not empty.
    Text(&'a str),
    /// A special token that stood in the text.
    Token(u32),
}

/// Tokens that are cut out of the text before anything else.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// By first byte.
    by_first_byte: Vec<Vec<Special>>,
}

#[derive(Debug)]
struct Special {
    text: Box<str>,
    id: u32,
    /// Control and unknown tokens are ordinary text when special tokens are not parsed; user-defined ones never are.
    only_when_parsed: bool,
}

impl SpecialTokens {
    /// From `(text, id, only_when_parsed)` of every special token.
    pub(super) fn new(tokens: impl IntoIterator<Item = (String, u32, bool)>) -> Self {
        let mut by_first_byte: Vec<Vec<Special>> = (0..256).map(|_| Vec::new()).collect();
        for (text, id, only_when_parsed) in tokens {
            if let Some(&first) = text.as_bytes().first() {
                by_first_byte[usize::from(first)].push(Special { text: text.into(), id, only_when_parsed });
            }
        }
        Self { by_first_byte }
    }

    /// Cuts `text` at its special tokens. A longer token wins over a shorter one that overlaps it, even if the shorter
    /// begins earlier; among equally long ones the lower id wins, then the earlier place.
    pub(super) fn split<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Stretch<'a>> {
        let mut found: Vec<(usize, &Special)> = Vec::new();
        for (start, byte) in text.bytes().enumerate() {
            for special in &self.by_first_byte[usize::from(byte)] {
                if (parse_special || !special.only_when_parsed)
                    && text.as_bytes()[start..].starts_with(special.text.as_bytes())
                {
                    found.push((start, special));
                }
            }
        }
        found.sort_unstable_by_key(|&(start, special)| (Reverse(special.text.len()), special.id, start));

        let mut taken: std::collections::BTreeMap<usize, &Special> = std::collections::BTreeMap::new();
        for (start, special) in found {
            let end = start + special.text.len();
            let free_before = taken.range(..end).next_back().is_none_or(|(at, t)| at + t.text.len() <= start);
            if free_before {
                taken.insert(start, special);
            }
        }

        let mut parts = Vec::with_capacity(2 * taken.len() + 1);
        let mut at = 0;
        for (start, special) in taken {
            if at < start {
                parts.push(Stretch::Text(&text[at..start]));
            }
            parts.push(Stretch::Token(special.id));
            at = start + special.text.len();
        }
        if at < text.len() {
            parts.push(Stretch::Text(&text[at..]));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, parse_special: bool, expected: &[Stretch<'_>]) {
        let tokens =
            [("<a>", 1, true), ("<a><b>", 2, true), ("ab", 3, false), ("bcd", 4, false), ("  ", 5, false)];
        let tokens = SpecialTokens::new(tokens.map(|(text, id, parsed)| (text.to_owned(), id, parsed)));
        assert_eq!(tokens.split(text, parse_special), expected, "{text:?}");
    }

    #[test]
    fn longer_tokens_win() {
        use Stretch::{Text, Token};
        check("", true, &[]);
        check("x", true, &[Text("x")]);
        check("<a>", true, &[Token(1)]);
        check("<a>", false, &[Text("<a>")]);
        check("<a><b><a>é", true, &[Token(2), Token(1), Text("é")]);
        check("abcd", true, &[Text("a"), Token(4)]);
        check("abab", false, &[Token(3), Token(3)]);
        check("     x", true, &[Token(5), Token(5), Text(" x")]);
    }
}
